"""From texts to vectors, for bi-encoders and ColBERT models: cleaning, pooling, projections, scaling and fingerprints.

Shapes: B texts, N packed tokens, D encoder width, d vector width.
Source: sentence-transformers' ``Pooling`` and ``Dense`` modules; PyLate's ``Dense``.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Literal, TypeAlias, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from quiver.encoder import Encoder, InputError, PackedBatch, Tokenizer
from quiver.encoder.config import DROPOUTS
from quiver.encoder.tokenizer import SPECIAL_TOKENS
from quiver.retrieval.records import DenseVectors, Document, ModelCard, Role, TextTokens, TokenVectors

logger = logging.getLogger(__name__)

Texts: TypeAlias = str | Sequence[str]
"""A text, or a list of texts."""

Documents: TypeAlias = str | Document | Sequence[str | Document]
"""A document or its text, or a list of them."""

Devices: TypeAlias = str | torch.device | Sequence[str | torch.device]
"""A device, or the device of each of several processes."""


@dataclass(frozen=True)
class EncodingJob:
    """How the texts of a call are encoded.

    Attributes:
        role: What a progress bar calls the texts; for ColBERT it also decides prefix, length, expansion and skiplist.
        prompt: Put before every text, for ColBERT behind the prefix.
        batch_size: Maximum number of texts per batch; None for no limit but that of the tokens.
        normalize: Scale vectors to length 1 at the end.
        truncate_dim: Width to which vectors are cut; None for the model's (dense).
        pool_factor: Number of token vectors that one pooled vector of a document replaces on average; 1 keeps all (ColBERT).
        protected_tokens: First vectors of a document that are not pooled (ColBERT).

    Raises:
        InputError: A number is too small.
    """

    role: Role
    prompt: str
    batch_size: int | None = None
    normalize: bool = False
    truncate_dim: int | None = None
    pool_factor: int = 1
    protected_tokens: int = 1

    def __post_init__(self) -> None:
        for name, least in (("batch_size", 1), ("truncate_dim", 1), ("pool_factor", 1), ("protected_tokens", 0)):
            number = getattr(self, name)
            if number is not None and number < least:
                raise InputError(f"{name} must be >= {least}, got {number}")


def check_texts(texts: Sequence[str]) -> None:
    """Check that texts are a list of strings.

    Raises:
        ValueError: ``texts`` is one string, or an item is not a string.
    """
    if isinstance(texts, str):
        raise ValueError("texts must be a list of strings, got a string")
    for number, text in enumerate(texts):
        if not isinstance(text, str):
            raise ValueError(f"text {number} must be a string, got {type(text).__name__}")


def clean(texts: Sequence[str], *, prompt: str = "", lower_case: bool = False) -> list[str]:
    """Prepend the prompt, strip and lower-case texts, as sentence-transformers does before tokenizing.

    Raises:
        ValueError: ``texts`` is one string, or an item is not a string.
    """
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


def joined_tokens(parts: Sequence[TextTokens]) -> TextTokens:
    """Concatenate the token counts of the parts of a call, at least one, and log how many texts were truncated."""
    joined = TextTokens(*(np.concatenate([getattr(part, name) for part in parts]) for name in ("tokens", "truncated", "empty")))
    if joined.truncated.any():
        logger.info("%d of %d texts were truncated to the model's maximum length", joined.truncated.sum(), len(joined.truncated))
    return joined


# Configuration fields that do not affect vectors.
WITHOUT_EFFECT = frozenset({"family", "initializer_range", "pad_token_id", "cls_token_id", "sep_token_id", *DROPOUTS})


def fingerprint(encoder: Encoder, projections: nn.Sequential, tokenizer: Tokenizer, settings: object) -> str:
    """Hash weights, architecture, tokenizer and settings with sha256: equal fingerprints mean equal vectors.

    Args:
        encoder: Encoder; its weights and configuration are hashed.
        projections: `quiver.retrieval.models.encoding.Projection` modules, in order.
        tokenizer: Tokenizer; its rules and the ids of its special tokens are hashed.
        settings: JSON values of all other settings that affect vectors.
    """
    digest = hashlib.sha256()
    for module in (encoder, projections):
        for name, tensor in module.state_dict().items():
            digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
            digest.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().data)
    digest.update(tokenizer.to_json().encode())
    described = {
        "architecture": {name: value for name, value in asdict(encoder.config).items() if name not in WITHOUT_EFFECT},
        "projections": [(module.activation, module.use_residual) for module in projections if isinstance(module, Projection)],
        "special": [tokenizer.special_id(name) for name in SPECIAL_TOKENS],
        "truncation": tokenizer.truncation_side,
        "settings": settings,
    }
    digest.update(json.dumps(described, sort_keys=True).encode())
    return digest.hexdigest()


def _segment(hidden: Tensor, batch: PackedBatch, skip: int, reduce: str) -> Tensor:
    """Reduce each sequence without its first ``skip`` tokens to (B, D), without waiting for the device."""
    lengths = batch.cu_seqlens.diff().long()
    if skip:
        skipped = batch.positions < skip
        hidden = hidden.masked_fill(skipped[:, None], 0.0 if reduce == "sum" else -torch.inf)
    # Checks of the lengths would wait for the device; those of a batch are right.
    return torch.segment_reduce(hidden, reduce, lengths=lengths, axis=0, unsafe=True)


def _cls(hidden: Tensor, batch: PackedBatch, skip: int) -> Tensor:
    del skip  # the first token precedes any prompt
    return hidden[batch.cu_seqlens[:-1].long()]


def _mean(hidden: Tensor, batch: PackedBatch, skip: int) -> Tensor:
    # A sum and a division instead of "mean": a text whose tokens are all skipped gives zeros, not NaN.
    lengths = batch.cu_seqlens.diff().long()
    return _segment(hidden, batch, skip, "sum") / (lengths - skip).clamp(min=1)[:, None]


def _max(hidden: Tensor, batch: PackedBatch, skip: int) -> Tensor:
    return _segment(hidden, batch, skip, "max")


def _last(hidden: Tensor, batch: PackedBatch, skip: int) -> Tensor:
    del skip  # the last token follows any prompt
    return hidden[batch.cu_seqlens[1:].long() - 1]


POOLINGS: dict[str, Callable[[Tensor, PackedBatch, int], Tensor]] = {"cls": _cls, "mean": _mean, "max": _max, "lasttoken": _last}
"""Pooling functions by sentence-transformers' names: hidden states (N, D), batch and number of leading tokens to skip -> (B, D)."""


def pool(hidden: Tensor, batch: PackedBatch, mode: str, *, skip: int = 0) -> Tensor:
    """Pool hidden states to one vector per sequence.

    Args:
        hidden: Hidden states, (N, D).
        batch: The packed batch.
        mode: A key of `POOLINGS`.
        skip: Leading tokens that mean and max exclude (a prompt that is not pooled).

    Returns:
        Vectors (B, D), float32.

    Raises:
        ValueError: The mode is unknown.

    Example:
        >>> from quiver.encoder import pack_ids
        >>> pool(torch.tensor([[1.0], [3.0], [5.0]]), pack_ids([[7, 7], [7]]), "mean").tolist()
        [[2.0], [5.0]]
    """
    if mode not in POOLINGS:
        raise ValueError(f"pooling must be one of {', '.join(POOLINGS)}, got {mode!r}")
    # In half precision a sum over thousands of tokens would saturate.
    return POOLINGS[mode](hidden.float(), batch.to(hidden.device), skip)


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "torch.nn.modules.linear.Identity": lambda x: x,
    "torch.nn.modules.activation.Tanh": torch.tanh,
    "torch.nn.modules.activation.ReLU": torch.relu,
    "torch.nn.modules.activation.GELU": nn.functional.gelu,
    "torch.nn.modules.activation.SiLU": nn.functional.silu,
}
"""Activations by the class names that checkpoints store."""

IDENTITY = "torch.nn.modules.linear.Identity"


class Projection(nn.Module):
    """Linear layer on top of the encoder, with activation and optional residual path (the ``Dense`` module of checkpoints).

    Args:
        in_features: Input width D.
        out_features: Output width d.
        bias: Add a bias.
        activation: A key of `ACTIVATIONS`.
        residual: Add the input to the output, through a matrix if the widths differ (PyLate's ``use_residual``).

    Raises:
        InputError: The activation is not supported.
    """

    def __init__(
        self, in_features: int, out_features: int, *, bias: bool = False, activation: str = IDENTITY, residual: bool = False
    ) -> None:
        super().__init__()
        if activation not in ACTIVATIONS:
            raise InputError(f"a Dense module's activation_function must be one of {', '.join(ACTIVATIONS)}, got {activation!r}")
        self.activation = activation
        self.use_residual = residual
        self.linear = nn.Linear(in_features, out_features, bias=bias)
        self.residual = nn.Linear(in_features, out_features, bias=False) if residual and in_features != out_features else None

    def forward(self, vectors: Tensor) -> Tensor:
        """Map vectors (N, D) to (N, d)."""
        projected = ACTIVATIONS[self.activation](self.linear(vectors))
        if self.use_residual:
            projected = projected + (vectors if self.residual is None else self.residual(vectors))
        return projected


def pool_tokens(vectors: TokenVectors, factor: int, *, protected: int = 1) -> TokenVectors:
    """Pool the token vectors of a document as PyLate does: Ward clusters of them by cosine distance become their means.

    An index pools in another way: with ``pool_factor`` of its engine, clusters are those of squared distances, and means have length 1.

    Args:
        vectors: Unit vectors, (n, d).
        factor: Number of vectors that a pooled vector replaces on average.
        protected: First vectors that are kept.

    Returns:
        (m, d): the protected vectors, then the means, in the order of the first vector of each cluster.

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


Precision = Literal["float32", "int8", "uint8", "binary", "ubinary"]
"""Types of the values of a vector, by sentence-transformers' names."""


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

    A model with cosine similarity need not end in a normalizing module, so its vectors may have any length.

    Args:
        vectors: Vectors (B, d); not modified.
        card: Card of the model that made them.

    Returns:
        Vectors (B, d). Zero vectors stay zero, non-finite ones stay non-finite.
    """
    if card.similarity != "cosine":
        return vectors
    scaled: DenseVectors = vectors.copy()
    make_comparable(scaled, card)
    return scaled


def make_comparable(vectors: DenseVectors, card: ModelCard) -> None:
    """Scale vectors as `comparable` does, in place, to avoid a second copy of a corpus.

    Args:
        vectors: Vectors (B, d), scaled if the model's similarity is cosine.
        card: Card of the model that made them.
    """
    if card.similarity != "cosine":
        return
    # In float32, squares overflow above 1e19 and underflow below 1e-23; in float64 only the zero vector has length zero.
    lengths = np.sqrt(np.einsum("bd,bd->b", vectors, vectors, dtype=np.float64))[:, None]  # (B, 1)
    with np.errstate(invalid="ignore"):  # an infinite vector becomes NaN, which the index or the search reports
        # Not `lengths > 0`, which is False for NaN too: the NaN must stay visible.
        np.divide(vectors, lengths, out=vectors, where=lengths != 0, casting="same_kind")
