"""Callbacks of a training run: the progress bar, and TensorBoard scalars where TensorBoard is installed."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias

from quiver.encoder.progress import progress_bar
from quiver.encoder.training.trainer import Callback

Show: TypeAlias = Callable[[int, Mapping[str, int | float]], None]
"""Function of the position of a progress bar and of new values, by log key."""

FORMS: Mapping[str, str] = {"loss": "loss {:.4f}", "tokens_per_second": "{:,.0f} tokens/s"}
"""Log key -> format of the value on a progress bar."""


class BarCallback(Callback):
    """Shows progress and logged values on a progress bar."""

    def __init__(self, show: Show, done: Callable[[int], int] = lambda step: step) -> None:
        self._show = show
        self._done = done

    def on_step(self, step: int) -> None:
        """Advance the bar."""
        self._show(self._done(step), {})

    def on_log(self, step: int, values: Mapping[str, float]) -> None:
        """Show the values."""
        self._show(self._done(step), values)


@contextmanager
def training_bar(done: int, total: int, *, enabled: bool, forms: Mapping[str, str] = FORMS, unit: str = "step") -> Iterator[Show]:
    """Show progress on standard error while the block runs."""
    latest: dict[str, int | float] = {}
    shown = done
    with progress_bar(unit, total, enabled=enabled, done=done) as advance:

        def show(step: int, news: Mapping[str, int | float]) -> None:
            nonlocal shown
            latest.update(news)
            advance(step - shown, ", ".join(form.format(latest[key]) for key, form in forms.items() if key in latest))
            shown = step

        yield show


class TensorBoard(Callback):
    """Writes logged values as scalars."""

    def __init__(self, writer: Any = None, names: Mapping[str, str] | None = None) -> None:
        self._writer = writer
        self._names = names or {}

    def on_log(self, step: int, values: Mapping[str, float]) -> None:
        """Write the values of a step."""
        if self._writer is not None:
            for name, value in values.items():
                self._writer.add_scalar(self._names.get(name, f"training/{name}"), value, step)


@contextmanager
def tensorboard(folder: Path, *, step: int, enabled: bool, names: Mapping[str, str] | None = None) -> Iterator[TensorBoard]:
    """A TensorBoard callback for the block; it writes nothing where TensorBoard is not installed."""
    if not enabled or importlib.util.find_spec("tensorboard") is None:
        yield TensorBoard()
        return
    writer = importlib.import_module("torch.utils.tensorboard").SummaryWriter(str(folder), purge_step=step)
    try:
        yield TensorBoard(writer, names)
    finally:
        writer.close()
