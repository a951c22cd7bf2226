"""The losses of a ColBERT: PyLate's, with the means over a batch and over processes that PyLate 1.6 lacks.

Importing this module imports PyLate (extra ``colbert``).
"""

from __future__ import annotations

from pylate.losses import CachedContrastive, Contrastive
from pylate.losses import Distillation as Distillation
from pylate.utils import get_world_size
from torch import Tensor


class GatheredContrastive(Contrastive):  # type: ignore[misc]  # the library is untyped
    """PyLate's contrastive loss as a mean over the queries of all processes.

    PyLate multiplies gathered losses by the number of processes, and the trainer then averages over the processes, so that losses and
    gradients are too large by that factor.
    """

    def forward(self, sentence_features: list[dict[str, Tensor]], labels: Tensor | None = None) -> Tensor:
        """Return the mean loss of this process's queries."""
        loss: Tensor = super().forward(sentence_features, labels)
        return loss / get_world_size() if self.gather_across_devices else loss


class MeanCachedContrastive(CachedContrastive):  # type: ignore[misc]  # the library is untyped
    """PyLate's cached contrastive loss with the gradients of the value that it returns.

    Losses and gradients are those of `GatheredContrastive`, with less memory (GradCache). PyLate 1.6 returns the mean over a batch but
    caches the gradients of the sum, which are larger by the number of rows; with gathered documents both are too large by the number of
    processes.
    """

    cache: list[list[Tensor]]

    def calculate_loss_and_cache_gradients(self, reps: list[list[Tensor]], masks: list[Tensor]) -> Tensor:
        """Return the mean loss of this process's queries, and cache its gradients with respect to the vectors."""
        processes = get_world_size() if self.gather_across_devices else 1
        rows = sum(map(len, reps[0]))
        loss: Tensor = super().calculate_loss_and_cache_gradients(reps, masks)
        self.cache = [[gradient / (rows * processes) for gradient in column] for column in self.cache]
        return (loss.detach() / processes).requires_grad_()
