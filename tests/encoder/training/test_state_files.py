"""State on disk: exact for all supported types, and no pickle is read."""

from __future__ import annotations

import json
import math
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from quiver.encoder import InputError
from quiver.encoder.training.state import read_state, write_state
from tests.damage import Bomb


def same(one: object, other: object) -> bool:
    """Equal in value, type and bits."""
    if type(one) is not type(other):
        return False
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        equal = one.dtype == other.dtype and one.shape == other.shape
        return equal and one.contiguous().view(-1).view(torch.uint8).equal(other.contiguous().view(-1).view(torch.uint8))
    if isinstance(one, dict) and isinstance(other, dict):
        keys = [(type(key), key) for key in one]
        return keys == [(type(key), key) for key in other] and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, float) and isinstance(other, float):
        return one == other and math.copysign(1, one) == math.copysign(1, other)
    return one == other


def again(folder: Path, state: object) -> Any:
    write_state(folder / "state", state)
    return read_state(folder / "state")


@pytest.mark.parametrize(
    "state",
    [
        [0.1 + 0.2, 1e-320, -0.0, 1.7976931348623157e308, 2**70, -1],
        {"0": "text", 0: "number"},
        {"tensor": "a", "dict": [], "list": 3},
        {"a": torch.arange(6).reshape(2, 3), "b": torch.tensor(1.5), "c": torch.zeros(0, 4)},
        [torch.tensor([math.nan, math.inf, -0.0]), torch.tensor([True, False]), torch.tensor([1.0], dtype=torch.bfloat16)],
        {0: torch.tensor(1), "0": torch.tensor(2), "a": {"b": torch.tensor(3)}, "a.b": torch.tensor(4)},
        {"whole": torch.arange(4), "part": torch.arange(12).reshape(3, 4)[:, 1]},
    ],
)
def test_a_state_is_restored_exactly(tmp_path: Path, state: object) -> None:
    assert same(again(tmp_path, state), state)


PLAIN = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
TENSORS = st.lists(st.floats(width=32), max_size=3).map(torch.tensor)
STATES = st.recursive(
    PLAIN | TENSORS,
    lambda inner: st.lists(inner) | st.lists(inner).map(tuple) | st.dictionaries(st.text() | st.integers(), inner),
    max_leaves=12,
)


@settings(max_examples=25, deadline=None)
@given(state=STATES)
def test_any_state_is_restored_exactly(tmp_path_factory: pytest.TempPathFactory, state: object) -> None:
    assert same(again(tmp_path_factory.mktemp("state"), state), state)


@pytest.mark.parametrize(
    ("state", "problem"),
    [
        ({"a": [object()]}, r"state\.a\.0: a object cannot be written"),
        ({"a": {1, 2}}, r"state\.a: a set cannot be written"),
        ({"a": 1j}, r"state\.a: a complex cannot be written"),
        ({"a": {("x", 1): 2}}, r"state\.a: a key must be text or a whole number, got \('x', 1\)"),
        ({None: 2}, "state: a key must be text or a whole number, got None"),
        ({"a": math.nan}, "not JSON compliant"),
        ({"a": [-math.inf]}, "not JSON compliant"),
    ],
)
def test_unsupported_values_are_refused(tmp_path: Path, state: object, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        write_state(tmp_path / "state", state)
    assert not (tmp_path / "state.json").exists()


@pytest.mark.parametrize("save", [lambda bomb, path: path.write_bytes(pickle.dumps(bomb)), torch.save], ids=["pickle", "torch.save"])
@pytest.mark.parametrize("suffix", [".safetensors", ".json"])
def test_a_pickle_is_refused_without_being_executed(tmp_path: Path, save: Any, suffix: str) -> None:
    went_off = tmp_path / "went off"
    write_state(tmp_path / "state", {"a": torch.ones(2)})
    path = (tmp_path / "state").with_suffix(suffix)
    save(Bomb(went_off), path)
    with pytest.raises(InputError, match=rf"state{suffix}: "):
        read_state(tmp_path / "state")
    assert not went_off.exists()
    if path.read_bytes()[:2] != b"PK":  # unpickling does create the file
        pickle.loads(path.read_bytes())  # noqa: S301
        assert went_off.exists()


@pytest.mark.parametrize(
    ("tree", "problem"),
    [
        ({"other": 1}, "'state'"),
        ({"state": {"tensor": "0.state.nowhere"}}, "0.state.nowhere"),
        ({"state": {"tensor": []}}, "unhashable"),
        ({"state": {"set": [1]}}, "unknown kind 'set'"),
        ({"state": {}}, "not enough values"),
        ({"state": {"list": [1], "tuple": [2]}}, "too many values"),
        ({"state": {"dict": [[1, 2, 3]]}}, "too many values"),
        ({"state": {"dict": [[[1], 2]]}}, "unhashable"),
        ({"state": {"list": 3}}, "not iterable"),
    ],
)
def test_other_json_is_refused(tmp_path: Path, tree: object, problem: str) -> None:
    write_state(tmp_path / "state", {"a": torch.ones(2)})
    (tmp_path / "state.json").write_text(json.dumps(tree))
    with pytest.raises(InputError, match=r"state\.json: not the state of a run") as caught:
        read_state(tmp_path / "state")
    assert problem in str(caught.value)


@pytest.mark.parametrize("suffix", [".safetensors", ".json"])
def test_truncated_and_missing_files_are_refused(tmp_path: Path, suffix: str) -> None:
    write_state(tmp_path / "state", {"a": torch.ones(20), "b": [1]})
    path = (tmp_path / "state").with_suffix(suffix)
    content = path.read_bytes()
    for length in (0, 1, 7, 8, 20, len(content) - 1 - (suffix == ".json")):  # the last byte of the JSON ends its line
        path.write_bytes(content[:length])
        with pytest.raises(InputError, match=rf"state{suffix}: "):
            read_state(tmp_path / "state")
    path.unlink()
    with pytest.raises(InputError, match=rf"state{suffix}: "):
        read_state(tmp_path / "state")
