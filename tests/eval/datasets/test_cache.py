"""Fetching: atomic, resumed, verified by checksums; and errors for damaged caches."""

from __future__ import annotations

import errno
import hashlib
import io
import shutil
import stat
import zipfile
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from quiver.encoder.errors import InputError
from quiver.eval.datasets import sources as downloading
from quiver.eval.datasets.benchmarks import held, missing, registry
from quiver.eval.datasets.cache import RECORD, Cache, CachedCollection
from quiver.eval.datasets.catalogue import beir_tables, coir_tables, mteb_tables, nano_tables
from quiver.eval.datasets.sources import ATTEMPTS, Source, ZipArchive, reason
from quiver.retrieval.records import Document, Query


class Served(NamedTuple):
    """An archive on the server, and the cache that fetches it."""

    source: ZipArchive
    cache: Cache
    content: bytes


@pytest.fixture
def served(site: Any, published: Any, tmp_path: Path) -> Served:
    content = published.zipped(published.beir_folder("birds"))
    site.files["/birds.zip"] = content
    md5 = hashlib.md5(content, usedforsecurity=False).hexdigest()
    return Served(ZipArchive("beir/birds/zip", f"{site.url}/birds.zip", md5, len(content), "birds"), Cache(tmp_path / "cache"), content)


def load(cache: Cache, source: Source, split: str = "test") -> Any:
    return CachedCollection(cache, source, "birds", split).load()


def left_over(cache: Cache) -> set[str]:
    """Files in the work folder of the cache, locks excluded."""
    return {path.name for path in (cache.root / ".fetching").iterdir() if path.suffix != ".lock"}


def test_an_archive_is_fetched_once(served: Served, site: Any) -> None:
    source, cache, _ = served
    assert cache.record(source) is None
    record = cache.fetch(source)
    assert record == cache.record(source)
    assert (record.url, record.revision) == (source.url, f"md5:{source.md5}")
    assert set(record.files) == {"birds/corpus.jsonl", "birds/queries.jsonl", "birds/qrels/test.tsv"}
    for name, file in record.files.items():
        content = (cache.folder(source) / name).read_bytes()
        assert file == (len(content), hashlib.sha256(content).hexdigest())
    assert record.bytes == sum(size for size, _ in record.files.values()) > 0
    assert len(load(cache, source).documents) == 3
    assert left_over(cache) == set()
    assert cache.fetch(source) == record
    assert len(site.requests) == 1


def test_a_file_with_a_wrong_checksum_is_not_kept(served: Served) -> None:
    _, cache, content = served
    wrong = replace(served.source, md5="0" * 32)
    with pytest.raises(
        InputError, match=rf"birds\.zip: corrupt download: md5 is {served.source.md5}, expected 0{{32}}\. The file was deleted"
    ):
        cache.fetch(wrong)
    assert cache.record(wrong) is None
    assert not any(path.read_bytes() == content for path in cache.root.rglob("*") if path.is_file())


@pytest.mark.parametrize("ranges", [True, False])
def test_a_broken_connection_is_resumed(served: Served, site: Any, ranges: bool) -> None:
    site.cut, site.ranges = [100, 250], ranges
    served.cache.fetch(served.source)
    assert len(load(served.cache, served.source).documents) == 3
    ranges_sent = [header for _, header in site.requests]
    assert ranges_sent == ([None, "bytes=100-", "bytes=350-"] if ranges else [None, "bytes=100-", "bytes=250-"])


def test_the_next_call_resumes_the_download(served: Served, site: Any) -> None:
    site.cut = [10] * ATTEMPTS
    with pytest.raises(
        InputError, match=rf"the connection broke {ATTEMPTS} times, last at {10 * ATTEMPTS} bytes; run the same command again to resume"
    ):
        served.cache.fetch(served.source)
    assert served.cache.record(served.source) is None
    site.requests.clear()
    served.cache.fetch(served.source)
    assert site.requests == [("/birds.zip", f"bytes={10 * ATTEMPTS}-")]
    assert len(load(served.cache, served.source).documents) == 3


def test_simultaneous_fetches_download_once(served: Served, site: Any) -> None:
    with ThreadPoolExecutor(4) as pool:
        records = list(pool.map(lambda _: served.cache.fetch(served.source), range(4)))
    assert len(set(map(repr, records))) == 1
    assert len(site.requests) == 1


def test_damage_is_detected_and_repaired(served: Served, site: Any) -> None:
    source, cache, _ = served
    record = cache.fetch(source)
    corpus = cache.folder(source) / "birds" / "corpus.jsonl"
    whole = corpus.read_bytes()
    corpus.write_bytes(whole[:-10])
    with pytest.raises(
        InputError, match=r"corpus\.jsonl: missing or changed since the download; run quiver collections fetch to repair it"
    ):
        load(cache, source)
    corpus.write_bytes(whole.replace(b"bird", b"bard"))  # of the same size, so only the checksum detects it
    assert cache.fetch(source) == record
    assert corpus.read_bytes() == whole
    assert len(site.requests) == 2
    shutil.rmtree(cache.folder(source))
    with pytest.raises(InputError, match="the collection is not in the cache"):
        load(cache, source)


DAMAGED = {
    "empty": "",
    "no object": "[]",
    "nested": '{"url":' + "[" * 100_000 + "]" * 100_000 + "}",
    "no files": '{"url": "u", "revision": "r"}',
    "no url": '{"revision": "r", "files": {}}',
    "size is a word": '{"url": "u", "revision": "r", "files": {"a": {"bytes": "x", "sha256": "s"}}}',
}


@pytest.mark.parametrize("content", DAMAGED.values(), ids=DAMAGED)
def test_a_damaged_record_counts_as_missing(served: Served, site: Any, content: str) -> None:
    source, cache, _ = served
    whole = cache.fetch(source)
    record = cache.folder(source) / RECORD
    record.write_text(content, encoding="utf-8")
    entry = replace(registry()["beir/scifact"], sources={"zip": source})
    assert held(entry, cache) is None
    assert missing([entry], cache) == [entry]
    with pytest.raises(InputError, match="the collection is not in the cache; run quiver collections fetch"):
        load(cache, source)
    assert cache.fetch(source) == whole == cache.record(source)
    assert len(site.requests) == 2
    assert len(load(cache, source).documents) == 3


def test_without_network_the_error_names_the_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    source = ZipArchive("birds/zip", "http://127.0.0.1:9/birds.zip", "0" * 32, 1, "birds")
    with pytest.raises(InputError, match=r"^http://127\.0\.0\.1:9/birds\.zip: download failed \(.*refused.*\); check the network") as error:
        Cache(tmp_path).fetch(source)
    assert "\n" not in str(error.value)


def test_offline_never_touches_the_network(served: Served, site: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(InputError, match="cannot be downloaded because HF_HUB_OFFLINE is set"):
        served.cache.fetch(served.source)
    assert site.requests == []
    monkeypatch.delenv("HF_HUB_OFFLINE")
    record = served.cache.fetch(served.source)
    site.requests.clear()
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert served.cache.fetch(served.source) == record  # verified, not fetched
    assert site.requests == []


def test_a_full_disk_is_reported_before_and_during_a_download(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(served.cache.root.parent)
    monkeypatch.setattr(downloading.shutil, "disk_usage", lambda path: usage._replace(free=10))
    with pytest.raises(InputError, match=r"0\.0 GB needed, 0\.0 GB free; set QUIVER_CACHE to a larger disk"):
        served.cache.fetch(served.source)
    monkeypatch.undo()
    full = reason(OSError(errno.ENOSPC, "No space left on device"), "x", Path("/cache"))
    assert str(full).startswith("/cache: the disk is full; make room, or set QUIVER_CACHE")


def evil(name: str, *, link: bool = False) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        member = zipfile.ZipInfo(name)
        if link:
            member.external_attr = (stat.S_IFLNK | 0o777) << 16
        archive.writestr(member, b"/etc/passwd")
    return buffer.getvalue()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (evil("../out.txt"), "would be written outside the target folder"),
        (evil("birds/../../out.txt"), "would be written outside the target folder"),
        (evil("/tmp/out.txt"), "would be written outside the target folder"),
        (evil("birds/link", link=True), "would be written outside the target folder"),
        (evil("C:/out.txt"), "would be written outside the target folder"),
        (b"<html>not found</html>", "not a valid zip archive"),
        (evil("birds/corpus.jsonl").replace(b"/etc/passwd", b"/etc/pAsswd"), "not a valid zip archive"),
    ],
)
def test_unsafe_archives_are_refused(content: bytes, message: str, served: Served, site: Any) -> None:
    site.files["/birds.zip"] = content
    source = replace(served.source, md5=hashlib.md5(content, usedforsecurity=False).hexdigest())
    with pytest.raises(InputError, match=message):
        served.cache.fetch(source)
    assert served.cache.record(source) is None
    assert not list(served.cache.root.parent.rglob("out.txt"))


def hub_origins(published: Any) -> dict[str, tuple[Source, dict[str, dict[str, bytes]], str]]:
    """Layout -> source, repositories and a split."""
    many = "CoIR-Retrieval/CodeSearchNet"
    return {
        "beir": (beir_tables("u/hub", "birds", ("test", "dev", "train")), published.beir_hub("birds"), "test"),
        "beir lines": (beir_tables("u/hub", "birds", ("test",)), published.beir_hub("birds", compressed=True), "test"),
        "mteb": (mteb_tables("u/mteb", "mteb/birds", "b" * 40, ("test",)), published.mteb_hub("mteb/birds"), "test"),
        "mteb lines": (mteb_tables("u/mteb", "mteb/birds", "b" * 40, ("test",)), published.mteb_hub("mteb/birds", lines=True), "test"),
        "mteb many": (registry()["coir/codesearchnet/ruby"].sources["mteb"], published.mteb_many_hub(many, "ruby"), "test"),
        "coir": (coir_tables("u/coir", "birds"), published.coir_hub("birds"), "test"),
        "mldr": (registry()["mldr/th"].source, published.mldr_hub("th"), "test"),
        "nano": (nano_tables("u/hub", "zeta-alpha-ai/NanoBirds"), published.nano_hub("NanoBirds"), "train"),
    }


UNWANTED = {
    "beir lines": {"BeIR--birds/birds.py", "BeIR--birds-qrels/train.tsv"},
    "mldr": {"Shitao--MLDR/MLDR.py", "Shitao--MLDR/mldr-v1.0-th/train.jsonl.gz"},
    "mteb many": {
        f"CoIR-Retrieval--CodeSearchNet/other-{part}-00000-of-00001.parquet" for part in ("corpus/corpus", "queries/queries", "qrels/test")
    },
}


@pytest.mark.parametrize("layout", ["beir", "beir lines", "mteb", "mteb lines", "mteb many", "coir", "mldr", "nano"])
def test_hub_layouts_are_fetched_and_loaded(layout: str, published: Any, site: Any, tmp_path: Path) -> None:
    source, repositories, split = hub_origins(published)[layout]
    site.repositories = repositories
    cache = Cache(tmp_path / "cache")
    record = cache.fetch(source)
    assert record.revision == "+".join([published.commit] * len(repositories))
    every = {f"{repository.replace('/', '--')}/{name}" for repository, files in repositories.items() for name in files}
    assert set(record.files) == every - UNWANTED.get(layout, set())
    collection = load(cache, source, split)
    untitled, grades = layout in ("mldr", "nano"), {"d1": 1} if layout == "nano" else {"d1": 2, "d2": 0}
    documents = [Document(row["_id"], row["text"], "" if untitled else row["title"]) for row in published.corpus]
    assert list(collection.documents) == documents
    assert list(collection.documents) == documents  # again, from the files
    assert collection.queries == (Query("q1", "what flies"), Query("q2", "what is hard"))
    assert collection.qrels == {"q1": grades, "q2": {"d3": 1}}
    before = len(site.requests)
    assert cache.fetch(source) == record
    assert len(site.requests) == before
    requested = Counter(path for path, _ in site.requests if path.startswith("/api/"))
    revision = "/revision/" if source.revision else ""
    assert all(revision in path for path in requested)


def test_files_that_the_hub_lacks_are_reported(published: Any, site: Any, tmp_path: Path) -> None:
    site.repositories = published.mteb_hub("mteb/birds")
    cache = Cache(tmp_path)
    with pytest.raises(InputError, match=r"^mteb/fish@bbbbbbbbbbbb: download failed") as error:
        cache.fetch(mteb_tables("u", "mteb/fish", "b" * 40, ("test",)))
    assert "\n" not in str(error.value)
    with pytest.raises(InputError, match="mteb/birds: no files for default or qrels, split dev"):
        cache.fetch(mteb_tables("v", "mteb/birds", "b" * 40, ("dev", "test")))
    assert not (tmp_path / "v").exists()


def test_files_of_another_commit_are_removed(published: Any, site: Any, tmp_path: Path) -> None:
    """A fetch of the main branch was stopped, and the branch now has other corpus files."""
    site.repositories = published.beir_hub("birds")
    stale = tmp_path / ".u.unfinished" / "BeIR--birds" / "corpus" / "corpus-00000-of-00001.parquet"
    stale.parent.mkdir(parents=True)
    stale.write_bytes(published.parquet(published.corpus))
    cache, source = Cache(tmp_path), beir_tables("u", "birds", ("test",))
    assert "BeIR--birds/corpus/corpus-00000-of-00001.parquet" not in cache.fetch(source).files
    assert len(load(cache, source).documents) == 3


def test_file_names_of_a_repository_cannot_leave_its_folder(published: Any, site: Any, tmp_path: Path) -> None:
    files = published.mteb_hub("mteb/birds")["mteb/birds"]
    card = files["README.md"].replace(b"corpus/test-*", b"'**/corpus*'")
    site.repositories = {"mteb/birds": {**files, "README.md": card, "../../corpus.parquet": b"x"}}
    record = Cache(tmp_path / "cache").fetch(mteb_tables("u", "mteb/birds", "b" * 40, ("test",)))
    assert set(record.files) == {f"mteb--birds/{name}" for name in files}
    assert not list(tmp_path.rglob("corpus.parquet"))
