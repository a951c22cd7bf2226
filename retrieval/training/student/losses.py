"""The losses a recipe may name: sentence-transformers' and PyLate's own, set up as the recipe says.

Importing this module imports sentence-transformers and PyLate (extra ``train``).

Shapes: B rows, n documents of a row.
Source: sentence-transformers 5.3 ``losses``, PyLate 1.6 ``losses``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pylate.losses import CachedContrastive, Contrastive, Distillation
from pylate.utils import get_world_size
from sentence_transformers import SentenceTransformer
from sentence_transformers.losses import (
    CachedMultipleNegativesRankingLoss,
    DistillKLDivLoss,
    MarginMSELoss,
    MatryoshkaLoss,
    MultipleNegativesRankingLoss,
)
from sentence_transformers.util import cos_sim, dot_score, pairwise_cos_sim, pairwise_dot_score
from torch import Tensor, nn

from quiver.retrieval.training.sections import LossSection
from quiver.retrieval.training.student.columns import OnePass
from quiver.retrieval.training.student.native import LENGTHS

SIMILARITIES = {"cosine": cos_sim, "dot": dot_score}
"""Name in a checkpoint -> the function that a loss compares vectors by; it must be the one they are searched by."""

PAIRWISE = {"cosine": pairwise_cos_sim, "dot": pairwise_dot_score}
"""The same for rows that are compared one to one."""


class GatheredContrastive(Contrastive):  # type: ignore[misc]  # the library is untyped
    """PyLate's loss as the mean over all processes' queries.

    PyLate multiplies by the number of processes, whose mean the trainer then takes of losses and gradients alike: both
    come out that many times too large.
    """

    def forward(self, sentence_features: list[dict[str, Tensor]], labels: Tensor | None = None) -> Tensor:
        """The mean loss of this process's queries."""
        loss: Tensor = super().forward(sentence_features, labels)
        return loss / get_world_size() if self.gather_across_devices else loss


class MeanCachedContrastive(CachedContrastive):  # type: ignore[misc]  # the library is untyped
    """PyLate's loss with the gradients of its value: equal to `GatheredContrastive` in losses and gradients, in less memory.

    PyLate 1.6 reports the mean over a batch and caches the gradients of the sum, B times too large; and with gathered
    documents both are as many times too large as there are processes.
    """

    cache: list[list[Tensor]]

    def calculate_loss_and_cache_gradients(self, reps: list[list[Tensor]], masks: list[Tensor]) -> Tensor:
        """The mean loss of this process's queries; its gradients by the vectors go to the cache."""
        processes = get_world_size() if self.gather_across_devices else 1
        rows = sum(map(len, reps[0]))
        loss: Tensor = super().calculate_loss_and_cache_gradients(reps, masks)
        self.cache = [[gradient / (rows * processes) for gradient in column] for column in self.cache]
        return (loss.detach() / processes).requires_grad_()


class SlicedCachedMNRL(CachedMultipleNegativesRankingLoss):  # type: ignore[misc]  # the library is untyped
    """The library's loss, whose mini-batches take their rows of the lengths too: the library cuts tensors alone."""

    def embed_minibatch(
        self,
        sentence_feature: dict[str, Any],
        begin: int,
        end: int,
        with_grad: bool,
        copy_random_state: bool,
        random_state: Any = None,
    ) -> Any:
        """Rows ``begin`` to ``end`` through the model; arguments and results are the library's."""
        features = {**sentence_feature, LENGTHS: sentence_feature[LENGTHS][begin:end]}
        return super().embed_minibatch(features, begin, end, with_grad, copy_random_state, random_state)


LOSSES: dict[str, Callable[[SentenceTransformer, LossSection], nn.Module]] = {
    "mnrl": lambda model, section: MultipleNegativesRankingLoss(
        model,
        scale=section.scale,
        similarity_fct=SIMILARITIES[model.similarity_fn_name],
        gather_across_devices=section.gather_across_devices,
    ),
    "cached_mnrl": lambda model, section: SlicedCachedMNRL(
        model,
        scale=section.scale,
        similarity_fct=SIMILARITIES[model.similarity_fn_name],
        mini_batch_size=section.mini_batch_size,
        gather_across_devices=section.gather_across_devices,
    ),
    "margin_mse": lambda model, _: MarginMSELoss(model, similarity_fct=PAIRWISE[model.similarity_fn_name]),
    "kl": lambda model, section: DistillKLDivLoss(
        model, similarity_fct=PAIRWISE[model.similarity_fn_name], temperature=section.temperature
    ),
    "contrastive": lambda model, section: GatheredContrastive(
        model, gather_across_devices=section.gather_across_devices, temperature=section.temperature
    ),
    "cached_contrastive": lambda model, section: MeanCachedContrastive(
        model,
        mini_batch_size=section.mini_batch_size,
        gather_across_devices=section.gather_across_devices,
        temperature=section.temperature,
    ),
    "distillation": lambda model, section: Distillation(model, normalize_scores=section.student_scores == "minmax"),
}
"""The losses a recipe may name; which kind of model each trains stands in `quiver.retrieval.training.rules`."""


CACHED = ("cached_mnrl", "cached_contrastive")
"""Losses that encode a few texts at a time, to keep little in memory."""


def make_loss(model: SentenceTransformer, section: LossSection) -> nn.Module:
    """The loss of a recipe, around a model of the library.

    Args:
        model: What `quiver.retrieval.training.student.build.build_student` made.
        section: The recipe's ``loss``.

    Returns:
        A module that takes a list of features and the labels, as the trainer calls it.
    """
    loss = LOSSES[section.name](model, section)
    if section.matryoshka_dims:
        loss = MatryoshkaLoss(model, loss, matryoshka_dims=list(section.matryoshka_dims))
    return loss if section.name in CACHED else OnePass(model, loss)
