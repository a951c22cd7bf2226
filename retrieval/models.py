"""Load a model of either kind: the checkpoint says which it is."""

from __future__ import annotations

from pathlib import Path

import torch

from encoder.hub import local_folder
from retrieval.biencoder import BiEncoder
from retrieval.colbert import ColBERT
from retrieval.interchange import read_model_folder


def load_model(
    source: str | Path, *, revision: str | None = None, dtype: torch.dtype = torch.float32, device: str = "cpu"
) -> BiEncoder | ColBERT:
    """Load a bi-encoder or a ColBERT from a folder or the hub.

    Args:
        source: Folder or hub id.
        revision: Branch, tag or commit on the hub.
        dtype: Of the encoder's weights in memory.
        device: Where they go.

    Raises:
        InputError: It is no model, or one that Quiver does not run; one line says why.
    """
    kind = read_model_folder(local_folder(source, revision=revision)).kind
    model: type[BiEncoder] | type[ColBERT] = ColBERT if kind == "colbert" else BiEncoder
    return model.from_pretrained(source, revision=revision, dtype=dtype, device=device)
