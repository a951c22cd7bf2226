"""What retrieval's parts expect of each other; checked by mypy, implemented without inheritance.

Shapes: Q queries, B documents, k hits a query, d vector width, n_i token vectors of text i.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from quiver.retrieval.records import DenseEncoding, DenseVectors, ModelCard, Role, TokenEncoding


class DenseModel(Protocol):
    """A text encoder with one vector a text."""

    @property
    def card(self) -> ModelCard:
        """What an index or a report has to know of this model."""

    def encode(self, texts: Sequence[str], role: Role, *, progress: bool = False) -> DenseEncoding:
        """Texts to (B, d) float32 in input order."""


class TokenModel(Protocol):
    """A text encoder with one vector a token."""

    @property
    def card(self) -> ModelCard:
        """What an index or a report has to know of this model."""

    def encode(self, texts: Sequence[str], role: Role, *, progress: bool = False) -> TokenEncoding:
        """Texts to B arrays of (n_i, d) float32 in input order."""


class Rows(Protocol):
    """Vectors that need not be in memory, (n, d) float32; what it gives may be a view and is not to be written to."""

    @property
    def shape(self) -> tuple[int, int]:
        """Number of rows, and their width d."""

    def blocks(self, size: int) -> Iterator[tuple[int, DenseVectors]]:
        """All rows in order, ``size`` at a time, each block with the number of its first row."""

    def span(self, start: int, stop: int) -> DenseVectors:
        """Rows ``start`` to ``stop - 1``."""

    def take(self, indices: NDArray[np.intp]) -> DenseVectors:
        """The rows with these numbers, in the order given."""
