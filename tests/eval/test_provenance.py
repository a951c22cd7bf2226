"""Where a result comes from."""

from __future__ import annotations

import gzip
from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from importlib.metadata import version
from pathlib import Path

import pytest
import torch

from eval.provenance import data_sha256, provenance
from retrieval.corpus import load_collection


def test_what_this_process_is() -> None:
    origin = provenance("quiver evaluate")
    assert origin.command == "quiver evaluate"
    assert origin.versions["quiver"] == version("quiver-retrieval")
    assert origin.versions["numpy"] == version("numpy")
    assert origin.threads == torch.get_num_threads()
    assert datetime.now(timezone.utc) - datetime.fromisoformat(origin.date) < timedelta(minutes=1)


def test_packages_that_are_not_installed_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("eval.provenance.PACKAGES", {"numpy": ("numpy",), "nothing": ("no-such-distribution",)})
    assert provenance(None).versions.keys() == {"python", "numpy"}


def test_the_first_distribution_that_is_installed_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("eval.provenance.PACKAGES", {"array": ("no-such-distribution", "numpy", "torch")})
    assert provenance(None).versions["array"] == version("numpy")


def test_the_checksum_is_over_the_content(make_collection: Callable[..., Path]) -> None:
    plain, packed = make_collection("plain"), make_collection("packed")
    corpus = packed / "corpus.jsonl"
    (packed / "corpus.jsonl.gz").write_bytes(gzip.compress(corpus.read_bytes()))
    corpus.unlink()
    assert data_sha256(load_collection(plain, "test")) == data_sha256(load_collection(packed, "test"))


@pytest.mark.parametrize(("file", "old", "new"), [("corpus.jsonl", "wings", "wing"), ("queries.jsonl", "bird", "birds")])
def test_the_checksum_sees_every_text(make_collection: Callable[..., Path], file: str, old: str, new: str) -> None:
    folder = make_collection()
    before = data_sha256(load_collection(folder, "test"))
    path = folder / file
    path.write_text(path.read_text(encoding="utf-8").replace(old, new), encoding="utf-8")
    assert data_sha256(load_collection(folder, "test")) != before


def test_the_checksum_sees_every_grade(make_collection: Callable[..., Path]) -> None:
    first, second = make_collection("first", qrels={"q1": {"d1": 1}}), make_collection("second", qrels={"q1": {"d1": 2}})
    assert data_sha256(load_collection(first, "test")) != data_sha256(load_collection(second, "test"))
