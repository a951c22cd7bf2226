"""Registry of the published collections: look up a family, a group or one collection by name, and find it in the cache."""

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
    """Key -> entry, in listing order."""
    return {entry.key: entry for entry in (*beir(), *mldr(), *coir(), *mteb(), *nanobeir())}


def find(name: str) -> tuple[Entry, ...]:
    """Entries with a name: one for ``beir/scifact``, the forums for ``beir/cqadupstack``, the whole family for ``beir``.

    Returns:
        The entries, or an empty tuple if the name is unknown.

    Example:
        >>> [entry.name for entry in find("beir/scifact")], len(find("beir/cqadupstack")), find("beir/sci")
        (['scifact'], 12, ())
    """
    wanted = name.strip("/").lower()
    return tuple(entry for key, entry in registry().items() if key == wanted or key.startswith(f"{wanted}/"))


def require(name: str) -> tuple[Entry, ...]:
    """Entries with a name, which must exist.

    Raises:
        InputError: The name is unknown; suggests similar names.
    """
    entries = find(name)
    if not entries:
        raise InputError(f"unknown collection {name!r}; {near(name)}")
    return entries


def shortest(entries: Sequence[Entry]) -> list[str]:
    """Shortest list of names that covers these entries and no others, in their order.

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
    """Names similar to an unknown name, as text for an error message."""
    wanted, names = name.strip("/").lower(), _names()
    ends = [key for key in names if key.rpartition("/")[2] == wanted.rpartition("/")[2]]
    found = dict.fromkeys([*ends, *difflib.get_close_matches(wanted, names, n=3)])
    return f"did you mean {' or '.join(found)}?" if found else "quiver collections list shows the names"


def held(entry: Entry, cache: Cache) -> tuple[Source, Record] | None:
    """The first source of an entry that is in the cache, with its record; None if there is none.

    A source with a damaged record counts as missing, and a warning is logged.
    """
    for source in entry.sources.values():
        record = cache.record(source)
        if record is not None:
            return source, record
    return None


def missing(entries: Sequence[Entry], cache: Cache) -> list[Entry]:
    """Entries that are not in the cache or whose record is damaged."""
    return [entry for entry in entries if held(entry, cache) is None]


def _names() -> list[str]:
    """All keys, and all groups and families of keys."""
    groups = {"/".join(key.split("/")[:depth]) for key in registry() for depth in range(1, key.count("/") + 1)}
    return [*registry(), *sorted(groups)]
