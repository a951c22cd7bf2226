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
from quiver.encoder.errors import InputError
from quiver.retrieval.units import parse_size

if TYPE_CHECKING:
    from quiver.retrieval.records import Executor

# A number, also with an interval or a score in parentheses; a dash where there is none.
_NUMBER = re.compile(r"-|[-+]?[\d,]+(\.\d+)?(e[-+]?\d+)?( \([-+.\d]+\))?")

_MAX_LABELS = 2  # leading text columns that are repeated in each part of a table that is printed in several parts
_FOLDED = 12  # narrowest width of a text column: only where it does not fit is a table printed in parts
_WHOLE = 24  # narrowest width of a text column in a table that is printed in parts
_LEAST_MEMORY = 16 << 20


def vector_cache(cache: Path | None, no_cache: bool) -> Path | None:
    """Cache folder for vectors that ``--cache`` and ``--no-cache`` ask for; None for no cache, or where the user's cannot be written.

    Raises:
        InputError: Both options were given.
    """
    from quiver.retrieval.cache import VECTORS, folder_if_writable

    if no_cache and cache is not None:
        raise InputError("--cache and --no-cache exclude each other; pass only one of them")
    return None if no_cache else cache or folder_if_writable(VECTORS)


def open_executor(
    name: str,
    *,
    workers: int | None = None,
    address: str | None = None,
    device: str | None = None,
    devices: Sequence[str] | None = None,
) -> Executor:
    """Make the executor that ``--executor``, ``--workers``, ``--address`` and ``--devices`` ask for.

    Args:
        name: ``local`` or ``ray``.
        workers: Number of workers; None for this process alone (local) or as many as the cluster allows (ray).
        address: Address of a Ray cluster; None starts one on this machine.
        device: ``--device``, which workers do not have: each uses a GPU of its machine if there is one.
        devices: Device of each worker, see `parse_devices`; None for workers without one of their own.

    Raises:
        InputError: Unknown name, a device together with workers, ``devices`` together with another of these options, Ray is not installed,
            nothing answers at the address, or workers < 1.
    """
    if name not in ("local", "ray"):
        raise InputError(f"unknown executor {name!r}; choose one of local, ray")
    if devices is not None:
        return _on_devices(name, devices, workers, address, device)
    if device is not None and (name == "ray" or workers not in (None, 1)):
        raise InputError("--device is for encoding without workers; pass --devices 0,1 for workers on the GPUs 0 and 1, or remove it")
    if name == "ray":
        from quiver.retrieval.cluster.ray_backend import RayCluster

        return RayCluster(workers, address)
    if address is not None:
        raise InputError("--address is the address of a Ray cluster; add --executor ray, or remove --address")
    if workers in (None, 1):
        from quiver.retrieval.records import IN_PROCESS

        return IN_PROCESS
    from quiver.retrieval.cluster import LocalProcesses

    return LocalProcesses(workers or 0)


def place_encoding(
    executor: str, *, workers: int | None, address: str | None, device: str | None, devices: str | None
) -> tuple[Executor, str | None]:
    """The executor that the options ask for, and the device of the model in this process, which encodes the queries.

    Raises:
        InputError: See `open_executor` and `parse_devices`.
    """
    where = parse_devices(devices)
    found = open_executor(executor, workers=workers, address=address, device=device, devices=where)
    return found, where[0] if where else device


def _on_devices(name: str, devices: Sequence[str], workers: int | None, address: str | None, device: str | None) -> Executor:
    others = {"--executor ray": name == "ray", "--workers": workers, "--address": address, "--device": device}
    if given := [option for option, value in others.items() if value]:
        raise InputError(f"--devices starts one worker per device and excludes {given[0]}; remove one of the two")
    from quiver.retrieval.cluster import LocalProcesses

    return LocalProcesses(devices)


def parse_devices(text: str | None) -> list[str] | None:
    """Parse ``--devices``: names of devices, separated by commas; a number is that of a GPU. None if the option was not given.

    Raises:
        InputError: A device has another name, or this machine does not have it.

    Example:
        >>> parse_devices("cpu, cpu")
        ['cpu', 'cpu']
    """
    if text is None:
        return None
    from quiver.retrieval.models.folders import check_device

    names = [name.strip() for name in text.split(",")]
    return [check_device(f"cuda:{name}" if name.isdecimal() else name) for name in names]


def parse_memory(text: str) -> int:
    """Parse the memory for building an index, such as ``2GB``, in bytes.

    Raises:
        InputError: It is not a size, or less than 16 MB (a number whose unit was forgotten).
    """
    size = parse_size(text)
    if size < _LEAST_MEMORY:
        raise InputError(f"--memory {text} is {size:,} bytes; building an index needs at least 16 MB: write 500MB or 2GB")
    return size


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
