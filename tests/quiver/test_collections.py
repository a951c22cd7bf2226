"""``quiver collections`` without network access: lists, downloads, and one-line errors."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from quiver.eval.datasets.benchmarks import registry
from quiver.eval.datasets.cache import RECORD, Cache, Record
from quiver.eval.datasets.sources import Source


@pytest.fixture
def quiver(quiver: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Any]:
    monkeypatch.setenv("QUIVER_CACHE", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "200")
    return partial(quiver, "collections")


def put(root: Path, source: Source, revision: str = "md5:feed") -> None:
    folder = root / "collections" / source.unit
    folder.mkdir(parents=True)
    (folder / RECORD).write_text(json.dumps({"url": source.url, "revision": revision, "files": {}}), encoding="utf-8")


def test_list_shows_all_collections(quiver: Callable[..., Any], tmp_path: Path) -> None:
    put(tmp_path, registry()["beir/scifact"].source)
    told = json.loads(quiver("list", "--json").out)
    assert len(told) == len(registry())
    by_key: dict[str, Any] = {row["key"]: row for row in told}
    assert by_key["beir/scifact"]["folder"] == str(tmp_path / "collections" / "beir" / "scifact" / "zip")
    assert by_key["beir/scifact"]["held"] == "md5:feed"
    assert by_key["beir/msmarco"]["split"] == "dev"
    assert by_key["beir/nq"]["folder"] is None
    table = quiver("list", "beir/scifact", "coir").out
    assert "8 collections" in table
    assert "yes" in table
    assert "280,310" in table


def test_show_describes_a_collection(quiver: Callable[..., Any]) -> None:
    shown = quiver("show", "beir/webis-touche2020").out
    for part in ("Version 2", "382,545", "md5:46f650ba5a527fc69e0a6521c5a23563", "quiver collections fetch beir/webis-touche2020"):
        assert part in shown
    assert "Code to comment" in quiver("show", "coir/codesearchnet/go").out
    assert "Comment to code" in quiver("show", "mteb/codesearchnet/go").out
    arguana = json.loads(quiver("show", "beir/arguana", "--json").out)
    assert arguana[0]["exclude_self"] is True
    assert set(arguana[0]["sources"]) == {"zip", "hub", "mteb"}


def test_missing_lists_collections_that_are_not_cached(quiver: Callable[..., Any], tmp_path: Path) -> None:
    told = quiver("missing", "beir")
    assert told.code == 0
    # CQADupStack's archive counts once for its twelve forums.
    assert f"26 of 26 collections are not in {tmp_path / 'collections'}: 11,169.6 MB to download" in told.out
    assert told.out.rstrip().endswith("quiver collections fetch beir")
    put(tmp_path, registry()["nanobeir/nq"].source)
    assert json.loads(quiver("missing", "nanobeir/nq", "mldr/ko", "--json").out) == ["mldr/ko"]
    assert quiver("missing", "nanobeir/nq").out.startswith("nothing is missing: all 1 collections are in ")


def test_fetch_takes_each_archive_once(quiver: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def fetch(self: Cache, source: Source, *, progress: bool = False) -> Record:
        asked.append(source.unit)
        return Record(source.url, "md5:feed", {"a": (2_000_000, "")})

    monkeypatch.setattr(Cache, "fetch", fetch)
    done = quiver("fetch", "beir/cqadupstack", "beir/scifact", "beir/scifact")
    assert asked == ["beir/cqadupstack/zip", "beir/scifact/zip"]
    assert "2.0 MB, md5:feed" in done.out
    asked.clear()
    quiver("fetch", "beir/scifact", "--from", "mteb")
    put(tmp_path, registry()["beir/nq"].sources["hub"])
    quiver("fetch", "beir/nq")  # compares what is there rather than fetching it from elsewhere
    assert asked == ["beir/scifact/mteb", "beir/nq/hub"]


def test_a_collection_with_a_damaged_record_counts_as_missing(quiver: Callable[..., Any], tmp_path: Path) -> None:
    archive = registry()["beir/cqadupstack/android"].source
    put(tmp_path, archive)
    put(tmp_path, registry()["beir/scifact"].source)
    (tmp_path / "collections" / archive.unit / RECORD).write_text("", encoding="utf-8")
    told = quiver("list", "--json")
    assert told.code == 0
    here = {row["key"] for row in json.loads(told.out) if row["folder"] is not None}
    assert here == {"beir/scifact"}
    assert quiver("list", "beir").code == quiver("show", "beir/cqadupstack/android").code == 0
    assert "quiver collections fetch beir/cqadupstack" in quiver("missing", "beir/cqadupstack").out


def test_an_unknown_home_folder_is_reported_in_one_line(quiver: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIVER_CACHE", "~nosuchuser/x")
    done = quiver("list")
    assert (done.code, done.out, done.err.count("\n")) == (2, "", 1)
    assert "no home folder is known for ~nosuchuser" in done.err
