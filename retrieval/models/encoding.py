"""Before and after the encoder, without PyTorch: clean texts and counts of their tokens; pooled, quantized and scaled vectors.

Shapes: B texts, d vector width, n token vectors of a text.
Source: sentence-transformers' ``quantize_embeddings``; PyLate's pooling of token vectors.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias, TypeVar, get_args

import numpy as np
from numpy.typing import NDArray

from quiver.encoder.errors import InputError
from quiver.encoder.files import check_utf8
from quiver.retrieval.records import DenseEncoding, DenseVectors, Document, ModelCard, Role, TextTokens, TokenEncoding, TokenVectors

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

Texts: TypeAlias = str | Sequence[str]  # a text, or a list of texts
Documents: TypeAlias = str | Document | Sequence[str | Document]  # a document or its text, or a list of them
Devices: TypeAlias = "str | torch.device | Sequence[str | torch.device]"  # a device, or the device of each of several processes

AnyEncoding: TypeAlias = DenseEncoding | TokenEncoding  # vectors of texts by any model


@dataclass(frozen=True)
class EncodingJob:
    """How the texts of a call are encoded; an InputError if a number is too small, or the prompt contains half of a surrogate pair."""

    role: Role  # for a progress bar; for ColBERT it also decides prefix, length, expansion and skiplist
    prompt: str  # put before every text, for ColBERT behind the prefix
    batch_size: int | None = None  # maximum number of texts per batch; None for no limit but that of the tokens
    normalize: bool = False  # scale vectors to length 1 at the end
    truncate_dim: int | None = None  # width to which vectors are cut; None for the model's (dense)
    pool_factor: int = 1  # token vectors that one pooled vector of a document replaces on average (ColBERT)
    protected_tokens: int = 1  # first vectors of a document that are not pooled (ColBERT)

    def __post_init__(self) -> None:
        for name, least in (("batch_size", 1), ("truncate_dim", 1), ("pool_factor", 1), ("protected_tokens", 0)):
            number = getattr(self, name)
            if number is not None and number < least:
                raise InputError(f"{name} must be >= {least}, got {number}")
        check_utf8(self.prompt, "the prompt")


def check_texts(texts: Sequence[str]) -> None:
    """Check that texts are a list of strings (ValueError) that UTF-8 can hold (InputError); names the number of a text, from 0."""
    if isinstance(texts, str):
        raise ValueError("texts must be a list of strings, got a string")
    for number, text in enumerate(texts):
        if not isinstance(text, str):
            raise ValueError(f"text {number} must be a string, got {type(text).__name__}")
        check_utf8(text, f"text {number}")


def clean(texts: Sequence[str], *, prompt: str = "", lower_case: bool = False) -> list[str]:
    """Check texts, prepend the prompt, strip and lower-case them, as sentence-transformers does before tokenizing."""
    check_texts(texts)
    stripped = [(prompt + text).strip() for text in texts]
    return [text.lower() for text in stripped] if lower_case else stripped


def contents(documents: Documents) -> str | list[str]:
    """Return the text of a document, or of each of a list, joined with its title; strings are returned unchanged."""
    if isinstance(documents, str):
        return documents
    if isinstance(documents, Document):
        return documents.content()
    return [document.content() if isinstance(document, Document) else document for document in documents]


def describe_tokens(texts: Sequence[str], ids: Sequence[Sequence[int]], truncated: Sequence[bool]) -> TextTokens:
    """Count the tokens of each text."""
    return TextTokens(
        tokens=np.fromiter(map(len, ids), np.int32, len(ids)),
        truncated=np.array(truncated, bool),
        empty=np.fromiter((not text.strip() for text in texts), bool, len(texts)),
    )


Joined = TypeVar("Joined", DenseEncoding, TokenEncoding)


def join_encodings(parts: Sequence[Joined]) -> Joined:
    """Concatenate the encodings of the parts of a call, at least one, and log how many texts were truncated."""
    joined = parts[0]
    if len(parts) > 1:
        tokens = TextTokens(*(np.concatenate([getattr(part.tokens, name) for part in parts]) for name in ("tokens", "truncated", "empty")))
        if isinstance(joined, DenseEncoding):
            joined = DenseEncoding(np.concatenate([part.vectors for part in parts]), tokens)
        else:
            ids = None if joined.token_ids is None else [each for part in parts for each in part.token_ids or ()]
            joined = TokenEncoding([each for part in parts for each in part.vectors], tokens, ids)
    if joined.tokens.truncated.any():
        texts = joined.tokens.truncated
        logger.info("%d of %d texts were truncated to the model's maximum length", texts.sum(), len(texts))
    return joined


def pool_tokens(vectors: TokenVectors, factor: int, *, protected: int = 1) -> TokenVectors:
    """Pool the token vectors of a document as PyLate does: Ward clusters of them by cosine distance become their means.

    An index pools in another way: with ``pool_factor`` of its engine, clusters are those of squared distances, and means have length 1.

    The first ``protected`` of the unit vectors (n, d) are kept; a mean replaces ``factor`` of the others on average. The means are in the
    order of the first vector of each cluster.

    Example:
        >>> pool_tokens(np.array([[1, 0], [0, 1], [0, 1], [0.6, 0.8], [-1, 0]], np.float32), 2).round(2).tolist()
        [[1.0, 0.0], [0.20000000298023224, 0.9300000071525574], [-1.0, 0.0]]
    """
    free = vectors[protected:]
    count = max(len(free) // factor, 1)
    if count >= len(free):
        return vectors
    from quiver.retrieval.index.kernels import ward

    distances = (1 - free @ free.T).astype(np.float64)
    _, labels = np.unique(ward(distances * distances, count), return_inverse=True)
    sums = np.zeros((count, free.shape[1]))
    np.add.at(sums, labels, free)
    means = sums / np.bincount(labels, minlength=count)[:, None]
    pooled: TokenVectors = np.concatenate([vectors[:protected], means.astype(np.float32)])
    return pooled


Precision = Literal["float32", "int8", "uint8", "binary", "ubinary"]  # types of the values of a vector, by sentence-transformers' names


def quantize_embeddings(vectors: DenseVectors, precision: Precision) -> NDArray[np.int8] | NDArray[np.uint8]:
    """Quantize vectors as sentence-transformers 6 does; version 5 rounds int8 levels below 0 up.

    Args:
        vectors: Vectors (B, d).
        precision: ``uint8``: each column's range over the B vectors in 255 steps; ``int8``: the same, less 128. ``ubinary``: one bit per
            column, set for positive values, eight in a byte, (B, ceil(d / 8)); ``binary``: the same bytes, less 128.

    Raises:
        ValueError: The precision does not exist.

    Example:
        >>> vectors = np.array([[0.0, -1.0], [0.5, 1.0], [1.0, 0.0]], np.float32)
        >>> quantize_embeddings(vectors, "uint8").tolist(), quantize_embeddings(vectors, "ubinary").tolist()
        ([[0, 0], [127, 254], [254, 127]], [[0], [192], [128]])
    """
    if precision in ("binary", "ubinary"):
        bits = np.packbits(vectors > 0, axis=1)
        return bits if precision == "ubinary" else np.subtract(bits, 128, dtype=np.int16).astype(np.int8)
    if precision not in ("int8", "uint8"):
        raise ValueError(f"precision must be one of {', '.join(get_args(Precision))}, got {precision!r}")
    if len(vectors) < 100:
        logger.warning("%s: the ranges of the columns are those of %d vectors only; more are more stable", precision, len(vectors))
    if not len(vectors):
        return vectors.astype(np.int8 if precision == "int8" else np.uint8)
    low, high = vectors.min(0), vectors.max(0)
    steps = (high - low) / 255
    # A column of one value has no range: its level is 0.
    levels: NDArray[np.float32] = np.floor(np.divide(vectors - low, steps, out=np.zeros_like(vectors), where=steps > 0)).clip(0, 255)
    quantized: NDArray[np.int8] | NDArray[np.uint8] = levels.astype(np.uint8) if precision == "uint8" else (levels - 128).astype(np.int8)
    return quantized


def comparable(vectors: DenseVectors, card: ModelCard) -> DenseVectors:
    """Scale vectors so that their inner product is the model's similarity: to length 1 for cosine, unchanged for dot product.

    A model with cosine similarity need not end in a normalizing module, so its vectors (B, d) may have any length. They are not modified.
    Zero vectors stay zero, non-finite ones stay non-finite.
    """
    if card.similarity != "cosine":
        return vectors
    # In float32, squares overflow above 1e19 and underflow below 1e-23; in float64 only the zero vector has length zero.
    lengths = np.sqrt(np.einsum("bd,bd->b", vectors, vectors, dtype=np.float64))[:, None]  # (B, 1)
    with np.errstate(invalid="ignore"):  # an infinite vector becomes NaN, which the index or the search reports
        # Not `lengths > 0`, which is False for NaN too: the NaN must stay visible.
        scaled: DenseVectors = np.divide(vectors, lengths, out=vectors.copy(), where=lengths != 0, casting="same_kind")
    return scaled


def stack_vectors(encoding: AnyEncoding, card: ModelCard, texts: int) -> tuple[DenseVectors, NDArray[np.int64], int | None]:
    """Return the vectors of an encoding as one float32 matrix, comparable by inner product.

    Args:
        encoding: Output of the model.
        card: Card of the model.
        texts: Number of texts that it encoded.

    Returns:
        The rows of all texts, (T, d), the number of rows of each, (B,), and the number of the first text with a row that is not finite.

    Raises:
        ValueError: The width of the vectors differs from the model card, or their number from that of the texts.
    """
    if isinstance(encoding, DenseEncoding):
        given, lengths = encoding.vectors, np.ones(len(encoding.vectors), np.int64)
    else:
        given, lengths = np.concatenate(encoding.vectors), np.array([len(matrix) for matrix in encoding.vectors], np.int64)
    if given.ndim != 2 or given.shape[1] != card.dim:
        raise ValueError(f"{card.source} returned vectors of width {given.shape[-1]}, its card says {card.dim}")
    if len(lengths) != texts:
        raise ValueError(f"{card.source} returned vectors for {len(lengths)} texts, expected {texts}")
    with np.errstate(over="ignore"):  # an overflow becomes infinity
        vectors = np.ascontiguousarray(given, np.float32)  # files store float32 only
    finite = np.isfinite(vectors).all(axis=1)
    bad = None if finite.all() else int(np.searchsorted(np.cumsum(lengths), finite.argmin(), side="right"))
    return (vectors if bad is not None else comparable(vectors, card)), lengths, bad


def maxsim_packed(
    queries: Sequence[TokenVectors], tokens: TokenVectors, offsets: NDArray[np.int64], *, query_block: int = 256, document_block: int = 4096
) -> NDArray[np.float32]:
    """Compute MaxSim of every query with every document from packed vectors.

    Each block takes one matrix product and one segmented maximum. With the default sizes a block has 4 MiB, which stay in the cache between
    the two; it is larger if one document has more than ``document_block`` tokens.

    Args:
        queries: Q arrays of (n_i, d) float32, n_i >= 1.
        tokens: Document tokens, (T, d) float32; document p is ``tokens[offsets[p]:offsets[p + 1]]``.
        offsets: Document boundaries, (P + 1,) ascending, from 0 to T.
        query_block: Query tokens per block, as if all queries were as long as the longest.
        document_block: Maximum document tokens per block.

    Returns:
        Scores (Q, P); minus infinity for a document without tokens.
    """
    for row, query in enumerate(queries):
        if query.ndim != 2 or query.shape[0] == 0 or query.shape[1] != tokens.shape[1]:
            raise ValueError(f"query {row} must have the shape (>= 1, {tokens.shape[1]}), got {query.shape}")
    scores = np.full((len(queries), len(offsets) - 1), -np.inf, dtype=np.float32)
    # reduceat gives an empty segment the first value of the next one, so documents without tokens are excluded.
    filled = np.flatnonzero(np.diff(offsets))
    starts, ends = offsets[:-1][filled], offsets[1:][filled]
    step = max(1, query_block // max(map(len, queries), default=1))
    for first in range(0, len(queries), step):
        chosen = queries[first : first + step]
        block, heads = np.concatenate(chosen), np.cumsum([0, *map(len, chosen[:-1])])
        begin = 0
        while begin < len(filled):
            end = max(begin + 1, int(np.searchsorted(ends, starts[begin] + document_block, side="right")))
            similarities = block @ tokens[starts[begin] : ends[end - 1]].T  # (query tokens, document tokens)
            best = np.maximum.reduceat(similarities, starts[begin:end] - starts[begin], axis=1)
            scores[first : first + step, filled[begin:end]] = np.add.reduceat(best, heads, axis=0)
            begin = end
    return scores
