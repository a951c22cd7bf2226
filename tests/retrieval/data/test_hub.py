"""Data sets of the Hub and of ir_datasets, with data sets of the libraries' own classes that are made here."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from quiver.encoder.errors import InputError
from quiver.retrieval.data.source import SourceOptions, open_corpus
from quiver.retrieval.records import Document

ROWS = [{"_id": "a", "title": "t", "text": "x", "year": 1}, {"_id": "b", "title": "", "text": "y", "year": None}]
EXPECTED = [Document("a", "x", "t", {"year": 1}), Document("b", "y")]


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """Data sets in memory in place of downloads; the calls are kept."""
    datasets = pytest.importorskip("datasets")
    calls: list[tuple[Any, ...]] = []
    made = datasets.Dataset.from_list(ROWS)

    def load(name: str, config: str | None = None, *, revision: str | None = None, split: str | None = None) -> Any:
        calls.append((name, config, revision, split))
        if name == "owner/none":
            raise datasets.exceptions.DatasetNotFoundError("Dataset 'owner/none' doesn't exist\non the Hub")
        splits = datasets.DatasetDict({"train": made} if name == "owner/one" else {"train": made, "test": made})
        return splits if split is None else splits[split]

    monkeypatch.setattr(datasets, "load_dataset", load)
    return calls


def test_a_split_of_the_hub_is_read_in_every_pass(hub: list[tuple[Any, ...]]) -> None:
    corpus = open_corpus("hub://owner/two@v1/corpus:train")
    assert list(corpus) == list(corpus) == EXPECTED
    assert hub == [("owner/two", "corpus", "v1", "train")] * 2
    assert corpus.source == "hub://owner/two@v1/corpus:train"


def test_fields_and_passages_of_a_data_set_can_be_chosen(hub: list[tuple[Any, ...]]) -> None:
    options = SourceOptions(id="title", text=("_id", "text"), title="year", passages="whole")
    with pytest.raises(InputError, match=r"^owner/one:1: 'year' must be a string, got 1$"):
        list(open_corpus("hub://owner/one", options))
    first = next(iter(open_corpus("hub://owner/one", SourceOptions(text=("_id", "text"), passages="whole"))))
    assert (first.id, first.text, first.metadata) == ("1#1", "a\nx", {"year": 1, "document": "1", "start": 0, "end": 3})
    with pytest.raises(InputError, match=re.escape("owner/one: no field 'titel' (--title); did you mean 'title'? the fields are _id, ")):
        list(open_corpus("hub://owner/one", SourceOptions(title="titel")))


def test_an_unknown_data_set_is_one_line(hub: list[tuple[Any, ...]]) -> None:
    with pytest.raises(InputError, match=r"^hub://owner/none: cannot be loaded \(Dataset 'owner/none' doesn't exist\); check the name and"):
        list(open_corpus("hub://owner/none"))


@pytest.mark.parametrize(
    "source",
    [
        "hub://",
        "hub://owner",
        "hub://owner/name/a/b/c",
        "hub://owner/name/a/b:c",
        "hub://owner/name:",
        "hub://owner/na me",
        "hub://owner/../a",
    ],
)
def test_a_malformed_name_is_refused_when_it_is_opened(source: str) -> None:
    with pytest.raises(InputError, match=r"must read hub://OWNER/NAME"):
        open_corpus(source)


def test_a_file_of_a_local_copy_is_a_corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("datasets")
    (tmp_path / "owner" / "name" / "x").mkdir(parents=True)
    (tmp_path / "owner" / "name" / "x" / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    monkeypatch.setenv("QUIVER_HUB", str(tmp_path))
    assert list(open_corpus("hub://owner/name/x/rows.jsonl")) == EXPECTED


def test_a_saved_data_set_is_a_folder_of_tables(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    made = datasets.Dataset.from_list(ROWS)
    made.save_to_disk(str(tmp_path / "saved"), num_shards=2)
    assert list(open_corpus(tmp_path / "saved")) == EXPECTED
    datasets.DatasetDict({"train": made}).save_to_disk(str(tmp_path / "one"))
    assert list(open_corpus(tmp_path / "one")) == EXPECTED
    datasets.DatasetDict({"train": made, "test": made}).save_to_disk(str(tmp_path / "splits"))
    with pytest.raises(InputError, match=r"several splits; choose one of .*splits/test, .*splits/train"):
        open_corpus(tmp_path / "splits")
    assert list(open_corpus(tmp_path / "splits" / "test")) == EXPECTED


@pytest.fixture
def ir(tmp_path: Path) -> Iterator[str]:
    """A data set of ir_datasets over a local file, under a name of its own."""
    ir_datasets = pytest.importorskip("ir_datasets")
    from ir_datasets.datasets.base import Dataset
    from ir_datasets.formats import TsvDocs
    from ir_datasets.util import LocalDownload

    (tmp_path / "docs.tsv").write_text("d1\tfirst words\nd2\tsecond\n", encoding="utf-8")
    name = f"quiver-test-{tmp_path.name}"
    ir_datasets.registry.register(name, Dataset(TsvDocs(LocalDownload(tmp_path / "docs.tsv"))))
    yield f"ir:{name}"
    del ir_datasets.registry._registered[name]


def test_documents_of_ir_datasets_are_read_in_every_pass(ir: str) -> None:
    corpus = open_corpus(ir)
    assert list(corpus) == list(corpus) == [Document("d1", "first words"), Document("d2", "second")]


def test_a_text_that_ir_datasets_composes_is_taken(ir: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import ir_datasets

    class Doc(tuple[str, str]):
        """A document without a field 'text'."""

        def _asdict(self) -> dict[str, str]:
            return {"doc_id": self[0], "abstract": self[1]}

        def default_text(self) -> str:
            return f"all of {self[1]}"

    dataset = ir_datasets.load(ir.removeprefix("ir:"))
    monkeypatch.setattr(dataset, "docs_iter", lambda: iter([Doc(("d", "it"))]), raising=False)
    monkeypatch.setattr(ir_datasets, "load", lambda name: dataset)
    assert list(open_corpus(ir)) == [Document("d", "all of it", "", {"abstract": "it"})]
    assert list(open_corpus(ir, SourceOptions(text=("abstract",)))) == [Document("d", "it")]


@pytest.mark.parametrize(("source", "library"), [("hub://owner/name", "datasets"), ("ir:name", "ir_datasets")])
def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch, source: str, library: str) -> None:
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(InputError, match=f"{source}: reading this data set needs {library.replace('_', '-')}: pip install"):
        list(open_corpus(source))
