"""Calibration: what the table says is what brute force finds, a target gets the fastest effort that reaches it, and no commit is lost."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from quiver.encoder.errors import InputError
from quiver.retrieval.index import (
    BuildOptions,
    Calibration,
    Filter,
    IndexReader,
    add_documents,
    build,
    build_index,
    calibrate,
    calibrate_index,
    calibration,
    check_index,
    compact_index,
    delete_documents,
    open_index,
)
from quiver.retrieval.index.calibration import LEAST_HITS, pseudo_queries
from quiver.retrieval.index.engines import named_params
from quiver.retrieval.index.recall_table import GridPoint, RecallTable, interval
from quiver.retrieval.index.store.reading import Layout
from quiver.retrieval.records import DenseEncoding, Document, ModelCard, Role, TextTokens, TokenEncoding

WIDTH = 16
DOCUMENTS = 500


class Heaps:
    """A model of either kind, whose documents lie in heaps: a text is its document's number, ``q`` before it makes a query of it."""

    def __init__(self, kind: Any, fingerprint: str = "a") -> None:
        self.card = ModelCard("heaps", kind, 64 * fingerprint, WIDTH, "dot" if kind == "dense" else "maxsim", 99, 99)
        self.documents: list[str] = []

    def encode_texts(self, texts: Sequence[str], role: Role, *, progress: bool = False) -> Any:
        if role == "document":
            self.documents += texts
        counts = TextTokens(np.ones(len(texts), np.int32), np.zeros(len(texts), bool), np.zeros(len(texts), bool))
        if self.card.kind == "dense":
            return DenseEncoding(np.array([heap_vectors(text, 1)[0] for text in texts]).reshape(-1, WIDTH), counts)
        return TokenEncoding([heap_vectors(text, 5) if text != "empty" else np.zeros((0, WIDTH), np.float32) for text in texts], counts)


CENTRES = np.random.default_rng(0).standard_normal((40, WIDTH))


def heap_vectors(text: str, count: int) -> NDArray[np.float32]:
    rng = np.random.default_rng([ord(letter) for letter in text])
    vectors = CENTRES[rng.integers(0, len(CENTRES), count)] + 0.5 * rng.standard_normal((count, WIDTH))
    scaled: NDArray[np.float32] = (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float32)
    return scaled


def corpus(first: int = 0, last: int = DOCUMENTS) -> list[Document]:
    return [Document(f"d{number}", str(number), "", {"third": number % 3}) for number in range(first, last)]


ENGINES: dict[str, BuildOptions] = {
    "pq": BuildOptions("pq-dense", {"dsub": 4}),
    "lists": BuildOptions("ivf-dense", {"nlist": 32}),
    "factory": BuildOptions("faiss-dense", {"factory": "IVF32,Flat"}),
    "tokens": BuildOptions("ivf-tokens", {"centroids": 128}),
}


def model_for(engine: str) -> Heaps:
    return Heaps("colbert" if engine == "tokens" else "dense")


@pytest.fixture(scope="module", autouse=True)
def _quick() -> Iterator[None]:
    """The tests measure little where they do not say how much."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(calibration, "MIN_SECONDS", 0.1)
        yield


@pytest.fixture(scope="module")
def built(_quick: None, tmp_path_factory: pytest.TempPathFactory) -> dict[str, IndexReader]:
    """An index of every approximate engine, measured at its commit."""
    folder = tmp_path_factory.mktemp("built")
    return {engine: build_index(corpus(), model_for(engine), folder / engine, options=options) for engine, options in ENGINES.items()}


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """An index of lists, of 90 documents, measured at its commit."""
    build_index(corpus(last=90), Heaps("dense"), tmp_path / "i", options=BuildOptions("ivf-dense", {"nlist": 8}))
    return tmp_path / "i"


def brute_force(index: IndexReader, query: NDArray[np.float32], k: int) -> list[str]:
    """The k best by the vectors that the index keeps, in double precision; ties as a search has them."""
    scored = []
    for segment in index.segments:
        rows = np.flatnonzero(segment.kept)
        vectors, lengths = segment.vectors.vectors(rows)
        products = vectors.astype(float) @ np.atleast_2d(query).astype(float).T
        for row, part in zip(rows.tolist(), np.split(products, np.cumsum(lengths)[:-1]), strict=True):
            if len(part):
                scored.append((float(part.max(axis=0).sum()), segment.documents.ids.strings[row]))
    return [key for _, key in sorted(scored, reverse=True)[:k]]


def real_queries(engine: str, count: int) -> Any:
    encoding = model_for(engine).encode_texts([f"q{number}" for number in range(count)], "query")
    return encoding.vectors


@pytest.mark.parametrize("engine", ENGINES)
def test_the_recall_of_the_table_is_that_of_brute_force(built: dict[str, IndexReader], engine: str) -> None:
    index, queries, k = built[engine], real_queries(engine, 40), 8
    (table,) = calibrate(index, queries=queries, ks=[k]).tables
    wanted = [set(brute_force(index, query, k)) for query in queries]
    recalls = []
    for point in table.points:
        found = [index.search([query] if engine == "tokens" else query[None], k, effort=point.search_params).ids[0] for query in queries]
        recalls.append(np.mean([len(those & set(ids)) / k for those, ids in zip(wanted, found, strict=True)]))
        assert point.recall == pytest.approx(recalls[-1], abs=1.01 / (k * len(queries)))  # a tie in float32 may be none in float64
        assert point.low <= point.recall <= point.high
        assert 0 < point.p50_ms <= point.p95_ms
    assert (table.k, table.queries) == (k, 40)
    assert recalls[0] < 0.98  # otherwise nothing would have been tested
    assert table.points[-1].recall == 1
    formula = [named_params(index.codec.preset_params(name, k=k)) for name in ("exact", "balanced", "fast")]
    assert all(search_params in [dict(point.search_params) for point in table.points] for search_params in formula)
    assert len({json.dumps(point.search_params) for point in table.points}) == len(table.points)


@pytest.mark.parametrize("engine", ENGINES)
def test_pseudo_queries_do_not_count_their_source_documents(built: dict[str, IndexReader], engine: str) -> None:
    index, k = built[engine], 12
    (table,) = calibrate(index, ks=[k], count=30, seed=5).tables
    made = pseudo_queries(index.segments, index.manifest.model.kind, count=30, seed=5)
    cheapest = table.points[0]
    recalls, sources = [], []
    for query in made:
        vectors = query.vectors[0] if engine == "tokens" else query.vectors
        wanted = set(brute_force(index, vectors, k)) - query.sources
        found = index.search(query.vectors, k, effort=cheapest.search_params).ids[0]
        recalls.append(len(wanted & set(found)) / len(wanted))
        sources.append(len(set(brute_force(index, vectors, k)) & query.sources))
    assert cheapest.recall == pytest.approx(np.mean(recalls), abs=1.01 / (8 * 30))
    assert np.mean(sources) > 1  # that is why they do not count
    assert len({query.sources for query in made}) > 25


@pytest.mark.parametrize("engine", ENGINES)
def test_held_out_queries_reach_the_target(built: dict[str, IndexReader], engine: str) -> None:
    """Queries that calibration never saw, from where the documents come from."""
    queries, k = real_queries(engine, 120), 10
    measured = calibrate(built[engine], count=100, ks=[k])
    # As fast as their places in the param_grid say: what is measured of so few documents in a test says little.
    points = [replace(point, p50_ms=place, p95_ms=place) for place, point in enumerate(measured.tables[0].points)]
    measured = replace(measured, tables=(replace(measured.tables[0], points=tuple(points)),))
    manifest = replace(built[engine].manifest, calibration=measured.to_json())
    index = IndexReader(built[engine].path, manifest, built[engine].codec, built[engine].segments)
    assert not index.search_params_for(0.8, k)["exhaustive"]
    wanted = index.search(queries, k, effort="exact").ids
    for target in (0.8, 0.9, 0.97):
        found = index.search(queries, k, target_recall=target).ids
        recalls = [len(set(one) & set(other)) / k for one, other in zip(found, wanted, strict=True)]
        assert np.mean(recalls) >= target - 2.5 * np.std(recalls) / len(recalls) ** 0.5 - 0.01


@pytest.mark.parametrize("engine", ENGINES)
def test_balanced_finds_nearly_all_that_the_models_own_vectors_rank_first(built: dict[str, IndexReader], engine: str) -> None:
    """The default preset, with queries that calibration never saw, against vectors that nothing has compressed."""
    queries, k = real_queries(engine, 60), 10
    texts = [str(number) for number in range(DOCUMENTS)]
    documents = model_for(engine).encode_texts(texts, "document").vectors
    recalls = []
    for query, found in zip(queries, built[engine].search(queries, k).ids, strict=True):
        scores = [(np.atleast_2d(query).astype(float) @ np.atleast_2d(each).T).max(axis=1).sum() for each in documents]
        best = {f"d{texts[row]}" for row in np.argsort(scores)[-k:]}
        recalls.append(len(best & set(found)) / k)
    assert np.mean(recalls) > 0.9


def test_a_target_takes_the_fastest_that_is_known_to_reach_it() -> None:
    def point(name: int, low: float, p50: float) -> GridPoint:
        return GridPoint({"nprobe": name}, min(1.0, low + 0.01), low, 1.0, p50, p50 + 1)

    ten = RecallTable(10, 200, (point(1, 0.7, 1.0), point(2, 0.96, 3.0), point(3, 0.95, 2.0), point(4, 0.99, 4.0), point(9, 1.0, 9.0)))
    hundred = RecallTable(100, 50, (point(5, 0.9, 5.0), point(9, 1.0, 9.0)))
    measured_before = Calibration(1000, 1000, "given", 0, "2026-01-01T00:00:00+00:00", "x", {}, (ten, hundred))
    for target, k, name, measured in [
        (0.5, 10, 1, 10),
        (0.7, 10, 1, 10),
        (0.701, 10, 3, 10),
        (0.951, 10, 2, 10),
        (0.98, 10, 4, 10),
        (0.995, 10, 9, 10),
        (1.0, 1, 9, 10),
        (0.9, 11, 5, 100),
        (0.91, 100, 9, 100),
    ]:
        found, chosen = measured_before.choose(target, k)
        assert (found, chosen.search_params["nprobe"]) == (measured, name), (target, k)
    with pytest.raises(InputError, match=r"up to 100 hits, not for 101; .* -k 101"):
        measured_before.choose(0.5, 101)
    for target in (0.0, -1.0, 1.1, float("nan")):
        with pytest.raises(ValueError, match="target_recall must be above 0"):
            measured_before.choose(target, 10)


def test_a_balanced_preset_with_low_recall_is_reported() -> None:
    def point(name: int, recall: float, p50: float) -> GridPoint:
        return GridPoint({"nprobe": name}, recall, recall - 0.02 * (recall < 1), recall, p50, p50 + 1)

    poor = RecallTable(10, 200, (point(1, 0.3, 1.0), point(2, 0.6, 3.0), point(9, 1.0, 90.0)))
    content = Calibration(1000, 1000, "index", 0, "2026-01-01T00:00:00+00:00", "x", {}, (poor,))
    assert poor.preset("balanced").recall == 0.6
    assert poor.preset("exact").recall == 1
    assert "balanced finds 0.60 of the 10 best documents; search with --effort exact, effort='exact' in Python (90 ms" in (
        content.advice() or ""
    )
    good = RecallTable(10, 200, (point(1, 0.3, 1.0), point(2, 0.92, 3.0), point(4, 0.96, 4.0), point(9, 1.0, 90.0)))
    assert [good.preset(name).search_params["nprobe"] for name in ("fast", "balanced", "exact")] == [2, 4, 9]
    assert replace(content, tables=(good,)).advice() is None


def test_a_search_for_a_target_is_that_with_the_chosen_search_params(built: dict[str, IndexReader]) -> None:
    for engine, index in built.items():
        assert index.calibration is not None
        queries = real_queries(engine, 6)
        measured, point = index.calibration.choose(0.9, 10)
        assert measured == 10
        assert index.search_params_for(0.9, 10) == point.search_params
        assert index.search(queries, 10, target_recall=0.9).ids == index.search(queries, 10, effort=point.search_params).ids
        only = index.search(queries, 10, target_recall=0.9, filter=Filter.parse(["third=1"])).ids
        assert all(int(key[1:]) % 3 == 1 for ids in only for key in ids)
        assert all(len(ids) == 10 for ids in only)
        # As many candidates for fewer hits.
        if engine != "tokens":
            assert float(str(index.search_params_for(0.9, 5)["k_factor"])) * 5 == pytest.approx(
                float(str(point.search_params["k_factor"])) * 10
            )
        with pytest.raises(ValueError, match="give either effort or target_recall, not both"):
            index.search(queries, 10, effort="fast", target_recall=0.9)
        with pytest.raises(ValueError, match="target_recall must be above 0"):
            index.search(queries, 10, target_recall=95)
        with pytest.raises(InputError, match="up to 100 hits"):
            index.search(queries, 500, target_recall=0.9)
        # A target of 1 is exact search, and no interval of another effort reaches it.
        assert index.search_params_for(1.0, 10)["exhaustive"] is True


def test_an_exact_engine_just_searches(tmp_path: Path) -> None:
    model = Heaps("dense")
    index = build_index(corpus(last=20), model, tmp_path / "i")
    assert index.kind == "exact-dense"
    assert index.calibration is None
    queries = model.encode_texts(["q"], "query").vectors
    assert index.search(queries, 3, target_recall=0.5).ids == index.search(queries, 3).ids
    assert index.search_params_for(0.5, 1000) == {}
    with pytest.raises(ValueError, match="target_recall must be above 0"):
        index.search(queries, 3, target_recall=0)
    (table,) = calibrate(index, ks=[6]).tables
    assert [point.recall for point in table.points] == [1.0]


def test_a_target_recall_without_calibration_is_refused(tmp_path: Path) -> None:
    options = replace(ENGINES["pq"], calibrate=False)
    index = build_index(corpus(last=50), Heaps("dense"), tmp_path / "i", options=options)
    assert index.manifest.calibration is None
    with pytest.raises(InputError, match="recall was not measured; run quiver index calibrate"):
        index.search(np.ones((1, WIDTH), np.float32), 5, target_recall=0.9)
    # A manifest of before there were calibrations has no such field.
    content = json.loads(Layout(tmp_path / "i").manifest(1).read_text())
    assert content["calibration"] is None


def test_recall_is_not_measured_if_that_needs_more_memory_than_allowed(tmp_path: Path) -> None:
    options = replace(ENGINES["pq"], memory=1024)
    index = build_index(corpus(last=50), Heaps("dense"), tmp_path / "i", options=options)
    assert index.calibration is None


def spoilt(change: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
    point = GridPoint({"nprobe": 1}, 0.5, 0.4, 0.6, 1.0, 2.0)
    table = RecallTable(10, 20, (point, GridPoint({"nprobe": 2}, 1.0, 1.0, 1.0, 3.0, 4.0)))
    content: dict[str, Any] = json.loads(json.dumps(asdict(Calibration(9, 9, "index", 0, "now", "x", {"numpy": "2"}, (table,)))))
    assert Calibration.from_json(copy.deepcopy(content)).to_json()["tables"]
    change(content)
    return content


@pytest.mark.parametrize(
    "change",
    [
        lambda content: content.pop("tables"),
        lambda content: content.update(more=1),
        lambda content: content.update(tables=[]),
        lambda content: content.update(tables={}),
        lambda content: content.update(tables=[[]]),
        lambda content: content.update(origin="elsewhere"),
        lambda content: content.update(documents="many"),
        lambda content: content["tables"].append(content["tables"][0]),
        lambda content: content["tables"][0].update(k=0),
        lambda content: content["tables"][0].update(queries=0),
        lambda content: content["tables"][0].update(points=[]),
        lambda content: content["tables"][0]["points"].pop(),
        lambda content: content["tables"][0]["points"][0].update(recall=1.5),
        lambda content: content["tables"][0]["points"][0].update(recall=float("nan")),
        lambda content: content["tables"][0]["points"][0].update(low="0.4"),
        lambda content: content["tables"][0]["points"][0].update(search_params=[1]),
        lambda content: content["tables"][0]["points"][0].update(p95_ms=0.5),
    ],
)
def test_a_malformed_table_is_refused(change: Callable[[dict[str, Any]], object]) -> None:
    with pytest.raises(InputError, match=r"the calibration cannot be read .*quiver index calibrate"):
        Calibration.from_json(spoilt(change))
    for other in (None, 3, [], "x"):
        with pytest.raises(InputError, match="the calibration cannot be read"):
            Calibration.from_json(other)


def test_the_interval_contains_the_true_recall_in_95_percent() -> None:
    rng = np.random.default_rng(3)
    for share, together in ((0.97, 0.0), (0.9, 0.5), (0.6, 0.9)):
        inside = 0
        for _ in range(400):
            # ``together`` of the queries find all or nothing: their hits hang together.
            whole = rng.random(100) < together
            recalls = np.where(whole, rng.random(100) < share, rng.binomial(10, share, 100) / 10)
            low, high = interval(recalls, np.full(100, 10))
            inside += low <= share <= high
        assert inside / 400 > 0.91, (share, together)
    assert interval(np.ones(1), np.array([10]))[0] < 0.3


def test_an_index_without_documents(small: Path) -> None:
    everything = list(open_index(small).ids)
    emptied = delete_documents(small, everything)
    assert emptied.search(real_queries("lists", 1), 5, target_recall=0.9).ids == [[]]
    with pytest.raises(InputError, match="nothing to measure"):
        calibrate_index(small)
    assert open_index(small).manifest.generation == 2
    assert compact_index(small).search(real_queries("lists", 1), 5, target_recall=0.9).ids == [[]]


def test_deleted_documents_are_neither_asked_nor_found(small: Path) -> None:
    gone = [f"d{number}" for number in range(60)]
    index = delete_documents(small, gone)
    assert index.calibration == open_index(small).calibration  # it still holds
    made = pseudo_queries(index.segments, "dense", count=100, seed=1)
    assert len(made) == 30
    assert not set().union(*(query.sources for query in made)) & set(gone)
    found = calibrate(index, ks=[10])
    assert (found.documents, found.largest, found.tables[0].queries) == (30, 90, 30)


def test_a_valid_calibration_is_kept_and_an_invalid_one_is_measured_again(small: Path) -> None:
    first = open_index(small).calibration
    added = add_documents(small, corpus(90, 150), Heaps("dense"))
    assert added.calibration == first  # a smaller segment is searched with the whole effort
    compacted = compact_index(small)
    assert compacted.calibration is not None
    assert (compacted.calibration.largest, compacted.calibration.documents) == (150, 150)
    larger = add_documents(small, corpus(150, 400), Heaps("dense"))
    assert larger.calibration is not None
    assert (larger.calibration.largest, larger.calibration.documents) == (250, 400)
    assert compact_index(small).manifest.calibration is not None
    assert check_index(small).problems == ()


def test_calibrating_commits_the_same_documents_with_a_new_table(small: Path) -> None:
    before = open_index(small)
    model = Heaps("dense")
    index = calibrate_index(small, model, queries=[f"q{number}" for number in range(30)], ks=[1, 20], count=25, seed=4)
    assert index.calibration is not None
    assert (index.manifest.generation, index.manifest.operation) == (2, "calibrate")
    assert (index.calibration.origin, index.calibration.seed) == ("given", 4)
    assert [(table.k, table.queries) for table in index.calibration.tables] == [(1, 25), (20, 7)]
    assert index.manifest.segments == before.manifest.segments
    assert index.manifest.codec == before.manifest.codec
    assert list(index.documents) == list(before.documents)
    assert open_index(small).calibration == index.calibration
    assert model.documents == []
    with pytest.raises(ValueError, match="model is required to encode queries"):
        calibrate_index(small, queries=["q"])
    with pytest.raises(InputError, match="built with"):
        calibrate_index(small, Heaps("dense", "b"), queries=["q"])
    for wrong in ({"count": 0}, {"ks": []}, {"ks": [LEAST_HITS - 1]}):
        with pytest.raises(ValueError, match="count must be >= 1 and every k"):
            calibrate_index(small, **wrong)
    assert open_index(small).manifest.generation == 2


class StoppedError(Exception):
    """Stands for a kill."""


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_build_killed_during_calibration_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, overwrite: bool) -> None:
    path, model = tmp_path / "i", Heaps("dense")
    if overwrite:
        build_index(corpus(last=7), model, path, options=BuildOptions("exact"))
    before = len(model.documents)

    def stop(*arguments: object, **named: object) -> None:
        raise StoppedError

    with monkeypatch.context() as patched:
        patched.setattr(build, "calibrate", stop)
        with pytest.raises(StoppedError):
            build_index(corpus(last=80), model, path, options=ENGINES["lists"], overwrite=overwrite)
    if overwrite:
        assert (len(open_index(path)), check_index(path).problems) == (7, ())
    else:
        with pytest.raises(InputError, match="nothing has been committed"):
            open_index(path)
    encoded = len(model.documents)
    assert encoded - before == 80
    index = build_index(corpus(last=80), model, path, options=ENGINES["lists"], overwrite=overwrite)
    assert len(model.documents) == encoded  # nothing is encoded again
    assert index.calibration is not None
    assert check_index(path).problems == ()
