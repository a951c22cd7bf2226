"""Tables in Markdown, whatever their cells hold."""

from __future__ import annotations

from collections.abc import Sequence


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    r"""A table; cells are text, not markup.

    Example:
        >>> print(table(["a", "b"], [["1", "x|y"]]))
        | a | b |
        | --- | --- |
        | 1 | x\|y |
    """
    lines = [[escape(cell) for cell in header], ["---"] * len(header), *([escape(cell) for cell in row] for row in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def escape(text: str) -> str:
    """Keep a text inside its cell and out of the markup."""
    for character in "\\|`*_<[":
        text = text.replace(character, f"\\{character}")
    return " ".join(text.split())
