"""Bi-encoders exported to ONNX, run by ONNX Runtime on the CPU without PyTorch, whose import takes longer than a search.

`quiver.retrieval.models.export.onnx` writes the folders. An export has the fingerprint of its model, so it searches the indexes that the
model built: its vectors differ from the model's by at most 1e-4 per coordinate, which was checked when it was written.

Shapes: B texts, S padded length, d vector width.
Source: https://onnxruntime.ai/docs/api/python
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import faiss
import numpy as np
from numpy.typing import NDArray

from quiver.encoder.errors import InputError, first_line, import_for
from quiver.encoder.files import expand_home, read_json
from quiver.encoder.progress import progress_bar
from quiver.encoder.tokenizer import Tokenizer
from quiver.retrieval.models.encoding import check_texts, clean, describe_tokens
from quiver.retrieval.models.options import ONNX_SETTINGS
from quiver.retrieval.records import PLURALS, DenseEncoding, DenseVectors, ModelCard, Role

SCHEMA = "quiver-onnx/1"
"""Value of ``schema`` in ``onnx_config.json``."""

GRAPH = "model.onnx"

# Tokens of a batch, padding included.
_BATCH_TOKENS = 4096


class _RoleSettings(NamedTuple):
    """How texts of a role become token ids: prompt, maximum tokens, and the number of first tokens that are not pooled."""

    prompt: str
    max_length: int
    prompt_tokens: int = 0


def _role_settings(prompt: object, max_length: object, prompt_tokens: object = 0) -> _RoleSettings:
    if not isinstance(prompt, str) or not isinstance(max_length, int) or not isinstance(prompt_tokens, int):
        raise TypeError("a prompt is text, and numbers of tokens are integers")
    return _RoleSettings(prompt, max_length, prompt_tokens)


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
        try:
            self._roles: dict[Role, _RoleSettings] = {role: _role_settings(**settings[role]) for role in ("query", "document")}
            query, document = self._roles["query"], self._roles["document"]
            self.card = ModelCard(
                source=str(folder),
                kind="dense",
                fingerprint=settings["fingerprint"],
                dim=settings["dim"],
                similarity=settings["similarity"],
                query_length=query.max_length,
                document_length=document.max_length,
                query_prompt=query.prompt,
                document_prompt=document.prompt,
            )
            self._inputs = frozenset(settings["inputs"])
            self._pad, self._lower_case = int(settings["pad_token_id"] or 0), bool(settings["lower_case"])
        except (KeyError, TypeError, ValueError) as error:
            raise InputError(f"{path}: not the settings of an ONNX export ({error!r}); export the model again") from error
        self.tokenizer = Tokenizer.from_pretrained(path.parent)
        self._batch_tokens = batch_tokens or _BATCH_TOKENS
        self._session = _open_session(path.with_name(GRAPH))

    def __repr__(self) -> str:
        return f"OnnxModel({self.card.source!r}: {self.card.dim} dimensions, {self.card.similarity})"

    def encode_texts(self, texts: Sequence[str], role: Role, *, progress: bool = False) -> DenseEncoding:
        """Encode texts to vectors, with token counts.

        Args:
            texts: B texts; an empty text has a vector too.
            role: Queries or documents; decides the prompt.
            progress: Show a progress bar on standard error.

        Returns:
            (B, d) float32, in input order.
        """
        check_texts(texts)
        chosen = self._roles[role]
        cleaned = clean(texts, prompt=chosen.prompt, lower_case=self._lower_case)
        found = self.tokenizer.encode(cleaned, max_length=chosen.max_length)
        vectors = np.empty((len(texts), self.card.dim), np.float32)
        with progress_bar(PLURALS[role], len(texts), enabled=progress) as advance:
            for rows in self._batches(found.ids):
                vectors[rows] = self._run([found.ids[row] for row in rows], chosen.prompt_tokens)
                advance(len(rows))
        return DenseEncoding(vectors, describe_tokens(texts, found.ids, found.truncated))

    def _batches(self, ids: Sequence[Sequence[int]]) -> Iterator[list[int]]:
        """Numbers of texts of similar length, longest first."""
        rows: list[int] = []
        for row in sorted(range(len(ids)), key=lambda row: len(ids[row]), reverse=True):
            if rows and (len(rows) + 1) * len(ids[rows[0]]) > self._batch_tokens:
                yield rows
                rows = []
            rows.append(row)
        if rows:
            yield rows

    def _run(self, ids: Sequence[Sequence[int]], skip: int) -> DenseVectors:
        """Vectors of a batch, (B, d); mean and max leave out the first ``skip`` tokens."""
        lengths = np.fromiter(map(len, ids), np.int64, len(ids))[:, None]
        positions = np.arange(int(lengths.max()))
        padded: NDArray[np.int64] = np.full((len(ids), len(positions)), self._pad, np.int64)
        for row, text in enumerate(ids):
            padded[row, : len(text)] = text
        attended = positions < lengths
        given = {"input_ids": padded, "attention_mask": attended.astype(np.int64)}
        if "pooling_mask" in self._inputs:
            given["pooling_mask"] = (attended & (positions >= skip)).astype(np.int64)
        vectors: DenseVectors = self._session.run(None, given)[0]
        return vectors


def _open_session(graph: Path) -> Any:
    onnxruntime = import_for("an ONNX export", "onnxruntime", "onnxruntime")
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    # Without a number, ONNX Runtime pins threads to cores that a container may not have. FAISS, which searches, follows OMP_NUM_THREADS.
    options.intra_op_num_threads = faiss.omp_get_max_threads()
    try:
        return onnxruntime.InferenceSession(str(graph), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # the library raises its own classes, here for damaged and missing files only
        raise InputError(f"{graph}: not a graph that ONNX Runtime can open ({first_line(error)}); export the model again") from error
