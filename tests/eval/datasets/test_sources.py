"""Every published layout loads as the same collection, and errors name file and row."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from quiver.encoder.errors import InputError
from quiver.eval.datasets.benchmarks import registry
from quiver.eval.datasets.catalogue import beir_tables, coir_tables, nano_tables
from quiver.eval.datasets.sources import Source


def beir_hub(published: Any, folder: Path) -> Source:
    published.write_hub(folder, published.beir_hub("birds"))
    return beir_tables("birds/hub", "birds", ("test", "train"))


def coir(published: Any, folder: Path) -> Source:
    published.write_hub(folder, published.coir_hub("birds"))
    return coir_tables("birds/coir", "birds")


def mldr(published: Any, folder: Path) -> Source:
    published.write_hub(folder, published.mldr_hub("ko"))
    return registry()["mldr/ko"].source


def nano(published: Any, folder: Path) -> Source:
    published.write_hub(folder, published.nano_hub("NanoBirds"))
    return nano_tables("nano/hub", "zeta-alpha-ai/NanoBirds")


def test_an_invalid_parquet_row_is_named(published: Any, tmp_path: Path) -> None:
    source = nano(published, tmp_path)
    root = tmp_path / "zeta-alpha-ai--NanoBirds"
    corpus, queries, qrels = (root / part / "train-00000-of-00001.parquet" for part in ("corpus", "queries", "qrels"))
    sound = {path: path.read_bytes() for path in (corpus, queries, qrels)}
    text = {"text": "x"}
    cases: list[tuple[Path, list[dict[str, Any]], str]] = [
        (corpus, [{"_id": "d1", **text}, {"_id": "d1", **text}], r":2: id 'd1' is already used in row 1"),
        (corpus, [{"_id": "d1", **text}, {"_id": " ", **text}], r":2: the id is blank"),
        (corpus, [{"_id": "d1", "text": None}], r":1: 'text' must be a string, got nothing"),
        (corpus, [{"_id": 1.5, **text}], r":1: '_id' \(or 'id'\) must be a string or an integer, got 1\.5"),
        (corpus, [{"id": "dX", **text}], r"qrels/train-\S+:1: document 'd1' is not in the corpus, and none of the 2 judged documents is"),
        (corpus, [], r": the file is empty"),
        (queries, [{"_id": "q1", **text}], r"qrels/train-\S+:2: query 'q2' is not among the collection's queries"),
        (queries, [{"_id": "q1", **text}, {"_id": "q1", **text}], r":2: id 'q1' is already used in row 1"),
        (qrels, [{"query-id": "q1", "corpus-id": 1.5}], r":1: 'corpus-id' \(or 'corpus_id'\) must be a string or an integer"),
        (qrels, [{"query-id": "q1", "corpus": "d1"}], r":1: 'corpus-id' \(or 'corpus_id'\) must be a string or an integer"),
    ]
    for path, rows, message in cases:
        path.write_bytes(published.parquet(rows))
        with pytest.raises(InputError, match=message) as error:
            source.load(tmp_path, "nano", "train")
        assert "\n" not in str(error.value)
        path.write_bytes(sound[path])
    assert len(source.load(tmp_path, "nano", "train").documents) == 3


def test_damaged_parquet_is_reported(published: Any, tmp_path: Path) -> None:
    source = nano(published, tmp_path)
    path = tmp_path / "zeta-alpha-ai--NanoBirds" / "corpus" / "train-00000-of-00001.parquet"
    for content in (b"", b"PAR1", path.read_bytes()[:-20], b"\0" * 200):
        path.write_bytes(content)
        with pytest.raises(InputError, match=re.escape(f"{path}: damaged Parquet after row 0")) as error:
            source.load(tmp_path, "nano", "train")
        assert "\n" not in str(error.value)
