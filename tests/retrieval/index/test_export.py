"""An exported index: what other programs read is what the index holds, deleted documents left out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from quiver.encoder.errors import InputError
from quiver.retrieval.data.corpus import read_documents
from quiver.retrieval.index import BuildOptions, IndexReader, add_documents, build_index, delete_documents
from quiver.retrieval.index.export import export_index
from quiver.retrieval.records import Document

DOCUMENTS = [
    Document(f"d{number}", "word " * (number % 4) + f"\u00fcber{number}", "title" * (number % 2), {"part": number}) for number in range(12)
]


def built(tmp_path: Path, model: Any, *, store_text: bool = True) -> tuple[IndexReader, list[Document]]:
    build_index(DOCUMENTS[:7], model, tmp_path / "i", options=BuildOptions(store_text=store_text))
    add_documents(tmp_path / "i", DOCUMENTS[7:], model)
    return delete_documents(tmp_path / "i", ["d2", "d7"]), [each for each in DOCUMENTS if each.id not in ("d2", "d7")]


@pytest.mark.parametrize("kind", ["dense", "colbert"])
@pytest.mark.parametrize("vectors", ["npy", "safetensors"])
def test_documents_and_vectors(tmp_path: Path, word_sum: Any, word_by_word: Any, kind: str, vectors: str) -> None:
    model = word_sum if kind == "dense" else word_by_word
    index, alive = built(tmp_path, model)
    described = export_index(index, tmp_path / "new" / "out", vectors=vectors, numbers=1000)  # a few rows at a time
    out = tmp_path / "new" / "out"
    assert list(read_documents(out / "documents.jsonl")) == alive
    assert json.loads((out / "export.json").read_text()) == described
    assert sorted(path.name for path in out.iterdir()) == sorted(["export.json", *described["files"]])
    assert (described["documents"], described["model"]["fingerprint"]) == (10, model.card.fingerprint)
    arrays = (
        load_file(out / "vectors.safetensors")
        if vectors == "safetensors"
        else {path.stem: np.load(path, mmap_mode="r") for path in out.glob("*.npy")}
    )
    assert {name: list(array.shape) for name, array in arrays.items()} == described["arrays"]
    expected = model.encode_texts([each.content() for each in alive], "document").vectors
    if kind == "dense":
        assert list(arrays) == ["vectors"]
        np.testing.assert_array_equal(arrays["vectors"], expected)
    else:
        np.testing.assert_array_equal(arrays["lengths"], [len(each) for each in expected])
        np.testing.assert_array_equal(arrays["vectors"], np.concatenate(expected))


def test_without_texts_there_are_ids(tmp_path: Path, word_sum: Any) -> None:
    index, alive = built(tmp_path, word_sum, store_text=False)
    export_index(index, tmp_path / "out")
    lines = (tmp_path / "out" / "documents.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == [{"_id": each.id} for each in alive]


def test_an_index_without_documents(tmp_path: Path, word_by_word: Any) -> None:
    build_index(DOCUMENTS[:2], word_by_word, tmp_path / "i")
    index = delete_documents(tmp_path / "i", ["d0", "d1"])
    export_index(index, tmp_path / "out")
    assert np.load(tmp_path / "out" / "vectors.npy").shape == (0, word_by_word.card.dim)
    assert (tmp_path / "out" / "documents.jsonl").read_bytes() == b""
    export_index(index, tmp_path / "safe", vectors="safetensors")
    assert load_file(tmp_path / "safe" / "vectors.safetensors")["lengths"].shape == (0,)


def test_where_nothing_is_written(tmp_path: Path, word_sum: Any) -> None:
    index, _ = built(tmp_path, word_sum)
    with pytest.raises(InputError, match="one of npy, safetensors, got 'csv'"):
        export_index(index, tmp_path / "out", vectors="csv")
    with pytest.raises(InputError, match="not empty; choose another folder"):
        export_index(index, tmp_path / "i")
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="cannot be written"):
        export_index(index, tmp_path / "file")
    assert not (tmp_path / "out").exists()
