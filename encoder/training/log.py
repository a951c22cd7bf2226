"""The log of a run: one JSON object a line, appended while it goes on, so that a run can be looked at before it is over.

Two kinds of line. After every so many updates, and after the last, for instance

    {"step": 40, "epoch": 0.5, "loss": 0.731, "learning_rate": 4.8e-05, "grad_norm": 1.92, "tokens_per_second": 5210.4, "seconds": 61.2}

``loss`` is the mean over the updates since the line before; ``learning_rate`` and ``grad_norm`` (before clipping) are those of the
step's own update; ``tokens_per_second`` counts the tokens of all processes in the time of the updates since the line before;
``seconds`` is the training so far, earlier sessions included. After every score on held-out data a line of its own, such as

    {"step": 500, "epoch": 1.0, "ndcg@10": 0.4123, "seconds": 712.0}

A run that is resumed takes back the lines after the checkpoint that it goes on from, and writes them anew.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

from quiver.encoder.errors import InputError
from quiver.encoder.files import write_text

LOG = "log.jsonl"
"""Its name in the folder of a run."""

Line: TypeAlias = Mapping[str, int | float]
Curve: TypeAlias = list[tuple[int, float]]
"""(step, value), steps rising."""


class RunLog:
    """Lines at the end of a file.

    Args:
        path: Made with the first line.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def append(self, line: Line) -> None:
        """Add one line; whoever reads the file now sees it."""
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    def holds(self, step: int, key: str) -> bool:
        """Whether a line of a step has a key."""
        return self._path.exists() and any(line["step"] == step and key in line for line in read_log(self._path))

    def sync(self) -> None:
        """Put the lines on the disk: a checkpoint that is about to be sealed must not know more than the log."""
        if self._path.exists():
            with self._path.open("rb") as file:
                os.fsync(file.fileno())

    def cut(self, step: int) -> None:
        """Take back every line after ``step``, and what a kill has left of a line that it interrupted."""
        if self._path.exists():
            lines = [line for line in read_log(self._path) if line["step"] <= step]
            write_text(self._path, "".join(json.dumps(line) + "\n" for line in lines))


def read_log(path: Path) -> list[Line]:
    """The lines of a log; of a run that is going on or was killed, all that are whole.

    Raises:
        InputError: There is no such file, or a line has its end and is no line of a log.
    """
    try:
        whole, _, _ = path.read_text(encoding="utf-8").rpartition("\n")
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})") from error
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: not UTF-8 ({error.reason} at byte {error.start})") from error
    return [_parsed(line, f"{path}:{number}") for number, line in enumerate(whole.splitlines(), start=1)]


def curve(lines: Sequence[Line], key: str) -> Curve:
    """One quantity of a log over the steps.

    Example:
        >>> curve([{"step": 1, "loss": 0.5}, {"step": 1, "ndcg@10": 0.25}, {"step": 2, "loss": 0.25}], "loss")
        [(1, 0.5), (2, 0.25)]
    """
    return [(int(line["step"]), float(line[key])) for line in lines if key in line]


def _parsed(line: str, where: str) -> Line:
    try:
        value = json.loads(line)
    except json.JSONDecodeError as error:
        raise InputError(f"{where}: malformed JSON ({error})") from error
    if not isinstance(value, dict) or not isinstance(value.get("step"), int):
        raise InputError(f"{where}: not a line of a training log, it has no step")
    return value
