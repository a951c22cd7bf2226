"""Queries and options of a search, and its hits as JSON."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from quiver.encoder.errors import InputError, check_utf8
from quiver.encoder.files import check_target
from quiver.retrieval.data.corpus import UNFIT, check_names_of, fits_run, ranked, read_queries
from quiver.retrieval.index import DamagedIndexError, IndexReader
from quiver.retrieval.records import Hits, Query
from quiver.retrieval.search.explain import Explanation, QueryTokenMatch
from quiver.retrieval.search.retrievers import Explained, OpenIndexes, storing

QUERY = "query"
"""Id of a query that is given as a text."""


def queries_of(text: str | None, queries: Path | None, rename: Mapping[str, str]) -> list[Query]:
    """Return the query that was given as a text, or read a file of queries."""
    if rename and queries is None:
        raise InputError("--rename names fields of --queries; pass --queries FILE too, or remove --rename")
    check_names_of(rename, [queries])
    found = [Query(QUERY, check_utf8(text, "the query"))] if text is not None else list(read_queries(queries or Path(), rename))
    if blank := next((query for query in found if not query.text.strip()), None):
        raise InputError("the query is blank; pass a text to search for" if queries is None else f"{queries}: query '{blank.id}' is blank")
    return found


def check_run(run: Path, queries: Sequence[Query], indexes: Sequence[IndexReader]) -> None:
    """Check before the search that the run can be written.

    Raises:
        InputError: The file cannot be written, or an id cannot stand in a run.
    """
    check_target(run)
    for kind, ids in (("query", [query.id for query in queries]), *(("document", index.ids) for index in indexes)):
        for key in ids:
            if not fits_run(key):
                raise InputError(f"{run}: the {kind} id {key!r} {UNFIT}")


def describe_hits(opened: OpenIndexes, found: Hits, explained: Mapping[str, Mapping[str, Explained]]) -> list[dict[str, Any]]:
    """Describe the hits of a single query for JSON and tables."""
    lists = {name: _places(hits.ranking(0)) for name, hits in found.lists.items()}
    candidates = None if found.candidates is None else _places(found.candidates.ranking(0))
    hits = []
    for rank, (document, score) in enumerate(found.ranking(0).items(), start=1):
        hit: dict[str, Any] = {"rank": rank, "id": document, "score": score, "effort": found.efforts}
        if candidates is not None:
            hit["candidate"] = candidates[document]
        if lists:
            hit["lists"] = {name: places.get(document) for name, places in lists.items()}
        try:
            index = storing(opened.indexes, document)
            stored = None if index is None else index.document(document)
        except DamagedIndexError as error:  # the hit itself is valid
            hit["text_error"] = str(error)
        else:
            if index is not None and stored is not None:
                # The text as it was encoded, to which the spans of explanations refer.
                hit["text"] = stored.content(use_title=index.manifest.policy.use_title)
                if stored.metadata:
                    hit["metadata"] = stored.metadata
        if explained:
            hit["explained"] = explanation_json(explained.get(document, {}))
        if found.missing is not None:
            hit["partial"] = found.missing._asdict()
        hits.append(hit)
    return hits


def _places(ranking: Mapping[str, float]) -> dict[str, dict[str, float]]:
    return {document: {"rank": rank, "score": ranking[document]} for rank, document in enumerate(ranked(ranking), start=1)}


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
