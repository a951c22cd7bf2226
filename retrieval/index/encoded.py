"""Documents to vectors that an index takes, and the sample that a codec is trained on.

The sample is of documents chosen at random. Their vectors are kept on the disk until the build is done, so that they are encoded once.

Shapes: B documents of a chunk, n vectors of them, d width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from quiver.encoder.errors import InputError
from quiver.retrieval.data.embedding_store import stack_vectors
from quiver.retrieval.index.disk import Disk, write_array
from quiver.retrieval.index.mapped import map_array
from quiver.retrieval.models.pooling import comparable
from quiver.retrieval.protocols import DenseModel, TokenModel
from quiver.retrieval.records import DenseEncoding, Document, TextTokens

Model: TypeAlias = DenseModel | TokenModel
"""A model of either kind; ``model.card.kind`` says which."""


@dataclass(frozen=True)
class Encoded:
    """The vectors of B documents.

    Attributes:
        vectors: (n, d) float32, comparable by inner product, document after document.
        lengths: How many each document has, (B,).
        token_ids: The vocabulary's numbers of their tokens, (n,) uint32; None where the model does not say.
        tokens: What tokenising did to each document.
    """

    vectors: NDArray[np.float32]
    lengths: NDArray[np.int64]
    token_ids: NDArray[np.uint32] | None
    tokens: TextTokens

    def select(self, places: NDArray[np.intp]) -> Encoded:
        """Some of the documents, in the order given."""
        ends = np.cumsum(self.lengths)
        lengths = self.lengths[places]
        begins = ends[places] - lengths
        rows = np.repeat(begins - (np.cumsum(lengths) - lengths), lengths) + np.arange(int(lengths.sum()))
        tokens = TextTokens(self.tokens.tokens[places], self.tokens.truncated[places], self.tokens.empty[places])
        return Encoded(self.vectors[rows], lengths, None if self.token_ids is None else self.token_ids[rows], tokens)


def encode(model: Model, documents: Sequence[Document], *, use_title: bool) -> Encoded:
    """The vectors of some documents.

    Raises:
        InputError: A vector is not finite (names the document).
        ValueError: The vectors are not what the model's card says.
    """
    encoding = model.encode([document.content(use_title=use_title) for document in documents], "document")
    given, counts = stack_vectors(encoding, model.card)
    with np.errstate(over="ignore"):  # what float32 cannot hold becomes infinite, and is refused
        vectors = np.ascontiguousarray(given, np.float32)  # what a model is to give; files have no other type
    lengths = np.array(counts, np.int64)
    if len(lengths) != len(documents):
        raise ValueError(f"{model.card.source} gave the vectors of {len(lengths)} texts for {len(documents)}")
    finite = np.isfinite(vectors).all(axis=1)
    if not finite.all():
        key = documents[int(np.searchsorted(np.cumsum(lengths), finite.argmin(), side="right"))].id
        what = "the vector" if isinstance(encoding, DenseEncoding) else "a token vector"
        raise InputError(f"{what} of document '{key}' is not finite; the model cannot be used on it")
    token_ids = None
    if not isinstance(encoding, DenseEncoding) and encoding.token_ids is not None:
        token_ids = np.concatenate(encoding.token_ids).astype(np.uint32, copy=False)
    return Encoded(comparable(vectors, model.card), lengths, token_ids, encoding.tokens)


def joined(parts: Sequence[Encoded]) -> Encoded:
    """The documents of several parts as one; one part at least."""
    ids = [part.token_ids for part in parts if part.token_ids is not None]
    tokens = TextTokens(*(np.concatenate([getattr(part.tokens, name) for part in parts]) for name in ("tokens", "truncated", "empty")))
    return Encoded(
        np.concatenate([part.vectors for part in parts]),
        np.concatenate([part.lengths for part in parts]),
        np.concatenate(ids) if len(ids) == len(parts) else None,
        tokens,
    )


def write_encoded(folder: Path, encoded: Encoded, disk: Disk) -> dict[str, str]:
    """Write vectors to a folder; file name -> what it holds."""
    write_array(folder / "vectors.f32", encoded.vectors, disk)
    write_array(folder / "lengths.i64", encoded.lengths, disk)
    tokens = np.stack([encoded.tokens.tokens, encoded.tokens.truncated, encoded.tokens.empty]).astype(np.int64)
    write_array(folder / "tokens.i64", tokens, disk)
    holds = {"vectors.f32": "vectors", "lengths.i64": "vectors a document", "tokens.i64": "what tokenising did to each document"}
    if encoded.token_ids is not None:
        write_array(folder / "token_ids.u32", encoded.token_ids, disk)
        holds["token_ids.u32"] = "the vocabulary's number of each vector's token"
    return holds


def read_encoded(folder: Path, count: int, dim: int) -> Encoded:
    """Map what `write_encoded` wrote.

    Args:
        folder: Where it is.
        count: Number of documents.
        dim: Vector width d.
    """
    lengths = map_array(folder / "lengths.i64", np.int64, (count,))
    rows = int(lengths.sum())
    tokens = map_array(folder / "tokens.i64", np.int64, (3, count))
    ids = folder / "token_ids.u32"
    return Encoded(
        map_array(folder / "vectors.f32", np.float32, (rows, dim)),
        np.asarray(lengths),
        map_array(ids, np.uint32, (rows,)) if ids.exists() else None,
        TextTokens(tokens[0].astype(np.int32), tokens[1].astype(bool), tokens[2].astype(bool)),
    )


class StoredSample:
    """The vectors of the documents in the sample, by the documents' numbers in the corpus.

    Args:
        pieces: Numbers of documents, ascending, and their vectors.
    """

    def __init__(self, pieces: Sequence[tuple[NDArray[np.int64], Encoded]]) -> None:
        self._pieces = tuple(pieces)

    def has(self, first: int, count: int) -> NDArray[np.bool_]:
        """Which of some successive documents are in the sample, (count,)."""
        known = np.zeros(count, bool)
        for numbers, _ in self._pieces:
            low, high = np.searchsorted(numbers, [first, first + count])
            known[numbers[low:high] - first] = True
        return known

    def fill(self, first: int, known: NDArray[np.bool_], others: Encoded | None) -> Encoded:
        """Vectors of successive documents, from the sample and from an encoding of the others.

        Args:
            first: Number of the first document.
            known: Which of them are in the sample, (B,).
            others: Those that are not, in their order; None where all are.
        """
        parts, numbers = ([] if others is None else [others]), [np.flatnonzero(~known)]
        for mine, encoded in self._pieces:
            low, high = np.searchsorted(mine, [first, first + len(known)])
            if low < high:
                parts.append(encoded.select(np.arange(low, high)))
                numbers.append(mine[low:high] - first)
        return joined(parts).select(np.argsort(np.concatenate(numbers), kind="stable"))
