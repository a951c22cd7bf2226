"""All published collections by name: a family, a group or a single one; and which of them are in the cache."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from functools import cache

from quiver.encoder.errors import InputError
from quiver.eval.datasets.beir import beir
from quiver.eval.datasets.cache import Cache, Record
from quiver.eval.datasets.coir import coir, mteb
from quiver.eval.datasets.metadata import Entry
from quiver.eval.datasets.mldr import mldr
from quiver.eval.datasets.nanobeir import nanobeir
from quiver.eval.datasets.sources import Source


@cache
def registry() -> Mapping[str, Entry]:
    """Key -> entry, in the order in which they are listed."""
    return {entry.key: entry for entry in (*beir(), *mldr(), *coir(), *mteb(), *nanobeir())}


def find(name: str) -> tuple[Entry, ...]:
    """The entries that a name stands for: ``beir/scifact`` itself, the forums of ``beir/cqadupstack``, all of ``beir``.

    Returns:
        Nothing where there is no such name.

    Example:
        >>> [entry.name for entry in find("beir/scifact")], len(find("beir/cqadupstack")), find("beir/sci")
        (['scifact'], 12, ())
    """
    wanted = name.strip("/").lower()
    return tuple(entry for key, entry in registry().items() if key == wanted or key.startswith(f"{wanted}/"))


def require(name: str) -> tuple[Entry, ...]:
    """The entries that a name stands for.

    Raises:
        InputError: There is no such name; says which are near.
    """
    entries = find(name)
    if not entries:
        raise InputError(f"unknown collection {name!r}; {near(name)}")
    return entries


def shortest(entries: Sequence[Entry]) -> list[str]:
    """The fewest names that stand for these entries and no others, in their order.

    Example:
        >>> shortest([*find("beir/cqadupstack"), *find("mldr/en")])
        ['beir/cqadupstack', 'mldr/en']
    """
    keys = {entry.key for entry in entries}
    names: dict[str, None] = {}
    for entry in entries:
        groups = ["/".join(entry.key.split("/")[:depth]) for depth in range(1, entry.key.count("/") + 1)]
        whole = (group for group in groups if all(member.key in keys for member in find(group)))
        names[next(whole, entry.key)] = None
    return list(names)


def near(name: str) -> str:
    """The names like a wrong one, for its error."""
    wanted, names = name.strip("/").lower(), _names()
    ends = [key for key in names if key.rpartition("/")[2] == wanted.rpartition("/")[2]]
    found = dict.fromkeys([*ends, *difflib.get_close_matches(wanted, names, n=3)])
    return f"did you mean {' or '.join(found)}?" if found else "quiver collections list shows the names"


def held(entry: Entry, cache: Cache) -> tuple[Source, Record] | None:
    """The first of an entry's sources that is in the cache, and its record; None where none is.

    One whose record is damaged is not there: a warning says so.
    """
    for source in entry.sources.values():
        record = cache.record(source)
        if record is not None:
            return source, record
    return None


def missing(entries: Sequence[Entry], cache: Cache) -> list[Entry]:
    """Those that are not in the cache, or whose record is damaged."""
    return [entry for entry in entries if held(entry, cache) is None]


def _names() -> list[str]:
    """Every key, and every group that keys are in."""
    groups = {"/".join(key.split("/")[:depth]) for key in registry() for depth in range(1, key.count("/") + 1)}
    return [*registry(), *sorted(groups)]
