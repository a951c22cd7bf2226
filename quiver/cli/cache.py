"""``quiver cache info | prune``: what Quiver keeps in the user's cache folder."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from quiver.cli.output import JsonOption, help_alone, print_json, print_table, say
from quiver.encoder.files import cache_folder
from quiver.retrieval.cache import COLLECTIONS, LIMIT, VECTORS, WORDS, cache_entries, cache_limit, prune_cache
from quiver.retrieval.units import parse_size

app = typer.Typer(invoke_without_command=True, callback=help_alone, help="See and prune the cache of vectors and words.")


@app.command("info", epilog="Example: quiver cache info")
def info(as_json: Annotated[bool, JsonOption] = False) -> None:
    """Show where the cache is, how large it is and what it may take (QUIVER_CACHE_LIMIT)."""
    limit = cache_limit()
    parts = {name: cache_entries(name) for name in (VECTORS, WORDS, COLLECTIONS)}
    if as_json:
        sizes = {name: {"entries": len(entries), "bytes": sum(entry.bytes for entry in entries)} for name, entries in parts.items()}
        print_json({"folder": str(cache_folder(VECTORS).parent), "limit": limit, **sizes})
        return
    rows = []
    for name, entries in parts.items():
        used = max((entry.used for entry in entries), default=None)
        last = "never" if used is None else time.strftime("%Y-%m-%d", time.localtime(used))
        rows.append((name, f"{len(entries):,}", _gigabytes(sum(entry.bytes for entry in entries)), last))
    print_table(str(cache_folder(VECTORS).parent), ("", "entries", "size", "last used"), rows)
    allowed = "any size" if limit is None else _gigabytes(limit)
    say(f"vectors and words may take {allowed} together ({LIMIT}); collections are kept until you delete them")


@app.command("prune", epilog="Example: quiver cache prune --to 5GB")
def prune(
    to: Annotated[str | None, typer.Option("--to", help="Size to prune to, such as 5GB. Default: QUIVER_CACHE_LIMIT, or 20GB.")] = None,
    as_json: Annotated[bool, JsonOption] = False,
) -> None:
    """Remove the vectors and words that were used least recently; what was used within a day stays."""
    limit = cache_limit() if to is None else parse_size(to, "--to")
    removed = [] if limit is None else prune_cache(limit)
    left = sum(entry.bytes for name in (VECTORS, WORDS) for entry in cache_entries(name))
    if as_json:
        print_json({"removed": [str(entry.path) for entry in removed], "bytes": sum(entry.bytes for entry in removed), "left": left})
        return
    say(f"{len(removed):,} entries removed, {_gigabytes(sum(entry.bytes for entry in removed))}; {_gigabytes(left)} are left")


def _gigabytes(size: int) -> str:
    return f"{size / (1 << 30):,.2f} GB"
