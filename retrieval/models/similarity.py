"""What an inner-product index must be given so that its scores are the model's similarity.

Shapes: B vectors, d width.
"""

from __future__ import annotations

import numpy as np

from quiver.retrieval.records import DenseVectors, ModelCard


def comparable(vectors: DenseVectors, card: ModelCard) -> DenseVectors:
    """Vectors whose inner product is the model's similarity: scaled to length 1 for cosine, as they are for dot product.

    A model with cosine similarity need not end in a normalising module, and then gives vectors of any length.

    Args:
        vectors: (B, d).
        card: The model they come from.

    Returns:
        (B, d); a zero vector stays zero, one that is not finite stays so. The given vectors are left alone.
    """
    if card.similarity != "cosine":
        return vectors
    scaled: DenseVectors = vectors.copy()
    make_comparable(scaled, card)
    return scaled


def make_comparable(vectors: DenseVectors, card: ModelCard) -> None:
    """As `comparable`, in place: a corpus is scaled without a second copy of it.

    Args:
        vectors: (B, d), changed where the model's similarity is cosine.
        card: The model they come from.
    """
    if card.similarity != "cosine":
        return
    # Squares of float32 overflow from 1e19 on and vanish below 1e-23; in float64 no float32 vector but zero has length zero.
    lengths = np.sqrt(np.einsum("bd,bd->b", vectors, vectors, dtype=np.float64))[:, None]  # (B, 1)
    with np.errstate(invalid="ignore"):  # an infinite vector becomes NaN; whoever indexes or searches it says whose it is
        # Not `lengths > 0`: that is False for NaN too, and a broken model would pass for one that found nothing.
        np.divide(vectors, lengths, out=vectors, where=lengths != 0, casting="same_kind")
