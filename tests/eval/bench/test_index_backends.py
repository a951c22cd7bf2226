"""Systems of the index benchmark: engines, search parameters and baselines from the command line."""

from __future__ import annotations

import pytest

from quiver.encoder import InputError
from quiver.eval.bench.index import threads_up_to
from quiver.eval.bench.index_backends import (
    LIBRARIES,
    baseline_systems,
    default_baselines,
    quiver_points,
    quiver_system,
    unsupported_reason,
)
from quiver.eval.bench.results import OWN


def test_every_library_belongs_to_a_kind() -> None:
    assert set(default_baselines("dense")) | set(default_baselines("colbert")) | {OWN} == set(LIBRARIES)


def test_engine_with_settings() -> None:
    system = quiver_system("faiss-dense:factory=IVF64,Flat,bits=16", quiver_points(["fast", "nprobe=8,slack=1.5", "fast"]))
    assert system.library == OWN
    assert system.settings == {"factory": "IVF64,Flat", "bits": 16}
    assert [(point.name, point.params) for point in system.points] == [
        ("fast", {"preset": "fast"}),
        ("nprobe=8,slack=1.5", {"nprobe": 8, "slack": 1.5}),
    ]
    assert [point.name for point in quiver_points([])] == ["balanced"]


@pytest.mark.parametrize("text", ["quick", "", "nprobe"])
def test_malformed_search_parameters_are_refused(text: str) -> None:
    with pytest.raises(InputError, match=r"unknown search effort .*; choose exact, balanced, fast, or search parameters"):
        quiver_points([text])


@pytest.mark.parametrize("text", ["bits=1,bits=2", "bits=", "bits", "bit=4"])
def test_malformed_settings_are_refused(text: str) -> None:
    with pytest.raises(InputError, match=r"is not a setting|given twice|has no setting"):
        quiver_system(f"ivf-tokens:{text}", [])


def test_every_point_of_a_baseline_sets_every_parameter() -> None:
    """Libraries keep the parameters of the point before."""
    dense = [system for name in default_baselines("dense") for system in baseline_systems(name, kind="dense", documents=100_000, dim=128)]
    tokens = [system for name in default_baselines("colbert") for system in baseline_systems(name, kind="colbert", documents=1000, dim=128)]
    assert len(dense) == 5
    assert len(tokens) == 3
    for system in [*dense, *tokens]:
        assert len({frozenset(point.params) for point in system.points}) == 1
        assert len({point.name for point in system.points}) == len(system.points)


def test_faiss_systems_of_factory_strings() -> None:
    (flat,) = baseline_systems("faiss:Flat", kind="dense", documents=10, dim=8)
    assert [point.params for point in flat.points] == [{}]
    names = [system.name for system in baseline_systems("faiss", kind="dense", documents=100_000, dim=128)]
    assert names == ["faiss:Flat", "faiss:HNSW32", "faiss:IVF1024,PQ64x4fs,RFlat"]
    (refined,) = baseline_systems("faiss:IVF64,PQ8,RFlat", kind="dense", documents=10, dim=8)
    assert refined.points[-1].params == {"nprobe": 32, "k_factor_rf": 10}


@pytest.mark.parametrize(
    ("text", "kind", "message"),
    [
        ("annoy", "dense", "unknown baseline 'annoy' for dense vectors; choose from faiss, hnswlib, usearch"),
        ("fast-plaid", "dense", "unknown baseline 'fast-plaid' for dense vectors"),
        ("quiver", "colbert", "choose from fast-plaid, warp, voyager"),
        ("hnswlib:HNSW32", "dense", "only faiss takes a factory string"),
    ],
)
def test_unknown_baselines_are_refused(text: str, kind: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        baseline_systems(text, kind=kind, documents=100, dim=16)  # type: ignore[arg-type]


def test_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert unsupported_reason(OWN) is None
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert unsupported_reason("fast-plaid") == "not installed: pip install fast-plaid"


def test_numbers_of_threads() -> None:
    assert [threads_up_to(most) for most in (1, 2, 3, 8)] == [(1,), (1, 2), (1, 2, 3), (1, 2, 4, 8)]
