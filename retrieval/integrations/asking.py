"""An index and its model as one thing that is asked with a text: what the retriever classes of other frameworks are made of."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from quiver.retrieval.index.documents.metadata import FilterLike, as_filter
from quiver.retrieval.index.engines import Setting
from quiver.retrieval.index.index import Index, open_index
from quiver.retrieval.models.loading import load_model
from quiver.retrieval.protocols import DenseModel, TokenModel
from quiver.retrieval.records import Document, Query
from quiver.retrieval.search.search import search


class Answer(NamedTuple):
    """A document that was found, and its score."""

    document: Document
    score: float


@dataclass(frozen=True)
class Defaults:
    """How an index is asked where a call does not say otherwise.

    Attributes:
        k: Documents.
        filter: Which may be found.
        effort: How much of the index is looked at: a preset, or the engine's knobs; None for ``balanced``.
        target_recall: Instead of an effort, the share of the best that is to be found.
    """

    k: int = 10
    filter: FilterLike = None
    effort: str | Mapping[str, Setting] | None = None
    target_recall: float | None = None


class Asker:
    """An opened index with the model that built it. Several threads may ask; texts are encoded one after the other.

    Args:
        index: An index, or its folder.
        model: The model; by default the one that built the index.
        defaults: How it is asked.

    Raises:
        InputError: The index or the model cannot be opened, another model built the index, or a condition is malformed.
    """

    def __init__(
        self, index: Index | Path | str, *, model: DenseModel | TokenModel | None = None, defaults: Defaults | None = None
    ) -> None:
        self.index = index if isinstance(index, Index) else open_index(index)
        card = self.index.manifest.model
        self.model: DenseModel | TokenModel = load_model(card.source, precision=card.precision) if model is None else model
        self.index.check_model(self.model.card)
        self.defaults = defaults or Defaults()
        self._where = as_filter(self.defaults.filter)
        self._encoding = threading.Lock()

    def ask(self, text: str, *, k: int | None = None, filter: FilterLike = None) -> list[Answer]:
        """The best documents for a text, best first; where the index keeps no texts they have their ids alone.

        Args:
            text: The query.
            k: Documents, instead of the default.
            filter: Which may be found, instead of the default.
        """
        chosen = self.defaults
        with self._encoding:  # a model keeps what it has packed for a batch
            found = search(
                self.index,
                self.model,
                [Query("query", text)],
                chosen.k if k is None else k,
                filter=self._where if filter is None else as_filter(filter),
                effort=chosen.effort,
                target_recall=chosen.target_recall,
            )
        kept = self.index.manifest.policy.store_text
        ranked = found.run["query"].items()
        return [Answer(self.index.document(key) if kept else Document(key, ""), score) for key, score in ranked]

    def text_of(self, document: Document) -> str:
        """What stands in a document's place in a prompt: its text, with the title if titles were encoded."""
        return document.content(use_title=self.index.manifest.policy.use_title)


def metadata_of(answer: Answer) -> dict[str, object]:
    """What the frameworks keep beside a text: id, score, title, and the document's own fields."""
    document = answer.document
    own = {"id": document.id, "score": answer.score} | ({"title": document.title} if document.title else {})
    return {**(document.metadata or {}), **own}
