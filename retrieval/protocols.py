"""Protocols between the parts of retrieval, and the row containers that implement `Rows`.

Shapes: Q queries, B documents, k hits per query, n rows, d vector width, n_i token vectors of text i.
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


class Matrix(Protocol):
    """What an array of rows has in common with one that is read from a file."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the array."""

    def __len__(self) -> int:
        """Number of rows."""

    def __getitem__(self, rows: slice | NDArray[np.int64]) -> DenseVectors:
        """Some rows."""


class MatrixRows:
    """The rows of a matrix, (n, d) float32, in memory or in a mapped file that is verified as it is read."""

    def __init__(self, matrix: DenseVectors | Matrix) -> None:
        self.matrix = matrix

    @property
    def shape(self) -> tuple[int, int]:
        """Number of rows, and their width d."""
        return self.matrix.shape[0], self.matrix.shape[1]

    def blocks(self, size: int) -> Iterator[tuple[int, DenseVectors]]:
        """All rows in order, ``size`` at a time, each block with the number of its first row; views, not copies."""
        for start in range(0, len(self.matrix), size):
            yield start, self.matrix[start : start + size]

    def span(self, start: int, stop: int) -> DenseVectors:
        """Rows ``start`` to ``stop - 1``; a view, not a copy."""
        return self.matrix[start:stop]

    def take(self, indices: NDArray[np.intp]) -> DenseVectors:
        """The rows with these numbers, in the order given."""
        taken: DenseVectors = self.matrix[indices]
        return taken


class PickedRows:
    """Some of other rows as rows of their own; nothing is read before it is asked for.

    Args:
        rows: (n, d).
        picked: Their numbers, (m,), in the order that they have here.
    """

    def __init__(self, rows: Rows, picked: NDArray[np.intp]) -> None:
        self._rows = rows
        self._picked = picked

    @property
    def shape(self) -> tuple[int, int]:
        """Number of rows m, and their width d."""
        return len(self._picked), self._rows.shape[1]

    def blocks(self, size: int) -> Iterator[tuple[int, DenseVectors]]:
        """All rows in order, ``size`` at a time, each block with the number of its first row."""
        for start in range(0, len(self._picked), size):
            yield start, self.span(start, start + size)

    def span(self, start: int, stop: int) -> DenseVectors:
        """Rows ``start`` to ``stop - 1``."""
        return self._rows.take(self._picked[start:stop])

    def take(self, indices: NDArray[np.intp]) -> DenseVectors:
        """The rows with these numbers, in the order given."""
        return self._rows.take(self._picked[indices])
