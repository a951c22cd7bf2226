"""Random vectors, and their exact scores by NumPy."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from quiver.eval.bench.index_data import VectorFolder

MakeVectors = Callable[..., VectorFolder]


def unit(generator: np.random.Generator, *shape: int) -> np.ndarray:
    vectors = generator.standard_normal(shape, np.float32)
    return vectors / np.linalg.norm(vectors, axis=-1, keepdims=True)


@pytest.fixture
def make_vectors(tmp_path: Path) -> MakeVectors:
    """Write a folder of vectors, of a ColBERT unless they are to be dense."""

    def make(*, documents: int = 40, queries: int = 6, dim: int = 16, dense: bool = False, judged: bool = True) -> VectorFolder:
        folder, generator = tmp_path / "vectors", np.random.default_rng(3)
        folder.mkdir()
        lengths = np.ones(documents, np.int64) if dense else generator.integers(1, 9, documents)
        query_lengths = np.ones(queries, np.int64) if dense else generator.integers(2, 5, queries)
        np.save(folder / "documents.npy", unit(generator, int(lengths.sum()), dim))
        np.save(folder / "queries.npy", unit(generator, int(query_lengths.sum()), dim))
        if not dense:
            np.save(folder / "lengths.npy", lengths)
            np.save(folder / "query_lengths.npy", query_lengths)
            np.save(folder / "token_ids.npy", generator.integers(0, 50, int(lengths.sum())).astype(np.uint32))
        if judged:
            (folder / "ids.txt").write_text("".join(f"d{row}\n" for row in range(documents)))
            (folder / "query_ids.txt").write_text("".join(f"q{row}\n" for row in range(queries)))
            lines = [f"q{row}\td{(7 * row) % documents}\t1\n" for row in range(queries)]
            (folder / "qrels.tsv").write_text("query-id\tcorpus-id\tscore\n" + "".join(lines))
        return VectorFolder(folder)

    return make


@pytest.fixture
def by_the_book() -> Callable[[VectorFolder], np.ndarray]:
    """MaxSim or inner product of every query with every document, (Q, P), in float64."""

    def scores(vectors: VectorFolder) -> np.ndarray:
        matrix, _ = vectors.documents(0, len(vectors))
        ends = np.cumsum(vectors.lengths)
        found = np.empty((len(vectors.queries), len(vectors)))
        for row, query in enumerate(vectors.queries):
            similar = np.atleast_2d(query).astype(np.float64) @ matrix.T.astype(np.float64)
            found[row] = [similar[:, end - length : end].max(axis=1).sum() for end, length in zip(ends, vectors.lengths, strict=True)]
        return found

    return scores
