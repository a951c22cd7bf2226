"""The index benchmark from vectors to reports, with stub child processes that search by NumPy or fail, and with real ones."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from quiver.encoder import InputError
from quiver.eval.bench.index import Running, Settings, bench_index, draw, report
from quiver.eval.bench.index_backends import Point, System, quiver_points, quiver_system, with_filters
from quiver.eval.bench.index_data import VectorFolder
from quiver.eval.bench.report import tables, write_report
from quiver.eval.bench.results import OWN, Benchmark, Row, Series, read_benchmark, write_benchmark
from quiver.eval.report.formats import render_html, render_markdown

pytestmark = pytest.mark.usefixtures("quick_children")

LINUX = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="peak memory on a CPU is read from Linux's /proc")
MakeVectors = Callable[..., VectorFolder]
Scores = Callable[[VectorFolder], np.ndarray]

# A target of child processes. What it does is in the name of the system; every build leaves a line in a log.
STUB = """
import os, sys
from pathlib import Path
import numpy as np

def fail(how):
    if how == "killed":
        os.kill(os.getpid(), 9)
    raise RuntimeError("the library does not like this")

def open_stub(vectors, system, folder, opened, threads):
    name, folder, vectors = system["name"], Path(folder), Path(vectors["path"])
    if name == "dies when opened" and opened:
        fail("error")
    matrix, lengths = np.load(vectors / "documents.npy"), np.load(vectors / "lengths.npy")
    queries = np.split(np.load(vectors / "queries.npy"), np.cumsum(np.load(vectors / "query_lengths.npy"))[:-1])
    starts = np.cumsum(lengths) - lengths

    def ranking(query):
        return np.argsort(-np.maximum.reduceat(query @ matrix.T, starts, axis=1).sum(axis=0), kind="stable")

    def build():
        if name.startswith("dies when built"):
            fail(name.rpartition(" ")[2])
        if name == "never builds":  # nor does what it has started, which holds the pipe of answers open
            import subprocess
            subprocess.run(["sleep", "600"])
        folder.mkdir(parents=True)
        (folder / "index.bin").write_bytes(bytes(1000))
        with (folder.parent.parent / "built").open("a") as file:
            file.write(name + "\\n")
        return {"seconds": 2.0, "processor_seconds": 1.0, "memory_before": 10, "memory_peak": 30, "settings": {"bits": 4}}

    def found(k):
        rows = [ranking(query)[:k] for query in queries]
        if name == "shuffled":
            rows = [np.random.default_rng(number).permutation(len(lengths))[:k] for number in range(len(rows))]
        if name == "negative":
            rows = [np.append(row[:-1], -1) for row in rows]
        if name == "reversed ranks":
            rows = [row[::-1] for row in rows]
        return [row.tolist() for row in rows]

    def reply(request):
        task = request["task"]
        if task == "build":
            return build()
        if task == "memory":
            return {"open_seconds": 0.5, "open_before": 10, "private": 5, "mapped": 6, "open_peak": 40}
        if task == "all":
            if name == "dies when all are searched":
                fail("killed")
            return {"seconds": 0.5}
        if system["points"][request["point"]]["name"] == "refused":
            return {"refused": "there is no such parameter"}
        rows = found(request["k"])
        answer = {"milliseconds": [1.0 + number for number in range(len(rows))], "processor_seconds": 0.006}
        return {**answer, "rows": rows if request["rows"] else []}

    return reply, {}
"""


@pytest.fixture
def stub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "stub_index.py").write_text(STUB)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return "stub_index:open_stub"


def system(name: str, *points: str) -> System:
    return System(name, OWN, {}, tuple(Point(point, {"preset": point}) for point in points or ("balanced",)))


SETTINGS = Settings(k=5, deep=20, rounds=2, threads=(1,))


def run(
    vectors: VectorFolder, systems: list[System], work: Path, target: str, settings: Settings = SETTINGS, *, timeout: float = 600
) -> Benchmark:
    running = Running(target=target, timeout=timeout)
    command = "quiver bench index birds"
    return bench_index(vectors, systems, settings, work=work, name="birds", model="a model", command=command, running=running)


def recalls(row: Row) -> dict[str, object]:
    return {name.removeprefix("recall@"): value for name, value in row.values.items() if name.startswith("recall@")}


def names(benchmark: Benchmark) -> list[str]:
    return [row.backend for row in benchmark.case("build").rows]


def test_recall_latency_and_sizes_are_counted(make_vectors: MakeVectors, by_the_book: Scores, stub: str, tmp_path: Path) -> None:
    vectors = make_vectors()
    systems = [system("right"), system("shuffled"), system("reversed ranks")]
    done = run(vectors, systems, tmp_path / "work", stub, replace(SETTINGS, threads=(1, 2)))
    right, shuffled, backwards = done.case("search").rows
    assert recalls(right) == {"1": 1.0, "5": 1.0, "20": 1.0}
    assert right.values["ndcg@10"] == done.metadata["exact_ndcg"]
    assert right.values["ndcg_difference"] == 0
    best = np.argsort(-by_the_book(vectors), axis=1)
    for k in (1, 5, 20):
        found = [np.random.default_rng(row).permutation(40)[: max(k, 5) if k < 20 else 20][:k] for row in range(6)]
        wanted = [len(set(rows.tolist()) & set(best[row][:k].tolist())) / k for row, rows in enumerate(found)]
        assert recalls(shuffled)[str(k)] == pytest.approx(np.mean(wanted))
    assert float(recalls(shuffled)["20"]) < 0.75  # type: ignore[arg-type]
    assert float(recalls(shuffled)["5"]) < 0.4  # type: ignore[arg-type]
    assert recalls(backwards) == {"1": 0.0, "5": 1.0, "20": 1.0}, "the documents are right, the first is not"
    metadata = [done.metadata[name] for name in ("documents", "queries", "judged", "vectors")]
    assert metadata == [40, 6, 6, int(vectors.lengths.sum())]
    assert right.series["p50"] == Series.of([3.5, 3.5])
    assert right.series["p95"].median == pytest.approx(5.75)
    assert right.series["processor_ms"].median == pytest.approx(1.0)
    assert [right.series[f"queries_per_second_{threads}"].median for threads in (1, 2)] == [12.0, 12.0]
    built = done.case("build").rows
    assert [row.values["disk"] for row in built] == [1000] * 3
    assert built[0].values["settings"] == "bits=4"
    assert not (tmp_path / "work" / "indexes").exists()


def test_failures_are_reported_and_the_others_continue(make_vectors: MakeVectors, stub: str, tmp_path: Path) -> None:
    failing = ["dies when built error", "dies when built killed", "dies when opened", "dies when all are searched", "negative"]
    systems = [*map(system, failing), system("right", "balanced", "refused"), system("unable", "refused")]
    done = run(make_vectors(), systems, tmp_path / "work", stub)
    assert [(row.backend, row.variant) for row in done.case("search").rows] == [("right", "balanced")]
    told = {each.what: each.reason for each in done.not_run}
    assert {name: told[name] for name in failing} == {
        "dies when built error": "RuntimeError: the library does not like this",
        "dies when built killed": "killed by signal 9",
        "dies when opened": "RuntimeError: the library does not like this",
        "dies when all are searched": "killed by signal 9",
        "negative": "balanced: returned row -1, but there are 40 documents",
    }
    assert told["right refused"] == told["unable refused"] == "there is no such parameter"
    assert told["unable"] == "no search parameters were accepted"
    assert {"colbert-ai", "tachiom"} < set(told)
    assert not any("\n" in reason for reason in told.values())
    with pytest.raises(InputError, match=r"nothing could be measured: .*negative: balanced: returned row -1"):
        run(VectorFolder(tmp_path / "vectors"), [system("negative")], tmp_path / "other", stub)


@LINUX
@pytest.mark.slow
def test_slow_systems_are_stopped_and_the_others_continue(make_vectors: MakeVectors, stub: str, tmp_path: Path) -> None:
    done = run(make_vectors(), [system("never builds"), system("right")], tmp_path / "work", stub, timeout=4)
    assert names(done) == ["right"]
    told = {each.what: each.reason for each in done.not_run}
    assert told["never builds"] == "no answer within 4 seconds; stopped"
    with pytest.raises(ValueError, match="timeout must be > 0"):
        run(VectorFolder(tmp_path / "vectors"), [system("right")], tmp_path / "work", stub, timeout=0)


def test_repeated_run_measures_only_what_is_missing(make_vectors: MakeVectors, stub: str, tmp_path: Path) -> None:
    vectors, work = make_vectors(), tmp_path / "work"
    log = work / "built"
    first = run(vectors, [system("one"), system("dies when opened")], work, stub)
    assert log.read_text().split("\n") == ["one", "dies when opened", ""]
    again = run(vectors, [system("one"), system("two")], work, stub)
    assert log.read_text().split("\n") == ["one", "dies when opened", "two", ""]
    assert again.case("build").rows[0] == first.case("build").rows[0]
    assert again.case("search").rows[0] == first.case("search").rows[0]
    assert names(again) == ["one", "two"]
    run(vectors, [system("one")], work, stub, replace(SETTINGS, rounds=3))
    assert log.read_text().count("one\n") == 2, "with other settings it is another measurement"
    np.save(vectors.path / "queries.npy", -np.load(vectors.path / "queries.npy"))
    run(VectorFolder(vectors.path), [system("one")], work, stub, replace(SETTINGS, rounds=3))
    assert log.read_text().count("one\n") == 3, "with other vectors too"


def test_finished_builds_are_reused(make_vectors: MakeVectors, stub: str, tmp_path: Path) -> None:
    vectors, work = make_vectors(), tmp_path / "work"
    for _ in range(2):
        with pytest.raises(InputError, match="nothing could be measured"):
            run(vectors, [system("dies when opened")], work, stub)
    assert (work / "built").read_text() == "dies when opened\n"
    with pytest.raises(InputError, match="nothing could be measured"):
        run(vectors, [system("dies when opened")], work, stub, replace(SETTINGS, rounds=3))
    assert (work / "built").read_text() == "dies when opened\n" * 2


def test_quality_is_not_measured_on_synthetic_documents(make_vectors: MakeVectors, stub: str, tmp_path: Path) -> None:
    done = run(replace(make_vectors(), synthetic=200), [system("right", "balanced", "fast")], tmp_path / "work", stub)
    metadata = [done.metadata[name] for name in ("documents", "synthetic", "exact_ndcg", "judged")]
    assert metadata == [200, True, None, 0]
    assert [(recalls(row), row.values.get("ndcg@10")) for row in done.case("search").rows] == [({}, None)] * 2
    assert "noisy copies of them: latency and size are meaningful, quality is not" in render_markdown(report(done))
    _, header, rows = next(tables(report(done)))
    assert not any("recall" in label for label in header)
    assert all(len(row) == len(header) for row in rows)


def test_results_and_reports(make_vectors: MakeVectors, stub: str, tmp_path: Path) -> None:
    systems = [system("right", "balanced", "fast"), system("shuffled <b>|")]
    done = run(make_vectors(), [*systems, system("negative")], tmp_path / "work", stub)
    write_benchmark(done, tmp_path / "results.json")
    assert read_benchmark(tmp_path / "results.json") == done
    for title, header, rows in tables(report(done)):
        assert title == "Not run" or {row[0] for row in rows} == {"right", "shuffled <b>|"}
        assert all(len(row) == len(header) for row in rows)
    pytest.importorskip("matplotlib")
    pytest.importorskip("jinja2")
    text, page = render_markdown(report(done)), render_html(report(done))
    for rendered in (text, page):
        for wanted in ("birds", "a model", "quiver bench index birds", "returned row -1", "recall@20", "nDCG@10 of exact search"):
            assert wanted in rendered
    assert "| right | fast | 1.0000 | 1.0000 | 1.0000 |" in text
    assert "shuffled \\<b>\\|" in text
    assert "<b>" not in page
    assert "shuffled &lt;b&gt;|" in page
    assert page.count("<svg") == 1
    write_report(report(done), tmp_path, draw=lambda: draw(done))
    assert {"plot.png", "plot.svg", "report.html", "report.md"} <= {path.name for path in tmp_path.iterdir()}


def test_invalid_settings_are_refused(make_vectors: MakeVectors, stub: str, tmp_path: Path) -> None:
    vectors = make_vectors()
    with pytest.raises(ValueError, match="two systems have the same name"):
        run(vectors, [system("one"), system("one")], tmp_path / "work", stub)
    for wrong in ({"rounds": 0}, {"k": 0}, {"deep": 4}, {"threads": ()}, {"threads": (0,)}):
        with pytest.raises(ValueError, match="rounds, k and threads must be >= 1 and deep >= k"):
            run(vectors, [system("one")], tmp_path / "work", stub, dataclasses.replace(SETTINGS, **wrong))  # type: ignore[arg-type]


def real(vectors: VectorFolder, systems: list[System], work: Path) -> Benchmark:
    settings = Settings(k=10, deep=400, rounds=1, threads=(1,), build_threads=2)
    done = bench_index(vectors, systems, settings, work=work, name="drawn")
    search, build = done.case("search").rows[0], done.case("build").rows[0]
    assert build.backend == "exact"
    assert recalls(search) == {"1": 1.0, "10": 1.0, "400": 1.0}, "of all documents too"
    assert search.values["ndcg@10"] == done.metadata["exact_ndcg"]
    values = {name: float(value) for name, value in build.values.items() if isinstance(value, int | float)}
    assert values["disk"] > 4 * 16 * float(done.metadata["vectors"] or 0)
    assert values["seconds"] > 0
    assert values["memory_peak"] >= values["memory_before"] > 2**20
    assert values["open_peak"] >= values["open_before"]
    assert search.series["queries_per_second_1"].median > 0
    return done


@pytest.mark.slow
@LINUX
def test_dense_vectors_are_measured_in_child_processes(make_vectors: MakeVectors, tmp_path: Path) -> None:
    points = (Point("narrow", {"efSearch": 1}), Point("wide", {"efSearch": 300}))
    # An index that the few documents of the warm-up could not train.
    factory = quiver_system("faiss-dense:factory=IVF16,Flat", quiver_points(["exact"]))
    exact = with_filters(quiver_system("exact", quiver_points([])), [0.1, 0.001], 700)
    systems = [exact, System("faiss:HNSW8", "faiss", {"factory": "HNSW8"}, points), factory]
    done = real(make_vectors(dense=True, documents=700), systems, tmp_path / "work")
    settings = [str(row.values["settings"]) for row in done.case("build").rows]
    assert "engine=exact-dense" in settings[0]
    assert "factory=IVF16,Flat" in settings[2], [each.reason for each in done.not_run]
    rows = {(row.backend, row.variant): row for row in done.case("search").rows}
    filters = [row for row in done.case("search").rows if row.backend == "exact"][1:]
    assert [(row.variant, row.values["allowed"], recalls(row)["10"], row.values.get("ndcg@10")) for row in filters] == [
        ("exact, 10% allowed", 70, 1.0, None),
        ("exact, 0.1% allowed", 1, 1.0, None),
    ]
    narrow, wide = (recalls(rows["faiss:HNSW8", name])["10"] for name in ("narrow", "wide"))
    assert wide == 1.0 > float(narrow), "a parameter that one point sets is reset by the next"  # type: ignore[arg-type]


@LINUX
@pytest.mark.slow
def test_token_vectors_are_measured_in_child_processes(make_vectors: MakeVectors, tmp_path: Path) -> None:
    systems = [quiver_system("exact", quiver_points([])), System("exact:no_such=1", OWN, {"no_such": 1}, (Point("exact"),))]
    systems.append(with_filters(quiver_system("ivf-tokens:bits=4", quiver_points([])), [0.5], 300))
    done = real(make_vectors(documents=300), systems, tmp_path / "work")
    assert names(done) == ["exact", "ivf-tokens:bits=4"]
    settings = [str(row.values["settings"]) for row in done.case("build").rows]
    assert "engine=exact-tokens" in settings[0]
    assert "bits=4" in settings[1]
    points = [row for row in done.case("search").rows if row.backend == "ivf-tokens:bits=4"]
    assert all(0.8 < float(recalls(row)["10"]) <= 1 for row in points)  # type: ignore[arg-type]
    assert points[1].values["allowed"] == 150
    (told,) = [each for each in done.not_run if each.what == "exact:no_such=1"]
    assert "no_such" in told.reason
