"""A folder of results: the round trip, everything that can be wrong with it, and a kill at every step."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quiver.encoder.errors import InputError
from quiver.eval.datasets.benchmarks import Benchmark
from quiver.eval.evaluation import evaluate
from quiver.eval.results import Results, read_results, results_folder


@pytest.fixture
def written(make_collection: Callable[..., Path], tmp_path: Path) -> tuple[Results, Path]:
    out = tmp_path / "out"
    return evaluate("bm25", make_collection(), out=out), out


def _edit(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    content = json.loads(path.read_text(encoding="utf-8"))
    change(content)
    path.write_text(json.dumps(content), encoding="utf-8")


def test_the_file_is_as_documented(written: tuple[Results, Path]) -> None:
    results, out = written
    content = json.loads((out / "results.json").read_text(encoding="utf-8"))
    assert list(content) == ["schema", "ndcg@10", "system", "collections", "provenance", "failed"]
    assert content["schema"] == "quiver-results/3"
    assert content["ndcg@10"] == results.headline == results.collections[0].measures["ndcg@10"]
    assert content["collections"][0]["run"]["file"] == "runs/tiny.test.trec"
    assert content["provenance"]["versions"].keys() >= {"quiver", "python", "torch", "numpy"}
    assert content["provenance"]["date"].endswith("+00:00")


def test_a_folder_without_results_is_half_written(tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    with pytest.raises(InputError, match=r"no results\.json here: the evaluation did not finish"):
        read_results(tmp_path)
    with pytest.raises(InputError, match="nowhere: no such folder"):
        read_results(tmp_path / "nowhere")
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / "results.json").write_text("{}")
    with pytest.raises(InputError, match=r"holds results in folders of its own; name them, such as .*one$"):
        read_results(tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\xff\xfe", "not JSON"),
        (b"[]", "must hold a JSON object"),
        (b'{"task_name": "SciFact"}', "the schema is None, this version reads 'quiver-results/3'"),
        (b'{"schema": "quiver-results/1"}', "the schema is 'quiver-results/1'"),
        (b'{"schema": "quiver-results/3"}', "system: missing"),
        (b'{"schema": "quiver-results/3", "ndcg@10": NaN}', "3 problems"),
    ],
)
def test_a_foreign_file_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "results.json").write_bytes(content)
    with pytest.raises(InputError, match=message):
        read_results(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c["collections"][0].update(queries="3"), r"collections\.0\.queries: must be a whole number, got '3'"),
        (lambda c: c["collections"][0].update(queries=True), r"collections\.0\.queries: must be a number, got true"),
        (lambda c: c["collections"][0].update(use_title=1), r"use_title: must be true or false"),
        (lambda c: c["collections"][0]["measures"].update(map=None), r"measures\.map: must be a number, got null"),
        (lambda c: c["collections"][0]["worst"][0]["wanted"][0].update(rank="1"), r"worst\.0\.wanted\.0\.rank: must be a whole number"),
        (lambda c: c["collections"][0].update(measures=[]), r"measures: must be a mapping"),
        (lambda c: c.update(collections={}), r"collections: must be a list"),
        (
            lambda c: c["system"].update(kind="sparse"),
            r"system\.kind: must be one of dense, colbert, bm25, run, fusion, re-ranking, retriever; got 'sparse'",
        ),
        (lambda c: c["system"].update(seed=1), r"system\.seed: unknown key"),
        (lambda c: c["provenance"].pop("date"), r"provenance\.date: missing"),
        (lambda c: c.update(collections=c["collections"] * 2), r"the collection tiny\.test occurs twice"),
        (lambda c: c.update({"ndcg@10": 0.99}), r"ndcg@10 is 0\.99 but the collections say"),
    ],
)
def test_what_is_wrong_is_named(written: tuple[Results, Path], change: Callable[[dict[str, Any]], object], message: str) -> None:
    _edit(written[1] / "results.json", change)
    with pytest.raises(InputError, match=message):
        read_results(written[1])


@pytest.mark.parametrize("file", ["runs/tiny.test.trec", "per_query/tiny.test.json", "queries/tiny.test.json"])
def test_a_changed_or_missing_file_is_found(written: tuple[Results, Path], file: str) -> None:
    path = written[1] / file
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    with pytest.raises(InputError, match=f"{path.name}: not the file that was scored"):
        read_results(written[1])
    path.unlink()
    with pytest.raises(InputError, match="it is missing"):
        read_results(written[1])


def test_a_file_in_the_way_is_named(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("mine", encoding="utf-8")
    with pytest.raises(InputError, match="it is a file"), results_folder(tmp_path / "out", {}):
        pytest.fail("the block must not run")


class Killed(BaseException):
    """Stands for a signal: nothing in the library may catch it and go on."""


def dying_at(step: int) -> Callable[[Path, Path], Path]:
    """``Path.replace``, but the process dies at one of its calls."""
    original, calls = Path.replace, 0

    def dying(self: Path, target: Path) -> Path:
        nonlocal calls
        calls += 1
        if calls == step:
            raise Killed
        return original(self, target)

    return dying


def test_a_kill_at_any_rename_leaves_old_new_or_nothing(
    make_collection: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both evaluations write the same file names, so that a mixture of the two would be possible."""
    first = make_collection()
    second = Benchmark.of_folder(make_collection("second", queries={"q1": "sea", "q2": "stone", "q3": "fish"}), name="tiny")
    outcomes: list[str] = []
    for kill_at in range(1, 50):
        out = tmp_path / f"out{kill_at}"
        old = evaluate("bm25", first, out=out)
        with monkeypatch.context() as patch:
            patch.setattr(Path, "replace", dying_at(kill_at))
            try:
                evaluate("bm25", second, out=out, overwrite=True)
            except Killed:
                pass
            else:
                break
        try:
            found = read_results(out)
            outcomes.append("old" if found == old else "new")
            assert (found == old) == (found.collections[0].data_sha256 == old.collections[0].data_sha256)
        except InputError as error:
            assert "the evaluation did not finish" in str(error)  # noqa: PT017 - either outcome is right
            outcomes.append("nothing")
        assert evaluate("bm25", second, out=out, overwrite=True) == read_results(out)
    assert not (out / ".unfinished").exists()
    # The plan, the run, the scores, the queries, the finished collection and results.json are each written once. The plan and the finished
    # collection are not moved, the other four are. At last the work folder loses its name.
    assert outcomes == ["old"] * 6 + ["nothing"] * 4 + ["new"]
