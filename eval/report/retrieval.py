"""The report of retrieval results: scores, charts, worst queries, and everything that is needed to reproduce and compare them.

The tables of runs are data: a column with the function that makes its cell. The report adds no number that is not in ``results.json``,
except averages, sums and shares. Equal results give equal bytes.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TypeAlias

from quiver.encoder.errors import InputError
from quiver.encoder.files import check_utf8, write_text
from quiver.eval.metrics import grouped, is_whole
from quiver.eval.report.charts import Bar, Dot, Key, axis_top, bar_chart, interval, latency_chart, latency_limits
from quiver.eval.report.compare import (
    AVERAGE,
    LABELS,
    NOT_TESTED,
    Score,
    ScoredRow,
    Significance,
    check_data,
    collections_by_key,
    counted,
    members,
    points,
    row_average,
    row_data_sets,
    rows,
    system_keys,
)
from quiver.eval.report.compare import significance as test_significance
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
    Named,
    Results,
    ShownDocument,
    WorstQuery,
    describe_settings,
    index_name,
    label_systems,
    read_results,
    with_common_names,
)

COMBINED = ("run", "fusion", "re-ranking", "retriever")
"""Kinds of an index that are made of others, whose own overlap with exact search is not measured."""

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

TITLE = "Retrieval results"
"""Title of a report that is given none."""

SYSTEM = Column("System", numeric=False, wide=True)
COLLECTION = Column("Collection", numeric=False)


def _number(value: float | None, form: str) -> Cell:
    return Cell("") if value is None else Cell(format(value, form), float(value))


def _percent(share: float | None, digits: int = 1) -> Cell:
    return Cell("") if share is None else Cell(f"{100 * share:.{digits}f}", share)


def _count(number: int | None, of: int | None = None) -> Cell:
    return replace(_number(number, ","), note=f"{100 * number / of:.1f}%" if of and number else "")


RunColumns: TypeAlias = Sequence[tuple[Column, Callable[[CollectionResult], Cell]]]
"""Columns of a table with one row per run, and the cells in them."""

CONDITIONS: RunColumns = (
    (Column("Kept", "k"), lambda each: _count(each.kept)),
    (Column("Titles", numeric=False), lambda each: Cell("yes" if each.use_title else "no")),
    (Column("Own id excluded", numeric=False), lambda each: Cell("yes" if each.exclude_self else "no")),
    (Column("Domain", numeric=False), lambda each: Cell("in" if each.in_domain else "out")),
    (Column("Documents truncated"), lambda each: _count(each.truncated.documents, each.documents)),
    (Column("Queries truncated"), lambda each: _count(each.truncated.queries, each.queries)),
    (Column("No results", "queries"), lambda each: _count(each.unanswered)),
    (Column("Empty", "documents"), lambda each: _count(each.empty_texts)),
    (Column("Judged@10", "percent"), lambda each: _percent(each.judged)),
)

INDEX: RunColumns = (
    (Column("Index", numeric=False, wide=True), lambda each: Cell(index_name(each.index))),
    (Column(OVERLAPS[0], "percent of exact"), lambda each: _percent((each.index.recall or {}).get(OVERLAPS[0]), 2)),
    (Column(OVERLAPS[1], "percent of exact"), lambda each: _percent((each.index.recall or {}).get(OVERLAPS[1]), 2)),
    (Column("MiB"), lambda each: _number(None if each.index.bytes is None else each.index.bytes / 2**20, ",.1f")),
    (Column("ms per query"), lambda each: _number(each.index.query_milliseconds, ".3g")),
    (Column("Vectors reused"), lambda each: _count(each.cached, each.documents)),
)


def _seconds(scored: Iterable[CollectionResult]) -> RunColumns:
    taken = {step for each in scored for step in each.seconds}

    def overhead(each: CollectionResult) -> Cell:
        total = sum(each.seconds.values())
        return _percent(sum(each.seconds.get(step, 0.0) for step in OVERHEAD) / total if total > 0 else None, 2)

    def of_step(step: str) -> Callable[[CollectionResult], Cell]:
        return lambda each: _number(each.seconds.get(step), ",.2f")

    return (
        *((Column(name), of_step(step)) for step, name in STEPS.items() if step not in ("fuse", "rerank") or step in taken),
        (Column("Total"), lambda each: _number(sum(each.seconds.values()), ",.2f")),
        (Column("Overhead", "percent"), overhead),
    )


def run_table(name: str, columns: RunColumns, scored: Iterable[tuple[Key, CollectionResult]]) -> Table:
    """A table with one row per run, named by its collection and system."""
    lines = (Row((Cell(each.key), Cell(key.label, key=key), *(cell(each) for _, cell in columns))) for key, each in scored)
    return Table(name, (COLLECTION, SYSTEM, *(column for column, _ in columns)), tuple(lines))


@dataclass(frozen=True)
class _Content:
    """What several parts of a report need."""

    named: Named
    failed: Sequence[FailedCollection]
    rows: Sequence[ScoredRow]
    collections: Mapping[str, CollectionResult]
    members: Mapping[str, Sequence[str]]
    keys: Mapping[str, Key]
    links: Mapping[tuple[str, str], str]  # label and collection -> section with the command of the score
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

    @property
    def groups(self) -> dict[str, Sequence[str]]:
        """Groups of collections, with their parts."""
        return {name: keys for name, keys in self.members.items() if name not in self.collections}

    def heading(self, name: str) -> tuple[str, str]:
        """A data set with its split, or with the number of parts that it is the mean of."""
        if name in self.collections:
            return self.collections[name].name, self.collections[name].split
        return name, f"mean of {self.collections[self.members[name][0]].group_size}"

    def system(self, label: str) -> Cell:
        return Cell(label, key=self.keys[label])

    def score(self, label: str, key: str, score: Score | None) -> Cell:
        if score is None:
            return Cell("")
        value, ends = score.measures.get(HEADLINE), interval(score.interval.low, score.interval.high)
        return Cell(points(value), value, ends, self.links[label, key], better_than=self.better_than(label, key))


def _gather_content(results: Sequence[Results], significance: Significance) -> _Content:
    results = with_common_names(results)
    check_data(results)
    named = label_systems(results)
    scored = rows(named)
    collections = collections_by_key([result for _, result in named])
    failed = {each.key: each for result in results for each in result.failed if each.key not in collections}
    links: dict[tuple[str, str], str] = {}
    numbered = [(f"result-{position}", label, result) for position, (label, result) in enumerate(named, start=1)]
    links |= {(label, each.key): anchor for anchor, label, result in numbered for each in result.collections}
    for anchor, _, result in numbered:  # for a baseline, the command of the first result that has it
        for collection in result.collections:
            for baseline in collection.baselines:
                links.setdefault((baseline.name, collection.key), anchor)
    sets, keys = members(collections.values()), system_keys(scored, named)
    return _Content(named, list(failed.values()), scored, collections, sets, keys, links, significance)


def results_report(results: Sequence[Results], *, title: str = TITLE, significance: Significance = NOT_TESTED) -> Report:
    """Make the report of one or more systems, in the order of the tables' rows; baselines come first."""
    content = _gather_content(results, significance)
    collections = tuple(_collection_section(content, position, key) for position, key in enumerate(content.collections, start=1))
    overlap = Paragraph("Overlap is with exact search over the same vectors. The time per query is that of the search alone.")
    time = Paragraph(
        "Wall-clock time in seconds. BM25 builds its index in the search step. Overhead is the share of building the index,"
        " reading, scoring and writing."
    )
    seconds = run_table("Seconds by step", _seconds(each for _, each in content.scored), content.scored)
    conditions = run_table("How each run was made", CONDITIONS, content.scored)
    parts = (
        Section("nDCG@10", tuple(_score_blocks(content)), "scores"),
        Section("Bars with intervals", tuple(_chart_blocks(content)), "charts"),
        *_latency_sections(content),
        Section("Collections", collections, "collections"),
        Section("Protocol", (Properties(protocol(results), "rules"), conditions), "protocol"),
        Section("Indexes", (overlap, run_table("The index of each run", INDEX, content.scored)), "indexes"),
        Section("Time", (time, seconds), "seconds"),
        Section("Systems and commands", tuple(_system_sections(content)), "systems"),
    )
    days = sorted({result.provenance.date[:10] for result in results})
    dates = days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"
    lead = f"{counted(len(content.keys), 'system')} on {counted(len(content.collections), 'collection')}"
    lead += f", which make {counted(len(content.members), 'data set')}" if len(content.collections) != len(content.members) else ""
    return Report(title, parts, f"{lead}. Evaluated {dates}.")


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
    check_data(read)
    folders = [each for each in results if not isinstance(each, Results)]
    # Results alone do not say where their scores per query are.
    tested = test_significance(folders, read) if len(folders) == len(read) else NOT_TESTED
    for path, suffix in suffixes.items():
        if suffix == ".tex":
            report, comments = latex_report(read, title=title, significance=tested)
            write_text(path, render_latex(report, comments=comments))
        else:
            write(results_report(read, title=title or TITLE, significance=tested), path)
        if len(folders) == len(results):
            begin, end = _COMMENTS[suffix]
            note = json.dumps([os.path.relpath(each, path.parent) for each in folders])
            note = note.replace(">", "\\u003e")  # an arrow would end the comment
            write_text(path, f"{path.read_text(encoding='utf-8')}{begin}{_FOLDERS}{note}{end}\n")


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
    """Make the table for a paper: nDCG@10 of systems on data sets; and comments that say how to reproduce it."""
    content = _gather_content(results, significance)
    rules = protocol(results)
    caption = " ".join(rules[about] for about in CAPTIONED if about in rules)
    comments = [f"{each.key}: revision {each.revision or 'none'}, sha256 {each.data_sha256}" for each in content.collections.values()]
    comments += [f"{label}: {result.provenance.command or 'made without a command line'}" for label, result in content.named]
    comments += [f"{each.key}: not evaluated: {each.reason}" for each in content.failed]
    name = f"{LABELS[HEADLINE]} in points"
    return Report(title or TITLE, (_headline_table(content, f"{title}: {name}" if title else name, caption),)), comments


def _score_blocks(content: _Content) -> Iterator[Block]:
    intervals = dict.fromkeys((each.interval.level, each.interval.resamples) for row in content.rows for each in row.scores.values())
    small = ["Bold is the highest of a column, underlined the second"] * (len(content.rows) > 1)
    small += [f"small figures are the {100 * level:g}% bootstrap interval over queries ({n:,} resamples)" for level, n in intervals]
    marks = "; ".join(small)
    sentences = (
        "In points, hundredths of 1.",
        marks and f"{marks[0].upper()}{marks[1:]}.",
        "An average is blank where a data set is missing." if content.averaged else "",
        "In HTML, a score links to the command that made it.",
    )
    yield Paragraph(" ".join(filter(None, sentences)))
    for each in content.failed:
        yield Paragraph((Span("Not evaluated:", "strong"), f" {each.key}: {each.reason}"))
    yield _headline_table(content, "nDCG@10 of systems on data sets", "")
    for group, keys in content.groups.items():
        lines = tuple(
            Row((content.system(row.label), *(content.score(row.label, key, row.scores.get(key)) for key in keys)))
            for row in content.rows
            if not row.scores.keys().isdisjoint(keys)
        )
        columns = (SYSTEM, *(Column(*content.heading(key), ranked=True) for key in keys))
        parts = _refer_to_first(Table(f"nDCG@10 on the parts of {group}", columns, lines))
        yield Details(f"The parts of {group}, which counts once, as their mean", (parts,))


def _headline_table(content: _Content, name: str, caption: str) -> Table:
    """Scores of rows on data sets; the caption begins with what superscripts mean, if scores could be tested."""
    systems = {label for label, _ in content.named}
    lines = []
    for row in content.rows:
        sets = row_data_sets(row, content.collections)
        cells = [_data_set_cell(content, row, each, sets.get(each)) for each in content.members]
        if content.averaged:
            mean = row_average(row, content.collections, failed=content.failed)
            better = content.better_than(row.label, AVERAGE)
            cells.insert(0, Cell(points(mean.value), mean.value, f"{mean.known} of {mean.members}", better_than=better))
        lines.append(Row((content.system(row.label), *cells), group="systems" if row.label in systems else "baselines"))
    columns = [Column("Average", "of data sets", ranked=True)] * content.averaged
    columns += [Column(*content.heading(each), ranked=True) for each in content.members]
    caption = " ".join(filter(None, (content.significance.method, caption)))
    return Table(name, (SYSTEM, *columns), tuple(lines), caption, "retrieval")


def _data_set_cell(content: _Content, row: ScoredRow, name: str, value: float | None) -> Cell:
    if name in content.collections:
        return content.score(row.label, name, row.scores.get(name))
    known = [key for key in content.members[name] if key in row.scores]
    note = "" if value is not None or not known else f"{len(known)} of {content.collections[known[0]].group_size}"
    return Cell(points(value), value, note, better_than=content.better_than(row.label, name))


def _refer_to_first(made: Table) -> Table:
    """A later table, which need not say again what superscripts mean."""
    return replace(made, caption="Superscripts: see the first table.") if made.lettered else made


def _chart_blocks(content: _Content) -> Iterator[Block]:
    """One chart per data set, all on one axis; none for a group that no system has whole."""
    scores = [score for row in content.rows for score in row.scores.values()]
    top = axis_top(max((max(score.interval.high, score.measures.get(HEADLINE, 0.0)) for score in scores), default=1.0))
    scale = ", all charts on one scale" if len(content.members) > 1 else ""
    mean = "; a mean over a group has none" if content.groups else ""
    yield Paragraph(f"nDCG@10 in points{scale}. The line on a bar is its interval{mean}.")
    yield Gallery(tuple(_bar_figures(content, content.members, top)))
    for group, keys in content.groups.items():
        yield Details(f"The parts of {group}", (Gallery(tuple(_bar_figures(content, keys, top))),))


def _bar_figures(content: _Content, names: Iterable[str], top: float) -> Iterator[Figure]:
    for name in names:
        bars = []
        for row in content.rows:
            score = row.scores.get(name)
            value = row_data_sets(row, content.collections).get(name) if score is None else score.measures.get(HEADLINE)
            ends = (None, None) if score is None else (score.interval.low, score.interval.high)
            bars += [] if value is None else [Bar(content.keys[row.label], value, *ends)]
        if bars:
            title, note = content.heading(name)
            values = ", ".join(f"{bar.key.label} {points(bar.value)}" for bar in bars)
            yield Figure(title, partial(bar_chart, bars, top), f"nDCG@10 on {title}: {values}", note)


def _latency_sections(content: _Content) -> Iterator[Section]:
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

    def gallery(names: Iterable[str], keys: tuple[Key, ...] = ()) -> Gallery:
        figures = []
        for name in names:
            title, note = content.heading(name)
            values = ", ".join(f"{dot.key.label} {points(dot.value)} at {dot.milliseconds:.3g}" for dot in timed[name])
            alt = f"{label}, over milliseconds of search per query on {title}: {values}"
            figures.append(Figure(title, partial(latency_chart, timed[name], limits, label), alt, note))
        return Gallery(tuple(figures), keys)

    keys = tuple(key for key in content.keys.values() if any(dot.key == key for dot in every))
    absent = ", ".join(key.label for key in content.keys.values() if key not in keys)
    how = (
        "The share of exact search's first ten documents that an index finds." if approximate
        else "No index was approximate, so the charts show nDCG@10 instead of recall."
    )  # fmt: skip
    how += " The horizontal axis is the search time per query without encoding, all queries in one call."
    how += " All charts share their axes." if len(timed) > 1 else ""
    how += f" Without a point, because this time was not measured apart: {absent}." if absent else ""
    yield Paragraph(how + (" A ring is exact search, which finds all." if approximate else ""))
    inside = {key for keys in content.groups.values() for key in keys}
    yield gallery((name for name in timed if name not in inside), keys)
    for group, parts in content.groups.items():
        if not timed.keys().isdisjoint(parts):
            yield Details(f"The parts of {group}", (gallery(name for name in timed if name in parts),))


def _collection_section(content: _Content, position: int, key: str) -> Section:
    result = content.collections[key]
    lines = []
    for row in content.rows:
        if score := row.scores.get(key):
            others = [
                Cell(points(value := score.measures.get(name)), value, better_than=content.better_than(row.label, key, name))
                for name in LABELS
                if name != HEADLINE
            ]
            lines.append(Row((content.system(row.label), content.score(row.label, key, score), *others, _percent(score.judged))))
    columns = (SYSTEM, *(Column(label, ranked=True) for label in LABELS.values()), Column("Judged@10", "percent"))
    measured = _refer_to_first(Table(f"Measures on {key}", columns, tuple(lines)))
    own = [(system, each) for system, each in content.scored if each.key == key]
    cautions = [Paragraph(f"{system.label}: {each.caution}.") for system, each in own if each.caution]
    worst = [block for system, each in own for block in _worst_blocks(system, each)]
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
    return Section(result.name, (shown, measured, *cautions, *worst), f"collection-{position}", result.split)


def _worst_blocks(system: Key, result: CollectionResult) -> Iterator[Block]:
    """The worst queries of a system; those with the best possible score teach nothing."""
    below = [query for query in result.worst if not math.isclose(query.score, 1.0, abs_tol=1e-9)]
    if below:
        examples = Examples(tuple(_example(query, result.kept) for query in below))
        heading = f"{system.label}: {len(below):,} worst {'query' if len(below) == 1 else 'queries'}"
        yield Details(heading, (examples,), system)
    elif math.isclose(result.measures[HEADLINE], 1.0, abs_tol=1e-9):
        yield Paragraph(f"{system.label}: no query is below the best possible {LABELS[HEADLINE]}.")


def _example(worst: WorstQuery, k: int) -> Example:
    marks = (Span(f"nDCG@10 {points(worst.score)}", "mark"), Span(counted(worst.relevant, "relevant document"), "mark"))
    sides = {"Found first": worst.found, "Relevant": worst.wanted}
    return Example(worst.query, worst.text, marks, {name: tuple(_excerpt(each, k) for each in shown) for name, shown in sides.items()})


def _excerpt(document: ShownDocument, k: int) -> Excerpt:
    marks = [Span(f"not in the first {k:,}" if document.rank is None else f"rank {document.rank:,}", "mark")]
    if document.score is not None:
        marks.append(Span(f"score {document.score:.4f}", "mark"))
    if document.grade is None:
        marks.append(Span("not judged", "mark"))
    else:
        marks.append(Span(f"✓ grade {document.grade}", "good") if document.grade >= 1 else Span(f"✗ grade {document.grade}", "poor"))
    matches = tuple((match.query_token, match.document_token, match.similarity) for match in document.matches)
    return Excerpt(tuple(marks), document.id, document.text, matches)


def _system_sections(content: _Content) -> Iterator[Section]:
    for position, (label, result) in enumerate(content.named, start=1):
        command = result.provenance.command
        how = Paragraph("Made by a call of the library, without a command line.") if command is None else Code(command)
        files = files_table(result)
        folded = [] if files is None else [Details(files.name, (files,))]
        yield Section(label, (how, Properties(system_properties(result)), *folded), f"result-{position}", key=content.keys[label])


def files_table(result: Results) -> Table | None:
    """The files that a result names; None if none were written."""
    lines = [
        Row((Cell(each.key), Cell(content), Cell(reference.file), Cell(reference.sha256)))
        for each in result.collections
        for content, reference in (("run", each.run), ("scores by query", each.per_query), ("queries", each.query_texts))
        if reference is not None
    ]
    columns = (COLLECTION, *(Column(name, numeric=False, wide=name == "sha256") for name in ("Content", "File", "sha256")))
    return Table("Files beside results.json", columns, tuple(lines)) if lines else None


def system_properties(result: Results) -> dict[str, str]:
    """The fields of a system and its machine; unknown ones are left out."""
    system, origin = result.system, result.provenance

    def tokens(length: int | None) -> str | None:
        return None if length is None or system.kind == "bm25" else f"{length:,} tokens"  # BM25 has no maximum

    properties = {
        "Source": system.source,
        "Kind": system.kind,
        "Run by": system.library,
        "Fingerprint": system.fingerprint,
        "Vector width": system.dim,
        "Similarity": system.similarity,
        "Query length": tokens(system.query_length),
        "Document length": tokens(system.document_length),
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


def protocol(results: Sequence[Results]) -> dict[str, str]:
    """Rules by which the numbers of a report were computed: topic -> sentences."""
    scored = [collection for result in results for collection in result.collections]
    baselines = {each.name: each.parameters for collection in scored for each in collection.baselines}
    excluding = _names(each for each in scored if each.exclude_self)
    untitled = _names(each for each in scored if not each.use_title)
    inside = _names(each for each in scored if each.in_domain)
    absent = {each.key: max(other.missing for other in scored if other.key == each.key) for each in scored if each.missing}
    listed = ", ".join(f"{count:,} judged {'document' if count == 1 else 'documents'} of {key}" for key, count in sorted(absent.items()))
    intervals = dict.fromkeys((each.interval.level, each.interval.resamples) for each in scored)
    rules = {
        "Search": _search_rule(scored) if scored else "",
        "Missing results": "Means are over all judged queries. A query without results scores 0.",
        "Missing documents": f"Not among the documents searched: {listed}. They count as not found." if absent else "",
        "Ties": "Scores are compared as float32. Equal scores are ordered by document id, descending, as in trec_eval.",
        "Measures": "nDCG uses linear gains and an ideal ranking over all judged documents. A document is relevant from grade 1 on;"
        " a negative grade counts as 0. MAP is over the documents kept, MRR@10 over the first ten.",
        "Intervals": " ".join(
            f"An interval of {LABELS[HEADLINE]} holds {100 * level:g}% of the means of {resamples:,} bootstrap resamples of the queries."
            for level, resamples in intervals
        ),
        "Unjudged documents": "Judged@10 is the share of the first ten documents that were judged. Unjudged documents count as irrelevant:"
        " a score with a low share says little.",
        "A query's own document": f"A document with the query's own id is dropped before the cut in {excluding}."
        if excluding
        else "No document is excluded.",
        "Titles": "A document's title and text are joined by a space"
        + (f", except in {untitled}, where titles are left out." if untitled else "."),
        "Long texts": _truncation_rule(scored),
        "Averages": "An average is the unweighted mean over data sets. A group of collections counts once, as the mean over its parts."
        " An average is blank if a member is missing."
        if len({each.key for each in scored}) > 1
        else "",
        "Domain": (
            f"Some systems were trained on the training data of {inside}; the table says which"
            if inside
            else "No system was trained on them"
        )
        + ". This is what the caller of the evaluation stated; it cannot be checked.",
        **{f"Baseline {name}": f"{describe_settings(parameters)}." for name, parameters in sorted(baselines.items())},
    }
    return {about: rule for about, rule in rules.items() if rule}


def _search_rule(scored: Sequence[CollectionResult]) -> str:
    def depths(numbers: Iterable[int]) -> str:
        return " or ".join(f"{number:,}" for number in sorted({*numbers}))

    combined = [each.kept for each in scored if each.index.kind in ("fusion", "re-ranking")]
    fewer = f", the first {depths(combined)} of a fusion or a re-ranking" if combined else ""
    inexact = _names(each for each in scored if each.index.kind not in ("exact", "bm25", *COMBINED))
    how = f"approximate in {inexact}, where the overlap with exact search is reported; elsewhere it is exact" if inexact else "exact"
    given = _names(each for each in scored if each.index.kind == "run")
    runs = f" A run was given for {given}; how it was searched is not known." if given else ""
    kept = depths(each.k for each in scored)
    return f"All documents of a collection are searched, and the first {kept} are kept for each query{fewer}. The search is {how}.{runs}"


def _truncation_rule(scored: Sequence[CollectionResult]) -> str:
    cutting = _names(each for each in scored if each.truncated.documents or each.truncated.queries)
    counted = f" This happened in {cutting}; the table has the numbers." if cutting else ""
    if unknown := _names(each for each in scored if None in (each.truncated.documents, each.truncated.queries)):
        counted += f" Of some systems on {unknown} the number is not known."
    return f"Texts longer than the model's maximum length are truncated at the end.{counted or ' There were no such texts.'}"


def _names(collections: Iterable[CollectionResult]) -> str:
    """Collections by name; a whole group by the name of the group."""
    named = []
    for name, parts in grouped(collection.part() for collection in collections).items():
        named += [name] if is_whole(parts) else [part.key for part in parts]
    return ", ".join(sorted(named))
