"""Small indexes of four segments, with ties between segments, deleted documents, and a field that only one segment has."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
import pytest

from quiver.retrieval.cluster.index import Shard, ShardNotOpenError, ShardsClosedError, ShardSpec
from quiver.retrieval.cluster.ray_backend import connected
from quiver.retrieval.index import BuildOptions, Filter, IndexReader, add_documents, build_index, calibrate_index, delete_documents
from quiver.retrieval.index.index import SearchRequest, encoded_queries
from quiver.retrieval.models.bm25 import BM25
from quiver.retrieval.records import Document, Hits
from tests.retrieval.index.faults import ENGINES, FAST

NARROW = {name: kind.narrow for name, kind in ENGINES.items()}
QUERIES = ["w1", "w3 w4 w19", "w7 other w2", " ".join(f"w{number}" for number in range(12))]
FILTERS = {
    "all": None,
    "half": Filter.parse(["even"]),
    "a field of one segment": Filter.parse(["late>=0"]),
    "without the field": Filter.parse(["late!=1"]),
    "ids": Filter(ids=frozenset(["d003", "d071", "nobody"])),
    "nothing": Filter(ids=frozenset()),
}


def documents(begin: int, count: int, *, late: bool = False) -> list[Document]:
    """Documents of one to four words of twenty, so that many are equal; every eleventh is empty."""
    rng = np.random.default_rng(begin)
    made = []
    for number in range(begin, begin + count):
        text = " ".join(f"w{word}" for word in rng.integers(0, 20, rng.integers(1, 5)))
        metadata: dict[str, Any] = {"even": number % 2 == 0, **({"late": number % 3} if late else {})}
        made.append(Document(f"d{number:03d}", "" if number % 11 == 10 else text, "", metadata))
    return made


APART = 1
"""Bytes of memory in which an addition is merged with nothing: it stays a segment of its own."""


class Built(NamedTuple):
    """An index, and the model that built it."""

    path: Path
    model: Any

    def queries(self, texts: list[str] = QUERIES) -> Any:
        return encoded_queries(self.model.encode_texts(texts, "query"), self.model.card)

    def add(self, begin: int, count: int) -> IndexReader:
        return add_documents(self.path, documents(begin, count), self.model, memory=APART, disk=FAST)


class InProcess:
    """Shards of this process; every request and answer is pickled, as between processes."""

    before: Callable[[Sequence[ShardSpec]], object] = staticmethod(lambda specs: None)
    opened: ClassVar[list[Any]] = []

    def __init__(self, specs: Sequence[ShardSpec], replicas: int, seconds: float) -> None:
        InProcess.before(specs)
        self.shards = [Shard(pickle.loads(pickle.dumps(spec))) for spec in specs]  # noqa: S301 - written here
        for shard in self.shards:
            try:
                shard.search(None)
            except ShardNotOpenError as error:
                raise error.args[0] from None
        self.documents = [spec.manifest.documents for spec in specs]
        self.replicas, self.closed, self.lost = (replicas,) * len(specs), 0, -1
        InProcess.opened.append(self)

    def search(self, request: SearchRequest, seconds: float) -> Sequence[Hits | None]:
        if self.closed:
            raise ShardsClosedError
        message = pickle.dumps(request)
        answers = [pickle.dumps(shard.search(pickle.loads(message))) for shard in self.shards]  # noqa: S301
        return [None if number == self.lost else pickle.loads(answer) for number, answer in enumerate(answers)]  # noqa: S301

    def close(self) -> None:
        self.closed += 1


Build = Callable[..., Built]


@pytest.fixture
def build(word_sum: Any, word_by_word: Any) -> Build:
    """``build(path, engine)``: an index of four segments."""

    def made(path: Path, engine: str = "exact-dense", *, measured: bool = False) -> Built:
        model = BM25() if engine == "bm25" else word_by_word if engine.endswith("tokens") else word_sum
        options = BuildOptions(engine=engine, settings=ENGINES[engine].settings, calibrate=False)
        build_index(documents(0, 60), model, path, options=options, disk=FAST)
        for begin, count, late in ((60, 9, False), (69, 25, True), (94, 16, False)):
            add_documents(path, documents(begin, count, late=late), model, memory=APART, disk=FAST)
        delete_documents(path, [f"d{number:03d}" for number in range(0, 110, 9)], disk=FAST)
        if measured:
            calibrate_index(path, model, queries=QUERIES, ks=(1, 10), disk=FAST)
        return Built(path, model)

    return made


def assert_same(found: Hits, expected: Hits) -> int:
    """The same ids and scores, to the last bit; how many there are."""
    assert [*map(list, found.ids)] == [*map(list, expected.ids)]
    assert len(found.scores) == len(expected.scores)
    for ours, theirs in zip(found.scores, expected.scores, strict=True):
        assert ours.dtype == theirs.dtype == np.float32
        assert ours.tobytes() == theirs.tobytes()
    return sum(map(len, found.ids))


@pytest.fixture(scope="package")
def cluster() -> Iterator[None]:
    """A Ray cluster of this machine."""
    pytest.importorskip("ray.serve")
    with connected():
        yield
