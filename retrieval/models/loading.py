"""Load bi-encoders and ColBERT models: the checkpoint decides which."""

from __future__ import annotations

import copy
import difflib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from quiver.encoder import optimize_for_inference
from quiver.encoder.errors import InputError
from quiver.retrieval.models.biencoder import BiEncoder
from quiver.retrieval.models.bm25 import BM25, NAME
from quiver.retrieval.models.colbert import ColBERT
from quiver.retrieval.models.folders import ModelParts, load_for_inference
from quiver.retrieval.models.onnx_model import OnnxModel, is_onnx_export
from quiver.retrieval.models.options import FOLDERS_SETTINGS, ModelOptions
from quiver.retrieval.models.pretrained import PretrainedModel, check_fingerprint, options_of_card, with_absolute_source
from quiver.retrieval.records import DenseModel, Dtype, ModelCard, TokenModel


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
    model = build_model(load_for_inference(source, revision, dtype, device, options), source, batch_tokens=batch_tokens)
    if isinstance(model, BiEncoder):
        if options.truncate_dim is not None and options.truncate_dim > model.dim:
            raise InputError(f"{source}: its vectors have {model.dim} dimensions, fewer than truncate_dim (--truncate-dim)")
        model.truncate_dim = options.truncate_dim
    return model


def load_described_model(
    card: ModelCard, source: str | Path, *, device: str | None = None, batch_tokens: int | None = None
) -> BiEncoder | ColBERT:
    """Load a model with the dtype, prompts, lengths and vector width of a card.

    Args:
        card: Card of the model, as an index stores it.
        source: Folder or Hub id.
        device: As in `load_model`.
        batch_tokens: As in `load_model`.

    Raises:
        InputError: The folder is not a supported model.
    """
    options = options_of_card(card)
    return load_model(source, dtype=card.dtype, device=device, batch_tokens=batch_tokens, options=options).with_card(card)


def with_dtype(model: BiEncoder | ColBERT, dtype: Dtype) -> BiEncoder | ColBERT:
    """Return a model in another dtype, as `load_model` would load it on a CPU; the given one is not changed.

    Args:
        model: A model in float32, not prepacked.
        dtype: Dtype of the copy.
    """
    if dtype == "float32":
        return model
    encoder = copy.deepcopy(model.encoder).to("cpu", torch.float32 if dtype == "int8" else getattr(torch, dtype))
    if dtype == "int8":
        optimize_for_inference(encoder, precision="int8")
    return type(model).from_parts(encoder, model.tokenizer, model.settings, source=model.source)


def build_model(parts: ModelParts, source: str | Path, *, batch_tokens: int | None = None) -> BiEncoder | ColBERT:
    """Make a bi-encoder or a ColBERT model of loaded parts."""
    model: type[BiEncoder] | type[ColBERT] = ColBERT if parts.settings.kind == "colbert" else BiEncoder
    return model.from_parts(parts.encoder, parts.tokenizer, parts.settings, source=str(source), batch_tokens=batch_tokens)


@dataclass(frozen=True)
class WorkerModel:
    """How another process, possibly on another machine, loads the same model; its device is the worker's own.

    Attributes:
        card: Card of the model.
        batch_tokens: Tokens per batch; None to choose by the worker's device.
    """

    card: ModelCard
    batch_tokens: int | None = None

    @classmethod
    def of(cls, model: DenseModel | TokenModel | PretrainedModel[Any]) -> WorkerModel:
        """Describe a loaded model."""
        batch_tokens = model.batch_tokens if isinstance(model, PretrainedModel) else None
        return cls(with_absolute_source(model.card), batch_tokens)

    def load(self) -> BiEncoder | ColBERT | OnnxModel | BM25:
        """Load the model.

        Raises:
            InputError: The model cannot be loaded there, or has another fingerprint.
        """
        card = self.card
        if card.kind == "bm25":
            return BM25()
        if card.library != "quiver":
            raise InputError(f"{card.source}: workers cannot run {card.library} models; use --library quiver, or encode without workers")
        if is_onnx_export(card.source):
            model: BiEncoder | ColBERT | OnnxModel = OnnxModel(card.source, batch_tokens=self.batch_tokens)
        else:
            model = load_described_model(card, card.source, batch_tokens=self.batch_tokens)
        check_fingerprint(model.card, card)
        return model
