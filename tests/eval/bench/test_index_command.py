"""``quiver bench index``: encoding a collection, output files, and one-line errors."""

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
from quiver.eval.bench.index_data import VectorFolder, encode_collection
from quiver.eval.bench.results import read_benchmark

pytestmark = pytest.mark.usefixtures("quick_children")

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


def test_collection_is_encoded_once(make_collection: Callable[..., Path], tmp_path: Path, model: Any) -> None:
    folder, cache = make_collection(), tmp_path / "cache"
    vectors = encode_collection(folder, model, "test", tmp_path / "out", cache=cache)
    vectors.check()
    assert vectors.ids == ["d1", "d2", "d3", "d4", "d5"]
    assert vectors.query_ids == ["q1", "q2", "q3"], "a query without judgements says nothing"
    assert vectors.kind == "dense"
    assert vectors.qrels is not None
    assert vectors.qrels["q1"] == {"d1": 2, "d4": 1}
    assert np.allclose(np.linalg.norm(vectors.documents(0, 5)[0], axis=1), 1)
    calls = len(model.encoded)
    fewer = encode_collection(folder, model, "test", tmp_path / "fewer", cache=cache, limit_docs=1)
    assert len(model.encoded) == calls
    assert (fewer.ids, fewer.query_ids, fewer.qrels) == (["d1"], ["q1"], {"q1": {"d1": 2}})
    assert np.array_equal(fewer.documents(0, 1)[0], vectors.documents(0, 1)[0])
    with pytest.raises(InputError, match="split"):
        encode_collection(folder, model, "train", tmp_path / "none")


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="peak memory on a CPU is read from Linux's /proc")
def test_vectors_write_files(bench: Callable[..., tuple[int, str, str]], make_vectors: MakeVectors, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    pytest.importorskip("jinja2")
    vectors, out = make_vectors(dense=True), tmp_path / "bench"
    arguments = (vectors.path, "--engine", "exact", "--no-baselines", "--rounds", 1, "--out", out, "--no-progress")
    code, printed, told = bench(*arguments)
    assert (code, told) == (0, "")
    for wanted in ("Search", "recall@10", "Queries per second", "bytes/document", "report.html"):
        assert wanted in printed
    assert sorted(path.name for path in out.iterdir()) == ["plot.png", "plot.svg", "report.html", "report.md", "results.json", "work"]
    found = read_benchmark(out / "results.json")
    assert found.provenance.command is not None
    assert found.provenance.command.startswith("quiver bench index ")
    assert found.case("search").rows[0].values["recall@10"] == 1.0
    code, _, told = bench(*arguments)
    assert code == 2
    assert "results exist already; choose another --out, or add --overwrite" in told
    (out / "results.json").unlink()
    code, printed, _ = bench(*arguments, "--json")
    assert code == 0
    built = next(case for case in json.loads(printed)["cases"] if case["name"] == "build")
    assert built["rows"][0]["values"]["date"] == found.case("build").rows[0].values["date"], "finished systems are not measured again"


def test_given_vectors_are_kept_when_the_benchmark_fails(
    bench: Callable[..., tuple[int, str, str]], make_vectors: MakeVectors, tmp_path: Path
) -> None:
    inside = tmp_path / "bench" / "work" / "vectors"
    inside.parent.mkdir(parents=True)
    make_vectors(dense=True).path.rename(inside)
    assert bench(inside, "--out", tmp_path / "bench", "--baseline", "annoy")[0] == 2
    assert (inside / "documents.npy").is_file()


@pytest.mark.parametrize("fails", [pytest.param(False, marks=pytest.mark.slow), True])
def test_vectors_of_a_collection_are_deleted(
    bench: Callable[..., tuple[int, str, str]], make_collection: Callable[..., Path], minilm: Path, tmp_path: Path, fails: bool
) -> None:
    """They are as large as the collection, and are written again from the cache when the command is repeated."""
    pytest.importorskip("matplotlib")
    out, engine = tmp_path / "bench", "ivf-tokens" if fails else "exact"
    arguments = (make_collection(), "--model", minilm, "--cache", tmp_path / "cache", "--engine", engine, "--no-baselines", "--rounds", 1)
    code, _, told = bench(*arguments, "--out", out)
    assert code == (2 if fails else 0), told
    assert (out / "work").is_dir()
    assert not (out / "work" / "vectors").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--filter-share", "1"], "--filter-share must be > 0 and < 1, got 1"),
        (["--effort", "quick"], "unknown search effort 'quick'; choose exact, balanced, fast, or search parameters"),
        (["--baseline", "annoy"], "unknown baseline 'annoy' for dense vectors"),
        (["--engine", "exact:a"], "'a' is not a setting"),
        (["--model", "no-such-model"], "qrels"),
        (["--limit-docs", "5"], "--limit-docs and --cache need --model, which encodes a collection"),
    ],
)
def test_errors_are_one_line(
    bench: Callable[..., tuple[int, str, str]], make_vectors: MakeVectors, arguments: list[str], message: str
) -> None:
    code, printed, told = bench(make_vectors(dense=True).path, *arguments)
    assert (code, printed) == (2, "")
    assert message in told
    assert told.count("\n") == 1
