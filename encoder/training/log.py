"""What a run logs: values per step in ``log.jsonl``, and batches with a non-finite loss or gradient in ``nonfinite/``.

The log has one JSON object per line and grows while the run goes on. There are two kinds of lines. The first is written every few steps and
after the last one:

    {"step": 40, "epoch": 0.5, "loss": 0.731, "learning_rate": 4.8e-05, "grad_norm": 1.92, "tokens_per_second": 5210, "seconds": 61.2}

``loss`` is the mean over the steps since the previous line. ``learning_rate`` and ``grad_norm`` (before clipping) are those of the step.
``tokens_per_second`` counts the tokens of all processes since the previous line, without the time of evaluation and saving. ``seconds`` is
the duration of the run so far, earlier sessions included. On a GPU ``activation_bytes`` is the most memory that a step since the previous
line took beside weights and optimizer state: activations, and gradients as far as they exist at the same time. The second kind is written
after each evaluation on held-out data:

    {"step": 500, "epoch": 1.0, "ndcg@10": 0.4123, "seconds": 712.0}

A resumed run removes the lines after its checkpoint and writes them again.

A run with a non-finite loss or gradient stops before the optimizer step and writes the batch:

    nonfinite/step-000013/batch.json         step, loss, gradient norm, and the rows of the batch
    nonfinite/step-000013/batch.safetensors  inputs of the loss, named ``{batch}.{input}``

In the second file a packed batch is stored as ``ids``, ``cu_seqlens`` and, if some tokens are not attended to, ``key_lengths``, from which
`quiver.encoder.packing.pack_ids` builds it again. Retrieval training adds ``columns``, the number of texts per column, and ``label``, the
teacher scores.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from torch import Tensor

from quiver.encoder.errors import InputError
from quiver.encoder.files import naming, save_tensors, write_json, write_text

LOG, NONFINITE = "log.jsonl", "nonfinite"
"""Names in the run folder."""

LEARNING_RATE = "learning_rate"
"""Key of the lines about the training itself; the others are of an evaluation."""

Line: TypeAlias = Mapping[str, int | float]
Curve: TypeAlias = list[tuple[int, float]]
"""(step, value), steps rising."""


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
    return [_parsed(line, f"{path}:{number}") for number, line in enumerate(whole.splitlines(), start=1)]


def curve(lines: Sequence[Line], key: str) -> Curve:
    """One quantity of a log over the steps.

    Example:
        >>> curve([{"step": 1, "loss": 0.5}, {"step": 1, "ndcg@10": 0.25}, {"step": 2, "loss": 0.25}], "loss")
        [(1, 0.5), (2, 0.25)]
    """
    return [(int(line["step"]), float(line[key])) for line in lines if key in line]


def training_curves(lines: Sequence[Line]) -> dict[str, Curve]:
    """Loss, learning rate, gradient norm and throughput over the steps, by their keys in the record of a run."""
    keys = {"losses": "loss", "learning_rates": "learning_rate", "grad_norms": "grad_norm", "tokens_per_second": "tokens_per_second"}
    return {name: curve(lines, key) for name, key in keys.items()}


def _parsed(line: str, where: str) -> Line:
    try:
        value = json.loads(line)
    except json.JSONDecodeError as error:
        raise InputError(f"{where}: malformed JSON ({error})") from error
    if not isinstance(value, dict) or not isinstance(value.get("step"), int):
        raise InputError(f"{where}: not a line of a training log, it has no step")
    return value


@dataclass(frozen=True)
class SeenBatch:
    """A batch that went through the model."""

    examples: list[dict[str, Any]]  # its rows as JSON, to find them in the data
    features: Mapping[str, Any]  # inputs of the loss
    loss: float


def keep_batches(folder: Path, batches: Sequence[SeenBatch], *, step: int, grad_norm: float) -> None:
    """Write the batches of a step with a non-finite loss, or all batches if only the gradient is not finite."""
    bad = [batch for batch in batches if not math.isfinite(batch.loss)] or list(batches)
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {
        f"{number}.{name}": value.detach().to("cpu", copy=True).contiguous()  # safetensors refuses tensors that share storage
        for number, batch in enumerate(bad)
        for name, value in batch.features.items()
        if isinstance(value, Tensor)
    }
    save_tensors(tensors, folder / "batch.safetensors")
    described = [{"loss": _number(batch.loss), "rows": batch.examples} for batch in bad]
    write_json(folder / "batch.json", {"step": step, "grad_norm": _number(grad_norm), "batches": described})


def nonfinite_error(folder: Path, *, step: int, loss: float, grad_norm: float, setting: str) -> InputError:
    """Make the error that ends the run; ``setting`` is the name of the learning rate in the recipe."""
    what = f"the loss is {loss}" if not math.isfinite(loss) else f"the norm of the gradient is {grad_norm}"
    return InputError(f"{what} at step {step}; the batch was saved to {folder}: check its texts, or lower {setting}")


def _number(value: float) -> float | str:
    return value if math.isfinite(value) else str(value)
