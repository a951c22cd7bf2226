"""The rankings of a search: indexes, BM25, fusion, re-ranking, and the description of hits. Each index and model is opened once."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from quiver.cli.output import short_names
from quiver.encoder.errors import InputError
from quiver.encoder.files import cache_folder, check_target
from quiver.retrieval.data.corpus import ranked, read_queries
from quiver.retrieval.index import DamagedIndexError, Filter, Index, open_index
from quiver.retrieval.index.engines import Setting
from quiver.retrieval.index.files import LostTextError
from quiver.retrieval.index.store.reading import format_version
from quiver.retrieval.models.biencoder import BiEncoder
from quiver.retrieval.models.bm25 import BM25, NAME
from quiver.retrieval.models.colbert import ColBERT
from quiver.retrieval.models.loading import load_index_model, load_model
from quiver.retrieval.records import Metadata, Missing, Query, Run
from quiver.retrieval.search.bm25 import WordScore, word_index, word_scores
from quiver.retrieval.search.explain import Explanation, QueryTokenMatch, explain, explain_texts
from quiver.retrieval.search.groups import Group, field_of, search_groups
from quiver.retrieval.search.search import (
    CandidateScorer,
    Fusion,
    IndexScorer,
    RankingSystem,
    TextScorer,
    check_fusible,
    search,
    search_fused,
    word_system,
)
from quiver.retrieval.search.search import rerank as rerank_run

if TYPE_CHECKING:
    from quiver.retrieval.cluster.index import ShardedIndex

EXCERPT = 160
"""Characters of a document that a hit shows."""

_QUERY = "query"  # id of a query that is given as a text

Explained: TypeAlias = Explanation | Sequence[WordScore]
"""Explanation of a document's score in one ranking."""

Explain: TypeAlias = Callable[[str, Sequence[str]], Mapping[str, Explained]]
"""Query text and document ids -> explanations; documents that the ranking does not contain are left out."""


@dataclass(frozen=True)
class Source:
    """One ranking of a search.

    Attributes:
        name: Name in tables.
        system: Ranks documents.
        explain: Explains scores.
    """

    name: str
    system: RankingSystem
    explain: Explain


@dataclass(frozen=True)
class SecondStage:
    """A re-ranking of the candidates.

    Attributes:
        name: Name in tables.
        scorer: Scores the candidates.
        explain: Explains scores.
    """

    name: str
    scorer: CandidateScorer
    explain: Explain


@dataclass(frozen=True)
class Choices:
    """Options that hold for every ranking.

    Attributes:
        filter: Condition on the documents; None for all documents.
        effort: Preset, or search parameters.
        target_recall: Use the fastest search parameters measured to reach this recall; None to use ``effort``.
        progress: Show progress bars.
    """

    filter: Filter | None
    effort: str | Mapping[str, Setting]
    target_recall: float | None
    progress: bool


@dataclass(frozen=True)
class Stored:
    """Text (as it was encoded) and metadata of a document in an index."""

    text: str
    metadata: Metadata | None


class Opened:
    """The indexes and models of one search.

    Args:
        folder: Folder of the first index.
        model: Model of the first index; None for the one that built it.
        device: Device of the models; None for a GPU if available.
        generation: Generation of the first index; None for the newest.
        verify: Verify the checksum of each block when it is first read.
        sharded: The first index, distributed over shards; None to search it in this process.

    Attributes:
        efforts: Name of an index -> search parameters that were used.
        missing: Segments of the first index that were not searched because shards were lost; None if all were searched.

    Raises:
        InputError: The first index cannot be opened.
    """

    def __init__(
        self,
        folder: Path,
        *,
        model: str | None,
        device: str | None,
        verify: bool,
        generation: int | None = None,
        sharded: ShardedIndex | None = None,
    ) -> None:
        self._model = model
        self._device = device
        self._verify = verify
        self._sharded = sharded
        self._indexes: dict[Path, Index] = {} if sharded is None else {folder.resolve(): sharded.whole}
        if generation is not None:
            self._indexes[folder.resolve()] = open_index(folder, generation=generation, verify=verify)
        self._models: dict[str, BiEncoder | ColBERT | BM25] = {}
        self.efforts: dict[str, Mapping[str, Setting]] = {}
        self.missing: Missing | None = None
        self._first = self.index(folder)

    @property
    def indexes(self) -> list[Index]:
        """The open indexes, in the order in which they were opened."""
        return list(self._indexes.values())

    def index(self, folder: Path) -> Index:
        """Open an index, or return it if it is open.

        Raises:
            InputError: The index cannot be opened.
        """
        path = folder.resolve()
        if path not in self._indexes:
            self._indexes[path] = open_index(folder, verify=self._verify)
        return self._indexes[path]

    def stored(self, key: str) -> Stored | None:
        """A document of the first index that contains it and stores texts; None if there is no such index."""
        for index in self._indexes.values():
            if index.manifest.policy.store_text and index.locate([key])[0] is not None:
                return Stored(index.text_of(key), index.document(key).metadata)
        return None

    def text_of(self, key: str) -> str:
        """Text of a document as it was encoded.

        Raises:
            InputError: No open index stores the text.
        """
        stored = self.stored(key)
        if stored is None:
            raise InputError(
                f"{self._first.path}: the index stores no texts, which a model needs for re-ranking; pass an index of a ColBERT model to"
                " --rerank, or rebuild the index without --no-text"
            )
        return stored.text

    def source(self, folder: str, choices: Choices, *, name: str) -> Source:
        """Make a ranking of an index.

        Raises:
            InputError: The index or its model cannot be used.
        """
        index = self.index(Path(folder))
        model = self._model_of(index)
        searched = self._sharded if self._sharded is not None and index is self._first else index

        def system(queries: Sequence[Query], k: int) -> Run:
            target = choices.target_recall
            self.efforts[name] = index.search_params_for(target, k) if target is not None else _search_params(index, choices.effort, k)
            found = search(searched, model, queries, k, filter=choices.filter, effort=self.efforts[name], progress=choices.progress)
            self.missing = found.missing or self.missing
            return found.run

        return Source(name, system, _explain_index(index, model))

    def words(self, choices: Choices) -> Source:
        """Make a BM25 ranking of the documents of the first index.

        Raises:
            InputError: The index stores no texts, or bm25s is not installed.
        """
        words = word_index(self._first, cache=cache_folder("words"), verify=self._verify, progress=choices.progress)
        return Source(NAME, word_system(words, filter=choices.filter), _explain_words(words))

    def second_stage(self, given: str) -> SecondStage:
        """Open an index of a ColBERT model, or a ColBERT model, for re-ranking.

        Raises:
            InputError: It is neither.
        """
        (name,) = short_names([given])
        if format_version(Path(given)) is not None:
            index = self.index(Path(given))
            model = self._model_of(index)
            if not isinstance(model, ColBERT):
                raise InputError(f"{given}: --rerank needs a ColBERT model or an index of one; this index has a single vector per document")
            return SecondStage(name, IndexScorer(index, model), _explain_index(index, model))
        model = load_model(given, device=self._device)
        if not isinstance(model, ColBERT):
            raise InputError(f"{given}: --rerank needs a ColBERT model or an index of one; this model gives a single vector per text")
        return SecondStage(name, TextScorer(model, self.text_of), self._explain_texts(model))

    def _model_of(self, index: Index) -> BiEncoder | ColBERT | BM25:
        wanted = index.manifest.model.fingerprint
        if wanted not in self._models:
            source = self._model if index is self._first else None
            loaded = load_index_model(index.manifest.model, source, device=self._device)
            index.check_model(loaded.card)
            self._models[wanted] = loaded
        return self._models[wanted]

    def _explain_texts(self, model: ColBERT) -> Explain:
        def explained(query: str, documents: Sequence[str]) -> dict[str, Explained]:
            found = explain_texts(model, query, {document: self.text_of(document) for document in documents})
            return {each.document: each for each in found}

        return explained


def _search_params(index: Index, effort: str | Mapping[str, Setting], k: int) -> Mapping[str, Setting]:
    """Search parameters of an effort. A preset gives only those that it sets."""
    if not isinstance(effort, str):
        return effort
    return next(params for name, params in index.presets(k).items() if name == effort)


def _explain_index(index: Index, model: BiEncoder | ColBERT | BM25) -> Explain:
    if isinstance(model, BM25):
        return _explain_words(index)

    def explained(query: str, documents: Sequence[str]) -> dict[str, Explained]:
        there = [document for document, row in zip(documents, index.locate(documents), strict=True) if row is not None]
        return {each.document: each for each in explain(index, model, query, there)}

    return explained


def _explain_words(words: Index) -> Explain:
    def explained(query: str, documents: Sequence[str]) -> dict[str, Explained]:
        there = [document for document, row in zip(documents, words.locate(documents), strict=True) if row is not None]
        return {document: word_scores(words, query, document) for document in there}

    return explained


@dataclass(frozen=True)
class Found:
    """Result of a search.

    Attributes:
        run: The final ranking.
        lists: Name of each fused ranking -> its run; empty without fusion.
        candidates: The ranking before re-ranking; None without re-ranking.
    """

    run: Run
    lists: Mapping[str, Run]
    candidates: Run | None


def queries_of(text: str | None, queries: Path | None) -> list[Query]:
    """Return the query that was given as a text, or read a file of queries."""
    return [Query(_QUERY, text)] if text is not None else list(read_queries(queries or Path()))


def make_fusion(fuse: Sequence[str], method: str | None, weights: str | None, normalize: str | None) -> Fusion | None:
    """Make the fusion that the options describe; None for a single ranking.

    Raises:
        InputError: The weights are malformed, or their number is wrong.
    """
    if not fuse:
        return None
    fusion = Fusion(method or "rrf", _weights(weights), normalise=normalize or "min-max")
    fusion.weights_of(len(fuse) + 1)
    return fusion


def _weights(text: str | None) -> tuple[float, ...] | None:
    if text is None:
        return None
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError as error:
        raise InputError(f"--weights {text!r}: expected numbers separated by commas, such as 1,0.5") from error


def open_sources(opened: Opened, given: Sequence[str], fusion: Fusion | None, choices: Choices) -> list[Source]:
    """Open the rankings whose weight is not 0, the index first.

    Raises:
        InputError: An index cannot be opened, or shares no document with the first one.
    """
    weights = (1.0,) if fusion is None else fusion.weights_of(len(given))
    sources: list[Source] = []
    indexes: list[Index] = []
    for number, (path, name, weight) in enumerate(zip(given, short_names(given), weights, strict=True)):
        if not weight:
            continue
        words = number > 0 and path == NAME
        index = opened.index(Path(given[0] if words else path))
        if indexes:
            check_fusible(indexes[0], index)
        indexes.append(index)
        sources.append(opened.words(choices) if words else opened.source(path, choices, name=name))
    return sources


def rank(
    queries: Sequence[Query], k: int, sources: Sequence[Source], fusion: Fusion | None, stage: SecondStage | None, candidates: int
) -> Found:
    """Search all rankings, fuse them and re-rank the candidates."""
    wanted = k if stage is None else max(k, candidates)
    lists: Mapping[str, Run] = {}
    if fusion is None:
        first = sources[0].system(queries, wanted)
    else:
        weights = None if fusion.weights is None else tuple(weight for weight in fusion.weights if weight)
        fused = search_fused([each.system for each in sources], queries, wanted, fusion=replace(fusion, weights=weights), depth=candidates)
        first, lists = fused.run, {each.name: run for each, run in zip(sources, fused.lists, strict=True)}
    return Found(first, lists, None) if stage is None else Found(rerank_run(first, queries, stage.scorer, k), lists, first)


def rank_groups(search_to: Callable[[int], Found], k: int, index: Index, field: str) -> tuple[Found, dict[str, list[Group]]]:
    """Search for the k best groups of passages.

    Args:
        search_to: Function from a number of passages to the result of their search.
        k: Groups per query.
        index: Index whose documents have the field.
        field: The field that groups passages.

    Returns:
        The result, with the best passage of each group alone in its run, and the groups of each query.

    Raises:
        InputError: No document has the field.
    """
    last: list[Found] = []

    def search_run(depth: int) -> Run:
        last[:] = [search_to(depth)]
        return last[0].run

    groups = search_groups(search_run, k, field_of(index, field))
    return replace(last[0], run={query: {each.best: each.score for each in those} for query, those in groups.items()}), groups


def check_run(run: Path, queries: Sequence[Query], indexes: Sequence[Index]) -> None:
    """Check before the search that the run can be written.

    Raises:
        InputError: The file cannot be written, or an id contains white space, which a run cannot hold.
    """
    check_target(run)
    for kind, ids in (("query", [query.id for query in queries]), *(("document", index.ids) for index in indexes)):
        for key in ids:
            if key.split() != [key]:
                raise InputError(f"{run}: the {kind} id {key!r} contains white space, which a TREC run cannot hold")


def explain_found(text: str, found: Found, sources: Sequence[Source], stage: SecondStage | None) -> dict[str, dict[str, Explained]]:
    """Explain the score of each document in each ranking; after re-ranking, in the re-ranking only.

    Returns:
        Document -> ranking -> explanation.
    """
    documents = list(found.run[_QUERY])
    explained: dict[str, dict[str, Explained]] = {document: {} for document in documents}
    for source in sources if stage is None else [stage]:
        for document, why in source.explain(text, documents).items():
            explained[document][source.name] = why
    return explained


def describe_hits(opened: Opened, found: Found, explained: Mapping[str, Mapping[str, Explained]]) -> list[dict[str, Any]]:
    """Describe the hits of a single query for JSON and tables."""
    lists = {name: _places(run.get(_QUERY, {})) for name, run in found.lists.items()}
    candidates = None if found.candidates is None else _places(found.candidates[_QUERY])
    hits = []
    for rank, (document, score) in enumerate(found.run[_QUERY].items(), start=1):
        hit: dict[str, Any] = {"rank": rank, "id": document, "score": score, "effort": opened.efforts}
        if candidates is not None:
            hit["candidate"] = candidates[document]
        if lists:
            hit["lists"] = {name: places.get(document) for name, places in lists.items()}
        try:
            stored = opened.stored(document)
        except (DamagedIndexError, LostTextError) as error:  # the hit itself is valid
            hit["text_error"] = str(error)
        else:
            if stored is not None:
                # The spans of explanations refer to the text as it was encoded.
                hit["text"] = stored.text if explained else _excerpt(stored.text)
                if stored.metadata:
                    hit["metadata"] = stored.metadata
        if explained:
            hit["explained"] = explanation_json(explained[document])
        if opened.missing is not None:
            hit["partial"] = opened.missing._asdict()
        hits.append(hit)
    return hits


def _places(ranking: Mapping[str, float]) -> dict[str, dict[str, float]]:
    return {document: {"rank": rank, "score": ranking[document]} for rank, document in enumerate(ranked(ranking), start=1)}


def _excerpt(text: str) -> str:
    flat = " ".join(text.split())
    return flat if len(flat) <= EXCERPT else flat[: EXCERPT - 1] + "…"


def explanation_json(explained: Mapping[str, Explained]) -> dict[str, object]:
    """Convert the explanations of one document to JSON; spans are character offsets in the query and in the hit's text."""
    content: dict[str, object] = {}
    for source, why in explained.items():
        if isinstance(why, Explanation):
            score = why.score if math.isfinite(why.score) else None  # -inf, the score of a text without vectors, is not valid JSON
            content[source] = {"score": score, "matches": [_match_json(match) for match in why.matches]}
        else:
            content[source] = {"score": sum(word.score for word in why), "words": [word._asdict() for word in why]}
    return content


def _match_json(match: QueryTokenMatch) -> dict[str, object]:
    return {
        "query_token": match.query.name,
        "query_span": match.query.span,
        "document_token": match.document.name,
        "document_span": match.document.span,
        "similarity": match.similarity,
    }
