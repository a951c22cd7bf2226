"""One committed state of an index, opened for the service: its vectors, its words, its model; and what searches it."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quiver.encoder.files import cache_folder
from quiver.retrieval.index import Index, open_index
from quiver.retrieval.models.biencoder import BiEncoder
from quiver.retrieval.models.colbert import ColBERT
from quiver.retrieval.models.pooling import comparable
from quiver.retrieval.records import DenseEncoding, Role, TokenEncoding
from quiver.retrieval.search import bm25_index

# Searched once before a generation answers anybody: loops are compiled and tables are made then.
_WARM_UP = "warm up"


class SharedModel:
    """A model that several threads ask, one at a time: two forward passes at once would share the same cores.

    Args:
        model: The model.

    Attributes:
        model: The same.
        lock: Held while it computes.
        card: What an index has to know of it.
    """

    def __init__(self, model: BiEncoder | ColBERT) -> None:
        self.model = model
        self.lock = threading.Lock()
        self.card = model.card

    def encode(self, texts: Sequence[str], role: Role, *, progress: bool = False) -> Any:
        """Texts to vectors, as the model gives them."""
        with self.lock:
            return self.model.encode(texts, role, progress=progress)

    def queries(self, texts: Sequence[str]) -> Sequence[Any]:
        """Queries as ``Index.search`` takes them, Q of them."""
        encoding: DenseEncoding | TokenEncoding = self.encode(texts, "query")
        if isinstance(encoding, DenseEncoding):
            return list(comparable(encoding.vectors, self.card))
        return encoding.vectors


@dataclass(frozen=True)
class Generation:
    """An index at one committed state.

    Attributes:
        index: Its vectors and documents.
        model: Encodes its queries.
        words: Its documents by their words; None where nobody asks for BM25.
    """

    index: Index
    model: SharedModel
    words: bm25_index.WordIndex | None

    @property
    def number(self) -> int:
        """The number of the committed state."""
        return self.index.manifest.generation


def open_generation(folder: Path, model: SharedModel, *, words: bool, verify: bool) -> Generation:
    """Open an index at its newest state, and search it once.

    Args:
        folder: The index.
        model: The one that built it.
        words: Count words for BM25; what was counted before is read from the user's cache.
        verify: Compare each block of a file with its checksum when it is first read.

    Raises:
        InputError: It cannot be opened, another model built it, or it has no texts for BM25.
    """
    index = open_index(folder, verify=verify)
    index.check_model(model.card)
    generation = Generation(index, model, bm25_index.WordIndex(index, cache=cache_folder("words"), verify=verify) if words else None)
    index.search(model.queries([_WARM_UP]), 1)
    if generation.words is not None:
        generation.words.search([_WARM_UP], 1)
    return generation
