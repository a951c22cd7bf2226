"""`quiver serve`: mistakes are reported in one line before a model is loaded or a port is opened."""

from __future__ import annotations

import importlib.util
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from quiver.cli.serve import named_folders
from quiver.encoder.errors import InputError
from tests.conftest import Done
from tests.retrieval.serving.conftest import Indexes

Quiver = Callable[..., Done]


def test_names_of_indexes_are_checked(tmp_path: Path) -> None:
    assert named_folders(["a/dense", "other=b/dense"]) == {"dense": Path("a/dense"), "other": Path("b/dense")}
    assert list(named_folders(["a/dense", "b/dense"])) == ["a/dense", "b/dense"]
    (tmp_path / "x=y").mkdir()
    assert list(named_folders([str(tmp_path / "x=y")])) == ["x=y"]
    for wrong in (["=a"], ["a="], ["n=a", "n=b"], ["a+b=c"], ["a>b=c"]):
        with pytest.raises(InputError):
            named_folders(wrong)


def refused(done: Done) -> str:
    assert done.code == 2
    _, opening, rest = done.err.rpartition("; this can take some seconds\n")
    assert rest.count("\n") == 1
    assert done.err.count("\n") == 1 + bool(opening)
    return rest


def test_mistakes_are_reported_in_one_line(quiver: Quiver, indexes: Indexes, tmp_path: Path) -> None:
    (tmp_path / "token").write_text("short")
    assert "16 characters" in refused(quiver("serve", indexes.dense, "--token-file", tmp_path / "token"))
    assert "none" in refused(quiver("serve", indexes.dense, "--token-file", tmp_path / "none"))
    assert "the folder is not an index" in refused(quiver("serve", tmp_path))
    said = refused(quiver("serve", indexes.dense, "--fuse", "another"))
    assert "there is no ranking 'another'; there are dense, bm25; a ranking of another index needs its folder: " in said
    assert said.endswith("quiver serve dense=DIR1 another=DIR2 --fuse dense+another\n")
    assert "built without texts" in refused(quiver("serve", indexes.silent, "--fuse", "bm25"))
    assert "not an address" in refused(quiver("serve", indexes.dense, "--host", "no such host"))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert "choose another --port" in refused(quiver("serve", indexes.dense, "--port", taken.getsockname()[1]))


def test_an_empty_token_or_one_token_for_both_does_not_open_the_service(
    quiver: Quiver, indexes: Indexes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QUIVER_READ_TOKEN", "")
    assert "QUIVER_READ_TOKEN: the token is empty" in refused(quiver("serve", indexes.dense))
    monkeypatch.delenv("QUIVER_READ_TOKEN")
    (tmp_path / "empty").write_text("\n")
    assert "the token is empty" in refused(quiver("serve", indexes.dense, "--read-token-file", tmp_path / "empty"))
    (tmp_path / "token").write_text("one token of enough characters")
    both = ("--token-file", tmp_path / "token", "--read-token-file", tmp_path / "token")
    assert "are equal" in refused(quiver("serve", indexes.dense, *both))


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        *[("--max-body", value, "--max-body must be at least 1 byte") for value in ("0", "0.4")],
        *[("--max-body", value, "is not a size") for value in ("-1MB", "much", "nan")],
        *[(option, "0", option) for option in ("--max-k", "--max-queue", "--timeout", "--concurrency")],
        *[(option, "-1", option) for option in ("--timeout", "--poll", "--port")],
        ("--drain", "nan", "--drain"),
    ],
)
def test_serve_refuses_a_limit_of_zero(quiver: Quiver, indexes: Indexes, option: str, value: str, message: str) -> None:
    assert message in refused(quiver("serve", indexes.dense, option, value))


def test_serve_without_its_extra_names_the_extra(quiver: Quiver, indexes: Indexes, monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "uvicorn" else find(name, *rest))
    assert "pip install 'quiver-retrieval[serve]'" in refused(quiver("serve", indexes.dense))
