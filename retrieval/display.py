"""Tables for people: plain text for a terminal, HTML for a notebook."""

from __future__ import annotations

import html
import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType

NOT_SHOWN = re.compile(r"[\s\x00-\x1f\x7f-\x9f]")
"""Control characters, which a terminal would interpret, and white space. Each becomes one space, so that spans stay valid."""

FIGURE = re.compile(r"[-+]?[\d.,]*%?")
"""A cell that is a number, or empty."""

CELL = 300
"""Characters of a cell in a notebook."""


def text_table(
    header: Sequence[str], rows: Sequence[Sequence[str]], *, width: int = 100, limits: Mapping[str, int] = MappingProxyType({})
) -> str:
    """Align cells in columns; the last column is cut so that no line is longer than ``width`` characters.

    ``limits`` maps the names of other columns to the number of characters to which their cells are cut.

    Example:
        >>> print(text_table(("id", "text"), [("owl", "Owls have wings."), ("trout", "Trout have fins.")], width=16))
        id     text
        owl    Owls hav…
        trout  Trout ha…
    """
    wanted = [limits.get(name, width) for name in header]
    shown = [[_cut(" ".join(cell.split()), most) for cell, most in zip(row, wanted, strict=False)] for row in (header, *rows)]
    widths = [max(len(row[column]) for row in shown) for column in range(len(header) - 1)]
    left = max(8, width - sum(widths) - 2 * len(widths))
    lines = []
    for row in shown:
        last = _cut(row[-1], left)
        lines.append("  ".join([*(cell.ljust(size) for cell, size in zip(row, widths, strict=False)), last]).rstrip())
    return "\n".join(lines)


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"


def html_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table in HTML; the cells are text, not markup, and long ones are cut.

    Notebooks align cells to the right, which is for figures: columns of words begin where their script begins.

    Example:
        >>> html_table(("score",), [("0.5",), ("1.0",)])
        '<table><thead><tr><th>score</th></tr></thead><tbody><tr><td>0.5</td></tr><tr><td>1.0</td></tr></tbody></table>'
        >>> html_table(("text",), [("1 < 2",)]).split("><")[-4]
        'td dir="auto" style="text-align: start; max-width: 30em; overflow-wrap: break-word">1 &lt; 2</td'
    """
    words = [any(FIGURE.fullmatch(row[column]) is None for row in rows) for column in range(len(header))]

    def line(tag: str, cells: Sequence[str]) -> str:
        opened = [
            f'{tag} dir="auto" style="text-align: start; max-width: 30em; overflow-wrap: break-word"' if word else tag for word in words
        ]
        return "".join(f"<{start}>{html.escape(_cut(cell, CELL))}</{tag}>" for start, cell in zip(opened, cells, strict=True))

    body = "".join(f"<tr>{line('td', row)}</tr>" for row in rows)
    return f"<table><thead><tr>{line('th', header)}</tr></thead><tbody>{body}</tbody></table>"
