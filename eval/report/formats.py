"""Reports: the content as blocks of text, tables and figures, and three renderers that turn blocks into Markdown, HTML and LaTeX.

A report is a function from its data to blocks without any markup, so that it says the same in every format.

An HTML page is self-contained: it makes no requests and loads no fonts or libraries. The texts in it come from models, data and command
lines, so everything is escaped, nothing but the page's own script may run (its checksum is in the content security policy), and characters
that cannot be seen or that change the direction of writing are made visible.

LaTeX contains only the tables. They compile with the packages that the first line names and are ASCII: letters with one accent and the
signs of `SPECIAL` are commands, any other non-ASCII character is printed as its code point, such as ``[U+4E2D]``, and invisible characters
are omitted.
"""

from __future__ import annotations

import base64
import hashlib
import importlib.util
import logging
import math
import re
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeAlias

from quiver.encoder.errors import InputError
from quiver.encoder.files import check_target, write_text
from quiver.eval.report.charts import Key, svg, visible

if TYPE_CHECKING:
    from jinja2 import Environment
    from matplotlib.figure import Figure as Drawing

logger = logging.getLogger(__name__)


Mark: TypeAlias = Literal["", "best", "second"]
"""Place of a cell among the cells of its column."""

RowKind: TypeAlias = Literal["", "published", "measured", "difference"]
"""Where the figures of a row come from. Rows of differences have no best cell."""


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
class Properties:
    """A list of names with values.

    Attributes:
        values: Name -> value.
        layout: In HTML: ``wide`` puts short values in one line, ``rules`` leaves room for long sentences, ``list`` is compact.
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
        better_than: Letters of the systems that the figure is significantly better than, printed as a superscript.
    """

    text: str
    order: float | None = None
    note: str = ""
    link: str = ""
    key: Key | None = None
    better_than: tuple[str, ...] = ()

    @property
    def superscript(self) -> str:
        """The letters together; with commas if one of them has two characters.

        Example:
            >>> Cell("65.70", better_than=("A", "C")).superscript, Cell("65.70", better_than=("A", "AB")).superscript
            ('AC', 'A,AB')
        """
        return ("," if any(len(letter) > 1 for letter in self.better_than) else "").join(self.better_than)


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
        label: Label in LaTeX, without ``tab:``; empty for none.
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

    @property
    def lettered(self) -> bool:
        """Whether a cell has a superscript, so that formats without badges print the letters of the systems, too."""
        return any(cell.better_than for row in self.rows for cell in row.cells)

    def superscripts(self, position: int) -> int:
        """Number of characters of the longest superscript of a column; the others take as much room, so that figures stay aligned."""
        return max((len(row.cells[position].superscript) for row in self.rows), default=0)

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
        marks: Short labels of the document, such as rank and grade.
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
    """A query with the documents that were found and those that are relevant.

    Attributes:
        id: Id of the query.
        text: The query.
        marks: Short labels of it, such as its score.
        sides: Heading -> documents.
    """

    id: str
    text: str
    marks: tuple[Span, ...]
    sides: Mapping[str, tuple[Excerpt, ...]]


@dataclass(frozen=True)
class Examples:
    """Queries in detail. Markdown prints only the first document of each side.

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


Block: TypeAlias = Paragraph | Code | Properties | Table | Figure | Gallery | Examples | Details | Section


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
    """Read the number that a cell prints; None if it prints something else.

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


EXCERPT_WIDTH = 100
"""Characters of a query or a document that Markdown shows."""

MAX_SHADE = 34
"""Percentage of the accent colour behind a token with similarity 1; with more, the text is hard to read."""


def render_markdown(report: Report) -> str:
    """Render a report as Markdown. Figures with a file name become links to that file; `write` writes the files."""
    parts = [f"# {escape(report.title)}", *([_markdown_text(report.lead)] if report.lead else [])]
    for block in report.blocks:
        parts += _markdown(block, 2)
    return "\n\n".join(parts) + "\n"


def _markdown(block: Block, level: int) -> Iterator[str]:
    match block:
        case Paragraph():
            yield _markdown_text(block.text)
        case Code():
            fence = "`" * max(3, 1 + max(map(len, re.findall("`+", block.text)), default=0))
            yield f"{fence}sh\n{block.text}\n{fence}"
        case Properties():
            yield markdown_table(["", ""], [[escape(name), escape(value)] for name, value in block.values.items()])
        case Table():
            yield _markdown_block_table(block)
            if block.caption:
                yield escape(block.caption)
        case Figure() | Gallery():
            yield from (f"![{escape(each.alt)}]({each.file})" for each in figures([block]) if each.file)
        case Examples():
            yield _markdown_examples(block)
        case Section() | Details() if not _only_drawn(block):
            title, note = (block.title, block.note) if isinstance(block, Section) else (block.summary, "")
            yield f"{'#' * min(level, 6)} {escape(title)}" + (f" ({escape(note)})" if note else "")
            for inner in block.blocks:
                yield from _markdown(inner, level + 1)


def _only_drawn(block: Section | Details) -> bool:
    """Whether it is about charts alone, none of which has a file that Markdown could link to."""
    drawn = list(figures([block]))
    return (
        bool(drawn)
        and not any(each.file for each in drawn)
        and all(isinstance(each, Paragraph | Gallery | Details) for each in block.blocks)
    )


def _markdown_text(text: Text) -> str:
    spans = [text] if isinstance(text, str) else text
    return "".join(_markdown_span(span) for span in spans)


def _markdown_span(span: object) -> str:
    text = escape(getattr(span, "text", str(span)), keep_ends=True)
    match getattr(span, "style", ""):
        case "strong" | "good" | "poor":
            return f"**{text}**"
        case "code":
            return f"`{getattr(span, 'text', '')}`"
        case _:
            return text


def _markdown_block_table(table: Table) -> str:
    header = [escape(column.label) + (f" ({escape(column.note)})" if column.note else "") for column in table.columns]
    rows = [
        [_markdown_cell(cell, bold=mark == "best", lettered=table.lettered) for cell, mark in zip(row.cells, marks, strict=True)]
        for row, marks in zip(table.rows, table.marks(), strict=True)
    ]
    return markdown_table(header, rows)


def _markdown_cell(cell: Cell, *, bold: bool, lettered: bool) -> str:
    text = f"**{escape(cell.text)}**" if bold else escape(cell.text)
    text = f"{cell.key.letter} {text}" if lettered and cell.key else text
    text += f"<sup>{cell.superscript}</sup>" if cell.better_than else ""
    return f"{text} ({escape(cell.note)})".strip() if cell.note else text


def _markdown_examples(block: Examples) -> str:
    sides = list(block.examples[0].sides) if block.examples else []
    rows = [
        [escape(example.id), escape(shorten(example.text)), _marks(example), *(_first(example.sides[side]) for side in sides)]
        for example in block.examples
    ]
    return markdown_table(["Query", "Text", "", *map(escape, sides)], rows)


def _marks(item: Example | Excerpt) -> str:
    return ", ".join(escape(span.text) for span in item.marks)


def _first(documents: Sequence[Excerpt]) -> str:
    if not documents:
        return "nothing"
    first = documents[0]
    return f"{escape(first.id)}, {_marks(first)}: {escape(shorten(first.text))}"


def shorten(text: str, width: int = EXCERPT_WIDTH) -> str:
    """A text in one line of at most ``width`` characters.

    Example:
        >>> shorten("one  two three", 8)
        'one two…'
    """
    flat = " ".join(text.split())
    return flat if len(flat) <= width else flat[: width - 1] + "…"


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Lay out a table of cells that are Markdown already.

    Example:
        >>> print(markdown_table(["a", "b"], [["1", "**2**"]]))
        | a | b |
        | --- | --- |
        | 1 | **2** |
    """
    return "\n".join("| " + " | ".join(line) + " |" for line in [header, ["---"] * len(header), *rows])


def escape(text: str, *, keep_ends: bool = False) -> str:
    r"""Escape a text so that Markdown prints it as it is, in one line.

    Example:
        >>> print(escape("x|y  *z*"))
        x\|y \*z\*
    """
    text = visible(text)
    for character in "\\|`*_<[":
        text = text.replace(character, f"\\{character}")
    flat = " ".join(text.split())
    return f"{' ' * text[:1].isspace()}{flat}{' ' * text[-1:].isspace()}" if keep_ends and flat else flat


def render_html(report: Report) -> str:
    """Render a report as one HTML page with inline SVG charts. Equal reports give equal bytes.

    Raises:
        InputError: jinja2 is not installed, or matplotlib, which a figure needs, is not.
    """
    environment = _environment()
    script = _source(environment, "page.js")
    page = environment.get_template("report.html.j2").render(
        report=report,
        script=script,
        script_hash="sha256-" + base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        style=_source(environment, "page.css"),
    )
    return page.lstrip()


def _environment() -> Environment:
    try:
        from jinja2 import Environment, PackageLoader, StrictUndefined
        from markupsafe import Markup
    except ModuleNotFoundError as error:
        raise InputError("an HTML report needs jinja2: pip install 'quiver-retrieval[eval]'") from error
    environment = Environment(
        loader=PackageLoader("quiver.eval.report"),
        autoescape=True,
        finalize=_visible,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    numbers = count(1)
    environment.filters.update(
        kind=lambda block: type(block).__name__.lower(),
        spans=lambda text: [text] if isinstance(text, str) else text,
        svg=lambda figure: Markup(svg(figure.draw(), prefix=f"chart-{next(numbers)}", label=figure.alt)),
        shade=lambda similarity: f"{MAX_SHADE * max(0.0, similarity):.0f}",
        contents=_contents,
        breakable=lambda text: Markup("<wbr>").join(_BREAKS.split(visible(text))),
    )
    return environment


def _visible(value: object) -> object:
    return visible(value) if isinstance(value, str) and not hasattr(value, "__html__") else value


# A name such as designdocs_long goes on in the next line at its signs rather than inside a word.
_BREAKS = re.compile(r"(?<=[_/])(?=\w)")


def _contents(blocks: Iterable[Block]) -> list[Section]:
    return [block for block in blocks if isinstance(block, Section) and block.anchor]


def _source(environment: Environment, name: str) -> str:
    """A file of the templates as it is: braces in a style sheet or a script are not template syntax."""
    if environment.loader is None:
        raise ValueError("the environment has no loader")
    return environment.loader.get_source(environment, name)[0]


SPECIAL: Mapping[str, str] = {
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
    "`": r"\`{}",  # ?` and !` would be Spanish punctuation
    "[": "{[}",  # a row that begins with it or with a star would pass it to the line break before it
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
"""Character -> LaTeX command that prints it."""

ACCENTS: Mapping[str, str] = {
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
"""Accent -> its LaTeX command, which every font encoding has."""

INVISIBLE = ("Cc", "Cf", "Cs")
"""Unicode categories that LaTeX leaves out: controls, format characters, halves of surrogate pairs."""

NARROW, WIDE = 44, 65
"""Characters of a row, two more per column included: from the first on a table spans both columns of a page, and from the second on it is
split into parts that repeat the first column, so that all keep their font size."""

LABEL, PROSE = 24, 36
"""Characters of a name and of another text from which on its lines are broken."""

UPRIGHT, SHORT = 6, 6
"""Largest number of columns of short figures with upright headings, and characters of a short figure."""

PAGE, CAPTION_WIDTH = 42, 75
"""Lines of a page, and characters of a line of a caption. Parts that do not fit on one page become floats of the same number."""


def render_latex(report: Report, *, comments: Sequence[str] = ()) -> str:
    """Render the tables of a report as LaTeX.

    Args:
        report: Only its tables are printed.
        comments: Lines that stand before the tables as comments.
    """
    tables = "\n\n".join("\n".join(_latex_table(table)) for table in _tables(report.blocks))
    packages = " and ".join(rf"\usepackage{{{name}}}" for name, command in PACKAGES.items() if command in tables)
    lines = [f"% Needs {packages}."]
    if f"{SPECIAL['[']}U+" in tables:
        lines.append("% pdflatex lacks some characters: [U+D55C] is the character with that code point. Rename systems by --name.")
    lines += [f"% {_line(comment)}" for comment in comments]
    return "\n".join(lines) + "\n" + tables + "\n"


PACKAGES: Mapping[str, str] = {"booktabs": r"\toprule", "graphicx": r"\rotatebox"}
"""Package -> a command of it."""


def _tables(blocks: Iterable[Block]) -> Iterator[Table]:
    for block in blocks:
        if isinstance(block, Table):
            yield block
        elif isinstance(block, Section | Details):
            yield from _tables(block.blocks)


def _latex_table(table: Table) -> Iterator[str]:
    limits = [PROSE if position else LABEL for position in range(len(table.columns))]
    turned = [_turned(table, position) for position in range(len(table.columns))]
    widths, paragraphs = [], []
    for position, column in enumerate(table.columns):
        longest = _longest(table, position) + table.superscripts(position)
        paragraphs.append(not column.numeric and longest > limits[position])
        label = 2 if turned[position] else min(_printed(column.label), LABEL)
        widths.append(2 + (limits[position] if paragraphs[-1] else max(label, longest)))
    columns = list(_latex_parts(widths))
    star = "*" if max(sum(widths[position] for position in part) for part in columns) > NARROW else ""
    ranked = "The best of a column is bold, the second underlined." if any(column.ranked for column in table.columns) else ""
    caption = _breakable(" ".join(filter(None, (escape_latex(f"{table.name}. {table.caption}".rstrip()), ranked))))
    head = 2 + max(
        min(_printed(column.label), LABEL) // 2 if is_turned else math.ceil(_printed(column.label) / LABEL)
        for column, is_turned in zip(table.columns, turned, strict=True)
    )
    heights = [
        max(
            math.ceil(_printed(cell.text) / limit) if broken else 1
            for cell, limit, broken in zip(row.cells, limits, paragraphs, strict=True)
        )
        for row in table.rows
    ]
    for number, parts in enumerate(_latex_floats(columns, heights, head, max(2 * head, PAGE - len(caption) // CAPTION_WIDTH))):
        if number:
            yield ""
        yield rf"\begin{{table{star}}}[t]"
        yield r"\centering"
        if star:
            yield r"\setlength{\tabcolsep}{3pt}"
        for place, (part, rows) in enumerate(parts):
            if place:
                yield r"\par\medskip"
            yield from _latex_part(table, part, rows, turned=turned, paragraphs=paragraphs)
        if number:
            yield r"\addtocounter{table}{-1}"
        yield rf"\caption{{{_breakable(escape_latex(table.name))} (continued).}}" if number else rf"\caption{{{caption}}}"
        if table.label and not number:
            yield rf"\label{{tab:{table.label}}}"
        yield rf"\end{{table{star}}}"


def _turned(table: Table, position: int) -> bool:
    """Whether a heading is turned: that of short figures under a longer heading, in a table with many columns of short figures."""
    many = sum(column.numeric and _longest(table, place) <= SHORT for place, column in enumerate(table.columns)) > UPRIGHT
    longest = _longest(table, position)
    return many and table.columns[position].numeric and longest <= SHORT and _printed(table.columns[position].label) > max(4, longest)


def _longest(table: Table, position: int) -> int:
    return max((_printed(row.cells[position].text) for row in table.rows), default=0)


def _printed(text: str) -> int:
    """Width of a printed text in average characters: a capital is wider than they are, and a code point has eight characters."""
    line = _line(text)
    points = sum(_latex_character(character).startswith(f"{SPECIAL['[']}U+") for character in line)
    return len(line) + 7 * points + sum(map(str.isupper, line)) // 3


def _latex_part(
    table: Table, part: Sequence[int], rows: Sequence[int], *, turned: Sequence[bool], paragraphs: Sequence[bool]
) -> Iterator[str]:
    """One tabular: some columns and rows of a table."""
    kinds = ["r" if table.columns[position].numeric else "l" for position in part]
    for place, position in enumerate(part):
        if paragraphs[position]:
            kinds[place] = f"p{{{(PROSE if position else LABEL) // 2}em}}"
    headings = list(_latex_headings(table.columns, turned))
    marks = table.marks()
    yield rf"\begin{{tabular}}{{{''.join(kinds)}}}"
    yield r"\toprule"
    yield _latex_row([headings[position] for position in part])
    yield r"\midrule"
    for before, place in zip([None, *rows], rows, strict=False):
        row = table.rows[place]
        if before is not None and table.rows[before].group != row.group:
            yield r"\midrule"
        cells = []
        for position in part:
            cell = _latex_cell(row.cells[position], marks[place][position], table.superscripts(position), lettered=table.lettered)
            if paragraphs[position]:
                # In a last column, \raggedright would take away the end of the row.
                end = r"\let\\\tabularnewline" if position == part[-1] else ""
                cell = rf"\raggedright{end} {_breakable(cell)}"
            cells.append(cell)
        yield _latex_row(cells)
    yield r"\bottomrule"
    yield r"\end{tabular}"


def _latex_parts(widths: Sequence[int]) -> Iterator[list[int]]:
    """Positions of the columns of each part of a table: the first column, and as many others as fit."""
    part, room = [0], WIDE - widths[0]
    for position, width in enumerate(widths[1:], start=1):
        if width > room and len(part) > 1:
            yield part
            part, room = [0], WIDE - widths[0]
        part.append(position)
        room -= width
    yield part


def _latex_floats(
    columns: Sequence[Sequence[int]], heights: Sequence[int], head: int, first: int
) -> Iterator[list[tuple[Sequence[int], Sequence[int]]]]:
    """Parts of a table, columns and rows, for one page after the other; ``first`` is the number of lines of the first page."""
    page: list[tuple[Sequence[int], Sequence[int]]] = []
    room = first
    for part in columns:
        if page and head + sum(heights) > room:
            yield page
            page, room = [], PAGE
        rows: list[int] = []
        used = head
        for row, height in enumerate(heights):
            if rows and used + height > room:
                yield [*page, (part, rows)]
                page, rows, room, used = [], [], PAGE, head
            rows.append(row)
            used += height
        page.append((part, rows))
        room -= used
    yield page


def _latex_headings(columns: Sequence[Column], turned: Sequence[bool]) -> Iterator[str]:
    labels = [column.label for column in columns]
    for column, is_turned in zip(columns, turned, strict=True):
        title = escape_latex(f"{column.label} ({column.note})" if column.note and labels.count(column.label) > 1 else column.label)
        if _printed(column.label) > LABEL:
            side = r"\raggedleft" if column.numeric and not is_turned else r"\raggedright"
            title = rf"\parbox[b]{{{LABEL // 2}em}}{{{side} {_breakable(title)}}}"
        yield rf"\rotatebox{{90}}{{{title}}}" if is_turned else title


def _breakable(latex: str) -> str:
    """Allow line breaks in words that TeX cannot hyphenate: after separators, after code points, and within very long words."""
    latex = re.sub(r"(/|\\_|\{\[\}U\+[0-9A-F]+\]|(?<!\\)[.:=](?=[^\s\d]))(?=[^\s.}])", r"\1\\allowbreak{}", latex)
    return re.sub(r"(?<![\\A-Za-z0-9])([A-Za-z0-9]{18})(?=[A-Za-z0-9]{2})", r"\1\\allowbreak{}", latex)


def _latex_cell(cell: Cell, mark: str, superscripts: int, *, lettered: bool) -> str:
    escaped = re.sub(r"(?<!\S)[-+]\d[\d.]*(?!\S)", r"$\g<0>$", escape_latex(cell.text))  # a minus sign instead of a hyphen
    command = {"best": r"\textbf", "second": r"\underline"}.get(mark)
    escaped = escaped if command is None else f"{command}{{{escaped}}}"
    if lettered and cell.key:
        escaped = f"{cell.key.letter} {escaped}"
    if not superscripts or not cell.text:
        return escaped
    missing = superscripts - len(cell.superscript)
    padding = rf"\phantom{{{'A' * missing}}}" if missing else ""  # figures stay aligned
    return rf"{escaped}\textsuperscript{{{cell.superscript}{padding}}}"


def _latex_row(cells: Iterable[str]) -> str:
    return " & ".join(cells) + r" \\"


def escape_latex(text: str) -> str:
    r"""Turn any text into ASCII LaTeX that prints it, as far as pdflatex can without further packages.

    Example:
        >>> print(escape_latex("50% of a_b: caf\u00e9 \u4e2d"))
        50\% of a\_b: caf\'{e} {[}U+4E2D]
    """
    unjoined = re.split("(?<=-)(?=-)", unicodedata.normalize("NFC", _line(text)))  # two hyphens would become one dash
    return "{}".join("".join(map(_latex_character, part)) for part in unjoined)


def _latex_character(character: str) -> str:
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
    """The text in one line, without characters that cannot be seen."""
    return "".join(character for character in " ".join(text.split()) if unicodedata.category(character) not in INVISIBLE)


Render: TypeAlias = Callable[[Report], str]

RENDERERS: Mapping[str, Render] = {".md": render_markdown, ".html": render_html, ".tex": render_latex}
"""Suffix -> renderer; a file without a suffix is Markdown."""


def check_format(path: Path, suffixes: Iterable[str] = tuple(RENDERERS)) -> str:
    """Check that a report can be written to a file.

    Args:
        path: The file.
        suffixes: Suffixes of the supported formats; the first is the default for a file without a suffix.

    Returns:
        The suffix of its format.

    Raises:
        InputError: The suffix is not supported, or the file cannot be written.
    """
    known = list(suffixes)
    check_target(path)
    suffix = path.suffix.lower() or known[0]
    if suffix not in known:
        raise InputError(f"{path}: unknown report format {path.suffix!r}; the file name must end in {', '.join(known)}")
    return suffix


def write(report: Report, path: Path) -> None:
    """Write a report in the format that the suffix of the file names. Markdown gets its figures as files beside it.

    Raises:
        InputError: The format is unknown, a file cannot be written, or a library that the format needs is not installed.
    """
    suffix = check_format(path)
    write_text(path, RENDERERS[suffix](report))
    if suffix == ".md":
        for figure in figures(report.blocks):
            if figure.file:
                write_text(path.with_name(figure.file), svg(figure.draw(), prefix="chart", label=figure.alt, inline=False))


def write_folder(report: Report, folder: Path) -> Path:
    """Write ``report.md`` and, if jinja2 and matplotlib are installed, ``report.html`` into a folder, replacing existing ones.

    Returns:
        The HTML file, otherwise the Markdown file.

    Raises:
        InputError: A file cannot be written.
    """
    markdown, page = folder / "report.md", folder / "report.html"
    write(report, markdown)
    if missing := [name for name in ("jinja2", "matplotlib") if importlib.util.find_spec(name) is None]:
        logger.warning("%s was not written: it needs %s (pip install 'quiver-retrieval[eval]')", page, " and ".join(missing))
        return markdown
    write(report, page)
    return page
