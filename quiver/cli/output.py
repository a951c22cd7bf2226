"""What commands print (tables, JSON, errors in one line), and how they read the values of shared options.

Nothing here imports torch, faiss or numba: this module is loaded by every command, also for ``--help``.
"""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from json import dumps
from pathlib import Path
from typing import Any, Literal

import typer
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text
from typer.core import TyperGroup

from quiver.encoder.environment import installed_version

# A number, also with an interval or a score in parentheses; a dash where there is none.
_NUMBER = re.compile(r"-|[-+]?[\d,]+(\.\d+)?(e[-+]?\d+)?( \([-+.\d]+\))?")
_LABELS = 2  # leading text columns that are repeated in each part of a table that is printed in several parts
_NARROWEST = 16  # width of a text column


def read_ids(path: Path) -> list[str]:
    """Read document ids from a file, one per line."""
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
    typer.echo(dumps(value, indent=2, ensure_ascii=False))


def print_result(value: object, *lines: str, json: bool) -> None:
    """Print what a command did: the value as JSON, or the lines."""
    if json:
        print_json(value)
    for line in () if json else lines:
        say(line)


def print_table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table on standard output. Numbers are right-aligned and never broken; text is folded.

    A table that is wider than the terminal is printed in several parts, each with the leading text columns.
    """
    console, cells = Console(), list(zip(header, *rows, strict=True))
    longest = [max(map(cell_len, column)) for column in cells]
    numbers = [all(_NUMBER.fullmatch(cell) for cell in column[1:]) for column in cells]
    narrowest = min(_NARROWEST, console.width // 4)
    least = [
        whole if number else max(cell_len(column[0]), min(whole, narrowest))
        for column, whole, number in zip(cells, longest, numbers, strict=True)
    ]
    for position, part in enumerate(_split_columns(least, numbers, console.width)):
        # A word, such as a path, is broken only where the columns right of it cannot be narrower; what is left goes to the longest texts.
        room, widths = console.width - 1 - sum(least[column] + 3 for column in part), {column: least[column] for column in part}
        for column in part:
            word = max((cell_len(word) for cell in cells[column] for word in cell.split()), default=0)
            if 0 < word - widths[column] <= room:
                room, widths[column] = room - word + widths[column], word
        for column in sorted(part, key=lambda each: longest[each]):
            more = max(0, min(longest[column] - widths[column], room))
            room, widths[column] = room - more, widths[column] + more
        # Titles and cells are Text: in plain strings rich would interpret [bold] and :smile: as markup.
        table = Table(title=Text(title, style="table.title") if position == 0 else None, title_justify="left")
        for column in part:
            justify: Literal["right", "left"] = "right" if numbers[column] else "left"
            table.add_column(Text(header[column]), justify=justify, no_wrap=numbers[column], overflow="fold", width=widths[column])
        for row in rows:
            table.add_row(*(Text(row[column]) for column in part))
        console.print(table)


def _split_columns(widths: Sequence[int], numbers: Sequence[bool], room: int) -> list[list[int]]:
    """Columns of each part of a table: all, if they fit."""
    labels = next((count for count, number in enumerate(numbers[:_LABELS]) if number), min(_LABELS, len(widths) - 1))
    parts = [list(range(labels))]
    for column in range(labels, len(widths)):
        if 1 + sum(widths[each] + 3 for each in [*parts[-1], column]) > room and len(parts[-1]) > labels:
            parts.append(list(range(labels)))
        parts[-1].append(column)
    return parts


def print_values(title: str, values: Mapping[str, object]) -> None:
    """Print names and values as a table of two columns; None is left out, and a mapping in it is printed by its own names."""
    rows = list[tuple[str, str]]()
    for name, value in values.items():
        inner = {f"{name} {key}": each for key, each in value.items()} if isinstance(value, Mapping) else {name: value}
        for key, each in inner.items():
            number = isinstance(each, int | float) and not isinstance(each, bool)
            shown = f"{each:,.4f}" if isinstance(each, float) else f"{each:,}" if number else str(each)
            rows += [] if each is None else [(key.replace("_", " "), shown)]
    print_table(title, ("", "value"), rows)


def help_alone(context: typer.Context) -> None:
    """Print the help of a command group that was called without a command; exit status 2.

    A callback for ``invoke_without_command``, because ``no_args_is_help`` behaves differently in different versions of Click.
    """
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
        raise typer.Exit(2)


def group_with_default(name: str) -> type[TyperGroup]:
    """A group whose first argument need not be a command: ``quiver report FOLDER`` means ``quiver report write FOLDER``."""

    class DefaultGroup(TyperGroup):
        def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
            if args and args[0] not in self.commands and args[0] not in ctx.help_option_names:
                args = [name, *args]
            parsed: list[str] = super().parse_args(ctx, args)
            return parsed

    return DefaultGroup


def command_line() -> str:
    """Return the command line, to be recorded with the results."""
    return shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]])


def quiver_version() -> str:
    """Return the installed version of Quiver."""
    return installed_version("quiver-retrieval") or "unknown (not installed)"
