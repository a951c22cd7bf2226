"""Folders of vectors: reading, synthetic documents, writing, errors, and encoding a collection."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from quiver.encoder import Encoder, EncoderConfig, InputError, Tokenizer, init_weights
from quiver.eval.bench.index_data import VectorFolder, encode_collection, write_vectors
from quiver.retrieval.data.corpus import load_collection
from quiver.retrieval.models.colbert import ColBERT
from quiver.retrieval.models.loading import ColBERTSettings, ModelFolder
from quiver.retrieval.models.pooling import Projection
from quiver.retrieval.records import MatrixRows

MakeVectors = Callable[..., VectorFolder]


def test_any_range_of_documents_can_be_read(make_vectors: MakeVectors) -> None:
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


def test_synthetic_documents_do_not_depend_on_the_range_read(make_vectors: MakeVectors) -> None:
    real = make_vectors()
    synthetic = replace(real, synthetic=130, seed=4)
    whole, ids = synthetic.documents(0, 130)
    assert len(synthetic) == len(synthetic.ids) == len(set(synthetic.ids)) == 130
    assert len(whole) == synthetic.lengths.sum()
    ends = np.concatenate([[0], np.cumsum(synthetic.lengths)])
    for start, stop in ((0, 1), (35, 90), (41, 42), (119, 130)):
        part, part_ids = synthetic.documents(start, stop)
        assert np.array_equal(part, whole[ends[start] : ends[stop]])
        assert ids is not None
        assert part_ids is not None
        assert np.array_equal(part_ids, ids[ends[start] : ends[stop]])
    rows = int(real.lengths.sum())
    assert np.array_equal(whole[:rows], real.documents(0, 40)[0]), "the real documents come first, unchanged"
    copies = (whole[:rows] * whole[rows : 2 * rows]).sum(axis=1)
    assert np.allclose(np.linalg.norm(whole, axis=1), 1, atol=1e-5)
    assert 0.9 < copies.mean() < 0.99, "noise of 0.3 leaves a cosine of 1 / sqrt(1.09)"
    assert not np.array_equal(whole[rows : 2 * rows], whole[2 * rows : 3 * rows])
    assert not np.array_equal(replace(synthetic, seed=5).documents(40, 80)[0], synthetic.documents(40, 80)[0])
    assert synthetic.qrels is None
    assert synthetic.fingerprint() != real.fingerprint()


def test_judgements_of_missing_documents_and_queries_are_dropped(make_vectors: MakeVectors) -> None:
    vectors = make_vectors()
    assert vectors.qrels == {f"q{row}": {f"d{7 * row}": 1} for row in range(6)}
    assert replace(vectors, limit_queries=2).qrels == {"q0": {"d0": 1}, "q1": {"d7": 1}}
    with (vectors.path / "qrels.tsv").open("a") as file:
        file.write("q1\tnot-here\t2\n")
    assert VectorFolder(vectors.path).qrels == vectors.qrels


@pytest.mark.parametrize("dense", [True, False])
def test_vectors_are_read_as_they_were_written(tmp_path: Path, dense: bool) -> None:
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
        ("documents.npy", None, "contains no documents.npy"),
        ("queries.npy", None, "queries.npy: no such file"),
        ("query_lengths.npy", None, "it holds the number of vectors of each query"),
        ("documents.npy", np.zeros((5, 16), np.float32), "has 5 rows, but the lengths add up to"),
        ("documents.npy", "float64", "float64"),
        ("token_ids.npy", np.zeros(3, np.uint32), "has 3 rows, but the lengths add up to"),
        ("queries.npy", b"nothing", "not an array in NumPy's format"),
        ("ids.txt", b"one\ntwo\n", "has 2 ids, but there are 40 texts"),
        ("ids.txt", b"same\n" * 40, "an id occurs twice"),
    ],
)
def test_inconsistent_files_are_named(make_vectors: MakeVectors, name: str, content: object, message: str) -> None:
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


def test_token_ids_of_a_colbert_are_the_models(make_collection: Callable[..., Path], tmp_path: Path) -> None:
    folder = make_collection()
    documents = list(load_collection(folder, "test").documents)
    tokenizer = Tokenizer.train([document.content() for document in documents] * 3, vocab_size=300)
    for prefix in ("[Q] ", "[D] "):
        tokenizer.add_token(prefix)
    config = EncoderConfig.modernbert(
        vocab_size=320, hidden_size=32, num_heads=2, intermediate_size=48, layer_types=["global"], max_positions=64
    )
    settings = ColBERTSettings(query_length=16, document_length=24, query_prefix="[Q] ", document_prefix="[D] ", skiplist=(".",))
    model = ColBERT.from_parts(
        init_weights(Encoder(config), seed=1),
        tokenizer,
        ModelFolder("colbert", Path(), projections=(Projection(32, 16),), similarity="maxsim", colbert=settings),
    )
    expected = model.encode_texts([document.content() for document in documents], "document")
    assert expected.token_ids is not None
    # Encoded now, and found in a cache, which keeps vectors alone.
    for name in ("new", "again"):
        found = encode_collection(folder, model, "test", tmp_path / name, cache=tmp_path / "cache")
        vectors, token_ids = found.documents(0, len(documents))
        assert token_ids is not None
        assert np.array_equal(token_ids, np.concatenate(expected.token_ids))
        assert np.allclose(vectors, np.concatenate(expected.vectors), atol=1e-6)
