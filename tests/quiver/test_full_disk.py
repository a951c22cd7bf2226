"""Full disks under every command that writes: one line that says what and where, exit status 1, and everything as it was before."""

from __future__ import annotations

import builtins
import errno
import io
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from quiver.retrieval.index import open_index

QUERIES = "q1\tbirds and wings\nq2\tsalt of the seas\n"
ROWS = "".join(json.dumps({"query": f"text {n}", "positive": f"a text {n}", "negatives": ["birds", "salt"]}) + "\n" for n in range(8))
RECIPE = {
    **dict.fromkeys(("name", "description", "source", "cost", "expected"), "as in the test"),
    "kind": "dense",
    "data": {"document_fields": ["positive", "negatives"], "documents_per_row": 3},
    "loss": {"name": "mnrl", "scale": 20.0},
    "training": {
        "epochs": 1,
        "batch_size": 4,
        "learning_rate": 1e-2,
        "dtype": "float32",
        "save_every": 1,
        "log_every": 1,
        "seed": 1,
        "warmup_ratio": 0.1,
        "scheduler": "linear",
        "weight_decay": 0.01,
        "max_grad_norm": 1.0,
        "no_duplicates": False,
    },
}


class Writer(NamedTuple):
    """A command that writes, and what has to be there before.

    Attributes:
        command: Its arguments; of a word in braces, the folder or file of that name.
        before: Commands to run before.
        writes: Names of what it may have begun after a full disk; all else is as it was.
    """

    command: str
    before: tuple[str, ...] = ()
    writes: tuple[str, ...] = ("{out}",)


BUILD = "index build {corpus} --model {model} --out {index} --no-calibrate"
WRITERS = {
    "build": Writer(BUILD, writes=("{index}",)),
    "build-words": Writer("index build {corpus} --model bm25 --out {index}", writes=("{index}",)),
    "add": Writer("index add {index} {more}", (BUILD,)),
    "delete": Writer("index delete {index} d1", (BUILD,)),
    "compact": Writer("index compact {index}", (BUILD, "index delete {index} d1")),
    "refresh": Writer("index refresh {index}", (BUILD.replace("{corpus}", "{changing}"), "!change {changing}")),
    "repair": Writer("index repair {index}", (BUILD, "!damage {index}")),
    "export-index": Writer("index export {index} --out {out}", (BUILD,)),
    "search-run": Writer("search {index} --queries {queries} --out {out}", (BUILD,)),
    "evaluate": Writer("evaluate --model {model} --data {data} --out {out}"),
    "report": Writer(
        "report {results} --out {report}.html", ("evaluate --model {model} --data {data} --out {results}",), ("{report}.html",)
    ),
    "mine": Writer("mine {data} --split test --model {model} --out {out} -n 1 --margin none --ranks 1-6"),
    "teacher-scores": Writer("teacher-scores {rows} --teacher {model} --out {out}"),
    "train": Writer("train {recipe} --out {out} --no-progress"),
    "average": Writer("average-checkpoints {model} {model} --out {out}"),
    "export": Writer("export {model} --layout sentence-transformers --out {out}"),
}


QUICK = ("delete", "compact", "export-index", "teacher-scores", "export")
"""The default run fails these at any call; of all others some writes."""


def change(path: Path) -> None:
    (path / "d9.txt").write_text("a new text about wings")
    (path / "d1.txt").unlink()


def damage(path: Path) -> None:
    file = next(path.glob("segments/*/texts.arrow"))
    file.write_bytes(file.read_bytes()[:-5] + b"xxxxx")


@pytest.fixture
def world(tmp_path: Path, data: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Everything that the commands read, in one folder."""
    monkeypatch.setenv("QUIVER_CACHE", str(tmp_path / "cache"))
    (tmp_path / "corpus").write_bytes((data / "corpus.jsonl").read_bytes())
    (tmp_path / "corpus").rename(tmp_path / "corpus.jsonl")
    (tmp_path / "more.jsonl").write_text('{"_id": "d8", "text": "more about stones"}\n')
    (tmp_path / "changing").mkdir()
    for number in range(4):
        (tmp_path / "changing" / f"d{number}.txt").write_text(f"text number {number}")
    (tmp_path / "queries.tsv").write_text(QUERIES)
    (tmp_path / "rows.jsonl").write_text(ROWS)
    recipe = {**RECIPE, "model": {"init": str(model), "max_length": 16, "pooling": "mean", "normalize": True}}
    recipe["data"] = {**RECIPE["data"], "train": str(tmp_path / "rows.jsonl")}  # type: ignore[dict-item]
    (tmp_path / "recipe.json").write_text(json.dumps(recipe))
    return tmp_path


def named(world: Path, text: str) -> list[str]:
    files = {path.stem: path for path in world.iterdir() if path.suffix in (".jsonl", ".tsv", ".json")} | {"data": world / "scifact"}
    return [re.sub(r"\{(\w+)\}", lambda found: str(files.get(found[1], world / found[1])), word) for word in text.split()]


def prepare(world: Path, quiver: Callable[..., Any], writer: Writer) -> None:
    for command in writer.before:
        words = named(world, command)
        if words[0].startswith("!"):
            globals()[words[0][1:]](Path(words[1]))
        else:
            done = quiver(*words)
            assert done.code == 0, done.err


def contents(world: Path, without: tuple[str, ...]) -> dict[str, bytes]:
    """All files but caches, locks and what a command may have begun."""
    left_out = {*(Path(each).name for name in without for each in named(world, name)), "cache"}
    files = (path for path in world.rglob("*") if path.is_file() and path.name != "LOCK")
    return {str(each): each.read_bytes() for each in files if not left_out & {*each.relative_to(world).parts, each.stem}}


def check_unchanged(world: Path, before: dict[str, bytes], writer: Writer) -> None:
    """Nothing but what a command may have begun; in an index, files that no generation names are removed by the next change."""
    after = contents(world, writer.writes)
    assert {name: after.get(name) for name in before} == before
    more = [name for name in after if name not in before and str(world / "index") not in name]
    assert not more


def check_told(done: Any, world: Path) -> None:
    assert done.code == 1, (done.code, done.err, done.out)
    assert done.err.count("\n") == 1, done.err
    assert "Traceback" not in done.err + done.out
    assert "unexpected" not in done.err
    assert str(world) in done.err, "where"
    assert "free on its disk" in done.err, "how much room"


@pytest.mark.parametrize("name", [*WRITERS])
@pytest.mark.parametrize("size", [0, pytest.param(300, marks=pytest.mark.slow)])
def test_a_file_without_room_is_said_and_the_command_succeeds_later(
    name: str, size: int, world: Path, quiver: Callable[..., Any], full_disk: Callable[[int], AbstractContextManager[None]]
) -> None:
    writer = WRITERS[name]
    prepare(world, quiver, writer)
    before = contents(world, writer.writes)
    with full_disk(size):
        done = quiver(*named(world, writer.command))
    if done.code or size == 0:
        check_told(done, world)
        assert "File too large" in done.err
        check_unchanged(world, before, writer)
    done = quiver(*named(world, writer.command), *(["--resume"] if name == "train" and (world / "out" / "checkpoints").exists() else []))
    assert done.code == 0, done.err


@contextmanager
def without_room(world: Path, failing: int) -> Iterator[list[str]]:
    """No room for a new folder, a new file, a sync or a rename from one of these calls on; yields their names."""
    calls: list[str] = []

    def full(function: Any, name: str) -> Any:
        def called(given: Any, *arguments: Any, **options: Any) -> Any:
            path = None if isinstance(given, int) else Path.cwd() / os.fsdecode(given)
            inside = name == "fsync" or (path is not None and world in path.parents and path.name not in ("LOCK", ".lock"))
            if not inside or (name == "open" and path is not None and path.exists()) or (name == "open" and "r" in str(arguments[:1])):
                return function(given, *arguments, **options)
            calls.append(name)
            if len(calls) >= failing > 0:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), *(() if path is None else (str(path),)))
            return function(given, *arguments, **options)

        return called

    with pytest.MonkeyPatch.context() as patches:
        for module, name in ((os, "mkdir"), (os, "replace"), (os, "rename"), (os, "fsync"), (os, "open"), (io, "open"), (builtins, "open")):
            patches.setattr(module, name, full(getattr(module, name), name))
        yield calls


def documents(index: Path) -> list[str] | None:
    return sorted(open_index(index).ids) if index.exists() else None


@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in WRITERS])
def test_a_disk_that_fills_at_any_call_is_said(
    name: str, world: Path, quiver: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    """An index has the documents of before, or from the commit on those of afterwards, and is complete without the file of its sources."""
    writer = WRITERS[name]
    prepare(world, quiver, writer)
    changes = "{index}" in "".join(writer.before) and name not in ("export-index", "search-run")
    before, index, base = contents(world, (*writer.writes, *(["{index}"] * changes))), world / "index", world.parent / f"{world.name}-base"
    ids = [] if name == "repair" else [documents(index)]
    if changes:
        shutil.copytree(index, base)
    failing, done, found = 1, None, list[Any]()
    while done is None or done.code:
        if changes:
            shutil.rmtree(index)
            shutil.copytree(base, index)
        with without_room(world, failing) as calls:
            done = quiver(*named(world, writer.command), *(["--overwrite"] if name == "train" else []))
        if not done.code and len(calls) >= failing:
            assert "sources.json: cannot be written (No space left on device)" in caplog.text
        elif done.code:
            check_told(done, world)
            assert len(calls) >= failing
            check_unchanged(world, before, writer)
            found += [documents(index)] if changes and name != "repair" else []
        failing += max(1, failing // 3)
    assert failing > 3
    assert all(each in (*ids, documents(index)) for each in found)
