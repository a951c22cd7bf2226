"""The vectors that a benchmark of indexes is about: a folder of arrays, which every system is given alike.

    documents.npy        the vectors of all documents, one document after another, (T, d) float32, comparable by inner product
    lengths.npy          how many of them each document has, (P,); not there for one vector a document
    token_ids.npy        the vocabulary's number of each vector's token, (T,); need not be there
    queries.npy          the vectors of all queries, (S, d) float32
    query_lengths.npy    how many of them each query has, (Q,); not there for one vector a query
    ids.txt              ids of the documents, one a line; need not be there
    query_ids.txt        ids of the queries, likewise
    qrels.tsv            judgements in BEIR's layout; need not be there, and need the ids

Documents are read a block at a time and not mapped, so that what is read does not count as memory of the process for ever.

Shapes: P documents, T their vectors, Q queries, S their vectors, d width.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from quiver.encoder.errors import InputError
from quiver.encoder.files import file_sha256, read_lines, write_text
from quiver.retrieval.data.corpus import read_qrels
from quiver.retrieval.protocols import Rows
from quiver.retrieval.records import Qrels

DOCUMENTS, LENGTHS, TOKEN_IDS = "documents.npy", "lengths.npy", "token_ids.npy"
QUERIES, QUERY_LENGTHS = "queries.npy", "query_lengths.npy"
IDS, QUERY_IDS, QRELS = "ids.txt", "query_ids.txt", "qrels.tsv"

_BLOCK = 16_384


@dataclass(frozen=True)
class VectorFolder:
    """A folder of vectors, and how many documents are made of them.

    Attributes:
        path: The folder.
        synthetic: Number of documents: those of the folder first, then noisy copies of them; None for those of the folder alone.
        noise: Length of the noise that is added to a copied vector of length 1, which is then scaled to its old length again.
        seed: Of the noise.
        limit_queries: The first so many queries; None for all.
    """

    path: Path
    synthetic: int | None = None
    noise: float = 0.3
    seed: int = 0
    limit_queries: int | None = None

    @property
    def kind(self) -> Literal["dense", "colbert"]:
        """One vector a document, or one a token."""
        return "colbert" if (self.path / LENGTHS).is_file() else "dense"

    @property
    def dim(self) -> int:
        """Width d."""
        return int(self._documents.shape[1])

    @cached_property
    def lengths(self) -> NDArray[np.int64]:
        """How many vectors each document has, (P,)."""
        real = self._real_lengths
        return real if self.synthetic is None else np.resize(real, self.synthetic)

    def __len__(self) -> int:
        return len(self.lengths)

    @cached_property
    def ids(self) -> list[str]:
        """Ids of the documents; their numbers where the folder has none."""
        real = _lines(self.path / IDS, len(self._real_lengths))
        if self.synthetic is None:
            return real
        return [real[row] if row < len(real) else f"{real[row % len(real)]} copy {row // len(real)}" for row in range(self.synthetic)]

    @cached_property
    def query_ids(self) -> list[str]:
        """Ids of the queries; their numbers where the folder has none."""
        return _lines(self.path / QUERY_IDS, len(self._query_lengths))[: self.limit_queries]

    @cached_property
    def queries(self) -> list[NDArray[np.float32]]:
        """The queries: Q arrays, (d,) for one vector a query, else (n_i, d)."""
        matrix = _Array(self.path / QUERIES).read(0, int(self._query_lengths.sum()))
        if self.kind == "dense":
            return list(matrix[: self.limit_queries])
        return np.split(matrix, np.cumsum(self._query_lengths)[:-1])[: self.limit_queries]

    @cached_property
    def qrels(self) -> Qrels | None:
        """Judgements of these queries on these documents; None where there are none, or the documents are made up."""
        if self.synthetic is not None or not (self.path / QRELS).is_file():
            return None
        known, asked = set(self.ids), set(self.query_ids)
        found = {
            query: {document: grade for document, grade in grades.items() if document in known}
            for query, grades in read_qrels(self.path / QRELS).items()
            if query in asked
        }
        return {query: grades for query, grades in found.items() if any(grade > 0 for grade in grades.values())} or None

    def documents(self, start: int, stop: int) -> tuple[NDArray[np.float32], NDArray[np.uint32] | None]:
        """Vectors of documents ``start`` to ``stop - 1``, one after another, and their token ids if there are any."""
        real = len(self._real_lengths)
        parts, ids = [], []
        while start < stop:
            copy, first = divmod(start, real)
            last = min(real, first + stop - start)
            vectors, token_ids = self._read(first, last)
            if copy:
                vectors = self._noisy(vectors, self._real_lengths[first:last], start)
            parts.append(vectors)
            ids.append(token_ids)
            start += last - first
        tokens = [each for each in ids if each is not None]
        return np.concatenate([np.zeros((0, self.dim), np.float32), *parts]), np.concatenate(tokens) if tokens else None

    def check(self) -> None:
        """Read what is small, and compare the sizes.

        Raises:
            InputError: A file is missing, is no such array, or does not fit the others.
        """
        if not (self.path / DOCUMENTS).is_file():
            raise InputError(f"{self.path}: no {DOCUMENTS} in this folder; a collection of texts needs --model to encode it")
        if not len(self):
            raise InputError(f"{self.path}: there are no documents")
        if self.kind == "dense" and (self.path / QUERY_LENGTHS).is_file():
            raise InputError(f"{self.path}: {QUERY_LENGTHS} is for queries of several vectors, but there is no {LENGTHS}")
        rows = int(self._real_lengths.sum())
        for name, wanted in ((DOCUMENTS, rows), (TOKEN_IDS, rows), (QUERIES, int(self._query_lengths.sum()))):
            path = self.path / name
            if (path.is_file() or name == QUERIES) and _Array(path).shape[0] != wanted:
                raise InputError(f"{path}: {_Array(path).shape[0]:,} rows, the lengths say {wanted:,}")
        for name in (DOCUMENTS, QUERIES):
            array = _Array(self.path / name)
            if len(array.shape) != 2 or array.dtype != np.float32 or array.shape[1] != self.dim:
                raise InputError(f"{array.path}: {array.dtype} {array.shape}; vectors are (n, {self.dim}) float32")
        if not self.queries or min(map(len, self.queries)) < 1:
            raise InputError(f"{self.path / QUERIES}: there are no queries, or one without a vector")
        if len(self.ids) != len(set(self.ids)):
            raise InputError(f"{self.path / IDS}: an id occurs twice")

    def fingerprint(self) -> str:
        """A sha256 over all that is measured on, in hexadecimal."""
        names = (DOCUMENTS, LENGTHS, TOKEN_IDS, QUERIES, QUERY_LENGTHS, IDS, QUERY_IDS, QRELS)
        parts = [f"{name} {file_sha256(self.path / name)}" for name in names if (self.path / name).is_file()]
        return text_sha256("\n".join([*parts, f"{self.synthetic} {self.noise} {self.seed} {self.limit_queries}"]))

    @cached_property
    def _documents(self) -> _Array:
        return _Array(self.path / DOCUMENTS)

    @cached_property
    def _real_lengths(self) -> NDArray[np.int64]:
        path = self.path / LENGTHS
        return np.load(path).astype(np.int64) if path.is_file() else np.ones(self._documents.shape[0], np.int64)

    @cached_property
    def _query_lengths(self) -> NDArray[np.int64]:
        path = self.path / QUERY_LENGTHS
        if path.is_file():
            lengths: NDArray[np.int64] = np.load(path).astype(np.int64)
            return lengths
        if self.kind == "colbert":
            raise InputError(f"{path}: missing; it says how many vectors each query has")
        return np.ones(_Array(self.path / QUERIES).shape[0], np.int64)

    @cached_property
    def _ends(self) -> NDArray[np.int64]:
        return np.concatenate([np.zeros(1, np.int64), np.cumsum(self._real_lengths)])

    def _read(self, first: int, last: int) -> tuple[NDArray[np.float32], NDArray[np.uint32] | None]:
        start, stop = int(self._ends[first]), int(self._ends[last])
        ids = self.path / TOKEN_IDS
        return self._documents.read(start, stop), _Array(ids).read(start, stop).astype(np.uint32) if ids.is_file() else None

    def _noisy(self, vectors: NDArray[np.float32], lengths: NDArray[np.int64], document: int) -> NDArray[np.float32]:
        """Copies of documents with noise, which depends on the seed and a document's number and not on what is read with it."""
        shapes = [(int(length), vectors.shape[1]) for length in lengths]
        drawn = [np.random.default_rng([self.seed, document + row]).standard_normal(each, np.float32) for row, each in enumerate(shapes)]
        norms = np.linalg.norm(vectors, axis=1, keepdims=True)
        moved = vectors + np.concatenate(drawn) * (self.noise * norms / np.sqrt(vectors.shape[1]))
        moved *= norms / np.maximum(np.linalg.norm(moved, axis=1, keepdims=True), 1e-12)
        noisy: NDArray[np.float32] = moved.astype(np.float32, copy=False)
        return noisy


def write_vectors(
    folder: Path,
    documents: tuple[Rows, NDArray[np.int64] | None],
    queries: tuple[Rows, NDArray[np.int64] | None],
    *,
    ids: Sequence[str],
    query_ids: Sequence[str],
    qrels: Qrels,
    token_ids: Iterable[NDArray[np.uint32]] | None = None,
) -> VectorFolder:
    """Write what a store of vectors holds as such a folder.

    Args:
        folder: Made if it is missing.
        documents: Vectors of the documents and, for one a token, how many each has.
        queries: Those of the queries, likewise.
        ids: Of the documents.
        query_ids: Of the queries.
        qrels: Query id -> document id -> grade.
        token_ids: The vocabulary's number of each vector's token, document after document; None where the model does not say.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for (rows, lengths), name, lengths_name in ((documents, DOCUMENTS, LENGTHS), (queries, QUERIES, QUERY_LENGTHS)):
        array = np.lib.format.open_memmap(folder / name, mode="w+", dtype=np.float32, shape=rows.shape)
        for start, block in rows.blocks(_BLOCK):
            array[start : start + len(block)] = block
        array.flush()
        if lengths is not None:
            np.save(folder / lengths_name, lengths)
    if token_ids is not None:
        ids_array = np.lib.format.open_memmap(folder / TOKEN_IDS, mode="w+", dtype=np.uint32, shape=documents[0].shape[:1])
        start = 0
        for part in token_ids:
            ids_array[start : start + len(part)] = part
            start += len(part)
        ids_array.flush()
    write_text(folder / IDS, "".join(f"{each}\n" for each in ids))
    write_text(folder / QUERY_IDS, "".join(f"{each}\n" for each in query_ids))
    lines = [f"{query}\t{document}\t{grade}\n" for query, grades in qrels.items() for document, grade in grades.items()]
    if lines:
        write_text(folder / QRELS, "query-id\tcorpus-id\tscore\n" + "".join(lines))
    return VectorFolder(folder)


class _Array:
    """A .npy file, read in parts."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            array: NDArray[Any] = np.load(path, mmap_mode="r", allow_pickle=False)
        except FileNotFoundError as error:
            raise InputError(f"{path}: no such file") from error
        except (OSError, ValueError) as error:
            raise InputError(f"{path}: not an array in NumPy's format") from error
        if not array.flags.c_contiguous or not isinstance(array, np.memmap):
            raise InputError(f"{path}: not an array row after row")
        self.shape, self.dtype, self._offset = array.shape, array.dtype, array.offset

    def read(self, start: int, stop: int) -> NDArray[Any]:
        """Rows ``start`` to ``stop - 1``, in memory."""
        width = int(np.prod(self.shape[1:]))
        offset = self._offset + start * width * self.dtype.itemsize
        found = np.fromfile(self.path, self.dtype, (stop - start) * width, offset=offset)
        return found.reshape(-1, *self.shape[1:])


def drawn(documents: int) -> NDArray[np.int64]:
    """The place of each document in an order drawn at random, always the same: the first n of it are n documents at random.

    Args:
        documents: P.

    Returns:
        (P,), every number below P once.
    """
    return np.random.default_rng(documents).permutation(documents)


def text_sha256(text: str) -> str:
    """The sha256 of a text, in hexadecimal."""
    return hashlib.sha256(text.encode()).hexdigest()


def _lines(path: Path, count: int) -> list[str]:
    if not path.is_file():
        return [str(number) for number in range(count)]
    found = [line for _, line in read_lines(path)]
    if len(found) != count:
        raise InputError(f"{path}: {len(found):,} ids for {count:,} texts")
    return found
