"""``quiver bench index`` beside the libraries that it compares with, on vectors drawn at random; what is not installed is skipped."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from quiver.eval.bench.index import IndexSettings, VectorFolder, bench_index, own_points, own_system, peer_systems
from quiver.eval.bench.index.systems import unsupported_reason

pytestmark = pytest.mark.parity

DOCUMENTS, DIM = 400, 32
# The least recall@10 at the most thorough point, on vectors without any structure.
LEAST = {"faiss": 0.9, "hnswlib": 0.95, "usearch": 0.95, "fast-plaid": 0.5, "warp": 0.3, "voyager": 0.8}


@pytest.mark.parametrize("peer", list(LEAST))
def test_a_peer_finds_what_is_there(peer: str, tmp_path: Path) -> None:
    if reason := unsupported_reason(peer):
        pytest.skip(f"{peer}: {reason}")
    dense = peer in ("faiss", "hnswlib", "usearch")
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
    systems = [own_system("exact", own_points([])), *peer_systems(peer, kind=vectors.kind, documents=DOCUMENTS, dim=DIM)]
    done = bench_index(vectors, systems, IndexSettings(rounds=1, threads=(1,)), work=tmp_path / "work", names=("drawn", None))
    assert [each.name for each in done.systems] == [system.name for system in systems], [each.reason for each in done.not_run]
    assert done.systems[0].points[0].recall == {"1": 1.0, "10": 1.0, "100": 1.0}
    for system in done.systems[1:]:
        assert system.versions
        thorough = system.points[-1]
        assert thorough.recall["1"] >= 0.9, "each query is made of a document"
        assert thorough.recall["10"] >= LEAST[peer]
        assert thorough.recall["10"] >= system.points[0].recall["10"] - 0.05
        assert system.name != "faiss:Flat" or thorough.recall == {"1": 1.0, "10": 1.0, "100": 1.0}
        assert system.build.disk > DOCUMENTS * DIM // 4
        assert thorough.p50.median > 0
