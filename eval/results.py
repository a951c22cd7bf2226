"""Results of an evaluation: the fields of ``results.json``, their provenance, and the folder that holds them.

All measures are fractions at full precision; reports convert them to points and round.

``results.json`` holds ``schema``, ``ndcg@10`` (the headline; null if an average lacks a member) and the fields of `Results`. Beside it are
TREC runs under ``runs/``, the scores of every query under ``per_query/`` and the queries under ``queries/``. ``results.json`` is written
last and names the other files with their checksums: if it exists, the folder is complete.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import platform
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, fields, replace
from datetime import datetime, timezone
from itertools import combinations
from pathlib import Path, PurePath
from typing import Annotated, Any, Literal, TypeAlias

import torch
from pydantic import AfterValidator
from pydantic.dataclasses import dataclass

from quiver.encoder.environment import installed_version
from quiver.encoder.errors import InputError
from quiver.encoder.files import file_sha256, read_json, sync_folder, write_json
from quiver.encoder.schema import RECORD, Field, parse_record
from quiver.encoder.work_folder import SETTINGS, WorkFolder, open_work, writable
from quiver.eval.metrics import DEFAULT, Interval, Part, average, data_sets
from quiver.retrieval.display import html_table, text_table
from quiver.retrieval.records import Document, Dtype, ModelCard, Query, short_names

logger = logging.getLogger(__name__)

PACKAGES: Mapping[str, tuple[str, ...]] = {
    "quiver": ("quiver-retrieval",),
    "torch": ("torch",),
    "numpy": ("numpy",),
    "faiss": ("faiss-cpu", "faiss-gpu", "faiss-gpu-cu12"),
    "tokenizers": ("tokenizers",),
    "safetensors": ("safetensors",),
}
"""Packages whose versions are recorded, see `provenance`."""

_MODULUS = 1 << 256


@dataclass(frozen=True, config=RECORD)
class Provenance:
    """How, when and on which machine a result was computed.

    Attributes:
        command: Command line that reproduces the result; None if the library was called from Python.
        date: End of the evaluation: UTC, ISO 8601, to the second.
        versions: Package -> version, Python included; packages that are not installed are left out.
        platform: Operating system, processor and, if torch sees one, accelerator.
        threads: Number of CPU threads that torch uses.
    """

    command: str | None
    date: str
    versions: Mapping[str, str]
    platform: str
    threads: int


def provenance(command: str | None, *, packages: Mapping[str, Sequence[str]] = PACKAGES) -> Provenance:
    """Provenance of a result that this process has computed."""
    accelerators = {torch.cuda.get_device_name(device) for device in range(torch.cuda.device_count())}
    return Provenance(
        command=command,
        date=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        versions={"python": platform.python_version(), **_versions(packages)},
        platform=", ".join([platform.platform(), f"{os.cpu_count()} CPUs", *sorted(accelerators)]),
        threads=torch.get_num_threads(),
    )


class DataChecksum:
    """Checksum of a collection's content, computed while the documents are read for another purpose.

    The order of documents, queries and judgements does not matter: the same collection may have its rows in different orders in an
    archive and on the Hugging Face Hub. Every row is hashed, the hashes of each kind are added modulo 2^256, and the three sums are
    hashed with their counts; no row is kept. This detects accidental differences. It does not protect against rows forged to give a
    certain sum, which would need a much longer modulus.

    Source: Bellare and Micciancio 1997, doi 10.1007/3-540-69053-0_13 (AdHASH).

    Example:
        >>> one, other = DataChecksum(), DataChecksum()
        >>> for a, b in ((Document("x", "wings"), Document("y", "fins")), (Document("y", "fins"), Document("x", "wings"))):
        ...     one.add_document(a)
        ...     other.add_document(b)
        >>> one.hexdigest([], {}) == other.hexdigest([], {}) != DataChecksum().hexdigest([], {})
        True
    """

    def __init__(self) -> None:
        """Start with no documents."""
        self._sum = 0
        self._count = 0

    def add_document(self, document: Document) -> None:
        """Add a document; add each document once."""
        self._sum += _row_hash((document.id, document.text, document.title))
        self._count += 1

    def hexdigest(self, queries: Iterable[Query], qrels: Mapping[str, Mapping[str, int]]) -> str:
        """SHA-256 of the documents added so far, the queries and the judgements, in hexadecimal."""
        query_hashes = [_row_hash(query) for query in queries]
        judgement_hashes = [_row_hash((query, document, grade)) for query, grades in qrels.items() for document, grade in grades.items()]
        kinds = ((self._count, self._sum), (len(query_hashes), sum(query_hashes)), (len(judgement_hashes), sum(judgement_hashes)))
        return hashlib.sha256(json.dumps([[count, f"{total % _MODULUS:064x}"] for count, total in kinds]).encode()).hexdigest()


def _row_hash(row: Sequence[str | int]) -> int:
    return int.from_bytes(hashlib.sha256(json.dumps(row).encode()).digest(), "big")


def _versions(packages: Mapping[str, Sequence[str]]) -> dict[str, str]:
    found = {name: next(filter(None, map(installed_version, distributions)), None) for name, distributions in packages.items()}
    return {name: version for name, version in found.items() if version is not None}


HEADLINE = "ndcg@10"
"""The headline measure of a result."""

Parameter: TypeAlias = str | int | float | bool | None
"""A setting of an index or of a baseline."""

Library: TypeAlias = Literal["quiver", "sentence-transformers", "pylate", "bm25s", "other"]
"""Library that ran the system; ``other`` for a TREC run, whose origin is not known."""

_ROUNDING = 1e-9  # a mean of ones may exceed 1 by a rounding error


def _within_0_and_1(value: float) -> float:
    if not -_ROUNDING <= value <= 1 + _ROUNDING:
        raise ValueError(f"must be within 0 and 1, got {value}")
    return value


def _has_headline(measures: Mapping[str, float]) -> Mapping[str, float]:
    if HEADLINE not in measures:
        raise ValueError(f"{HEADLINE} is missing, which every result has")
    return measures


Fraction: TypeAlias = Annotated[float, AfterValidator(_within_0_and_1)]
Count: TypeAlias = Annotated[int, Field(ge=0)]
Duration: TypeAlias = Annotated[float, Field(ge=0)]
Measures: TypeAlias = Annotated[Mapping[str, Fraction], AfterValidator(_has_headline)]
"""Measure -> mean over the judged queries."""


@dataclass(frozen=True, config=RECORD)
class System:
    """The evaluated system: the fields of a model card; None or empty if they do not apply.

    Attributes:
        source: Folder or hub id that the model was loaded from, ``bm25``, the file of a run, or the names of what was fused or re-ranked.
        kind: ``dense``, ``colbert``, ``bm25``, ``run``, ``fusion``, ``re-ranking`` or ``retriever``.
        library: Library that ran the system.
        fingerprint: SHA-256 of weights, tokenizer and settings.
        dim: Vector width.
        similarity: ``cosine``, ``dot`` or ``maxsim``.
        query_length: Maximum tokens per query, special tokens included.
        document_length: Maximum tokens per document, special tokens included.
        query_prompt: Text put before every query.
        document_prompt: Text put before every document.
        dtype: Dtype of the model's weights.
        name: Name in reports; empty for one made from ``source``, see `short_sources`.
        group_by: Field whose values are ranked, each by its best passage; empty if documents are ranked.
    """

    source: str
    kind: Literal["dense", "colbert", "bm25", "run", "fusion", "re-ranking", "retriever"]
    library: Library = "quiver"
    fingerprint: str | None = None
    dim: int | None = None
    similarity: str | None = None
    query_length: int | None = None
    document_length: int | None = None
    query_prompt: str = ""
    document_prompt: str = ""
    dtype: Dtype | None = None
    name: str = ""
    group_by: str = ""

    @property
    def label(self) -> str:
        """Name in tables and files, other than that of the baseline."""
        return self.name or short_sources([self], ["bm25"])[0] + (f", grouped by {self.group_by}" if self.group_by else "")

    @classmethod
    def of(cls, card: ModelCard) -> System:
        """The system described by a model card."""
        return cls(**asdict(card))


def short_sources(systems: Sequence[System], names: Sequence[str] = ()) -> list[str]:
    """Sources of systems as they are named in tables: of a path or hub id, the last parts that tell it from other sources and ``names``.

    Example:
        >>> short_sources([System("/home/me/models/mine", "dense"), System("bm25 + mine", "fusion")])
        ['mine', 'bm25 + mine']
    """
    paths = [each.source for each in systems if each.kind in ("dense", "colbert", "run") and PurePath(each.source).name]
    others = [each.source for each in systems if each.source not in paths]
    short = dict(zip(paths, short_names([*paths, *others, *names]), strict=False))
    return [short.get(each.source, each.source) for each in systems]


@dataclass(frozen=True, config=RECORD)
class FileReference:
    """A file beside ``results.json``."""

    file: str
    sha256: str


@dataclass(frozen=True, config=RECORD)
class Truncated:
    """Number of texts that lost tokens because they exceed the model's maximum length."""

    documents: Count | None
    queries: Count | None


@dataclass(frozen=True, config=RECORD)
class IndexUsed:
    """The index that produced a run.

    Attributes:
        kind: ``exact``, ``bm25``, ``run``, ``fusion``, ``re-ranking``, ``retriever``, or the name of an approximate engine.
        parameters: Settings of the index; for an approximate engine also the search parameters and ``k``, the number of requested
            documents, on which its recall depends.
        recall: Share of exact search's top documents that the index returns, mean over the judged queries: ``overlap@10`` and
            ``overlap@100``, without depths above the number of documents kept. None for BM25, 1 by definition for an exact index.
        bytes: Size of the searched data in bytes; None for BM25.
        query_milliseconds: Wall-clock search time per query in milliseconds, without encoding; all queries are searched in one call.
    """

    kind: str
    parameters: Mapping[str, Parameter]
    recall: Mapping[str, Fraction] | None = None
    bytes: Count | None = None
    query_milliseconds: Duration | None = None


def describe_settings(settings: Mapping[str, object]) -> str:
    """Settings in one line.

    Example:
        >>> describe_settings({"k1": 0.9, "stemmer": None, "k_factor": 15.0, "exhaustive": True})
        'k1 0.9, no stemmer, k_factor 15, exhaustive'
    """
    return ", ".join(
        f"no {name}" if value is None or value is False else name if value is True else f"{name} {value:g}" if isinstance(value, float)
        else f"{name} {value}"
        for name, value in settings.items()
    )  # fmt: skip


def index_name(index: IndexUsed) -> str:
    """An index with its settings in one line."""
    settings = describe_settings(index.parameters)
    return f"{index.kind} ({settings})" if settings else index.kind


@dataclass(frozen=True, config=RECORD)
class TokenMatch:
    """Best match of one query token in a document: one term of the MaxSim sum."""

    query_token: str
    document_token: str
    similarity: float


@dataclass(frozen=True, config=RECORD)
class ShownDocument:
    """A document as shown in a report.

    Attributes:
        id: Document id.
        text: First characters of the text, at most `SNIPPET`.
        grade: Relevance grade; None if the document was not judged.
        rank: Rank in the run, from 1; None if the document is not among those kept.
        score: Score in the run; None if ``rank`` is None.
        matches: For a ColBERT, the query's tokens in order with the best match of each; empty otherwise.
    """

    id: str
    text: str
    grade: int | None
    rank: int | None
    score: float | None
    matches: tuple[TokenMatch, ...] = ()


SNIPPET = 400
"""Maximum number of characters of a document in a report."""


@dataclass(frozen=True, config=RECORD)
class WorstQuery:
    """One of the queries with the lowest nDCG@10.

    Attributes:
        query: Query id.
        text: Text of the query.
        score: nDCG@10 of the query.
        found: Top retrieved documents, at most three, best first; empty if nothing was found.
        wanted: Relevant documents, at most three, highest grade first.
        relevant: Number of relevant documents.
    """

    query: str
    text: str
    score: float
    found: tuple[ShownDocument, ...]
    wanted: tuple[ShownDocument, ...]
    relevant: int


@dataclass(frozen=True, config=RECORD)
class Baseline:
    """Scores of a baseline on the same collection, with the same policy and k.

    Attributes:
        name: ``bm25``.
        parameters: Settings of the baseline.
        measures: Measure -> mean over the judged queries.
        interval: Bootstrap interval of nDCG@10.
        run: TREC run; None if no folder was written.
        per_query: Scores per query, in the system's format; None if no folder was written.
    """

    name: str
    parameters: Mapping[str, Parameter]
    measures: Measures
    interval: Interval
    run: FileReference | None
    per_query: FileReference | None


_DEPTHS: Mapping[str, str] = {"run": "depth", "fusion": "candidates", "re-ranking": "candidates"}
"""Kind of an index -> its parameter that says how many documents per query its run holds."""


@dataclass(frozen=True, config=RECORD)
class CollectionResult:
    """Scores of a system on one split of a collection, with the conditions of the evaluation.

    Attributes:
        name: Name of the collection, such as ``scifact`` or ``cqadupstack-android``.
        split: Split of the judgements; empty for a file of queries with a file of judgements.
        group: Data set that the collection is a part of, such as ``cqadupstack``; None if it is a data set of its own.
        group_size: Number of collections in the group; 1 without a group. The group counts once, by their unweighted mean.
        in_domain: Whether the model was trained on this collection's training data, according to the caller; False means out of domain.
        licence: Licence of the data as stated by its publisher; None if unknown.
        revision: Revision of the data: a commit, a version or a checksum of the archive; None for a local folder.
        documents: Number of documents searched, which is all documents of the collection; without a corpus, those of the index, or those
            that the run and the judgements name (see ``named_by``); the values of a field that is grouped by.
        queries: Number of judged queries; every mean is over these.
        judgements: Number of judgements in the split, of any grade.
        use_title: Whether titles were part of the documents' text.
        exclude_self: Whether a document with the query's own id was dropped before the run was cut.
        k: Maximum number of documents kept per query.
        measures: Measure -> mean over the judged queries.
        interval: Bootstrap interval of nDCG@10.
        judged: Share of the first ten documents that have a judgement, mean over the judged queries. If it is low, the score says little,
            since unjudged documents count as irrelevant.
        unanswered: Number of judged queries without any retrieved document; each scores 0.
        truncated: Number of texts that exceed the model's maximum length.
        empty_texts: Number of documents without text.
        index: The index that was searched.
        cached: Number of documents whose vectors came from an earlier evaluation.
        seconds: Wall-clock time per step, in seconds. For a model: ``encode_documents``, ``index``, ``encode_queries`` and ``search``;
            for BM25: ``search``, indexing included. Also one entry per baseline, ``check`` (reading and checking the data beforehand)
            and ``other`` (reading again, scoring, writing).
        run: TREC run; None if no folder was written.
        per_query: Scores per query, ``{query: {measure: value}}``; None if no folder was written.
        query_texts: Texts of the judged queries, ``{query: text}``; None if no folder was written.
        data_sha256: Checksum of documents, queries and judgements, or of queries and judgements if the system names the documents; equal
            checksums mean equal data.
        worst: Queries with the lowest nDCG@10, at most ten, lowest first; ties are ordered by id.
        baselines: Scores of the baselines.
        missing: Number of judged documents that are not among the documents searched. They count as not found: recall and the ideal
            ranking of nDCG include them.
    """

    name: str
    split: str
    group: str | None
    group_size: Annotated[int, Field(ge=1)]
    in_domain: bool
    licence: str | None
    revision: str | None
    documents: Count
    queries: Count
    judgements: Count
    use_title: bool
    exclude_self: bool
    k: Count
    measures: Measures
    interval: Interval
    judged: Fraction
    unanswered: Count
    truncated: Truncated
    empty_texts: Count
    index: IndexUsed
    cached: Count
    seconds: Mapping[str, Duration]
    run: FileReference | None
    per_query: FileReference | None
    query_texts: FileReference | None
    data_sha256: str
    worst: tuple[WorstQuery, ...]
    baselines: tuple[Baseline, ...]
    missing: Count = 0

    @property
    def kept(self) -> int:
        """Documents per query that the system's run holds at most: ``k``, or fewer of a fusion, a re-ranking or a given run."""
        held = self.index.parameters.get(_DEPTHS.get(self.index.kind, ""))
        return min(self.k, held) if isinstance(held, int) else self.k

    @property
    def named_by(self) -> str:
        """Words behind the number of documents, of a run without a corpus; empty where these are all documents."""
        return f" {self.index.parameters['documents']}" if self.index.kind == "run" and "documents" in self.index.parameters else ""

    @property
    def caution(self) -> str:
        """What the scores of a given run that is not deep enough for them do not say; empty for other systems."""
        if self.index.kind != "run" or self.kept >= min(self.k, self.documents):
            return ""
        return (
            f"the run holds at most {self.kept:,} documents per query; MAP and measures with a deeper cut count the relevant documents"
            " beyond as not found"
        )

    @property
    def key(self) -> str:
        """Collection and split, as in files and tables, see `quiver.eval.metrics.Part`."""
        return self.part().key

    def part(self, value: float | None = None) -> Part:
        """The collection as input to ``quiver.eval.metrics``."""
        return Part(self.name, self.split, self.group, self.group_size, value)


@dataclass(frozen=True, config=RECORD)
class FailedCollection:
    """A collection that could not be evaluated, beside others that were. Averages that it belongs to are blank."""

    name: str
    split: str
    group: str | None
    group_size: Annotated[int, Field(ge=1)]
    reason: str

    @property
    def key(self) -> str:
        """Collection and split, as in files and tables, see `quiver.eval.metrics.Part`."""
        return self.part().key

    def part(self) -> Part:
        """The collection as input to ``quiver.eval.metrics``, without a score."""
        return Part(self.name, self.split, self.group, self.group_size)


class ScoreTable:
    """Scores in points (hundredths), shown as a table in a terminal and in a notebook.

    Example:
        >>> from quiver.eval.results import ScoreTable
        >>> ScoreTable(("collection", "bm25"), [("scifact.test", "66.5")])
        collection    bm25
        scifact.test  66.5
    """

    def __init__(self, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        self.header = tuple(header)
        self.rows = tuple(map(tuple, rows))

    def __repr__(self) -> str:
        return text_table(self.header, self.rows)

    def _repr_html_(self) -> str:
        return html_table(self.header, self.rows)


def _points(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.1f}"


@dataclass(frozen=True, config=RECORD, repr=False)
class Results:
    """Results of one system on one or more collections. They show themselves as a table: a row per collection and system.

    Attributes:
        system: The evaluated system.
        collections: Results per collection, in the order the collections were given in.
        provenance: How, when and on which machine the results were computed.
        failed: Collections that could not be evaluated. The same call again evaluates them, and keeps what is finished.

    Example:
        >>> from quiver import build_index, evaluate
        >>> index = build_index([{"id": "owl", "text": "Owls have wings."}], "bm25", "animals", overwrite=True)
        >>> results = evaluate(index, queries={"q": "what has wings"}, qrels={"q": {"owl": 1}}, baselines=())
        >>> results.collections[0].queries, results.system.kind
        (1, 'bm25')
    """

    system: System
    collections: tuple[CollectionResult, ...]
    provenance: Provenance
    failed: tuple[FailedCollection, ...] = ()

    @property
    def headline(self) -> float | None:
        """Mean nDCG@10 over the data sets, where a group counts once; None if there are none, one has failed, or a group lacks a part.

        Example:
            >>> from quiver import build_index, evaluate
            >>> index = build_index([{"id": "owl", "text": "Owls have wings."}], "bm25", "animals", overwrite=True)
            >>> results = evaluate(index, queries={"q": "what has wings"}, qrels={"q": {"owl": 1}}, baselines=())
            >>> results.headline
            1.0
        """
        scores = data_sets(self.parts(HEADLINE))
        return average(scores, list(scores)).value

    def __repr__(self) -> str:
        failed = f"\nnot evaluated: {', '.join(each.key for each in self.failed)}" if self.failed else ""
        return f"{self.system.label} ({self.system.kind}), in points\n{self.table()!r}{failed}"

    def _repr_html_(self) -> str:
        """Table for notebooks."""
        return self.table()._repr_html_()

    def table(self) -> ScoreTable:
        """Scores of the system and of the baselines: a row per collection and system, a column per measure that one of them has.

        Example:
            >>> from quiver import build_index, evaluate
            >>> index = build_index([{"id": "owl", "text": "Owls have wings."}], "bm25", "animals", overwrite=True)
            >>> results = evaluate(index, queries={"q": "what has wings"}, qrels={"q": {"owl": 1}}, baselines=())
            >>> results.table().header[:3]
            ('collection', 'system', 'ndcg@10')
        """
        rows: list[tuple[str, str, Mapping[str, float]]] = []
        for each in self.collections:
            rows += [(each.key, self.system.label, each.measures), *((each.key, base.name, base.measures) for base in each.baselines)]
        names = [name for name in DEFAULT if any(name in measures for _, _, measures in rows)]
        return ScoreTable(
            ("collection", "system", *names),
            [(key, system, *(_points(measures.get(name)) for name in names)) for key, system, measures in rows],
        )

    def compare(self, *others: Results, measure: str = HEADLINE) -> ScoreTable:
        """Scores of several systems side by side, and each one's difference from this one on the collections that both have.

        Whether a difference is significant says ``quiver report compare``, which reads the scores per query.

        Args:
            others: Results of other systems.
            measure: Name of a measure, such as ``recall@100`` or, as tables call it, ``R@100``.

        Raises:
            InputError: No other results are given, two results for a collection have other data, or none has the measure.

        Example:
            >>> from quiver import build_index, evaluate
            >>> index = build_index([{"id": "owl", "text": "Owls have wings."}], "bm25", "animals", overwrite=True)
            >>> results = evaluate(index, queries={"q": "what has wings"}, qrels={"q": {"owl": 1}}, baselines=())
            >>> results.compare(results).rows[0][1:]
            ('100.0', '100.0', '+0.0')
        """
        if not others:
            raise InputError("nothing to compare: pass the results of at least one other system")
        measure, compared = _parse_label(measure), with_common_names([self, *others])
        keys = list(dict.fromkeys(each.key for results in compared for each in results.collections))
        scored = [{each.key: each for each in results.collections} for results in compared]
        if not any(scored[0].keys() & by_key.keys() for by_key in scored[1:]):
            named = "; ".join(f"{results.system.label}: {', '.join(by_key)}" for results, by_key in zip(compared, scored, strict=True))
            raise InputError(f"nothing to compare: the results have no collection in common ({named})")
        rows = []
        for key in keys:
            if len({by_key[key].data_sha256 for by_key in scored if key in by_key}) > 1:
                raise InputError(f"{key}: the results were computed on different data; evaluate both again on the same")
            values = [by_key[key].measures.get(measure) if key in by_key else None for by_key in scored]
            cells = [_points(values[0])]
            for value in values[1:]:
                cells += [_points(value), "" if value is None or values[0] is None else f"{100 * (value - values[0]):+.1f}"]
            rows.append((key, *cells))
        if not any(any(cells) for _, *cells in rows):
            raise InputError(f"none of the results has the measure {measure!r}; there are {', '.join(DEFAULT)}")
        first, *labels = (label for label, _ in label_systems([self, *others]))
        header = [first, *(column for label in labels for column in (label, "difference"))]
        return ScoreTable(("collection", *header), rows)

    def plot(self, measure: str = HEADLINE) -> Any:
        """Draw a bar per collection and system as a matplotlib figure, with the confidence intervals of nDCG@10.

        Args:
            measure: Name of a measure, such as ``recall@100`` or, as tables call it, ``R@100``.

        Raises:
            InputError: matplotlib is not installed, or no collection has the measure.

        Example:
            >>> from quiver import build_index, evaluate
            >>> index = build_index([{"id": "owl", "text": "Owls have wings."}], "bm25", "animals", overwrite=True)
            >>> results = evaluate(index, queries={"q": "what has wings"}, qrels={"q": {"owl": 1}}, baselines=())
            >>> results.plot().savefig("scores.png")
        """
        from quiver.eval.report.charts import Bar, Key, axis_top, bar_chart, check_matplotlib

        check_matplotlib()
        measure, bars = _parse_label(measure), []
        for each in self.collections:
            systems = [
                (self.system.label, each.measures, each.interval),
                *((base.name, base.measures, base.interval) for base in each.baselines),
            ]
            for colour, (name, measures, interval) in enumerate(systems, start=1):
                if measure in measures:
                    ends = (interval.low, interval.high) if measure == HEADLINE else (None, None)
                    bars.append(Bar(Key("", colour, f"{name} on {each.key}"), measures[measure], *ends))
        if not bars:
            raise InputError(f"no collection has the measure {measure!r}; there are {', '.join(DEFAULT)}")
        return bar_chart(bars, axis_top(max(bar.high or bar.value for bar in bars)))

    def parts(self, measure: str) -> list[Part]:
        """The collections as input to ``quiver.eval.metrics``.

        Example:
            >>> from quiver import build_index, evaluate
            >>> index = build_index([{"id": "owl", "text": "Owls have wings."}], "bm25", "animals", overwrite=True)
            >>> results = evaluate(index, queries={"q": "what has wings"}, qrels={"q": {"owl": 1}}, baselines=())
            >>> [part.value for part in results.parts("recall@100")]
            [1.0]
        """
        return [*(each.part(each.measures.get(measure)) for each in self.collections), *(each.part() for each in self.failed)]


def with_common_names(results: Sequence[Results]) -> list[Results]:
    """Results that call the same queries and judgements by one name, that of the first: data in memory have no name of their own."""
    firsts: dict[str, CollectionResult] = {}
    renamed = []
    for each in results:
        own = {collection.key for collection in each.collections}
        named = []
        for collection in each.collections:
            first = firsts.setdefault(collection.data_sha256, collection)
            same = first.key == collection.key or first.key in own
            named.append(collection if same else replace(collection, name=first.name, split=first.split))
        renamed.append(replace(each, collections=tuple(named)))
    return renamed


FINGERPRINT_WIDTH = 12
"""Number of fingerprint digits in a label."""


Named: TypeAlias = Sequence[tuple[str, Results]]
"""(label of the system, results)."""


def label_systems(results: Sequence[Results]) -> list[tuple[str, Results]]:
    """Give every result the shortest label that distinguishes its system from the others.

    A label is the given name or that of `quiver.eval.results.short_sources`. Fields that differ between systems of one source are added,
    and its kind if a system has the name of a baseline. Results of one system share a label, unless they searched one collection with two
    indexes: then the index is added. Systems that differ only in their grouping, or have one given name and kind, are one system if they
    share no collection. Baselines of the results have names of their own, see `_with_own_baselines`.
    """
    given, results = results, _as_one_system(results)
    systems = list(dict.fromkeys(result.system for result in results))
    baselines = {each.name for result in results for collection in result.collections for each in collection.baselines}
    stated = [system.name for system in systems]
    unique = {system for system in systems if system.name and stated.count(system.name) == 1}
    others = [system for system in systems if system not in unique]
    short = dict(zip(others, short_sources(others, [system.name for system in unique]), strict=True))
    names: dict[System, str] = {}
    for system in systems:
        same_source = [] if system in unique else [other for other in systems if other.source == system.source]
        name = short.get(system, system.name)
        mistaken = name in baselines and system.kind != name
        details = ", ".join([*_differing_fields(system, same_source), *[system.kind] * mistaken])
        names[system] = f"{name} ({details})" if details else name
    labels = [names[result.system] + _index_suffix(result, results) for result in results]
    return _with_own_baselines(list(zip(labels, given, strict=True)))


def _as_one_system(results: Sequence[Results]) -> list[Results]:
    """Results in which systems that share no collection are one: those of one given name and kind, or that differ in their grouping alone.

    Whether files or documents are ranked depends on the judgements of a collection, and a fusion of two indexes on the collection, too.
    """
    alike: dict[object, list[Results]] = {}
    for result in results:
        system = result.system
        alike.setdefault((system.name, system.kind) if system.name else replace(system, group_by=""), []).append(result)
    firsts: dict[System, System] = {}
    for those in alike.values():
        by_system: dict[System, set[str]] = {}
        for result in those:
            by_system.setdefault(result.system, set()).update(each.key for each in result.collections)
        if all(first.isdisjoint(second) for first, second in combinations(by_system.values(), 2)):
            firsts |= dict.fromkeys(by_system, those[0].system)
    return [replace(each, system=firsts.get(each.system, each.system)) for each in results]


def _with_own_baselines(named: Named) -> list[tuple[str, Results]]:
    """Results in which a baseline that scores otherwise than the row of its name is called after the system that it stands beside.

    Such as BM25 over the passages of one index and over whole documents of another, or over passages in the tokens of two models.
    """
    shown: dict[tuple[str, str], Mapping[str, float]] = {
        (label, collection.key): collection.measures for label, result in named for collection in result.collections
    }

    def own(label: str, collection: CollectionResult) -> CollectionResult:
        baselines = []
        for each in collection.baselines:
            is_shown = _have_equal_measures(each.measures, shown.setdefault((each.name, collection.key), each.measures))
            baselines.append(each if is_shown else replace(each, name=f"{each.name} of {label}"))
        return replace(collection, baselines=tuple(baselines))

    return [(label, replace(result, collections=tuple(own(label, each) for each in result.collections))) for label, result in named]


def _have_equal_measures(one: Mapping[str, float], other: Mapping[str, float]) -> bool:
    return one.keys() == other.keys() and all(math.isclose(one[name], other[name], abs_tol=1e-9) for name in one)


def _describe_field(field: str, value: object) -> str:
    if field == "group_by":
        return f"grouped by {value}" if value else "not grouped"
    return f"{field.replace('_', ' ')} {value}"


def _differing_fields(system: System, others: Sequence[System]) -> list[str]:
    details = []
    for field in fields(System):
        values = {getattr(other, field.name) for other in others}
        if len(values) > 1 and field.name != "name":
            value = getattr(system, field.name)
            hashed = field.name == "fingerprint" and value is not None
            details.append(value[:FINGERPRINT_WIDTH] if hashed else _describe_field(field.name, value))
    return details


def _index_suffix(result: Results, results: Sequence[Results]) -> str:
    keys = [collection.key for other in results if other.system == result.system for collection in other.collections]
    if len(set(keys)) == len(keys):
        return ""
    return f" [{'; '.join(dict.fromkeys(index_name(collection.index) for collection in result.collections))}]"


def _parse_label(label: str) -> str:
    """The measure that a table calls so, such as ``R@10``."""
    return re.sub(r"^r@", "recall@", label.lower())


SCHEMA = "quiver-results/3"
"""Name and version of the format: the value of ``schema`` in the file."""

FILE = "results.json"
"""File whose presence means that a results folder is complete."""

REPORTS = ("report.md", "report.html")
"""Reports that ``quiver evaluate`` writes beside the results."""

_STAGE = ".unfinished"
"""Work folder inside the folder of results."""


def write_results(results: Results, folder: Path) -> Path:
    """Write ``results.json`` into an existing folder, atomically; the files that it names must exist already."""
    content = {"schema": SCHEMA, HEADLINE: results.headline, **asdict(results)}
    write_json(folder / FILE, content)
    return folder / FILE


def read_results(folder: str | Path) -> Results:
    """Read a results folder and check that it is complete: format, types, headline, and the checksum of every file.

    Raises:
        InputError: There is no ``results.json`` (the evaluation did not finish, or its output is elsewhere), the file is damaged or was
            written by another program, or a file that it names is missing or has changed.

    Example:
        >>> from quiver.eval.results import read_results
        >>> from quiver import build_index, evaluate
        >>> index = build_index([{"id": "owl", "text": "Owls have wings."}], "bm25", "animals", overwrite=True)
        >>> asked = {"queries": {"q": "what has wings"}, "qrels": {"q": {"owl": 1}}, "baselines": ()}
        >>> results = evaluate(index, **asked, out="results/animals", overwrite=True)
        >>> read_results("results/animals").headline
        1.0
    """
    path = Path(folder) / FILE
    if not path.parent.is_dir():
        raise InputError(f"{folder}: no such folder")
    if inside := sorted(each.parent.name for each in path.parent.glob(f"[!.]*/{FILE}")) if not path.is_file() else []:
        raise InputError(f"{folder}: holds results in folders of its own; name them, such as {path.parent / inside[0]}")
    if not path.is_file():
        raise InputError(
            f"{folder}: no {FILE} here: the evaluation did not finish, or wrote elsewhere; to finish it, type: {evaluate_again(folder)}"
        )
    content = read_versioned(path, SCHEMA, command="quiver evaluate")
    headline = content.pop(HEADLINE, None)
    results = parse_record(Results, content, source=str(path))
    keys = [collection.key for collection in results.collections]
    if twice := [key for key in keys if keys.count(key) > 1]:
        raise InputError(f"{path}: the collection {twice[0]} occurs twice; the file was changed by hand")
    if headline != results.headline:
        raise InputError(f"{path}: {HEADLINE} is {headline} but the collections say {results.headline}; the file was changed by hand")
    for collection in results.collections:
        for reference in _list_references(collection):
            _check_file(Path(folder), reference)
    return results


_REPORTED_BY = {"quiver-glue": "quiver report write --layout paper", "quiver-qa": "quiver report qa"}  # results of other commands


def read_versioned(path: Path, schema: str, *, command: str) -> dict[str, Any]:
    """Read a JSON file whose field ``schema`` names its format and version; the field is removed."""
    content = read_json(path)
    found = content.pop("schema", None)
    program = str(found).partition("/")[0]
    if program in _REPORTED_BY and program != schema.partition("/")[0]:
        raise InputError(f"{path}: of quiver {program.removeprefix('quiver-')}, whose report is made by: {_REPORTED_BY[program]}")
    if found != schema:
        raise InputError(f"{path}: the schema is {found!r}, this version reads {schema!r}; run {command} again")
    return content


class Stage:
    """Results in progress: the private folder for their files, and the finished collections.

    Attributes:
        folder: Folder for runs and scores per query, with the file names used in ``results.json``.
        unfinished: Whether some collections failed: the stage is kept, so that the next evaluation scores only these.
    """

    def __init__(self, work: WorkFolder) -> None:
        self.folder = work.path
        self.unfinished = False
        self._work = work

    def save(self, result: CollectionResult) -> None:
        """Record a collection as finished, so that a resumed evaluation does not score it again."""
        self._work.save(result.key, json.dumps(asdict(result), allow_nan=False).encode())

    def finished(self, key: str, conditions: Mapping[str, object]) -> CollectionResult | None:
        """The result of a collection that an interrupted evaluation with the same plan has finished."""
        content = self._work.find(key)
        if content is None:
            return None
        try:
            result = parse_record(CollectionResult, json.loads(content), source=f"{self.folder}: {key}")
            for reference in _list_references(result):
                _check_file(self.folder, reference)
        except InputError as error:
            logger.warning("cannot reuse the finished result of %s (%s); scoring it again", key, error)
            return None
        changed = [name for name, value in conditions.items() if getattr(result, name) != value]
        if changed:
            logger.warning("the finished result of %s has a different %s; scoring it again", key, ", ".join(changed))
        return None if changed else result


@contextmanager
def results_folder(folder: Path, plan: Mapping[str, object], *, overwrite: bool = False) -> Iterator[Stage]:
    """A private folder to write results into; its files are put into ``folder`` when the block ends without an error.

    An old ``results.json`` is removed first and the new one is put last. A process killed at any point leaves the old results, the new
    ones or none, never a mixture. Other files in the folder are kept. If the block ends with an error or the process is killed, finished
    collections stay in ``.unfinished`` for the next evaluation with an equal plan; so they do if `Stage.unfinished` is set.

    Args:
        folder: Folder for the results.
        plan: All settings that decide the results, except the data, as JSON; an evaluation with another plan starts from the beginning.
        overwrite: Replace existing results, and discard an interrupted evaluation with another plan.

    Yields:
        The stage to write into.

    Raises:
        InputError: ``refuse_existing`` raises, another evaluation is writing there or was interrupted there with another plan, or the
            folder cannot be written.
    """
    refuse_existing(folder, overwrite=overwrite)
    begun = WorkFolder(folder / _STAGE)
    settings = begun.path / SETTINGS
    resumes = settings.is_file() and json.loads(json.dumps(plan)).items() <= read_json(settings).items()
    if resumes:
        logger.info("%s: resuming an interrupted evaluation", folder)
    discard = not resumes and begun.path.is_dir() and (overwrite or not begun.names())
    with open_work(folder, _STAGE, plan, doing="evaluating there", overwrite=discard) as work:
        stage = Stage(work)
        yield stage
        with writable(folder):
            _publish_results(stage, folder)
            if not stage.unfinished:
                work.remove()


def _lacks_collections(folder: Path) -> bool:
    """Whether a folder holds results of which some collections failed, and the stage to go on with."""
    return (folder / _STAGE / SETTINGS).is_file() and (folder / FILE).is_file() and bool(read_json(folder / FILE).get("failed"))


def refuse_existing(folder: Path, *, overwrite: bool) -> None:
    """Check early that results can be written to ``folder``."""
    if folder.exists() and not folder.is_dir():
        raise InputError(f"{folder}: cannot hold results, it is a file; name a folder")
    if (folder / FILE).exists() and not overwrite and not _lacks_collections(folder):
        stage = WorkFolder(folder / _STAGE)
        if (
            not (folder / f"{_STAGE}.lock").exists() and not stage.names()
        ):  # left where a process was killed after its results were complete
            stage.remove()
        raise InputError(
            f"{folder}: already holds results; choose another folder, or overwrite them with --overwrite (overwrite=True in Python)"
        )


def _publish_results(stage: Stage, folder: Path) -> None:
    old = _named_files(folder)
    (folder / FILE).unlink(missing_ok=True)
    sync_folder(folder)
    # Remove files that only the old results name, and the old reports; they would otherwise stay beside the new results.
    for path in (*old, *(folder / name for name in REPORTS)):
        path.unlink(missing_ok=True)
    files = [path for path in stage.folder.rglob("*") if path.is_file() and path.parent != stage.folder]
    for path in (*sorted(files), stage.folder / FILE):
        if path.name == FILE and not stage.unfinished:  # without their files, finished collections are of no more use
            for part in stage.folder.glob("*.part"):
                part.unlink()
        target = folder / path.relative_to(stage.folder)
        target.parent.mkdir(exist_ok=True)
        if stage.unfinished:  # the next evaluation needs the files of finished collections
            path = Path(shutil.copy2(path, stage.folder / "copy"))
        path.replace(target)
        sync_folder(target.parent)


def _named_files(folder: Path) -> list[Path]:
    """Files named by the results in a folder; empty if there are no valid results."""
    if not (folder / FILE).is_file():
        return []
    try:
        results = read_results(folder)
    except InputError:
        return []
    return [folder / reference.file for collection in results.collections for reference in _list_references(collection)]


def _list_references(collection: CollectionResult) -> Iterator[FileReference]:
    files = [collection.run, collection.per_query, collection.query_texts]
    files += [file for baseline in collection.baselines for file in (baseline.run, baseline.per_query)]
    yield from (reference for reference in files if reference is not None)


def evaluate_again(folder: str | Path, *, overwrite: bool = False) -> str:
    """Command line that writes a results folder, for error messages."""
    return f"quiver evaluate --model MODEL --data COLLECTION --out {folder}{' --overwrite' if overwrite else ''}"


def _check_file(folder: Path, reference: FileReference) -> None:
    path = folder / reference.file
    if not path.is_file():
        raise InputError(
            f"{path}: {FILE} names this file, but it is missing; copy the whole folder, or type: {evaluate_again(folder, overwrite=True)}"
        )
    if file_sha256(path) != reference.sha256:
        raise InputError(
            f"{path}: not the file that was scored, its sha256 differs from {FILE}; type: {evaluate_again(folder, overwrite=True)}"
        )
