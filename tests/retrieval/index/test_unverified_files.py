"""Files with wrong content that were not verified: an error when they are used, never a crash."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from quiver.retrieval.index import DamagedIndexError, Filter, IndexReader, delete_documents, open_index


def searched(index: IndexReader, faults: ModuleType, effort: Any, filter: Filter | None = None) -> object:
    model = faults.ENGINES[index.kind].model
    return index.search(model.encode_texts(["word3 new"], "query").vectors, 3, effort=effort, filter=filter)


USES: dict[str, Callable[[IndexReader, ModuleType], object]] = {
    "open": lambda index, faults: None,
    "look at everything": lambda index, faults: searched(index, faults, "exact"),
    "look at little": lambda index, faults: searched(index, faults, faults.ENGINES[index.kind].narrow),
    "decode": lambda index, faults: index.segments[0].vectors.vectors(np.arange(9)),
    "score": lambda index, faults: index.scores(faults.TOKENS.encode_texts(["word3"], "query").vectors[0], ["a0", "a3", "a8"]),
    "filter": lambda index, faults: searched(index, faults, "exact", Filter.parse(["n<100"])),
    "locate": lambda index, faults: [index.locate([f"a{number}"]) for number in range(9)],
    "name": lambda index, faults: list(index.ids),
    "show": lambda index, faults: list(index.documents),
}


@pytest.mark.parametrize(
    ("engine", "file", "place", "value", "uses"),
    [
        # The number of a token's centroid is in the last two bytes of its record.
        ("ivf-tokens", "coarse.u8", -1, 0xFF, ["look at everything", "look at little", "decode", "score"]),
        ("ivf-dense", "coarse.u8", -1, 0xFF, ["look at little"]),
        ("exact-tokens", "lengths.u32", 3, 0xFF, ["open"]),
        ("ivf-tokens", "lengths.u32", 3, 0xFF, ["open"]),
        ("exact-dense", "ids.arrow", ("row", 1, 3), 0xFF, ["locate"]),
        ("exact-dense", "ids.arrow", ("id", 2, 0), 0xFF, ["name"]),
        ("exact-dense", "ids.json", 20, 0xFF, ["open"]),
        ("exact-dense", "texts.arrow", ("metadata", 2, 0), 0xFF, ["show"]),
        ("exact-dense", "texts.arrow", ("text", 2, 0), 0xFF, ["show"]),
    ],
)
def test_damage_is_reported_where_it_is_used(
    engine: str, file: str, place: int | tuple[str, int, int], value: int, uses: list[str], tmp_path: Path, faults: ModuleType
) -> None:
    faults.build(tmp_path / "i", engine)
    (path,) = (tmp_path / "i").rglob(file)
    if isinstance(place, tuple):  # a column of an Arrow file, the number of its buffer, and a byte of it
        column, buffer, byte = place
        place = json.loads(path.with_suffix(".json").read_text())[0][column]["buffers"][buffer][0] + byte
    content = bytearray(path.read_bytes())
    assert content[place] != value
    content[place] = value
    path.write_bytes(content)
    for use in uses:
        with pytest.raises(DamagedIndexError) as caught:
            USES[use](open_index(tmp_path / "i", verify=False), faults)
        assert "\n" not in str(caught.value)


def test_a_change_of_a_damaged_index_reports_the_damage(tmp_path: Path, faults: ModuleType) -> None:
    """Deleting verifies what it looks ids up in."""
    faults.build(tmp_path / "i", "exact-dense")
    (path,) = (tmp_path / "i").rglob("ids.arrow")
    path.write_bytes(b"\xff" * path.stat().st_size)
    with pytest.raises(DamagedIndexError, match=r"ids\.arrow: bytes 0 to [0-9]+ have changed"):
        delete_documents(tmp_path / "i", ["a1"])
