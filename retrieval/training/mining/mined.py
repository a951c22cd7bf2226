"""What mining leaves behind: rows for training, suspects for a person to read, and counts of what was dropped and why.

- ``train.jsonl.gz``: query, positive, negatives; document_ids and scores of the positive and the negatives, in this order.
- ``suspects.jsonl.gz``: the best candidates that a margin left out, which may be positives that nobody has labelled.
- ``queries.jsonl.gz``, ``documents.jsonl.gz``: the texts by id, where the rows hold ids alone.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from quiver.encoder.files import atomic_file
from quiver.retrieval.progress import progress_bar
from quiver.retrieval.training.mining.margins import Rules
from quiver.retrieval.training.mining.positives import MiningData
from quiver.retrieval.training.mining.text_table import TextTable

ROWS, SUSPECTS, QUERIES, DOCUMENTS = "train.jsonl.gz", "suspects.jsonl.gz", "queries.jsonl.gz", "documents.jsonl.gz"


@dataclass(frozen=True)
class MinedQuery:
    """What was found for one query; documents and the query itself are numbers.

    Attributes:
        query: Its number.
        positives: Its positives.
        positive_scores: Their scores.
        negatives: Its hard negatives, best first.
        negative_scores: Their scores.
        suspects: The best candidates that a margin left out.
        suspect_scores: Their scores.
        suspect_ranks: Their ranks, from 1, positives and copies not counted.
        positives_found: Positives within the last rank.
        candidates: Documents within the ranks.
        copies: Documents found that are the same as a positive, the query or a better document, or blank.
        dropped: Margin -> candidates that it left out.
    """

    query: int
    positives: list[int]
    positive_scores: list[float]
    negatives: list[int]
    negative_scores: list[float]
    suspects: list[int]
    suspect_scores: list[float]
    suspect_ranks: list[int]
    positives_found: int
    candidates: int
    copies: int
    dropped: dict[str, int]

    @classmethod
    def parse(cls, line: bytes) -> MinedQuery:
        """One from a line of JSON."""
        return cls(**json.loads(line))


def write_mined(
    found: Iterable[MinedQuery], data: MiningData, out: Path, *, rules: Rules, count: int, ids: bool, progress: bool
) -> dict[str, Any]:
    """Write the files; each appears whole.

    Args:
        found: Queries in their order.
        data: Their texts.
        out: An existing folder.
        rules: By which they were chosen.
        count: Number of queries.
        ids: Rows hold ids alone, and the texts are files of their own.
        progress: Show a bar.

    Returns:
        Counts and mean scores, for the record.
    """
    tally, used = _Tally(rules), np.zeros(len(data.documents), bool)
    with ExitStack() as files, progress_bar("writing", count, enabled=progress) as advance:
        rows, suspects = (files.enter_context(atomic_file(out / name)) for name in (ROWS, SUSPECTS))
        for mined in found:
            for row in _rows(mined, data, ids=ids):
                _write(rows, row)
            for row in _suspects(mined, data):
                _write(suspects, row)
            used[mined.positives] = used[mined.negatives] = True
            tally.add(mined)
            advance(1)
    if ids:
        _write_texts(out / QUERIES, "query_id", data.queries, np.arange(count))
        _write_texts(out / DOCUMENTS, "document_id", data.documents, np.flatnonzero(used))
    return tally.result()


def _rows(mined: MinedQuery, data: MiningData, *, ids: bool) -> Iterable[dict[str, Any]]:
    """A row for each positive, all with the same negatives."""
    documents = data.documents
    query = {"query_id": data.queries.ids[mined.query]}
    if not ids:
        query["query"] = data.queries[mined.query]
        negatives = [documents[number] for number in mined.negatives]
    for positive, score in zip(mined.positives, mined.positive_scores, strict=True):
        texts = {} if ids else {"positive": documents[positive], "negatives": negatives}
        named = {"document_ids": [documents.ids[number] for number in (positive, *mined.negatives)]}
        yield {**query, **texts, **named, "scores": [score, *mined.negative_scores]}


def _suspects(mined: MinedQuery, data: MiningData) -> Iterable[dict[str, Any]]:
    """Each with the positive whose score was the measure, the lowest."""
    place = min(range(len(mined.positives)), key=mined.positive_scores.__getitem__)
    positive, documents = mined.positives[place], data.documents
    for number, score, rank in zip(mined.suspects, mined.suspect_scores, mined.suspect_ranks, strict=True):
        yield {
            "query_id": data.queries.ids[mined.query],
            "query": data.queries[mined.query],
            "positive_id": documents.ids[positive],
            "positive": documents[positive],
            "positive_score": mined.positive_scores[place],
            "candidate_id": documents.ids[number],
            "candidate": documents[number],
            "candidate_score": score,
            "rank": rank,
        }


def _write_texts(path: Path, key: str, table: TextTable, numbers: NDArray[np.intp]) -> None:
    with atomic_file(path) as file:
        for number in numbers.tolist():
            _write(file, {key: table.ids[number], "text": table[number]})


def _write(file: BinaryIO, row: dict[str, Any]) -> None:
    file.write(json.dumps(row, ensure_ascii=False, allow_nan=False).encode("utf-8") + b"\n")


class _Tally:
    """Counts and sums over all queries."""

    def __init__(self, rules: Rules) -> None:
        self._wanted = rules.negatives
        self._counts: Counter[str] = Counter()
        self._dropped: Counter[str] = Counter({margin.name: 0 for margin in rules.margins})
        self._scores = {"positive": 0.0, "negative": 0.0}

    def add(self, mined: MinedQuery) -> None:
        """Count one query."""
        rows, negatives = len(mined.positives), len(mined.negatives)
        self._counts.update(
            queries=1,
            rows=rows,
            rows_short=rows * (negatives < self._wanted),
            rows_without_negatives=rows * (negatives == 0),
            positives_within_ranks=mined.positives_found,
            candidates=mined.candidates,
            copies=mined.copies,
            negatives=negatives,
            suspects=len(mined.suspects),
        )
        self._dropped.update(mined.dropped)
        self._scores["positive"] += sum(mined.positive_scores)
        self._scores["negative"] += sum(mined.negative_scores)

    def result(self) -> dict[str, Any]:
        """What the record says."""
        counts = self._counts
        means = {
            "positive": round(self._scores["positive"] / max(counts["rows"], 1), 6),
            "negative": round(self._scores["negative"] / max(counts["negatives"], 1), 6),
        }
        return {**counts, "dropped": dict(self._dropped), "mean_scores": means}
