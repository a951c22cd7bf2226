"""Options that several commands share: the memory of a build and the engine of an index."""

from __future__ import annotations

import typer

from quiver.encoder import InputError
from quiver.retrieval.units import parse_size

_LEAST_MEMORY = 16 << 20

EngineOption = typer.Option(
    "--engine",
    help="Index engine with settings: auto, exact, or NAME:key=value,key=value such as ivf-dense:nlist=1024,bits=16.",
)


def parse_memory(text: str) -> int:
    """A size that an index can be built in; what is smaller is a number whose unit was forgotten.

    Raises:
        InputError: It is no size, or too small.
    """
    size = parse_size(text)
    if size < _LEAST_MEMORY:
        raise InputError(f"--memory {text} is {size:,} bytes; an index wants {_LEAST_MEMORY >> 20} MB at least, write it as 500MB or 2GB")
    return size
