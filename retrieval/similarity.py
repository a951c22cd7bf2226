"""What an inner-product index must be given so that its scores are the model's similarity.

Shapes: B vectors, d width.
"""

from __future__ import annotations

import numpy as np

from retrieval.records import DenseVectors, ModelCard


def comparable(vectors: DenseVectors, card: ModelCard) -> DenseVectors:
    """Vectors whose inner product is the model's similarity: scaled to length 1 for cosine, as they are for dot product.

    A model with cosine similarity need not end in a normalising module, and then gives vectors of any length.

    Args:
        vectors: (B, d).
        card: The model they come from.

    Returns:
        (B, d); a zero vector stays zero.
    """
    if card.similarity != "cosine":
        return vectors
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    scaled = np.zeros_like(vectors)
    np.divide(vectors, lengths, out=scaled, where=lengths > 0)
    return scaled
