"""Bi-encoders exported to ONNX, run by ONNX Runtime on the CPU without PyTorch, whose import takes longer than a search.

`quiver.retrieval.models.export.onnx` writes the folders. An export has the fingerprint of its model, so it searches the indexes that the
model built: its vectors differ from the model's by at most 1e-4 per coordinate, which was checked when it was written.

Shapes: B texts, S padded length, d vector width.
Source: https://onnxruntime.ai/docs/api/python
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import faiss
import numpy as np
from numpy.typing import NDArray
from pydantic import ConfigDict

from quiver.encoder.errors import InputError, first_line, import_for
from quiver.encoder.files import expand_home, read_json
from quiver.encoder.progress import progress_bar
from quiver.encoder.schema import Positive, Schema, parse_options
from quiver.encoder.tokenizer import Tokenizer
from quiver.retrieval.models.encoding import check_texts, clean, describe_tokens
from quiver.retrieval.models.options import ONNX_SETTINGS
from quiver.retrieval.records import PLURALS, DenseEncoding, DenseVectors, ModelCard, Role

SCHEMA = "quiver-onnx/1"  # value of ``schema`` in ``onnx_config.json``

GRAPH = "model.onnx"

_BATCH_TOKENS = 4096  # tokens of a batch, padding included


class _RoleSettings(Schema):
    """How texts of a role become token ids: prompt, maximum tokens, and the number of first tokens that are not pooled."""

    model_config = ConfigDict(extra="ignore")

    prompt: str
    max_length: int
    prompt_tokens: int = 0


class _GraphSettings(Schema):
    """What running a graph needs of ``onnx_config.json``."""

    model_config = ConfigDict(extra="ignore")

    fingerprint: str
    dim: Positive
    similarity: Literal["cosine", "dot"]
    inputs: tuple[str, ...]
    pad_token_id: int | None
    lower_case: bool
    query: _RoleSettings
    document: _RoleSettings


class OnnxModel:
    """A bi-encoder that was exported by ``quiver export --layout onnx``; encodes texts for indexes.

    Args:
        folder: The folder of the export.
        batch_tokens: Tokens per batch, padding included; None for 4,096.

    Raises:
        InputError: The folder is not such an export, a file is damaged, or ONNX Runtime is not installed.
    """

    def __init__(self, folder: str | Path, *, batch_tokens: int | None = None) -> None:
        path = expand_home(folder) / ONNX_SETTINGS
        if not path.is_file():
            raise InputError(f"{folder}: not an ONNX export: it has no {ONNX_SETTINGS}; write one with quiver export --layout onnx")
        settings = read_json(path)
        if settings.get("schema") != SCHEMA:
            raise InputError(f"{path}: schema must be {SCHEMA}, got {settings.get('schema')!r}; export the model again")
        if settings.get("kind") == "colbert":
            raise InputError(f"{folder}: the export of a ColBERT model is for other programs; here use the model that it was exported from")
        self._settings = found = parse_options(_GraphSettings, settings, source=f"{path} (export the model again)")
        self.card = ModelCard(
            source=str(folder),
            kind="dense",
            fingerprint=found.fingerprint,
            dim=found.dim,
            similarity=found.similarity,
            query_length=found.query.max_length,
            document_length=found.document.max_length,
            query_prompt=found.query.prompt,
            document_prompt=found.document.prompt,
        )
        self.tokenizer = Tokenizer.from_pretrained(path.parent)
        self._batch_tokens = batch_tokens or _BATCH_TOKENS
        graph, onnxruntime = path.with_name(GRAPH), import_for("an ONNX export", "onnxruntime", "onnxruntime")
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3
        # Without a number, ONNX Runtime pins threads to cores that a container may not have. FAISS follows OMP_NUM_THREADS.
        options.intra_op_num_threads = faiss.omp_get_max_threads()
        try:
            self._session: Any = onnxruntime.InferenceSession(str(graph), options, providers=["CPUExecutionProvider"])
        except Exception as error:  # the library raises its own classes, here for damaged and missing files only
            raise InputError(f"{graph}: not a graph that ONNX Runtime can open ({first_line(error)}); export the model again") from error

    def __repr__(self) -> str:
        return f"OnnxModel({self.card.source!r}: {self.card.dim} dimensions, {self.card.similarity})"

    def encode_texts(self, texts: Sequence[str], role: Role, *, progress: bool = False) -> DenseEncoding:
        """Encode B texts to vectors (B, d), with token counts; the role decides the prompt. An empty text has a vector too."""
        check_texts(texts)
        chosen = self._settings.query if role == "query" else self._settings.document
        cleaned = clean(texts, prompt=chosen.prompt, lower_case=self._settings.lower_case)
        found = self.tokenizer.encode(cleaned, max_length=chosen.max_length)
        vectors = np.empty((len(texts), self.card.dim), np.float32)
        with progress_bar(PLURALS[role], len(texts), enabled=progress) as advance:
            # Texts of similar length share a batch, longest first.
            order = sorted(range(len(texts)), key=lambda row: len(found.ids[row]), reverse=True)
            first = 0
            while first < len(order):
                rows = order[first : first + max(1, self._batch_tokens // len(found.ids[order[first]]))]
                first += len(rows)
                vectors[rows] = self._run_graph([found.ids[row] for row in rows], chosen.prompt_tokens)
                advance(len(rows))
        return DenseEncoding(vectors, describe_tokens(texts, found.ids, found.truncated))

    def _run_graph(self, ids: Sequence[Sequence[int]], skip: int) -> DenseVectors:
        """Vectors of a batch, (B, d); mean and max leave out the first ``skip`` tokens."""
        lengths = np.fromiter(map(len, ids), np.int64, len(ids))[:, None]
        positions = np.arange(int(lengths.max()))
        padded: NDArray[np.int64] = np.full((len(ids), len(positions)), self._settings.pad_token_id or 0, np.int64)
        for row, text in enumerate(ids):
            padded[row, : len(text)] = text
        attended = positions < lengths
        given = {"input_ids": padded, "attention_mask": attended.astype(np.int64)}
        if "pooling_mask" in self._settings.inputs:
            given["pooling_mask"] = (attended & (positions >= skip)).astype(np.int64)
        vectors: DenseVectors = self._session.run(None, given)[0]
        return vectors
