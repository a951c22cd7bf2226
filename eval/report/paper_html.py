"""The layouts of the ModernBERT paper as one HTML page, in the style of `quiver.eval.report.html` and under its rules."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from quiver.eval.report.html import render_page
from quiver.eval.report.page_tables import SYSTEM, Cell, Column, Table
from quiver.eval.report.paper import Layout, Line, paper_layouts, shown
from quiver.eval.results import Results

TITLE = "Retrieval results beside the ModernBERT paper"
"""What the page is called."""

KINDS: Mapping[str, str] = {"paper": "published", "floor": "published", "measured": "measured", "difference": "difference"}
"""Origin of a row -> its class in the style sheet."""


@dataclass(frozen=True)
class Section:
    """A table as the page shows it.

    Attributes:
        name: Its anchor.
        title: What it is.
        table: Its rows.
        notes: What a reader must know, in sentences.
    """

    name: str
    title: str
    table: Table
    notes: tuple[str, ...]


def render_paper_html(results: Sequence[Results], *, against: str | None = None) -> str:
    """The paper's tables with our rows, see `quiver.eval.report.paper.paper_layouts`; equal results give equal bytes.

    Args:
        results: One or more systems.
        against: A row of the paper, such as ``ModernBERT-base``, to take the difference to.

    Raises:
        InputError: There are no results, they do not fit in one table, the paper has no such row, or jinja2 is not installed.
    """
    return render_sections([layout_section(each) for each in paper_layouts(results, against=against)], title=TITLE)


def render_sections(sections: Sequence[Section], *, title: str) -> str:
    """A page of tables, published rows among ours.

    Raises:
        InputError: jinja2 is not installed.
    """
    return render_page("paper.html.j2", {"layouts": sections}, title=title)


def layout_section(layout: Layout) -> Section:
    """A layout with its notes."""
    return Section(layout.name, layout.title, _table(layout), layout.notes)


def _table(layout: Layout) -> Table:
    columns = (SYSTEM, *map(Column, layout.columns), Column("Measured", numeric=False))
    rows = tuple((Cell(line.label), *(_cell(line, cell) for cell in line.cells), Cell(line.measured)) for line in layout.lines)
    return Table(layout.title, columns, rows, tuple(KINDS[line.origin] for line in layout.lines))


def _cell(line: Line, cell: float | None) -> Cell:
    return Cell(shown(line, cell), cell)
