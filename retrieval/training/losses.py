"""The losses of a recipe: those of sentence-transformers and PyLate, around a model of ours.

A loss of these libraries calls a model once per column of a batch (queries, positives, first negatives, ...) with a dictionary of features.
Batches stay packed: `LossModel` encodes all columns in one pass where the loss permits. Importing this module imports sentence-transformers
(extra ``train``); the losses of a ColBERT import PyLate when they are made.

Shapes: B rows, C columns, N packed tokens, S padded length, D width of the encoder, d width of a vector.
Source: ``losses`` of sentence-transformers 5.3 and of PyLate 1.6.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from importlib import import_module
from itertools import accumulate, pairwise
from typing import Any, TypeAlias

import torch
from sentence_transformers.losses import (
    CachedMultipleNegativesRankingLoss,
    DistillKLDivLoss,
    MarginMSELoss,
    MatryoshkaLoss,
    MultipleNegativesRankingLoss,
)
from sentence_transformers.util import cos_sim, dot_score, pairwise_cos_sim, pairwise_dot_score
from torch import Tensor, nn
from torch.nn import functional as F

from quiver.encoder import InputError, PackedBatch
from quiver.encoder.packing import copy_to
from quiver.encoder.training.optimization import autocast
from quiver.encoder.training.recipe_file import TrainingDtype
from quiver.retrieval.models.biencoder import BiEncoder
from quiver.retrieval.models.colbert import ColBERT
from quiver.retrieval.models.maxsim import maxsim_padded
from quiver.retrieval.training.dataloader import COLUMNS, LABEL, PRESENT, TEXTS
from quiver.retrieval.training.recipe import LossSection, Recipe

Similarity: TypeAlias = Callable[[Tensor, Tensor], Tensor]


def _of_present(similarity: Similarity) -> Similarity:
    """Give absent documents, whose vectors `LossModel.forward` has set to zero, a similarity of -inf: no share in a softmax."""

    def compare(queries: Tensor, documents: Tensor) -> Tensor:
        return similarity(queries, documents).masked_fill((documents == 0).all(dim=1), -math.inf)

    return compare


SIMILARITIES: dict[str, Similarity] = {"cosine": _of_present(cos_sim), "dot": _of_present(dot_score)}
"""Similarity of a checkpoint -> function that a loss with in-batch negatives compares vectors with."""

PAIRWISE = {"cosine": pairwise_cos_sim, "dot": pairwise_dot_score}
"""Similarity of a checkpoint -> function that compares vectors one to one."""

PACKED = "packed"  # feature of a column: its `PackedBatch`
SHARED = "shared_pass"  # feature of a column: a function that returns its states, from one pass over all columns
THERE = "present"  # feature of a column with absent texts: whether each is there, (B, 1)
SKIP = "skipped_tokens"  # feature of a column of a bi-encoder: leading tokens that pooling skips


class LossModel(nn.Module):
    """A bi-encoder or ColBERT with the interface of sentence-transformers' and PyLate's models that their losses use.

    It holds the weights of the given model: an optimizer step changes the model that is saved and searched with.
    """

    def __init__(
        self, model: BiEncoder | ColBERT, *, dtype: TrainingDtype = "float32", max_length: int | None = None, pad_to_limit: bool = False
    ) -> None:
        super().__init__()
        if model.encoder.prepacked:
            raise ValueError("a prepacked encoder has no gradients; load the model with quiver.retrieval.models.pretrained.load_parts")
        self.encoder = model.encoder
        self.projections = model.projections
        self.similarity_fn_name = model.settings.similarity
        self._model = model
        self._dtype: TrainingDtype = dtype
        self._pad_to_limit = pad_to_limit
        if isinstance(model, BiEncoder):
            self._skip = {"query": model.skipped_tokens("query"), "document": model.skipped_tokens("document")}
        else:
            own = model.settings.colbert.document_length
            self._document_limit = min(own, max_length or own)
            self.do_query_expansion = model.settings.colbert.query_expansion
            self.skiplist: list[int] = []
            counts = torch.ones(model.encoder.config.vocab_size, dtype=torch.bool)
            counts[model.skipped_ids] = False
            self._counts = counts.to(model.encoder.device)  # (V,): whether the vectors of a token id count in documents

    def __getitem__(self, number: int) -> nn.Module:
        """Return a submodule; cached losses check the type of the first."""
        return list(self.children())[number]

    def get_sentence_embedding_dimension(self) -> int:
        """Return the width d of a vector; `MatryoshkaLoss` asks for it."""
        return self._model.dim

    def columns(self, batch: PackedBatch, sizes: Sequence[int], *, one_pass: bool, present: Tensor | None = None) -> list[dict[str, Any]]:
        """Return the features of each column of a batch.

        Returns:
            For each column its `PackedBatch`, and what the loss reads. For a bi-encoder, ``input_ids`` is empty, (B, 0): cached losses
            read the number of texts and the device from it. For a ColBERT, ``input_ids`` (B, S) and ``attention_mask`` (B, S).
        """
        bounds = list(pairwise(accumulate(sizes, initial=0)))
        parts = [batch[first:last] for first, last in bounds]
        columns = [self._features(part, is_query=position == 0, width=self._width(parts, position)) for position, part in enumerate(parts)]
        if present is not None:
            columns = [{**column, THERE: present[first:last, None]} for column, (first, last) in zip(columns, bounds, strict=True)]
        if one_pass:
            # The whole batch is encoded when the states of one of its columns are first needed.
            split = cache(lambda: torch.split(self._states(batch), [part.num_tokens for part in parts]))
            columns = [{**column, SHARED: partial(lambda place: split()[place], position)} for position, column in enumerate(columns)]
        return columns

    def _width(self, parts: Sequence[PackedBatch], position: int) -> int:
        """Padded length S of a column of a ColBERT."""
        if not isinstance(self._model, ColBERT) or position == 0:
            return parts[position].max_seqlen
        if self._pad_to_limit:
            return self._document_limit
        # PyLate pads documents to their limit and multiplies scores of padding by zero, so a document with padding scores at least 0 per
        # query token. One position after the longest document gives the same scores.
        return min(max(part.max_seqlen for part in parts[1:]) + 1, self._document_limit)

    def _features(self, batch: PackedBatch, *, is_query: bool, width: int) -> dict[str, Any]:
        if isinstance(self._model, BiEncoder):
            return {PACKED: batch, "input_ids": batch.ids.new_empty(len(batch), 0), SKIP: self._skip["query" if is_query else "document"]}
        [attended] = copy_to(batch.ids.device, torch.tensor(batch.key_lengths or batch.lengths))
        mask = torch.arange(width, device=batch.ids.device) < attended[:, None]  # (B, S)
        ids = _pad(batch.ids[:, None], batch, width)[..., 0]
        return {PACKED: batch, "input_ids": ids, "attention_mask": mask if is_query else mask & self._counts.to(ids.device)[ids]}

    def forward(self, features: Mapping[str, Any]) -> dict[str, Tensor]:
        """Encode a column."""
        batch: PackedBatch = features[PACKED]
        with autocast(self._dtype, self.encoder.device):
            states = features[SHARED]() if SHARED in features else self._states(batch)
            if isinstance(self._model, BiEncoder):
                vectors = self._model.pool(states, batch, skip=features[SKIP]).float()
                return {"sentence_embedding": vectors * features[THERE] if THERE in features else vectors}
        tokens = _pad(states, batch, features["input_ids"].shape[1]).float()
        return {"token_embeddings": tokens * features[THERE][..., None] if THERE in features else tokens}

    def _states(self, batch: PackedBatch) -> Tensor:
        """Hidden states (N, D) of a bi-encoder; vectors (N, d) of a ColBERT."""
        hidden: Tensor = self.encoder(batch)
        return hidden if isinstance(self._model, BiEncoder) else self.projections(hidden)


def _pad(values: Tensor, batch: PackedBatch, width: int) -> Tensor:
    """Lay (N, d) out as (B, S, d), zeros in the padding."""
    return F.pad(batch.pad(values), (0, 0, 0, width - batch.max_seqlen))


class RetrievalLoss(nn.Module):
    """The loss of a recipe around a model."""

    def __init__(self, recipe: Recipe, model: BiEncoder | ColBERT, *, processes: int = 1) -> None:
        super().__init__()
        section, training = recipe.loss, recipe.training
        dims = section.matryoshka_dims
        if dims and dims[0] != model.dim:
            raise InputError(f"loss.matryoshka_dims: the first must be {model.dim}, the width of the model's vectors, got {dims[0]}")
        if dims and isinstance(model, BiEncoder) and not model.settings.normalize:
            raise InputError("loss.matryoshka_dims: requires model.normalize: true, because the loss compares vectors scaled to length 1")
        model.encoder.gradient_checkpointing = training.gradient_checkpointing
        self.model = LossModel(
            model, dtype=training.dtype, max_length=training.max_length, pad_to_limit=section.gather_across_devices and processes > 1
        )
        self.loss = LOSSES[section.name](self.model, section)
        if dims:
            self.loss = MatryoshkaLoss(self.model, self.loss, matryoshka_dims=list(dims))
        self._one_pass = section.name not in CACHED
        self._mini_batch = None if self._one_pass else section.mini_batch_size

    def forward(self, inputs: Mapping[str, Any]) -> Tensor:
        """Return the loss of a batch of the `Collator`, a scalar; its tensors are on the model's device."""
        columns = self.model.columns(inputs[TEXTS], inputs[COLUMNS], one_pass=self._one_pass, present=inputs.get(PRESENT))
        loss: Tensor = self.loss(columns, inputs.get(LABEL))
        return loss

    def backward_passes(self, inputs: Mapping[str, Any]) -> int:
        """Return the number of backward passes through the model that the loss of a batch runs: one per mini-batch of a cached loss."""
        size = self._mini_batch
        return 1 if size is None else sum(-(-texts // size) for texts in inputs[COLUMNS])


class PackedCachedMNRL(CachedMultipleNegativesRankingLoss):  # type: ignore[misc]  # the library is untyped
    """The library's cached loss; its mini-batches are also cut from packed batches (the library cuts only tensors)."""

    def embed_minibatch(
        self, sentence_feature: dict[str, Any], begin: int, end: int, with_grad: bool, copy_random_state: bool, random_state: Any = None
    ) -> Any:
        """Encode the texts ``begin`` to ``end``; arguments and result are the library's."""
        features = {key: value[begin:end] if isinstance(value, PackedBatch) else value for key, value in sentence_feature.items()}
        return super().embed_minibatch(features, begin, end, with_grad, copy_random_state, random_state)


def contrastive_scores(
    queries_embeddings: Tensor, documents_embeddings: Tensor, queries_mask: Tensor | None = None, documents_mask: Tensor | None = None
) -> Tensor:
    """Compute MaxSim of every query with every document, as PyLate's ``ColBERTScores`` does, without a tensor of all similarities.

    Args:
        queries_embeddings: (Q, S_q, d).
        documents_embeddings: The C - 1 document columns side by side, (B, C - 1, S_d, d).
        queries_mask: Query tokens that count, (Q, S_q); None for all.
        documents_mask: Document tokens that count, (B, C - 1, S_d); the others have similarity 0. None for all.

    Returns:
        (Q, B * (C - 1)), the documents of the first row before those of the next; -inf of absent documents.
    """
    documents, mask = documents_embeddings.flatten(0, 1), None if documents_mask is None else documents_mask.flatten(0, 1)
    scores = maxsim_padded(queries_embeddings, documents, queries_mask, mask, masked_similarity=0.0)
    # The vectors of absent documents are zeros (`LossModel.forward`); the first token of any other, [CLS], has a vector.
    return scores.masked_fill((documents[:, 0] == 0).all(dim=1), -math.inf)


def distillation_scores(
    queries_embeddings: Tensor, documents_embeddings: Tensor, queries_mask: Tensor | None = None, documents_mask: Tensor | None = None
) -> Tensor:
    """Compute MaxSim of every query with its own documents, (Q, P, S_d, d), as PyLate's ``colbert_kd_scores`` does; returns (Q, P)."""
    return maxsim_padded(queries_embeddings, documents_embeddings, queries_mask, documents_mask, masked_similarity=0.0)


def _pylate(name: str) -> Callable[..., nn.Module]:
    """A loss of `quiver.retrieval.training.pylate_losses`, which imports PyLate: bi-encoders train without it."""
    loss: Callable[..., nn.Module] = getattr(import_module("quiver.retrieval.training.pylate_losses"), name)
    return loss


def _contrast(model: Any, section: LossSection) -> dict[str, Any]:
    """Arguments of a bi-encoder's losses with in-batch negatives."""
    similarity = SIMILARITIES[model.similarity_fn_name]
    return {"scale": section.scale, "similarity_fct": similarity, "gather_across_devices": section.gather_across_devices}


def _contrast_tokens(section: LossSection) -> dict[str, Any]:
    """Arguments of a ColBERT's losses with in-batch negatives."""
    return {"gather_across_devices": section.gather_across_devices, "temperature": section.temperature}


LOSSES: dict[str, Callable[[Any, LossSection], nn.Module]] = {
    "mnrl": lambda model, section: MultipleNegativesRankingLoss(model, **_contrast(model, section)),
    "cached_mnrl": lambda model, section: PackedCachedMNRL(model, mini_batch_size=section.mini_batch_size, **_contrast(model, section)),
    "margin_mse": lambda model, _: MarginMSELoss(model, similarity_fct=PAIRWISE[model.similarity_fn_name]),
    "kl": lambda model, section: DistillKLDivLoss(
        model, similarity_fct=PAIRWISE[model.similarity_fn_name], temperature=section.temperature
    ),
    "contrastive": lambda model, section: _pylate("GatheredContrastive")(model, contrastive_scores, **_contrast_tokens(section)),
    "cached_contrastive": lambda model, section: _pylate("MeanCachedContrastive")(
        model, contrastive_scores, mini_batch_size=section.mini_batch_size, **_contrast_tokens(section)
    ),
    "distillation": lambda model, section: _pylate("Distillation")(
        model, distillation_scores, normalize_scores=section.student_scores == "minmax"
    ),
}
"""Name in a recipe -> the loss around a `LossModel`, or around a model of the library. `LOSSES_BY_KIND` of
`quiver.retrieval.training.recipe` says which kind of model each trains."""

CACHED = ("cached_mnrl", "cached_contrastive")  # losses that encode a few texts at a time, to save memory (GradCache)
