"""Disks that fail, and the operations of an index on a tiny one; run as a script, it does what may end its process.

python faults.py ahead FOLDER ENGINE STRIDE               kills an addition at every STRIDE-th call and makes another one before it resumes
python faults.py flip FOLDER FLIPS                        opens and searches files that nobody has compared with their checksums
python faults.py make FOLDER                              builds an index of every engine
"""

from __future__ import annotations

import hashlib
import io
import os
import random
import shutil
import signal
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from quiver.encoder.errors import InputError
from quiver.retrieval.index import (
    BuildOptions,
    Filter,
    IndexReader,
    add_documents,
    build_index,
    calibrate_index,
    check_index,
    compact_index,
    delete_documents,
    open_index,
    refresh_index,
    repair_index,
)
from quiver.retrieval.index.files import Disk
from quiver.retrieval.index.index import encoded_queries
from quiver.retrieval.index.pieces import DEFAULTS, PieceSizes
from quiver.retrieval.models.bm25 import BM25
from quiver.retrieval.records import DenseEncoding, Document, Hits, ModelCard, Role, TextTokens, TokenEncoding

WIDTH = 8


class Words:
    """A model of either kind: a word's hash decides its vector."""

    def __init__(self, kind: Any) -> None:
        self.card = ModelCard("words", kind, "ab" * 32, WIDTH, "dot" if kind == "dense" else "maxsim", 99, 99)

    def encode_texts(self, texts: Sequence[str], role: Role, *, progress: bool = False) -> Any:
        tokens = TextTokens(
            np.array([len(text.split()) for text in texts], np.int32), np.zeros(len(texts), bool), np.zeros(len(texts), bool)
        )
        matrices = [np.array([word_vector(word) for word in text.split()], np.float32).reshape(-1, WIDTH) for text in texts]
        if self.card.kind == "colbert":
            return TokenEncoding(matrices, tokens)
        return DenseEncoding(np.array([matrix.sum(axis=0) for matrix in matrices], np.float32).reshape(-1, WIDTH), tokens)


@cache
def word_vector(word: str) -> NDArray[np.float32]:
    seed = int.from_bytes(hashlib.sha256(word.encode()).digest()[:8], "big")
    return np.random.default_rng(seed).standard_normal(WIDTH).astype(np.float32)


def say(*words: object) -> None:
    sys.stdout.write(" ".join(map(str, words)) + "\n")
    sys.stdout.flush()


class FastDisk(Disk):
    """Syncs nothing: what a process has written survives its end."""

    def sync_file(self, path: Path) -> None:
        if not path.is_file():
            raise FileNotFoundError(path)

    def sync_folder(self, path: Path) -> None:
        if not path.is_dir():
            raise FileNotFoundError(path)


FAST = FastDisk()


class HookedDisk:
    """A disk whose every call is announced; a write is announced with its bytes, and as many are written as the hook says.

    Args:
        hook: Gets the name of the call and its path; may raise, or end the process.
        shorten: Gets the number of bytes of a write, and says how many of them are written by that call.
        real: What does it.
    """

    def __init__(
        self, hook: Callable[[str, Path], None], *, shorten: Callable[[int], int] = lambda size: size, real: Disk | None = None
    ) -> None:
        self.hook, self.shorten, self.real = hook, shorten, real or FAST

    def create(self, path: Path) -> Any:
        self.hook("create", path)
        self.real.create(path).close()
        # A buffer of one page: files of some kilobytes are several writes.
        return io.BufferedWriter(_HookedFile(path, self), 4096)

    def sync_file(self, path: Path) -> None:
        self.hook("sync_file", path)
        self.real.sync_file(path)

    def sync_folder(self, path: Path) -> None:
        self.hook("sync_folder", path)
        self.real.sync_folder(path)

    def mkdir(self, path: Path) -> None:
        self.hook("mkdir", path)
        self.real.mkdir(path)

    def rename(self, source: Path, target: Path) -> None:
        self.hook("rename", target)
        self.real.rename(source, target)

    def link(self, source: Path, target: Path) -> None:
        self.hook("link", target)
        self.real.link(source, target)

    def unlink(self, path: Path) -> None:
        self.hook("unlink", path)
        self.real.unlink(path)

    def rmdir(self, path: Path) -> None:
        self.hook("rmdir", path)
        self.real.rmdir(path)


class _HookedFile(io.RawIOBase):
    def __init__(self, path: Path, disk: HookedDisk) -> None:
        super().__init__()
        self._path, self._disk = path, disk
        self._file = path.open("ab", buffering=0)

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        try:
            self._disk.hook("write", self._path)
        except OSError:
            self._file.write(view[: len(view) // 2])  # a disk is full in the middle of a write
            raise
        return self._file.write(view[: self._disk.shorten(len(view))])

    def close(self) -> None:
        self._file.close()
        super().close()


class Kind(NamedTuple):
    """An engine, and what makes it small enough for a collection of some documents.

    Attributes:
        model: Gives its vectors.
        settings: Of its codec.
        narrow: The search_params of a search that looks at as little as it can, so that lists are probed where all could be compared.
    """

    model: Words | BM25
    settings: Mapping[str, Any]
    narrow: Mapping[str, Any]


def encoded(model: Words | BM25, texts: Sequence[str]) -> Any:
    """Queries for the search of an index of a model."""
    return encoded_queries(model.encode_texts(texts, "query"), model.card)


class Operation(NamedTuple):
    """Something that is done to an index.

    Attributes:
        prepare: Makes the folder that it is done to, with an engine.
        run: Does it.
    """

    prepare: Callable[[Path, str], object]
    run: Callable[[Path, str, Disk], object]


MODEL = Words("dense")
TOKENS = Words("colbert")
SMALL_PIECES = PieceSizes(chunk_documents=4, documents=4)

ENGINES = {
    "exact-dense": Kind(MODEL, {}, {}),
    "pq-dense": Kind(MODEL, {}, {"k_factor": 1}),
    "ivf-dense": Kind(MODEL, {"nlist": 4}, {"nprobe": 1, "k_factor": 1}),
    "faiss-dense": Kind(MODEL, {"factory": "IVF4,SQ8"}, {"nprobe": 1, "k_factor": 1}),
    "exact-tokens": Kind(TOKENS, {}, {}),
    "ivf-tokens": Kind(TOKENS, {"centroids": 8}, {"nprobe": 1, "tokens_k": 2, "candidates": 1}),
    "bm25": Kind(BM25(), {}, {}),
}
"""All engines."""

FIRST = [Document(f"a{number}", f"word{number} first", "", {"n": number}) for number in range(9)]
SECOND = [Document(f"b{number}", f"word{number} second") for number in range(5)]


def build(
    path: Path,
    engine: str,
    documents: Iterable[Document] = FIRST,
    *,
    settings: Mapping[str, Any] | None = None,
    disk: Disk = FAST,
    overwrite: bool = False,
    pieces: PieceSizes = DEFAULTS.pieces,
) -> IndexReader:
    """A small index; its search is not measured, which would take longer than all the rest."""
    chosen = ENGINES[engine].settings if settings is None else settings
    options = BuildOptions(engine=engine, settings=chosen, calibrate=False, pieces=pieces)
    return build_index(documents, ENGINES[engine].model, path, options=options, overwrite=overwrite, disk=disk)


def prepared(path: Path, engine: str = "exact-dense") -> None:
    """Two segments, some documents deleted, two generations."""
    build(path, engine)
    add_documents(path, SECOND, ENGINES[engine].model, disk=FAST)
    delete_documents(path, ["a1", "b2"], disk=FAST)


def interrupted(path: Path, engine: str) -> None:
    """A build that stopped after its second piece of three."""
    calls = 0

    def stop(name: str, at: Path) -> None:
        nonlocal calls
        calls += at.name == "piece-000002"
        if calls:
            raise OSError(5, "input/output error")

    try:
        build(path, engine, disk=HookedDisk(stop), pieces=SMALL_PIECES)
    except OSError:
        return
    raise AssertionError("the build was to be interrupted")


def several_additions(path: Path, engine: str) -> None:
    """Four segments, some documents deleted: the next addition merges them."""
    prepared(path, engine)
    for number in range(2):
        add_documents(path, [Document(f"e{number}", f"word{number} third")], ENGINES[engine].model, disk=FAST)


def damaged(path: Path, engine: str) -> None:
    """The vectors or words of the newest segment have lost a byte, and something is left over."""
    build(path, engine)
    add_documents(path, SECOND, ENGINES[engine].model, disk=FAST)
    others = ("checksums", "fields", "ids", "texts")
    file = min(path for path in (path / "segments" / "s-000000000002-0000").iterdir() if not path.name.startswith(others))
    file.write_bytes(file.read_bytes()[:-1])
    (path / "segments" / "s-000000000003-0000").mkdir()


def compacted(path: Path, engine: str) -> None:
    """Compacted: the next commit removes the segments that were merged."""
    prepared(path, engine)
    compact_index(path, disk=FAST)


def several_pieces(path: Path, engine: str, disk: Disk) -> None:
    """A build in three pieces, which are merged."""
    build(path, engine, iter(FIRST), disk=disk, pieces=SMALL_PIECES)


def add(path: Path, engine: str, disk: Disk) -> None:
    """Five documents take the place of those of their ids, and a sixth is new."""
    add_documents(path, [*SECOND, Document("c", "word3 new")], ENGINES[engine].model, replace_existing=True, disk=disk)


def changed_files(path: Path, engine: str) -> None:
    """An index of files, of which one was changed, one is new and one is gone; they are in a folder beside the index."""
    folder = path.parent / "files"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for number in range(9):
        (folder / f"{number}.txt").write_text(f"word{number} first")
    chosen = BuildOptions(engine=engine, settings=ENGINES[engine].settings, calibrate=False)
    build_index(folder, ENGINES[engine].model, path, options=chosen, disk=FAST)
    (folder / "3.txt").write_text("word3 other first")
    (folder / "9.txt").write_text("word3 new")
    (folder / "5.txt").unlink()


def calibrate(path: Path, engine: str, disk: Disk) -> None:
    """Measured with two queries."""
    calibrate_index(path, ENGINES[engine].model, queries=["word3 new", "first"], ks=(2,), disk=disk)


OPERATIONS = {
    "build": Operation(lambda path, engine: None, several_pieces),
    "resume": Operation(interrupted, lambda path, engine, disk: build(path, engine, disk=disk)),
    "overwrite": Operation(prepared, lambda path, engine, disk: build(path, engine, SECOND, overwrite=True, disk=disk)),
    "add": Operation(prepared, add),
    "add and merge": Operation(several_additions, add),
    "refresh": Operation(changed_files, lambda path, engine, disk: refresh_index(path, ENGINES[engine].model, disk=disk)),
    "delete": Operation(prepared, lambda path, engine, disk: delete_documents(path, ["a0", "b0"], disk=disk)),
    "compact": Operation(prepared, lambda path, engine, disk: compact_index(path, disk=disk)),
    "collect garbage": Operation(compacted, lambda path, engine, disk: delete_documents(path, ["a0"], disk=disk)),
    "calibrate": Operation(prepared, calibrate),
    "repair": Operation(damaged, lambda path, engine, disk: repair_index(path, model=ENGINES[engine].model, disk=disk)),
}


class State(NamedTuple):
    """What an index has.

    Attributes:
        content: Its documents and what it finds; ``none`` where nothing has been committed, or what is wrong with it.
        shape: Segments, and documents that are deleted and still take room.
        measured: Whether its recall has been.
        near: What it finds where it looks at as little as it can, which depends on how its documents are spread over segments.
    """

    content: str
    shape: tuple[int, int] = (0, 0)
    measured: bool = False
    near: str = ""


def state(path: Path) -> State:
    """The state of an index, all of whose files are read."""
    if not path.exists():
        return State("none")
    try:
        index = open_index(path)
    except InputError as error:
        words = ("nothing has been committed", "the folder is not an index")
        return State("none" if any(word in str(error) for word in words) else type(error).__name__)
    if check_index(path).problems:
        return State("problems")
    near, content = answers(path)
    return State(content, (len(index.manifest.segments), index.manifest.deleted), index.manifest.calibration is not None, near)


def answers(path: Path) -> tuple[str, str]:
    """What an index finds where it looks at as little as it can; and its documents, with what it finds where it looks at everything."""
    index = open_index(path)
    kind = ENGINES[index.kind]
    queries = encoded(kind.model, ["word3 new", "first"])
    near = repr(listed(index.search(queries, 1, effort=kind.narrow)))
    return near, repr((list(index.documents), listed(index.search(queries, 4, effort="exact"))))


def listed(hits: Hits) -> list[list[tuple[str, float]]]:
    return [list(zip(ids, scores.tolist(), strict=True)) for ids, scores in zip(hits.ids, hits.scores, strict=True)]


def again(name: str, engine: str, path: Path) -> State:
    """The state after the operation is done once more; one that has nothing left to do may say so."""
    try:
        OPERATIONS[name].run(path, engine, FAST)
    except InputError as error:
        if "an index exists already" not in str(error) and "is not in this index" not in str(error):
            raise
    return state(path)


def fresh_copy(base: Path, work: Path) -> None:
    shutil.rmtree(work, ignore_errors=True)
    if base.exists():
        shutil.copytree(base, work)


def die_at(fatal: int, operation: Operation, engine: str, work: Path) -> None:
    calls = 0

    def count(call: str, path: Path) -> None:
        nonlocal calls
        calls += 1
        if calls == fatal:
            os._exit(137)

    operation.run(work, engine, HookedDisk(count, shorten=lambda size: max(1, size // 2)))
    os._exit(0)


LATER = [Document(f"k{number}", f"word{number} later") for number in range(10)]
"""What an addition adds that is killed."""


def go_ahead(folder: Path, engine: str, stride: int) -> None:
    """Kill an addition at every ``stride``-th call, change the index otherwise, and repeat it; say how many texts that encoded again."""
    base, work, model = folder / "base", folder / "work", ENGINES[engine].model
    prepared(base, engine)
    fatal, code = 1 - stride, 137
    while code:
        fatal += stride
        fresh_copy(base, work)
        child = os.fork()
        if child == 0:
            die_at(fatal, Operation(prepared, lambda path, engine, disk: add_in_pieces(path, model, disk)), engine, work)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        committed = "k0" in open_index(work).ids
        add_documents(work, [Document("z", "word1 unrelated")], model, disk=FAST)
        delete_documents(work, ["a0"], disk=FAST)
        compact_index(work, disk=FAST)
        counting = Counting(model)
        try:
            add_in_pieces(work, counting, FAST)
        except InputError as error:
            if not committed or "document 'k0' is in this index already" not in str(error):
                raise
        first = [document.id for document in [*FIRST, *SECOND] if document.id not in ("a0", "a1", "b2")]
        later = [document.id for document in LATER]
        ids = list(open_index(work).ids)
        right = ids == ([*first, *later, "z"] if committed else [*first, "z", *later]) and not check_index(work).problems
        say(fatal, code, "right" if right else f"WRONG:{ids}", counting.texts)


class Counting:
    """A model that counts the texts that it encodes."""

    def __init__(self, model: Words) -> None:
        self.model, self.card, self.texts = model, model.card, 0

    def encode_texts(self, texts: Sequence[str], role: Role, *, progress: bool = False) -> Any:
        self.texts += len(texts)
        return self.model.encode_texts(texts, role)


def add_in_pieces(path: Path, model: Any, disk: Disk) -> None:
    add_documents(path, LATER, model, pieces=SMALL_PIECES, disk=disk)


def search_unverified(folder: Path, flips: int) -> None:
    """Flip bits in files that are not hashed when an index is opened with ``verify=False``, and use it all the same; say what came of it.

    An answer may be wrong, but the process lives and comes to an end.
    """
    kind = ENGINES[open_index(folder).kind]
    files = [path for path in sorted((folder / "segments").rglob("*")) if path.is_file() and path.stat().st_size]
    rng, outcomes = random.Random(0), Counter[str]()
    for number in range(flips):
        path = rng.choice(files)
        whole = path.read_bytes()
        place, bit = rng.randrange(len(whole)), rng.randrange(8)
        say("flip", number, path.name, place, bit)  # the last of these lines says what ended the process
        signal.alarm(60)
        # A new file under the old name: a mapping of the old one stays what it was.
        path.unlink()
        path.write_bytes(whole[:place] + bytes([whole[place] ^ (1 << bit)]) + whole[place + 1 :])
        try:
            use(open_index(folder, verify=False), kind)
        except Exception as error:
            outcomes[type(error).__name__] += 1
        else:
            outcomes["answers"] += 1
        path.unlink()
        path.write_bytes(whole)
    say("outcomes", *(f"{name}={count}" for name, count in sorted(outcomes.items())))


def use(index: IndexReader, kind: Kind) -> None:
    """Search an index in several ways and read all that is in it."""
    queries = encoded(kind.model, ["word3 new", "first"])
    for effort in (kind.narrow, "exact"):
        for filter in (None, Filter.parse(["n<=3"]), Filter(ids=frozenset(["a3", "b1"]))):
            for k in (1, 100):
                index.search(queries, k, effort=effort, filter=filter)
    for segment in index.segments:
        segment.vectors.vectors(np.flatnonzero(segment.vectors.lengths > 0))
    sorted(index.ids)
    for document in index.documents:
        index.locate([document.id])


def make(folder: Path) -> None:
    """Build an index of every engine from some hundred documents of up to eight words."""
    rng = random.Random(3)
    documents = [Document(f"d{number}", " ".join(f"w{rng.randrange(400)}" for _ in range(rng.randrange(9)))) for number in range(200)]
    for engine in ENGINES:
        build(folder / engine, engine, documents)


if __name__ == "__main__":
    command, where, *rest = sys.argv[1:]
    if command == "flip":
        search_unverified(Path(where), int(rest[0]))
    elif command == "ahead":
        go_ahead(Path(where), rest[0], int(rest[1]))
    else:
        make(Path(where))
