"""What models offer Python code beyond encoding: settings that can be set, limits, devices, tables."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow.parquet
import pytest

from quiver.encoder import InputError
from quiver.retrieval.data.source import SourceOptions, open_corpus
from quiver.retrieval.index import build_index, refresh_index
from quiver.retrieval.models.biencoder import BiEncoder
from quiver.retrieval.records import Document
from tests.retrieval.models.small import make_dense, make_tokenizer

TEXTS = ["a bird has wings", "fish", "which animal has wings and flies over the sea", ""]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_dense(make_tokenizer([*TEXTS, "query: passage:"]), query_prompt="query: ").save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def test_what_is_no_text_is_refused_in_one_line(folder: Path) -> None:
    model = BiEncoder(folder, device="cpu")
    index = build_index(["a bird", "fish"], model)
    wrong: Any = None
    with pytest.raises(InputError, match="a text or a list of texts is encoded, got None"):
        model.encode(wrong)
    with pytest.raises(InputError, match="a text, a list of texts or vectors are searched for, got None"):
        index.search(wrong)
    with pytest.raises(InputError, match="documents:2: 'text' must be a string, got nothing; leave the row out, or give it an empty text"):
        build_index([{"text": "a"}, {"text": None}], model)


@pytest.mark.parametrize(
    ("given", "ids"),
    [
        (["a", "b"], ["1", "2"]),
        (iter(["a", "b"]), ["1", "2"]),
        ([{"doc_id": "x", "text": "a", "title": "t"}, {"doc_id": "y", "text": "b"}], ["x", "y"]),
        ([Document("x", "a"), Document("y", "b")], ["x", "y"]),
        (({"text": text} for text in "ab"), ["1", "2"]),
    ],
)
def test_an_index_is_built_of_texts_mappings_and_documents(folder: Path, given: Any, ids: list[str], tmp_path: Path) -> None:
    index = build_index(given, BiEncoder(folder, device="cpu"), tmp_path / "index")
    assert list(index.ids) == ids
    assert [document.text for document in index.documents] == ["a", "b"]


def test_data_frames_of_every_kind_of_column_give_what_a_list_of_rows_gives(tmp_path: Path) -> None:
    rows = [
        {"id": "a", "text": "wings", "year": 2012, "open": True, "tags": ["x", "y"], "note": "first"},
        {"id": "b", "text": "fins", "year": None, "open": None, "tags": [], "note": None},
    ]
    plain = pd.DataFrame(rows).astype({"year": "Int64", "open": "boolean"})  # with gaps, pandas' default is float
    plain.to_parquet(tmp_path / "rows.parquet")
    wanted = list(build_index(rows, "bm25").documents)
    assert wanted[0].metadata == {"year": 2012, "open": True, "tags": ["x", "y"], "note": "first"}
    arrays = [{name: np.array(value) if isinstance(value, list) else value for name, value in row.items()} for row in rows]
    arrow = pd.read_parquet(tmp_path / "rows.parquet", dtype_backend="pyarrow")
    given = [plain, plain.convert_dtypes(), plain.astype(object), pd.read_parquet(tmp_path / "rows.parquet"), arrow, arrays]
    for each in (*given, pyarrow.parquet.read_table(tmp_path / "rows.parquet")):
        assert list(build_index(each, "bm25").documents) == wanted
        assert list(build_index(open_corpus(each), "bm25").documents) == wanted
    [scalar] = build_index([{"id": "a", "text": "wings", "year": np.array(2012)}], "bm25").documents
    assert scalar.metadata == {"year": 2012}
    odd = pd.DataFrame({"text": ["wings"], "month": pd.period_range("2021-01", periods=1, freq="M")})
    assert [each.metadata for each in build_index(odd, "bm25").documents] == [{"month": "2021-01"}]


def test_an_index_is_built_of_a_data_set(folder: Path, tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_list([{"id": "a", "text": "wings", "year": 2012}, {"id": "b", "text": "fins", "year": 2008}])
    index = build_index(rows, BiEncoder(folder, device="cpu"))
    assert [hit.id for hit in index.search("wings", filter="year >= 2010")] == ["a"]
    assert list(build_index(datasets.DatasetDict({"train": rows}), "bm25").documents) == list(index.documents)
    with pytest.raises(InputError, match="a data set with several splits; pass one of 'train', 'test'"):
        build_index(datasets.DatasetDict({"train": rows, "test": rows}), "bm25")
    # With other names of fields.
    named = datasets.Dataset.from_list([{"sku": 7, "about": "wings", "price": 3.5}])
    options = SourceOptions(id="sku", text="about")  # type: ignore[arg-type]
    for given in (named, list(named), pd.DataFrame(named)):
        again = build_index(open_corpus(given, options), "bm25", tmp_path / type(given).__name__)
        assert list(again.documents) == [Document("7", "wings", "", {"price": 3.5})]
        with pytest.raises(InputError, match="the sources of this index are not known; pass the source"):
            refresh_index(again.path, again.model)
    with pytest.raises(InputError, match="documents: must be mappings from field to value, got a str; pass texts to build_index"):
        list(open_corpus(["wings"], options))
    with pytest.raises(InputError, match=r"documents:1: no field 'sku' \(--id\); the fields are id, text, year"):
        list(open_corpus(rows, options))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["a", 3], "documents:2: must be a string, got int"),
        ([3], "documents:1: must be a string, a mapping or a Document, got int"),
        ([{"id": "a", "body_of": "x"}], "no field 'text'; the fields are id, body_of; rename the field of the text to 'text'"),
        ([], "there are no documents to index"),
        ({"id": "a", "text": "x"}, "documents: must be a list, a data frame or a data set, got a mapping; put it into a list"),
    ],
)
def test_mistakes_in_documents_are_named(folder: Path, given: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        build_index(given, BiEncoder(folder, device="cpu"))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda model: model.encode("a", prompt_name="none"), "prompt_name must be one of query, document, got 'none'"),
        (lambda model: model.encode("a", batch_size=0), "batch_size must be >= 1, got 0"),
        (lambda model: model.encode("a", truncate_dim=0), "truncate_dim must be >= 1, got 0"),
        (lambda model: model.encode("a", precision="int4"), "precision must be one of"),
        (lambda model: model.encode(["a", 3]), "text 1 must be a string, got int"),
        (lambda model: setattr(model, "max_seq_length", 65), "max_seq_length 65 exceeds the encoder's 64 positions"),
        (lambda model: setattr(model, "similarity_fn_name", "l2"), "similarity_fn_name must be cosine or dot, got 'l2'"),
        (lambda model: model.to("tpu"), "device must be cpu, cuda or cuda:NUMBER"),
        (lambda model: model.start_multi_process_pool(["tpu"]), "device must be cpu, cuda or cuda:NUMBER"),
    ],
)
def test_mistakes_in_calls_are_named(folder: Path, call: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call(BiEncoder(folder, device="cpu"))
