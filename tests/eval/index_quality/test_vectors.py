"""The folder of vectors: what it reads, what it makes up, what it refuses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from quiver.encoder import InputError
from quiver.eval.bench.index import VectorFolder, write_vectors
from quiver.retrieval.protocols import MatrixRows

MakeVectors = Callable[..., VectorFolder]


def test_documents_are_read_in_any_part(make_vectors: MakeVectors) -> None:
    vectors = make_vectors()
    vectors.check()
    whole, token_ids = vectors.documents(0, 40)
    assert np.array_equal(whole, np.load(vectors.path / "documents.npy"))
    assert token_ids is not None
    assert np.array_equal(token_ids, np.load(vectors.path / "token_ids.npy"))
    ends = np.cumsum(vectors.lengths)
    part, ids = vectors.documents(7, 12)
    assert np.array_equal(part, whole[ends[6] : ends[11]])
    assert ids is not None
    assert np.array_equal(ids, token_ids[ends[6] : ends[11]])
    assert [len(query) for query in vectors.queries] == np.load(vectors.path / "query_lengths.npy").tolist()
    assert (vectors.kind, vectors.dim, vectors.ids[3], vectors.query_ids[2]) == ("colbert", 16, "d3", "q2")


def test_made_up_documents_do_not_depend_on_what_is_read_with_them(make_vectors: MakeVectors) -> None:
    real = make_vectors()
    made_up = replace(real, synthetic=130, seed=4)
    whole, ids = made_up.documents(0, 130)
    assert len(made_up) == len(made_up.ids) == len(set(made_up.ids)) == 130
    assert len(whole) == made_up.lengths.sum()
    ends = np.concatenate([[0], np.cumsum(made_up.lengths)])
    for start, stop in ((0, 1), (35, 90), (41, 42), (119, 130)):
        part, part_ids = made_up.documents(start, stop)
        assert np.array_equal(part, whole[ends[start] : ends[stop]])
        assert ids is not None
        assert part_ids is not None
        assert np.array_equal(part_ids, ids[ends[start] : ends[stop]])
    rows = int(real.lengths.sum())
    assert np.array_equal(whole[:rows], real.documents(0, 40)[0]), "the documents that there are come first, as they are"
    copies = (whole[:rows] * whole[rows : 2 * rows]).sum(axis=1)
    assert np.allclose(np.linalg.norm(whole, axis=1), 1, atol=1e-5)
    assert 0.9 < copies.mean() < 0.99, "noise of 0.3 leaves a cosine of 1 / sqrt(1.09)"
    assert not np.array_equal(whole[rows : 2 * rows], whole[2 * rows : 3 * rows])
    assert not np.array_equal(replace(made_up, seed=5).documents(40, 80)[0], made_up.documents(40, 80)[0])
    assert made_up.qrels is None
    assert made_up.fingerprint() != real.fingerprint()


def test_judgements_are_those_of_what_is_there(make_vectors: MakeVectors) -> None:
    vectors = make_vectors()
    assert vectors.qrels == {f"q{row}": {f"d{7 * row}": 1} for row in range(6)}
    assert replace(vectors, limit_queries=2).qrels == {"q0": {"d0": 1}, "q1": {"d7": 1}}
    with (vectors.path / "qrels.tsv").open("a") as file:
        file.write("q1\tnot-here\t2\n")
    assert VectorFolder(vectors.path).qrels == vectors.qrels


@pytest.mark.parametrize("dense", [True, False])
def test_what_is_written_is_read(tmp_path: Path, dense: bool) -> None:
    generator = np.random.default_rng(1)
    documents, queries = generator.random((9, 4), np.float32), generator.random((4, 4), np.float32)
    lengths = None if dense else np.array([2, 0, 7])
    count = 9 if dense else 3
    written = write_vectors(
        tmp_path / "folder",
        (MatrixRows(documents), lengths),
        (MatrixRows(queries), None if dense else np.array([1, 3])),
        ids=[f"a{row}" for row in range(count)],
        query_ids=[f"b{row}" for row in range(4 if dense else 2)],
        qrels={"b1": {"a2": 3}},
    )
    written.check()
    assert np.array_equal(written.documents(0, count)[0], documents)
    assert written.kind == ("dense" if dense else "colbert")
    assert np.array_equal(np.concatenate([np.atleast_2d(query) for query in written.queries]), queries)
    assert written.qrels == {"b1": {"a2": 3}}


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("documents.npy", None, "no documents.npy"),
        ("queries.npy", None, "queries.npy: no such file"),
        ("query_lengths.npy", None, "it says how many vectors each query has"),
        ("documents.npy", np.zeros((5, 16), np.float32), "5 rows, the lengths say"),
        ("documents.npy", "float64", "float64"),
        ("token_ids.npy", np.zeros(3, np.uint32), "3 rows, the lengths say"),
        ("queries.npy", b"nothing", "not an array in NumPy's format"),
        ("ids.txt", b"one\ntwo\n", "2 ids for 40 texts"),
        ("ids.txt", b"same\n" * 40, "an id occurs twice"),
    ],
)
def test_what_does_not_fit_is_named(make_vectors: MakeVectors, name: str, content: object, message: str) -> None:
    vectors = make_vectors()
    path = vectors.path / name
    if content is None:
        path.unlink()
    elif isinstance(content, bytes):
        path.write_bytes(content)
    else:
        np.save(path, np.load(path).astype(np.float64) if isinstance(content, str) else content)
    with pytest.raises(InputError, match=message):
        VectorFolder(vectors.path).check()
