"""What is learnt, as far as a fine-tuning has to know it: examples, their loss, a score, a model that is written and opened."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

from torch import Tensor

from quiver.encoder.heads import SequenceClassifier, SpanQA
from quiver.encoder.packing import PackedBatch

Model = TypeVar("Model", SequenceClassifier, SpanQA)
Example = TypeVar("Example")


@dataclass(frozen=True)
class TaskBatch:
    """Examples as a model takes them.

    Attributes:
        packed: Their tokens, on the host.
        targets: What the loss compares with, by name; a row an example.
    """

    packed: PackedBatch
    targets: Mapping[str, Tensor]


class Task(Protocol[Model, Example]):
    """Examples to learn from, and what they are to a model."""

    @property
    def examples(self) -> Sequence[Example]:
        """What is trained on; at least one."""

    def batch(self, examples: Sequence[Example]) -> TaskBatch:
        """Put examples into one batch, in their order."""

    def loss(self, model: Model, batch: TaskBatch) -> Tensor:
        """The mean loss of a batch whose tokens are on the model's device, a float32 scalar."""

    def score(self, model: Model) -> Mapping[str, float]:
        """Measures on held-out examples, higher is better: the first one says which checkpoint is best. Empty where there are none.

        The model is in training mode before and after.
        """

    def described(self, example: Example) -> dict[str, Any]:
        """An example as JSON, for somebody who looks for one that cannot be trained on."""

    def save(self, model: Model, folder: Path) -> None:
        """Write a model that opens like any other, its tokenizer beside it."""

    def open(self, folder: Path) -> Model:
        """Read what `save` wrote, in evaluation mode, on the CPU."""
