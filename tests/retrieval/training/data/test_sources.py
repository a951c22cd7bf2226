from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from quiver.encoder.errors import InputError
from quiver.retrieval.training.data.sources import count_rows, iter_source, source_files

ROWS = [{"query": f"q{n}", "positive": [f"p{n}", "x"], "rest": n} for n in range(5)]
KINDS = ["rows.jsonl", "rows.jsonl.gz", "rows.parquet"]


@pytest.mark.parametrize("name", KINDS)
def test_supported_files_are_read(write: Callable[..., Path], name: str) -> None:
    path = write(name, ROWS)
    assert list(iter_source(str(path))) == [(f"{path}:{n}", row) for n, row in enumerate(ROWS, start=1)]
    assert count_rows([str(path), str(path)]) == (None if name.endswith(".gz") else 10)


def test_parquet_reads_only_the_requested_columns(write: Callable[..., Path]) -> None:
    path = write("rows.parquet", ROWS)
    assert [row for _, row in iter_source(str(path), ("query", "positive.0"))] == [
        {"query": row["query"], "positive": row["positive"]} for row in ROWS
    ]
    # Whoever misses a field has to be able to say what there is.
    assert [set(row) for _, row in iter_source(str(path), ("query", "postive"))] == [{"query", "positive", "rest"}] * 5


def test_a_folder_is_read_in_the_order_of_names(write: Callable[..., Path], tmp_path: Path) -> None:
    write("folder/b.jsonl.gz", ROWS[2:4])
    write("folder/a.parquet", ROWS[:2])
    write("folder/c.jsonl", ROWS[4:])
    write("folder/inner/d.jsonl", ROWS)
    (tmp_path / "folder" / "README.md").write_text("no rows")
    assert [row for _, row in iter_source(str(tmp_path / "folder"))] == ROWS
    assert [file.name for file in source_files(str(tmp_path / "folder"))] == ["a.parquet", "b.jsonl.gz", "c.jsonl"]


@pytest.mark.parametrize("name", KINDS)
def test_damaged_files_are_refused(write: Callable[..., Path], name: str) -> None:
    path = write(name, ROWS * 50)
    path.write_bytes(path.read_bytes()[:-30] if name != "rows.jsonl" else b'{"query": "q"}\n{"que')
    with pytest.raises(InputError, match=rf"^{path}.*(damaged|malformed)"):
        list(iter_source(str(path)))
    path.write_bytes(b"")
    with pytest.raises(InputError, match=f"^{path}"):
        list(iter_source(str(path)))


def test_missing_sources_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no such file or folder"):
        list(iter_source(str(tmp_path / "none.jsonl")))
    (tmp_path / "rows.xlsx").write_text("a,b")
    with pytest.raises(
        InputError, match=r"rows.xlsx: unsupported type; rows are read from .jsonl, .*, .tsv.gz, a folder of them, or hub://"
    ):
        list(iter_source(str(tmp_path / "rows.xlsx")))
    with pytest.raises(InputError, match=r"no file with the suffix .jsonl, .jsonl.gz, .parquet"):
        list(iter_source(str(tmp_path)))


@pytest.mark.parametrize(
    "source", ["hub://a", "hub://a/b", "hub://a/b/c", "hub://a/b/c/d/e", "hub://a/b@/c/d", "hub:///b/c/d", "hub://a/../c/d", "hub://a/b//d"]
)
def test_malformed_hub_sources_are_refused(source: str) -> None:
    with pytest.raises(InputError, match="must read hub://OWNER/NAME"):
        list(iter_source(source))


CARD = """---
configs:
- config_name: triplet
  data_files:
  - split: train
    path: data/train-*
  - split: test
    path: data/test-*
- config_name: other
  data_files: other/*.parquet
---
"""


@pytest.fixture
def data_set(hub: Path, write: Callable[..., Path]) -> Path:
    pytest.importorskip("datasets")
    write("hub/owner/name/data/train-00000-of-00002.parquet", ROWS[:3])
    write("hub/owner/name/data/train-00001-of-00002.parquet", ROWS[3:])
    write("hub/owner/name/data/test-00000-of-00001.parquet", ROWS[:1])
    write("hub/owner/name/other/rows.parquet", ROWS[1:2])
    write("hub/owner/name/plain/rows.jsonl.gz", ROWS)
    (hub / "owner/name/README.md").write_text(CARD)
    return hub / "owner/name"


def test_splits_of_the_hub_are_read(data_set: Path) -> None:
    source = "hub://owner/name/triplet/train"
    assert list(iter_source(source)) == [(f"{source} row {n}", row) for n, row in enumerate(ROWS, start=1)]
    assert [row for _, row in iter_source(source, ("positive.0",))] == [{"positive": row["positive"]} for row in ROWS]
    assert [set(row) for _, row in iter_source("hub://owner/name/triplet/test", ("nothing",))] == [{"query", "positive", "rest"}]
    assert [row for _, row in iter_source("hub://owner/name@any/other/train")] == ROWS[1:2]
    assert count_rows([source]) is None


LISTS = """---
dataset_info:
- config_name: train
  features:
  - name: query_id
    dtype: string
  - name: document_ids
    sequence:
      value:
        dtype: string
  - name: scores
    sequence:
      value:
        dtype: float32
  splits:
  - name: train
    num_examples: 3
configs:
- config_name: train
  data_files:
  - split: train
    path: dataset.parquet
---
"""


def test_a_data_set_card_with_other_types_than_the_files_is_read(
    hub: Path, write: Callable[..., Path], caplog: pytest.LogCaptureFixture
) -> None:
    """Lists stored as text under a card that declares lists; some entries of the card are unknown to the library."""
    pytest.importorskip("datasets")
    rows = [{"query_id": f"{n}", "document_ids": "['1', '2']", "scores": "[0.5, 0.25]"} for n in range(3)]
    write("hub/lists/as_text/dataset.parquet", rows)
    (hub / "lists/as_text/README.md").write_text(LISTS)
    with caplog.at_level(logging.WARNING):
        assert [row for _, row in iter_source("hub://lists/as_text/train/train")] == rows
        assert [row for _, row in iter_source("hub://lists/as_text/train/train", ("scores",))] == [{"scores": "[0.5, 0.25]"}] * 3
    assert not caplog.records


def test_rows_of_large_files_are_estimated(write: Callable[..., Path]) -> None:
    rows = [{"query": f"q{n * n}", "text": os.urandom(40).hex()} for n in range(5000)]
    path = write("rows.jsonl", rows)
    assert path.stat().st_size > 200_000
    assert count_rows([str(path)], sample=20_000) == pytest.approx(5000, rel=0.05)


def test_files_of_the_hub_are_read(data_set: Path) -> None:
    path = data_set / "plain" / "rows.jsonl.gz"
    assert list(iter_source("hub://owner/name/plain/rows.jsonl.gz")) == [(f"{path}:{n}", row) for n, row in enumerate(ROWS, start=1)]
    assert source_files("hub://owner/name/plain/rows.jsonl.gz") == [path]
    assert len(source_files("hub://owner/name/triplet/train")) == 6


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ("hub://owner/name/triplet/dev", "Bad split: dev"),
        ("hub://owner/name/nothing/train", "'nothing' not found"),
        ("hub://owner/name/plain/none.jsonl", "cannot be read"),
    ],
)
def test_missing_data_sets_of_the_hub_are_refused(data_set: Path, source: str, problem: str) -> None:
    with pytest.raises(InputError, match=problem):
        list(iter_source(source))
