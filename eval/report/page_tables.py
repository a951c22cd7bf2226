"""The tables of a page: cells that know how they sort, and the tables that are one line a run.

Nothing here is markup. No number is added that is not in the results, except sums and shares.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Key:
    """How a system is called all over the page.

    Attributes:
        letter: Its short key.
        colour: Number of its colour.
        label: Its name.
    """

    letter: str
    colour: int
    label: str


@dataclass(frozen=True)
class Column:
    """A column of a table.

    Attributes:
        label: Its heading.
        note: Small print under the heading.
        numeric: Whether it sorts by number.
        wide: Whether its texts are long.
    """

    label: str
    note: str = ""
    numeric: bool = True
    wide: bool = False


@dataclass(frozen=True)
class Cell:
    """A cell of a table.

    Attributes:
        text: What it says; empty where there is nothing.
        order: What it sorts by in a numeric column; None sorts last.
        note: Small print under the text.
        best: Whether it is the highest of its column.
        link: Anchor of the command that the number comes from.
        key: The system, in the column of the systems.
    """

    text: str
    order: float | None = None
    note: str = ""
    best: bool = False
    link: str = ""
    key: Key | None = None


@dataclass(frozen=True)
class Table:
    """A table; the first cells of its rows name them.

    Attributes:
        name: What it is, for readers who do not see it.
        columns: Its columns.
        rows: A cell a column each.
        kinds: Of each row, a class of the style sheet; empty where all rows are alike.
    """

    name: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[Cell, ...], ...]
    kinds: tuple[str, ...] = ()
