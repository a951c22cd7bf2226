"""Load bi-encoders and ColBERT models, whose checkpoint decides which, and the models of indexes.

PyTorch is imported by the functions that need it: an index of BM25, or one that an ONNX export searches, is searched without it.
"""

from __future__ import annotations

import copy
import difflib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quiver.encoder.errors import InputError
from quiver.retrieval.models.bm25 import BM25, NAME
from quiver.retrieval.models.onnx_model import OnnxModel
from quiver.retrieval.models.options import FOLDERS_SETTINGS, ModelOptions, is_onnx_export

if TYPE_CHECKING:
    import torch

    from quiver.retrieval.models.biencoder import BiEncoder
    from quiver.retrieval.models.colbert import ColBERT
    from quiver.retrieval.models.pretrained import ModelParts, PretrainedModel
    from quiver.retrieval.records import DenseModel, Dtype, ModelCard, TokenModel

NOT_FOR_BM25 = f"dtype, device and the other options of a model are not for {NAME}, which is none; remove them"
"""Error where BM25 gets options of a model."""


def load_model(
    source: str | Path,
    *,
    revision: str | None = None,
    dtype: Dtype | torch.dtype | None = None,
    device: str | None = None,
    batch_tokens: int | None = None,
    options: ModelOptions = FOLDERS_SETTINGS,
) -> BiEncoder | ColBERT:
    """Load a bi-encoder or a ColBERT model from a folder or the Hub; the checkpoint decides which.

    The arguments are those of `PretrainedModel`; ``options`` replace settings of the folder.

    Raises:
        InputError: The folder is not a supported model.
    """
    if difflib.get_close_matches(str(source).lower(), [NAME]) and not Path(source).exists():
        raise InputError(f"{source}: no such model; did you mean {NAME}?")
    from quiver.encoder.checkpoints.checkpoint import pin_source
    from quiver.retrieval.models.biencoder import BiEncoder
    from quiver.retrieval.models.pretrained import load_for_inference

    source = pin_source(source, revision)
    model = build_model(load_for_inference(source, dtype, device, options), source, batch_tokens=batch_tokens)
    if isinstance(model, BiEncoder):
        if options.truncate_dim is not None and options.truncate_dim > model.dim:
            raise InputError(f"{source}: its vectors have {model.dim} dimensions, fewer than truncate_dim (--truncate-dim)")
        model.truncate_dim = options.truncate_dim
    return model


def load_described_model(
    card: ModelCard, source: str | Path, *, device: str | None = None, batch_tokens: int | None = None
) -> BiEncoder | ColBERT:
    """Load a model with the dtype, prompts, lengths and vector width of a card, as an index stores it; see `load_model`."""
    from quiver.retrieval.models.pretrained import options_of_card

    options = options_of_card(card)
    return load_model(source, dtype=card.dtype, device=device, batch_tokens=batch_tokens, options=options).with_card(card)


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
        dtype: As in `load_model`, for a new index.
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

    if card is None:
        return load_model(given, dtype=dtype, device=device, batch_tokens=batch_tokens, options=options)
    try:
        return load_described_model(card, given, device=device, batch_tokens=batch_tokens)
    except InputError as error:
        if source is not None:
            raise
        raise InputError(f"{error}; the index was built with that model: pass --model if it has moved") from error


def with_dtype(model: BiEncoder | ColBERT, dtype: Dtype) -> BiEncoder | ColBERT:
    """Copy a model in float32, which is not prepacked, in another dtype, as `load_model` would load it on a CPU."""
    if dtype == "float32":
        return model
    import torch

    from quiver.encoder import optimize_for_inference

    encoder = copy.deepcopy(model.encoder).to("cpu", torch.float32 if dtype == "int8" else getattr(torch, dtype))
    if dtype == "int8":
        optimize_for_inference(encoder, precision="int8")
    return type(model).from_parts(encoder, model.tokenizer, model.settings, source=model.source)


def build_model(parts: ModelParts, source: str | Path, *, batch_tokens: int | None = None) -> BiEncoder | ColBERT:
    """Make a bi-encoder or a ColBERT model of loaded parts."""
    from quiver.retrieval.models.biencoder import BiEncoder
    from quiver.retrieval.models.colbert import ColBERT

    model: type[BiEncoder] | type[ColBERT] = ColBERT if parts.settings.kind == "colbert" else BiEncoder
    return model.from_parts(parts.encoder, parts.tokenizer, parts.settings, source=str(source), batch_tokens=batch_tokens)


@dataclass(frozen=True)
class WorkerModel:
    """How another process, possibly on another machine, loads the same model; device and, if None, batch size are the worker's choice."""

    card: ModelCard
    batch_tokens: int | None = None

    @classmethod
    def of(cls, model: DenseModel | TokenModel | PretrainedModel[Any]) -> WorkerModel:
        """Describe a loaded model."""
        from quiver.retrieval.models.pretrained import PretrainedModel, with_absolute_source

        batch_tokens = model.batch_tokens if isinstance(model, PretrainedModel) else None
        return cls(with_absolute_source(model.card), batch_tokens)

    def load(self) -> BiEncoder | ColBERT | OnnxModel | BM25:
        """Load the model; an InputError if it cannot be loaded there, or has another fingerprint."""
        card = self.card
        if card.kind == "bm25":
            return BM25()
        if card.library != "quiver":
            raise InputError(f"{card.source}: workers cannot run {card.library} models; use --library quiver, or encode without workers")
        from quiver.retrieval.models.pretrained import check_fingerprint

        if is_onnx_export(card.source):
            model: BiEncoder | ColBERT | OnnxModel = OnnxModel(card.source, batch_tokens=self.batch_tokens)
        else:
            model = load_described_model(card, card.source, batch_tokens=self.batch_tokens)
        check_fingerprint(model.card, card)
        return model
