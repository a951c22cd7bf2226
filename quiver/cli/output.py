"""What the commands print: tables for people, JSON for machines, errors in one line."""

from __future__ import annotations

import json
import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from quiver.encoder.errors import InputError
from quiver.encoder.files import cache_folder
from quiver.retrieval.versions import installed_version

_NUMBER = re.compile(r"[-+]?[\d,]+(\.\d+)?(e[-+]?\d+)?")

# Columns that are repeated where a table is printed in several, at most, and the width that text is folded to at least.
_LABELS = 2
_FOLDED = 24

JsonOption = typer.Option("--json", help="Print JSON for machines.")
OverwriteOption = typer.Option("--overwrite", help="Replace what is there.")
Int8Option = typer.Option("--int8", help="Quantise the model's matrices: about half of the time on a CPU with VNNI, two thirds on others.")
VerifyOption = typer.Option("--verify/--no-verify", help="Compare each block of a file with its checksum when it is first read.")
GenerationOption = typer.Option("--generation", help="Open this older generation instead of the newest one.")
CacheOption = typer.Option(help="Folder that keeps vectors. Default: the user's cache, which is pruned (quiver cache --help).")
NoCacheOption = typer.Option("--no-cache", help="Keep no vectors for the next time.")
ProgressOption = typer.Option("--progress/--no-progress", help="Show bars on standard error; by default on a terminal.")


def vector_cache(cache: Path | None, no_cache: bool) -> Path | None:
    """The folder that keeps vectors, by the two options; None for none.

    Raises:
        InputError: Both were given.
    """
    if no_cache and cache is not None:
        raise InputError("--cache and --no-cache exclude each other")
    return None if no_cache else cache or cache_folder("vectors")


def say_error(message: str) -> None:
    """One line on standard error (a recipe's problems follow indented, one a line)."""
    typer.echo(f"quiver: error: {message}", err=True)


def say(message: str) -> None:
    """One line on standard output."""
    typer.echo(message)


def print_json(value: object) -> None:
    """JSON on standard output."""
    typer.echo(json.dumps(value, indent=2, ensure_ascii=False))


def print_table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A table on standard output; columns of numbers are set to the right and never cut, text is folded.

    A table that is wider than the terminal is printed in several, each with the columns that say what a row is of.

    Title and cells are others' words (a path, a document): rich would read ``[bold]`` and ``:smile:`` in a string as its own.
    """
    columns = [(name, [row[place] for row in rows]) for place, name in enumerate(header)]
    numbers = [all(_NUMBER.fullmatch(cell) for cell in column) for _, column in columns]
    console = Console()
    for place, part in enumerate(_parts(columns, numbers, console.width)):
        table = Table(title=Text(title, style="table.title") if place == 0 else None, title_justify="left")
        for number in part:
            justify: Literal["right", "left"] = "right" if numbers[number] else "left"
            table.add_column(columns[number][0], justify=justify, no_wrap=numbers[number], overflow="fold")
        for row in rows:
            table.add_row(*(Text(row[number]) for number in part))
        console.print(table)


def _parts(columns: Sequence[tuple[str, Sequence[str]]], numbers: Sequence[bool], width: int) -> list[list[int]]:
    """The columns of each of the tables that one is printed in."""
    labels = 0
    while labels < len(columns) - 1 and labels < _LABELS and not numbers[labels]:
        labels += 1

    def wide(number: int) -> int:
        longest = max(map(len, (columns[number][0], *columns[number][1])))
        return 3 + (longest if numbers[number] else min(longest, _FOLDED))

    head = list(range(labels))
    room = width - 1 - sum(map(wide, head))
    parts, left = [list(head)], room
    for number in range(labels, len(columns)):
        if wide(number) > left and len(parts[-1]) > labels:
            parts.append(list(head))
            left = room
        parts[-1].append(number)
        left -= wide(number)
    return parts


def help_alone(context: typer.Context) -> None:
    """Show a family's help where no command is given.

    A callback for ``invoke_without_command``: what ``no_args_is_help`` does has changed from one Click to the next.

    Raises:
        typer.Exit: With status 2, as for every command line that is not complete.
    """
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
        raise typer.Exit(2)


def show_progress(choice: bool | None) -> bool:
    """Whether bars are shown: as asked, or when a person is watching."""
    return sys.stderr.isatty() if choice is None else choice


def command_line() -> str:
    """The command as it was typed, for provenance."""
    return shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]])


def quiver_version() -> str:
    """The installed version."""
    return installed_version("quiver-retrieval") or "unknown (not installed)"
