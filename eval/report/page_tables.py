"""The tables of a page: cells that know how they sort, and the tables that are one line a run.

Nothing here is markup. No number is added that is not in the results, except sums and shares.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from quiver.eval.report.systems import index_name, points
from quiver.eval.results import CollectionResult, Results

MEBIBYTE = 2**20

SHOWN_OVERLAPS = ("overlap@10", "overlap@100")
"""Measures of an index against exact search."""

STEPS: Mapping[str, str] = {
    "encode_documents": "Encode documents",
    "index": "Index",
    "encode_queries": "Encode queries",
    "search": "Search",
    "check": "Check of the data",
    "other": "Other",
}
"""Step of an evaluation -> heading of its column."""

OVERHEAD = ("index", "check", "other")
"""Steps that are neither encoding nor searching."""


@dataclass(frozen=True)
class Key:
    """How a system is called all over the page.

    Attributes:
        letter: Its short key.
        colour: Number of its colour.
        label: Its name.
    """

    letter: str
    colour: int
    label: str


@dataclass(frozen=True)
class Column:
    """A column of a table.

    Attributes:
        label: Its heading.
        note: Small print under the heading.
        numeric: Whether it sorts by number.
        wide: Whether its texts are long.
    """

    label: str
    note: str = ""
    numeric: bool = True
    wide: bool = False


@dataclass(frozen=True)
class Cell:
    """A cell of a table.

    Attributes:
        text: What it says; empty where there is nothing.
        order: What it sorts by in a numeric column; None sorts last.
        note: Small print under the text.
        best: Whether it is the highest of its column.
        link: Anchor of the command that the number comes from.
        key: The system, in the column of the systems.
    """

    text: str
    order: float | None = None
    note: str = ""
    best: bool = False
    link: str = ""
    key: Key | None = None


@dataclass(frozen=True)
class Table:
    """A table; the first cells of its rows name them.

    Attributes:
        name: What it is, for readers who do not see it.
        columns: Its columns.
        rows: A cell a column each.
        kinds: Of each row, a class of the style sheet; empty where all rows are alike.
    """

    name: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[Cell, ...], ...]
    kinds: tuple[str, ...] = ()


SYSTEM = Column("System", numeric=False, wide=True)
"""The column of the systems."""

COLLECTION = Column("Collection", numeric=False)
"""The column of the collections."""


def highest(values: Iterable[float | None]) -> str:
    """The highest of two or more, as it is shown: what looks equal is equally bold. Nothing where there is nothing to compare.

    Example:
        >>> highest([0.5, None, 0.65704]), highest([0.5, None])
        ('65.70', '')
    """
    known = [value for value in values if value is not None]
    return points(max(known)) if len(known) > 1 else ""


def number_cell(value: float | None, best: str, *, note: str = "", link: str = "") -> Cell:
    """A fraction in points, bold where it is what `highest` gave."""
    text = points(value)
    return Cell(text, value, note, best=bool(text) and text == best, link=link)


def interval_note(low: float, high: float) -> str:
    """An interval in points, as small print."""
    return f"{100 * low:.1f}–{100 * high:.1f}"  # noqa: RUF001 - an en dash is how a range is set


def system_cell(key: Key) -> Cell:
    """The cell that names a system."""
    return Cell(key.label, key=key)


def percent_cell(share: float | None, *, digits: int = 1) -> Cell:
    """A share in percent."""
    return Cell("") if share is None else Cell(f"{100 * share:.{digits}f}", share)


def conditions_table(scored: Sequence[tuple[Key, CollectionResult]]) -> Table:
    """How each run was made, a line a run."""
    columns = (
        COLLECTION,
        SYSTEM,
        Column("Kept", "k"),
        Column("Titles", numeric=False),
        Column("Own id excluded", numeric=False),
        Column("Domain", numeric=False),
        Column("Documents cut"),
        Column("Queries cut"),
        Column("Nothing found", "queries"),
        Column("Empty", "documents"),
        Column("Judged@10", "percent"),
    )
    lines = [
        (
            Cell(each.key),
            system_cell(key),
            _count(each.k),
            Cell(_yes(each.use_title)),
            Cell(_yes(each.exclude_self)),
            Cell("in" if each.in_domain else "out"),
            _count(each.truncated.documents, of=each.documents),
            _count(each.truncated.queries, of=each.queries),
            _count(each.unanswered),
            _count(each.empty_texts),
            percent_cell(each.judged),
        )
        for key, each in scored
    ]
    return Table("How each run was made", columns, tuple(lines))


def index_table(scored: Sequence[tuple[Key, CollectionResult]]) -> Table:
    """What was searched, a line a run."""
    overlaps = [Column(name, "percent of exact") for name in SHOWN_OVERLAPS]
    columns = (
        COLLECTION,
        SYSTEM,
        Column("Index", numeric=False, wide=True),
        *overlaps,
        Column("MiB"),
        Column("ms a query"),
        Column("Vectors reused"),
    )
    lines = []
    for key, each in scored:
        index = each.index
        recall = [(index.recall or {}).get(name) for name in SHOWN_OVERLAPS]
        shares = [percent_cell(share, digits=2) for share in recall]
        size = Cell("") if index.bytes is None else Cell(f"{index.bytes / MEBIBYTE:,.1f}", float(index.bytes))
        spent = index.query_milliseconds
        time = Cell("") if spent is None else Cell(f"{spent:.3g}", spent)
        lines.append(
            (Cell(each.key), system_cell(key), Cell(index_name(index)), *shares, size, time, _count(each.cached, of=each.documents))
        )
    return Table("What was searched", columns, tuple(lines))


def seconds_table(scored: Sequence[tuple[Key, CollectionResult]]) -> Table:
    """What took how long, a line a run."""
    columns = (COLLECTION, SYSTEM, *map(Column, STEPS.values()), Column("Total"), Column("Overhead", "percent"))
    lines = []
    for key, each in scored:
        total = sum(each.seconds.values())
        steps = [Cell("") if step not in each.seconds else _second(each.seconds[step]) for step in STEPS]
        overhead = percent_cell(sum(each.seconds.get(step, 0.0) for step in OVERHEAD) / total if total > 0 else None, digits=2)
        lines.append((Cell(each.key), system_cell(key), *steps, _second(total), overhead))
    return Table("Seconds by step", columns, tuple(lines))


def files_table(result: Results) -> Table | None:
    """The files that a result names; None where none were written."""
    lines = [
        (Cell(collection.key), Cell(what), Cell(reference.file), Cell(reference.sha256))
        for collection in result.collections
        for what, reference in (
            ("run", collection.run),
            ("scores of every query", collection.per_query),
            ("queries", collection.query_texts),
        )
        if reference is not None
    ]
    columns = (COLLECTION, *(Column(name, numeric=False, wide=name == "sha256") for name in ("What", "File", "sha256")))
    return Table("Files beside results.json", columns, tuple(lines)) if lines else None


def _second(seconds: float) -> Cell:
    return Cell(f"{seconds:,.2f}", seconds)


def _count(number: int, *, of: int | None = None) -> Cell:
    share = f"{100 * number / of:.1f}%" if of and number else ""
    return Cell(f"{number:,}", float(number), share)


def _yes(answer: bool) -> str:
    return "yes" if answer else "no"
