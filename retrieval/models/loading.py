"""Load a model of either kind, here and again elsewhere: the checkpoint says which it is."""

from __future__ import annotations

import platform
from dataclasses import replace
from pathlib import Path

import torch

from quiver.encoder.config import Precision
from quiver.encoder.errors import InputError
from quiver.retrieval.models.biencoder import BiEncoder
from quiver.retrieval.models.colbert import ColBERT
from quiver.retrieval.models.model_folder import INFERENCE_DTYPE, load_for_inference
from quiver.retrieval.records import ModelCard


def load_model(
    source: str | Path,
    *,
    revision: str | None = None,
    dtype: torch.dtype = INFERENCE_DTYPE,
    device: str | None = None,
    precision: Precision = "float",
) -> BiEncoder | ColBERT:
    """Load a bi-encoder or a ColBERT from a folder or the hub.

    Args:
        source: Folder or hub id.
        revision: Branch, tag or commit on the hub.
        dtype: Of the encoder's weights in memory.
        device: Where the weights go; by default `retrieval.models.model_folder.default_device`. On a CPU the model is for inference only.
        precision: ``int8`` quantises the encoder's matrices, on a CPU.

    Raises:
        InputError: It is no model, or one that Quiver does not run; one line says why.
    """
    parts = load_for_inference(source, revision=revision, dtype=dtype, device=device, precision=precision)
    model: type[BiEncoder] | type[ColBERT] = ColBERT if parts.settings.kind == "colbert" else BiEncoder
    return model(parts.encoder, parts.tokenizer, parts.settings, source=str(source))


def anchored(card: ModelCard) -> ModelCard:
    """The card with a folder's path made absolute: it is used from anywhere."""
    source = Path(card.source)
    return replace(card, source=str(source.resolve())) if card.source and source.is_dir() else card


def load_again(card: ModelCard) -> BiEncoder | ColBERT:
    """The model of a card, loaded once more in another process or on another machine.

    Raises:
        InputError: It cannot be loaded there, or is another one: its vectors would not fit those of the first.
    """
    if card.library != "quiver":
        raise InputError(f"{card.source}: run by {card.library}; other workers run Quiver's own models only, so leave them away")
    model = load_model(card.source, precision=card.precision)
    if model.card.fingerprint != card.fingerprint:
        raise InputError(
            f"{card.source}: another model for a worker on {platform.node()} ({model.card.fingerprint[:12]}) than where the work was begun "
            f"({card.fingerprint[:12]}); all need the same files, loaded in float32"
        )
    return model
