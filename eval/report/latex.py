r"""Results as LaTeX tables that compile with booktabs and graphicx, and with nothing else.

The best figure of a column is bold and the second underlined, by the figures as they are shown, so that equal figures look equal.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from eval.report.paper import Layout, paper_layouts, shown
from eval.report.protocol import protocol
from eval.report.systems import (
    LABELS,
    check_data,
    collections,
    label_systems,
    members,
    points,
    row_average,
    row_data_sets,
    rows,
)
from eval.results import HEADLINE, Results

SPECIAL = {
    "\\": r"\textbackslash{}",
    "{": r"\{",
    "}": r"\}",
    "&": r"\&",
    "%": r"\%",
    "$": r"\$",
    "#": r"\#",
    "_": r"\_",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    '"': r"\textquotedbl{}",
}
"""Character -> how LaTeX prints it."""

WIDTH = 65
"""Characters of a row, 2 between columns, from which on a table is shrunk to the width of the text."""

UPRIGHT = 8
"""Columns up to which their titles stand upright; more are turned, so that no column is wider than its figures."""

CAPTIONED = ("Search", "Missing results", "Averages")
"""Rules of the protocol that stand in the caption of the plain table."""


@dataclass(frozen=True)
class _Line:
    """A row of a table; rows of different sections are parted by a rule, and only ranked ones can be best."""

    label: str
    cells: Sequence[str]
    section: str
    ranked: bool


def render_latex(results: Sequence[Results]) -> str:
    """The headline table: systems over data sets, with the average, nDCG@10 in points.

    Args:
        results: In the order of the table's rows; baselines come first, and results of one system share a row.

    Raises:
        InputError: There are none, or they do not fit in one table.
    """
    check_data(results)
    named = label_systems(results)
    facts = collections(results)
    names = list(members(facts.values()))
    systems = {label for label, _ in named}
    lines = []
    for row in rows(named):
        scores = row_data_sets(row, facts)
        cells = [*(points(scores.get(name)) for name in names), points(row_average(row, facts).value)]
        lines.append(_Line(row.label, cells, "systems" if row.label in systems else "baselines", True))
    rules = protocol(results)
    caption = " ".join([f"{LABELS[HEADLINE]} in points.", *(rules[about] for about in CAPTIONED if about in rules)])
    comments = [f"{each.key}: revision {each.revision or 'none'}, sha256 {each.data_sha256}" for each in facts.values()]
    comments += [f"{label}: {' '.join((result.provenance.command or 'made without a command line').split())}" for label, result in named]
    return "\n".join([*_comments(comments), *_table([*names, "Average"], lines, caption, "tab:retrieval")]) + "\n"


def render_paper_latex(results: Sequence[Results], *, against: str | None = None) -> str:
    """The layouts of the paper, see `eval.report.paper.paper_layouts`.

    Args:
        results: One or more systems.
        against: A row of the paper, such as ``ModernBERT-base``, to take the difference to.

    Raises:
        InputError: There are no results, they do not fit in one table, or the paper has no such row.
    """
    tables = ["\n".join(_layout(layout)) for layout in paper_layouts(results, against=against)]
    return "\n".join(_comments([])) + "\n" + "\n\n".join(tables) + "\n"


def escape_latex(text: str) -> str:
    r"""Any text as LaTeX that prints it.

    Example:
        >>> print(escape_latex("50% of a_b"))
        50\% of a\_b
    """
    return "".join(SPECIAL.get(character, character) for character in " ".join(text.split()))


def _layout(layout: Layout) -> Iterator[str]:
    lines = []
    for line in layout.lines:
        section = line.label.rpartition("-")[2] if line.origin == "paper" else "floor" if line.origin == "floor" else "ours"
        cells = [*(shown(line, cell) for cell in line.cells), line.measured]
        lines.append(_Line(line.label, cells, section, line.origin != "difference"))
    caption = f"{layout.title}. {' '.join(layout.notes)}"
    yield from _table([*layout.columns, "Measured"], lines, caption, f"tab:{layout.name}", texts=1)


def _table(columns: Sequence[str], lines: Sequence[_Line], caption: str, label: str, *, texts: int = 0) -> Iterator[str]:
    """The environment; the last ``texts`` columns hold no figures to rank."""
    figures = len(columns) - texts
    places = [_places([line.cells[column] for line in lines if line.ranked]) for column in range(figures)]
    widths = [max(map(len, cells)) + 2 for cells in zip(columns, *(line.cells for line in lines), strict=True)]
    wide = max(len(line.label) for line in lines) + sum(widths) > WIDTH
    yield r"\begin{table*}[t]" if wide else r"\begin{table}[t]"
    yield r"\centering"
    if wide:
        yield r"\setlength{\tabcolsep}{3pt}"
        yield r"\resizebox{\textwidth}{!}{%"
    yield rf"\begin{{tabular}}{{l{'r' * figures}{'l' * texts}}}"
    yield r"\toprule"
    titles = [escape_latex(column) for column in columns]
    yield _row(["", *(titles if len(columns) <= UPRIGHT else (rf"\rotatebox{{90}}{{{title}}}" for title in titles))])
    yield r"\midrule"
    for before, line in zip([None, *lines], lines, strict=False):
        if before is not None and before.section != line.section:
            yield r"\midrule"
        marked = [_mark(cell, places[column] if line.ranked else {}) for column, cell in enumerate(line.cells[:figures])]
        yield _row([escape_latex(line.label), *marked, *map(escape_latex, line.cells[figures:])])
    yield r"\bottomrule"
    yield r"\end{tabular}" + ("}" if wide else "")
    yield rf"\caption{{{escape_latex(caption)} The best of a column is bold, the second underlined.}}"
    yield rf"\label{{{label}}}"
    yield r"\end{table*}" if wide else r"\end{table}"


def _places(cells: Sequence[str]) -> dict[str, int]:
    """Shown figure -> 1 for the best and 2 for the next; where all are equal nothing stands out."""
    best = sorted({cell for cell in cells if cell}, key=float, reverse=True)
    return {cell: place for place, cell in enumerate(best[:2], start=1)} if len(best) > 1 else {}


def _mark(cell: str, places: dict[str, int]) -> str:
    command = {1: r"\textbf", 2: r"\underline"}.get(places.get(cell, 0))
    figure = f"${cell}$" if cell.startswith(("-", "+")) else cell  # a minus, not a hyphen
    return figure if command is None else f"{command}{{{figure}}}"


def _row(cells: Sequence[str]) -> str:
    return " & ".join(cells) + r" \\"


def _comments(comments: Sequence[str]) -> list[str]:
    return ["% Needs \\usepackage{booktabs} and \\usepackage{graphicx}.", *(f"% {comment}" for comment in comments)]
