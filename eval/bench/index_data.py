"""Data of the index benchmark: a folder of vectors, exact search in it, recall and nDCG.

A folder of vectors contains:

    documents.npy        vectors of all documents, one document after another, (T, d) float32, compared by inner product
    lengths.npy          vectors per document, (P,); missing if there is one vector per document
    token_ids.npy        vocabulary id of each vector's token, (T,); optional
    queries.npy          vectors of all queries, (S, d) float32
    query_lengths.npy    vectors per query, (Q,); missing if there is one vector per query
    ids.txt              document ids, one per line; optional
    query_ids.txt        query ids, one per line; optional
    qrels.tsv            judgements in BEIR's layout; optional, needs the ids

Documents are read in blocks instead of being mapped, so that they do not count as memory of the process afterwards.

Shapes: P documents, T their vectors, Q queries, S their vectors, d width, k hits.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from quiver.encoder.errors import InputError
from quiver.encoder.files import atomic_file, file_sha256, read_lines, write_text
from quiver.eval.metrics import score
from quiver.retrieval.data.corpus import load_collection, read_qrels
from quiver.retrieval.data.embedding_store import open_embedding_store
from quiver.retrieval.index.memory import index_vectors
from quiver.retrieval.models.colbert import ColBERT
from quiver.retrieval.models.loading import load_model
from quiver.retrieval.records import DenseModel, MatrixRows, ModelCard, Qrels, Rows, TokenModel

Kind: TypeAlias = Literal["dense", "colbert"]

DOCUMENTS, LENGTHS, TOKEN_IDS = "documents.npy", "lengths.npy", "token_ids.npy"
QUERIES, QUERY_LENGTHS = "queries.npy", "query_lengths.npy"
IDS, QUERY_IDS, QRELS = "ids.txt", "query_ids.txt", "qrels.tsv"

_BLOCK = 16_384
# Documents whose exact scores differ by rounding only are ties.
_ROUNDING = 1e-6
_NDCG = "ndcg@10"


@dataclass(frozen=True)
class VectorFolder:
    """A folder of vectors, optionally extended by synthetic documents.

    Attributes:
        path: The folder.
        synthetic: Total number of documents: those of the folder, then noisy copies of them. None for the folder's documents only.
        noise: Norm of the noise added to a copied vector of norm 1, which is then rescaled to its old norm.
        seed: Random seed of the noise.
        limit_queries: Number of queries to use, from the first; None for all.
    """

    path: Path
    synthetic: int | None = None
    noise: float = 0.3
    seed: int = 0
    limit_queries: int | None = None

    @property
    def kind(self) -> Kind:
        """``dense`` (one vector per document) or ``colbert`` (one vector per token)."""
        return "colbert" if (self.path / LENGTHS).is_file() else "dense"

    @property
    def dim(self) -> int:
        """Vector width d."""
        return int(self._documents.shape[1])

    @property
    def card(self) -> ModelCard:
        """Card of the unknown model that made the vectors."""
        return ModelCard(str(self.path), self.kind, "", self.dim, "dot" if self.kind == "dense" else "maxsim", 0, 0)

    @cached_property
    def lengths(self) -> NDArray[np.int64]:
        """Vectors per document, (P,)."""
        real = self._real_lengths
        return real if self.synthetic is None else np.resize(real, self.synthetic)

    def __len__(self) -> int:
        return len(self.lengths)

    @cached_property
    def ids(self) -> list[str]:
        """Document ids; row numbers if the folder has none."""
        real = _read_ids(self.path / IDS, len(self._real_lengths))
        if self.synthetic is None:
            return real
        return [real[row] if row < len(real) else f"{real[row % len(real)]} copy {row // len(real)}" for row in range(self.synthetic)]

    @cached_property
    def query_ids(self) -> list[str]:
        """Query ids; row numbers if the folder has none."""
        return _read_ids(self.path / QUERY_IDS, len(self._query_lengths))[: self.limit_queries]

    @cached_property
    def queries(self) -> list[NDArray[np.float32]]:
        """The Q queries: (d,) each for one vector per query, otherwise (T_i, d)."""
        matrix = _Array(self.path / QUERIES).read(0, int(self._query_lengths.sum()))
        if self.kind == "dense":
            return list(matrix[: self.limit_queries])
        return np.split(matrix, np.cumsum(self._query_lengths)[:-1])[: self.limit_queries]

    @cached_property
    def qrels(self) -> Qrels | None:
        """Judgements of these queries on these documents; None if there are none or the documents are synthetic."""
        if self.synthetic is not None or not (self.path / QRELS).is_file():
            return None
        documents, queries = set(self.ids), set(self.query_ids)
        found = {
            query: {document: grade for document, grade in grades.items() if document in documents}
            for query, grades in read_qrels(self.path / QRELS).items()
            if query in queries
        }
        return {query: grades for query, grades in found.items() if any(grade > 0 for grade in grades.values())} or None

    def documents(self, start: int, stop: int) -> tuple[NDArray[np.float32], NDArray[np.uint32] | None]:
        """Return the vectors of documents ``start`` to ``stop - 1``, one after another, and their token ids if the folder has any."""
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
        """Check that the files exist and are consistent.

        Raises:
            InputError: A file is missing, has the wrong format, or is inconsistent with the others.
        """
        if not (self.path / DOCUMENTS).is_file():
            raise InputError(f"{self.path}: contains no {DOCUMENTS}; to encode a collection of texts, add --model")
        if not len(self):
            raise InputError(f"{self.path}: there are no documents")
        if self.kind == "dense" and (self.path / QUERY_LENGTHS).is_file():
            raise InputError(f"{self.path}: {QUERY_LENGTHS} exists, but {LENGTHS} does not; queries have several vectors only with tokens")
        rows = int(self._real_lengths.sum())
        for name, wanted in ((DOCUMENTS, rows), (TOKEN_IDS, rows), (QUERIES, int(self._query_lengths.sum()))):
            path = self.path / name
            if (path.is_file() or name == QUERIES) and _Array(path).shape[0] != wanted:
                raise InputError(f"{path}: has {_Array(path).shape[0]:,} rows, but the lengths add up to {wanted:,}")
        for name in (DOCUMENTS, QUERIES):
            array = _Array(self.path / name)
            if len(array.shape) != 2 or array.dtype != np.float32 or array.shape[1] != self.dim:
                raise InputError(f"{array.path}: is {array.dtype} {array.shape}, but must be float32 (n, {self.dim})")
        if not self.queries or min(map(len, self.queries)) < 1:
            raise InputError(f"{self.path / QUERIES}: there are no queries, or a query has no vector")
        if len(self.ids) != len(set(self.ids)):
            raise InputError(f"{self.path / IDS}: an id occurs twice")

    def fingerprint(self) -> str:
        """Return the SHA-256 of all data that affect the measurements, in hexadecimal."""
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
            raise InputError(f"{path}: missing; it holds the number of vectors of each query")
        return np.ones(_Array(self.path / QUERIES).shape[0], np.int64)

    @cached_property
    def _ends(self) -> NDArray[np.int64]:
        return np.concatenate([np.zeros(1, np.int64), np.cumsum(self._real_lengths)])

    def _read(self, first: int, last: int) -> tuple[NDArray[np.float32], NDArray[np.uint32] | None]:
        start, stop = int(self._ends[first]), int(self._ends[last])
        ids = self.path / TOKEN_IDS
        return self._documents.read(start, stop), _Array(ids).read(start, stop).astype(np.uint32) if ids.is_file() else None

    def _noisy(self, vectors: NDArray[np.float32], lengths: NDArray[np.int64], document: int) -> NDArray[np.float32]:
        """Noisy copies of documents; the noise depends only on the seed and the document's number."""
        shapes = [(int(length), vectors.shape[1]) for length in lengths]
        drawn = [np.random.default_rng([self.seed, document + row]).standard_normal(each, np.float32) for row, each in enumerate(shapes)]
        norms = np.linalg.norm(vectors, axis=1, keepdims=True)
        moved = vectors + np.concatenate(drawn) * (self.noise * norms / np.sqrt(vectors.shape[1]))
        moved *= norms / np.maximum(np.linalg.norm(moved, axis=1, keepdims=True), 1e-12)
        noisy: NDArray[np.float32] = moved.astype(np.float32, copy=False)
        return noisy


class _Array:
    """A .npy file from which parts are read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            array: NDArray[Any] = np.load(path, mmap_mode="r", allow_pickle=False)
        except FileNotFoundError as error:
            raise InputError(f"{path}: no such file") from error
        except (OSError, ValueError) as error:
            raise InputError(f"{path}: not an array in NumPy's format") from error
        if not array.flags.c_contiguous or not isinstance(array, np.memmap):
            raise InputError(f"{path}: the array must be in C order")
        self.shape, self.dtype, self._offset = array.shape, array.dtype, array.offset

    def read(self, start: int, stop: int) -> NDArray[Any]:
        """Read rows ``start`` to ``stop - 1`` into memory."""
        width = int(np.prod(self.shape[1:]))
        offset = self._offset + start * width * self.dtype.itemsize
        found = np.fromfile(self.path, self.dtype, (stop - start) * width, offset=offset)
        return found.reshape(-1, *self.shape[1:])


def _read_ids(path: Path, count: int) -> list[str]:
    if not path.is_file():
        return [str(number) for number in range(count)]
    found = [line for _, line in read_lines(path)]
    if len(found) != count:
        raise InputError(f"{path}: has {len(found):,} ids, but there are {count:,} texts")
    return found


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
    """Write a folder of vectors.

    Args:
        folder: Target folder; created if missing.
        documents: Vectors of the documents and, with one vector per token, the number of vectors per document.
        queries: Vectors of the queries, in the same form.
        ids: Document ids.
        query_ids: Query ids.
        qrels: Query id -> document id -> grade.
        token_ids: Vocabulary ids of the vectors' tokens, one document after another; None if unknown.
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


def encode_collection(
    data: Path,
    model: str | DenseModel | TokenModel,
    split: str,
    out: Path,
    *,
    cache: Path | None = None,
    limit_docs: int | None = None,
    progress: bool = False,
) -> VectorFolder:
    """Encode the documents and judged queries of a collection into a folder of vectors.

    Args:
        data: A BEIR folder.
        model: Folder or Hugging Face Hub id of a bi-encoder or a ColBERT, or the loaded model.
        split: Split of the judgements.
        out: Folder to write.
        cache: Folder that caches vectors by model and text; None for no cache.
        limit_docs: Number of documents to use, from the first, with the queries that have a relevant document among them; None for all.
        progress: Show progress bars.

    Raises:
        InputError: The data or the model cannot be read, or no query remains.
    """
    collection = load_collection(data, split)
    documents = [document for _, document in zip(range(limit_docs or len(collection.documents)), collection.documents, strict=False)]
    known = {document.id for document in documents}
    qrels = {query: {key: grade for key, grade in grades.items() if key in known} for query, grades in collection.qrels.items()}
    queries = [query for query in collection.queries if any(grade > 0 for grade in qrels.get(query.id, {}).values())]
    if not queries:
        raise InputError(f"{data}: no query of split {split!r} has a relevant document among the {len(documents):,} indexed documents")
    loaded = load_model(model) if isinstance(model, str) else model
    with open_embedding_store(cache) as store:
        contents = (document.content() for document in documents)
        encoded = store.encode(loaded, contents, "document", total=len(documents), progress=progress)
        encoded_queries = store.encode(loaded, [query.text for query in queries], "query", total=len(queries), progress=progress)
        # The store keeps vectors only. The tokenizer gives the token ids, as in encoding for an index.
        token_ids = None
        if isinstance(loaded, ColBERT):
            token_ids = (ids for document in documents for ids in loaded.document_token_ids([document.content()]))
        return write_vectors(
            out,
            (encoded.rows, encoded.lengths),
            (encoded_queries.rows, encoded_queries.lengths),
            ids=[document.id for document in documents],
            query_ids=[query.id for query in queries],
            qrels={query.id: qrels[query.id] for query in queries},
            token_ids=token_ids,
        )


def random_order(documents: int) -> NDArray[np.int64]:
    """Return each document's position in a fixed random order, (P,); the documents with positions below n are a random sample of n."""
    return np.random.default_rng(documents).permutation(documents)


def text_sha256(text: str) -> str:
    """Return the SHA-256 of a text, in hexadecimal."""
    return hashlib.sha256(text.encode()).hexdigest()


@dataclass(frozen=True)
class ExactHits:
    """The best documents of each query by exact search.

    Attributes:
        rows: Document rows per query, best first; Q arrays.
        scores: Scores of these documents; Q arrays.
    """

    rows: list[NDArray[np.int64]]
    scores: list[NDArray[np.float32]]

    def save(self, path: Path) -> None:
        """Write the hits atomically, for reuse by a repeated run."""
        lengths = np.array([len(rows) for rows in self.rows], np.int64)
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_file(path) as file:
            np.savez(file, lengths=lengths, rows=np.concatenate(self.rows), scores=np.concatenate(self.scores))

    @classmethod
    def load(cls, path: Path) -> ExactHits:
        """Read a file written by `save`."""
        with np.load(path, allow_pickle=False) as file:
            ends = np.cumsum(file["lengths"])[:-1]
            return cls(np.split(file["rows"], ends), np.split(file["scores"], ends))


def exact_search(vectors: VectorFolder, depth: int, *, allowed: int | None = None) -> ExactHits:
    """Score every document for every query in float32, and keep twice the depth, to detect ties at the depth.

    Args:
        vectors: Folder without synthetic documents.
        depth: Largest k to compare at.
        allowed: Number of randomly chosen documents to search; their vectors are held in memory. None for all documents.
    """
    matrix, lengths = np.load(vectors.path / DOCUMENTS, mmap_mode="r"), vectors.lengths
    ids = vectors.ids
    numbers = {key: row for row, key in enumerate(ids)}
    if allowed is not None:
        chosen = random_order(len(vectors)) < allowed
        matrix = matrix[np.repeat(chosen, lengths)]
        ids, lengths = [ids[row] for row in np.flatnonzero(chosen).tolist()], lengths[chosen]
    rows, dense = MatrixRows(matrix), vectors.kind == "dense"
    if dense:
        hits = index_vectors(ids, rows, vectors.card).search(np.stack(vectors.queries), 2 * depth)
    else:
        hits = index_vectors(ids, rows, vectors.card, lengths=lengths).search(vectors.queries, 2 * depth)
    return ExactHits([np.array([numbers[key] for key in found], np.int64) for found in hits.ids], list(hits.scores))


def recall(found: Sequence[Sequence[int]], exact: ExactHits, k: int) -> float:
    """Return the share of the k best documents among the first k found, averaged over the queries.

    A document that ties with the k-th best counts as well. If exact search finds fewer than k documents, the share is of those.

    Args:
        found: Document rows per query, best first.
        exact: Hits of exact search.
        k: Number of documents.

    Example:
        >>> truth = ExactHits([np.array([4, 2, 7])], [np.array([3.0, 2.0, 2.0], np.float32)])
        >>> recall([[4, 7]], truth, 2), recall([[7, 1]], truth, 2)
        (1.0, 0.5)
    """
    shares = []
    for rows, best, scores in zip(found, exact.rows, exact.scores, strict=True):
        wanted = min(k, len(best))
        if not wanted:
            continue
        lowest = float(scores[wanted - 1])
        right = set(best[scores >= lowest - _ROUNDING * max(1.0, abs(lowest))].tolist())
        shares.append(min(wanted, len(right.intersection(rows[:k]))) / wanted)
    return float(np.mean(shares)) if shares else 1.0


def ndcg(found: Sequence[Sequence[int]], vectors: VectorFolder, qrels: Qrels) -> float:
    """Return nDCG@10 of found documents.

    Args:
        found: Document rows per query, best first.
        vectors: Folder with the ids of queries and documents.
        qrels: Judgements.
    """
    run: Mapping[str, Mapping[str, float]] = {
        query: {vectors.ids[row]: -float(position) for position, row in enumerate(rows)}
        for query, rows in zip(vectors.query_ids, found, strict=True)
    }
    return score(qrels, run, [_NDCG]).means[_NDCG]


def invalid_hits(found: Sequence[Sequence[int]], *, documents: int, queries: int, k: int) -> str | None:
    """Describe an error in the hits of a library; None if there is none.

    Args:
        found: Document rows per query.
        documents: Number of documents.
        queries: Number of queries.
        k: Number of requested hits.

    Example:
        >>> invalid_hits([[0, -1]], documents=3, queries=1, k=2)
        'returned row -1, but there are 3 documents'
    """
    if len(found) != queries:
        return f"answered {len(found)} of {queries} queries"
    for rows in found:
        outside = [row for row in rows if not 0 <= row < documents]
        if outside:
            return f"returned row {outside[0]}, but there are {documents:,} documents"
        if len(set(rows)) != len(rows):
            return "returned a document twice"
        if len(rows) > k:
            return f"returned {len(rows)} documents, but k is {k}"
    return None
