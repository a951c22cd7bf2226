"""What models offer Python code beyond encoding: settings that can be set, limits, devices, tables."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow.parquet
import pytest
import torch

from quiver.encoder import Encoder, InputError
from quiver.retrieval.data.source import SourceOptions, open_corpus
from quiver.retrieval.index import build_index, refresh_index
from quiver.retrieval.models.biencoder import BiEncoder
from quiver.retrieval.models.loading import WorkerModel, load_index_model
from quiver.retrieval.records import Document
from tests.retrieval.models.small import make_colbert, make_dense, make_tokenizer

TEXTS = ["a bird has wings", "fish", "which animal has wings and flies over the sea", ""]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_dense(make_tokenizer([*TEXTS, "query: passage:"]), query_prompt="query: ").save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def test_batch_size_limits_the_texts_of_a_batch(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, sizes = BiEncoder(folder, device="cpu"), list[int]()
    forward = Encoder.forward

    def counting(self: Encoder, batch: Any) -> torch.Tensor:
        sizes.append(len(batch))
        return forward(self, batch)

    monkeypatch.setattr(Encoder, "forward", counting)
    expected = model.encode(TEXTS)
    np.testing.assert_allclose(model.encode(TEXTS, batch_size=3), expected, atol=1e-6)
    make_colbert(make_tokenizer(TEXTS)).encode(TEXTS, is_query=False, batch_size=1)
    assert sizes == [4, 3, 1, 1, 1, 1, 1]


def test_settings_change_the_fingerprint_and_come_back_with_the_card(folder: Path) -> None:
    fingerprints = [BiEncoder(folder, device="cpu").card.fingerprint]
    for name, value in (("truncate_dim", 8), ("max_seq_length", 7), ("prompts", {"query": "find: "}), ("similarity_fn_name", "dot")):
        model = BiEncoder(folder, device="cpu")
        assert model.card.fingerprint == fingerprints[0]
        setattr(model, name, value)
        fingerprints.append(model.card.fingerprint)
        for loaded in (load_index_model(model.card, device="cpu"), WorkerModel.of(model).load()):
            assert loaded.card.fingerprint == model.card.fingerprint
            np.testing.assert_array_equal(loaded.encode_query(TEXTS), model.encode_query(TEXTS))
    assert len(set(fingerprints)) == len(fingerprints)
    same = BiEncoder(folder, device="cpu", truncate_dim=32)
    assert same.card.fingerprint == fingerprints[0]


def test_an_opened_corpus_has_passages_in_the_tokens_of_the_model(folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "a.md").write_text("# Birds\n\n" + "wings over the sea, unbelievably far. " * 30)
    model, rows = BiEncoder(folder, device="cpu"), [{"id": "a", "text": "wings over the sea, unbelievably far. " * 30}]
    cut = SourceOptions(passages="headings,tokens:20")
    for given in (tmp_path / "notes", open_corpus(tmp_path / "notes"), open_corpus(rows, cut), open_corpus(pd.DataFrame(rows), cut)):
        assert build_index(given, model).manifest.tokens.truncated == 0
    assert not caplog.messages
    whole = build_index(rows, model)
    assert whole.manifest.tokens.truncated == 1
    (message,) = caplog.messages
    assert message.startswith("the model reads 32 tokens; 1 of 1 documents are longer, and their ends are not searched.")


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


def test_bm25_is_recognised_and_options_of_a_source_are_refused() -> None:
    for name in ("BM25", "bm-25", "bm52"):
        with pytest.raises(InputError, match=f"{name}: no such model; did you mean bm25"):
            build_index(["wings"], name)
    with pytest.raises(InputError, match="options must be BuildOptions, got SourceOptions; how documents are read is said by open_corpus"):
        build_index(["wings"], "bm25", options=SourceOptions())  # type: ignore[arg-type]


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
