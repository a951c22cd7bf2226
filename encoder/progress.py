"""Progress on standard error: a bar on a terminal and in a notebook, elsewhere, as in the log of a job, a line a minute.

Long work counts its steps here, so this is also where it can be stopped between two of them, see `interruptible`.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Protocol

LINES_EVERY = 60.0
"""Seconds between two lines where there is no bar; shorter work prints nothing."""


class Advance(Protocol):
    """Function that moves the progress on."""

    def __call__(self, steps: int, /) -> None:
        """Count steps as done."""


class AdvanceWithNews(Advance, Protocol):
    """Function that moves the progress on and shows values beside it."""

    def __call__(self, steps: int, news: str = "", /) -> None:
        """Count steps as done, and show a text until the next one."""


class WorkStoppedError(Exception):
    """Work within `interruptible` was stopped between two of its steps."""


_STOP_REQUESTED: ContextVar[Callable[[], bool] | None] = ContextVar("stop_requested", default=None)


@contextmanager
def interruptible(stop_requested: Callable[[], bool]) -> Iterator[None]:
    """Let the work in the block be stopped between two of its steps, such as batches of texts to encode, by WorkStoppedError.

    ``stop_requested`` is asked after each step that a `progress_bar` counts, shown or not, and by `check_stop`.
    """
    token = _STOP_REQUESTED.set(stop_requested)
    try:
        yield
    finally:
        _STOP_REQUESTED.reset(token)


def is_interruptible() -> bool:
    """Whether this is called within `interruptible`."""
    return _STOP_REQUESTED.get() is not None


def should_stop() -> bool:
    """Whether the work within `interruptible` should stop; False elsewhere."""
    requested = _STOP_REQUESTED.get()
    return requested is not None and requested()


def check_stop() -> None:
    """Raise WorkStoppedError if the work within `interruptible` should stop; does nothing elsewhere."""
    if should_stop():
        raise WorkStoppedError


@contextmanager
def progress_bar(description: str, total: int | None, *, enabled: bool, done: int = 0) -> Iterator[AdvanceWithNews]:
    """Show progress while the block runs.

    ``description`` is what is done, or the unit of the steps, of which ``done`` were done before. If their ``total`` is unknown, None, the
    steps and the time so far are shown; a single step ends with the block. Nothing is shown unless ``enabled``, or if there are no steps.
    Yields a function that counts steps, and raises within `interruptible` if a stop was requested.
    """
    requested = _STOP_REQUESTED.get()  # of the thread that opens the bar; another one may advance it
    with _show_bar(description, total, enabled=enabled, done=done) as advance:
        if requested is None:
            yield advance
            return

        def advance_or_stop(steps: int, news: str = "") -> None:
            advance(steps, news)
            if requested():
                raise WorkStoppedError

        yield advance_or_stop


@contextmanager
def _show_bar(description: str, total: int | None, *, enabled: bool, done: int) -> Iterator[AdvanceWithNews]:
    if not enabled or total == 0:
        yield lambda steps, news="": None
        return
    if not shows_bars():
        yield _show_lines(description, total, done)
        return
    # Imported here, so that library users without a bar do not import rich.
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("eta"),
        TimeRemainingColumn(),
        TextColumn("{task.fields[news]}"),
    )
    # rich forgets steps after 30 seconds by default, and one batch of a large model may take longer.
    with Progress(*columns, console=Console(stderr=True), speed_estimate_period=600) as bar:
        task = bar.add_task(description, total=total, completed=done, news="")

        def advance(steps: int, news: str = "") -> None:
            bar.advance(task, steps)
            if news:
                bar.update(task, news=news)

        yield advance
        if total == 1:
            bar.update(task, completed=1)


def shows_bars() -> bool:
    """Whether standard error is a terminal or the output of a notebook, where a bar can move."""
    if sys.stderr.isatty():
        return True
    from rich.console import Console

    return Console(stderr=True).is_jupyter


def _show_lines(description: str, total: int | None, done: int) -> AdvanceWithNews:
    began = last = time.monotonic()
    counted = done

    def advance(steps: int, news: str = "") -> None:
        nonlocal counted, last
        counted += steps
        now = time.monotonic()
        if now - last < LINES_EVERY:
            return
        last = now
        parts = [f"{counted:,}" if total is None else f"{counted:,} of {total:,}", f"{_format_duration(now - began)} so far"]
        if total is not None and done < counted < total:
            parts.append(f"{_format_duration((now - began) * (total - counted) / (counted - done))} left")
        sys.stderr.write(f"{description}: {', '.join([*parts, news] if news else parts)}\n")
        sys.stderr.flush()

    return advance


def _format_duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}"


def timed_slices(count: int, *, most: int | None = None, clock: Callable[[], float] = time.perf_counter) -> Iterator[slice]:
    """Divide items into successive slices of up to ``most``, so that a bar can move after each: each takes about a second.

    A slice is twice as long as the one before if that took less than a second, or if longer slices save time: each may have a cost of its
    own, such as reading the corpus from disk.
    """
    first, size, shorter = 0, 1, math.inf  # seconds per item of the last shorter slice
    while first < count:
        part = slice(first, min(first + size, count))
        started = clock()
        yield part
        seconds = clock() - started
        first = part.stop
        if seconds < 1 or seconds / size < 0.75 * shorter:
            shorter, size = seconds / size, min(2 * size, most or count)
