"""Scalars stay text, repeated keys are told, broken syntax names its line."""

from __future__ import annotations

import pytest

from quiver.encoder.errors import InputError
from quiver.encoder.training.strict_yaml import parse_yaml


@pytest.mark.parametrize("scalar", ["8e-5", "064", "1:30", "no", "true", "2024-01-01", "0x10", "1_000", ".inf", "nulls", "Nan"])
def test_a_scalar_is_its_text(scalar: str) -> None:
    assert parse_yaml(f"key: {scalar}") == ({"key": scalar}, [])


@pytest.mark.parametrize("scalar", ["null", "Null", "~", ""])
def test_null_is_told_from_text(scalar: str) -> None:
    assert parse_yaml(f"key: {scalar}") == ({"key": None}, [])
    assert parse_yaml(f"key: '{scalar}'") == ({"key": scalar}, [])


def test_structure_and_merges_work() -> None:
    text = "base: &base {a: 1, b: 2}\nlist: [x, {y: z}]\nderived:\n  <<: *base\n  b: 3\n"
    document, repeated = parse_yaml(text)
    assert document == {"base": {"a": "1", "b": "2"}, "list": ["x", {"y": "z"}], "derived": {"a": "1", "b": "3"}}
    assert repeated == []
    assert parse_yaml("") == (None, [])


def test_every_repeated_key_is_told_with_both_lines() -> None:
    _, repeated = parse_yaml("a: 1\nb:\n  c: 1\n  d: 2\n  c: 3\na: 2\na: 3\n")
    assert repeated == [
        "line 5: the key 'c' stands in line 3 already",
        "line 6: the key 'a' stands in line 1 already",
        "line 7: the key 'a' stands in line 1 already",
    ]
    assert parse_yaml("{a: 1, a: 2}")[1] == ["line 1: the key 'a' stands in line 1 already"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\nb: [1, 2\nc: 3\n", "^line 3: not YAML: "),
        ("a: 1\n\tb: 2\n", "^line 2: not YAML: "),
        ("a: b: c\n", "^line 1: not YAML: mapping values are not allowed here"),
        ("a: 1\n---\nb: 2\n", "^line 2: not YAML: "),
        ("a: *unknown\n", "^line 1: not YAML: found undefined alias"),
        ("a: !!int 3\n", "^line 1: not YAML: could not determine a constructor"),
        ("a: !!python/name:os.system x\n", "^line 1: not YAML: could not determine a constructor"),
        ("? [a]\n: b\n", "^line 1: not YAML: found unhashable key"),
        ("a: \x07\n", "^not YAML: unacceptable character"),
    ],
)
def test_broken_syntax_names_its_line(text: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        parse_yaml(text)
