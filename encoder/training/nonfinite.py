"""A loss or a gradient that is no number: the run stops before the update, and the batch that it came from is kept.

What is written:

    nonfinite/step-000013/batch.json         step, loss and gradient norm; of every row what the run says of it
    nonfinite/step-000013/batch.safetensors  the tensors that the loss was given, named ``{batch}.{feature}``
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from quiver.encoder.errors import InputError
from quiver.encoder.files import save_tensors, write_json

NONFINITE = "nonfinite"
"""The folder's name in the folder of a run."""


@dataclass(frozen=True)
class SeenBatch:
    """A batch that went through the model.

    Attributes:
        examples: Its rows, as JSON: what somebody needs who looks for them.
        features: What the loss was given.
        loss: What it gave.
    """

    examples: list[dict[str, Any]]
    features: Mapping[str, Any]
    loss: float


def keep_batches(folder: Path, batches: Sequence[SeenBatch], *, step: int, grad_norm: float) -> None:
    """Write the batches of an update that cannot be done: those whose loss is no number, or all of them if it is the gradient alone.

    Args:
        folder: Made here.
        batches: Of this process.
        step: The update, from 1.
        grad_norm: L2 norm of its gradient.
    """
    bad = [batch for batch in batches if not math.isfinite(batch.loss)] or list(batches)
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {
        f"{place}.{name}": value.detach().to("cpu", copy=True).contiguous()  # safetensors takes no two of one storage
        for place, batch in enumerate(bad)
        for name, value in batch.features.items()
        if isinstance(value, Tensor)
    }
    save_tensors(tensors, folder / "batch.safetensors")
    described = [{"loss": _number(batch.loss), "rows": batch.examples} for batch in bad]
    write_json(folder / "batch.json", {"step": step, "grad_norm": _number(grad_norm), "batches": described})


def nonfinite_error(folder: Path, *, step: int, loss: float, grad_norm: float, setting: str) -> InputError:
    """What stops the run; ``setting`` is the learning rate's name in its recipe."""
    what = f"the loss is {loss}" if not math.isfinite(loss) else f"the norm of the gradient is {grad_norm}"
    return InputError(f"{what} at step {step}; its batch is in {folder}: look at its texts, or lower {setting}")


def _number(value: float) -> float | str:
    return value if math.isfinite(value) else str(value)
