"""Progress bars on standard error."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Advance = Callable[[int], None]


@contextmanager
def progress_bar(description: str, total: int | None, *, enabled: bool) -> Iterator[Advance]:
    """Show a bar while the block runs.

    Args:
        description: Label of the bar.
        total: Number of steps; None if it is unknown: the bar then shows the steps and the time so far. A single step ends with the block.
        enabled: Show the bar; nothing is shown otherwise, or if there are no steps.

    Yields:
        Function that advances the bar by a number of steps.
    """
    if not enabled or total == 0:
        yield lambda steps: None
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
    )
    # rich forgets steps after 30 seconds by default, and one batch of a large model may take longer.
    with Progress(*columns, console=Console(stderr=True), speed_estimate_period=600) as bar:
        task = bar.add_task(description, total=total)
        yield lambda steps: bar.advance(task, steps)
        if total == 1:
            bar.update(task, completed=1)


def timed_slices(count: int, *, most: int | None = None, clock: Callable[[], float] = time.perf_counter) -> Iterator[slice]:
    """Divide items into successive slices, so that a bar can move after each: the work on a slice takes about a second.

    A slice is twice as long as the one before if that took less than a second, or if longer slices save time: each slice may have a cost
    of its own, such as reading the corpus from disk.

    Args:
        count: Number of items.
        most: Largest length of a slice.
        clock: Clock in seconds.

    Example:
        >>> times = iter([0, 0.1, 0.1, 0.3, 0.3, 1.4, 1.4, 2.5])
        >>> [part.stop for part in timed_slices(11, clock=lambda: next(times))]
        [1, 3, 7, 11]
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
