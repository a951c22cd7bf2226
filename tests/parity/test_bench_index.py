"""The index benchmark beside its baselines on random vectors; libraries that are not installed are skipped."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from quiver.eval.bench.index import Settings, bench_index
from quiver.eval.bench.index_backends import baseline_systems, quiver_points, quiver_system, unsupported_reason
from quiver.eval.bench.index_data import VectorFolder

pytestmark = [pytest.mark.parity, pytest.mark.usefixtures("quick_children")]

DOCUMENTS, DIM = 400, 32
# The least recall@10 at the most thorough point, on vectors without any structure.
LEAST = {"faiss": 0.9, "hnswlib": 0.95, "usearch": 0.95, "fast-plaid": 0.5, "warp": 0.3, "voyager": 0.8}


@pytest.mark.parametrize("baseline", ["hnswlib", *(pytest.param(each, marks=pytest.mark.slow) for each in LEAST if each != "hnswlib")])
def test_a_baseline_finds_what_is_there(baseline: str, tmp_path: Path) -> None:
    if reason := unsupported_reason(baseline):
        pytest.skip(f"{baseline}: {reason}")
    dense = baseline in ("faiss", "hnswlib", "usearch")
    generator = np.random.default_rng(5)
    lengths = np.ones(DOCUMENTS, np.int64) if dense else generator.integers(5, 20, DOCUMENTS)
    documents = generator.standard_normal((int(lengths.sum()), DIM), np.float32)
    documents /= np.linalg.norm(documents, axis=1, keepdims=True)
    wanted = generator.choice(DOCUMENTS, 12, replace=False)
    ends = np.cumsum(lengths)
    queries = np.concatenate([documents[ends[row] - (1 if dense else 4) : ends[row]] for row in wanted])
    queries += 0.05 * generator.standard_normal(queries.shape, np.float32)
    queries /= np.linalg.norm(queries, axis=1, keepdims=True)
    np.save(tmp_path / "documents.npy", documents)
    np.save(tmp_path / "queries.npy", queries)
    if not dense:
        np.save(tmp_path / "lengths.npy", lengths)
        np.save(tmp_path / "query_lengths.npy", np.full(12, 4))
    vectors = VectorFolder(tmp_path)
    systems = [quiver_system("exact", quiver_points([])), *baseline_systems(baseline, kind=vectors.kind, documents=DOCUMENTS, dim=DIM)]
    done = bench_index(vectors, systems, Settings(rounds=1, threads=(1,)), work=tmp_path / "work", name="drawn")
    built = done.case("build").rows
    assert [row.backend for row in built] == [system.name for system in systems], [each.reason for each in done.not_run]
    exact, *others = done.case("search").rows
    depths = ("recall@1", "recall@10", "recall@100")
    assert [exact.values[depth] for depth in depths] == [1.0] * 3
    for row in built[1:]:
        assert row.values["versions"]
        assert int(row.values["disk"] or 0) > DOCUMENTS * DIM // 4
        points = [each for each in others if each.backend == row.backend]
        first, thorough = points[0], points[-1]
        assert float(thorough.values["recall@1"] or 0) >= 0.9, "each query is made of a document"
        assert float(thorough.values["recall@10"] or 0) >= LEAST[baseline]
        assert float(thorough.values["recall@10"] or 0) >= float(first.values["recall@10"] or 0) - 0.05
        assert row.backend != "faiss:Flat" or [thorough.values[depth] for depth in depths] == [1.0] * 3
        assert thorough.series["p50"].median > 0
