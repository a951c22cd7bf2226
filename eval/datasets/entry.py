"""An entry of the registry: one collection that is published, how its published numbers are made, and where it can be had."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from quiver.eval.datasets.facts import Facts
from quiver.eval.datasets.origins import Origin


@dataclass(frozen=True)
class Entry:
    """One published collection.

    Attributes:
        key: What is typed: family, perhaps group, and name, such as ``beir/cqadupstack/android``.
        name: What tables and files call it: no two collections have the same.
        split: The split that published numbers are on.
        splits: All splits that can be asked for.
        origins: Name -> where it can be had; the first is where it is fetched from if nothing else is asked for.
        facts: What is known of it; the revision is that of the first origin.
        exclude_self: A document with the query's own id is no answer to it.
        use_title: Titles are part of the documents' text.
        note: What somebody who compares numbers has to know.
    """

    key: str
    name: str
    split: str
    splits: tuple[str, ...]
    origins: Mapping[str, Origin]
    facts: Facts
    exclude_self: bool = False
    use_title: bool = True
    note: str = ""

    @property
    def origin(self) -> Origin:
        """The first origin."""
        return next(iter(self.origins.values()))
