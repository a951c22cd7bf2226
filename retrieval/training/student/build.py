"""The student: the model being trained as sentence-transformers or PyLate sees it, with its loss and its collator.

The library's model holds the very weights of ours: a step of its optimiser is a step of the model that is saved and searched.

Importing this module imports sentence-transformers and PyLate (extra ``train``).

Source: the contracts of sentence-transformers 5.3 and PyLate 1.6 for a model made of modules.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from pylate import models
from sentence_transformers import SentenceTransformer
from sentence_transformers.models import Normalize
from torch import Tensor, nn

from quiver.encoder import InputError
from quiver.retrieval.models.biencoder import BiEncoder
from quiver.retrieval.models.colbert import ColBERT
from quiver.retrieval.training.sections import Recipe
from quiver.retrieval.training.student.collator import Collator
from quiver.retrieval.training.student.heads import NativePooling, NativeProjection
from quiver.retrieval.training.student.losses import make_loss
from quiver.retrieval.training.student.native import NativeTransformer


@dataclass(frozen=True)
class Student:
    """What the trainer needs of a recipe's model.

    Attributes:
        model: Ours; its weights are trained in place.
        library: The same weights as a model of the library; PyLate's ``ColBERT`` for that kind.
        loss: Around ``library``.
        collator: Rows to what the loss reads.
    """

    model: BiEncoder | ColBERT
    library: SentenceTransformer
    loss: nn.Module
    collator: Collator

    def batch_loss(self, batch: Mapping[str, Any]) -> Tensor:
        """The loss of a batch of the collator, whose tensors are on the model's device."""
        prefixes = [name.removesuffix("input_ids") for name in batch if name.endswith("_input_ids")]
        columns = [{name.removeprefix(prefix): value for name, value in batch.items() if name.startswith(prefix)} for prefix in prefixes]
        loss: Tensor = self.loss(columns, batch.get("label"))
        return loss


def build_student(recipe: Recipe, model: BiEncoder | ColBERT) -> Student:
    """Prepare a model for training.

    Args:
        recipe: Its ``loss`` and ``training``.
        model: What `quiver.retrieval.training.start.build_model` gave.

    Raises:
        InputError: The loss's Matryoshka widths do not fit the model.
        ValueError: The encoder is frozen.
    """
    section, training = recipe.loss, recipe.training
    if section.matryoshka_dims:
        _check_matryoshka(section.matryoshka_dims, model)
    library = dense_library(model) if isinstance(model, BiEncoder) else colbert_library(model)
    model.encoder.gradient_checkpointing = training.gradient_checkpointing
    if training.precision == "bf16":
        autocast_forward(library, model.encoder.device.type)
    collator = Collator(
        model,
        max_length=training.max_length,
        merged=section.name == "distillation",
        filled=section.gather_across_devices and int(os.environ.get("WORLD_SIZE", "1")) > 1,  # set by torchrun
        minmax=section.teacher_scores == "minmax",
    )
    return Student(model, library, make_loss(library, section), collator)


def autocast_forward(module: nn.Module, device_type: str) -> None:
    """Run a module's forward pass under bfloat16 autocast and return float32, so that losses compare in float32; as accelerate does."""
    forward = module.forward

    def cast(*arguments: Any, **named: Any) -> dict[str, Any]:
        with torch.autocast(device_type, torch.bfloat16):
            features: dict[str, Any] = forward(*arguments, **named)
        tensors = {name: value.float() for name, value in features.items() if isinstance(value, Tensor) and value.is_floating_point()}
        return features | tensors

    module.forward = cast


def dense_library(model: BiEncoder) -> SentenceTransformer:
    """The same weights as a sentence-transformers model."""
    settings = model.settings
    first = NativeTransformer(
        model.encoder, model.tokenizer, max_seq_length=model.max_length, do_lower_case=settings.lower_case, pads=False
    )
    pooling = NativePooling(first.get_word_embedding_dimension(), pooling_mode=settings.pooling, include_prompt=settings.include_prompt)
    heads = [NativeProjection(projection) for projection in settings.projections]
    return SentenceTransformer(
        modules=[first, pooling, *heads, *([Normalize()] if settings.normalize else [])],
        prompts={"query": settings.query_prompt, "document": settings.document_prompt},
        similarity_fn_name=settings.similarity,
        device=str(model.encoder.device),
    )


def colbert_library(model: ColBERT) -> SentenceTransformer:
    """The same weights as a PyLate model."""
    colbert = model.settings.colbert
    longest = max(colbert.query_length, colbert.document_length)
    first = NativeTransformer(model.encoder, model.tokenizer, max_seq_length=longest, do_lower_case=model.settings.lower_case, pads=False)
    *inner, last = model.settings.projections
    return models.ColBERT(
        modules=[first, *map(NativeProjection, inner), NativeProjection(last, pads=True)],
        query_prefix=colbert.query_prefix,
        document_prefix=colbert.document_prefix,
        query_length=colbert.query_length,
        document_length=colbert.document_length,
        do_query_expansion=colbert.query_expansion,
        attend_to_expansion_tokens=colbert.attend_to_expansion,
        skiplist_words=list(colbert.skiplist),
        device=str(model.encoder.device),
    )


def _check_matryoshka(dims: tuple[int, ...], model: BiEncoder | ColBERT) -> None:
    if dims[0] != model.dim:
        raise InputError(f"loss.matryoshka_dims: the first must be {model.dim}, the width of the model's vectors, got {dims[0]}")
    if isinstance(model, BiEncoder) and not model.settings.normalize:
        # The library's loss scales every cut to length 1, the full width too: it would train another similarity than is searched by.
        raise InputError("loss.matryoshka_dims: needs model.normalize: true, for the loss compares vectors of length 1")
