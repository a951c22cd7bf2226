"""ONNX."""

from __future__ import annotations

import importlib.util
import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from quiver.encoder import InputError, pack_padded
from quiver.encoder.checkpoints import config_to_hf
from quiver.encoder.files import write_json
from quiver.retrieval.models.biencoder import BiEncoder
from quiver.retrieval.models.colbert import ColBERT
from quiver.retrieval.versions import installed_version

SCHEMA = "quiver-onnx/1"
"""Name and version of ``onnx_config.json``, the value of its ``schema``."""

GRAPH, SETTINGS = "model.onnx", "onnx_config.json"

TOLERANCE = 1e-4
"""Largest difference of a coordinate from our own; of vectors longer than 1, as a share of the largest coordinate."""

LIBRARIES = ("onnx", "onnxscript", "onnxruntime")
"""What writes a graph and what runs it."""

# A graph is one file up to so many bytes; protocol buffers end at two gibibytes.
_ONE_FILE = 1_500_000_000
# The graph is compared at these lengths, and at the model's own where that is not longer than the last.
_LENGTHS = (1, 2, 3, 9, 40, 150, 512)
_LONGEST = 2048
_BATCHES = (1, 2, 5)


def _cls(hidden: Tensor, attended: Tensor, pooled: Tensor) -> Tensor:
    del attended, pooled
    return hidden[:, 0]


def _mean(hidden: Tensor, attended: Tensor, pooled: Tensor) -> Tensor:
    del attended
    weights = pooled.to(hidden.dtype)[..., None]  # (B, S, 1)
    return (hidden * weights).sum(1) / weights.sum(1).clamp(min=1)


def _max(hidden: Tensor, attended: Tensor, pooled: Tensor) -> Tensor:
    del attended
    return hidden.masked_fill(~pooled.to(torch.bool)[..., None], float("-inf")).amax(1)


def _last(hidden: Tensor, attended: Tensor, pooled: Tensor) -> Tensor:
    del pooled
    last = attended.to(torch.int64).sum(1) - 1  # (B,)
    return hidden.gather(1, last[:, None, None].expand(-1, 1, hidden.shape[2]))[:, 0]


POOLINGS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {"cls": _cls, "mean": _mean, "max": _max, "lasttoken": _last}
"""`retrieval.models.pooling.POOLINGS` over padded hidden states (B, S, D), the places attended to and those that are pooled, (B, S)
each."""


class PaddedModel(nn.Module):
    """A model's whole way from token ids to vectors on padded batches, with the weights of the model itself.

    Args:
        model: A bi-encoder or a ColBERT, not frozen.
    """

    def __init__(self, model: BiEncoder | ColBERT) -> None:
        super().__init__()
        self.encoder = model.encoder
        self.projections = model.projections
        self.settings = model.settings

    def forward(self, input_ids: Tensor, attention_mask: Tensor, pooling_mask: Tensor | None = None) -> Tensor:
        """(B, S) int64 each to (B, d), or (B, S, d)."""
        hidden = self.encoder.forward_padded(input_ids, attention_mask)
        if self.settings.kind == "colbert":
            return F.normalize(self.projections(hidden), dim=-1)
        pooled = attention_mask if pooling_mask is None else pooling_mask
        vectors: Tensor = self.projections(POOLINGS[self.settings.pooling](hidden, attention_mask, pooled))
        return F.normalize(vectors, dim=1) if self.settings.normalize else vectors


@dataclass(frozen=True)
class Checked:
    """How a graph was compared with our own vectors.

    Attributes:
        largest_difference: Of a coordinate; of vectors longer than 1, as a share of the largest coordinate.
        shapes: Texts and tokens of the batches, (B, S) each.
    """

    largest_difference: float
    shapes: Sequence[tuple[int, int]]


def write_onnx(folder: Path, model: BiEncoder | ColBERT, *, tolerance: float = TOLERANCE) -> None:
    """Write a model as a graph, with its tokenizer and what else a program has to know of it.

    Args:
        folder: It exists, and is empty.
        model: What is written; its weights are float32.
        tolerance: As `TOLERANCE`.

    Raises:
        InputError: A library is missing, or the graph's vectors are not ours; says by how much.
    """
    require_libraries()
    with _quiet():
        _export(model, folder / GRAPH)
    checked = compare(folder / GRAPH, model)
    if not checked.largest_difference <= tolerance:  # NaN is refused too
        raise InputError(
            f"{model.source}: the graph's vectors differ from the model's by {checked.largest_difference:.1e}, more than {tolerance:.0e}; "
            "nothing was written"
        )
    write_json(folder / "config.json", config_to_hf(model.encoder.config, style="v4"))
    model.tokenizer.save(folder)
    write_json(folder / SETTINGS, described(model, checked))


def require_libraries() -> None:
    """Say what has to be installed.

    Raises:
        InputError: One of `LIBRARIES` is missing.
    """
    missing = [name for name in LIBRARIES if importlib.util.find_spec(name) is None]
    if missing:
        raise InputError(f"the layout onnx needs {', '.join(missing)}: pip install 'quiver-retrieval[interop]'")


def described(model: BiEncoder | ColBERT, checked: Checked) -> dict[str, Any]:
    """What ``onnx_config.json`` says."""
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
    found["check"] = {
        "largest_difference": checked.largest_difference,
        "shapes": [list(shape) for shape in checked.shapes],
        "versions": {name: installed_version(name) for name in ("torch", *LIBRARIES)},
    }
    return found


def input_names(model: BiEncoder | ColBERT) -> list[str]:
    """Names of the graph's inputs."""
    settings = model.settings
    prompted = settings.kind == "dense" and not settings.include_prompt and (settings.query_prompt or settings.document_prompt)
    return ["input_ids", "attention_mask", *(["pooling_mask"] if prompted else [])]


def compare(graph: Path, model: BiEncoder | ColBERT) -> Checked:
    """Run a graph beside the packed model on random tokens.

    Args:
        graph: ``model.onnx``.
        model: Of which it was made.
    """
    import onnxruntime  # imported late: only graphs need it

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(str(graph), options, providers=["CPUExecutionProvider"])
    rng, own_length = np.random.default_rng(0), max(model.card.query_length, model.card.document_length)
    lengths = sorted({*(length for length in _LENGTHS if length <= own_length), min(own_length, _LONGEST)})
    shapes = [(rows, length) for length in lengths for rows in (_BATCHES if length <= 40 else (1, 2) if length <= 512 else (1,))]
    worst = 0.0
    for rows, length in shapes:
        ids = rng.integers(0, len(model.tokenizer), (rows, length))
        ends = rng.integers(1, length + 1, rows)
        ends[0] = length
        mask = (np.arange(length) < ends[:, None]).astype(np.int64)
        skip = min(2, int(ends.min())) if "pooling_mask" in input_names(model) else 0
        worst = max(worst, _difference(session, model, ids, mask, skip))
    return Checked(float(worst), shapes)


def _difference(session: Any, model: BiEncoder | ColBERT, ids: NDArray[np.int64], mask: NDArray[np.int64], skip: int) -> float:
    given = {"input_ids": ids, "attention_mask": mask}
    if "pooling_mask" in input_names(model):
        given["pooling_mask"] = mask * (np.arange(ids.shape[1]) >= skip)
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
        return float("nan")
    scale = max(1.0, float(np.abs(own[finite]).max(initial=0)))
    return float(np.abs(own[finite] - found[finite]).max(initial=0)) / scale


def _export(model: BiEncoder | ColBERT, path: Path) -> None:
    names = input_names(model)
    # Neither dimension may be 1, nor may they be equal: either would be taken for a constant.
    example = tuple(torch.ones(2, 5, dtype=torch.int64) for _ in names)
    shape = {0: torch.export.Dim("batch"), 1: torch.export.Dim("length", max=model.encoder.config.max_positions)}
    graph = PaddedModel(model).eval()
    size = sum(4 * weight.numel() for weight in graph.parameters())
    with torch.no_grad():
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


@contextmanager
def _quiet() -> Iterator[None]:
    """The exporter warns of what is no concern here: packages that it does without, names that two axes share."""
    logger = logging.getLogger("torch.onnx")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(before)


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
"""One vector a text."""

COLBERT_USAGE = (
    _USAGE_HEAD
    + """
def encode(texts, role):
    chosen = settings[role]
    prefix = [] if chosen["prefix_id"] is None else [chosen["prefix_id"]]
    tokenizer.enable_truncation(chosen["max_length"] - len(prefix), direction=settings["truncation_side"])
    rows = [text.ids[:1] + prefix + text.ids[1:] for text in tokenizer.encode_batch(clean(texts, role))]
    filled = chosen.get("expanded_length")  # of queries: up to it there are [MASK] tokens, whose vectors count
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
"""One vector a token."""
