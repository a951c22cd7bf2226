"""Sum up the passages that a search found per document: the files, or other values of a field, with their best passages first."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from quiver.encoder.errors import InputError
from quiver.retrieval.data.entries import STRING, typed_value
from quiver.retrieval.index.engines import check_k
from quiver.retrieval.index.filters import to_metadata
from quiver.retrieval.index.index import IndexReader
from quiver.retrieval.records import Group, Hits, Value

_PASSAGES = 4  # passages a group that are searched for at first


def group_hits(ranking: Mapping[str, float], keys_of: Callable[[Sequence[str]], Sequence[str]]) -> list[Group]:
    """Group the hits of one query, passage id -> score, by the group that ``keys_of`` gives for each id.

    Example:
        >>> groups = group_hits({"a#2": 0.9, "b#1": 0.8, "a#1": 0.5}, lambda ids: [key.partition("#")[0] for key in ids])
        >>> [(group.key, group.score, list(group.passages)) for group in groups]
        [('a', 0.9, ['a#2', 'a#1']), ('b', 0.8, ['b#1'])]
    """
    found: dict[str, dict[str, float]] = {}
    for key, (passage, score) in zip(keys_of(list(ranking)), ranking.items(), strict=True):
        found.setdefault(key, {})[passage] = score
    return [Group(key, passages) for key, passages in found.items()]


def search_groups(search: Callable[[int], Hits], k: int, keys_of: Callable[[Sequence[str]], Sequence[str]]) -> Hits:
    """Search for the k best groups of each query: passages are searched ever deeper, until there are as many groups or no more passages.

    The groups of a query do not depend on how deep the other queries have to be searched. If there are fewer groups, all passages are
    searched, so `FieldValues.most` should bound k where it can. ``keys_of`` gives the group of each id, see `field_of`.

    Returns:
        The best passage of each group alone, and the groups, the one with the best passage first.
    """
    depth, complete = _PASSAGES * check_k(k), dict[int, list[Group]]()
    while True:
        hits = search(depth)
        for query in range(len(hits)):
            if query not in complete:
                found = group_hits(hits.ranking(query), keys_of)[:k]
                if len(found) >= k or len(hits.ids[query]) < depth:
                    complete[query] = found
        if len(complete) == len(hits):
            groups = [complete[query] for query in range(len(hits))]
            scores = [np.array([each.score for each in own], found.dtype) for own, found in zip(groups, hits.scores, strict=True)]
            return replace(hits, ids=[[each.best for each in own] for own in groups], scores=scores, groups=groups)
        depth *= 4


def field_of(index: IndexReader, field: str) -> FieldValues:
    """Function from ids of documents to their values of a field; a document without the field is a group of its own.

    Of a list, the different values count.

    Raises:
        InputError: No document has the field, or the index stores no texts.
    """
    if not index.manifest.policy.store_text:
        raise InputError(
            f"{index.path}: the index was built with --no-text (store_text=False), so the fields of hits are unknown; build it again"
        )
    if field not in index.fields:
        raise InputError(f"{index.path}: no document has the field '{field}'; the fields are {', '.join(index.fields) or 'none'}")
    columns = _COLUMNS.setdefault(index, {})
    if field not in columns:
        columns[field] = _read_column(index, field)
    return FieldValues(index, field, columns[field])


class FieldValues:
    """Function from ids of documents to their values of a field; the documents have ``most`` different values, or fewer."""

    def __init__(self, index: IndexReader, field: str, column: _Column) -> None:
        self.most = column.most
        self._index, self._field, self._column = index, field, column
        self._known = dict[str, str]()  # queries have hits in common

    def __call__(self, ids: Sequence[str]) -> list[str]:
        """Return the value of each document."""
        new = [key for key in ids if key not in self._known]
        for key, place in zip(new, self._index.locate(new), strict=True):
            if place is None:  # of another index that is fused with this one
                self._known[key] = key
            elif (code := int(self._column.codes[place.segment][place.row])) >= 0:
                self._known[key] = self._column.values[code]
            else:
                found = (self._index.documents.at(place).metadata or {}).get(self._field, key)
                several: Sequence[Value] = [found] if isinstance(found, str | int | float) else found
                self._known[key] = ", ".join(dict.fromkeys(str(typed_value(each, STRING)) for each in several)) or key  # an empty list
        return [self._known[key] for key in ids]


@dataclass(frozen=True)
class _Column:
    """Of a field, the ``most`` different values, and per segment each row's position in ``values``, -1 for none or several, (n,) int32."""

    values: Sequence[str]
    codes: Sequence[NDArray[np.int32]]
    most: int


# The columns of each opened index by field: a service groups by the same fields again and again.
_COLUMNS: WeakKeyDictionary[IndexReader, dict[str, _Column]] = WeakKeyDictionary()


def _read_column(index: IndexReader, field: str) -> _Column:
    known, codes = dict[str, int](), list[NDArray[np.int32]]()
    used, others = set[int](), 0
    for segment in index.segments:
        rows = np.full(len(segment.vectors), -1, np.int32)
        entries = segment.documents.columns.entries(field)
        if entries is not None:
            values, numbers, owners = entries.counted
            names = [str(typed_value(to_metadata(value), STRING)) for value in values.to_pylist()]
            rows[owners] = np.array([known.setdefault(name, len(known)) for name in names], np.int32)[numbers]
            rows[np.bincount(owners, minlength=len(rows)) != 1] = -1
        found, counts = np.unique(rows[segment.kept], return_counts=True)
        used.update(found[found >= 0].tolist())
        others += int(counts[found < 0].sum())
        codes.append(rows)
    return _Column(list(known), codes, max(1, len(used) + others))
