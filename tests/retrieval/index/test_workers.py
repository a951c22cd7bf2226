"""An index built by workers is the one that a single process builds, whoever dies on the way, and nothing finished is encoded again."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from quiver.cli.options import Encoding
from quiver.encoder import Encoder, EncoderConfig, InputError, Tokenizer, init_weights
from quiver.encoder.progress import Advance
from quiver.encoder.work_folder import WorkFolder
from quiver.retrieval.cluster import LocalProcesses
from quiver.retrieval.index import BuildOptions, IndexReader, build_index, open_index
from quiver.retrieval.index.build import plan_pieces
from quiver.retrieval.index.engines import Sample, train_codec
from quiver.retrieval.index.pieces import PieceSizes
from quiver.retrieval.models.batches import Projection
from quiver.retrieval.models.biencoder import BiEncoder
from quiver.retrieval.models.colbert import ColBERT
from quiver.retrieval.models.loading import load_model
from quiver.retrieval.models.options import ColBERTSettings, ModelFolder
from quiver.retrieval.records import Document, Executor, ModelCard
from tests.processes import imported_python

REPOSITORY = Path(__file__).resolve().parents[3]
WORDS = ["granite", "water", "bird", "stone", "river", "cloud", "leaf", "sand", "wind", "fire"]


def documents(count: int, words: int = 30) -> list[Document]:
    rng = np.random.default_rng(5)
    return [Document(f"d{number:04d}", " ".join(rng.choice(WORDS, 1 + number % words)), "", {"n": number}) for number in range(count)]


def make_model(folder: Path, kind: str) -> Path:
    """A model that encodes in no time."""
    tokenizer = Tokenizer.train(WORDS, vocab_size=300)
    config = EncoderConfig.modernbert(
        vocab_size=len(tokenizer), hidden_size=64, num_heads=2, intermediate_size=96, layer_types=["global"], max_positions=128
    )
    encoder = init_weights(Encoder(config), seed=3)
    if kind == "dense":
        BiEncoder.from_parts(encoder, tokenizer, ModelFolder("dense", folder, max_length=64, normalize=True)).save_pretrained(folder)
    else:
        colbert = ColBERTSettings(query_prefix="", document_prefix="", query_length=16, document_length=64)
        settings = ModelFolder("colbert", folder, projections=(Projection(64, 32),), similarity="maxsim", colbert=colbert)
        ColBERT.from_parts(encoder, tokenizer, settings).save_pretrained(folder)
    return folder


class Left(NamedTuple):
    """What was in the folder of a build when it had ended."""

    markers: dict[str, int]
    folders: Counter[str]

    @property
    def made(self) -> int:
        """Pieces of the index."""
        return sum(name.startswith("piece-") for name in self.markers)


@pytest.fixture
def left(monkeypatch: pytest.MonkeyPatch) -> Callable[[], Left]:
    """Looks into the folder of the build just before it is removed."""
    seen: list[Left] = []
    remove = WorkFolder.remove

    def looked(work: WorkFolder) -> None:
        seen.append(look(work.path))
        remove(work)

    monkeypatch.setattr(WorkFolder, "remove", looked)
    return lambda: seen[-1]


def look(folder: Path) -> Left:
    markers = {path.parent.name: path.stat().st_mtime_ns for path in folder.glob("[!.]*/seal.json")}
    names = (path.name.lstrip(".") for path in folder.iterdir() if path.is_dir() and "piece-" in path.name)
    return Left(markers, Counter(name.partition(".")[0] for name in names))


def sums(index: IndexReader) -> list[dict[str, str]]:
    folders = [*index.manifest.segments, index.manifest.codec]
    return [{name: entry.sha256 for name, entry in each.files.items()} for each in folders]


def test_chunks_are_those_of_one_reading_whatever_the_pieces() -> None:
    rng, card = np.random.default_rng(1), ModelCard("m", "dense", "a" * 64, 4, "dot", 9, 9)
    codec = train_codec("exact-dense", Sample(np.zeros((0, 4), np.float32)), card, documents=40, vectors=40, settings={}, seed=0)
    for documents in (1, 7, 40):
        lengths = rng.integers(0, 9, 40).astype(np.uint32)
        ends, first = list[int](), 0
        while first < 40:  # one document after the other
            held, stop = 0, first
            while stop < 40 and stop - first < 6 and held < 20:
                held += int(lengths[stop])
                stop += 1
            ends.append(stop)
            first = stop
        sizes = PieceSizes(chunk_documents=6, chunk_characters=20, documents=documents, count=1)
        pieces = plan_pieces(lengths, BuildOptions(pieces=sizes), card, codec)
        assert [end for piece in pieces for end in piece] == ends
        assert (len(pieces) == len(ends), len(pieces) == 1) == (documents == 1, documents == 40)


@pytest.mark.parametrize(
    ("kind", "engine", "workers"), [("dense", "exact", 2), pytest.param("colbert", "ivf-tokens", 2, marks=pytest.mark.slow)]
)
def test_processes_build_the_same_bytes(tmp_path: Path, kind: str, engine: str, workers: int, left: Callable[[], Left]) -> None:
    model, given = load_model(make_model(tmp_path / "model", kind)), documents(100)
    options = BuildOptions(engine, calibrate=False, pieces=PieceSizes(chunk_documents=4, documents=8))
    whole = build_index(given, model, tmp_path / "whole", options=options)
    built = build_index(iter(given), model, tmp_path / "built", options=options, executor=LocalProcesses(workers))
    assert sums(built) == sums(whole)
    assert left().made == 13
    assert left().folders.total() == 13
    assert list(built.documents) == given
    assert not any((tmp_path / "built" / "tmp").iterdir())


DRIVER = """
import sys
from pathlib import Path
from quiver.retrieval.cluster import LocalProcesses
from quiver.retrieval.index import BuildOptions, build_index
from quiver.retrieval.index.pieces import PieceSizes
from quiver.retrieval.models.loading import load_model
from quiver.retrieval.models.batches import Projection

if __name__ == "__main__":
    model, corpus, out, workers = sys.argv[1:]
    options = BuildOptions(calibrate=False, pieces=PieceSizes(chunk_documents=4, documents=8))
    build_index(corpus, load_model(model), Path(out), options=options, executor=LocalProcesses(int(workers)))
"""


def write_corpus(path: Path, given: list[Document]) -> Path:
    path.write_text("".join(json.dumps({"_id": each.id, "text": each.text, **(each.metadata or {})}) + "\n" for each in given))
    return path


def wait_for(condition: Callable[[], bool], seconds: float = 120.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come to that"
        time.sleep(0.002)


@pytest.mark.slow
def test_a_killed_driver_resumes_with_other_workers_and_encodes_nothing_twice(tmp_path: Path, left: Callable[[], Left]) -> None:
    """SIGKILL in the middle; its workers end too. Then three workers instead of two, and other memory, chunks and pieces of their own."""
    given = documents(1200, words=60)
    corpus, model = write_corpus(tmp_path / "c.jsonl", given), make_model(tmp_path / "model", "dense")
    script = tmp_path / "driver.py"
    script.write_text(DRIVER)
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    process = subprocess.Popen([imported_python(), str(script), str(model), str(corpus), str(tmp_path / "i"), "2"], env=environment)

    def finished() -> list[Path]:
        return sorted((tmp_path / "i" / "tmp").glob("b-*/piece-*/seal.json"))

    try:
        wait_for(lambda: len(finished()) >= 3 or process.poll() is not None)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    with pytest.raises(InputError, match="the build was never finished"):
        open_index(tmp_path / "i")
    time.sleep(1.0)  # for its workers to notice
    (work,) = (tmp_path / "i" / "tmp").glob("b-*")
    before = look(work)
    assert 3 <= before.made < 150
    options = BuildOptions(calibrate=False, memory=1 << 30)
    built = build_index(corpus, load_model(model), tmp_path / "i", options=options, executor=LocalProcesses(3))
    after = left()
    assert after.made == 150
    pieces = {name: mark for name, mark in before.markers.items() if name.startswith("piece-")}  # the codec has moved into the index
    assert {name: after.markers[name] for name in pieces} == pieces  # as they were: not made again
    made_again = after.folders.total() - after.made
    assert made_again <= 2  # what the two workers had in their hands
    sys.stdout.write(f"{before.made} of 150 pieces finished by the driver that was killed, {made_again} begun and made again\n")
    assert sums(built) == sums(build_index(corpus, load_model(model), tmp_path / "whole", options=options))


def test_input_that_workers_cannot_use_is_one_line(tmp_path: Path, word_sum: Any) -> None:
    with pytest.raises(InputError, match="word-sum-a"):
        build_index(documents(20), word_sum, tmp_path / "i", executor=LocalProcesses(2))
    model = load_model(make_model(tmp_path / "model", "dense"))
    _ = model.card
    other = make_model(tmp_path / "other", "dense")
    weights = other / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    (tmp_path / "model" / "model.safetensors").write_bytes(bytes(content))
    with pytest.raises(InputError, match=r"the model on .* has the fingerprint .*; all machines need the same model files"):
        build_index(documents(20), model, tmp_path / "i", executor=LocalProcesses(2))
    assert not (tmp_path / "i").exists()


@pytest.fixture
def ray_nodes(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A cluster of three nodes with a core each, on this machine."""
    ray = pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))  # of the nodes' workers
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    # A killed node refuses connections and is missed after five checks, by default after 20 s. A slow one has 10 s for each answer.
    checks = {"health_check_initial_delay_ms": 500, "health_check_period_ms": 500}
    head = {"num_cpus": 1, "object_store_memory": 100 << 20, "_system_config": checks}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    try:
        for _ in range(2):
            cluster.add_node(num_cpus=1, object_store_memory=100 << 20)
        yield cluster
    finally:
        if ray.is_initialized():
            ray.shutdown()
        cluster.shutdown()


REPEATED = "is repeated by another worker"


class KillsNodes:
    """Executor that removes all nodes but the head as soon as two workers have begun a piece: one of them at least is on a removed node.

    Until a piece of a lost worker is repeated it hands out pieces slowly: a worker may start late, and it outlives its node for a while.
    """

    def __init__(self, executor: Executor, cluster: Any, folder: Path, log: Any) -> None:
        self.name, self.remote, self.threads = executor.name, executor.remote, executor.threads
        self.killed = False
        self._executor, self._cluster, self._folder, self._log = executor, cluster, folder, log

    def run(
        self, task: Any, items: Iterable[Any], *, threads: int = 1, advance: Advance = lambda steps: None
    ) -> Generator[tuple[Any, Any], None, None]:
        return self._executor.run(task, self._slowly(items), threads=threads, advance=advance)

    def _slowly(self, items: Iterable[Any]) -> Iterator[Any]:
        for item in items:
            if not self.killed:
                begun = self._begun()
                if begun > 1:
                    for node in list(self._cluster.worker_nodes):
                        self._cluster.remove_node(node, allow_graceful=False)
                    self.killed = True
                elif begun:
                    end = time.monotonic() + 4.0
                    while self._begun() < 2 and time.monotonic() < end:
                        time.sleep(0.02)
            elif REPEATED not in self._log.text:
                time.sleep(1.0)
            yield item

    def _begun(self) -> int:
        return len({path.name.split(".")[2] for path in self._folder.glob("tmp/b-*/.piece-*.*.unfinished")})


@pytest.mark.slow
def test_three_nodes_build_the_same_bytes_also_when_two_are_killed(
    tmp_path: Path, minilm: Path, ray_nodes: Any, left: Callable[[], Left], caplog: Any
) -> None:
    sizes = PieceSizes(chunk_documents=8, documents=8)
    corpus = write_corpus(tmp_path / "c.jsonl", documents(160))
    whole = build_index(corpus, load_model(minilm), tmp_path / "whole", options=BuildOptions(calibrate=False, pieces=sizes))
    executor = KillsNodes(Encoding(executor="ray", address=ray_nodes.address).open_executor(), ray_nodes, tmp_path / "built", caplog)
    options = BuildOptions(calibrate=False, pieces=sizes)
    built = build_index(corpus, load_model(minilm), tmp_path / "built", options=options, executor=executor)
    assert executor.killed, "the build had ended before a second worker began"
    assert left().made == 20
    lost = left().folders.total() - left().made
    assert lost <= 2  # a lost worker may have been idle
    assert sums(built) == sums(whole)
    sys.stdout.write(f"20 pieces on three nodes of which two were killed, {lost} begun and made again\n")
