"""Reports: the content as blocks of text, tables and figures, and three renderers that turn blocks into Markdown, HTML and LaTeX.

A report is a function from its data to blocks without any markup, so that it says the same in every format.

An HTML page is self-contained: it makes no requests and loads no fonts or libraries. The texts in it come from models, data and command
lines, so everything is escaped, nothing but the page's own script may run (its checksum is in the content security policy), and characters
that cannot be seen or that change the direction of writing are made visible.

LaTeX contains only the tables, each a ``tabular`` or, with many rows, a ``longtable``. They compile with the packages that the first line
names and are ASCII: letters with one accent and the signs of `SPECIAL` are commands, any other non-ASCII character is printed as its code
point, such as ``[U+4E2D]``, and invisible characters are omitted.
"""

from __future__ import annotations

import base64
import hashlib
import importlib.util
import logging
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
RowKind: TypeAlias = Literal["", "published", "measured", "difference"]


@dataclass(frozen=True)
class Span:
    """A part of a text with a style of its own."""

    text: str
    style: Literal["strong", "code", "mark", "good", "poor"]  # the last three are small labels


Text: TypeAlias = str | Sequence[str | Span]
"""A text, or parts of one that are put together without a separator."""


@dataclass(frozen=True)
class Paragraph:
    """A paragraph of text."""

    text: Text


@dataclass(frozen=True)
class Code:
    """A command or other text in a fixed-width font."""

    text: str


@dataclass(frozen=True)
class Properties:
    """A list of names with values."""

    values: Mapping[str, str]
    layout: Literal["wide", "rules", "list"] = "list"  # in HTML: short values in one line, long sentences, or compact


@dataclass(frozen=True)
class Column:
    """Heading and kind of a table column."""

    label: str
    note: str = ""  # small print
    numeric: bool = True  # aligned to the right and sorted by number, otherwise sorted by name
    wide: bool = False  # holds long texts
    ranked: bool = False  # mark the best and the second best figure


@dataclass(frozen=True)
class Cell:
    """A cell of a table."""

    text: str  # empty for a value that does not exist
    order: float | None = None  # sort key in a numeric column; cells without one sort last
    note: str = ""  # small print
    link: str = ""  # anchor of a section, in HTML
    key: Key | None = None  # badge of the system that the cell names
    better_than: tuple[str, ...] = ()  # letters of the systems that the figure is significantly better than: a superscript

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
    """A row of a table."""

    cells: tuple[Cell, ...]
    kind: RowKind = ""  # origin of the figures; differences are not ranked
    group: str = ""  # LaTeX draws a rule between groups


@dataclass(frozen=True)
class Table:
    """A table."""

    name: str  # the accessible name in HTML, the beginning of the caption in LaTeX
    columns: tuple[Column, ...]
    rows: tuple[Row, ...]
    caption: str = ""  # sentences below the table
    label: str = ""  # in LaTeX, without "tab:"

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
    """A chart, drawn by matplotlib when a report is rendered."""

    title: str
    draw: Callable[[], Drawing]
    alt: str  # the content in words, for readers who do not see it
    note: str = ""
    file: str = ""  # SVG file beside a Markdown report; without one the chart is left out of Markdown


@dataclass(frozen=True)
class Gallery:
    """Charts beside each other, with the keys of the systems in them."""

    figures: tuple[Figure, ...]
    keys: tuple[Key, ...] = ()


@dataclass(frozen=True)
class Excerpt:
    """A document that an example shows."""

    marks: tuple[Span, ...]
    id: str
    text: str
    matches: tuple[tuple[str, str, float], ...] = ()  # query token, document token, similarity


@dataclass(frozen=True)
class Example:
    """A query with the documents that were found and those that are relevant."""

    id: str
    text: str
    marks: tuple[Span, ...]
    sides: Mapping[str, tuple[Excerpt, ...]]  # heading -> documents


@dataclass(frozen=True)
class Examples:
    """Queries in detail. Markdown prints only the first document of each side."""

    examples: tuple[Example, ...]


@dataclass(frozen=True)
class Details:
    """Blocks that HTML folds away until the reader opens them."""

    summary: str
    blocks: tuple[Block, ...]
    key: Key | None = None


@dataclass(frozen=True)
class Section:
    """A heading with everything below it."""

    title: str
    blocks: tuple[Block, ...]
    anchor: str = ""  # sections without one are not in the table of contents
    note: str = ""
    key: Key | None = None


Block: TypeAlias = Paragraph | Code | Properties | Table | Figure | Gallery | Examples | Details | Section


@dataclass(frozen=True)
class Report:
    """A whole report."""

    title: str
    blocks: tuple[Block, ...]
    lead: Text = ""


def table(columns: Iterable[Column | str], rows: Iterable[Sequence[Cell | str]], *, name: str = "", caption: str = "") -> Table:
    """Make a table from texts: cells of numeric columns sort by the number that is printed in them.

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
    """Render a report as one HTML page with inline SVG charts. Equal reports give equal bytes."""
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


# fmt: off
SPECIAL: Mapping[str, str] = {
    "\\": r"\textbackslash{}", "{": r"\{", "}": r"\}", "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_",
    "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "<": r"\textless{}", ">": r"\textgreater{}", "|": r"\textbar{}",
    '"': r"\symbol{34}",  # \textquotedbl is not in the default encoding, and babel gives the bare character a meaning
    "`": r"\`{}",  # ?` and !` would be Spanish punctuation
    "[": "{[}", "*": "{*}",  # a row that begins with one of them would pass it to the line break before it
    "\u2013": "--", "\u2014": "---", "\u2018": "`", "\u2019": "'", "\u201c": "``", "\u201d": "''",
    "\u2026": r"\ldots{}", "\u00d7": r"$\times$", "\u00b1": r"$\pm$", "\u00df": r"\ss{}", "\u00e6": r"\ae{}", "\u00c6": r"\AE{}",
    "\u0153": r"\oe{}", "\u0152": r"\OE{}", "\u00f8": r"\o{}", "\u00d8": r"\O{}", "\u0142": r"\l{}", "\u0141": r"\L{}",
    "\u0131": r"\i{}",
}
"""Character -> LaTeX command that prints it."""

ACCENTS: Mapping[str, str] = {
    "\u0300": "`", "\u0301": "'", "\u0302": "^", "\u0303": "~", "\u0308": '"', "\u0304": "=", "\u0307": ".", "\u0306": "u",
    "\u030c": "v", "\u030a": "r", "\u030b": "H", "\u0327": "c", "\u0323": "d",
}
"""Combining accent -> its LaTeX command, which every font encoding has."""
# fmt: on

INVISIBLE = ("Cc", "Cf", "Cs")
"""Unicode categories that LaTeX leaves out: controls, format characters, halves of surrogate pairs."""

LARGE, LONG = 6, 40
"""A table of more columns is printed small, with turned headings, over both columns of a page; one of more rows may break across pages.
Texts with more characters are broken into lines."""


def render_latex(report: Report, *, comments: Sequence[str] = ()) -> str:
    """Render the tables of a report as LaTeX."""
    tables = "\n\n".join(_latex_tables(report.blocks))
    packages = " and ".join(rf"\usepackage{{{name}}}" for name, command in PACKAGES.items() if command in tables)
    lines = [f"% Needs {packages}."]
    if f"{SPECIAL['[']}U+" in tables:
        lines.append("% pdflatex lacks some characters: [U+D55C] is the character with that code point. Rename systems by --name.")
    lines += [f"% {_line(comment)}" for comment in comments]
    return "\n".join(lines) + "\n" + tables + "\n"


PACKAGES: Mapping[str, str] = {"booktabs": r"\toprule", "graphicx": r"\rotatebox", "longtable": r"\begin{longtable}"}
"""Package -> a command of it."""


def _latex_tables(blocks: Iterable[Block]) -> Iterator[str]:
    for block in blocks:
        if isinstance(block, Table):
            yield "\n".join(_latex_table(block))
        elif isinstance(block, Section | Details):
            yield from _latex_tables(block.blocks)


def _latex_table(table: Table) -> Iterator[str]:
    """The table in a float, or as a ``longtable`` if it has many rows."""
    large, long = len(table.columns) > LARGE, len(table.rows) > LONG
    labels = [column.label for column in table.columns]
    headings = []
    for column in table.columns:
        text = escape_latex(f"{column.label} ({column.note})" if column.note and labels.count(column.label) > 1 else column.label)
        headings.append(rf"\rotatebox{{90}}{{{text}}}" if large and column.numeric else text)
    ranked = "The best of a column is bold, the second underlined." if any(column.ranked for column in table.columns) else ""
    caption = " ".join(filter(None, (escape_latex(f"{table.name}. {table.caption}".rstrip()), ranked)))
    caption = rf"\caption{{{caption}}}" + (rf"\label{{tab:{table.label}}}" if table.label else "")
    kinds = "".join("r" if column.numeric else _text_kind(table, position) for position, column in enumerate(table.columns))
    head = (r"\toprule", " & ".join(headings) + r" \\", r"\midrule")
    small = [r"\footnotesize\setlength{\tabcolsep}{3pt}"] * large
    if long:
        yield from ("{" + "".join(small), rf"\begin{{longtable}}{{{kinds}}}", caption + r" \\", *head, r"\endhead")
        yield from (*_latex_rows(table), r"\bottomrule", r"\end{longtable}}")
        return
    star = "*" * large
    yield from (rf"\begin{{table{star}}}[t]", r"\centering", *small, caption, rf"\begin{{tabular}}{{{kinds}}}", *head)
    yield from (*_latex_rows(table), r"\bottomrule", r"\end{tabular}", rf"\end{{table{star}}}")


def _text_kind(table: Table, position: int) -> str:
    """A column of texts; long ones are broken into lines."""
    return "p{16em}" if any(len(row.cells[position].text) > LONG for row in table.rows) else "l"


def _latex_rows(table: Table) -> Iterator[str]:
    widths = list(map(table.superscripts, range(len(table.columns))))
    for place, (row, marks) in enumerate(zip(table.rows, table.marks(), strict=True)):
        if place and table.rows[place - 1].group != row.group:
            yield r"\midrule"
        cells = zip(row.cells, marks, widths, strict=True)
        yield " & ".join(_latex_cell(cell, mark, width, lettered=table.lettered) for cell, mark, width in cells) + r" \\"


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
    """Check that a report can be written to a file."""
    known = list(suffixes)
    check_target(path)
    suffix = path.suffix.lower() or known[0]
    if suffix not in known:
        raise InputError(f"{path}: unknown report format {path.suffix!r}; the file name must end in {', '.join(known)}")
    return suffix


def write(report: Report, path: Path) -> None:
    """Write a report in the format that the suffix of the file names. Markdown gets its figures as files beside it."""
    suffix = check_format(path)
    write_text(path, RENDERERS[suffix](report))
    if suffix == ".md":
        for figure in figures(report.blocks):
            if figure.file:
                write_text(path.with_name(figure.file), svg(figure.draw(), prefix="chart", label=figure.alt, inline=False))


def write_folder(report: Report, folder: Path) -> Path:
    """Write ``report.md`` and, if jinja2 and matplotlib are installed, ``report.html`` into a folder, replacing existing ones."""
    markdown, page = folder / "report.md", folder / "report.html"
    write(report, markdown)
    if missing := [name for name in ("jinja2", "matplotlib") if importlib.util.find_spec(name) is None]:
        logger.warning("%s was not written: it needs %s (pip install 'quiver-retrieval[eval]')", page, " and ".join(missing))
        return markdown
    write(report, page)
    return page
