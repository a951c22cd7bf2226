"""Load a model of either kind: the checkpoint says which it is."""

from __future__ import annotations

from pathlib import Path

import torch

from encoder.config import Precision
from retrieval.biencoder import BiEncoder
from retrieval.colbert import ColBERT
from retrieval.model_folder import load_for_inference


def default_device() -> str:
    """Where models go unless told otherwise: ``cuda`` where there is one, else ``cpu``."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def load_model(
    source: str | Path,
    *,
    revision: str | None = None,
    dtype: torch.dtype = torch.float32,
    device: str | None = None,
    precision: Precision = "float",
) -> BiEncoder | ColBERT:
    """Load a bi-encoder or a ColBERT from a folder or the hub.

    Args:
        source: Folder or hub id.
        revision: Branch, tag or commit on the hub.
        dtype: Of the encoder's weights in memory.
        device: Where the weights go; by default `default_device`. On a CPU the model is for inference only.
        precision: ``int8`` quantises the encoder's matrices, on a CPU.

    Raises:
        InputError: It is no model, or one that Quiver does not run; one line says why.
    """
    parts = load_for_inference(source, revision=revision, dtype=dtype, device=device or default_device(), precision=precision)
    model: type[BiEncoder] | type[ColBERT] = ColBERT if parts.settings.kind == "colbert" else BiEncoder
    return model(parts.encoder, parts.tokenizer, parts.settings, source=str(source))
