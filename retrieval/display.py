"""Tables for people: plain text for a terminal, HTML for a notebook; and short names of folders in them."""

from __future__ import annotations

import html
from collections.abc import Sequence
from pathlib import Path


def text_table(header: Sequence[str], rows: Sequence[Sequence[str]], *, width: int = 100) -> str:
    """Align cells in columns; the last column is cut so that no line is longer than ``width`` characters.

    Example:
        >>> print(text_table(("id", "text"), [("owl", "Owls have wings."), ("trout", "Trout have fins.")], width=16))
        id     text
        owl    Owls hav…
        trout  Trout ha…
    """
    shown = [[" ".join(cell.split()) for cell in row] for row in (header, *rows)]
    widths = [max(len(row[column]) for row in shown) for column in range(len(header) - 1)]
    left = max(8, width - sum(widths) - 2 * len(widths))
    lines = []
    for row in shown:
        last = row[-1] if len(row[-1]) <= left else row[-1][: left - 1] + "…"
        lines.append("  ".join([*(cell.ljust(size) for cell, size in zip(row, widths, strict=False)), last]).rstrip())
    return "\n".join(lines)


def html_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table in HTML; the cells are text, not markup.

    Example:
        >>> html_table(("id", "text"), [("a", "1 < 2")])
        '<table><thead><tr><th>id</th><th>text</th></tr></thead><tbody><tr><td>a</td><td>1 &lt; 2</td></tr></tbody></table>'
    """
    head = "".join(f"<th>{html.escape(cell)}</th>" for cell in header)
    body = "".join(f"<tr>{''.join(f'<td>{html.escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def short_names(paths: Sequence[str]) -> list[str]:
    """Names of indexes and models in tables: the last part of each path, or the whole paths if two last parts are equal.

    Example:
        >>> short_names(["indexes/dense", "bm25"]), short_names(["a/dense", "b/dense"])
        (['dense', 'bm25'], ['a/dense', 'b/dense'])
    """
    names = [Path(path).name or Path(path).resolve().name for path in paths]
    return names if len(set(names)) == len(names) else list(paths)
