"""K-means and the assignment to centroids on a device, against FAISS; PyTorch's CPU stands for the device unless a GPU is there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from quiver.retrieval.index import BuildOptions, build_index, index_vectors
from quiver.retrieval.index.quantization import Clustering, kmeans, nearest_centroids
from quiver.retrieval.records import Document, ModelCard

CPU, META = torch.device("cpu"), torch.device("meta")
GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
DEVICES = [CPU, pytest.param(torch.device("cuda"), marks=GPU)]


def points(count: int, width: int, *, distinct: int | None = None) -> NDArray[np.float32]:
    rng = np.random.default_rng(count)
    centres = rng.standard_normal((40, width))
    found = (centres[rng.integers(0, 40, count)] + 0.7 * rng.standard_normal((count, width))).astype(np.float32)
    return found if distinct is None else found[rng.integers(0, distinct, count)]


def error(vectors: NDArray[np.float32], centroids: NDArray[np.float32]) -> float:
    """The objective of k-means: the squared distances to the nearest centroids."""
    clustering = Clustering(centroids, np.array([0, len(centroids)]))
    return float(((vectors - centroids[clustering.assign(vectors, None)]).astype(np.float64) ** 2).sum())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("count", "centroids", "width"), [(3000, 100, 31), (9000, 100, 64), (500, 450, 8)])
def test_centroids_are_those_of_faiss(device: torch.device, count: int, centroids: int, width: int) -> None:
    """The sample, the first centroids and the number of iterations are equal, so that only rounding differs."""
    vectors = points(count, width)
    faiss, ours = (kmeans(vectors, centroids, vectors_a_centroid=32, seed=5, device=each) for each in (None, device))
    assert ours.shape == faiss.shape
    assert error(vectors, ours) == pytest.approx(error(vectors, faiss), rel=0.01)
    assert np.quantile(np.abs(ours - faiss).max(axis=1), 0.9) < 1e-4


@pytest.mark.parametrize("device", DEVICES)
def test_an_empty_cluster_becomes_half_of_another(device: torch.device) -> None:
    """Copies among the first centroids leave clusters empty; without splits they would stay empty."""
    vectors = points(6000, 16, distinct=400)
    faiss, ours = (kmeans(vectors, 80, vectors_a_centroid=256, seed=1, device=each) for each in (None, device))
    assert len(np.unique(vectors[np.random.default_rng(0).choice(6000, 80)], axis=0)) < 80
    assert len(np.unique(nearest_centroids(vectors, ours, CPU))) == 80
    assert error(vectors, ours) == pytest.approx(error(vectors, faiss), rel=0.05)


@pytest.mark.parametrize("device", DEVICES)
def test_each_vector_goes_to_its_nearest_centroid_and_the_first_of_equal_ones(device: torch.device) -> None:
    vectors, centroids = points(70_000, 5), points(30, 5)
    centroids[20] = centroids[3]
    distances = ((vectors[:, None].astype(np.float64) - centroids[None]) ** 2).sum(axis=2)
    np.testing.assert_array_equal(nearest_centroids(vectors, centroids, device), distances.argmin(axis=1))


@pytest.mark.parametrize("on_disk", [True, False])
def test_an_index_is_built_where_the_model_is(word_sum: Any, tmp_path: Path, on_disk: bool) -> None:
    documents = [Document(f"d{number}", f"w{number % 97} v{number % 89}") for number in range(5000)]
    options = BuildOptions(engine="ivf-dense:nlist=256", calibrate=False)
    word_sum.device = META
    with pytest.raises((NotImplementedError, RuntimeError), match="meta"):
        build_index(documents, word_sum, tmp_path / "index" if on_disk else None, options=options)
    word_sum.device = CPU
    assert len(build_index(documents, word_sum, tmp_path / "index" if on_disk else None, options=options)) == 5000


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_an_index_built_on_a_gpu_finds_as_much() -> None:
    vectors, card = points(60_000, 96), ModelCard("vectors", "dense", "", 96, "dot", 0, 0)
    ids, queries = [f"d{number}" for number in range(len(vectors))], vectors[:300]
    best = index_vectors(ids, vectors, card).search(queries, 10)
    recalls = []
    for device in (CPU, torch.device("cuda")):
        hits = index_vectors(ids, vectors, card, engine="ivf-dense:nlist=256", device=device).search(queries, 10)
        recalls.append(np.mean([len({*found} & {*wanted}) / 10 for found, wanted in zip(hits.ids, best.ids, strict=True)]))
    assert recalls[1] == pytest.approx(recalls[0], abs=0.02)
