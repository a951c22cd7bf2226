"""The queries a system did worst on, with what it found and what it should have found."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from quiver.eval.benchmark import Policy
from quiver.eval.metrics import Scores
from quiver.eval.results import HEADLINE, SNIPPET, ShownDocument, TokenMatch, WorstQuery
from quiver.retrieval.data.corpus import Collection
from quiver.retrieval.data.run import ranked
from quiver.retrieval.records import Run

QUERIES = 10
"""Queries that a result keeps."""

SHOWN = 3
"""Documents found, and documents wanted, that it keeps of each."""

Explain = Callable[[str, str], Sequence[TokenMatch]]
"""Text of a query and of a document to what each token of the query met."""


@dataclass(frozen=True)
class _Case:
    """A query with the documents to show, by id."""

    query: str
    found: Sequence[str]
    wanted: Sequence[str]
    relevant: int

    @property
    def explained(self) -> set[str]:
        """The document found first and the best one wanted: where a ColBERT's choice is looked into."""
        return {*self.found[:1], *self.wanted[:1]}


def worst_queries(
    collection: Collection, policy: Policy, run: Run, scores: Scores, *, explain: Explain | None = None
) -> tuple[WorstQuery, ...]:
    """The queries with the lowest nDCG@10, the worst first and equals by id.

    The corpus is read once more for the documents shown: their texts were not kept.

    Args:
        collection: Queries, judgements and documents.
        policy: Whether titles are part of the texts.
        run: What was found.
        scores: By query.
        explain: For a ColBERT.
    """
    headline = {query: values[HEADLINE] for query, values in scores.per_query.items()}
    cases = [_case(query, collection.qrels[query], run) for query in sorted(headline, key=lambda query: (headline[query], query))[:QUERIES]]
    wanted = {document for case in cases for document in (*case.found, *case.wanted)}
    contents = {each.id: each.content(use_title=policy.use_title) for each in collection.documents if each.id in wanted}
    texts = {query.id: query.text for query in collection.queries}

    def show(case: _Case, document: str) -> ShownDocument:
        found = run.get(case.query, {})
        order = ranks[case.query]
        explained = explain is not None and document in case.explained
        return ShownDocument(
            id=document,
            text=_snippet(contents[document]),
            grade=collection.qrels[case.query].get(document),
            rank=order.get(document),
            score=found.get(document),
            matches=tuple(explain(texts[case.query], contents[document])) if explain is not None and explained else (),
        )

    ranks: Mapping[str, Mapping[str, int]] = {
        case.query: {document: rank for rank, document in enumerate(ranked(run.get(case.query, {})), start=1)} for case in cases
    }
    return tuple(
        WorstQuery(
            query=case.query,
            text=texts[case.query],
            score=headline[case.query],
            found=tuple(show(case, document) for document in case.found),
            wanted=tuple(show(case, document) for document in case.wanted),
            relevant=case.relevant,
        )
        for case in cases
    )


def _case(query: str, grades: Mapping[str, int], run: Run) -> _Case:
    relevant = sorted((document for document in grades if grades[document] >= 1), key=lambda document: (-grades[document], document))
    return _Case(query, ranked(run.get(query, {}))[:SHOWN], relevant[:SHOWN], len(relevant))


def _snippet(text: str) -> str:
    flat = " ".join(text.split())
    return flat if len(flat) <= SNIPPET else flat[: SNIPPET - 1] + "…"
