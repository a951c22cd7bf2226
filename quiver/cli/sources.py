"""What a search asks: indexes, BM25 and a second stage, from the options of the command line; every index and model is opened once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from quiver.cli.index import model_of
from quiver.encoder import InputError
from quiver.encoder.files import cache_folder
from quiver.retrieval.cluster.index import ShardedIndex
from quiver.retrieval.index import Filter, Index, open_index
from quiver.retrieval.index.engines import Preset, Setting
from quiver.retrieval.index.store.reading import format_version
from quiver.retrieval.models.biencoder import BiEncoder
from quiver.retrieval.models.colbert import ColBERT
from quiver.retrieval.models.loading import load_model
from quiver.retrieval.records import Metadata, Missing, Query, Run
from quiver.retrieval.search import bm25
from quiver.retrieval.search.explain import Explanation, explain, explain_texts
from quiver.retrieval.search.hybrid import System, word_system
from quiver.retrieval.search.reranking import IndexScorer, Scorer, TextScorer
from quiver.retrieval.search.search import search

Explained: TypeAlias = Explanation | Sequence[bm25.WordScore]
"""Why a source gives a document its score."""

Explain: TypeAlias = Callable[[str, Sequence[str]], Mapping[str, Explained]]
"""The query's text and document ids to why the documents have their scores; those that a source does not have are left out."""


@dataclass(frozen=True)
class Source:
    """One ranking of a search.

    Attributes:
        name: What tables call it.
        system: Ranks documents.
        explain: Says why.
    """

    name: str
    system: System
    explain: Explain


@dataclass(frozen=True)
class SecondStage:
    """What ranks the candidates anew.

    Attributes:
        name: What tables call it.
        scorer: Scores them.
        explain: Says why.
    """

    name: str
    scorer: Scorer
    explain: Explain


@dataclass(frozen=True)
class Choices:
    """How every ranking is made.

    Attributes:
        filter: Which documents may be found.
        effort: How much of an index is looked at.
        target_recall: Chooses that for every index by what was measured of it; None for ``effort``.
        progress: Show bars.
    """

    filter: Filter | None
    effort: Preset
    target_recall: float | None
    progress: bool


@dataclass(frozen=True)
class Stored:
    """What an index keeps of a document: its text as it was encoded, and its metadata."""

    text: str
    metadata: Metadata | None


class Opened:
    """The indexes and models of one search.

    Args:
        folder: The first index.
        model: Its model; None for the one that built it.
        generation: Which of its generations; None for the newest.
        verify: Whether blocks of its files are compared with their checksums when they are first read.
        sharded: The first index over shards, which are searched instead; None to search it here.

    Attributes:
        efforts: Name of an index -> the knobs that it was searched with.
        missing: What of the first index was not searched, since shards were lost; None where everything was.

    Raises:
        InputError: The index cannot be opened.
    """

    def __init__(
        self, folder: Path, *, model: str | None, verify: bool, generation: int | None = None, sharded: ShardedIndex | None = None
    ) -> None:
        self._model = model
        self._verify = verify
        self._sharded = sharded
        self._indexes: dict[Path, Index] = {} if sharded is None else {folder.resolve(): sharded.whole}
        if generation is not None:
            self._indexes[folder.resolve()] = open_index(folder, generation=generation, verify=verify)
        self._models: dict[str, BiEncoder | ColBERT] = {}
        self.efforts: dict[str, Mapping[str, Setting]] = {}
        self.missing: Missing | None = None
        self._first = self.index(folder)

    @property
    def indexes(self) -> list[Index]:
        """All that were opened, the first one first."""
        return list(self._indexes.values())

    def index(self, folder: Path) -> Index:
        """An index.

        Raises:
            InputError: It cannot be opened.
        """
        path = folder.resolve()
        if path not in self._indexes:
            self._indexes[path] = open_index(folder, verify=self._verify)
        return self._indexes[path]

    def stored(self, key: str) -> Stored | None:
        """A document as the first index has it that has it and keeps texts; None where there is none."""
        for index in self._indexes.values():
            if index.manifest.policy.store_text and index.locate([key])[0] is not None:
                return Stored(index.text_of(key), index.document(key).metadata)
        return None

    def text_of(self, key: str) -> str:
        """The text of a document as it was encoded.

        Raises:
            InputError: No index that was opened keeps it.
        """
        stored = self.stored(key)
        if stored is None:
            raise InputError(
                f"{self._first.path}: built without texts, which a model re-ranks; re-rank by a ColBERT's index, or build with texts"
            )
        return stored.text

    def source(self, folder: str, choices: Choices, *, name: str) -> Source:
        """An index as a ranking.

        Raises:
            InputError: It or its model cannot be used.
        """
        index = self.index(Path(folder))
        model = self._model_of(index)
        searched = self._sharded if self._sharded is not None and index is self._first else index

        def system(queries: Sequence[Query], k: int) -> Run:
            target = choices.target_recall
            self.efforts[name] = index.presets(k)[choices.effort] if target is None else index.effort_for(target, k)
            found = search(searched, model, queries, k, filter=choices.filter, effort=self.efforts[name], progress=choices.progress)
            self.missing = found.missing or self.missing
            return found.run

        return Source(name, system, _explain_index(index, model))

    def words(self, choices: Choices) -> Source:
        """BM25 over the documents of the first index.

        Raises:
            InputError: It was built without texts, or bm25s is not installed.
        """
        words = bm25.WordIndex(self._first, cache=cache_folder("words"), verify=self._verify, progress=choices.progress)
        return Source(bm25.NAME, word_system(words, filter=choices.filter), _explain_words(words))

    def second_stage(self, given: str) -> SecondStage:
        """A ColBERT's index by its folder, or a ColBERT.

        Raises:
            InputError: It is neither.
        """
        (name,) = short_names([given])
        if format_version(Path(given)) is not None:
            index = self.index(Path(given))
            model = self._model_of(index)
            if not isinstance(model, ColBERT):
                raise InputError(f"{given}: an index of one vector a text; candidates are re-ranked by a ColBERT or its index")
            return SecondStage(name, IndexScorer(index, model), _explain_index(index, model))
        model = load_model(given)
        if not isinstance(model, ColBERT):
            raise InputError(f"{given}: a model of one vector a text; candidates are re-ranked by a ColBERT or its index")
        return SecondStage(name, TextScorer(model, self.text_of), self._explain_texts(model))

    def _model_of(self, index: Index) -> BiEncoder | ColBERT:
        wanted = index.manifest.model.fingerprint
        if wanted not in self._models:
            loaded = model_of(index, self._model if index is self._first else None)
            index.check_model(loaded.card)
            self._models[wanted] = loaded
        return self._models[wanted]

    def _explain_texts(self, model: ColBERT) -> Explain:
        def explained(query: str, documents: Sequence[str]) -> dict[str, Explained]:
            found = explain_texts(model, query, {document: self.text_of(document) for document in documents})
            return {each.document: each for each in found}

        return explained


def short_names(paths: Sequence[str]) -> list[str]:
    """What tables call indexes and models: the last part of each path, or where two have the same, the paths as they were given.

    Example:
        >>> short_names(["indexes/dense", "bm25"]), short_names(["a/dense", "b/dense"])
        (['dense', 'bm25'], ['a/dense', 'b/dense'])
    """
    names = [Path(path).name or Path(path).resolve().name for path in paths]
    return names if len(set(names)) == len(names) else list(paths)


def _explain_index(index: Index, model: BiEncoder | ColBERT) -> Explain:
    def explained(query: str, documents: Sequence[str]) -> dict[str, Explained]:
        there = [document for document, place in zip(documents, index.locate(documents), strict=True) if place is not None]
        return {each.document: each for each in explain(index, model, query, there)}

    return explained


def _explain_words(words: bm25.WordIndex) -> Explain:
    def explained(query: str, documents: Sequence[str]) -> dict[str, Explained]:
        places = words.index.locate(documents)
        there = [document for document, place in zip(documents, places, strict=True) if place is not None]
        return {document: words.word_scores(query, document) for document in there}

    return explained
