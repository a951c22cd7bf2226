"""The benchmark from vectors to reports, with children that search by NumPy and fail in every way, and with a real one."""

from __future__ import annotations

import dataclasses
import json
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from quiver.encoder import InputError
from quiver.eval.bench.encoder.results import OWN, Spread
from quiver.eval.bench.index import (
    IndexBenchmark,
    IndexSettings,
    Running,
    VectorFolder,
    bench_index,
    filtered,
    own_points,
    own_system,
    read_index_benchmark,
    write_index_benchmark,
)
from quiver.eval.bench.index.systems import Point, System
from quiver.eval.report.index_quality import (
    render_index_quality,
    render_index_quality_page,
    search_table,
    size_table,
    throughput_table,
    write_index_quality_plot,
)

LINUX = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="peak memory on a CPU is read from Linux's /proc")
MakeVectors = Callable[..., VectorFolder]
Scores = Callable[[VectorFolder], np.ndarray]

# Speaks the protocol of eval.index_quality.child. What it does is in the system's name; every build leaves a line in a log.
FAKE = """
import json, os, sys, time
from pathlib import Path
import numpy as np
first = json.loads(sys.stdin.readline())
name, folder, vectors = first["system"]["name"], Path(first["folder"]), Path(first["model"])
def fail(how):
    if how == "killed":
        os.kill(os.getpid(), 9)
    sys.stderr.write("Traceback\\nRuntimeError: the library does not like this\\n")
    sys.exit(1)
if name == "dies when opened" and first["opened"]:
    fail("error")
print(json.dumps({"weights": None}), flush=True)
matrix, lengths = np.load(vectors / "documents.npy"), np.load(vectors / "lengths.npy")
queries = np.split(np.load(vectors / "queries.npy"), np.cumsum(np.load(vectors / "query_lengths.npy"))[:-1])
starts = np.cumsum(lengths) - lengths
def ranking(query):
    return np.argsort(-np.maximum.reduceat(query @ matrix.T, starts, axis=1).sum(axis=0), kind="stable")
for line in sys.stdin:
    request = json.loads(line)
    task = request["task"]
    if task == "build":
        if name.startswith("dies when built"):
            fail(name.rpartition(" ")[2])
        if name == "never builds":  # nor does what it has started, which holds the pipe of answers open
            import subprocess
            subprocess.run(["sleep", "600"])
        folder.mkdir(parents=True)
        (folder / "index.bin").write_bytes(bytes(1000))
        with (folder.parent.parent / "built").open("a") as file:
            file.write(name + "\\n")
        answer = {"seconds": 2.0, "processor_seconds": 1.0, "before": 10, "peak": 30, "parameters": {"bits": 4}}
    elif task == "memory":
        answer = {"open_seconds": 0.5, "before": 10, "private": 5, "mapped": 6, "peak": 40}
    elif task == "all":
        if name == "dies when all are asked":
            fail("killed")
        answer = {"seconds": 0.5}
    elif first["system"]["points"][request["point"]]["name"] == "refused":
        answer = {"refused": "there is no such knob"}
    else:
        rows = [ranking(query)[: request["k"]] for query in queries]
        if name == "shuffled":
            rows = [np.random.default_rng(number).permutation(len(lengths))[: request["k"]] for number in range(len(rows))]
        if name == "negative":
            rows = [np.append(row[:-1], -1) for row in rows]
        if name == "reversed ranks":
            rows = [row[::-1] for row in rows]
        answer = {"milliseconds": [1.0 + number for number in range(len(rows))], "processor_seconds": 0.006}
        answer["rows"] = [row.tolist() for row in rows] if request["rows"] else []
    print(json.dumps(answer), flush=True)
"""


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "fake_index_child.py").write_text(FAKE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return "fake_index_child"


def system(name: str, *points: str) -> System:
    return System(name, OWN, {}, tuple(Point(point, {"preset": point}) for point in points or ("balanced",)))


SETTINGS = IndexSettings(k=5, deep=20, rounds=2, threads=(1,))


def run(
    vectors: VectorFolder, systems: list[System], work: Path, module: str, settings: IndexSettings = SETTINGS, *, timeout: float = 600
) -> IndexBenchmark:
    running = Running(module=module, timeout=timeout)
    return bench_index(
        vectors, systems, settings, work=work, names=("birds", "a model"), command="quiver bench index birds", running=running
    )


def test_what_is_found_is_what_is_counted(make_vectors: MakeVectors, by_the_book: Scores, fake: str, tmp_path: Path) -> None:
    vectors = make_vectors()
    systems = [system("right"), system("shuffled"), system("reversed ranks")]
    done = run(vectors, systems, tmp_path / "work", fake, replace(SETTINGS, threads=(1, 2)))
    right, shuffled, backwards = (each.points[0] for each in done.systems)
    assert right.recall == {"1": 1.0, "5": 1.0, "20": 1.0}
    assert right.ndcg == done.exact_ndcg
    best = np.argsort(-by_the_book(vectors), axis=1)
    for k in (1, 5, 20):
        found = [np.random.default_rng(row).permutation(40)[: max(k, 5) if k < 20 else 20][:k] for row in range(6)]
        wanted = [len(set(rows.tolist()) & set(best[row][:k].tolist())) / k for row, rows in enumerate(found)]
        assert shuffled.recall[str(k)] == pytest.approx(np.mean(wanted))
    assert shuffled.recall["20"] < 0.75
    assert shuffled.recall["5"] < 0.4
    assert shuffled.ndcg is not None
    assert done.exact_ndcg is not None
    assert backwards.recall == {"1": 0.0, "5": 1.0, "20": 1.0}, "the documents are right, the first is not"
    assert (done.documents, done.queries, done.judged, done.vectors) == (40, 6, 6, int(vectors.lengths.sum()))
    assert right.p50 == Spread.of([3.5, 3.5])
    assert right.p95.median == pytest.approx(5.75)
    assert right.processor.median == pytest.approx(1.0)
    assert [(each.threads, each.queries_per_second.median) for each in right.throughput] == [(1, 12.0), (2, 12.0)]
    assert [each.build.disk for each in done.systems] == [1000] * 3
    assert done.systems[0].parameters == {"bits": 4}
    assert not (tmp_path / "work" / "indexes").exists()


def test_what_fails_is_told_and_the_others_go_on(make_vectors: MakeVectors, fake: str, tmp_path: Path) -> None:
    failing = ["dies when built error", "dies when built killed", "dies when opened", "dies when all are asked", "negative"]
    systems = [*map(system, failing), system("right", "balanced", "refused"), system("unable", "refused")]
    done = run(make_vectors(), systems, tmp_path / "work", fake)
    assert [(each.name, [point.name for point in each.points]) for each in done.systems] == [("right", ["balanced"])]
    told = {each.what: each.reason for each in done.not_run}
    assert {name: told[name] for name in failing} == {
        "dies when built error": "RuntimeError: the library does not like this",
        "dies when built killed": "killed by signal 9",
        "dies when opened": "RuntimeError: the library does not like this",
        "dies when all are asked": "killed by signal 9",
        "negative": "balanced: gave the row -1, there are 40 documents",
    }
    assert told["right refused"] == told["unable refused"] == "there is no such knob"
    assert told["unable"] == "it could not be searched at any point"
    assert {"colbert-ai", "tachiom"} < set(told)
    assert not any("\n" in reason for reason in told.values())
    with pytest.raises(InputError, match=r"nothing could be measured: .*negative: balanced: gave the row -1"):
        run(VectorFolder(tmp_path / "vectors"), [system("negative")], tmp_path / "other", fake)


@LINUX
def test_what_takes_too_long_is_stopped_and_the_others_go_on(make_vectors: MakeVectors, fake: str, tmp_path: Path) -> None:
    done = run(make_vectors(), [system("never builds"), system("right")], tmp_path / "work", fake, timeout=8)
    assert [each.name for each in done.systems] == ["right"]
    told = {each.what: each.reason for each in done.not_run}
    assert told["never builds"] == "gave no answer in 8 seconds and was stopped"
    with pytest.raises(ValueError, match="the timeout must be > 0"):
        run(VectorFolder(tmp_path / "vectors"), [system("right")], tmp_path / "work", fake, timeout=0)


def test_a_run_that_is_started_again_measures_what_is_missing(make_vectors: MakeVectors, fake: str, tmp_path: Path) -> None:
    vectors, work = make_vectors(), tmp_path / "work"
    log = work / "built"
    first = run(vectors, [system("one"), system("dies when opened")], work, fake)
    assert log.read_text().split("\n") == ["one", "dies when opened", ""]
    again = run(vectors, [system("one"), system("two")], work, fake)
    assert log.read_text().split("\n") == ["one", "dies when opened", "two", ""]
    assert again.systems[0] == first.systems[0]
    assert [each.name for each in again.systems] == ["one", "two"]
    run(vectors, [system("one")], work, fake, replace(SETTINGS, rounds=3))
    assert log.read_text().count("one\n") == 2, "with other settings it is another measurement"
    np.save(vectors.path / "queries.npy", -np.load(vectors.path / "queries.npy"))
    run(VectorFolder(vectors.path), [system("one")], work, fake, replace(SETTINGS, rounds=3))
    assert log.read_text().count("one\n") == 3, "with other vectors too"


def test_an_index_that_is_built_is_not_built_again(make_vectors: MakeVectors, fake: str, tmp_path: Path) -> None:
    vectors, work = make_vectors(), tmp_path / "work"
    for _ in range(2):
        with pytest.raises(InputError, match="nothing could be measured"):
            run(vectors, [system("dies when opened")], work, fake)
    assert (work / "built").read_text() == "dies when opened\n"
    with pytest.raises(InputError, match="nothing could be measured"):
        run(vectors, [system("dies when opened")], work, fake, replace(SETTINGS, rounds=3))
    assert (work / "built").read_text() == "dies when opened\n" * 2


def test_nothing_is_said_of_the_quality_on_made_up_documents(make_vectors: MakeVectors, fake: str, tmp_path: Path) -> None:
    done = run(replace(make_vectors(), synthetic=200), [system("right", "balanced", "fast")], tmp_path / "work", fake)
    assert (done.documents, done.synthetic, done.exact_ndcg, done.judged) == (200, True, None, 0)
    assert [(point.recall, point.ndcg) for point in done.systems[0].points] == [({}, None)] * 2
    assert "noisy copies of them: latency and size mean something, quality does not" in render_index_quality(done)
    header, rows = search_table(done)
    assert not any("recall" in label for label in header)
    assert all(len(row) == len(header) for row in rows)
    assert "<svg" not in render_index_quality_page(done)


def test_results_and_reports(make_vectors: MakeVectors, fake: str, tmp_path: Path) -> None:
    names = [system("right", "balanced", "fast"), system("shuffled <b>|")]
    done = run(make_vectors(), [*names, system("negative")], tmp_path / "work", fake)
    write_index_benchmark(done, tmp_path / "results.json")
    assert read_index_benchmark(tmp_path / "results.json") == done
    damaged = json.loads((tmp_path / "results.json").read_text())
    damaged["systems"][0]["points"][0]["recall"]["5"] = "all"
    (tmp_path / "damaged.json").write_text(json.dumps(damaged))
    with pytest.raises(InputError, match=re.escape("systems[0].points[0].recall.5: must be a number")):
        read_index_benchmark(tmp_path / "damaged.json")
    for header, rows in filter(None, (search_table(done), size_table(done), throughput_table(done))):
        assert {row[0] for row in rows} == {"right", "shuffled <b>|"}
        assert all(len(row) == len(header) for row in rows)
    text, page = render_index_quality(done), render_index_quality_page(done)
    for report in (text, page):
        for wanted in ("birds", "a model", "quiver bench index birds", "gave the row -1", "recall@20", "nDCG@10 of exact search"):
            assert wanted in report
    assert "| right | fast | 1.0000 | 1.0000 | 1.0000 |" in text
    assert "shuffled \\<b>\\|" in text
    assert "<b>" not in page
    assert "shuffled &lt;b&gt;|" in page
    assert page.count("<svg") == 1
    pytest.importorskip("matplotlib")
    plots = write_index_quality_plot(done, tmp_path)
    assert [path.name for path in plots] == ["plot.png", "plot.svg"]
    assert plots[1].read_text().startswith("<?xml")


def test_what_no_benchmark_is(make_vectors: MakeVectors, fake: str, tmp_path: Path) -> None:
    vectors = make_vectors()
    with pytest.raises(ValueError, match="two systems have one name"):
        run(vectors, [system("one"), system("one")], tmp_path / "work", fake)
    for wrong in ({"rounds": 0}, {"k": 0}, {"deep": 4}, {"threads": ()}, {"threads": (0,)}):
        with pytest.raises(ValueError, match="rounds, k and threads must be >= 1 and deep >= k"):
            run(vectors, [system("one")], tmp_path / "work", fake, dataclasses.replace(SETTINGS, **wrong))  # type: ignore[arg-type]


def real(vectors: VectorFolder, systems: list[System], work: Path) -> IndexBenchmark:
    settings = IndexSettings(k=10, deep=400, rounds=1, threads=(1,), build_threads=2)
    done = bench_index(vectors, systems, settings, work=work, names=("drawn", None))
    exact = done.systems[0]
    assert exact.name == "exact"
    assert exact.points[0].recall == {"1": 1.0, "10": 1.0, "400": 1.0}, "of all documents too"
    assert exact.points[0].ndcg == done.exact_ndcg
    assert exact.build.disk > 4 * 16 * done.vectors
    assert exact.build.seconds > 0
    assert exact.build.peak >= exact.build.before > 2**20
    assert exact.memory.peak >= exact.memory.before
    assert exact.points[0].throughput[0].queries_per_second.median > 0
    return done


@LINUX
def test_a_real_child_of_dense_vectors(make_vectors: MakeVectors, tmp_path: Path) -> None:
    points = (Point("narrow", {"efSearch": 1}), Point("wide", {"efSearch": 300}))
    # Not an index that a warm-up of few documents could train.
    factory = own_system("faiss-dense:factory=IVF16,Flat", own_points(["exact"]))
    exact = filtered(own_system("exact", own_points([])), [0.1, 0.001], 700)
    systems = [exact, System("faiss:HNSW8", "faiss", {"factory": "HNSW8"}, points), factory]
    done = real(make_vectors(dense=True, documents=700), systems, tmp_path / "work")
    assert done.systems[0].parameters["engine"] == "exact-dense"
    assert done.systems[2].parameters["factory"] == "IVF16,Flat", [each.reason for each in done.not_run]
    narrow, wide = done.systems[1].points
    filters = [(point.name, point.allowed, point.recall["10"], point.ndcg) for point in done.systems[0].points[1:]]
    assert filters == [("exact, 10% allowed", 70, 1.0, None), ("exact, 0.1% allowed", 1, 1.0, None)]
    assert "- |" in render_index_quality(done)
    assert wide.recall["10"] == 1.0 > narrow.recall["10"], "a knob that one point turns is turned back by the next"


@LINUX
@pytest.mark.slow
def test_a_real_child_of_token_vectors(make_vectors: MakeVectors, tmp_path: Path) -> None:
    exact, tokens = (own_system(text, own_points([])) for text in ("exact", "ivf-tokens:bits=4"))
    systems = [exact, replace(exact, name="exact:no_such=1", settings={"no_such": 1}), tokens]
    systems[2] = filtered(systems[2], [0.5], 300)
    done = real(make_vectors(documents=300), systems, tmp_path / "work")
    assert done.systems[0].parameters["engine"] == "exact-tokens"
    assert done.systems[1].name == "ivf-tokens:bits=4"
    assert done.systems[1].parameters["bits"] == 4
    assert all(0.8 < point.recall["10"] <= 1 for point in done.systems[1].points)
    assert done.systems[1].points[1].allowed == 150
    (told,) = [each for each in done.not_run if each.what == "exact:no_such=1"]
    assert "no_such" in told.reason
