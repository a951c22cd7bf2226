"""Systems from words, and the points that make a curve of each."""

from __future__ import annotations

import pytest

from quiver.encoder import InputError
from quiver.eval.bench.encoder.results import OWN
from quiver.eval.bench.index import default_peers, own_points, own_system, peer_systems, threads_up_to
from quiver.eval.bench.index.child import ADAPTERS
from quiver.eval.bench.index.systems import LIBRARIES, unsupported_reason
from quiver.retrieval.index.engines import format_settings, parse_settings


def test_every_library_has_an_adapter() -> None:
    assert set(ADAPTERS) == set(LIBRARIES)
    assert set(default_peers("dense")) | set(default_peers("colbert")) | {OWN} == set(LIBRARIES)


def test_an_engine_with_settings() -> None:
    system = own_system("faiss-dense:factory=IVF64,Flat,bits=16", own_points(["fast", "nprobe=8,slack=1.5", "fast"]))
    assert (system.engine, system.library) == ("faiss-dense", OWN)
    assert system.settings == {"factory": "IVF64,Flat", "bits": 16}
    assert [(point.name, point.knobs) for point in system.points] == [
        ("fast", {"preset": "fast"}),
        ("nprobe=8,slack=1.5", {"nprobe": 8, "slack": 1.5}),
    ]
    assert [point.name for point in own_points([])] == ["balanced"]
    assert parse_settings(format_settings({"bits": 3, "on": True, "share": 0.5})) == {"bits": 3, "on": True, "share": 0.5}


@pytest.mark.parametrize("text", ["quick", "", "nprobe"])
def test_no_effort(text: str) -> None:
    with pytest.raises(InputError, match=r"unknown search effort .*; choose exact, balanced, fast, or search parameters"):
        own_points([text])


@pytest.mark.parametrize("text", ["bits=1,bits=2", "bits=", "bits", "bit=4"])
def test_no_setting(text: str) -> None:
    with pytest.raises(InputError, match=r"is not a setting|given twice|has no setting"):
        own_system(f"ivf-tokens:{text}", [])


def test_every_point_of_a_peer_sets_every_knob() -> None:
    """Libraries keep what was set for the point before."""
    dense = [system for name in default_peers("dense") for system in peer_systems(name, kind="dense", documents=100_000, dim=128)]
    tokens = [system for name in default_peers("colbert") for system in peer_systems(name, kind="colbert", documents=1000, dim=128)]
    assert len(dense) == 5
    assert len(tokens) == 3
    for system in [*dense, *tokens]:
        assert len({frozenset(point.knobs) for point in system.points}) == 1
        assert len({point.name for point in system.points}) == len(system.points)


def test_faiss_by_a_factory_string() -> None:
    (flat,) = peer_systems("faiss:Flat", kind="dense", documents=10, dim=8)
    assert [point.knobs for point in flat.points] == [{}]
    names = [system.name for system in peer_systems("faiss", kind="dense", documents=100_000, dim=128)]
    assert names == ["faiss:Flat", "faiss:HNSW32", "faiss:IVF1024,PQ64x4fs,RFlat"]
    (refined,) = peer_systems("faiss:IVF64,PQ8,RFlat", kind="dense", documents=10, dim=8)
    assert refined.points[-1].knobs == {"nprobe": 32, "k_factor_rf": 10}


@pytest.mark.parametrize(
    ("text", "kind", "message"),
    [
        ("annoy", "dense", "unknown peer 'annoy' for dense vectors; there are faiss, hnswlib, usearch"),
        ("fast-plaid", "dense", "unknown peer 'fast-plaid' for dense vectors"),
        ("quiver", "colbert", "there are fast-plaid, warp, voyager"),
        ("hnswlib:HNSW32", "dense", "only faiss takes a factory string"),
    ],
)
def test_no_peer(text: str, kind: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        peer_systems(text, kind=kind, documents=100, dim=16)  # type: ignore[arg-type]


def test_what_is_not_installed_says_how(monkeypatch: pytest.MonkeyPatch) -> None:
    assert unsupported_reason(OWN) is None
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert unsupported_reason("fast-plaid") == "not installed: pip install fast-plaid"


def test_threads() -> None:
    assert [threads_up_to(most) for most in (1, 2, 3, 8)] == [(1,), (1, 2), (1, 2, 3), (1, 2, 4, 8)]
