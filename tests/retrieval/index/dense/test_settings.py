"""The table of sizes, and settings and search_params that the user gets wrong."""

from __future__ import annotations

from typing import Any

import pytest

from quiver.encoder.errors import InputError
from quiver.retrieval.index.engines import ENGINE_MODULES, engine_name, find_engine, parse_params
from quiver.retrieval.records import ModelCard

CARD = ModelCard("a model", "dense", "0" * 64, 16, "cosine", 32, 128)
TOKENS = ModelCard("a model", "colbert", "0" * 64, 16, "maxsim", 32, 128)


@pytest.mark.parametrize(
    ("documents", "engine"),
    [
        (1, "exact-dense"),
        (50_000, "exact-dense"),
        (50_001, "pq-dense"),
        (500_000, "pq-dense"),
        (500_001, "ivf-dense"),
        (10**9, "ivf-dense"),
    ],
)
def test_the_engine_follows_the_size(documents: int, engine: str) -> None:
    assert engine == engine_name("auto", CARD, documents)
    assert engine in ENGINE_MODULES
    assert engine_name("exact", CARD, documents) == "exact-dense"
    assert engine_name("pq-dense", CARD, documents) == "pq-dense"
    assert engine_name("auto", TOKENS, documents) in ENGINE_MODULES


@pytest.mark.parametrize(
    ("engine", "settings", "message"),
    [
        ("pq-dense", {"nlist": 4}, "pq-dense has no setting 'nlist'; it has dsub, bits"),
        ("pq-dense", {"bits": 4}, "pq-dense: bits: must be one of 8, 16; got 4"),
        ("faiss-dense", {"factory": "Flat", "bits": True}, "faiss-dense: bits: must be one of 8, 16; got true"),
        ("pq-dense", {"dsub": 3}, "pq-dense: dsub: must be one of 2, 4, 8; got 3"),
        ("pq-dense", {"dsub": True}, "pq-dense: dsub: must be one of 2, 4, 8; got true"),
        ("ivf-dense", {"lists": 4}, "ivf-dense has no setting 'lists' (did you mean 'nlist'?); it has dsub, bits, nlist"),
        ("ivf-dense", {"nlist": 0}, "ivf-dense: nlist: must be >= 1, got 0"),
        ("ivf-dense", {"nlist": float("nan")}, "ivf-dense: nlist: must be a number, got nan"),
        ("ivf-dense", {"nlist": float("inf")}, "ivf-dense: nlist: must be a number, got inf"),
        ("ivf-dense", {"dsub": "two"}, "ivf-dense: dsub: must be one of 2, 4, 8; got 'two'"),
        ("faiss-dense", {}, "faiss-dense: factory: missing; give a FAISS factory string such as factory=HNSW32,Flat"),
        ("faiss-dense", {"factory": 4}, "faiss-dense: factory: must be text, got 4"),
        ("faiss-dense", {"factory": "Flat", "nprobe": 4}, "faiss-dense has no setting 'nprobe'; it has factory, bits"),
        ("faiss-dense", {"factory": "Nonsense"}, "index 'Nonsense': FAISS cannot create it for width 16"),
        ("faiss-dense", {"factory": "LSH"}, "index 'LSH': FAISS cannot create it for width 16"),
        ("faiss-dense", {"factory": "SQ8,RFlat"}, "index 'SQ8,RFlat': faiss-dense refines with its own codes"),
    ],
)
def test_the_error_names_invalid_settings_before_encoding(engine: str, settings: Any, message: str) -> None:
    with pytest.raises(InputError) as caught:
        find_engine(engine).check(settings, CARD)
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("kind", "search_params", "message"),
    [
        ("pq", {"nprobe": 4}, "this pq-dense index has no search parameter 'nprobe'; it has k_factor, exhaustive"),
        ("ivf", {"efSearch": 4}, "this ivf-dense index has no search parameter 'efSearch'; it has nprobe, k_factor, exhaustive"),
        ("faiss-graph", {"nprobe": 4}, "this faiss-dense (HNSW16,Flat) index has no search parameter 'nprobe'; it has efSearch, k_factor"),
        ("ivf", {"nprobe": 0}, "this ivf-dense index: nprobe: must be >= 1, got 0"),
        ("ivf", {"nprobe": 1.5}, "this ivf-dense index: nprobe: must be a whole number, got 1.5"),
        ("pq", {"k_factor": 0.5}, "this pq-dense index: k_factor: must be >= 1, got 0.5"),
        ("pq", {"k_factor": float("nan")}, "this pq-dense index: k_factor: must be a number, got nan"),
        ("pq", {"k_factor": True}, "this pq-dense index: k_factor: must be a number, got true"),
        ("pq", {"exhaustive": 1}, "this pq-dense index: exhaustive: must be true or false, got 1"),
        ("pq", {"__class__": 0}, "this pq-dense index has no search parameter '__class__'; it has k_factor, exhaustive"),
    ],
)
def test_the_error_names_invalid_search_parameters(segments: Any, kind: str, search_params: Any, message: str) -> None:
    with pytest.raises(InputError) as caught:
        parse_params(segments[kind][0], search_params)
    assert str(caught.value).startswith(message)
