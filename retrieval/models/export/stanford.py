"""ColBERT models in the layout of Stanford's ColBERT: projection beside the encoder's weights, settings in ``artifact.metadata``.

Stanford's code always expands queries with [MASK], always inserts a marker, and skips ASCII punctuation or nothing. PyLate and
sentence-transformers 6 also read the layout; the latter puts a space after the marker, which the exported tokenizer strips.

Source: colbert-ai 0.2.22 (``ColBERTConfig``, ``HF_ColBERT``, ``QueryTokenizer``); the files of colbert-ir/colbertv2.0.
"""

from __future__ import annotations

import logging
import string
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from quiver.encoder import Encoder, InputError, Tokenizer
from quiver.encoder.checkpoints import config_from_hf, config_to_hf
from quiver.encoder.checkpoints.checkpoint import FORMATS, from_hf_state, read_state, to_hf_state, write_checkpoint
from quiver.encoder.files import read_json, write_json
from quiver.encoder.model import Uninitialized
from quiver.retrieval.models.batches import IDENTITY, Projection
from quiver.retrieval.models.export.sentence_transformers import FolderSettings, read_settings, unsupported_by_pylate, with_strip
from quiver.retrieval.models.options import STANFORD_ARCHITECTURE, ColBERTSettings, ModelFolder

logger = logging.getLogger(__name__)

METADATA = "artifact.metadata"
LINEAR = "linear.weight"


class _Metadata(FolderSettings):
    similarity: Literal["cosine"] = "cosine"
    interaction: Literal["colbert"] = "colbert"
    query_token_id: str = "[unused0]"
    doc_token_id: str = "[unused1]"
    query_maxlen: int = 32
    doc_maxlen: int = 220
    attend_to_mask_tokens: bool = False
    mask_punctuation: bool = True


def read_stanford(folder: Path) -> ModelFolder:
    """Read a folder of Stanford's ColBERT; an InputError if it does not use MaxSim of cosines, or a file is malformed."""
    path = folder / METADATA
    values = read_json(path) if path.is_file() else {}
    if not values:
        logger.warning("%s: no %s; using Stanford's defaults: 32 tokens per query, 220 per document", folder, METADATA)
    found = read_settings(_Metadata, values, path)
    colbert = ColBERTSettings(
        query_prefix=found.query_token_id,
        document_prefix=found.doc_token_id,
        query_length=found.query_maxlen,
        document_length=found.doc_maxlen,
        attend_to_expansion=found.attend_to_mask_tokens,
        skiplist=tuple(string.punctuation) if found.mask_punctuation else (),
    )
    colbert.check_lengths(path)
    weight = _read_state(folder).get(LINEAR)
    if weight is None or weight.ndim != 2:
        raise InputError(f"{folder}: {LINEAR}, the projection of a {STANFORD_ARCHITECTURE} checkpoint, is missing or not a matrix")
    projection = Projection(weight.shape[1], weight.shape[0])
    projection.load_state_dict({LINEAR: weight})
    return ModelFolder("colbert", folder, projections=(projection,), similarity="maxsim", colbert=colbert)


def _read_state(folder: Path) -> dict[str, Tensor]:
    return read_state(folder, FORMATS[config_from_hf(read_json(folder / "config.json")).family].tensors)


def load_stanford_encoder(folder: Path, *, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Encoder:
    """Load the encoder of a Stanford folder in evaluation mode, as `quiver.encoder.load_encoder` does, without the projection."""
    config = config_from_hf(read_json(folder / "config.json"))
    with Uninitialized():
        encoder = Encoder(config)
    state = {key: tensor for key, tensor in _read_state(folder).items() if key != LINEAR}
    encoder.load_state_dict(from_hf_state(encoder, state, where=str(folder)), assign=True)
    return encoder.to(device=device, dtype=dtype).eval()


def write_stanford(folder: Path, settings: ModelFolder, encoder: Encoder, tokenizer: Tokenizer) -> None:
    """Write a ColBERT model in Stanford's layout, which PyLate and sentence-transformers 6 read too.

    Raises:
        InputError: Stanford's code does not support the model; lists all reasons, and nothing is written.
    """
    if problems := list(_list_problems(settings)):
        other = "sentence-transformers" if unsupported_by_pylate(settings) else "pylate"
        raise InputError(f"Stanford's layout cannot express this model: {'; '.join(problems)}; use --layout {other}")
    state: dict[str, Tensor] = to_hf_state(encoder, prefix=True)
    state[LINEAR] = settings.projections[0].linear.weight.detach().cpu().contiguous()
    dtype = str(encoder.embeddings.tokens.weight.dtype).removeprefix("torch.")
    config = config_to_hf(encoder.config) | {"architectures": [STANFORD_ARCHITECTURE], "torch_dtype": dtype}
    write_checkpoint(folder, state, config)
    colbert = settings.colbert
    with_strip(tokenizer, prefixes=(colbert.query_prefix, colbert.document_prefix)).save(folder)
    write_json(
        folder / METADATA,
        {
            "query_token": "[Q]",
            "doc_token": "[D]",
            "query_token_id": colbert.query_prefix,
            "doc_token_id": colbert.document_prefix,
            "query_maxlen": colbert.query_length,
            "doc_maxlen": colbert.document_length,
            "dim": settings.projections[0].linear.out_features,
            "similarity": "cosine",
            "interaction": "colbert",
            "mask_punctuation": bool(colbert.skiplist),
            "attend_to_mask_tokens": colbert.attend_to_expansion,
        },
    )


def _list_problems(settings: ModelFolder) -> Iterator[str]:
    colbert = settings.colbert
    yield from unsupported_by_pylate(settings)
    plain = [len(list(one.parameters())) == 1 and not one.use_residual and one.activation == IDENTITY for one in settings.projections]
    if plain != [True]:
        yield "it has more than one matrix after the encoder"
    if not colbert.query_prefix or not colbert.document_prefix:
        yield "it has no prefixes"
    if not colbert.query_expansion:
        yield "it does not expand queries"
    if colbert.skiplist and set(colbert.skiplist) != set(string.punctuation):
        yield "its skiplist is neither ASCII punctuation nor empty"
    if settings.lower_case:
        yield "it lower-cases texts before tokenizing"
