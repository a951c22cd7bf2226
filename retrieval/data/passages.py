"""Cut the text of a file into passages: by headings, by functions, and by tokens where those are too long.

The spans of a text cover it: without overlap, their concatenation is the text. No span is blank, so white space between two passages
belongs to the first. Offsets count characters of the text.

Source: headings as in CommonMark 0.31 (ATX and setext) and in reStructuredText (https://docutils.sourceforge.io/docs/ref/rst/); Python by
its own parser.
"""

from __future__ import annotations

import ast
import re
import warnings
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Literal, NamedTuple, TypeAlias

from quiver.encoder.errors import InputError

Kind: TypeAlias = Literal["markdown", "rst", "text", "python", "code"]
"""How a text is divided: by headings, by nothing, by Python's syntax or by blocks at the left margin."""

TokenSpans: TypeAlias = Callable[[str], Sequence[tuple[int, int]]]
"""Function from a text to the start and end of each token."""

GRAMMAR = "headings, functions, tokens:256, overlap:32, or several of them separated by commas; or whole"
"""How passages are described, in short."""

_LEAST = 16  # fewest tokens of a passage
_BLOCK = 1 << 18  # characters that are tokenized at a time
_WORDS = re.compile(r"\w+|[^\w\s]")
_LINE_END = re.compile(r"\r\n|\n|\r")

_FENCE = re.compile(r" {0,3}(`{3,}|~{3,})")
_ATX = re.compile(r" {0,3}(#{1,6})(?=[ \t]|$)")
_SETEXT = re.compile(r" {0,3}(=+|-+)[ \t]*$")
_NO_PARAGRAPH = re.compile(r"\s*$| {4}|\t| {0,3}(?:[-*+>|]|\d+[.)]\s)")
_FRONT_MATTER = re.compile(r"---[ \t]*\r?\n.*?^---[ \t]*$", re.DOTALL | re.MULTILINE)

_ADORNMENT = re.compile(r"([!-/:-@\[-`{-~])\1{2,}[ \t]*$")

_CLOSING = re.compile(r"[\s)\]}]|end\b|else\b|\*/|-->|$")

_BREAKS = (re.compile(r"\n[ \t\r]*\n\s*"), re.compile(r"[\n\r]\s*"), re.compile(r"[.!?;:][\"')\]]*\s+"), re.compile(r"\s+"))
"""Where a long passage is cut, the best first: after an empty line, a line, a sentence, a word."""


def word_spans(text: str) -> list[tuple[int, int]]:
    """Words and punctuation marks, in place of tokens where there is no tokenizer."""
    return [match.span() for match in _WORDS.finditer(text)]


@dataclass(frozen=True)
class PassageTokens:
    """The tokens that passages are measured in, and how many of them the model reads of a document (None if unknown)."""

    spans: TokenSpans = word_spans
    length: int | None = None


WORDS = PassageTokens()
"""Words and punctuation marks, for corpora that are read without a model."""


@dataclass(frozen=True)
class PassageRules:
    """How texts are cut; see `parse_passages`.

    Attributes:
        headings: Cut Markdown, HTML and reStructuredText at headings.
        functions: Cut source code at functions, classes and top-level blocks.
        tokens: Maximum tokens of a passage, those of its title included; None for no limit.
        overlap: Tokens that a passage shares with the one before it, where it was cut by tokens.
    """

    headings: bool = False
    functions: bool = False
    tokens: int | None = None
    overlap: int = 0


def parse_passages(text: str, *, tokens: int = 256) -> PassageRules:
    """Parse a description of passages, such as ``headings,functions`` or ``tokens:256,overlap:32``; ``whole`` leaves texts uncut.

    ``tokens`` is the limit in tokens if the text names none. Raises InputError that shows the grammar.

    Example:
        >>> parse_passages("headings,overlap:8", tokens=100)
        PassageRules(headings=True, functions=False, tokens=100, overlap=8)
    """
    if text.strip() == "whole":
        return PassageRules()
    found: dict[str, int] = {"tokens": tokens, "overlap": 0}
    seen: set[str] = set()
    for part in text.split(","):
        name, colon, value = (piece.strip() for piece in part.partition(":"))
        with_number = name in found
        if name in seen or not (with_number or name in ("headings", "functions")) or bool(colon) != with_number:
            raise InputError(f"--passages {text!r}: expected {GRAMMAR}")
        seen.add(name)
        if with_number:
            if not re.fullmatch("[0-9]{1,9}", value):
                raise InputError(f"--passages {text!r}: {name} must be a number of tokens, got {value!r}")
            found[name] = int(value)
    if found["tokens"] < _LEAST:
        raise InputError(f"--passages {text!r}: tokens must be >= {_LEAST}, got {found['tokens']}")
    if found["overlap"] > found["tokens"] // 2:
        raise InputError(f"--passages {text!r}: overlap must be at most half of the tokens ({found['tokens']}), got {found['overlap']}")
    return PassageRules("headings" in seen, "functions" in seen, found["tokens"], found["overlap"])


class Span(NamedTuple):
    """A passage of a text; ``path`` are the headings, or names of class and function, that it is under, outermost first."""

    start: int
    end: int
    path: tuple[str, ...] = ()


def cut(text: str, kind: Kind, rules: PassageRules, token_spans: TokenSpans, *, title: str = "") -> list[Span]:
    """Cut a text into passages in order, none of them blank; nothing is cut off.

    ``title`` begins each passage's title, which counts towards its tokens.
    """
    if kind in ("markdown", "rst"):
        sections = (_markdown(text) if kind == "markdown" else _rst(text)) if rules.headings else [Span(0, len(text))]
    elif kind in ("python", "code") and rules.functions:
        sections = (_python(text) if kind == "python" else None) or _blocks(text, token_spans, (rules.tokens or 256) // 4)
    else:
        sections = [Span(0, len(text))]
    sections = _without_blanks(text, sections)
    if rules.tokens is None:
        return sections
    # White space can be tokens, so that a part may be blank.
    return _without_blanks(text, [part for section in sections for part in _by_tokens(text, section, rules, token_spans, title)])


def title_of(base: str, path: Sequence[str]) -> str:
    """The title of a passage: its file and the headings that it is under, ``docs/a.md > Install > Linux``."""
    return " > ".join((base, *path)) if base else " > ".join(path)


def line_starts(text: str) -> list[int]:
    r"""The first character of each line; lines end at ``\n``, ``\r\n`` or ``\r``.

    Example:
        >>> line_starts("a\nb\r\n\rc")
        [0, 2, 5, 6]
    """
    return [0, *(match.end() for match in _LINE_END.finditer(text))]


def _without_blanks(text: str, spans: Sequence[Span]) -> list[Span]:
    """Join blank spans to the span before; blank ones at the start to the first that is not blank."""
    joined: list[Span] = []
    begin: int | None = None
    for span in spans:
        if not text[span.start : span.end].strip():
            if joined:
                joined[-1] = joined[-1]._replace(end=span.end)
            elif begin is None:
                begin = span.start
            continue
        joined.append(span if begin is None else span._replace(start=begin))
        begin = None
    return joined


def _from_starts(text: str, starts: Sequence[tuple[int, tuple[str, ...]]]) -> list[Span]:
    """Spans from their first characters and paths; what is before the first has no path."""
    whole = [*([] if starts and starts[0][0] == 0 else [(0, ())]), *starts]
    ends = [start for start, _ in whole[1:]] + [len(text)]
    return [Span(start, end, path) for (start, path), end in zip(whole, ends, strict=True)]


def _lines(text: str) -> Iterator[tuple[int, str]]:
    """The first character of each line, and the line without its end."""
    starts = line_starts(text)
    for start, end in zip(starts, [*starts[1:], len(text)], strict=True):
        yield start, text[start:end].rstrip("\r\n")


def _markdown(text: str) -> list[Span]:
    found: list[tuple[int, int, str]] = []
    fence, before = "", (0, "")
    front = _FRONT_MATTER.match(text)
    skipped = front.end() if front else 0
    for start, line in _lines(text):
        if start < skipped:
            continue
        if opened := _FENCE.match(line):
            mark = opened[1]
            if not fence:
                fence = mark
            elif mark[0] == fence[0] and len(mark) >= len(fence) and not line.strip().strip(mark[0]):
                fence = ""
            before = (start, "")
            continue
        if fence:
            continue
        if heading := _ATX.match(line):
            title = line[heading.end() :].strip()
            bare = title.rstrip("#")  # which may close a heading after a space
            found.append((start, len(heading[1]), title if bare and bare[-1] not in " \t" else bare.rstrip()))
            before = (start, "")
        elif before[1] and (under := _SETEXT.match(line)):
            found.append((before[0], 1 if under[1][0] == "=" else 2, before[1].strip()))
            before = (start, "")
        else:
            before = (start, "" if _NO_PARAGRAPH.match(line) else line)
    return _from_starts(text, _paths(found))


def _rst(text: str) -> list[Span]:
    found: list[tuple[int, int, str]] = []
    styles: list[tuple[str, bool]] = []  # in the order of their appearance, which is that of their levels
    lines = list(_lines(text))
    for number in range(1, len(lines)):
        line, title = lines[number][1], lines[number - 1][1]
        adorned = _ADORNMENT.match(line)
        if not adorned or not title.strip() or _ADORNMENT.match(title) or len(line.rstrip()) < len(title.strip()):
            continue
        over = number > 1 and lines[number - 2][1].rstrip() == line.rstrip()
        if title[0] in " \t" and not over:
            continue
        style = (adorned[1], over)
        if style not in styles:
            styles.append(style)
        found.append((lines[number - 2 if over else number - 1][0], styles.index(style) + 1, title.strip()))
    return _from_starts(text, _paths(found))


def _paths(headings: Sequence[tuple[int, int, str]]) -> list[tuple[int, tuple[str, ...]]]:
    """The path of each heading, from its first character, level and title."""
    open_headings: list[tuple[int, str]] = []
    paths = []
    for start, level, title in headings:
        open_headings = [each for each in open_headings if each[0] < level] + [(level, title)]
        paths.append((start, tuple(name for _, name in open_headings if name)))
    return paths


def _python(text: str) -> list[Span] | None:
    """Functions, classes and methods; None if this is not Python."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the code that is read, such as invalid escapes
            module = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    starts = line_starts(text)
    if module.body and (module.body[-1].end_lineno or 0) > len(starts):
        return None
    found: list[tuple[int, tuple[str, ...]]] = []
    _definitions(module.body, text, starts, (), found)
    return _from_starts(text, found)


def _definitions(
    body: Sequence[ast.stmt], text: str, starts: Sequence[int], path: tuple[str, ...], found: list[tuple[int, tuple[str, ...]]]
) -> None:
    """Add the start and path of every definition, and of what follows it under the path around it."""
    free = False
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            inner = (*path, node.name)
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)]) - 1
            found.append((_with_comments(text, starts, first), inner))
            if isinstance(node, ast.ClassDef):
                _definitions(node.body, text, starts, inner, found)
            free = True
        elif free:
            found.append((_with_comments(text, starts, node.lineno - 1), path))
            free = False


def _with_comments(text: str, starts: Sequence[int], line: int) -> int:
    """The first character of a statement with the comment lines directly above it."""
    while line and text[starts[line - 1] : starts[line]].lstrip().startswith("#"):
        line -= 1
    return starts[line]


def _blocks(text: str, token_spans: TokenSpans, least: int) -> list[Span]:
    """Blocks that begin at the left margin after an empty line; neighbours that are small together are one passage."""
    begins, empty = [0], False
    for start, line in _lines(text):
        if empty and line and not _CLOSING.match(line):
            begins.append(start)
        empty = not line.strip()
    if len(begins) == 1:
        return [Span(0, len(text))]
    tokens = [start for start, _ in _all_tokens(text, token_spans)]
    blocks: list[Span] = []
    for start, end in zip(begins, [*begins[1:], len(text)], strict=True):
        before = blocks[-1].start if blocks else 0
        if blocks and bisect_left(tokens, end) - bisect_left(tokens, before) <= least:
            blocks[-1] = Span(before, end)
        else:
            blocks.append(Span(start, end))
    return blocks


def _all_tokens(text: str, token_spans: TokenSpans, start: int = 0) -> list[tuple[int, int]]:
    """Tokens of a text of any length with places from ``start`` on; long texts are tokenized in blocks that end at white space."""
    found: list[tuple[int, int]] = []
    first = 0
    while first < len(text):
        last = min(first + _BLOCK, len(text))
        if last < len(text):
            space = max(text.rfind("\n", first + 1, last), text.rfind(" ", first + 1, last))
            last = space if space > first else last
        found += [(start + first + begin, start + first + end) for begin, end in token_spans(text[first:last])]
        first = last
    return found


def _by_tokens(text: str, section: Span, rules: PassageRules, token_spans: TokenSpans, title: str) -> Iterator[Span]:
    """Cut a section evenly into as few passages of at most so many tokens as hold it; the title takes half of them at most."""
    tokens = _all_tokens(text[section.start : section.end], token_spans, section.start)
    budget = rules.tokens or len(tokens)
    used = len(token_spans(f"{title_of(title, section.path)} "))  # a space joins title and text
    limit = max(_LEAST, budget // 2, budget - used)
    overlap = min(rules.overlap, limit // 2 - 1)
    first, start, end = 0, section.start, section.start  # the first token of the passage, its first character, the end of the one before
    while (left := len(tokens) - first) > limit:
        more = -(-(left - limit) // (limit - overlap))  # passages after this one
        size = -(-(left + more * overlap) // (more + 1))
        least = max(size - size // 3, min(size, budget // 4 + 1), overlap + 1)
        most = min(limit, 2 * size - least)
        end = _break(text, max(tokens[first + least][0], end), tokens[first + size][0], tokens[first + most][0])
        yield Span(start, end, section.path)
        after = bisect_right(tokens, end, key=itemgetter(1))  # a token may begin with the space before its word, which ends this passage
        first = _overlapping(tokens, first + 1, after, overlap)
        start = tokens[first][0] if first < after else end
    yield Span(start, section.end, section.path)


def _overlapping(tokens: Sequence[tuple[int, int]], least: int, after: int, overlap: int) -> int:
    """The first token of a passage that repeats tokens before ``after``: if possible the beginning of a word."""
    wanted = max(least, after - overlap)
    for first in range(wanted, max(least, wanted - _LEAST // 4) - 1, -1):
        if first >= after or tokens[first - 1][1] < tokens[first][0]:
            return first
    return wanted


def _break(text: str, first: int, wanted: int, last: int) -> int:
    """The best place to cut between two characters: of the best kind, the one nearest to ``wanted``, which is taken if there is none."""
    for pattern in _BREAKS:
        ends = [match.end() for match in pattern.finditer(text, first, last)]
        if ends:
            return min(ends, key=lambda end: abs(end - wanted))
    while wanted < len(text) and text[wanted].isspace():
        wanted += 1
    return wanted
