"""The content of a report as data: sections, paragraphs, tables, figures and lists, without any markup.

A report is a function from its data to these blocks. `quiver.eval.report.render` turns blocks into Markdown, HTML or LaTeX, so that
a report says the same in every format.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Drawing

Mark: TypeAlias = Literal["", "best", "second"]
"""Place of a cell among the cells of its column."""

RowKind: TypeAlias = Literal["", "published", "measured", "difference"]
"""Where the figures of a row come from. Rows of differences have no best cell."""


@dataclass(frozen=True)
class Key:
    """Short name of a system: a letter on a coloured badge, the same in tables and charts.

    Attributes:
        letter: One or two characters.
        colour: Index into `quiver.eval.report.charts.PALETTE`; 0 is grey.
        label: Full name of the system.
    """

    letter: str
    colour: int
    label: str


@dataclass(frozen=True)
class Span:
    """A part of a text with a style of its own.

    Attributes:
        text: The characters.
        style: ``strong``, ``code``, or a small label: ``mark`` (neutral), ``good`` or ``poor``.
    """

    text: str
    style: Literal["strong", "code", "mark", "good", "poor"]


Text: TypeAlias = str | Sequence[str | Span]
"""A text, or parts of one that are put together without a separator."""


@dataclass(frozen=True)
class Paragraph:
    """A paragraph of text.

    Attributes:
        text: The text, without markup.
    """

    text: Text


@dataclass(frozen=True)
class Code:
    """A command or other text in a fixed-width font.

    Attributes:
        text: Printed as it is, line breaks included.
    """

    text: str


@dataclass(frozen=True)
class Facts:
    """A list of names with values.

    Attributes:
        values: Name -> value.
        layout: In HTML: ``wide`` puts short facts in one line, ``rules`` leaves room for long sentences, ``list`` is compact.
    """

    values: Mapping[str, str]
    layout: Literal["wide", "rules", "list"] = "list"


@dataclass(frozen=True)
class Column:
    """Heading and kind of a table column.

    Attributes:
        label: Heading.
        note: Small print under the heading.
        numeric: Aligned to the right and sorted by number, otherwise sorted by name.
        wide: Holds long texts.
        ranked: Mark the best and the second best figure, see `Table.marks`.
    """

    label: str
    note: str = ""
    numeric: bool = True
    wide: bool = False
    ranked: bool = False


@dataclass(frozen=True)
class Cell:
    """A cell of a table.

    Attributes:
        text: What is printed; empty for a value that does not exist.
        order: Sort key in a numeric column; cells without one sort last.
        note: Small print under the text.
        link: Anchor of a section to which the text leads (HTML only).
        key: Badge of the system that the cell names.
    """

    text: str
    order: float | None = None
    note: str = ""
    link: str = ""
    key: Key | None = None


@dataclass(frozen=True)
class Row:
    """A row of a table.

    Attributes:
        cells: One per column; the first names the row.
        kind: Origin of the figures.
        group: LaTeX draws a rule between rows of different groups.
    """

    cells: tuple[Cell, ...]
    kind: RowKind = ""
    group: str = ""


@dataclass(frozen=True)
class Table:
    """A table.

    Attributes:
        name: What the table shows: the accessible name in HTML, the beginning of the caption in LaTeX.
        columns: Columns.
        rows: Rows.
        caption: Sentences below the table.
        label: Label in LaTeX, without ``tab:``.
    """

    name: str
    columns: tuple[Column, ...]
    rows: tuple[Row, ...]
    caption: str = ""
    label: str = ""

    def marks(self) -> list[tuple[Mark, ...]]:
        """Mark the best and the second best figure of every ranked column, for every row one mark per column.

        Figures are compared as they are printed, so that equal figures look equal. Higher is better. A column with a single figure has
        no best one, and rows of the kind ``difference`` are not ranked.

        Example:
            >>> columns = (Column("System", numeric=False), Column("nDCG@10", ranked=True))
            >>> table(columns, [["a", "61.20"], ["b", "65.70"], ["c", ""]]).marks()
            [('', 'second'), ('', 'best'), ('', '')]
        """
        places = [self._places(position) if column.ranked else {} for position, column in enumerate(self.columns)]
        return [
            tuple("" if row.kind == "difference" else found.get(cell.text, "") for cell, found in zip(row.cells, places, strict=True))
            for row in self.rows
        ]

    def _places(self, position: int) -> dict[str, Mark]:
        printed = [row.cells[position].text for row in self.rows if row.kind != "difference"]
        known = [(value, text) for text in printed if (value := number(text)) is not None]
        order = [text for _, text in sorted(set(known), reverse=True)]
        return dict(zip(order, ("best", "second"), strict=False)) if len(known) > 1 else {}


@dataclass(frozen=True)
class Figure:
    """A chart, drawn by matplotlib when a report is rendered.

    Attributes:
        title: Caption.
        draw: Makes the figure; see `quiver.eval.report.charts` for ready-made charts.
        alt: The content in words, for readers who do not see it.
        note: Small print beside the caption.
        file: Name of an SVG file that a Markdown report shows; without one the chart is left out of Markdown.
    """

    title: str
    draw: Callable[[], Drawing]
    alt: str
    note: str = ""
    file: str = ""


@dataclass(frozen=True)
class Gallery:
    """Charts beside each other, with the keys of the systems in them.

    Attributes:
        figures: Charts.
        keys: Legend above the charts; may be empty.
    """

    figures: tuple[Figure, ...]
    keys: tuple[Key, ...] = ()


@dataclass(frozen=True)
class Excerpt:
    """A document that an example shows.

    Attributes:
        marks: Short facts about it, such as its rank and grade.
        id: Id of the document.
        text: Beginning of the document; may be empty.
        matches: (query token, document token, similarity) of a late-interaction model.
    """

    marks: tuple[Span, ...]
    id: str
    text: str
    matches: tuple[tuple[str, str, float], ...] = ()


@dataclass(frozen=True)
class Example:
    """A query beside the documents that were found and wanted.

    Attributes:
        id: Id of the query.
        text: The query.
        marks: Short facts about it, such as its score.
        sides: Heading -> documents.
    """

    id: str
    text: str
    marks: tuple[Span, ...]
    sides: Mapping[str, tuple[Excerpt, ...]]


@dataclass(frozen=True)
class Examples:
    """Queries in detail. Markdown prints the first document of each side alone.

    Attributes:
        examples: Queries with the same sides.
    """

    examples: tuple[Example, ...]


@dataclass(frozen=True)
class Details:
    """Blocks that HTML folds away until the reader opens them.

    Attributes:
        summary: Heading of the folded part.
        blocks: Content.
        key: Badge before the heading.
    """

    summary: str
    blocks: tuple[Block, ...]
    key: Key | None = None


@dataclass(frozen=True)
class Section:
    """A heading with everything below it.

    Attributes:
        title: Heading.
        blocks: Content, sections included.
        anchor: Id by which links and the table of contents lead here; sections without one are not in the table of contents.
        note: Small print beside the heading.
        key: Badge before the heading.
    """

    title: str
    blocks: tuple[Block, ...]
    anchor: str = ""
    note: str = ""
    key: Key | None = None


Block: TypeAlias = Paragraph | Code | Facts | Table | Figure | Gallery | Examples | Details | Section


@dataclass(frozen=True)
class Report:
    """A whole report.

    Attributes:
        title: Main heading.
        blocks: Content.
        lead: Paragraph under the main heading; may be empty.
    """

    title: str
    blocks: tuple[Block, ...]
    lead: Text = ""


def table(columns: Iterable[Column | str], rows: Iterable[Sequence[Cell | str]], *, name: str = "", caption: str = "") -> Table:
    """Make a table from texts: cells of numeric columns sort by the number that is printed in them.

    Args:
        columns: Columns; a string is a column of numbers with that heading, and the first one a column of texts.
        rows: Cells or texts, one per column.
        name: See `Table`.
        caption: See `Table`.

    Example:
        >>> made = table(["System", "ms"], [["HNSW", "1,250"]])
        >>> [column.numeric for column in made.columns], made.rows[0].cells[1].order
        ([False, True], 1250.0)
    """
    made = [
        each if isinstance(each, Column) else Column(each, numeric=position > 0, wide=position == 0)
        for position, each in enumerate(columns)
    ]
    lines = tuple(
        Row(
            tuple(
                cell if isinstance(cell, Cell) else Cell(cell, number(cell) if column.numeric else None)
                for cell, column in zip(row, made, strict=True)
            )
        )
        for row in rows
    )
    return Table(name, tuple(made), lines, caption)


def number(text: str) -> float | None:
    """Read the number that a cell prints; None where it prints something else.

    Example:
        >>> number("1,250.5"), number("+3.1"), number("n/a")
        (1250.5, 3.1, None)
    """
    try:
        return float(text.replace(",", ""))
    except ValueError:
        return None


def figures(blocks: Iterable[Block]) -> Iterable[Figure]:
    """All figures of some blocks, in order."""
    for block in blocks:
        match block:
            case Figure():
                yield block
            case Gallery():
                yield from block.figures
            case Section() | Details():
                yield from figures(block.blocks)
            case _:
                pass
