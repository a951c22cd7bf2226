"""The documents of a damaged segment, as far as they can be read: what a repair keeps.

Ids, texts and metadata partly repeat each other. An id that is lost is taken from the stored text of its document, metadata from the
stored texts; only what is lost twice is lost.

Shapes: P documents of a segment.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from quiver.retrieval.index.documents.ids import STEM, IdTable
from quiver.retrieval.index.documents.metadata import MetadataTable, MetadataWriter, is_metadata
from quiver.retrieval.index.documents.strings import PackedStrings
from quiver.retrieval.index.documents.table import DocumentTable, open_tokens
from quiver.retrieval.index.documents.texts import Texts, lost_line
from quiver.retrieval.index.errors import DamagedIndexError, LostTextError
from quiver.retrieval.index.mapped import CheckedArray, Files

# How many ids are decoded at a time.
_TOGETHER = 65_536


@dataclass(frozen=True)
class SalvagedDocuments:
    """What is left of the documents of a segment.

    Attributes:
        table: The documents; the id of a row that has none left is empty.
        ids: Their ids by row; None where an id is lost.
        without_text: Rows whose text is lost, (P,).
        without_fields: Rows whose metadata is lost, (P,).
    """

    table: DocumentTable
    ids: Sequence[str | None]
    without_text: NDArray[np.bool_]
    without_fields: NDArray[np.bool_]


def salvage_documents(files: Files, count: int, *, texts: bool, fields: Sequence[str] | None) -> SalvagedDocuments:
    """Read the documents of a segment around the damage of its files.

    Args:
        files: The segment's, the damaged ones salvaged.
        count: Number of documents P.
        texts: Whether their texts were kept.
        fields: The fields of the metadata that were kept; None for all.

    Raises:
        DamagedIndexError: The files do not fit each other.
    """
    strings = PackedStrings.open(files, STEM, count)
    lines = Texts(files, count) if texts else None
    without_text = np.zeros(count, bool) if lines is None else lines.lost()
    ids = _ids(strings, lines, without_text)
    if lines is not None:
        instead = {row: lost_line(ids[row] or "") for row in np.flatnonzero(without_text).tolist()}
        lines = Texts(files, count, instead=instead)
    metadata, without_fields = _metadata(files, count, lines, fields)
    stored = open_tokens(files, count)
    tokens = np.where(stored.damaged(), 0, stored.whole()).astype(np.uint32)
    packed = PackedStrings.pack(key or "" for key in ids)
    nothing = CheckedArray(np.zeros(0, np.uint64))
    table = DocumentTable(IdTable(packed, nothing, nothing, nothing), metadata, CheckedArray(tokens), lines)
    return SalvagedDocuments(table, ids, without_text, without_fields)


def _ids(strings: PackedStrings, lines: Texts | None, without_text: NDArray[np.bool_]) -> list[str | None]:
    lost = strings.lost()
    ids: list[str | None] = [None] * len(strings)
    whole = np.flatnonzero(~lost)
    for start in range(0, len(whole), _TOGETHER):
        rows = whole[start : start + _TOGETHER]
        for row, key in zip(rows.tolist(), strings.take(rows), strict=True):
            ids[row] = key
    if lines is not None:
        for row in np.flatnonzero(lost & ~without_text).tolist():
            ids[row] = str(json.loads(lines.line(row))["_id"])
    return ids


def _metadata(files: Files, count: int, lines: Texts | None, fields: Sequence[str] | None) -> tuple[MetadataTable, NDArray[np.bool_]]:
    """The columns, and the rows whose metadata is lost."""
    if not any(is_metadata(name) for name in files.lost_names):
        return MetadataTable.open(files), np.zeros(count, bool)
    if lines is None:
        return MetadataTable([]), np.ones(count, bool)
    writer, lost = MetadataWriter(fields), np.zeros(count, bool)
    for row in range(count):
        try:
            writer.add(lines[row].metadata)
        except (LostTextError, DamagedIndexError):
            writer.add(None)
            lost[row] = True
    return MetadataTable(writer.columns()), lost
