"""Fixtures: training rows in files of every supported type."""

from __future__ import annotations

import csv
import gzip
import io
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from quiver.retrieval.training.recipe import DataSection

Rows = Sequence[dict[str, Any]]


def _jsonl(path: Path, rows: Rows) -> Path:
    content = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return path


def _delimited(path: Path, rows: Rows) -> Path:
    text, tabs = io.StringIO(), ".tsv" in path.name.lower()
    writer = csv.DictWriter(text, list(rows[0]), delimiter="\t" if tabs else ",")
    writer.writeheader()
    writer.writerows(rows)
    content = text.getvalue().encode()
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return path


def _parquet(path: Path, rows: Rows) -> Path:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    parquet.write_table(arrow.Table.from_pylist(list(rows)), path, row_group_size=2)
    return path


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str, Rows], Path]:
    """Write rows to a file in the format of its suffix."""

    def file(name: str, rows: Rows) -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        delimited = any(end in name.lower() for end in (".csv", ".tsv"))
        return _parquet(path, rows) if path.suffix == ".parquet" else _delimited(path, rows) if delimited else _jsonl(path, rows)

    return file


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of local copies of Hub data sets, without a network."""
    monkeypatch.setenv("QUIVER_HUB", str(tmp_path / "hub"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return tmp_path / "hub"


@pytest.fixture
def triplets() -> list[dict[str, Any]]:
    return [{"query": f"q{n}", "positive": f"p{n}", "negative": f"n{n}"} for n in range(7)]


@pytest.fixture
def ids(write: Callable[[str, Rows], Path]) -> DataSection:
    """Four rows of three documents with scores, by ids."""
    queries = write("queries.parquet", [{"query_id": n, "text": f"query {n}"} for n in range(5)])
    documents = write("documents.jsonl.gz", [{"document_id": f"d{n}", "text": f"document {n}"} for n in range(9)])
    rows = [{"query_id": n, "document_ids": [f"d{n}", f"d{n + 1}", f"d{n + 5}"], "scores": [n + 0.5, 0.25, -1]} for n in range(4)]
    return DataSection(
        train=(str(write("train.jsonl", rows)),),
        format="ids",
        query_field="query_id",
        document_fields=("document_ids",),
        score_fields=("scores",),
        queries=str(queries),
        documents=str(documents),
    )
