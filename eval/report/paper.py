"""Results in the layout of the ModernBERT paper: its rows as published, ours in place, and the difference.

Columns are matched by the name of the collection (or of its group) and by the split, and a cell of ours is in points like the
paper's. Every number is from ``results.json`` or from ``quiver.eval.published``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

from quiver.encoder.errors import InputError
from quiver.eval.averages import average, data_sets
from quiver.eval.published.retrieval import (
    BM25_FLAT,
    BM25_SOURCE,
    CODE,
    LONG_TEXT,
    MSMARCO_NOTE,
    OVERVIEW_COLUMNS,
    RETRIEVAL_SOURCE,
    TABLE_1,
    TABLE_7,
    TABLE_8,
    BeirTable,
    Column,
    PublishedRow,
)
from quiver.eval.report.systems import Row, check_data, collections, label_systems, rows
from quiver.eval.report.tables import escape, table
from quiver.eval.results import HEADLINE, CollectionResult, Results

Kind: TypeAlias = Literal["dense", "colbert", "bm25"]
"""Of a system."""

BEIR_TABLES: Mapping[Kind, BeirTable] = {"dense": TABLE_7, "colbert": TABLE_8}
"""Kind of a system -> the table it belongs in."""

STAND_INS = (Column("designdocs_long", "designdocs_long"), Column("pycodesearch", "pycodesearch"), Column("cosqa", "cosqa"))
"""Collections that stand in for MLDR (the first) and for the code sets, where those are out of reach."""


@dataclass(frozen=True)
class Line:
    """A row of a layout.

    Attributes:
        label: Whose it is.
        cells: In points, column by column; None is blank.
        measured: How many of the collections were measured; empty for a published row.
        origin: ``paper``, ``floor`` (published, of another source), ``measured`` or ``difference`` (measured minus paper).
    """

    label: str
    cells: tuple[float | None, ...]
    measured: str
    origin: Literal["paper", "floor", "measured", "difference"]


@dataclass(frozen=True)
class Layout:
    """A table of the paper with our rows in it.

    Attributes:
        name: ``table7``, for file names and labels.
        title: What it is.
        columns: Titles of the cells' columns.
        lines: Published rows first.
        notes: What a reader must know, in sentences.
    """

    name: str
    title: str
    columns: tuple[str, ...]
    lines: tuple[Line, ...]
    notes: tuple[str, ...]


@dataclass(frozen=True)
class _Measured:
    """What was measured, ready to be looked up."""

    rows: tuple[Row, ...]
    kinds: Mapping[str, Kind]
    facts: Mapping[str, CollectionResult]
    against: str | None

    def of(self, *kinds: Kind) -> list[Row]:
        return [row for row in self.rows if self.kinds[row.label] in kinds]

    def keys(self, row: Row, column: Column) -> list[str]:
        """The row's collections that belong to a column: one, or the parts of a group."""
        scored = [key for key in row.scores if HEADLINE in row.scores[key].measures]
        for split in column.splits:
            found = [key for key in scored if self.facts[key].split == split]
            named = [key for key in found if self.facts[key].name == column.data_set]
            if keys := named or [key for key in found if self.facts[key].group == column.data_set]:
                return keys
        return []

    def score(self, row: Row, column: Column) -> float | None:
        """A fraction; None where the collection, or a part of the group, was not measured."""
        parts = []
        for key in self.keys(row, column):
            facts, value = self.facts[key], row.scores[key].measures[HEADLINE]
            alone = facts.name == column.data_set
            parts.append(replace(facts.part(value), group=None, group_size=1) if alone else facts.part(value))
        return next(iter(data_sets(parts).values()), None)

    def in_domain(self, row: Row, column: Column) -> bool:
        return any(row.scores[key].in_domain for key in self.keys(row, column))


def render_paper(results: Sequence[Results], *, against: str | None = None) -> str:
    """The layouts as Markdown.

    Args:
        results: One or more systems; a table leaves out those that were measured on none of its collections, and names them.
        against: A row of the paper, such as ``ModernBERT-base``, to take the difference to.

    Raises:
        InputError: There are no results, they do not fit in one table, or the paper has no such row.
    """
    parts = ["# Retrieval results beside the ModernBERT paper"]
    for layout in paper_layouts(results, against=against):
        parts += layout_markdown(layout)
    return "\n\n".join(parts) + "\n"


def layout_markdown(layout: Layout) -> list[str]:
    """Heading, table and notes of a layout."""
    header = ["", *layout.columns, "Measured"]
    body = [[line.label, *(shown(line, cell) for cell in line.cells), line.measured] for line in layout.lines]
    return [f"## {escape(layout.title)}", table(header, body), escape(" ".join(layout.notes))]


def shown(line: Line, cell: float | None) -> str:
    """A cell with the paper's one decimal; a difference has a sign."""
    if cell is None:
        return ""
    rounded = round(cell, 1) + 0.0  # no "-0.0"
    return f"{rounded:+.1f}" if line.origin == "difference" else f"{rounded:.1f}"


def paper_layouts(results: Sequence[Results], *, against: str | None = None) -> list[Layout]:
    """The paper's tables with our rows: 7 for dense systems, 8 for ColBERTs, both for BM25 alone, 1 always, and the stand-ins.

    Args:
        results: One or more systems.
        against: A row of the paper, such as ``ModernBERT-base``, to take the difference to.

    Raises:
        InputError: There are no results, they do not fit in one table, the paper has no such row, or a system would have no row: no
            table has a column for what it was measured on.
    """
    names = [row.name for row in TABLE_1]
    if against is not None and against not in names:
        raise InputError(f"the paper has no row {against!r}; there are {', '.join(names)}")
    check_data(results)
    named = label_systems(results)
    kinds: dict[str, Kind] = {label: result.system.kind for label, result in named}
    lines = rows(named)
    measured = _Measured(tuple(lines), {row.label: kinds.get(row.label, "bm25") for row in lines}, collections(results), against)
    _check_placed(measured, [label for label, _ in named])
    layouts = [
        _beir(measured, paper, kind)
        for kind, paper in BEIR_TABLES.items()
        if kind in measured.kinds.values() or set(measured.kinds.values()) == {"bm25"}
    ]
    layouts.append(_overview(measured))
    stand_ins = _stand_ins(measured)
    return [*layouts, stand_ins] if stand_ins.lines else layouts


def _check_placed(measured: _Measured, systems: Sequence[str]) -> None:
    for row in measured.rows:
        placed = _overview_cells(measured, row)[1] or any(measured.keys(row, column) for column in STAND_INS)
        if row.label in systems and not placed:
            raise InputError(
                f"{row.label}: no table of the paper has a column for {', '.join(row.scores)}; leave these results out, or write the report"
                " with --layout results"
            )


def _beir(measured: _Measured, paper: BeirTable, kind: Kind) -> Layout:
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
        lines.append(Line(row.label, (*scores.values(), mean.value), f"{mean.known} of {mean.members}", "measured"))
        lines += _difference(lines[-1], measured, paper.rows)
    notes = [
        f"nDCG@10 in points. Published rows: {RETRIEVAL_SOURCE}; {BM25_SOURCE}. The average is over all {len(titles)} data sets and blank"
        " where one is missing; CQADupstack is the mean of its forums and counts once.",
        MSMARCO_NOTE,
        *_about(measured, used, absent),
    ]
    return Layout(
        f"table{paper.number}", f"BEIR, {paper.what} (Table {paper.number} of the paper)", (*titles, "Average"), tuple(lines), tuple(notes)
    )


def _overview(measured: _Measured) -> Layout:
    lines = [Line(row.name, tuple(row.scores.values()), "", "paper") for row in TABLE_1]
    used, absent = [], []
    for row in measured.rows:
        cells, counts = _overview_cells(measured, row)
        if not counts:
            absent.append(row.label)
            continue
        columns = (*TABLE_7.columns, *TABLE_8.columns, LONG_TEXT, *CODE)
        used += [key for column in columns for key in measured.keys(row, column)]
        lines.append(Line(row.label, tuple(cells.get(title) for title in OVERVIEW_COLUMNS), ", ".join(counts), "measured"))
        lines += _difference(lines[-1], measured, TABLE_1)
    notes = [
        f"nDCG@10 in points; GLUE, which is no retrieval, is the paper's alone. Published rows: {RETRIEVAL_SOURCE}. BEIR is the average of"
        " Table 7 or 8, blank unless it is whole. MLDR is English and searched in all of its documents; ID was trained on its training"
        " data and OOD was not, for ours as the evaluation was told. CSN is the mean of CoIR's six languages, code to text, and SQA is"
        " CoIR's StackOverflow-QA; the paper's are of single-vector models.",
        *_about(measured, used, absent),
    ]
    return Layout("table1", "All tasks (Table 1 of the paper)", OVERVIEW_COLUMNS, tuple(lines), tuple(notes))


def _overview_cells(measured: _Measured, row: Row) -> tuple[dict[str, float | None], list[str]]:
    """Column -> points, and what was measured of the columns that need more than one collection."""
    kind = measured.kinds[row.label]
    cells: dict[str, float | None] = {}
    counts: list[str] = []
    for prefix, paper in (("DPR", TABLE_7), ("ColBERT", TABLE_8)):
        if kind == ("colbert" if prefix == "DPR" else "dense"):
            continue
        mean = average({column.title: measured.score(row, column) for column in paper.columns}, [each.title for each in paper.columns])
        cells[f"{prefix} BEIR"] = _points(mean.value)
        counts += [f"{prefix} BEIR {mean.known} of {mean.members}"] * bool(mean.known)
        cells[f"{prefix} MLDR {_domain(measured, row, LONG_TEXT)}"] = _points(measured.score(row, LONG_TEXT))
    for column in (LONG_TEXT, *CODE):
        keys = measured.keys(row, column)
        sizes = {1 if measured.facts[key].name == column.data_set else measured.facts[key].group_size for key in keys}
        counts += [f"{column.title} {len(keys)} of {size}" for size in sizes]
    cells |= {column.title: _points(measured.score(row, column)) for column in CODE}
    return cells, counts


def _stand_ins(measured: _Measured) -> Layout:
    titles = tuple(f"{column.title} {domain}" for column in STAND_INS for domain in ("OOD", "ID"))
    lines, used = [], []
    for row in measured.rows:
        cells = {
            f"{column.title} {_domain(measured, row, column)}": _points(measured.score(row, column))
            for column in STAND_INS
            if measured.keys(row, column)
        }
        if cells:
            used += [key for column in STAND_INS for key in measured.keys(row, column)]
            label = row.label if measured.kinds[row.label] == "bm25" else f"{row.label} ({measured.kinds[row.label]})"
            lines.append(Line(label, tuple(map(cells.get, titles)), f"{len(cells)} of {len(STAND_INS)}", "measured"))
    notes = [
        "nDCG@10 in points. These are not the paper's collections: designdocs_long stands in for MLDR, pycodesearch and cosqa for"
        " CodeSearchNet and StackOverflow-QA, and a score here compares with no score of the tables above. ID was trained on the"
        " collection's training data and OOD was not, as the evaluation was told.",
        *_about(measured, used, []),
    ]
    return Layout(
        "stand-ins", "Long text and code: stand-ins for MLDR, CodeSearchNet and StackOverflow-QA", titles, tuple(lines), tuple(notes)
    )


def _difference(line: Line, measured: _Measured, published: Sequence[PublishedRow]) -> Iterator[Line]:
    """The line minus the paper's row, for a system; where the paper has no such row there is nothing to subtract."""
    if measured.against is None or measured.kinds[line.label] == "bm25":
        return
    for row in published:
        if row.name == measured.against:
            theirs = [*row.scores.values(), *([] if row.average is None else [row.average])]
            cells = tuple(None if cell is None else cell - their for cell, their in zip(line.cells, theirs, strict=True))
            yield replace(line, label=f"{line.label} minus {row.name}", cells=cells, measured="", origin="difference")


def _domain(measured: _Measured, row: Row, column: Column) -> str:
    return "ID" if measured.in_domain(row, column) else "OOD"


def _about(measured: _Measured, used: Sequence[str], absent: Sequence[str]) -> Iterator[str]:
    if local := [key for key in dict.fromkeys(used) if measured.facts[key].revision is None]:
        sized = ", ".join(f"{key} ({measured.facts[key].documents:,} documents)" for key in local)
        yield f"Measured on local folders, matched by their name and without a revision: {sized}."
    if absent:
        yield f"Measured on none of these collections: {', '.join(absent)}."


def _points(fraction: float | None) -> float | None:
    return None if fraction is None else 100 * fraction
