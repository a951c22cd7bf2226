"""Entries with their positions: repeated ids are found, with 8 bytes of memory per id."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from quiver.encoder.errors import InputError
from quiver.retrieval.data.corpus import to_judgement, to_query
from quiver.retrieval.data.entries import EntryPosition, FieldNames, to_document, unique
from quiver.retrieval.records import Document, Query

FILE = Path("c.jsonl")


def documents(*ids: str, file: Path = FILE) -> Iterator[tuple[EntryPosition, Document]]:
    return ((EntryPosition(file, number), Document(key, "x")) for number, key in enumerate(ids, start=1))


def test_a_repeated_id_is_reported_with_both_positions() -> None:
    stream = unique(lambda: documents("a", "b", "c", "b", "a"))
    assert [next(stream)[1].id for _ in range(5)] == ["a", "b", "c", "b", "a"]
    with pytest.raises(InputError, match=r"^c\.jsonl:4: id 'b' is already used on line 2; ids must be unique$"):
        next(stream)


def test_ids_with_equal_hashes_are_not_repeated() -> None:
    assert len(list(unique(lambda: documents("aa", "bb", "cc", "d"), hashed=len))) == 4
    with pytest.raises(InputError, match=r"^c\.jsonl:4: id 'bb' is already used on line 2"):
        list(unique(lambda: documents("aa", "bb", "cc", "bb"), hashed=len))


def test_a_position_in_another_file_or_a_table_is_described() -> None:
    assert EntryPosition(Path("b.jsonl"), 2).seen_from(EntryPosition(FILE, 9)) == "in b.jsonl:2"
    assert EntryPosition(Path("a.parquet"), 2).seen_from(EntryPosition(Path("a.parquet"), 9)) == "in row 2"


def test_rows_with_other_field_names_are_read() -> None:
    place = EntryPosition(FILE, 1)
    columns = FieldNames(("query_id",), "query")
    assert to_query(place, {"query_id": 7, "query": "what", "text": "no"}, columns) == Query("7", "what")
    with pytest.raises(InputError, match=r"^c\.jsonl:1: 'query_id' must be a string or an integer, got nothing$"):
        to_query(place, {"_id": "q", "query": "what"}, columns)
    assert to_document(place, {"docid": "d", "text": ""}, FieldNames(("docid",))) == Document("d", "")


@pytest.mark.parametrize("grade", ["2", "+2", "2.0", 2, 2.0])
def test_grades_are_read_from_text_and_numbers(grade: object) -> None:
    assert to_judgement(EntryPosition(FILE, 1), "q", "d", grade).grade == 2


@pytest.mark.parametrize("grade", [float("inf"), float("nan"), 0.5, True, None, "2.5", "", b"2"])
def test_a_malformed_grade_is_refused(grade: object) -> None:
    with pytest.raises(InputError, match="the grade must be an integer of at most 9 digits"):
        to_judgement(EntryPosition(FILE, 1), "q", "d", grade)
