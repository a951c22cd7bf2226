"""``quiver search`` over shards prints and writes what it does without them."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from quiver.retrieval.cluster import index as cluster_index
from quiver.retrieval.cluster import ray_backend
from quiver.retrieval.index import add_documents, build_index
from quiver.retrieval.models.loading import load_model
from quiver.retrieval.records import Document
from tests.retrieval.cluster.conftest import InProcess
from tests.retrieval.models.small import make_dense, make_tokenizer

DOCUMENTS = [Document(f"d{number}", f"{word} bird {number} flies", metadata={"n": number}) for number, word in enumerate("abcabdeaf")]

Quiver = Callable[..., Any]


class Built(NamedTuple):
    """An index of three segments, and queries."""

    index: Path
    queries: Path


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    folder = tmp_path_factory.mktemp("built")
    tokenizer = make_tokenizer([document.content() for document in DOCUMENTS])
    make_dense(tokenizer, max_length=50, normalize=True).save_pretrained(folder / "model")
    model = load_model(folder / "model")
    build_index(DOCUMENTS[:4], model, folder / "i")
    add_documents(folder / "i", DOCUMENTS[4:6], model)
    add_documents(folder / "i", DOCUMENTS[6:], model)
    lines = [json.dumps({"_id": f"q{number}", "text": text}) for number, text in enumerate(("a bird", "flies 3", "d e f"))]
    (folder / "queries.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return Built(folder / "i", folder / "queries.jsonl")


@pytest.fixture
def in_process(monkeypatch: pytest.MonkeyPatch) -> list[str | None]:
    """Shards are objects of this process; the addresses that were asked for."""
    addresses: list[str | None] = []

    @contextmanager
    def connected(address: str | None = None) -> Iterator[None]:
        addresses.append(address)
        yield

    monkeypatch.setattr(ray_backend, "connected", connected)
    monkeypatch.setattr(cluster_index, "open_sharded", partial(cluster_index.open_sharded, start=InProcess))
    return addresses


def same_output(quiver: Quiver, built: Built, tmp_path: Path, *options: object) -> None:
    for arguments in (["a bird", "--json"], ["a bird"], ["a bird", "--json", "--filter", "n>=2", "--effort", "exact", "-k", 3]):
        plain, spread = quiver("search", built.index, *arguments), quiver("search", built.index, *arguments, *options)
        assert (spread.code, spread.out) == (0, plain.out), spread.err
        assert len(plain.out) > 100
    runs = []
    for number, more in enumerate(((), options)):
        done = quiver("search", built.index, "--queries", built.queries, "--out", tmp_path / f"{number}.trec", *more)
        assert done.code == 0, done.err
        runs.append((tmp_path / f"{number}.trec").read_bytes())
    assert runs[0] == runs[1]
    assert runs[0].count(b"\n") == 3 * len(DOCUMENTS)


def test_search_over_shards_prints_the_same_output(quiver: Quiver, built: Built, tmp_path: Path, in_process: list[str | None]) -> None:
    same_output(quiver, built, tmp_path, "--shards", 2, "--replicas", 2, "--address", "host:6379")
    same_output(quiver, built, tmp_path, "--shard-memory", "500MB")
    assert in_process == ["host:6379"] * 4 + [None] * 4


@pytest.mark.usefixtures("in_process")
def test_wrong_shard_options_are_reported_in_one_line(quiver: Quiver, built: Built, monkeypatch: pytest.MonkeyPatch) -> None:
    done = quiver("search", built.index, "a bird", "--replicas", 2)
    assert (done.code, done.err) == (2, "quiver: error: --replicas and --address need --shards or --shard-memory\n")
    done = quiver("search", built.index, "a bird", "--shard-memory", "much")
    assert (done.code, done.err) == (2, "quiver: error: 'much' is not a size; write one as 500MB or 2GB\n")
    done = quiver("search", built.index, "a bird", "--shard-memory", "0.25KB")
    assert done.code == 2
    assert "bytes of memory, more than 256 per shard; allow as much, or rebuild the index" in done.err
    done = quiver("search", built.index / "nowhere", "a bird", "--shards", 2)
    assert (done.code, done.err) == (2, f"quiver: error: {built.index / 'nowhere'}: no such folder\n")
    monkeypatch.undo()
    monkeypatch.setitem(sys.modules, "ray", None)
    done = quiver("search", built.index, "a bird", "--shards", 2)
    assert done.code == 2
    assert "Ray is not installed; run: pip install 'quiver-retrieval[ray]'" in done.err


def test_a_lost_shard_is_reported(
    quiver: Quiver,
    built: Built,
    tmp_path: Path,
    in_process: list[str | None],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    search = InProcess.search

    def without_smallest(self: InProcess, request: Any, seconds: float) -> Any:
        self.lost = self.documents.index(min(self.documents))
        return search(self, request, seconds)

    monkeypatch.setattr(InProcess, "search", without_smallest)
    done = quiver("search", built.index, "a bird", "--shards", 2, "--json")
    assert done.code == 0
    hits = json.loads(done.out)
    lost = {"segments": ["s-000000000001-0000"], "documents": 4}
    assert [hit["partial"] for hit in hits] == [lost] * 5
    assert "partial results: 4 documents in 1 segments were not searched, because their shards were lost" in caplog.text
    done = quiver("search", built.index, "--queries", built.queries, "--out", tmp_path / "run.trec", "--shards", 2)
    assert done.code == 1
    assert f"were lost; {tmp_path / 'run.trec'} was not written. Repeat the command, or add --replicas 2" in done.err
    assert not (tmp_path / "run.trec").exists()
