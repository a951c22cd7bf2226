"""Callbacks of a training run: the progress bar, and TensorBoard scalars where TensorBoard is installed."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from quiver.encoder.progress import progress_bar
from quiver.encoder.training.trainer import Callback

FORMS: Mapping[str, str] = {"loss": "loss {:.4f}", "tokens_per_second": "{:,.0f} tokens/s"}
"""Log key -> format of the value on a progress bar."""


class BarCallback(Callback):
    """Shows progress and the logged values that have a format on a progress bar; ``position`` is that of the bar after a step."""

    def __init__(self, advance: Callable[[int, str], None], done: int, forms: Mapping[str, str], position: Callable[[int], int]) -> None:
        self._advance, self._done, self._forms, self._position = advance, done, forms, position
        self._latest: dict[str, float] = {}

    def on_step(self, step: int) -> None:
        """Advance the bar."""
        self._show(step)

    def on_log(self, step: int, values: Mapping[str, float]) -> None:
        """Show the values."""
        self._latest.update(values)
        self._show(step)

    def _show(self, step: int) -> None:
        before, self._done = self._done, self._position(step)
        news = (form.format(self._latest[key]) for key, form in self._forms.items() if key in self._latest)
        self._advance(self._done - before, ", ".join(news))


@contextmanager
def training_bar(
    done: int,
    total: int,
    *,
    enabled: bool,
    forms: Mapping[str, str] = FORMS,
    unit: str = "step",
    position: Callable[[int], int] = lambda step: step,
) -> Iterator[BarCallback]:
    """Show progress on standard error while the block runs, from ``done`` to ``total``."""
    with progress_bar(unit, total, enabled=enabled, done=done) as advance:
        yield BarCallback(advance, done, forms, position)


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
