"""Log values as TensorBoard scalars, where TensorBoard is installed."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from quiver.encoder.training.trainer import Callback


class TensorBoard(Callback):
    """Writes logged values as scalars.

    Args:
        writer: A ``SummaryWriter`` of torch; None writes nothing.
        names: Log key -> scalar name; other keys are written as ``training/KEY``.
    """

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
    """A TensorBoard callback for the block; it writes nothing where TensorBoard is not installed.

    Args:
        folder: Folder of the event files.
        step: First step of this session; later steps of an earlier session are no longer shown.
        enabled: False in processes that write nothing.
        names: Log key -> scalar name, see `TensorBoard`.
    """
    if not enabled or importlib.util.find_spec("tensorboard") is None:
        yield TensorBoard()
        return
    writer = importlib.import_module("torch.utils.tensorboard").SummaryWriter(str(folder), purge_step=step)
    try:
        yield TensorBoard(writer, names)
    finally:
        writer.close()
