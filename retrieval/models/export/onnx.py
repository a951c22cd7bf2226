"""ONNX export: a padded graph from token ids to vectors, with dynamic batch size and length, checked against the model's own vectors.

    model.onnx            input_ids, attention_mask (B, S) int64 -> vectors (B, d) float32; for ColBERT (B, S, d), unit length each
    model.onnx.data       weights, if one file cannot hold them
    onnx_config.json      prompts, lengths, positions that have a vector, and the result of the check
    config.json, tokenizer.json, tokenizer_config.json

Texts are padded on the right. A position with attention_mask 0 attends but is not attended to: for ColBERT queries whose expansion is not
attended to, [MASK] tokens have attention_mask 0, and their vectors are scored. If prompts are not pooled there is a third input,
``pooling_mask``, which is also 0 for the first ``prompt_tokens`` positions of the role.

Shapes: B texts, S padded length, D width of the encoder, d vector width.
Source: https://onnx.ai/onnx; torch.onnx.export with ``dynamo=True``.
"""

from __future__ import annotations

import importlib.util
import logging
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from quiver.encoder import InputError, pack_padded
from quiver.encoder.checkpoints import config_to_hf
from quiver.encoder.environment import installed_version
from quiver.encoder.files import write_json
from quiver.retrieval.models.biencoder import BiEncoder
from quiver.retrieval.models.colbert import ColBERT
from quiver.retrieval.models.onnx_model import GRAPH, SCHEMA
from quiver.retrieval.models.options import ONNX_SETTINGS

TOLERANCE = 1e-4  # maximum difference of a coordinate from the model's; for vectors longer than 1 relative to the largest coordinate
LIBRARIES = ("onnx", "onnxscript", "onnxruntime")  # libraries that export and run graphs
_ONE_FILE = 1_500_000_000  # maximum bytes of weights inside model.onnx; protocol buffers are limited to 2 GiB
# Lengths at which the graph is checked, besides the model's maximum length, if that is at most _LONGEST.
_LENGTHS = (1, 2, 3, 9, 40, 150, 512)
_LONGEST = 2048
_BATCHES = (1, 2, 5)


def pool_padded(mode: str, hidden: Tensor, attended: Tensor, pooled: Tensor) -> Tensor:
    """`quiver.retrieval.models.batches.pool` over padded hidden states (B, S, D), with attention mask and pooling mask (B, S)."""
    if mode == "cls":
        return hidden[:, 0]
    if mode == "mean":
        weights = pooled.to(hidden.dtype)[..., None]  # (B, S, 1)
        return (hidden * weights).sum(1) / weights.sum(1).clamp(min=1)
    if mode == "max":
        return hidden.masked_fill(~pooled.to(torch.bool)[..., None], float("-inf")).amax(1)
    last = attended.to(torch.int64).sum(1) - 1  # (B,)
    return hidden.gather(1, last[:, None, None].expand(-1, 1, hidden.shape[2]))[:, 0]


class PaddedModel(nn.Module):
    """A model, not optimized for inference, from token ids to vectors on padded batches; it shares the model's weights."""

    def __init__(self, model: BiEncoder | ColBERT) -> None:
        super().__init__()
        self.encoder = model.encoder
        self.projections = model.projections
        self.settings = model.settings

    def forward(self, input_ids: Tensor, attention_mask: Tensor, pooling_mask: Tensor | None = None) -> Tensor:
        """Map ids and masks, (B, S) int64 each, to vectors (B, d); for ColBERT (B, S, d)."""
        hidden = self.encoder.forward_padded(input_ids, attention_mask)
        if self.settings.kind == "colbert":
            return F.normalize(self.projections(hidden), dim=-1)
        pooled = attention_mask if pooling_mask is None else pooling_mask
        vectors: Tensor = self.projections(pool_padded(self.settings.pooling, hidden, attention_mask, pooled))
        return F.normalize(vectors, dim=1) if self.settings.normalize else vectors


def write_onnx(folder: Path, model: BiEncoder | ColBERT, *, tolerance: float = TOLERANCE) -> None:
    """Write a model with float32 weights as an ONNX graph with its tokenizer and settings, into an empty folder.

    Raises:
        InputError: A library is missing, or the graph's vectors differ by more than ``tolerance``, see `TOLERANCE`.
    """
    require_libraries()
    export_graph(model, folder / GRAPH)
    largest, shapes = compare(folder / GRAPH, model)
    if not largest <= tolerance:  # also True for NaN
        raise InputError(
            f"{model.source}: the graph's vectors differ from the model's by {largest:.1e}, more than {tolerance:.0e}; nothing was written"
        )
    write_json(folder / "config.json", config_to_hf(model.encoder.config, style="v4"))
    model.tokenizer.save(folder)
    versions = {name: installed_version(name) for name in ("torch", *LIBRARIES)}
    checked = {"largest_difference": largest, "shapes": [list(shape) for shape in shapes], "versions": versions}
    write_json(folder / ONNX_SETTINGS, _describe_graph(model) | {"check": checked})


def require_libraries(names: Sequence[str] = LIBRARIES) -> None:
    """Check that libraries are installed; an InputError names those that are not."""
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    if missing:
        raise InputError(f"the layout onnx needs {', '.join(missing)}: pip install 'quiver-retrieval[interop]'")


def _describe_graph(model: BiEncoder | ColBERT) -> dict[str, Any]:
    """The content of ``onnx_config.json`` without the result of the check."""
    settings, card = model.settings, model.card
    found: dict[str, Any] = {
        "schema": SCHEMA,
        "kind": card.kind,
        "fingerprint": card.fingerprint,
        "dim": card.dim,
        "similarity": card.similarity,
        "inputs": input_names(model),
        "output": "vectors",
        "lower_case": settings.lower_case,
        "pad_token_id": model.encoder.config.pad_token_id,
        "truncation_side": model.tokenizer.truncation_side,
        "query": {"prompt": settings.query_prompt, "max_length": card.query_length},
        "document": {"prompt": settings.document_prompt, "max_length": card.document_length},
    }
    if isinstance(model, ColBERT):
        colbert = settings.colbert
        for role, prefix in (("query", colbert.query_prefix), ("document", colbert.document_prefix)):
            found[role]["prefix"], found[role]["prefix_id"] = prefix, model.tokenizer.token_id(prefix) if prefix else None
        expanded = (colbert.expanded_length or colbert.query_length) if colbert.query_expansion else None
        found["query"] |= {"expanded_length": expanded, "attend_to_expansion": colbert.attend_to_expansion}
        found["query"]["expansion_id"] = model.tokenizer.special_id("mask") if colbert.query_expansion else None
        found["document"]["skipped_ids"] = model.skipped_ids
    else:
        found |= {"pooling": settings.pooling, "normalized": settings.normalize}
        if "pooling_mask" in found["inputs"]:
            found["query"]["prompt_tokens"] = model.prompt_tokens(settings.query_prompt)
            found["document"]["prompt_tokens"] = model.prompt_tokens(settings.document_prompt)
    return found


def input_names(model: BiEncoder | ColBERT) -> list[str]:
    """Return the names of the graph's inputs."""
    settings = model.settings
    prompted = settings.kind == "dense" and not settings.include_prompt and (settings.query_prompt or settings.document_prompt)
    return ["input_ids", "attention_mask", *(["pooling_mask"] if prompted else [])]


def compare(graph: Path, model: BiEncoder | ColBERT) -> tuple[float, list[tuple[int, int]]]:
    """Compare a graph with the packed model on batches of random tokens.

    Returns:
        The largest difference of a coordinate, for vectors longer than 1 relative to the largest coordinate, and the shapes (B, S).
    """
    import onnxruntime  # imported here because only this function needs it

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(str(graph), options, providers=["CPUExecutionProvider"])
    rng, own_length = np.random.default_rng(0), max(model.card.query_length, model.card.document_length)
    lengths = sorted({*(length for length in _LENGTHS if length <= own_length), min(own_length, _LONGEST)})
    shapes = [(rows, length) for length in lengths for rows in (_BATCHES if length <= 40 else (1, 2) if length <= 512 else (1,))]
    largest = 0.0
    for rows, length in shapes:
        ids = rng.integers(0, len(model.tokenizer), (rows, length))
        ends = rng.integers(1, length + 1, rows)
        ends[0] = length
        mask = (np.arange(length) < ends[:, None]).astype(np.int64)
        given, skip = {"input_ids": ids, "attention_mask": mask}, 0
        if "pooling_mask" in input_names(model):
            skip = min(2, int(ends.min()))
            given["pooling_mask"] = mask * (np.arange(length) >= skip)
        (found,) = session.run(None, given)
        batch = pack_padded(torch.from_numpy(ids), torch.from_numpy(mask))
        with torch.inference_mode():
            hidden = model.encoder(batch)
            if isinstance(model, ColBERT):
                own, found = model.project(hidden).numpy(), found[mask.astype(bool)]
            else:
                own = model.pool(hidden, batch, skip=skip).numpy()
        finite = np.isfinite(own)
        if not np.array_equal(finite, np.isfinite(found)):
            return float("nan"), shapes
        scale = max(1.0, float(np.abs(own[finite]).max(initial=0)))
        largest = max(largest, float(np.abs(own[finite] - found[finite]).max(initial=0)) / scale)
    return largest, shapes


def export_graph(model: BiEncoder | ColBERT, path: Path) -> None:
    """Write the graph of a model with torch's exporter."""
    names = input_names(model)
    # The exporter would treat a dimension of 1, or two equal dimensions, as constants.
    example = tuple(torch.ones(2, 5, dtype=torch.int64) for _ in names)
    shape = {0: torch.export.Dim("batch"), 1: torch.export.Dim("length", max=model.encoder.config.max_positions)}
    graph = PaddedModel(model).eval()
    size = sum(4 * weight.numel() for weight in graph.parameters())
    log = logging.getLogger("torch.onnx")
    level = log.level
    log.setLevel(logging.ERROR)  # not the exporter's warnings about optional packages and shared axis names
    try:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.onnx.export(
                graph,
                example,
                str(path),
                input_names=names,
                output_names=["vectors"],
                dynamic_shapes=tuple(shape for _ in names),
                dynamo=True,
                external_data=size > _ONE_FILE,
                verbose=False,
            )
    finally:
        log.setLevel(level)


_USAGE_HEAD = """\
import json
from pathlib import Path

import numpy as np
import onnxruntime
from tokenizers import Tokenizer

folder = Path({name})
settings = json.loads((folder / "onnx_config.json").read_text(encoding="utf-8"))
tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
session = onnxruntime.InferenceSession(str(folder / "model.onnx"))


def clean(texts, role):
    texts = [(settings[role]["prompt"] + text).strip() for text in texts]
    return [text.lower() for text in texts] if settings["lower_case"] else texts

"""

DENSE_USAGE = (
    _USAGE_HEAD
    + """
def encode(texts, role):
    tokenizer.enable_truncation(settings[role]["max_length"], direction=settings["truncation_side"])
    tokenizer.enable_padding(pad_id=settings["pad_token_id"])
    batch = tokenizer.encode_batch(clean(texts, role))
    ids, mask = np.array([text.ids for text in batch]), np.array([text.attention_mask for text in batch])
    given = {{"input_ids": ids, "attention_mask": mask}}
    if "pooling_mask" in settings["inputs"]:
        given["pooling_mask"] = mask * (np.arange(ids.shape[1]) >= settings[role]["prompt_tokens"])
    return session.run(None, given)[0]


queries = encode({queries}, "query")
documents = encode({documents}, "document")
print(queries @ documents.T)
"""
)
"""Code that runs a bi-encoder's graph with onnxruntime, tokenizers and NumPy."""

COLBERT_USAGE = (
    _USAGE_HEAD
    + """
def encode(texts, role):
    chosen = settings[role]
    prefix = [] if chosen["prefix_id"] is None else [chosen["prefix_id"]]
    tokenizer.enable_truncation(chosen["max_length"] - len(prefix), direction=settings["truncation_side"])
    rows = [text.ids[:1] + prefix + text.ids[1:] for text in tokenizer.encode_batch(clean(texts, role))]
    filled = chosen.get("expanded_length")  # queries are padded to this length with [MASK] tokens that have vectors
    width = filled or max(map(len, rows))
    filler = chosen["expansion_id"] if filled else settings["pad_token_id"]
    ids = np.array([row + [filler] * (width - len(row)) for row in rows])
    real = np.arange(width) < np.array([[len(row)] for row in rows])
    attended = np.ones_like(real) if filled and chosen["attend_to_expansion"] else real
    (vectors,) = session.run(None, {{"input_ids": ids, "attention_mask": attended.astype(np.int64)}})
    counts = np.ones_like(real) if filled else real & ~np.isin(ids, chosen.get("skipped_ids", []))
    return [row[keep] for row, keep in zip(vectors, counts)]


queries = encode({queries}, "query")
documents = encode({documents}, "document")
print([[float((query @ document.T).max(1).sum()) for document in documents] for query in queries])
"""
)
"""Code that runs a ColBERT graph with onnxruntime, tokenizers and NumPy."""
