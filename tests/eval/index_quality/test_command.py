"""``quiver bench index`` from the command line: a collection that is encoded once, files, and every mistake in one line."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quiver.cli.main import main
from quiver.encoder import InputError
from quiver.eval.bench.index import VectorFolder, encode_collection, read_index_benchmark

MakeVectors = Callable[..., VectorFolder]


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    def run(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setenv("COLUMNS", "200")
        monkeypatch.setattr(sys, "argv", ["quiver", "bench", "index", *map(str, arguments)])
        capsys.readouterr()
        code = 0
        try:
            main()
        except SystemExit as ended:
            code = int(ended.code or 0)
        told = capsys.readouterr()
        return code, told.out, told.err

    return run


def test_a_collection_is_encoded_once(
    make_collection: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: Any
) -> None:
    monkeypatch.setattr("quiver.eval.bench.index.sources.load_model", lambda source: model)
    folder, cache = make_collection(), tmp_path / "cache"
    vectors = encode_collection(folder, "words", "test", tmp_path / "out", cache=cache)
    vectors.check()
    assert vectors.ids == ["d1", "d2", "d3", "d4", "d5"]
    assert vectors.query_ids == ["q1", "q2", "q3"], "a query without judgements says nothing"
    assert vectors.kind == "dense"
    assert vectors.qrels is not None
    assert vectors.qrels["q1"] == {"d1": 2, "d4": 1}
    assert np.allclose(np.linalg.norm(vectors.documents(0, 5)[0], axis=1), 1)
    calls = len(model.encoded)
    fewer = encode_collection(folder, "words", "test", tmp_path / "fewer", cache=cache, limit_docs=1)
    assert len(model.encoded) == calls
    assert (fewer.ids, fewer.query_ids, fewer.qrels) == (["d1"], ["q1"], {"q1": {"d1": 2}})
    assert np.array_equal(fewer.documents(0, 1)[0], vectors.documents(0, 1)[0])
    with pytest.raises(InputError, match="split"):
        encode_collection(folder, "words", "train", tmp_path / "none")


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="peak memory on a CPU is read from Linux's /proc")
def test_vectors_with_files(bench: Callable[..., tuple[int, str, str]], make_vectors: MakeVectors, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    pytest.importorskip("jinja2")
    vectors, out = make_vectors(dense=True), tmp_path / "bench"
    arguments = (vectors.path, "--engine", "exact", "--no-peers", "--rounds", 1, "--out", out, "--no-progress")
    code, printed, told = bench(*arguments)
    assert (code, told) == (0, "")
    for wanted in ("Search", "recall@10", "Queries a second", "bytes a document", "report.html"):
        assert wanted in printed
    assert sorted(path.name for path in out.iterdir()) == ["plot.png", "plot.svg", "report.html", "report.md", "results.json", "work"]
    found = read_index_benchmark(out / "results.json")
    assert found.provenance.command is not None
    assert found.provenance.command.startswith("quiver bench index ")
    assert found.systems[0].points[0].recall["10"] == 1.0
    code, _, told = bench(*arguments)
    assert code == 2
    assert "there is a result already; give another --out, or --overwrite" in told
    (out / "results.json").unlink()
    code, printed, _ = bench(*arguments, "--json")
    assert code == 0
    assert json.loads(printed)["systems"][0]["date"] == found.systems[0].date, "what is finished is not measured again"


@pytest.mark.parametrize("fails", [False, True])
def test_the_vectors_of_a_collection_go_and_given_ones_stay(
    bench: Callable[..., tuple[int, str, str]],
    make_collection: Callable[..., Path],
    make_vectors: MakeVectors,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    model: Any,
    fails: bool,
) -> None:
    """They are as large as the collection, and come from the cache whenever the command is started again."""
    monkeypatch.setattr("quiver.eval.bench.index.sources.load_model", lambda source: model)
    measured: list[Path] = []

    def measure(folder: VectorFolder, *arguments: Any, **named: Any) -> None:
        folder.check()
        measured.append(folder.path)
        raise InputError("nothing could be measured" if fails else "this far and no farther")

    monkeypatch.setattr("quiver.cli.bench_index.bench_index", measure)
    out = tmp_path / "bench"
    collection = make_collection()
    assert bench(collection, "--model", "words", "--cache", tmp_path / "cache", "--out", out)[0] == 2
    assert measured == [out / "work" / "vectors"]
    assert not measured[0].exists()
    given = make_vectors(dense=True).path
    inside = (out / "work" / "vectors").resolve()
    given.rename(inside)
    assert bench(inside, "--out", out)[0] == 2
    assert measured[1] == inside
    assert (inside / "documents.npy").is_file()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--allowed", "1"], "a share of the documents that may be found is above 0 and below 1, got 1"),
        (["--effort", "quick"], "unknown search effort 'quick'; choose exact, balanced, fast, or search parameters"),
        (["--peer", "annoy"], "unknown peer 'annoy' for dense vectors"),
        (["--engine", "exact:a"], "'a' is not a setting"),
        (["--model", "no-such-model"], "qrels"),
        (["--limit-docs", "5"], "--limit-docs and --cache are for a collection that --model encodes"),
    ],
)
def test_mistakes(bench: Callable[..., tuple[int, str, str]], make_vectors: MakeVectors, arguments: list[str], message: str) -> None:
    code, printed, told = bench(make_vectors(dense=True).path, *arguments)
    assert (code, printed) == (2, "")
    assert message in told
    assert told.count("\n") == 1
