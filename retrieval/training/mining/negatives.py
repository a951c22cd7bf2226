"""Mine hard negatives: documents that a system ranks high for a query and that are not its positives.

Queries are searched in parts, each saved when it is finished: a killed run resumes and writes the same files.

    train.jsonl.gz                          query, positive, negatives; document_ids and scores of the positive and the negatives
    suspects.jsonl.gz                       the best candidates that a margin excluded, which may be unlabelled positives
    queries.jsonl.gz, documents.jsonl.gz    texts by id, if the rows hold only ids
    mining.json                             settings and counts; written last

Shapes: Q queries, P documents, n candidates of one query, best first.
Source: NV-Retriever, arXiv:2407.15831, section 3: TopK-PercPos (95 % of the positive's score), TopK-MarginPos, TopK-Abs.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from quiver.encoder.errors import InputError
from quiver.encoder.files import atomic_file, read_json
from quiver.encoder.progress import Advance, progress_bar, timed_slices
from quiver.retrieval.data.embedding_store import open_embedding_store
from quiver.retrieval.index import IndexReader, index_vectors
from quiver.retrieval.models import bm25
from quiver.retrieval.models.batches import device_of
from quiver.retrieval.records import IN_PROCESS, DenseModel, Executor, TokenModel
from quiver.retrieval.training.mining.job_folder import open_job
from quiver.retrieval.training.mining.searchers import BM25Searcher, Ranked, Searcher, SearcherResult, VectorSearcher
from quiver.retrieval.training.mining.texts import BeirSource, MiningData, PairSource, read_mining_data


class MarginKind(NamedTuple):
    """Meaning of a margin's value."""

    limit: Callable[[float, float], float]
    allowed: Callable[[float], bool]
    bounds: str


MARGINS: dict[str, MarginKind] = {
    # A share of a negative score would be greater than the score, so the distance is used.
    "perc-pos": MarginKind(
        lambda positive, share: positive - (1 - share) * abs(positive),
        lambda share: 0 < share <= 1,
        "a share of the positive's score, above 0 and at most 1 (0.95 for 95 %)",
    ),
    "margin-pos": MarginKind(
        lambda positive, margin: positive - margin, lambda margin: margin >= 0, "a distance from the positive's score, at least 0"
    ),
    "max-score": MarginKind(lambda positive, limit: limit, math.isfinite, "a finite score"),
}
"""Kinds of margins by name."""

NO_MARGIN = "none"


class Margin(NamedTuple):
    """A condition on negatives: a key of `MARGINS` and its value."""

    name: str
    value: float

    def limit(self, positive: float) -> float:
        """Return the highest score that a negative may have, given the positive's score."""
        return MARGINS[self.name].limit(positive, self.value)


PERC_POS = Margin("perc-pos", 0.95)  # the best margin of NV-Retriever: a negative scores at most 95 % of the positive's score


class Ranks(NamedTuple):
    """First and last rank of the candidates, from 1; positives and copies have no rank."""

    first: int
    last: int


TOP_200 = Ranks(1, 200)
"""Default ranks. The first ranks are included, since the margin excludes candidates that score too high."""


@dataclass(frozen=True)
class Rules:
    """Rules for choosing negatives."""

    negatives: int = 7
    ranks: Ranks = TOP_200
    margins: tuple[Margin, ...] = (PERC_POS,)
    choice: Literal["top", "random"] = "top"
    seed: int = 42

    def __post_init__(self) -> None:
        if self.negatives < 1:
            raise InputError(f"negatives must be >= 1, got {self.negatives}")
        if not 1 <= self.ranks.first <= self.ranks.last:
            raise InputError(f"ranks must be FIRST-LAST with 1 <= FIRST <= LAST, got {self.ranks.first}-{self.ranks.last}")
        width = self.ranks.last - self.ranks.first + 1
        if width < self.negatives:
            raise InputError(f"ranks {self.ranks.first}-{self.ranks.last} hold {width} documents, fewer than {self.negatives} negatives")
        for margin in self.margins:
            kind = MARGINS[margin.name]
            if not kind.allowed(margin.value):
                raise InputError(f"the margin {margin.name} must be {kind.bounds}; got {margin.value:g}")


@dataclass(frozen=True)
class Negatives:
    """Negatives of one query."""

    chosen: Ranked
    suspects: Ranked
    ranks: NDArray[np.int64]
    candidates: int
    left_out: int
    dropped: dict[str, int]


def rankable(same: NDArray[np.int64], excluded: NDArray[np.int64]) -> NDArray[np.intp]:
    """Return the positions of the found documents that have a rank: neither excluded nor a copy of an earlier one."""
    first = np.zeros(len(same), bool)
    first[np.unique(same, return_index=True)[1]] = True
    return np.flatnonzero(first & ~np.isin(same, excluded))


def choose_negatives(found: Ranked, ranked: NDArray[np.intp], positive_score: float, rules: Rules, *, query: int) -> Negatives:
    """Choose the negatives of one query."""
    positions = ranked[rules.ranks.first - 1 : rules.ranks.last]
    candidates = found.at(positions)
    kept = np.ones(len(positions), bool)
    dropped: dict[str, int] = {}
    for margin in rules.margins:
        passes = candidates.scores.astype(np.float64) <= margin.limit(positive_score)
        dropped[margin.name] = int((kept & ~passes).sum())
        kept &= passes
    left = np.flatnonzero(kept)
    if rules.choice == "random" and len(left) > rules.negatives:
        generator = np.random.default_rng((rules.seed, query))
        left = np.sort(generator.choice(left, rules.negatives, replace=False))
    out = np.flatnonzero(~kept)
    return Negatives(
        chosen=candidates.at(left[: rules.negatives]),
        suspects=candidates.at(out),
        ranks=out + rules.ranks.first,
        candidates=len(positions),
        left_out=len(found.rows) - len(ranked),
        dropped=dropped,
    )


def parse_ranks(text: str) -> Ranks:
    """Parse ranks of the command line.

    Example:
        >>> parse_ranks("10-200")
        Ranks(first=10, last=200)
    """
    first, dash, last = text.partition("-")
    if not dash or not first.isdecimal() or not last.isdecimal():
        raise InputError(f"ranks must be FIRST-LAST, as in 10-200, got {text!r}")
    return Ranks(int(first), int(last))


def parse_margins(texts: Sequence[str]) -> tuple[Margin, ...]:
    """Parse margins of the command line: ``NAME=VALUE``, or only ``none``.

    Example:
        >>> parse_margins(["perc-pos=0.9", "max-score=0.7"])
        (Margin(name='perc-pos', value=0.9), Margin(name='max-score', value=0.7))
    """
    if list(texts) == [NO_MARGIN]:
        return ()
    margins: list[Margin] = []
    for text in texts:
        name, equals, number = text.partition("=")
        if name not in MARGINS or not equals:
            raise InputError(f"a margin must be one of {', '.join(f'{known}=VALUE' for known in MARGINS)}, or {NO_MARGIN}; got {text!r}")
        if name in (margin.name for margin in margins):
            raise InputError(f"the margin {name} is given twice")
        try:
            value = float(number)
        except ValueError:
            value = math.nan
        if not math.isfinite(value):
            raise InputError(f"a margin's value must be a finite number, got {text!r}")
        margins.append(Margin(name, value))
    return tuple(margins)


ROWS, SUSPECTS, QUERIES, DOCUMENTS = "train.jsonl.gz", "suspects.jsonl.gz", "queries.jsonl.gz", "documents.jsonl.gz"


@dataclass(frozen=True)
class MinedQuery:
    """Result of one query; documents and the query are numbers."""

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


def write_mined(
    found: Iterable[MinedQuery], data: MiningData, out: Path, *, rules: Rules, count: int, ids: bool, progress: bool
) -> dict[str, Any]:
    """Write rows, suspects and texts, each file by one rename."""
    documents, queries = data.documents, data.queries
    used = np.zeros(len(documents), bool)
    counts, dropped = Counter[str](), Counter({margin.name: 0 for margin in rules.margins})
    positive, negative = 0.0, 0.0
    with ExitStack() as files, progress_bar("writing", count, enabled=progress) as advance:
        rows, suspects = (files.enter_context(atomic_file(out / name)) for name in (ROWS, SUSPECTS))
        for mined in found:
            query, texts = {"query_id": queries.ids[mined.query]}, {}
            if not ids:
                query["query"], negatives = queries[mined.query], [documents[number] for number in mined.negatives]
            for number, score in zip(mined.positives, mined.positive_scores, strict=True):  # one row each, all with the same negatives
                if not ids:
                    texts = {"positive": documents[number], "negatives": negatives}
                named = {"document_ids": [documents.ids[each] for each in (number, *mined.negatives)]}
                _write_line(rows, {**query, **texts, **named, "scores": [score, *mined.negative_scores]})
            for row in _suspect_rows(mined, data):
                _write_line(suspects, row)
            used[mined.positives] = used[mined.negatives] = True
            counts.update(
                queries=1,
                rows=len(mined.positives),
                rows_short=len(mined.positives) * (len(mined.negatives) < rules.negatives),
                rows_without_negatives=len(mined.positives) * (not mined.negatives),
                positives_within_ranks=mined.positives_found,
                candidates=mined.candidates,
                copies=mined.copies,
                negatives=len(mined.negatives),
                suspects=len(mined.suspects),
            )
            dropped.update(mined.dropped)
            positive, negative = positive + sum(mined.positive_scores), negative + sum(mined.negative_scores)
            advance(1)
    tables = [(QUERIES, "query_id", queries, np.arange(count)), (DOCUMENTS, "document_id", documents, np.flatnonzero(used))] if ids else []
    for name, key, table, numbers in tables:
        with atomic_file(out / name) as file:
            for number in numbers.tolist():
                _write_line(file, {key: table.ids[number], "text": table[number]})
    means = {"positive": positive / max(counts["rows"], 1), "negative": negative / max(counts["negatives"], 1)}
    return {**counts, "dropped": dict(dropped), "mean_scores": {name: round(mean, 6) for name, mean in means.items()}}


def why_all_short(result: Mapping[str, Any], rules: Rules) -> str:
    """Why no row of a run has all its negatives, and which limit to loosen; empty if a row has, given ``result`` of ``mining.json``."""
    if result["rows_short"] < result["rows"]:
        return ""
    found = f"no row has {rules.negatives} negatives ({result['negatives']:,} in all), so training would skip every row"
    margin = max(rules.margins, key=lambda each: int(result["dropped"][each.name]), default=None)
    if margin is not None and (excluded := result["dropped"][margin.name]):
        limit = f"{margin.name}={margin.value:g}"
        return f"{found}: --margin {limit} excluded {excluded:,} of {result['candidates']:,} candidates; loosen it, or pass --margin none"
    ranks = f"--ranks {rules.ranks.first}-{rules.ranks.last}"
    loosen = "lower its first rank or --negatives" if rules.ranks.first > 1 else "lower --negatives, or search more documents (--corpus)"
    return f"{found}: {ranks} holds {result['candidates']:,} candidates for {result['queries']:,} queries; {loosen}"


def _suspect_rows(mined: MinedQuery, data: MiningData) -> Iterable[dict[str, Any]]:
    """One row per suspect, with the positive of the lowest score, which the margins used."""
    lowest = min(range(len(mined.positives)), key=mined.positive_scores.__getitem__)
    positive, documents = mined.positives[lowest], data.documents
    for number, score, rank in zip(mined.suspects, mined.suspect_scores, mined.suspect_ranks, strict=True):
        yield {
            "query_id": data.queries.ids[mined.query],
            "query": data.queries[mined.query],
            "positive_id": documents.ids[positive],
            "positive": documents[positive],
            "positive_score": mined.positive_scores[lowest],
            "candidate_id": documents.ids[number],
            "candidate": documents[number],
            "candidate_score": score,
            "rank": rank,
        }


def _write_line(file: BinaryIO, row: dict[str, Any]) -> None:
    file.write(json.dumps(row, ensure_ascii=False, allow_nan=False).encode("utf-8") + b"\n")


SCHEMA = "quiver-mining/1"
RECORD = "mining.json"  # record of a finished run; written last

QUERIES_PER_PART = (256, 4096)
"""Minimum and maximum queries per part. Each part scans the whole corpus, so larger corpora have larger parts."""

_DOCUMENTS_PER_QUERY = 64
_CANDIDATES = 2_000_000  # maximum candidates of a part, 12 bytes each and an id
# Maximum copies of positives that the first search allows for, and the factor by which the depth grows for queries with more copies.
_COPIES = 1000
_DEEPER = 4


@dataclass(frozen=True)
class MiningSystem:
    """System that ranks the documents."""

    model: DenseModel | TokenModel | None
    index: IndexReader | None = None
    cache: Path | None = None
    executor: Executor = IN_PROCESS

    @property
    def description(self) -> dict[str, Any]:
        """Description for ``mining.json``."""
        if self.model is None:
            return {"name": bm25.NAME, **bm25.PARAMETERS}
        return asdict(self.model.card)

    @property
    def fingerprint(self) -> str:
        """Fingerprint: equal fingerprints mean equal rankings."""
        return bm25.NAME if self.model is None else self.model.card.fingerprint


@dataclass(frozen=True)
class Output:
    """Output options."""

    ids: bool = False
    suspects: int = 5
    limit: int | None = None


def mine_negatives(
    source: PairSource | BeirSource,
    system: MiningSystem,
    out: Path,
    *,
    rules: Rules,
    output: Output,
    overwrite: bool = False,
    progress: bool = False,
    command: str | None = None,
) -> dict[str, Any]:
    """Mine hard negatives into a folder; returns the content of ``mining.json``."""
    if system.index is not None and system.model is not None:
        system.index.check_model(system.model.card)
    settings = {
        "system": system.fingerprint,
        "index": None if system.index is None else system.index.manifest.codec.engine,
        "rules": asdict(rules),
        "output": asdict(output),
    }
    with open_job(out, RECORD, SCHEMA, settings=settings, overwrite=overwrite) as job:
        with progress_bar("reading", 1, enabled=progress):
            data = read_mining_data(source, job.scratch("texts"), index=system.index)
        job.agree({"data": data.sha256})
        count = len(data.queries) if output.limit is None else min(output.limit, len(data.queries))
        copies = np.bincount(data.documents.same[: data.searchable], minlength=len(data.documents))
        extra = np.fromiter((copies[data.excluded(query)].sum() for query in range(count)), np.int64, count)
        # Per query the depth at which the last rank is likely to be reached without positives and their copies.
        depths: NDArray[np.int64] = np.minimum(rules.ranks.last + np.minimum(extra, _COPIES), data.searchable)
        parts = _split_queries(depths, data.searchable)
        missing = job.missing(range(len(parts)))
        if missing:
            searching = _open_searcher(data, system, len(depths), progress=progress)
            with searching as searcher, progress_bar("mining", len(depths), enabled=progress) as advance:
                advance(len(depths) - sum(parts[number].stop - parts[number].start for number in missing))
                for number in missing:
                    depth = int(depths[parts[number]].max())
                    job.save(number, _mine_part(data, searcher, rules, output.suspects, parts[number], depth, advance))
        found = (MinedQuery(**json.loads(line)) for number in range(len(parts)) for line in job.read(number).splitlines())
        result = write_mined(found, data, out, rules=rules, count=len(depths), ids=output.ids, progress=progress)
        # The text files of the run that is replaced.
        if not output.ids and (out / RECORD).is_file() and read_json(out / RECORD).get("output", {}).get("ids"):
            for name in (QUERIES, DOCUMENTS):
                (out / name).unlink(missing_ok=True)
        content = {
            **settings,
            "system": system.description,
            "data": {
                **{name: str(value) if isinstance(value, Path) else value for name, value in asdict(source).items()},
                "index": None if system.index is None else str(system.index.path),
                "sha256": data.sha256,
                "documents": data.searchable,
                "without_positive": data.without_positive,
                "missing_positives": data.missing_positives,
            },
            "result": result,
        }
        return job.finish(content, command)


def _mine_part(data: MiningData, searcher: Searcher, rules: Rules, suspects: int, part: slice, depth: int, advance: Advance) -> bytes:
    """A line of JSON per query of a part; where copies, which have no rank, keep the last rank from being reached, found deeper."""
    lines: dict[int, str] = {}
    waiting = list(range(part.start, part.stop))
    while waiting:
        short = []
        for chosen in timed_slices(len(waiting), most=max(1, _CANDIDATES // depth)):
            queries = waiting[chosen]
            also = [data.positives_of(query) for query in queries]
            for query, found in zip(queries, searcher.search(np.array(queries), depth, also=also), strict=True):
                ranked = rankable(data.documents.same[found.ranked.rows], data.excluded(query))
                if len(ranked) < rules.ranks.last and len(found.ranked.rows) == depth < data.searchable:
                    short.append(query)
                else:
                    mined = _choose_for_query(data, rules, suspects, query, found, ranked[: rules.ranks.last])
                    lines[query] = json.dumps(asdict(mined))
                    advance(1)
        waiting, depth = short, min(depth * _DEEPER, data.searchable)
    return "".join(lines[query] + "\n" for query in range(part.start, part.stop)).encode("ascii")


def _choose_for_query(
    data: MiningData, rules: Rules, suspects: int, query: int, found: SearcherResult, ranked: NDArray[np.intp]
) -> MinedQuery:
    """The result of a query; ``ranked`` is that of `rankable`, cut at the last rank."""
    whole = len(ranked) == rules.ranks.last
    best = found.ranked.at(np.arange(ranked[-1] + 1)) if whole else found.ranked
    picked = choose_negatives(best, ranked, float(found.scores.min()), rules, query=query)
    positives = data.positives_of(query)
    kept = picked.suspects.at(np.arange(min(suspects, len(picked.suspects.rows))))
    return MinedQuery(
        query=query,
        positives=positives.tolist(),
        positive_scores=_round_scores(found.scores),
        negatives=picked.chosen.rows.tolist(),
        negative_scores=_round_scores(picked.chosen.scores),
        suspects=kept.rows.tolist(),
        suspect_scores=_round_scores(kept.scores),
        suspect_ranks=picked.ranks[:suspects].tolist(),
        positives_found=int(np.isin(positives, best.rows[: rules.ranks.last]).sum()),
        candidates=picked.candidates,
        copies=picked.left_out - int(np.isin(best.rows, positives).sum()),
        dropped=picked.dropped,
    )


def _round_scores(scores: NDArray[np.float32]) -> list[float]:
    """Scores with nine digits, which represent every float32 exactly."""
    return [float(f"{score:.9g}") for score in scores.tolist()]


def _split_queries(depths: NDArray[np.int64], documents: int) -> list[slice]:
    """Slices of queries that are searched together."""
    least, largest = QUERIES_PER_PART
    most = min(max(documents // _DOCUMENTS_PER_QUERY, least), largest)
    parts: list[slice] = []
    first = 0
    while first < len(depths):
        widths = np.maximum.accumulate(depths[first : first + most])
        size = max(1, int(np.searchsorted(widths * np.arange(1, len(widths) + 1), _CANDIDATES, side="right")))
        parts.append(slice(first, min(first + size, len(depths))))
        first = parts[-1].stop
    return parts


@contextmanager
def _open_searcher(data: MiningData, system: MiningSystem, count: int, *, progress: bool) -> Iterator[Searcher]:
    if system.model is None:
        first, read = islice(data.queries, count), data.documents
        with progress_bar("documents", len(read), enabled=progress) as advance:
            words = BM25Searcher(first, read, read.ids, searchable=data.searchable, advance=advance)
        yield words
        return
    model, index = system.model, system.index
    with open_embedding_store(system.cache, system.executor) as store:
        queries = store.encode(model, islice(data.queries, count), "query", total=count, progress=progress)
        if index is None:
            scored = np.arange(len(data.documents))
            documents = store.encode(model, data.documents, "document", total=len(scored), progress=progress)
            ids, lengths = list(data.documents.ids), documents.lengths
            exact = index_vectors(ids, documents.rows, model.card, lengths=lengths, device=device_of(model))
            yield VectorSearcher(exact, queries, scored, documents)
            return
        # An index does not return its vectors, so the positives are encoded again.
        scored = np.unique(data.positives[: data.starts[count]])
        texts = (data.documents[number] for number in scored.tolist())
        documents = store.encode(model, texts, "document", total=len(scored), progress=progress, description="positives")
        yield VectorSearcher(index.search_on(device_of(model)), queries, scored, documents)
