"""The contract of resumable jobs, over every user of `quiver.encoder.work_folder`: killed at each write, on a full disk, two at once."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any, NamedTuple

import numpy as np
import pytest

from quiver.encoder import InputError
from quiver.encoder.errors import full_disk as is_full_disk
from quiver.encoder.files import file_sha256
from quiver.encoder.training.run_folder import RECORD, Checkpoints, RunIdentity, finish_run, lock_run, new_run
from quiver.encoder.work_folder import SealedFolders, WorkFolder, exclusive_lock, open_work
from quiver.eval import evaluate
from quiver.eval.datasets.cache import Cache
from quiver.eval.results import FileReference, Results, read_results, results_folder, write_results
from quiver.retrieval.data.embedding_store import EmbeddingStore, StoreLimits
from quiver.retrieval.index import BuildOptions, build_index, open_index
from quiver.retrieval.index.pieces import PieceSizes
from quiver.retrieval.index.store.reading import Layout
from quiver.retrieval.index.store.writing import writing
from quiver.retrieval.records import DenseEncoding, Document, ModelCard, TextTokens
from quiver.retrieval.training.data.prepare import prepare_rows
from quiver.retrieval.training.mining import negatives, teacher_scores
from quiver.retrieval.training.mining.negatives import MiningSystem, Output, Ranks, Rules, mine_negatives
from quiver.retrieval.training.mining.texts import PairSource
from quiver.retrieval.training.recipe import DataSection

EachDeath = Callable[..., Iterator[None]]
ROWS = [{"query": f"word{n} query", "positive": f"word{n} answer", "negatives": [f"word{n + 1} answer"]} for n in range(12)]


class User(NamedTuple):
    """A job that uses the module.

    Attributes:
        run: Does the job in a folder, or resumes it there; what is complete is left alone.
        lock: Lock file that it holds while it works, inside the folder; empty if it waits for others.
    """

    run: Callable[[Path], object]
    lock: str = ""


def parts(out: Path) -> None:
    if (out / "result").exists() and not (out / ".work").exists():
        WorkFolder(out / ".work").remove_leftovers()
        return
    with open_work(out, ".work", {"seed": 1}, doing="counting there") as work:
        for name in ("a", "b", "c"):
            if work.find(name) is None:
                work.save(name, name.encode() * 1000)
        (out / "result.tmp").write_bytes(b"".join(work.read(name) for name in work.names()))
        (out / "result.tmp").replace(out / "result")
        work.remove()


def sealed(out: Path) -> None:
    folders = SealedFolders(out, "test/1")
    for name in ("a", "b"):
        if folders.finished(name, "making it again") is None:
            with folders.writing(name) as part:
                (part.folder / "file").write_text(name * 1000)
    folders.remove_unfinished()


def checkpoints(out: Path) -> None:
    found = Checkpoints(out)
    if found.newest() is None:
        save(found, 4)
    if found.newest() == 4:
        save(found, 8)
    found.keep([8])


def save(found: Checkpoints, step: int) -> None:
    with found.writing(step) as folder:
        (folder / "model.bin").write_bytes(b"weights of %d" % step)


def training(out: Path) -> None:
    identity = RunIdentity({"seed": 1}, {"processes": 1}, {"device": "cpu"})
    if (out / RECORD).exists():
        return
    with lock_run(out):
        if not (out / "begun.json").exists():
            with new_run(out):
                identity.write(out)
                save(Checkpoints(out / "checkpoints"), 1)
        if Checkpoints(out / "checkpoints").newest() is None:
            identity.write(out)
            save(Checkpoints(out / "checkpoints"), 1)
        finish_run(out, lambda folder: (folder / "weights").write_bytes(b"weights"), {"schema": "quiver-run/1", "recipe": {"seed": 1}})


def rows(out: Path) -> None:
    source = out.parent / "rows.jsonl"
    if not source.exists():
        source.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
        os.utime(source, (1, 1))
    section = DataSection(train=(str(source),), document_fields=("positive",))
    assert len(list(prepare_rows(section, out, seed=1))) == len(ROWS)


def pairs(out: Path) -> Path:
    source = out.parent / "pairs.jsonl"
    if not source.exists():
        source.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return source


def finished(job: Callable[[], object]) -> None:
    """Do a job that refuses a finished result."""
    try:
        job()
    except InputError as error:
        if "holds a finished result" not in str(error):
            raise


def mining(out: Path) -> None:
    source, rules = PairSource((str(pairs(out)),), positive_field="positive"), Rules(negatives=1, ranks=Ranks(1, 5), margins=())
    finished(lambda: mine_negatives(source, MiningSystem(None), out, rules=rules, output=Output()))


class LengthTeacher:
    """Scores a pair by the number of its query."""

    def __init__(self) -> None:
        self.description = {"kind": "test", "source": "test", "fingerprint": "ab"}

    @contextmanager
    def scorer(self, data: Any, *, cache: Path | None, progress: bool) -> Iterator[Any]:
        def score(parts: Any, advance: Any) -> Iterator[Any]:
            for number, part in parts.items():
                yield number, data.pairs(part)[1].astype(np.float32)

        yield score


def scores(out: Path) -> None:
    section = DataSection(train=(str(pairs(out)),), document_fields=("positive", "negatives"))
    finished(lambda: teacher_scores.score_rows(section, LengthTeacher(), out))


class Download:
    """A source that needs no network."""

    unit, url, revision = "tiny/zip", "http://tiny", "r1"

    def fetch(self, folder: Path, scratch: Path, *, progress: bool) -> str:
        for name in ("corpus.jsonl", "queries.jsonl"):
            (folder / name).write_text(name)
        return self.revision


def downloads(out: Path) -> None:
    Cache(out).fetch(Download())  # type: ignore[arg-type]


@cache
def scored() -> Results:
    index = build_index([{"id": "owl", "text": "Owls have wings."}], "bm25", Path(mkdtemp()) / "index")
    return evaluate(index, queries={"q": "what has wings"}, qrels={"q": {"owl": 1}}, baselines=())


def evaluation(out: Path) -> None:
    results = scored()
    try:
        with results_folder(out, {"k": 10}) as stage:
            collections = []
            for name in ("a", "b"):
                found = stage.finished(name, {})
                if found is None:
                    (stage.folder / "runs").mkdir(exist_ok=True)
                    (stage.folder / "runs" / name).write_text(name * 99)
                    run = FileReference(f"runs/{name}", file_sha256(stage.folder / "runs" / name))
                    found = replace(results.collections[0], name=name, split="", run=run)
                    stage.save(found)
                collections.append(found)
            write_results(replace(results, collections=tuple(collections)), stage.folder)
    except InputError as error:
        if "already holds results" not in str(error):
            raise
    assert len(read_results(out).collections) == 2


class WordModel:
    """The vector of a text is its length."""

    card = ModelCard("words", "dense", "a" * 64, 1, "dot", 99, 99)

    def encode_texts(self, texts: Sequence[str], role: str, *, progress: bool = False) -> DenseEncoding:
        lengths = np.array([len(text) for text in texts], np.int32)
        return DenseEncoding(lengths[:, None].astype(np.float32), TextTokens(lengths, lengths > 99, lengths == 0))


def vectors(out: Path) -> None:
    texts = [f"{'x' * number}" for number in range(12)]
    stored = EmbeddingStore(out, limits=StoreLimits(chunk_texts=4, shard_texts=4)).encode(WordModel(), texts, "document")
    assert stored.rows.span(0, 12)[:, 0].tolist() == list(range(12))


def index(out: Path) -> None:
    documents = [Document(f"d{number:02d}", "x" * number) for number in range(12)]
    if not Layout(out).generations():
        options = BuildOptions(calibrate=False, pieces=PieceSizes(chunk_documents=2, documents=4, count=1))
        build_index(documents, WordModel(), out, options=options)
    with writing(out) as writer:
        writer.collect_garbage()
    assert list(open_index(out).documents) == documents


USERS = {
    "index": User(index),
    "vectors": User(vectors),
    "downloads": User(downloads),
    "evaluation": User(evaluation, ".unfinished.lock"),
    "parts": User(parts, ".work.lock"),
    "sealed folders": User(sealed),
    "checkpoints": User(checkpoints),
    "training run": User(training, ".lock"),
    "prepared rows": User(rows),
    "mining": User(mining, ".quiver-work.lock"),
    "teacher scores": User(scores, ".quiver-work.lock"),
}


@pytest.fixture(autouse=True)
def several_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(negatives, "QUERIES_PER_PART", (5, 5))
    monkeypatch.setattr(teacher_scores, "PAIRS_PER_PART", 8)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)


def content(out: Path) -> dict[str, bytes]:
    """Files of a folder; records without what differs from run to run.

    Manifests of an index have the time of the commit, and the work folder of a build that was killed right after its commit is removed
    after a week only, as that of one that was never finished.
    """
    changing = ('"date"', '"seconds"', '"platform"')
    return {
        name: b"\n".join(line for line in path.read_bytes().splitlines() if not line.strip().startswith(tuple(map(str.encode, changing))))
        for path in sorted(out.rglob("*"))
        if path.is_file() and not (name := path.relative_to(out).as_posix()).endswith(".lock")
        if not name.startswith(("manifests/", "HEAD", "LOCK", "tmp/b-"))
    }


@pytest.fixture(params=USERS)
def user(request: pytest.FixtureRequest) -> User:
    return USERS[request.param]


def check_deaths(user: User, tmp_path: Path, each_death: EachDeath, *, sample: bool) -> None:
    out = tmp_path / "out"
    user.run(out)
    expected = content(out)
    kills = 0
    for _ in each_death(lambda: shutil.rmtree(out), lambda: user.run(out), sample=sample):
        kills += 1
        user.run(out)
        assert content(out) == expected, "resumed, nothing is missing, different or left over"
    assert kills > 8


def test_a_job_killed_at_some_of_its_writes_gives_the_same_result(user: User, tmp_path: Path, each_death: EachDeath) -> None:
    check_deaths(user, tmp_path, each_death, sample=True)


@pytest.mark.exhaustive
def test_a_job_killed_at_any_of_its_writes_gives_the_same_result(user: User, tmp_path: Path, each_death: EachDeath) -> None:
    check_deaths(user, tmp_path, each_death, sample=False)


def test_a_job_on_a_full_disk_ends_in_one_line_and_resumes(
    user: User, tmp_path: Path, full_disk: Callable[[int], AbstractContextManager[None]]
) -> None:
    out = tmp_path / "out"
    user.run(out)
    expected = content(out)
    shutil.rmtree(out)
    for size in (0, 30):
        with pytest.raises((InputError, OSError)) as raised, full_disk(size):
            user.run(out)
        assert is_full_disk(raised.value) is not None
        assert "\n" not in str(raised.value)
    user.run(out)
    assert content(out) == expected


def test_a_read_only_folder_is_one_line(user: User, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out, real = tmp_path / "out", Path.mkdir
    out.mkdir()
    user.run(tmp_path / "sources")  # writes what the job reads

    def read_only(path: Path, *arguments: Any, **options: Any) -> None:
        if path.is_relative_to(out) and not path.exists():
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))
        real(path, *arguments, **options)

    monkeypatch.setattr(Path, "mkdir", read_only)
    with pytest.raises((InputError, OSError), match="Read-only file system"):
        user.run(out)


LOCKED = {name: user for name, user in USERS.items() if user.lock}


@pytest.mark.parametrize("name", LOCKED)
def test_a_second_process_is_refused_in_one_line(name: str, tmp_path: Path) -> None:
    user, out = LOCKED[name], tmp_path / "out"
    line = rf"{out}: process {os.getpid()} on .*; wait for it, or choose another --out"
    with exclusive_lock(out / user.lock, "working there", remedy=""), pytest.raises(InputError, match=line):
        user.run(out)
    user.run(out)
