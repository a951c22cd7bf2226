"""Results in the tables of the ModernBERT paper: its published rows, the measured rows, and their difference.

Columns are matched by the name of the collection (or of its group) and by the split; results of ``quiver glue`` have rows in Tables 1 and
5. All cells are in points. Every number is from ``results.json`` or from `quiver.eval.published`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeAlias

from quiver.encoder.errors import InputError
from quiver.encoder.files import check_utf8, read_json
from quiver.eval.metrics import average, data_sets
from quiver.eval.published import (
    BM25_FLAT,
    BM25_SOURCE,
    CODE,
    GLUE_COLUMNS,
    GLUE_SOURCE,
    LONG_TEXT,
    MSMARCO_NOTE,
    OVERVIEW_COLUMNS,
    RETRIEVAL_SOURCE,
    TABLE_1,
    TABLE_5,
    TABLE_7,
    TABLE_8,
    BeirTable,
    Column,
    PublishedRow,
)
from quiver.eval.report.charts import Key
from quiver.eval.report.compare import NOT_TESTED, ScoredRow, Significance, check_data, collections_by_key, members, rows, system_keys
from quiver.eval.report.compare import significance as test_significance
from quiver.eval.report.formats import Cell, Report, Row, RowKind, Section, Table, check_format, write
from quiver.eval.report.formats import Column as TableColumn
from quiver.eval.results import FILE, HEADLINE, CollectionResult, Results, label_systems, read_results

Kind: TypeAlias = Literal["dense", "colbert", "bm25"]
"""Kind of a system."""

BEIR_TABLES: Mapping[Kind, BeirTable] = {"dense": TABLE_7, "colbert": TABLE_8}
"""Kind of a system -> its table in the paper."""


@dataclass(frozen=True)
class Line:
    """A row of a layout."""

    label: str
    cells: tuple[float | None, ...]  # points; None is blank
    measured: str  # how many of the collections were measured; empty for a published row
    origin: Literal["paper", "floor", "measured", "difference"]  # a floor is published, of another source
    key: Key | None = None  # letter of a measured system in superscripts; None if the table has none
    data_sets: tuple[str, ...] = ()  # by column, the data set or average by which a measured figure was tested
    better_than: tuple[tuple[str, ...], ...] = ()  # by column, letters of the systems that it is significantly better than


@dataclass(frozen=True)
class Layout:
    """A table of the paper with measured rows in it."""

    name: str
    title: str
    columns: tuple[str, ...]
    lines: tuple[Line, ...]
    notes: tuple[str, ...]


@dataclass(frozen=True)
class _Measured:
    """The measured scores, by row and column of the paper."""

    rows: tuple[ScoredRow, ...]
    kinds: Mapping[str, Kind]
    collections: Mapping[str, CollectionResult]
    against: str | None
    significance: Significance
    letters: Mapping[str, Key]

    def of(self, *kinds: Kind) -> list[ScoredRow]:
        return [row for row in self.rows if self.kinds[row.label] in kinds]

    def keys(self, row: ScoredRow, column: Column) -> list[str]:
        """The collections of a row that belong to a column: one, or the parts of a group."""
        scored = [key for key in row.scores if HEADLINE in row.scores[key].measures]
        for split in column.splits:
            found = [key for key in scored if self.collections[key].split == split]
            named = [key for key in found if self.collections[key].name == column.data_set]
            if keys := named or [key for key in found if self.collections[key].group == column.data_set]:
                return keys
        return []

    def score(self, row: ScoredRow, column: Column) -> float | None:
        """The score as a fraction; None if the collection, or a part of the group, was not measured."""
        parts = []
        for key in self.keys(row, column):
            collection, value = self.collections[key], row.scores[key].measures[HEADLINE]
            alone = collection.name == column.data_set
            parts.append(replace(collection.part(value), group=None, group_size=1) if alone else collection.part(value))
        return next(iter(data_sets(parts).values()), None)

    def data_set(self, row: ScoredRow, column: Column) -> str:
        """The data set of a row in a column; empty if the row lacks a part of it."""
        keys = self.keys(row, column)
        whole = (name for name, parts in members(self.collections.values()).items() if set(parts) == set(keys))
        return next(whole, keys[0] if len(keys) == 1 else "")

    def average(self, row: ScoredRow, paper: BeirTable) -> str:
        """The average of a row over a table, if its data sets are those that were averaged in the test."""
        tested = averages(self.collections).get(_average_name(paper), [])
        return _average_name(paper) if tested == [self.data_set(row, column) for column in paper.columns] else ""

    def marked(self, lines: Sequence[Line]) -> tuple[Line, ...]:
        """The lines of a table with superscripts: a figure is compared with those of the same data set in its column."""
        own = [(line, line.key) for line in lines if line.origin == "measured" and line.key]

        def letters(line: Line, place: int, name: str) -> tuple[str, ...]:
            worse = self.significance.better.get((name, HEADLINE, line.key.label if line.key else ""), ())
            shown = [(other, key) for other, key in own if other.cells[place] is not None and other.data_sets[place] == name]
            return tuple(key.letter for _, key in shown if key.label in worse)

        found = [tuple(letters(line, place, name) for place, name in enumerate(line.data_sets if line.key else ())) for line in lines]
        if not any(better for each in found for better in each):
            return tuple(replace(line, key=None) for line in lines)
        return tuple(replace(line, better_than=better) for line, better in zip(lines, found, strict=True))

    def rule(self, lines: Sequence[Line]) -> Iterator[str]:
        """What superscripts say, for a table in which several rows were tested."""
        if self.significance.method and sum(line.origin == "measured" for line in lines) > 1:
            yield f"{self.significance.method} Published rows have no scores per query: nothing is tested against them."

    def in_domain(self, row: ScoredRow, column: Column) -> bool:
        return any(row.scores[key].in_domain for key in self.keys(row, column))


def _average_name(paper: BeirTable) -> str:
    return f"average of Table {paper.number}"


def averages(collections: Mapping[str, CollectionResult]) -> dict[str, list[str]]:
    """Averages of the paper's tables over data sets of the results; those that lack a data set are left out."""
    sets = {name: collections[keys[0]] for name, keys in members(collections.values()).items()}

    def data_set_of(column: Column) -> str:
        ordered = [(split, name) for split in column.splits for name, each in sets.items() if column.data_set in (each.name, each.group)]
        return next((name for split, name in ordered if sets[name].split == split), "")

    found = {_average_name(paper): list(map(data_set_of, paper.columns)) for paper in BEIR_TABLES.values()}
    return {name: names for name, names in found.items() if all(names)}


GLUE_SCHEMA = "quiver-glue/1"
"""Schema of ``results.json`` of ``quiver glue``."""

GLUE_NOTES = (
    "Points: Matthews' correlation for CoLA, Spearman's for STS-B, accuracy for the others; MNLI is the matched half. Published rows:"
    f" {GLUE_SOURCE}. The average is over the eight tasks, and blank if one is missing.",
    "The paper does not name its measures: judging by size, QQP and MRPC scores are accuracies, except those of GTE-en-MLM, which are F1.",
    "All scores, published and measured, are on the development sets that the best checkpoint was chosen on.",
)

GlueContent: TypeAlias = Mapping[str, Any]
"""Content of ``results.json`` of ``quiver glue``."""


def glue_layout(measured: Sequence[GlueContent]) -> Layout:
    """Table 5 of the paper with a row for each measured model."""
    from quiver.eval.nlu.glue_tasks import TASKS

    lines = [Line(row.name, (*row.scores.values(), row.average), "", "paper") for row in TABLE_5]
    for content in measured:
        scores = [content["runs"][task]["scores"]["score"] if task in content["runs"] else None for task in TASKS]
        cells = tuple(map(_points, (*scores, content["average"]["value"])))
        lines.append(Line(_glue_label(content), cells, _count_tasks(content), "measured"))
    return Layout("table5", "GLUE, development sets (Table 5 of the paper)", (*GLUE_COLUMNS, "Average"), tuple(lines), GLUE_NOTES)


def _glue_label(content: GlueContent) -> str:
    return f"{content['model']} ({content['name']})"


def _count_tasks(content: GlueContent) -> str:
    return f"{content['average']['known']} of {content['average']['members']}"


def paper_report(layouts: Sequence[Layout]) -> Report:
    """Make the report of layouts."""
    note = "Grey rows are published, the others are measured."
    return Report("Retrieval results beside the ModernBERT paper", tuple(map(layout_section, layouts)), note)


def layout_section(layout: Layout) -> Section:
    """Heading, table and notes of a layout."""
    columns = (TableColumn("System", numeric=False, wide=True), *(TableColumn(title, ranked=True) for title in layout.columns))
    rows = tuple(
        Row(
            (
                Cell(line.label, key=line.key and replace(line.key, label=line.label)),
                *(
                    Cell(shown(line, cell), cell, better_than=better)
                    for cell, better in zip(line.cells, line.better_than or [()] * len(line.cells), strict=True)
                ),
                Cell(line.measured),
            ),
            KINDS[line.origin],
            _group_of(line),
        )
        for line in layout.lines
    )
    measured = TableColumn("Measured", numeric=False)
    made = Table(layout.title, (*columns, measured), rows, " ".join(layout.notes), layout.name)
    return Section(layout.title, (made,), layout.name)


KINDS: Mapping[str, RowKind] = {"paper": "published", "floor": "published", "measured": "measured", "difference": "difference"}
"""Origin of a line -> kind of its row."""


def _group_of(line: Line) -> str:
    if line.origin == "paper":
        return line.label.rpartition("-")[2]
    return "floor" if line.origin == "floor" else "measured"


def shown(line: Line, cell: float | None) -> str:
    """Print a cell with one decimal, as in the paper; a difference has a sign."""
    if cell is None:
        return ""
    rounded = round(cell, 1) + 0.0  # no "-0.0"
    return f"{rounded:+.1f}" if line.origin == "difference" else f"{rounded:.1f}"


def paper_layouts(
    results: Sequence[Results],
    *,
    against: str | None = None,
    significance: Significance = NOT_TESTED,
    glue: Sequence[GlueContent] = (),
) -> list[Layout]:
    """The paper's tables with measured rows: 7 for dense systems, 8 for ColBERT models, both for BM25 alone, 5 for GLUE, 1 always."""
    names = [row.name for row in TABLE_1]
    if against is not None and against not in names:
        raise InputError(f"the paper has no row {against!r}; choose one of {', '.join(names)}")
    if results or not glue:
        check_data(results)
    named = label_systems(results)
    kinds: dict[str, Kind] = {}
    for label, result in named:
        kind = result.system.kind
        if kind not in ("dense", "colbert", "bm25"):
            raise InputError(f"{label}: the paper's tables have rows of models and of BM25; leave out this {kind}")
        kinds[label] = kind
    lines = rows(named)
    measured = _Measured(
        tuple(lines),
        {row.label: kinds.get(row.label, "bm25") for row in lines},
        collections_by_key(results),
        against,
        significance,
        system_keys(lines, named),
    )
    _check_placed(measured, [label for label, _ in named])
    layouts = [
        _beir_layout(measured, paper, kind)
        for kind, paper in BEIR_TABLES.items()
        if kind in measured.kinds.values() or set(measured.kinds.values()) == {"bm25"}
    ]
    return [*layouts, *([glue_layout(glue)] if glue else []), _overview_layout(measured, glue)]


def _check_placed(measured: _Measured, systems: Sequence[str]) -> None:
    for row in measured.rows:
        if row.label in systems and not _overview_cells(measured, row)[1]:
            raise InputError(
                f"{row.label}: no table of the paper has a column for {', '.join(row.scores)}; leave these results out, or write the report"
                " with --layout results"
            )


def _beir_layout(measured: _Measured, paper: BeirTable, kind: Kind) -> Layout:
    titles = tuple(column.title for column in paper.columns)
    floor = tuple(BM25_FLAT.get(column.data_set) for column in paper.columns)
    lines = [Line(row.name, (*row.scores.values(), row.average), "", "paper") for row in paper.rows]
    lines.append(Line("BM25 (pyserini)", (*floor, None), "", "floor"))
    used, absent = [], []
    for row in measured.of("bm25", kind):
        scores = {column.title: _points(measured.score(row, column)) for column in paper.columns}
        mean = average(scores, titles)
        if not mean.known:
            absent.append(row.label)
            continue
        used += [key for column in paper.columns for key in measured.keys(row, column)]
        tested = (*(measured.data_set(row, column) for column in paper.columns), measured.average(row, paper))
        count = f"{mean.known} of {mean.members}"
        lines.append(Line(row.label, (*scores.values(), mean.value), count, "measured", measured.letters[row.label], tested))
        lines += _difference_lines(lines[-1], measured, paper.rows)
    notes = [
        f"nDCG@10 in points. Published rows: {RETRIEVAL_SOURCE}; {BM25_SOURCE}. The average is over all {len(titles)} data sets and blank"
        " if one is missing; CQADupstack is the mean of its forums and counts once.",
        MSMARCO_NOTE,
        *measured.rule(lines),
        *_list_remarks(measured, used, absent),
    ]
    title = f"BEIR, {paper.what} (Table {paper.number} of the paper)"
    return Layout(f"table{paper.number}", title, (*titles, "Average"), measured.marked(lines), tuple(notes))


def _overview_layout(measured: _Measured, glue: Sequence[GlueContent]) -> Layout:
    lines = [Line(row.name, tuple(row.scores.values()), "", "paper") for row in TABLE_1]
    used, absent = [], []
    for row in measured.rows:
        cells, counts = _overview_cells(measured, row)
        if not counts:
            absent.append(row.label)
            continue
        columns = (*TABLE_7.columns, *TABLE_8.columns, LONG_TEXT, *CODE)
        used += [key for column in columns for key in measured.keys(row, column)]
        tested = {f"{kind} BEIR": measured.average(row, paper) for kind, paper in (("DPR", TABLE_7), ("ColBERT", TABLE_8))}
        tested |= {title: measured.data_set(row, LONG_TEXT) for title in OVERVIEW_COLUMNS if LONG_TEXT.title in title}
        tested |= {column.title: measured.data_set(row, column) for column in CODE}
        lines.append(
            Line(
                row.label,
                tuple(cells.get(title) for title in OVERVIEW_COLUMNS),
                ", ".join(counts),
                "measured",
                measured.letters[row.label],
                tuple(tested.get(title, "") for title in OVERVIEW_COLUMNS),
            )
        )
        lines += _difference_lines(lines[-1], measured, TABLE_1)
    for content in glue:
        points = _points(content["average"]["value"])
        whole = tuple(points if title == "GLUE" else None for title in OVERVIEW_COLUMNS)
        lines.append(Line(_glue_label(content), whole, f"GLUE {_count_tasks(content)}", "measured"))
        lines += _difference_lines(lines[-1], measured, TABLE_1)
    notes = [
        f"nDCG@10 in points; GLUE is the average of Table 5, in rows of its own. Published rows: {RETRIEVAL_SOURCE}. BEIR is the average of"
        " Table 7 or 8, blank unless it is whole. MLDR is English and searched in all of its documents; ID models were trained on its"
        " training data and OOD models were not, for measured rows as stated by the caller of the evaluation. CSN is the mean of CoIR's six"
        " languages, code to text, and SQA is CoIR's StackOverflow-QA; the published ones are of single-vector models.",
        *measured.rule(lines),
        *_list_remarks(measured, used, absent),
    ]
    return Layout("table1", "All tasks (Table 1 of the paper)", OVERVIEW_COLUMNS, measured.marked(lines), tuple(notes))


def _overview_cells(measured: _Measured, row: ScoredRow) -> tuple[dict[str, float | None], list[str]]:
    """Column -> points, and how much was measured of the columns that need several collections."""
    kind = measured.kinds[row.label]
    cells: dict[str, float | None] = {}
    counts: list[str] = []
    for prefix, paper in (("DPR", TABLE_7), ("ColBERT", TABLE_8)):
        if kind == ("colbert" if prefix == "DPR" else "dense"):
            continue
        mean = average({column.title: measured.score(row, column) for column in paper.columns}, [each.title for each in paper.columns])
        cells[f"{prefix} BEIR"] = _points(mean.value)
        counts += [f"{prefix} BEIR {mean.known} of {mean.members}"] * bool(mean.known)
        cells[f"{prefix} MLDR {_domain_of(measured, row, LONG_TEXT)}"] = _points(measured.score(row, LONG_TEXT))
    for column in (LONG_TEXT, *CODE):
        keys = measured.keys(row, column)
        sizes = {1 if measured.collections[key].name == column.data_set else measured.collections[key].group_size for key in keys}
        counts += [f"{column.title} {len(keys)} of {size}" for size in sizes]
    cells |= {column.title: _points(measured.score(row, column)) for column in CODE}
    return cells, counts


def _difference_lines(line: Line, measured: _Measured, published: Sequence[PublishedRow]) -> Iterator[Line]:
    """The line of a system minus the published row; nothing if the table has no such row."""
    if measured.against is None or measured.kinds.get(line.label) == "bm25":
        return
    for row in published:
        if row.name == measured.against:
            theirs = [*row.scores.values(), *([] if row.average is None else [row.average])]
            cells = tuple(None if cell is None else cell - their for cell, their in zip(line.cells, theirs, strict=True))
            yield replace(line, label=f"{line.label} minus {row.name}", cells=cells, measured="", origin="difference", key=None)


def _domain_of(measured: _Measured, row: ScoredRow, column: Column) -> str:
    return "ID" if measured.in_domain(row, column) else "OOD"


def _list_remarks(measured: _Measured, used: Sequence[str], absent: Sequence[str]) -> Iterator[str]:
    if local := [key for key in dict.fromkeys(used) if measured.collections[key].revision is None]:
        sized = ", ".join(f"{key} ({measured.collections[key].documents:,} documents)" for key in local)
        yield f"Measured on local folders, matched by name, of unknown revision: {sized}."
    if absent:
        yield f"Measured on none of these collections: {', '.join(absent)}."


def _points(fraction: float | None) -> float | None:
    return None if fraction is None else 100 * fraction


def write_paper(folders: Sequence[str | Path], out: str | Path, *, against: str | None = None, title: str = "") -> None:
    """Write results of ``quiver evaluate`` and ``quiver glue`` in the layouts of the paper's tables, replacing an existing report."""
    check_format(Path(out))
    check_utf8(title, "the title")
    contents = {folder: read_json(Path(folder) / FILE) if (Path(folder) / FILE).is_file() else {} for folder in folders}
    glue = [content for content in contents.values() if content.get("schema") == GLUE_SCHEMA]
    folders = [folder for folder, content in contents.items() if content.get("schema") != GLUE_SCHEMA]
    results = [read_results(folder) for folder in folders]
    if results or not glue:
        check_data(results)
    tested = test_significance(folders, results, averages=averages(collections_by_key(results))) if results else NOT_TESTED
    try:
        report = paper_report(paper_layouts(results, against=against, significance=tested, glue=glue))
    except (KeyError, TypeError) as error:
        raise InputError(f"a {FILE} of quiver glue is damaged: the field {error} is missing or has a wrong type") from error
    write(replace(report, title=title or report.title), Path(out))
