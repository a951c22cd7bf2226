"""Small collections of vectors that lie in heaps, codecs of every engine for them, and brute force over what a segment keeps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from quiver.retrieval.index.engines import Sample, train_codec
from quiver.retrieval.index.files import REAL, Files
from quiver.retrieval.records import ModelCard

ENGINES: dict[str, tuple[str, Mapping[str, Any]]] = {
    "pq": ("pq-dense", {}),
    "pq4": ("pq-dense", {"dsub": 4}),
    "pq8": ("pq-dense", {"dsub": 8}),
    "pq16": ("pq-dense", {"bits": 16}),
    "ivf": ("ivf-dense", {"nlist": 20}),
    "faiss-ivf": ("faiss-dense", {"factory": "IVF16,Flat"}),
    "faiss-graph": ("faiss-dense", {"factory": "HNSW16,Flat", "bits": 16}),
    "faiss-codes": ("faiss-dense", {"factory": "PQ8x4fs"}),
    "faiss-rotated": ("faiss-dense", {"factory": "RR16,IVF8,SQ8"}),
}
"""An engine of every kind: lists that take selectors, graphs, and codes that take none."""


@dataclass(frozen=True)
class Collection:
    vectors: NDArray[np.float32]

    @property
    def card(self) -> ModelCard:
        return ModelCard("a model", "dense", "0" * 64, self.vectors.shape[1], "dot", 32, 128)

    @property
    def ranks(self) -> NDArray[np.uint32]:
        return np.random.default_rng(11).permutation(len(self.vectors)).astype(np.uint32)

    def queries(self, count: int) -> NDArray[np.float32]:
        rng = np.random.default_rng(9)
        near = self.vectors[rng.choice(len(self.vectors), count)]
        return (near + 0.2 * near.std() * rng.standard_normal(near.shape)).astype(np.float32)

    def codec(self, kind: str, **settings: Any) -> Any:
        name, chosen = ENGINES[kind]
        size = len(self.vectors)
        return train_codec(name, Sample(self.vectors), self.card, documents=size, vectors=size, settings={**chosen, **settings}, seed=1)


def collection(documents: int = 1500, *, width: int = 16, seed: int = 0, unit: bool = True, heaps: int = 30) -> Collection:
    rng = np.random.default_rng(seed)
    centres = rng.standard_normal((heaps, width)) + 0.5
    vectors = centres[rng.integers(0, heaps, documents)] + 0.4 * rng.standard_normal((documents, width))
    if unit:
        vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    return Collection(vectors.astype(np.float32))


def write(codec: Any, folder: Path, vectors: NDArray[np.float32], *, chunk: int = 10**9) -> Any:
    folder.mkdir()
    writer = codec.writer(folder, REAL)
    for start in range(0, len(vectors), chunk):
        writer.add(vectors[start : start + chunk])
    assert set(writer.close()) == {path.name for path in folder.iterdir()}
    return codec.open(Files(folder), len(vectors))


def brute_force(
    segment: Any, query: NDArray[np.float32], k: int, ranks: NDArray[np.uint32], allowed: NDArray[np.bool_] | None
) -> tuple[list[int], NDArray[np.float32]]:
    """The k best rows by the codes that the segment keeps, in double precision rounded once, and their scores."""
    store = segment.store
    vectors = store.codes.whole().astype(float) * store.scales.whole()[:, None] * store.coding.spread + store.coding.centre
    scores = (vectors @ query.astype(float)).astype(np.float32)
    rows = np.arange(len(scores)) if allowed is None else np.flatnonzero(allowed)
    best = sorted(rows.tolist(), key=lambda row: (scores[row], ranks[row]), reverse=True)[:k]
    return best, scores[best]


def overlap(found: Any, wanted: Any) -> float:
    """The share of what should be found that is, on average over queries."""
    return float(
        np.mean([len({*one.rows.tolist()} & {*other.rows.tolist()}) / len(other.rows) for one, other in zip(found, wanted, strict=True)])
    )


def bytes_of(folder: Path) -> Mapping[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture(scope="session")
def dense() -> SimpleNamespace:
    """The helpers of this module; tests are imported without a package."""
    return SimpleNamespace(ENGINES=ENGINES, collection=collection, write=write, brute_force=brute_force, overlap=overlap, bytes_of=bytes_of)


@pytest.fixture(scope="session")
def documents() -> Collection:
    return collection()


@pytest.fixture(scope="session")
def segments(documents: Collection, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Any, Any]]:
    """A codec of every kind, and a segment of all documents."""
    made = {}
    for kind in ENGINES:
        codec = documents.codec(kind)
        made[kind] = codec, write(codec, tmp_path_factory.mktemp(kind) / "s", documents.vectors, chunk=700)
    return made
