"""TensorBoard, where it is installed: the quantities of the log as scalars."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

SCORE = "ndcg@10"
"""What a run is scored by on its development collection, and what that is called in its log."""

_NAMES = {SCORE: "development/ndcg_at_10"}  # TensorBoard's names have no @


class Board:
    """Scalars by step; without a writer they go nowhere.

    Args:
        writer: A ``SummaryWriter`` of torch.
    """

    def __init__(self, writer: Any = None) -> None:
        self._writer = writer

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Add the values of a step."""
        if self._writer is not None:
            for name, value in values.items():
                self._writer.add_scalar(_NAMES.get(name, f"training/{name}"), value, step)


@contextmanager
def tensorboard(folder: Path, *, step: int, enabled: bool) -> Iterator[Board]:
    """A board for the block, if TensorBoard is installed.

    Args:
        folder: Where its event files go.
        step: The session's first; what an earlier one has written for it and after is not shown any more.
        enabled: False for a process that writes nothing.
    """
    if not enabled or importlib.util.find_spec("tensorboard") is None:
        yield Board()
        return
    writer = importlib.import_module("torch.utils.tensorboard").SummaryWriter(str(folder), purge_step=step)
    try:
        yield Board(writer)
    finally:
        writer.close()
