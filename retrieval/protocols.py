"""What retrieval's parts expect of each other; checked by mypy, implemented without inheritance.

Shapes: Q queries, B documents, k hits a query, d vector width, n_i token vectors of text i.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol, TypeVar

from retrieval.records import DenseEncoding, Hits, ModelCard, Role, TokenEncoding

Vectors = TypeVar("Vectors", contravariant=True)


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


class VectorIndex(Protocol[Vectors]):
    """Documents that can be searched by vectors; ids are strings, stable for ever."""

    @property
    def ids(self) -> Sequence[str]:
        """Document ids in the order they were added."""

    def __len__(self) -> int:
        """Number of documents."""

    def search(self, queries: Vectors, k: int) -> Hits:
        """The k best documents of each query; k is capped at the number of documents.

        Raises:
            ValueError: k < 1, or the query vectors have another width than the index.
        """

    def save(self, folder: Path) -> dict[str, str]:
        """Write the index's files into an existing folder; file name -> what it holds."""
