"""The model of an index: BM25, an ONNX export, or a bi-encoder or ColBERT model. PyTorch is imported for the last two only."""

from __future__ import annotations

from typing import TYPE_CHECKING

from quiver.encoder.errors import InputError
from quiver.retrieval.models.bm25 import BM25, NAME
from quiver.retrieval.models.onnx_model import OnnxModel, is_onnx_export
from quiver.retrieval.models.options import FOLDERS_SETTINGS, ModelOptions

if TYPE_CHECKING:
    from quiver.retrieval.models.biencoder import BiEncoder
    from quiver.retrieval.models.colbert import ColBERT
    from quiver.retrieval.records import Dtype, ModelCard

NOT_FOR_BM25 = f"dtype, device and the other options of a model are not for {NAME}, which is none; remove them"
"""Error where BM25 gets options of a model."""


def load_index_model(
    model: ModelCard | str,
    source: str | None = None,
    *,
    dtype: Dtype | None = None,
    device: str | None = None,
    batch_tokens: int | None = None,
    options: ModelOptions = FOLDERS_SETTINGS,
) -> BiEncoder | ColBERT | OnnxModel | BM25:
    """Load the model of an index: the one that built it, with its dtype, prompts, lengths and vector width, or the one that will.

    Args:
        model: Card of the model that built the index; or for a new index a folder or Hub id, or ``bm25``.
        source: Folder or Hub id to load instead, such as the new location of a model, or its ONNX export.
        dtype: As in `quiver.retrieval.models.loading.load_model`, for a new index.
        device: As in `load_model`.
        batch_tokens: As in `load_model`.
        options: As in `load_model`, for a new index; an existing one is searched with what it was built with.

    Raises:
        InputError: The model cannot be loaded, or options of a model are given for BM25, which is none, or for an ONNX export, whose
            settings are fixed.
    """
    card = None if isinstance(model, str) else model
    name = model if isinstance(model, str) else model.source
    if card is not None and card.kind == "bm25" and source not in (None, NAME):
        raise InputError(f"{source}: the index was built with {NAME}, without a model; remove --model")
    if name == NAME if card is None else card.kind == "bm25":
        if (dtype, device, batch_tokens, options) != (None, None, None, FOLDERS_SETTINGS):
            raise InputError(NOT_FOR_BM25)
        return BM25()
    given = source or name
    if is_onnx_export(given):
        if options != FOLDERS_SETTINGS or dtype not in (None, "float32") or device not in (None, "cpu"):
            raise InputError(f"{given}: an ONNX export has the settings it was exported with and runs on the CPU; remove the other options")
        return OnnxModel(given, batch_tokens=batch_tokens)

    from quiver.retrieval.models.loading import load_described_model, load_model

    if card is None:
        return load_model(given, dtype=dtype, device=device, batch_tokens=batch_tokens, options=options)
    try:
        return load_described_model(card, given, device=device, batch_tokens=batch_tokens)
    except InputError as error:
        if source is not None:
            raise
        raise InputError(f"{error}; the index was built with that model: pass --model if it has moved") from error
