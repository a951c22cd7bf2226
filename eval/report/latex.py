r"""Results as LaTeX tables that compile with booktabs and graphicx, and with nothing else.

The best figure of a column is bold and the second underlined, by the figures as they are shown, so that equal figures look equal.

The tables are ASCII and need no engine, input encoding or font encoding in particular. Letters with one accent and the signs of
``SPECIAL`` are commands; any other character beyond ASCII, which pdflatex may not be able to set, is its number: ``[U+4E2D]``.
Characters that cannot be seen are left out.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from quiver.eval.report.paper import Layout, paper_layouts, shown
from quiver.eval.report.protocol import protocol
from quiver.eval.report.systems import (
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
from quiver.eval.results import HEADLINE, Results

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
    '"': r"\symbol{34}",  # \textquotedbl is not in the default encoding, and babel gives the bare character a meaning
    "`": r"\`{}",  # ?` and !` would be Spanish
    "[": "{[}",  # a row that began with it or a star would hand it to the line break before it
    "*": "{*}",
    "\N{EN DASH}": "--",
    "\N{EM DASH}": "---",
    "\N{LEFT SINGLE QUOTATION MARK}": "`",
    "\N{RIGHT SINGLE QUOTATION MARK}": "'",
    "\N{LEFT DOUBLE QUOTATION MARK}": "``",
    "\N{RIGHT DOUBLE QUOTATION MARK}": "''",
    "\N{HORIZONTAL ELLIPSIS}": r"\ldots{}",
    "\N{MULTIPLICATION SIGN}": r"$\times$",
    "\N{PLUS-MINUS SIGN}": r"$\pm$",
    "\N{LATIN SMALL LETTER SHARP S}": r"\ss{}",
    "\N{LATIN SMALL LETTER AE}": r"\ae{}",
    "\N{LATIN CAPITAL LETTER AE}": r"\AE{}",
    "\N{LATIN SMALL LIGATURE OE}": r"\oe{}",
    "\N{LATIN CAPITAL LIGATURE OE}": r"\OE{}",
    "\N{LATIN SMALL LETTER O WITH STROKE}": r"\o{}",
    "\N{LATIN CAPITAL LETTER O WITH STROKE}": r"\O{}",
    "\N{LATIN SMALL LETTER L WITH STROKE}": r"\l{}",
    "\N{LATIN CAPITAL LETTER L WITH STROKE}": r"\L{}",
    "\N{LATIN SMALL LETTER DOTLESS I}": r"\i{}",
}
"""Character -> how LaTeX prints it."""

ACCENTS = {
    "\N{COMBINING GRAVE ACCENT}": "`",
    "\N{COMBINING ACUTE ACCENT}": "'",
    "\N{COMBINING CIRCUMFLEX ACCENT}": "^",
    "\N{COMBINING TILDE}": "~",
    "\N{COMBINING DIAERESIS}": '"',
    "\N{COMBINING MACRON}": "=",
    "\N{COMBINING DOT ABOVE}": ".",
    "\N{COMBINING BREVE}": "u",
    "\N{COMBINING CARON}": "v",
    "\N{COMBINING RING ABOVE}": "r",
    "\N{COMBINING DOUBLE ACUTE ACCENT}": "H",
    "\N{COMBINING CEDILLA}": "c",
    "\N{COMBINING DOT BELOW}": "d",
}
"""Accent -> the command that every font encoding has for it."""

INVISIBLE = ("Cc", "Cf", "Cs")
"""Categories of characters that are left out: controls, formats such as the direction of writing, halves of a surrogate pair."""

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
    comments += [f"{label}: {result.provenance.command or 'made without a command line'}" for label, result in named]
    return "\n".join([*_comments(comments), *_table([*names, "Average"], lines, caption, "tab:retrieval")]) + "\n"


def render_paper_latex(results: Sequence[Results], *, against: str | None = None) -> str:
    """The layouts of the paper, see `quiver.eval.report.paper.paper_layouts`.

    Args:
        results: One or more systems.
        against: A row of the paper, such as ``ModernBERT-base``, to take the difference to.

    Raises:
        InputError: There are no results, they do not fit in one table, or the paper has no such row.
    """
    tables = ["\n".join(_layout(layout)) for layout in paper_layouts(results, against=against)]
    return "\n".join(_comments([])) + "\n" + "\n\n".join(tables) + "\n"


def escape_latex(text: str) -> str:
    r"""Any text as ASCII LaTeX that prints it, as far as pdflatex can without further packages.

    Example:
        >>> print(escape_latex("50% of a_b: caf\u00e9 \u4e2d"))
        50\% of a\_b: caf\'{e} {[}U+4E2D]
    """
    unjoined = re.split("(?<=-)(?=-)", unicodedata.normalize("NFC", _line(text)))  # two hyphens would be one dash
    return "{}".join("".join(map(_printed, part)) for part in unjoined)


def _printed(character: str) -> str:
    if character in SPECIAL:
        return SPECIAL[character]
    if character.isascii():
        return character
    decomposed = unicodedata.normalize("NFD", character)
    letter, accent = decomposed[0], decomposed[1:]
    if letter.isascii() and letter.isalpha() and accent in ACCENTS:
        return rf"\{ACCENTS[accent]}{{{letter}}}"
    return f"{SPECIAL['[']}U+{ord(character):04X}]"


def _line(text: str) -> str:
    """The text in one line, without what cannot be seen."""
    return "".join(character for character in " ".join(text.split()) if unicodedata.category(character) not in INVISIBLE)


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
    """Lines that LaTeX does not read: others' words in them must not end the line."""
    return ["% Needs \\usepackage{booktabs} and \\usepackage{graphicx}.", *(f"% {_line(comment)}" for comment in comments)]
