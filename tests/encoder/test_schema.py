"""Every type a field may have, every check, and all problems in one pass."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Annotated, Any, Literal

import pytest

from quiver.encoder.schema import (
    RECORD,
    Count,
    Field,
    InputError,
    NonBlank,
    Rule,
    Schema,
    SchemaError,
    TextSchema,
    parse,
    parse_fields,
    parse_record,
    validate,
    with_config,
)


class Inner(TextSchema):
    size: int = Field(ge=1, multiple_of=2)
    name: NonBlank = "inner"


class Outer(TextSchema):
    count: int
    rate: float = Field(gt=0, le=1)
    flag: bool
    text: str
    choice: Literal["left", "right"]
    inner: Inner
    maybe: Inner | None = None
    number: int | None = 7
    side: Literal["up", "down"] | None = None
    names: tuple[NonBlank, ...] = ()
    sizes: tuple[Annotated[int, Field(ge=1)], ...] = (8, 4)
    sides: tuple[Literal["up", "down"], ...] = ()
    rates: tuple[float, ...] | None = None
    share: float = Field(default=0.5, lt=1)


GOOD: dict[str, Any] = {"count": 3, "rate": 0.5, "flag": True, "text": "t", "choice": "left", "inner": {"size": 4}}


def problems(**changes: object) -> list[str]:
    instance, found = validate(Outer, {**GOOD, **changes})
    assert (instance is None) == bool(found)
    return found


def test_a_mapping_becomes_the_dataclass_with_its_defaults() -> None:
    assert validate(Outer, GOOD) == (
        Outer(
            count=3,
            rate=0.5,
            flag=True,
            text="t",
            choice="left",
            inner=Inner(size=4),
            maybe=None,
            number=7,
            side=None,
            names=(),
            sizes=(8, 4),
            sides=(),
            rates=None,
            share=0.5,
        ),
        [],
    )


@pytest.mark.parametrize(
    ("name", "raw", "value"),
    [
        ("count", "3", 3),
        ("count", 3.0, 3),
        ("count", "1e3", 1000),
        ("count", "1_000", 1000),
        ("count", "064", 64),
        ("count", -2, -2),
        ("rate", "8e-5", 8e-5),
        ("rate", 1, 1.0),
        ("flag", "false", False),
        ("text", "", ""),
        ("text", "8e-5", "8e-5"),
        ("number", None, None),
        ("number", "8", 8),
        ("side", "up", "up"),
        ("maybe", {"size": "2", "name": "n"}, Inner(size=2, name="n")),
        ("names", ["a", "b", "a"], ("a", "b", "a")),
        ("names", "a, b", ("a, b",)),
        ("sizes", ["1e3", 2.0, "3"], (1000, 2, 3)),
        ("sizes", "7", (7,)),
        ("sides", ["down", "up"], ("down", "up")),
        ("rates", [], ()),
        ("rates", ["8e-5", 1], (8e-5, 1.0)),
        ("share", 0.999, 0.999),
    ],
)
def test_what_is_accepted(name: str, raw: object, value: object) -> None:
    instance, found = validate(Outer, {**GOOD, name: raw})
    assert found == []
    assert getattr(instance, name) == value
    assert type(getattr(instance, name)) is type(value)


@pytest.mark.parametrize(
    ("name", "raw", "problem"),
    [
        ("count", "3.5", "count: must be a whole number, got '3.5'"),
        ("count", True, "count: must be a number, got true"),
        ("count", "many", "count: must be a number, got 'many'"),
        ("count", None, "count: must be a number, got null"),
        ("count", [3], "count: must be a number, got a list"),
        ("rate", "nan", "rate: must be a number, got 'nan'"),
        ("rate", float("inf"), "rate: must be a number, got inf"),
        ("rate", 0, "rate: must be > 0, got 0"),
        ("rate", "1.5", "rate: must be <= 1, got 1.5"),
        ("flag", 1, "flag: must be true or false, got 1"),
        ("flag", "yes", "flag: must be true or false, got 'yes'"),
        ("text", 3, "text: must be text, got 3; quote it if it is meant as text"),
        ("text", None, "text: must be text, got null; quote it if it is meant as text"),
        ("choice", "lift", "choice: must be one of left, right; got 'lift', did you mean 'left'?"),
        ("choice", ["left"], "choice: must be one of left, right; got a list"),
        ("inner", None, "inner: must be a mapping of settings, got null"),
        ("inner", {"size": 0}, "inner.size: must be >= 1, got 0"),
        ("inner", {"size": 3}, "inner.size: must be a multiple of 2, got 3"),
        ("inner", {"size": 2, "name": " "}, "inner.name: must not be blank, got ' '"),
        ("inner", {}, "inner.size: missing"),
        ("maybe", {"size": 2, "nam": "n"}, "maybe.nam: unknown key, did you mean 'name'?"),
        ("zebra", 1, f"zebra: unknown key; the keys are {', '.join(Outer.model_fields)}"),
        ("names", ["a", " "], "names.1: must not be blank, got ' '"),
        ("names", "", "names.0: must not be blank, got ''"),
        ("names", ["a", 3], "names.1: must be text, got 3; quote it if it is meant as text"),
        ("names", None, "names: must be a list, got null"),
        ("sizes", [4, 0], "sizes.1: must be >= 1, got 0"),
        ("sizes", "0", "sizes.0: must be >= 1, got 0"),
        ("sides", "upp", "sides.0: must be one of up, down; got 'upp', did you mean 'up'?"),
        ("rates", [1.5, "nan"], "rates.1: must be a number, got 'nan'"),
        ("share", 1, "share: must be < 1, got 1"),
    ],
)
def test_what_is_refused(name: str, raw: object, problem: str) -> None:
    assert problems(**{name: raw}) == [problem]


def test_all_problems_come_at_once() -> None:
    changes = {"cuont": 1, "rate": 7, "flag": "maybe", "inner": {"size": "x", "3": 4}, "maybe": 5, "sizes": [0, 1, "y"]}
    instance, found = validate(Outer, changes)
    assert instance is None
    assert found == [
        "count: missing",
        "rate: must be <= 1, got 7",
        "flag: must be true or false, got 'maybe'",
        "text: missing",
        "choice: missing",
        "inner.size: must be a number, got 'x'",
        "inner.3: unknown key; the keys are size, name",
        "maybe: must be a mapping of settings, got 5",
        "sizes.0: must be >= 1, got 0",
        "sizes.2: must be a number, got 'y'",
        "cuont: unknown key, did you mean 'count'?",
    ]


@pytest.mark.parametrize("raw", [None, [], "text", 3])
def test_what_is_no_mapping_at_all(raw: object) -> None:
    instance, found = validate(Outer, raw)
    assert instance is None
    assert len(found) == 1
    assert found[0].startswith("the whole document: must be a mapping of settings, got ")


def test_a_rule_is_checked_only_if_all_its_fields_are_valid() -> None:
    rules = [
        Rule(("inner.size", "count"), lambda size, count: size > count, "must be <= count {1}, got {0}"),
        Rule(("maybe", "flag"), lambda maybe, flag: flag and maybe is None, "needed where flag is set"),
    ]
    assert validate(Outer, GOOD, rules)[1] == ["inner.size: must be <= count 3, got 4", "maybe: needed where flag is set"]
    assert validate(Outer, {**GOOD, "count": 4, "flag": False}, rules)[1] == []
    assert validate(Outer, {**GOOD, "maybe": {"size": 2}, "count": "x", "rate": 9}, rules)[1] == [
        "count: must be a number, got 'x'",
        "rate: must be <= 1, got 9",
    ]
    longest = [Rule(("sizes", "count"), lambda sizes, count: len(sizes) > count, "must hold {1} at most, got {0}")]
    assert validate(Outer, {**GOOD, "sizes": [1, 2, 3, 4]}, longest)[1] == ["sizes: must hold 3 at most, got (1, 2, 3, 4)"]
    assert validate(Outer, {**GOOD, "sizes": [1, 2, 3, 0]}, longest)[1] == ["sizes.3: must be >= 1, got 0"]
    assert validate(Outer, {**GOOD, "count": 1}, longest)[1] == ["sizes: must hold 1 at most, got (8, 4)"]
    # An invalid section was given, so nothing is said of its absence.
    assert validate(Outer, {**GOOD, "count": 9, "maybe": {"size": 3}}, rules)[1] == ["maybe.size: must be a multiple of 2, got 3"]


class Listed(TextSchema):
    inners: tuple[Inner, ...] = ()


def test_a_list_of_sections() -> None:
    assert validate(Listed, {"inners": [{"size": 2}, {"size": "4", "name": "b"}]}) == (
        Listed(inners=(Inner(size=2), Inner(size=4, name="b"))),
        [],
    )
    assert validate(Listed, {"inners": {"size": 2}}) == (Listed(inners=(Inner(size=2),)), [])
    assert validate(Listed, {"inners": []}) == (Listed(), [])
    rule = Rule(("inners",), lambda inners: len(inners) < 2, "must hold two")
    found = validate(Listed, {"inners": [{"size": 3}, 7, {"size": 2, "nome": "x"}, {}]}, [rule])[1]
    assert found == [
        "inners.0.size: must be a multiple of 2, got 3",
        "inners.1: must be a mapping of settings, got 7",
        "inners.2.nome: unknown key, did you mean 'name'?",
        "inners.3.size: missing",
    ]
    assert validate(Listed, {"inners": [{"size": 2}]}, [rule])[1] == ["inners: must hold two"]


def test_a_strict_schema_converts_no_text() -> None:
    class Strict(Schema):
        size: int
        names: tuple[str, ...] = ()

    assert validate(Strict, {"size": 8, "names": ["a"]}) == (Strict(size=8, names=("a",)), [])
    assert validate(Strict, {"size": "8", "names": "a"})[1] == ["size: must be a whole number, got '8'", "names: must be a list, got 'a'"]
    with pytest.raises(InputError, match=r"^size\.json: size: must be a whole number, got 1\.5$"):
        parse(Strict, {"size": 1.5}, source="size.json")


@with_config(RECORD)
@dataclass(frozen=True)
class Part:
    size: Count
    name: str = "first"


@with_config(RECORD)
@dataclass(frozen=True)
class Whole:
    parts: tuple[Part, ...]
    named: Mapping[str, Part]
    seed: int | None = None


def test_a_record_must_hold_every_field_even_one_with_a_default() -> None:
    whole = Whole((Part(1),), {"a": Part(2)})
    assert parse_record(Whole, asdict(whole), source="whole.json") == whole
    with pytest.raises(SchemaError, match=r"^whole\.json: seed: missing$"):
        parse_record(Whole, {"parts": [], "named": {}}, source="whole.json")
    with pytest.raises(SchemaError) as caught:
        parse_record(Whole, {"parts": [{"size": 1}], "named": {"a": {"size": 1}}, "seed": None}, source="whole.json")
    assert caught.value.problems == ["parts.0.name: missing", "named.a.name: missing"]
    with pytest.raises(SchemaError, match=r"named\.a\.size: must be >= 0, got -1"):
        parse_record(Whole, {"parts": [], "named": {"a": {"size": -1, "name": ""}}, "seed": None}, source="whole.json")


def test_values_of_some_fields_are_validated_without_the_others() -> None:
    assert parse_fields(Part, {"size": 3.0}, source="part") == {"size": 3}
    with pytest.raises(SchemaError, match=r"^part: size: must be >= 0, got -1$"):
        parse_fields(Part, {"size": -1}, source="part")
    with pytest.raises(SchemaError) as caught:
        parse_fields(Part, {"size": 1.5, "name": 4}, source="part")
    assert caught.value.problems == ["size: must be a whole number, got 1.5", "name: must be text, got 4; quote it if it is meant as text"]
