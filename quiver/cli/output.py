"""What commands print (tables, JSON, errors in one line), and how they read the values of shared options.

Nothing here imports torch, faiss or numba: this module is loaded by every command, also for ``--help``.
"""

from __future__ import annotations

import json
import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import typer
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from quiver.encoder.environment import installed_version

if TYPE_CHECKING:
    pass

# A number, also with an interval or a score in parentheses; a dash where there is none.
_NUMBER = re.compile(r"-|[-+]?[\d,]+(\.\d+)?(e[-+]?\d+)?( \([-+.\d]+\))?")

_MAX_LABELS = 2  # leading text columns that are repeated in each part of a table that is printed in several parts
_FOLDED = 12  # narrowest width of a text column: only where it does not fit is a table printed in parts
_WHOLE = 24  # narrowest width of a text column in a table that is printed in parts


def read_ids(path: Path) -> list[str]:
    """Read document ids from a file, one per line.

    Raises:
        InputError: The file cannot be read, or is empty.
    """
    from quiver.encoder.files import read_lines

    return [line.strip(" \t") for _, line in read_lines(path)]  # an id may begin or end with other white space


def say_error(message: str) -> None:
    """Print an error on standard error: one line, for recipes followed by one indented line per problem."""
    typer.echo(f"quiver: error: {message}", err=True)


def say(message: str) -> None:
    """Print a line on standard output."""
    typer.echo(message)


def print_json(value: object) -> None:
    """Print JSON on standard output."""
    typer.echo(json.dumps(value, indent=2, ensure_ascii=False))


def print_table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table on standard output. Numeric columns are right-aligned and never truncated; text is folded.

    A table that is wider than the terminal is printed in several parts, each with the leading text columns.
    """
    # Titles and cells are Text: in plain strings rich would interpret [bold] and :smile: as markup.
    columns = [(name, [row[column] for row in rows]) for column, name in enumerate(header)]
    numbers = [all(_NUMBER.fullmatch(cell) for cell in column) for _, column in columns]
    console = Console()
    folded, whole = (_least_widths(columns, numbers, narrowest) for narrowest in (_FOLDED, _WHOLE))
    # Names are folded hard only where that keeps the table in one piece.
    least = folded if len(_parts(folded, numbers, console.width)) == 1 else whole
    for part_number, part in enumerate(_parts(least, numbers, console.width)):
        widths = _fitted([columns[number] for number in part], [least[number] for number in part], console.width)
        table = Table(title=Text(title, style="table.title") if part_number == 0 else None, title_justify="left")
        for number, width in zip(part, widths, strict=True):
            justify: Literal["right", "left"] = "right" if numbers[number] else "left"
            table.add_column(Text(columns[number][0]), justify=justify, no_wrap=numbers[number], overflow="fold", width=width)
        for row in rows:
            table.add_row(*(Text(_broken(row[number], width)) for number, width in zip(part, widths, strict=True)))
        console.print(table)


def _broken(cell: str, width: int) -> str:
    """Break words that are longer than ``width`` behind a hyphen or other mark in the second half of a line, where there is one."""

    def pieces(word: re.Match[str]) -> str:
        rest, lines = word[0], []
        while len(rest) > width:
            end = max(rest.rfind(mark, width // 2, width) for mark in "-/_.") + 1 or width
            lines.append(rest[:end])
            rest = rest[end:]
        return "\n".join([*lines, rest])

    return re.sub(r"\S+", pieces, cell)


def _least_widths(columns: Sequence[tuple[str, Sequence[str]]], numbers: Sequence[bool], narrowest: int) -> list[int]:
    """Least width of each column: all of a number, of a text the header and ``narrowest`` characters, more of a label beside one value."""
    longest = [max(map(len, (name, *cells))) for name, cells in columns]
    texts = [_WHOLE, narrowest] if len(columns) == 2 else [narrowest] * len(columns)
    return [
        whole if number else max(len(name), min(whole, text))
        for (name, _), whole, number, text in zip(columns, longest, numbers, texts, strict=True)
    ]


def _fitted(columns: Sequence[tuple[str, Sequence[str]]], least: Sequence[int], room: int) -> list[int]:
    """Widths of columns: from the left, room for the longest word, such as a path; then for the longest text, up to its length.

    rich would make the table wider than the terminal where columns have least widths.
    """
    left, found = room - 1 - sum(width + 3 for width in least), list(least)
    words = [max((cell_len(word) for cell in cells for word in cell.split()), default=0) for _, cells in columns]
    longest = [max(map(cell_len, (name, *cells))) for name, cells in columns]
    for number, word in enumerate(words):
        if 0 < word - found[number] <= left:
            left -= word - found[number]
            found[number] = word
    for _ in range(left):
        narrow = max(range(len(found)), key=lambda number: longest[number] - found[number])
        found[narrow] += longest[narrow] > found[narrow]
    return found


def _parts(widths: Sequence[int], numbers: Sequence[bool], room: int) -> list[list[int]]:
    """Split a table that is too wide for the terminal: column numbers of each part."""
    labels = 0
    while labels < len(widths) - 1 and labels < _MAX_LABELS and not numbers[labels]:
        labels += 1
    head, wide = list(range(labels)), [width + 3 for width in widths]
    room -= 1 + sum(wide[:labels])
    parts, left = [list(head)], room
    for number in range(labels, len(widths)):
        if wide[number] > left and len(parts[-1]) > labels:
            parts.append(list(head))
            left = room
        parts[-1].append(number)
        left -= wide[number]
    return parts


def help_alone(context: typer.Context) -> None:
    """Print the help of a command group that was called without a command.

    A callback for ``invoke_without_command``, because ``no_args_is_help`` behaves differently in different versions of Click.

    Raises:
        typer.Exit: No command was given; exit status 2.
    """
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
        raise typer.Exit(2)


def command_line() -> str:
    """Return the command line, to be recorded with the results."""
    return shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]])


def quiver_version() -> str:
    """Return the installed version of Quiver."""
    return installed_version("quiver-retrieval") or "unknown (not installed)"
