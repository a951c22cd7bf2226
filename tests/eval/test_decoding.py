"""JSON to dataclasses: what is taken, and what is named as wrong."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

import pytest

from quiver.encoder.errors import InputError
from quiver.eval.decoding import decode
from quiver.eval.results import Parameter


@dataclass(frozen=True)
class Record:
    number: float
    maybe: float | None
    counted: Mapping[str, float]
    settings: Mapping[str, Parameter]


GOOD: Mapping[str, object] = {"number": 1, "maybe": 0.5, "counted": {"a": 2}, "settings": {"k": 3, "fast": True, "none": None}}


def test_a_record_has_the_types_of_its_fields() -> None:
    record = decode(Record, GOOD, "file")
    assert record == Record(1.0, 0.5, {"a": 2.0}, {"k": 3, "fast": True, "none": None})
    assert (type(record.number), type(record.counted["a"]), type(record.settings["k"])) == (float, float, int)
    assert decode(Record, {**GOOD, "maybe": None}, "file").maybe is None
    assert type(decode(Record, {**GOOD, "maybe": 3}, "file").maybe) is float


@pytest.mark.parametrize("number", ["1e999", "-1e999", "NaN", "1" + "0" * 400])
@pytest.mark.parametrize(
    ("field", "value", "where"),
    [
        ("number", "%s", r"file\.number"),
        ("maybe", "%s", r"file\.maybe"),
        ("counted", '{"a": %s}', r"file\.counted\.a"),
        ("settings", '{"b": %s}', r"file\.settings\.b"),
    ],
)
def test_a_number_is_finite(number: str, field: str, value: str, where: str) -> None:
    data = {**GOOD, field: json.loads(value % number)}
    if field == "settings" and number.startswith("10"):
        assert decode(Record, data, "file").settings["b"] == 10**400  # a whole number, and taken as one
        return
    with pytest.raises(InputError, match=rf"^{where}: must be a finite number, got '") as caught:
        decode(Record, data, "file")
    assert len(str(caught.value)) < 120


def test_a_name_does_not_break_the_line() -> None:
    with pytest.raises(InputError, match=r"file\.counted\.'a\\nb': must be a number, got 'x'"):
        decode(Record, {**GOOD, "counted": {"a\nb": "x"}}, "file")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"number": True}, "must be a number, got 'True'"),
        ({"maybe": "0.5"}, "must be a number, got '0.5'"),
        ({"counted": []}, "must be an object"),
        ({"extra": 1}, "unknown field 'extra'"),
    ],
)
def test_what_is_of_another_type(change: Mapping[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        decode(Record, {**GOOD, **change}, "file")
