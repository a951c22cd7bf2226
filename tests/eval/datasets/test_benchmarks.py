"""Resolving names and folders to benchmarks and scoring policies."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quiver.encoder.errors import InputError
from quiver.eval.datasets.benchmarks import Benchmark, LocalFolder, Metadata, Policy, cut, depth, find, missing, registry, resolve
from quiver.eval.datasets.cache import RECORD, Cache


def only(data: Path | str, split: str | None = None) -> Benchmark:
    (benchmark,) = resolve(data, split)
    return benchmark


def test_a_folder_is_a_benchmark(make_collection: Callable[..., Path]) -> None:
    folder = make_collection()
    benchmark = only(folder)
    assert benchmark == Benchmark("tiny", "test", Policy(exclude_self=False, use_title=True), Metadata(), LocalFolder(folder, "test"))
    assert benchmark == Benchmark.of_folder(folder) == only(folder, "test")
    collection = benchmark.load()
    assert (len(collection.documents), len(collection.queries)) == (5, 3)


@pytest.mark.parametrize("name", ["msmarco", "MSMARCO"])
def test_a_folder_called_msmarco_is_scored_on_its_published_split(
    make_collection: Callable[..., Path], caplog: pytest.LogCaptureFixture, name: str
) -> None:
    """BEIR publishes scores on ``dev``; ``test`` is TREC-DL 2019."""
    folder = make_collection(name)
    (folder / "qrels" / "dev.tsv").write_text("q1\td1\t1\n", encoding="utf-8")
    with caplog.at_level(logging.INFO, "quiver.eval.datasets.benchmarks"):
        benchmark = only(folder)
    assert benchmark == Benchmark("msmarco", "dev", Policy(), Metadata(licence="msr-la-nc"), LocalFolder(folder, "dev"))
    assert caplog.messages == [f"{folder}: has the name of the collection beir/msmarco and is evaluated as such; split dev"]
    assert [query.id for query in benchmark.load().queries] == ["q1"]
    assert only(folder, "test").split == Benchmark.of_folder(folder, "test").source.load().split == "test"
    (folder / "qrels" / "dev.tsv").unlink()
    assert only(folder).split == "test"


Fetched = Callable[..., Path]


@pytest.fixture
def fetched(make_collection: Callable[..., Path], tmp_path: Path) -> Fetched:
    """Write a collection to a cache as a fetch of BEIR's archive would."""

    def put(*keys: str) -> Path:
        cache = Cache(tmp_path / "cache")
        for key in keys:
            source = registry()[key].sources["zip"]
            inner = cache.folder(source) / getattr(source, "folder")  # noqa: B009 - of an archive, which these are
            inner.parent.mkdir(parents=True, exist_ok=True)
            make_collection(key.replace("/", "-")).rename(inner)
            record = {"url": source.url, "revision": source.revision, "files": {}}
            (cache.folder(source) / RECORD).write_text(json.dumps({**record}), encoding="utf-8")
        return cache.root

    return put


def test_a_name_is_a_benchmark_with_its_metadata(fetched: Fetched) -> None:
    (benchmark,) = resolve("beir/arguana", cache=fetched("beir/arguana"), offline=True)
    entry = registry()["beir/arguana"]
    assert (benchmark.name, benchmark.split, benchmark.policy) == ("arguana", "test", Policy(exclude_self=True))
    assert benchmark.metadata == entry.metadata
    assert (benchmark.metadata.revision, benchmark.metadata.licence) == ("md5:8ad3e3c2a5867cdced806d6503f29b99", "cc-by-sa-4.0")
    assert len(benchmark.load().documents) == 5
    assert str(benchmark.source).endswith("cache/beir/arguana/zip")


def test_a_group_is_several_benchmarks(fetched: Fetched) -> None:
    forums = [entry.key for entry in find("beir/cqadupstack")]
    benchmarks = resolve("beir/cqadupstack", cache=fetched(*forums), offline=True)
    assert [benchmark.name for benchmark in benchmarks] == [f"cqadupstack-{key.rpartition('/')[2]}" for key in forums]
    assert {(benchmark.metadata.group, benchmark.metadata.group_size) for benchmark in benchmarks} == {("cqadupstack", 12)}
    assert all(len(benchmark.load().documents) == 5 for benchmark in benchmarks)


def test_each_collection_has_its_own_split_unless_another_is_given(fetched: Fetched) -> None:
    cache = fetched("beir/msmarco")
    (published,) = resolve("beir/msmarco", cache=cache, offline=True)
    (other,) = resolve("beir/msmarco", "test", cache=cache, offline=True)
    assert (published.split, published.metadata.queries) == ("dev", 6_980)
    assert (other.split, other.metadata.queries) == ("test", None)
    with pytest.raises(InputError, match="beir/msmarco: no split 'validation'; existing splits: dev, test, train"):
        resolve("beir/msmarco", "validation", cache=cache, offline=True)


def test_offline_missing_collections_are_listed_with_the_fetch_command(fetched: Fetched, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = fetched("beir/scifact")
    message = r"^\S+/cache lacks mldr/ar, .*, mldr/zh, and offline mode is on; .* quiver collections fetch mldr$"
    with pytest.raises(InputError, match=message):
        resolve("mldr", cache=cache, offline=True)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(InputError, match=message):
        resolve("mldr", cache=cache)
    with pytest.raises(InputError) as error:
        resolve("beir", cache=cache)
    assert "beir/scifact" not in str(error.value)
    assert str(error.value).endswith("beir/climate-fever beir/msmarco beir/cqadupstack")


def test_missing_collections_are_fetched(monkeypatch: pytest.MonkeyPatch, fetched: Fetched, tmp_path: Path) -> None:
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    fetched_units: list[str] = []

    def fetch(self: Cache, source: object, *, progress: bool = False) -> None:
        fetched_units.append(getattr(source, "unit"))  # noqa: B009
        fetched(*(entry.key for entry in find("beir/cqadupstack")))

    monkeypatch.setattr(Cache, "fetch", fetch)
    assert len(resolve("beir/cqadupstack", cache=tmp_path / "cache")) == 12
    assert fetched_units == ["beir/cqadupstack/zip"]  # one archive contains all forums


def test_a_folder_of_a_registered_name_is_taken_if_it_holds_a_corpus(
    fetched: Fetched, make_collection: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = fetched("beir/scifact")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "beir" / "scifact").mkdir(parents=True)
    assert resolve("beir/scifact", cache=cache)[0].metadata.licence == "cc-by-nc-4.0"
    make_collection("scifact").rename(tmp_path / "beir" / "nfcorpus")
    assert resolve("beir/nfcorpus", cache=cache)[0].source == LocalFolder(Path("beir/nfcorpus"), "test")


RUN = {"a": {"c": 1.0, "a": 9.0, "b": 2.0}, "z": {"a": 1.0, "b": 1.0}}


def test_cut_keeps_the_best_in_trec_order() -> None:
    assert cut(RUN, 1, Policy()) == {"a": {"a": 9.0}, "z": {"b": 1.0}}


def test_cut_excludes_the_query_and_keeps_k_others() -> None:
    policy = Policy(exclude_self=True)
    assert depth(2, policy) == 3
    assert cut(RUN, 2, policy) == {"a": {"b": 2.0, "c": 1.0}, "z": {"a": 1.0, "b": 1.0}}


def test_local_copies_of_the_hub_serve_evaluation_as_they_serve_training(
    published: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``QUIVER_HUB`` holds the folders that ``hf download`` writes, with the client's metadata beside the files."""
    copies = {**published.mldr_hub("en"), **published.beir_hub("scifact")}
    files = {f"{repository}/{name}": content for repository, each in copies.items() for name, content in each.items()}
    published.write(tmp_path / "hub", {**files, "BeIR/scifact-qrels/.cache/huggingface/download/test.tsv": b"damaged"})
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    for name in ("mldr/en", "beir/scifact"):
        with pytest.raises(InputError, match="offline mode is on"):
            resolve(name, cache=tmp_path / "cache")
    monkeypatch.setenv("QUIVER_HUB", str(tmp_path / "hub"))
    assert missing([*find("mldr/en"), *find("beir/scifact"), *find("beir/nq")], Cache(tmp_path / "cache")) == [registry()["beir/nq"]]
    for name, split in (("mldr/en", "test"), ("beir/scifact", "test")):
        (benchmark,) = resolve(name, cache=tmp_path / "cache")
        assert (benchmark.split, benchmark.metadata.revision) == (split, None)
        assert len(benchmark.load().documents) == 3
    (tmp_path / "hub" / "BeIR" / "scifact-qrels" / "test.tsv").unlink()
    with pytest.raises(InputError, match="BeIR/scifact-qrels: no files"):
        only("beir/scifact").load()
