"""What a run logs: values per step in ``log.jsonl``, and batches with a non-finite loss or gradient in ``nonfinite/``.

The log has one JSON object per line and grows while the run goes on: one every few steps and after the last, one after each evaluation.

    {"step": 40, "epoch": 0.5, "loss": 0.731, "learning_rate": 4.8e-05, "grad_norm": 1.92, "tokens_per_second": 5210, "seconds": 61.2}
    {"step": 500, "epoch": 1.0, "ndcg@10": 0.4123, "seconds": 712.0}

``loss`` is the mean since the previous line of its kind; ``learning_rate`` and ``grad_norm`` (before clipping) are those of the step;
``tokens_per_second`` counts all processes, without the time of evaluation and saving; ``seconds`` includes earlier sessions. On a GPU
``activation_bytes`` is the most memory that a step since that line took beside weights and optimizer state. A resumed run removes the lines
after its checkpoint and writes them again.

A run with a non-finite loss or gradient stops before the optimizer step and writes the batch:

    nonfinite/step-000013/batch.json         step, loss, gradient norm, and the rows of the batch
    nonfinite/step-000013/batch.safetensors  inputs of the loss, named ``{batch}.{input}``; a packed batch as the arguments of `pack_ids`
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from torch import Tensor

from quiver.encoder.errors import InputError
from quiver.encoder.files import naming, save_tensors, write_json, write_text

LOG, NONFINITE = "log.jsonl", "nonfinite"  # names in the run folder
LEARNING_RATE = "learning_rate"  # key of the lines about the training itself; the others are of an evaluation

Line: TypeAlias = Mapping[str, int | float]
Curve: TypeAlias = list[tuple[int, float]]  # (step, value), steps rising


class RunLog:
    """Appends lines to the log file of a run."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def append(self, line: Line) -> None:
        """Append one line and flush it, so that readers see it."""
        with naming(self._path), self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    def measures(self, step: int, position: Collection[str]) -> dict[str, float]:
        """Return the measures that were logged after a step, in their order; empty if there are none."""
        lines = [line for line in read_log(self._path) if line["step"] == step] if self._path.exists() else []
        found = next((line for line in lines if LEARNING_RATE not in line), {})
        return {key: float(value) for key, value in found.items() if key not in ("step", "seconds", *position)}

    def sync(self) -> None:
        """Sync the lines to disk, before a checkpoint of the same step is sealed."""
        if self._path.exists():
            with naming(self._path), self._path.open("rb") as file:
                os.fsync(file.fileno())

    def cut(self, step: int) -> None:
        """Remove every line after ``step``, and an incomplete line of a killed process."""
        if self._path.exists():
            lines = [line for line in read_log(self._path) if line["step"] <= step]
            write_text(self._path, "".join(json.dumps(line) + "\n" for line in lines))


def read_log(path: Path) -> list[Line]:
    """Read the lines of a log; an incomplete last line is ignored."""
    try:
        whole, _, _ = path.read_text(encoding="utf-8").rpartition("\n")
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})") from error
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: not UTF-8 ({error.reason} at byte {error.start})") from error
    lines: list[Line] = []
    for number, text in enumerate(whole.splitlines(), start=1):
        try:
            line = json.loads(text)
        except json.JSONDecodeError as error:
            raise InputError(f"{path}:{number}: malformed JSON ({error})") from error
        if not isinstance(line, dict) or not isinstance(line.get("step"), int):
            raise InputError(f"{path}:{number}: not a line of a training log, it has no step")
        lines.append(line)
    return lines


def curve(lines: Sequence[Line], key: str) -> Curve:
    """One quantity of a log over the steps."""
    return [(int(line["step"]), float(line[key])) for line in lines if key in line]


def training_curves(lines: Sequence[Line]) -> dict[str, Curve]:
    """Loss, learning rate, gradient norm and throughput over the steps, by their keys in the record of a run."""
    keys = {"losses": "loss", "learning_rates": "learning_rate", "grad_norms": "grad_norm", "tokens_per_second": "tokens_per_second"}
    return {name: curve(lines, key) for name, key in keys.items()}


def keep_batches(
    folder: Path, batches: Sequence[tuple[float, Iterable[dict[str, Any]], Mapping[str, Any]]], *, step: int, grad_norm: float
) -> None:
    """Write the batches of a step with a non-finite loss, or all batches if only the gradient is not finite.

    A batch is its loss, its rows as JSON, and the inputs of the loss, of which tensors are written.
    """
    bad = [batch for batch in batches if not math.isfinite(batch[0])] or list(batches)
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {
        f"{number}.{name}": value.detach().to("cpu", copy=True).contiguous()  # safetensors refuses tensors that share storage
        for number, (_, _, inputs) in enumerate(bad)
        for name, value in inputs.items()
        if isinstance(value, Tensor)
    }
    save_tensors(tensors, folder / "batch.safetensors")
    norm, *losses = (value if math.isfinite(value) else str(value) for value in (grad_norm, *(loss for loss, _, _ in bad)))
    described = [{"loss": loss, "rows": list(rows)} for loss, (_, rows, _) in zip(losses, bad, strict=True)]
    write_json(folder / "batch.json", {"step": step, "grad_norm": norm, "batches": described})
