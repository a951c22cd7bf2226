"""The report of retrieval results: scores, charts, worst queries, and everything that is needed to reproduce and compare them.

First the rows: systems with labels, their scores and those of baselines, and the check that results are comparable; other reports use
them too. Then the sections of the report. The report adds no number that is not in ``results.json``, except averages, sums and shares.
Equal results give equal bytes.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import TypeAlias

from quiver.encoder.errors import InputError, check_utf8
from quiver.encoder.files import write_text
from quiver.eval.metrics import Average, Interval, average, data_sets, grouped, is_whole
from quiver.eval.report.charts import Bar, Dot, Key, axis_top, bar_chart, interval, latency_chart, latency_limits
from quiver.eval.report.formats import (
    Block,
    Cell,
    Code,
    Column,
    Details,
    Example,
    Examples,
    Excerpt,
    Figure,
    Gallery,
    Paragraph,
    Properties,
    Report,
    Row,
    Section,
    Span,
    Table,
    check_format,
    render_latex,
    write,
)
from quiver.eval.results import (
    HEADLINE,
    CollectionResult,
    FailedCollection,
    Results,
    ShownDocument,
    System,
    WorstQuery,
    describe_settings,
    index_name,
    read_results,
    short_sources,
    with_common_names,
)

LABELS: Mapping[str, str] = {
    "ndcg@10": "nDCG@10",
    "map": "MAP",
    "mrr@10": "MRR@10",
    "recall@10": "Recall@10",
    "recall@100": "Recall@100",
    "recall@1000": "Recall@1000",
    "p@10": "P@10",
}
"""Measure -> its name in the literature, in the order of table columns."""

SCORING = ("k", "use_title", "exclude_self")
"""Fields of a collection's result that must be equal for two scores to be comparable."""

FINGERPRINT_WIDTH = 12
"""Number of fingerprint digits in a label."""


@dataclass(frozen=True)
class Score:
    """Scores of a system or baseline on one collection.

    Attributes:
        measures: Measure -> fraction.
        interval: Bootstrap interval of nDCG@10.
        judged: Share of the first ten documents that were judged; None for a baseline.
        in_domain: Whether the system was trained on the collection's training data; False for a baseline.
    """

    measures: Mapping[str, float]
    interval: Interval
    judged: float | None = None
    in_domain: bool = False


@dataclass(frozen=True)
class ScoredRow:
    """A row of the tables of measures.

    Attributes:
        label: Name of the system or baseline.
        scores: Collection with split -> scores.
    """

    label: str
    scores: Mapping[str, Score]


AVERAGE = "average"
"""Name of the average over all data sets of a table among the data sets of `Significance`."""


@dataclass(frozen=True)
class Significance:
    """Which systems the scores of a report are significantly better than; see `quiver.eval.report.compare.significance`.

    Attributes:
        better: (data set, collection or `AVERAGE`; measure; label of a row) -> labels of the rows that it is better than.
        method: Test and correction, for captions; empty if nothing could be tested.
    """

    better: Mapping[tuple[str, str, str], Sequence[str]]
    method: str = ""


NOT_TESTED = Significance({})
"""Of a report without scores per query, or with a single row."""

Named: TypeAlias = Sequence[tuple[str, Results]]
"""(label of the system, results)."""


def check_data(results: Sequence[Results]) -> None:
    """Check that results fit into one table.

    Raises:
        InputError: There are no results, a system has two results for one collection with the same index, or two results for one
            collection were made on different data or scored differently, see `SCORING`.
    """
    if not results:
        raise InputError("there are no results to report; name at least one folder that quiver evaluate wrote")
    firsts: dict[str, tuple[str, CollectionResult]] = {}
    seen: set[tuple[System, str, str]] = set()
    for result in results:
        for collection in result.collections:
            source, key = result.system.source, collection.key
            other, first = firsts.setdefault(key, (source, collection))
            if first.data_sha256 != collection.data_sha256:
                raise InputError(f"{key}: {source} and {other} were evaluated on different data of this name; rename one collection")
            for name, one, two in differently_scored(first, collection):
                raise InputError(
                    f"{key}: {other} was scored with {name}={one}, {source} with {name}={two}; evaluate both with the same setting"
                )
            made = (result.system, key, index_name(collection.index))
            if made in seen:
                raise InputError(f"two of the given folders hold scores of {source} on {key}; pass only one of them")
            seen.add(made)


def differently_scored(one: CollectionResult, other: CollectionResult) -> Iterator[tuple[str, object, object]]:
    """Yield the fields of `SCORING` in which two results for one collection differ, with both values."""
    for name in SCORING:
        if getattr(one, name) != getattr(other, name):
            yield name, getattr(one, name), getattr(other, name)


def collections_by_key(results: Sequence[Results]) -> dict[str, CollectionResult]:
    """Collection with split -> its result, in the order of the results.

    If several results are of the same data, the first one with a known revision and group is used, then one that knows all documents.
    """
    found: dict[str, CollectionResult] = {}
    for result in results:
        for collection in result.collections:
            known = found.setdefault(collection.key, collection)
            if (collection.revision is not None, not collection.named_by) > (known.revision is not None, not known.named_by):
                found[collection.key] = collection
    return found


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
        details = ", ".join([*_differing(system, same_source), *[system.kind] * mistaken])
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
            is_shown = _are_equal(each.measures, shown.setdefault((each.name, collection.key), each.measures))
            baselines.append(each if is_shown else replace(each, name=f"{each.name} of {label}"))
        return replace(collection, baselines=tuple(baselines))

    return [(label, replace(result, collections=tuple(own(label, each) for each in result.collections))) for label, result in named]


def _are_equal(one: Mapping[str, float], other: Mapping[str, float]) -> bool:
    return one.keys() == other.keys() and all(math.isclose(one[name], other[name], abs_tol=1e-9) for name in one)


def _detail(field: str, value: object) -> str:
    if field == "group_by":
        return f"grouped by {value}" if value else "not grouped"
    return f"{field.replace('_', ' ')} {value}"


def _differing(system: System, others: Sequence[System]) -> list[str]:
    details = []
    for field in fields(System):
        values = {getattr(other, field.name) for other in others}
        if len(values) > 1 and field.name != "name":
            value = getattr(system, field.name)
            hashed = field.name == "fingerprint" and value is not None
            details.append(value[:FINGERPRINT_WIDTH] if hashed else _detail(field.name, value))
    return details


def _index_suffix(result: Results, results: Sequence[Results]) -> str:
    keys = [collection.key for other in results if other.system == result.system for collection in other.collections]
    if len(set(keys)) == len(keys):
        return ""
    return f" [{'; '.join(dict.fromkeys(index_name(collection.index) for collection in result.collections))}]"


def rows(named: Named) -> list[ScoredRow]:
    """Rows of baselines, then of systems. A baseline that was also evaluated as a system has one row."""
    scored = [(label, collection) for label, result in named for collection in result.collections]
    found: dict[str, dict[str, Score]] = {}
    for _, collection in scored:
        for baseline in collection.baselines:
            _add(found, baseline.name, collection.key, Score(baseline.measures, baseline.interval))
    for label, collection in scored:
        _add(found, label, collection.key, Score(collection.measures, collection.interval, collection.judged, collection.in_domain))
    return [ScoredRow(label, scores) for label, scores in found.items()]


def _add(found: dict[str, dict[str, Score]], label: str, key: str, score: Score) -> None:
    scores = found.setdefault(label, {})
    known = scores.setdefault(key, score)
    if known.judged is None:
        scores[key] = score


def row_data_sets(row: ScoredRow, collections: Mapping[str, CollectionResult], *, measure: str = HEADLINE) -> dict[str, float | None]:
    """Data set -> score of a row, for all data sets of a table. A group of collections is one; None if the row lacks a part of it.

    Args:
        row: A row.
        collections: Return value of `collections_by_key`.
        measure: Measure to take.
    """
    values = {key: score.measures.get(measure) for key, score in row.scores.items()}
    return data_sets(collection.part(values.get(key)) for key, collection in collections.items())


def members(collections: Iterable[CollectionResult]) -> dict[str, list[str]]:
    """Data set of a table -> keys of its collections, see `quiver.eval.metrics.grouped`."""
    return {name: [part.key for part in parts] for name, parts in grouped(collection.part() for collection in collections).items()}


def row_average(
    row: ScoredRow, collections: Mapping[str, CollectionResult], *, failed: Iterable[FailedCollection] = (), measure: str = HEADLINE
) -> Average:
    """Mean of a row over all data sets of a table; None if one of them is missing.

    Args:
        row: A row.
        collections: Return value of `collections_by_key`.
        failed: Collections that no system was evaluated on, because they failed.
        measure: Measure to take.
    """
    # A group that has scored parts lacks those that failed; others are data sets without a score.
    scores = row_data_sets(row, collections, measure=measure) | {each.key: None for each in failed}
    return average(scores, list(scores))


def points(fraction: float | None) -> str:
    """Print a fraction in points, hundredths of it, with two decimals; None is the empty string.

    Example:
        >>> points(0.65704)
        '65.70'
    """
    return "" if fraction is None else f"{100 * fraction:.2f}"


MEBIBYTE = 2**20

COMBINED = ("run", "fusion", "re-ranking", "retriever")
"""Kinds of an index that are made of others, whose own overlap with exact search is not measured."""

COLOURS = 8
"""Number of colours that tell systems apart; systems beyond them repeat colours, and their letters differ."""

OVERLAPS = ("overlap@10", "overlap@100")
"""Measures of an approximate index against exact search."""

STEPS: Mapping[str, str] = {
    "encode_documents": "Encode documents",
    "index": "Index",
    "encode_queries": "Encode queries",
    "search": "Search",
    "fuse": "Fuse",
    "rerank": "Re-rank",
    "check": "Check of the data",
    "other": "Other",
}
"""Step of an evaluation -> column heading."""

OVERHEAD = ("index", "check", "other")
"""Steps other than encoding and search."""

CAPTIONED = ("Search", "Missing results", "Missing documents", "Averages")
"""Rules of the protocol in the caption of the LaTeX table."""

SYSTEM = Column("System", numeric=False, wide=True)
COLLECTION = Column("Collection", numeric=False)


@dataclass(frozen=True)
class _Content:
    """What several parts of a report need; ``links`` leads from a score to the section with its command."""

    named: Named
    failed: Sequence[FailedCollection]
    rows: Sequence[ScoredRow]
    collections: Mapping[str, CollectionResult]
    members: Mapping[str, Sequence[str]]
    keys: Mapping[str, Key]
    links: Mapping[tuple[str, str], str]
    significance: Significance

    def better_than(self, label: str, name: str, measure: str = HEADLINE) -> tuple[str, ...]:
        """Letters of the systems that a score is significantly better than, in the order of the rows."""
        found = self.significance.better.get((name, measure, label), ())
        return tuple(key.letter for other, key in self.keys.items() if other in found)

    @property
    def averaged(self) -> bool:
        """Whether there are several data sets, so that they have an average, which is blank if one has failed."""
        return len(self.members) + len(self.failed) > 1

    @property
    def scored(self) -> list[tuple[Key, CollectionResult]]:
        return [(self.keys[label], collection) for label, result in self.named for collection in result.collections]

    def heading(self, name: str) -> tuple[str, str]:
        """A data set with its split, or with the number of parts that it is the mean of."""
        if name in self.collections:
            return self.collections[name].name, self.collections[name].split
        return name, f"mean of {self.collections[self.members[name][0]].group_size}"


TITLE = "Retrieval results"
"""Title of a report that is given none."""


def results_report(results: Sequence[Results], *, title: str = TITLE, significance: Significance = NOT_TESTED) -> Report:
    """Make the report of one or more systems.

    Args:
        results: In the order of the tables' rows. Baselines come first, and results of one system share a row.
        title: Main heading.
        significance: What superscripts say.

    Raises:
        InputError: There are no results, a system has two results for one collection and index, or two results under one name were made
            on different data or scored differently.
    """
    content = _content(results, significance)
    parts = (
        Section("nDCG@10", tuple(_scores(content)), "scores"),
        Section("Bars with intervals", tuple(_charts(content)), "charts"),
        *_latency(content),
        Section(
            "Collections",
            tuple(_collection(content, position, key) for position, key in enumerate(content.collections, start=1)),
            "collections",
        ),
        Section("Protocol", (Properties(protocol(results), "rules"), conditions_table(content.scored)), "protocol"),
        Section(
            "Indexes",
            (
                Paragraph("Overlap is with exact search over the same vectors. The time per query is that of the search alone."),
                index_table(content.scored),
            ),
            "indexes",
        ),
        Section(
            "Time",
            (
                Paragraph(
                    "Wall-clock time in seconds. BM25 builds its index in the search step. Overhead is the share of building the index,"
                    " reading, scoring and writing."
                ),
                seconds_table(content.scored),
            ),
            "seconds",
        ),
        Section(
            "Systems and commands",
            tuple(_system(content, position, label, result) for position, (label, result) in enumerate(content.named, start=1)),
            "systems",
        ),
    )
    return Report(title, parts, _lead(content, results))


def _lead(content: _Content, results: Sequence[Results]) -> str:
    days = sorted({result.provenance.date[:10] for result in results})
    dates = days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"
    systems = _counted(len(content.keys), "system", "systems")
    scored = _counted(len(content.collections), "collection", "collections")
    grouping = (
        f", which make {_counted(len(content.members), 'data set', 'data sets')}"
        if len(content.collections) != len(content.members)
        else ""
    )
    return f"{systems} on {scored}{grouping}. Evaluated {dates}."


def _counted(number: int, one: str, many: str) -> str:
    return f"{number:,} {one if number == 1 else many}"


def write_report(results: Sequence[str | Path | Results], *files: str | Path, title: str = "") -> None:
    """Write a report of several results in one or more formats, replacing existing ones.

    Args:
        results: Results, or folders that ``quiver evaluate`` wrote.
        files: Files to write; the suffix (.md, .html or .tex) selects the format. The significance tests are made once for all.
        title: Main heading; empty for ``Retrieval results``. LaTeX has no heading: it begins the caption of the table.

    Raises:
        InputError: A suffix is unknown, a folder holds no complete results, two results do not fit into one table, or a file cannot be
            written.
    """
    check_utf8(title, "the title")
    suffixes = {Path(file): check_format(Path(file)) for file in files}
    read = with_common_names([each if isinstance(each, Results) else read_results(each) for each in results])
    tested = _significance(results, read)
    for path, suffix in suffixes.items():
        if suffix == ".tex":
            report, comments = latex_report(read, title=title, significance=tested)
            write_text(path, render_latex(report, comments=comments))
        else:
            write(results_report(read, title=title or TITLE, significance=tested), path)
        folders = [os.path.relpath(each, path.parent) for each in results if not isinstance(each, Results)]
        if len(folders) == len(results):
            begin, end = _COMMENTS[suffix]
            note = json.dumps(folders).replace(">", "\\u003e")  # an arrow would end the comment
            write_text(path, f"{path.read_text(encoding='utf-8')}{begin}{_FOLDERS}{note}{end}\n")


def _significance(given: Sequence[str | Path | Results], read: Sequence[Results]) -> Significance:
    from quiver.eval.report.compare import significance  # imports this module

    check_data(read)
    folders = [each for each in given if not isinstance(each, Results)]
    # Results alone do not say where their scores per query are.
    return significance(folders, read) if len(folders) == len(read) else NOT_TESTED


_FOLDERS = "quiver-results: "
_COMMENTS = {".md": ("\n<!-- ", " -->"), ".html": ("\n<!-- ", " -->"), ".tex": ("% ", "")}


def reported_folders(report: Path) -> list[Path]:
    """The results folders of a report, which its last line names; none if there is no such file.

    Raises:
        InputError: The file is not a report of results folders, or its suffix is not supported.
    """
    suffix = check_format(report)
    if not report.exists():
        return []
    begin, end = _COMMENTS[suffix]
    last = report.read_text(encoding="utf-8").rstrip("\n").rpartition("\n")[2]
    start = begin.strip() + " " + _FOLDERS
    if not last.startswith(start):
        raise InputError(f"{report}: not a report of quiver evaluate or quiver report; name another file")
    try:
        named = json.loads(last[len(start) :].removesuffix(end))
    except ValueError as error:
        raise InputError(f"{report}: its last line was changed; write it again with: quiver report FOLDER... --out {report}") from error
    return [report.parent / folder for folder in named]


def latex_report(results: Sequence[Results], *, title: str = "", significance: Significance = NOT_TESTED) -> tuple[Report, list[str]]:
    """Make the table for a paper: nDCG@10 of systems on data sets; and comments that say how to reproduce it.

    Args:
        results: In the order of the table's rows.
        title: Beginning of the caption; empty for what the table shows.
        significance: What superscripts say.

    Raises:
        InputError: As `results_report`.
    """
    content = _content(results, significance)
    rules = protocol(results)
    caption = " ".join(rules[about] for about in CAPTIONED if about in rules)
    comments = [f"{each.key}: revision {each.revision or 'none'}, sha256 {each.data_sha256}" for each in content.collections.values()]
    comments += [f"{label}: {result.provenance.command or 'made without a command line'}" for label, result in content.named]
    comments += [f"{each.key}: not evaluated: {each.reason}" for each in content.failed]
    name = f"{LABELS[HEADLINE]} in points"
    return Report(title or TITLE, (_headline(content, f"{title}: {name}" if title else name, caption),)), comments


def _content(results: Sequence[Results], significance: Significance) -> _Content:
    results = with_common_names(results)
    check_data(results)
    named = label_systems(results)
    scored = rows(named)
    collections = collections_by_key([result for _, result in named])
    failed = {each.key: each for result in results for each in result.failed if each.key not in collections}
    sets, keys = members(collections.values()), system_keys(scored, named)
    return _Content(named, list(failed.values()), scored, collections, sets, keys, _links(named), significance)


def system_keys(scored: Sequence[ScoredRow], named: Named) -> dict[str, Key]:
    """Letters in the order of the rows. BM25 and nothing else is grey: the first of several, so that colours tell them apart."""
    grey = {label for label, result in named if result.system.kind == "bm25"}
    grey |= {baseline.name for _, result in named for collection in result.collections for baseline in collection.baselines}
    labels = dict.fromkeys([*(row.label for row in scored), *(label for label, _ in named)])  # a system without collections has no row
    first = next((label for label in labels if label in grey), None)
    coloured = [label for label in labels if label != first]
    colours = {label: position % COLOURS + 1 for position, label in enumerate(coloured)}
    return {label: Key(letters(position), colours.get(label, 0), label) for position, label in enumerate(labels)}


def letters(position: int) -> str:
    """The letter of the system at a position, from 0.

    Example:
        >>> [letters(position) for position in (0, 25, 26)]
        ['A', 'Z', 'AA']
    """
    return chr(ord("A") + position) if position < 26 else letters(position // 26 - 1) + chr(ord("A") + position % 26)


def _links(named: Named) -> dict[tuple[str, str], str]:
    """Row and collection -> section with the command of the score; for a baseline, that of the first result that has it."""
    links: dict[tuple[str, str], str] = {}
    for position, (label, result) in enumerate(named, start=1):
        for collection in result.collections:
            links[label, collection.key] = f"result-{position}"
    for position, (_, result) in enumerate(named, start=1):
        for collection in result.collections:
            for baseline in collection.baselines:
                links.setdefault((baseline.name, collection.key), f"result-{position}")
    return links


def _scores(content: _Content) -> Iterator[Block]:
    intervals = dict.fromkeys((each.interval.level, each.interval.resamples) for row in content.rows for each in row.scores.values())
    made = (
        f"small figures are the {100 * level:g}% bootstrap interval over queries ({resamples:,} resamples)"
        for level, resamples in intervals
    )
    marks = "Bold is the highest of a column, underlined the second" if len(content.rows) > 1 else ""
    small = "; ".join(filter(None, (marks, *made)))
    yield Paragraph(
        " ".join(
            filter(
                None,
                (
                    "In points, hundredths of 1.",
                    small and f"{small[0].upper()}{small[1:]}.",
                    "An average is blank where a data set is missing." if content.averaged else "",
                    "In HTML, a score links to the command that made it.",
                ),
            )
        )
    )
    for each in content.failed:
        yield Paragraph((Span("Not evaluated:", "strong"), f" {each.key}: {each.reason}"))
    yield _headline(content, "nDCG@10 of systems on data sets", "")
    for group, keys in content.members.items():
        if group not in content.collections:
            yield Details(f"The parts of {group}, which counts once, as their mean", (_parts_table(content, group, keys),))


def _headline(content: _Content, name: str, caption: str) -> Table:
    systems = {label for label, _ in content.named}
    averaged = content.averaged
    lines = []
    for row in content.rows:
        sets = row_data_sets(row, content.collections)
        cells = [_set_cell(content, row, each, sets.get(each)) for each in content.members]
        if averaged:
            cells.insert(0, _average_cell(content, row))
        lines.append(Row((_system_cell(content.keys[row.label]), *cells), group="systems" if row.label in systems else "baselines"))
    columns = [Column(*content.heading(each), ranked=True) for each in content.members]
    if averaged:
        columns.insert(0, Column("Average", "of data sets", ranked=True))
    return _explained(content, Table(name, (SYSTEM, *columns), tuple(lines), caption, "retrieval"))


def _average_cell(content: _Content, row: ScoredRow) -> Cell:
    mean = row_average(row, content.collections, failed=content.failed)
    better = content.better_than(row.label, AVERAGE)
    return Cell(points(mean.value), mean.value, f"{mean.known} of {mean.members}", better_than=better)


def _explained(content: _Content, made: Table) -> Table:
    """The first table with a caption that says what superscripts mean, if its scores could be tested."""
    return replace(made, caption=" ".join(filter(None, (content.significance.method, made.caption))))


def _as_above(made: Table) -> Table:
    """A later table, which need not say again what superscripts mean."""
    return replace(made, caption="Superscripts: see the first table.") if made.lettered else made


def _set_cell(content: _Content, row: ScoredRow, name: str, value: float | None) -> Cell:
    if name in content.collections:
        return _score_cell(content, row.label, name, row.scores.get(name))
    known = [key for key in content.members[name] if key in row.scores]
    note = "" if value is not None or not known else f"{len(known)} of {content.collections[known[0]].group_size}"
    return Cell(points(value), value, note, better_than=content.better_than(row.label, name))


def _score_cell(content: _Content, label: str, key: str, score: Score | None) -> Cell:
    if score is None:
        return Cell("")
    value = score.measures.get(HEADLINE)
    ends = interval(score.interval.low, score.interval.high)
    return Cell(points(value), value, ends, content.links[label, key], better_than=content.better_than(label, key))


def _system_cell(key: Key) -> Cell:
    return Cell(key.label, key=key)


def _parts_table(content: _Content, group: str, keys: Sequence[str]) -> Table:
    lines = [
        Row((_system_cell(content.keys[row.label]), *(_score_cell(content, row.label, key, row.scores.get(key)) for key in keys)))
        for row in content.rows
        if not row.scores.keys().isdisjoint(keys)
    ]
    columns = [Column(*content.heading(key), ranked=True) for key in keys]
    return _as_above(Table(f"nDCG@10 on the parts of {group}", (SYSTEM, *columns), tuple(lines)))


def _charts(content: _Content) -> Iterator[Block]:
    """One chart per data set, all on one axis; none for a group that no system has whole."""
    scores = [score for row in content.rows for score in row.scores.values()]
    top = axis_top(max((max(score.interval.high, score.measures.get(HEADLINE, 0.0)) for score in scores), default=1.0))
    scale = ", all charts on one scale" if len(content.members) > 1 else ""
    groups = "; a mean over a group has none" if not content.members.keys() <= content.collections.keys() else ""
    yield Paragraph(f"nDCG@10 in points{scale}. The line on a bar is its interval{groups}.")
    yield Gallery(tuple(_bar_figures(content, content.members, top)))
    for group, keys in content.members.items():
        if group not in content.collections:
            yield Details(f"The parts of {group}", (Gallery(tuple(_bar_figures(content, keys, top))),))


def _bar_figures(content: _Content, names: Iterable[str], top: float) -> Iterator[Figure]:
    for name in names:
        bars = list(_bars(content, name))
        if bars:
            title, note = content.heading(name)
            values = ", ".join(f"{bar.key.label} {points(bar.value)}" for bar in bars)
            yield Figure(title, partial(bar_chart, bars, top), f"nDCG@10 on {title}: {values}", note)


def _bars(content: _Content, name: str) -> Iterator[Bar]:
    for row in content.rows:
        score = row.scores.get(name)
        value = row_data_sets(row, content.collections).get(name) if score is None else score.measures.get(HEADLINE)
        ends = (None, None) if score is None else (score.interval.low, score.interval.high)
        if value is not None:
            yield Bar(content.keys[row.label], value, *ends)


def _latency(content: _Content) -> Iterator[Section]:
    """Scores over search time, where there are several points to compare."""
    approximate = any(each.index.kind != "exact" and each.index.recall is not None for _, each in content.scored)
    measure = OVERLAPS[0] if approximate else HEADLINE
    timed: dict[str, list[Dot]] = {}
    for key, collection in content.scored:
        index = collection.index
        value = (index.recall or {}).get(measure) if approximate else collection.measures.get(HEADLINE)
        if value is not None and index.query_milliseconds:
            dot = Dot(key, index.query_milliseconds, value, hollow=approximate and index.kind == "exact")
            timed.setdefault(collection.key, []).append(dot)
    if any(len(dots) > 1 for dots in timed.values()):
        title = f"{'Overlap with exact search' if approximate else 'nDCG@10'} over search time"
        yield Section(title, tuple(_latency_blocks(content, timed, measure, approximate=approximate)), "latency")


def _latency_blocks(content: _Content, timed: Mapping[str, Sequence[Dot]], measure: str, *, approximate: bool) -> Iterator[Block]:
    every = [dot for dots in timed.values() for dot in dots]
    limits = latency_limits(every, to_one=approximate)
    label = f"{LABELS.get(measure, measure)}{' with exact search, percent' if approximate else ', points'}"

    def drawn(names: Iterable[str]) -> Iterator[Figure]:
        for name in names:
            title, note = content.heading(name)
            values = ", ".join(f"{dot.key.label} {points(dot.value)} at {dot.milliseconds:.3g}" for dot in timed[name])
            alt = f"{label}, over milliseconds of search per query on {title}: {values}"
            yield Figure(title, partial(latency_chart, timed[name], limits, label), alt, note)

    how = "The horizontal axis is the search time per query without encoding, all queries in one call."
    how += " All charts share their axes." if len(timed) > 1 else ""
    keys = tuple(key for key in content.keys.values() if any(dot.key == key for dot in every))
    absent = ", ".join(key.label for key in content.keys.values() if key not in keys)
    how += f" Without a point, because this time was not measured apart: {absent}." if absent else ""
    if approximate:
        yield Paragraph(
            f"The share of exact search's first ten documents that an index finds. {how} A ring is exact search, which finds all."
        )
    else:
        yield Paragraph(f"No index was approximate, so the charts show nDCG@10 instead of recall. {how}")
    homes = {key: group for group, keys in content.members.items() if group not in content.collections for key in keys}
    yield Gallery(tuple(drawn(name for name in timed if name not in homes)), keys)
    for group in dict.fromkeys(homes[name] for name in timed if name in homes):
        yield Details(f"The parts of {group}", (Gallery(tuple(drawn(name for name in timed if homes.get(name) == group))),))


def _collection(content: _Content, position: int, key: str) -> Section:
    result = content.collections[key]
    measured = [row for row in content.rows if key in row.scores]
    columns = (SYSTEM, *(Column(label, ranked=True) for label in LABELS.values()), Column("Judged@10", "percent"))
    lines = tuple(Row(_measures(content, row.label, key, row.scores[key])) for row in measured)
    worst = [block for system, each in content.scored if each.key == key for block in _worst(system, each)]
    cautions = [Paragraph(f"{system.label}: {each.caution}.") for system, each in content.scored if each.key == key and each.caution]
    properties = {
        "Documents": f"{result.documents:,}{result.named_by}",
        "Judged queries": f"{result.queries:,}",
        "Judgements": f"{result.judgements:,}",
        "Part of": result.group or "",
        "Licence": result.licence or "not known",
        "Revision": result.revision or "none, a local folder",
        "Data sha256": result.data_sha256,
    }
    shown = Properties({name: value for name, value in properties.items() if value}, "wide")
    return Section(
        result.name,
        (shown, _as_above(Table(f"Measures on {key}", columns, lines)), *cautions, *worst),
        f"collection-{position}",
        result.split,
    )


def _measures(content: _Content, label: str, key: str, score: Score) -> tuple[Cell, ...]:
    others = [
        Cell(points(value := score.measures.get(measure)), value, better_than=content.better_than(label, key, measure))
        for measure in LABELS
        if measure != HEADLINE
    ]
    return (_system_cell(content.keys[label]), _score_cell(content, label, key, score), *others, _percent_cell(score.judged))


def _worst(system: Key, result: CollectionResult) -> Iterator[Block]:
    """The worst queries of a system; those with the best possible score teach nothing."""
    below = [query for query in result.worst if not _is_best(query.score)]
    if below:
        examples = Examples(tuple(_example(query, result.kept) for query in below))
        yield Details(f"{system.label}: {_counted(len(below), 'worst query', 'worst queries')}", (examples,), system)
    elif _is_best(result.measures[HEADLINE]):
        yield Paragraph(f"{system.label}: no query is below the best possible {LABELS[HEADLINE]}.")


def _is_best(score: float) -> bool:
    return math.isclose(score, 1.0, abs_tol=1e-9)


def _example(worst: WorstQuery, k: int) -> Example:
    marks = (
        Span(f"nDCG@10 {points(worst.score)}", "mark"),
        Span(_counted(worst.relevant, "relevant document", "relevant documents"), "mark"),
    )
    sides = {
        "Found first": tuple(_excerpt(document, k) for document in worst.found),
        "Relevant": tuple(_excerpt(document, k) for document in worst.wanted),
    }
    return Example(worst.query, worst.text, marks, sides)


def _excerpt(document: ShownDocument, k: int) -> Excerpt:
    marks = [Span(f"not in the first {k:,}" if document.rank is None else f"rank {document.rank:,}", "mark")]
    if document.score is not None:
        marks.append(Span(f"score {document.score:.4f}", "mark"))
    if document.grade is None:
        marks.append(Span("not judged", "mark"))
    elif document.grade >= 1:
        marks.append(Span(f"✓ grade {document.grade}", "good"))
    else:
        marks.append(Span(f"✗ grade {document.grade}", "poor"))
    matches = tuple((match.query_token, match.document_token, match.similarity) for match in document.matches)
    return Excerpt(tuple(marks), document.id, document.text, matches)


def _system(content: _Content, position: int, label: str, result: Results) -> Section:
    command = result.provenance.command
    how = Paragraph("Made by a call of the library, without a command line.") if command is None else Code(command)
    files = files_table(result)
    folded = [] if files is None else [Details(files.name, (files,))]
    return Section(label, (how, Properties(system_properties(result)), *folded), f"result-{position}", key=content.keys[label])


def conditions_table(scored: Sequence[tuple[Key, CollectionResult]]) -> Table:
    """How each run was made, one row per run."""
    columns = (
        COLLECTION,
        SYSTEM,
        Column("Kept", "k"),
        Column("Titles", numeric=False),
        Column("Own id excluded", numeric=False),
        Column("Domain", numeric=False),
        Column("Documents truncated"),
        Column("Queries truncated"),
        Column("No results", "queries"),
        Column("Empty", "documents"),
        Column("Judged@10", "percent"),
    )
    lines = [
        (
            Cell(each.key),
            _system_cell(key),
            _count(each.kept),
            Cell("yes" if each.use_title else "no"),
            Cell("yes" if each.exclude_self else "no"),
            Cell("in" if each.in_domain else "out"),
            _count(each.truncated.documents, of=each.documents),
            _count(each.truncated.queries, of=each.queries),
            _count(each.unanswered),
            _count(each.empty_texts),
            _percent_cell(each.judged),
        )
        for key, each in scored
    ]
    return Table("How each run was made", columns, tuple(map(Row, lines)))


def index_table(scored: Sequence[tuple[Key, CollectionResult]]) -> Table:
    """The index of each run, one row per run."""
    columns = (
        COLLECTION,
        SYSTEM,
        Column("Index", numeric=False, wide=True),
        *(Column(name, "percent of exact") for name in OVERLAPS),
        Column("MiB"),
        Column("ms per query"),
        Column("Vectors reused"),
    )
    lines = []
    for key, each in scored:
        index = each.index
        shares = [_percent_cell((index.recall or {}).get(name), digits=2) for name in OVERLAPS]
        size = Cell("") if index.bytes is None else Cell(f"{index.bytes / MEBIBYTE:,.1f}", float(index.bytes))
        spent = index.query_milliseconds
        time = Cell("") if spent is None else Cell(f"{spent:.3g}", spent)
        used = (Cell(each.key), _system_cell(key), Cell(index_name(index)))
        lines.append(Row((*used, *shares, size, time, _count(each.cached, of=each.documents))))
    return Table("The index of each run", columns, tuple(lines))


def seconds_table(scored: Sequence[tuple[Key, CollectionResult]]) -> Table:
    """Time of each step, one row per run."""
    taken = {step for _, each in scored for step in each.seconds}
    shown = {step: name for step, name in STEPS.items() if step not in ("fuse", "rerank") or step in taken}
    columns = (COLLECTION, SYSTEM, *map(Column, shown.values()), Column("Total"), Column("Overhead", "percent"))
    lines = []
    for key, each in scored:
        total = sum(each.seconds.values())
        steps = [Cell("") if step not in each.seconds else _second(each.seconds[step]) for step in shown]
        overhead = _percent_cell(sum(each.seconds.get(step, 0.0) for step in OVERHEAD) / total if total > 0 else None, digits=2)
        lines.append(Row((Cell(each.key), _system_cell(key), *steps, _second(total), overhead)))
    return Table("Seconds by step", columns, tuple(lines))


def files_table(result: Results) -> Table | None:
    """The files that a result names; None if none were written."""
    lines = [
        Row((Cell(collection.key), Cell(content), Cell(reference.file), Cell(reference.sha256)))
        for collection in result.collections
        for content, reference in (
            ("run", collection.run),
            ("scores by query", collection.per_query),
            ("queries", collection.query_texts),
        )
        if reference is not None
    ]
    columns = (COLLECTION, *(Column(name, numeric=False, wide=name == "sha256") for name in ("Content", "File", "sha256")))
    return Table("Files beside results.json", columns, tuple(lines)) if lines else None


def _second(seconds: float) -> Cell:
    return Cell(f"{seconds:,.2f}", seconds)


def _percent_cell(share: float | None, *, digits: int = 1) -> Cell:
    return Cell("") if share is None else Cell(f"{100 * share:.{digits}f}", share)


def _count(number: int | None, *, of: int | None = None) -> Cell:
    if number is None:
        return Cell("")
    share = f"{100 * number / of:.1f}%" if of and number else ""
    return Cell(f"{number:,}", float(number), share)


def protocol(results: Sequence[Results]) -> dict[str, str]:
    """Rules by which the numbers of a report were computed: topic -> sentences. A comparison with another tool's score needs these rules.

    Args:
        results: All results of the report.
    """
    scored = [collection for result in results for collection in result.collections]
    baselines = {each.name: each.parameters for collection in scored for each in collection.baselines}
    rules = {
        "Search": _search_rule(scored),
        "Missing results": "Means are over all judged queries. A query without results scores 0.",
        "Missing documents": _missing_rule(scored),
        "Ties": "Scores are compared as float32. Equal scores are ordered by document id, descending, as in trec_eval.",
        "Measures": "nDCG uses linear gains and an ideal ranking over all judged documents. A document is relevant from grade 1 on;"
        " a negative grade counts as 0. MAP is over the documents kept, MRR@10 over the first ten.",
        "Intervals": _interval_rule(scored),
        "Unjudged documents": "Judged@10 is the share of the first ten documents that were judged. Unjudged documents count as irrelevant:"
        " a score with a low share says little.",
        "A query's own document": _own_document_rule(scored),
        "Titles": _title_rule(scored),
        "Long texts": _truncation_rule(scored),
        "Averages": _average_rule(scored),
        "Domain": _domain_rule(scored),
        **{f"Baseline {name}": _settings(parameters) for name, parameters in sorted(baselines.items())},
    }
    return {about: rule for about, rule in rules.items() if rule}


def system_properties(result: Results) -> dict[str, str]:
    """The fields of a system and its machine; unknown ones are left out."""
    system, origin = result.system, result.provenance
    properties = {
        "Source": system.source,
        "Kind": system.kind,
        "Run by": system.library,
        "Fingerprint": system.fingerprint,
        "Vector width": system.dim,
        "Similarity": system.similarity,
        "Query length": _tokens(system, system.query_length),
        "Document length": _tokens(system, system.document_length),
        "Query prompt": system.query_prompt,
        "Document prompt": system.document_prompt,
        "Dtype": system.dtype,
        "Ranking": f"grouped by {system.group_by}: values of this field, each by its best passage" if system.group_by else "",
        "Index": "; ".join(dict.fromkeys(index_name(collection.index) for collection in result.collections)),
        "Date": origin.date,
        "Platform": origin.platform,
        "Threads": origin.threads,
        "Versions": ", ".join(f"{name} {version}" for name, version in sorted(origin.versions.items())),
    }
    return {name: str(value) for name, value in properties.items() if value not in (None, "")}


def _tokens(system: System, length: int | None) -> str | None:
    """A maximum length; None for BM25, which has none."""
    return None if length is None or system.kind == "bm25" else f"{length:,} tokens"


def _search_rule(scored: Sequence[CollectionResult]) -> str:
    depths = _depths(collection.k for collection in scored)
    combined = [collection.kept for collection in scored if collection.index.kind in ("fusion", "re-ranking")]
    fewer = f", the first {_depths(combined)} of a fusion or a re-ranking" if combined else ""
    inexact = _names(collection for collection in scored if collection.index.kind not in ("exact", "bm25", *COMBINED))
    how = (
        f"The search is approximate in {inexact}, where the overlap with exact search is reported; elsewhere it is exact."
        if inexact
        else "The search is exact."
    )
    given = _names(collection for collection in scored if collection.index.kind == "run")
    runs = f" A run was given for {given}; how it was searched is not known." if given else ""
    return (
        f"All documents of a collection are searched, and the first {depths} are kept for each query{fewer}. {how}{runs}" if scored else ""
    )


def _missing_rule(scored: Sequence[CollectionResult]) -> str:
    counts = {each.key: max(other.missing for other in scored if other.key == each.key) for each in scored if each.missing}
    listed = ", ".join(f"{count:,} judged {'document' if count == 1 else 'documents'} of {key}" for key, count in sorted(counts.items()))
    return f"Not among the documents searched: {listed}. They count as not found." if counts else ""


def _depths(numbers: Iterable[int]) -> str:
    return " or ".join(f"{number:,}" for number in sorted({*numbers}))


def _interval_rule(scored: Sequence[CollectionResult]) -> str:
    made = dict.fromkeys((each.interval.level, each.interval.resamples) for each in scored)
    return " ".join(
        f"An interval of {LABELS[HEADLINE]} holds {100 * level:g}% of the means of {resamples:,} bootstrap resamples of the queries."
        for level, resamples in made
    )


def _own_document_rule(scored: Sequence[CollectionResult]) -> str:
    excluding = _names(collection for collection in scored if collection.exclude_self)
    return f"A document with the query's own id is dropped before the cut in {excluding}." if excluding else "No document is excluded."


def _title_rule(scored: Sequence[CollectionResult]) -> str:
    untitled = _names(collection for collection in scored if not collection.use_title)
    joined = "A document's title and text are joined by a space"
    return f"{joined}, except in {untitled}, where titles are left out." if untitled else f"{joined}."


def _truncation_rule(scored: Sequence[CollectionResult]) -> str:
    cutting = _names(collection for collection in scored if collection.truncated.documents or collection.truncated.queries)
    counted = f" This happened in {cutting}; the table has the numbers." if cutting else ""
    unknown = _names(each for each in scored if None in (each.truncated.documents, each.truncated.queries))
    if unknown:
        counted += f" Of some systems on {unknown} the number is not known."
    return f"Texts longer than the model's maximum length are truncated at the end.{counted or ' There were no such texts.'}"


def _average_rule(scored: Sequence[CollectionResult]) -> str:
    if len({each.key for each in scored}) < 2:
        return ""
    rule = "An average is the unweighted mean over data sets. A group of collections counts once, as the mean over its parts."
    return f"{rule} An average is blank if a member is missing."


def _domain_rule(scored: Sequence[CollectionResult]) -> str:
    inside = _names(collection for collection in scored if collection.in_domain)
    stated = (
        f"Some systems were trained on the training data of {inside}; the table says which" if inside else "No system was trained on them"
    )
    return f"{stated}. This is what the caller of the evaluation stated; it cannot be checked."


def _settings(parameters: Mapping[str, object]) -> str:
    return describe_settings(parameters) + "."


def _names(collections: Iterable[CollectionResult]) -> str:
    """Collections by name; a whole group by the name of the group."""
    named = []
    for name, parts in grouped(collection.part() for collection in collections).items():
        named += [name] if is_whole(parts) else [part.key for part in parts]
    return ", ".join(sorted(named))
