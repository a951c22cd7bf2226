"""Kills, damage and full disks against the public interface of an index; run as a script, it prints a line for everything that is wrong.

python endurance.py kill FOLDER ENGINE KILLS SEED             kills a writer at random moments while readers search
python endurance.py flip FOLDER ENGINE PART COUNT SEED        flips bits and bytes of one part of an index, searches and repairs it
python endurance.py spoil FOLDER ENGINE COUNT SEED            wipes sectors, cuts files short and removes them
python endurance.py fill FOLDER ENGINE COUNT SEED             leaves too little room on a small disk that it mounts on FOLDER

A line that starts with WRONG says what is wrong and how to repeat it; the last line counts what happened.
"""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import random
import select
import shutil
import signal
import subprocess
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from quiver.encoder.errors import InputError
from quiver.retrieval.index import (
    BuildOptions,
    DamagedIndexError,
    Filter,
    IndexReader,
    add_documents,
    build_index,
    check_index,
    compact_index,
    delete_documents,
    open_index,
    refresh_index,
    repair_index,
)
from quiver.retrieval.records import DenseEncoding, Document, ModelCard, Role, TextTokens, TokenEncoding

WIDTH = 32
BLOCK = 16384
ENGINES: Mapping[str, Mapping[str, Any]] = {"exact-dense": {}, "ivf-dense": {"nlist": 4}, "ivf-tokens": {"centroids": 16}}
NARROW = {"exact-dense": {}, "ivf-dense": {"nprobe": 1, "k_factor": 1}, "ivf-tokens": {"nprobe": 1, "tokens_k": 2, "candidates": 1}}
QUERIES = ["w3 w5 w8", "w1 w1", "w40 w41 w42 w43"]


def say(*words: object) -> None:
    sys.stdout.write(" ".join(map(str, words)) + "\n")
    sys.stdout.flush()


@cache
def word_vector(word: str) -> NDArray[np.float32]:
    seed = int.from_bytes(hashlib.sha256(word.encode()).digest()[:8], "big")
    return np.random.default_rng(seed).standard_normal(WIDTH).astype(np.float32)


class WordModel:
    """A model whose vectors follow from the words: one for each word, or their sum."""

    def __init__(self, engine: str) -> None:
        kind: Any = "colbert" if engine.endswith("tokens") else "dense"
        self.card = ModelCard("words", kind, "ab" * 32, WIDTH, "maxsim" if kind == "colbert" else "dot", 99, 99)

    def encode_texts(self, texts: Sequence[str], role: Role, *, progress: bool = False) -> Any:
        matrices = [np.array([word_vector(word) for word in text.split()], np.float32).reshape(-1, WIDTH) for text in texts]
        lengths = np.array([len(matrix) for matrix in matrices], np.int32)
        tokens = TextTokens(lengths, np.zeros(len(texts), bool), np.zeros(len(texts), bool))
        if self.card.kind == "colbert":
            return TokenEncoding(matrices, tokens)
        return DenseEncoding(np.array([matrix.sum(axis=0) for matrix in matrices], np.float32).reshape(-1, WIDTH), tokens)

    def scores(self, query: str, texts: Sequence[str]) -> NDArray[np.float64]:
        """The scores of texts by their definition, in float64."""
        asked = np.array([word_vector(word) for word in query.split()], np.float64)
        matrices = [np.array([word_vector(word) for word in text.split()], np.float64) for text in texts]
        if self.card.kind == "colbert":
            return np.array([(asked @ matrix.T).max(axis=1).sum() for matrix in matrices])
        return np.array([matrix.sum(axis=0) @ asked.sum(axis=0) for matrix in matrices])


def document(key: str, rng: random.Random) -> Document:
    """A document of 8 to 12 words, which say nothing of its id."""
    text = " ".join(f"w{rng.randrange(60)}" for _ in range(rng.randrange(8, 13)))
    return Document(key, text, "", {"n": rng.randrange(20), "name": f"v{rng.randrange(5)}", "note": "filling " * 8})


def build(path: Path, engine: str, documents: Sequence[Document], **options: Any) -> IndexReader:
    chosen = BuildOptions(engine=engine, settings=ENGINES[engine], calibrate=False)
    return build_index(documents, WordModel(engine), path, options=chosen, **options)


def listed(index: IndexReader, **asked: Any) -> list[list[tuple[str, float]]]:
    queries = WordModel(index.kind).encode_texts(QUERIES, "query")
    hits = index.search(queries.vectors, **asked)
    return [list(zip(ids, scores.tolist(), strict=True)) for ids, scores in zip(hits.ids, hits.scores, strict=True)]


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def digests(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): digest(path) for path in sorted(folder.rglob("*")) if path.is_file() and path.name != "LOCK"}


# Damage: bits that flip, sectors that are wiped, files that are cut short or gone.

PARTS = ["vectors", "ids", "texts", "metadata", "manifests", "codec"]
SEARCHES: Mapping[str, Callable[[IndexReader], object]] = {
    "search everything": lambda index: listed(index, k=1000, effort="exact"),
    "search by default": lambda index: listed(index, k=10),
    "search narrowly": lambda index: listed(index, k=3, effort=NARROW[index.kind] or "exact"),
    "search some ids": lambda index: listed(
        index, k=20, effort="exact", filter=Filter(ids=frozenset(name(number) for number in range(0, 900, 7)))
    ),
    "list ids": lambda index: list(index.ids),
    "locate": lambda index: [index.locate([name(number)])[0] is not None for number in range(0, 1000, 3)],
    "score": lambda index: index.scores(WordModel(index.kind).encode_texts(QUERIES[:1], "query").vectors[0], SCORED).tolist(),
}
FILTERED: Mapping[str, Callable[[IndexReader], object]] = {
    "filter numbers": lambda index: listed(index, k=1000, effort="exact", filter=Filter.parse(["n>=7", "n<12"])),
    "filter strings": lambda index: listed(index, k=1000, effort="exact", filter=Filter.parse(["name = 'v3'"])),
    "fields": lambda index: sorted(index.fields),
}
SHOWN: Mapping[str, Callable[[IndexReader], object]] = {"show": lambda index: [tuple(index.document(key)) for key in SCORED]}
USES = {**SEARCHES, **FILTERED, **SHOWN}


def name(number: int) -> str:
    return f"document-{number:05d}-of-the-collection"


SCORED = [name(number) for number in (1, 2, 100, 399, 404, 650, 700, 799)]


def part_of(path: Path, root: Path) -> str:
    """Which part of an index a file belongs to."""
    if path.relative_to(root).parts[0] not in ("segments", "codec") or path.name.startswith("checksum"):
        return "manifests"
    if path.relative_to(root).parts[0] == "codec":
        return "codec"
    for part, prefixes in (("ids", ("ids",)), ("texts", ("texts",)), ("metadata", ("fields",))):
        if path.name.startswith(prefixes):
            return part
    return "vectors"


def collection(path: Path, engine: str) -> list[Document]:
    """An index of three segments and 800 documents with deleted and replaced ones, in several generations; what it holds, in order."""
    rng = random.Random(5)
    documents = [document(name(number), rng) for number in range(830)]
    build(path, engine, documents[:400])
    model = WordModel(engine)
    add_documents(path, documents[400:650], model)
    deleted = [name(number) for number in (*range(10, 30), *range(500, 510))]
    delete_documents(path, deleted)
    later = [document(name(number), rng) for number in (200, 201, 640)]
    add_documents(path, [*documents[650:], *later], model, replace_existing=True)
    gone = {*deleted, *(each.id for each in later)}
    return [*(each for each in documents if each.id not in gone), *later]


@dataclass
class Damage:
    """One damage of one file.

    Attributes:
        path: The file, below the index.
        begin: The first byte that is changed.
        end: One more than the last.
        kind: What is done to it.
    """

    path: Path
    begin: int
    end: int
    kind: str

    @property
    def words(self) -> str:
        return f"{self.kind} {self.path} {self.begin}:{self.end}"


def damaged(root: Path, path: Path, kind: str, rng: random.Random) -> Damage:
    """Damage a file."""
    content = bytearray((root / path).read_bytes())
    place, size = rng.randrange(len(content)), len(content)
    made = Damage(path, place, place + 1, kind)
    if kind == "bit":
        content[place] ^= 1 << rng.randrange(8)
    elif kind == "byte":
        content[place] ^= rng.choice([0xFF, 0x81, 0x3C])
    elif kind == "sector":
        begin = place // 4096 * 4096
        made = Damage(path, begin, min(begin + 4096, size), kind)
        content[begin : begin + 4096] = bytes(made.end - begin)
    elif kind == "cut":
        made = Damage(path, place, size, kind)
        del content[place:]
    else:
        made = Damage(path, 0, size, "missing")
    (root / path).unlink()
    if kind != "missing":
        (root / path).write_bytes(content)
    return made


@dataclass
class Healthy:
    """An index before it is damaged.

    Attributes:
        root: Its folder.
        documents: What it holds, in order.
        answers: What it answers.
        scores: The score of every document for every query.
        place: Document id -> its segment and row there.
        rows: Segment -> rows.
        older: Generation -> what it answers, of those before the newest.
    """

    root: Path
    engine: str
    documents: Sequence[Document]
    answers: Mapping[str, object] = field(init=False)
    scores: Mapping[str, tuple[float, ...]] = field(init=False)
    place: Mapping[str, tuple[str, int]] = field(init=False)
    rows: Mapping[str, int] = field(init=False)
    older: Mapping[int, object] = field(init=False)

    def __post_init__(self) -> None:
        index = open_index(self.root)
        self.answers = {use: action(index) for use, action in USES.items()}
        self.scores = scores_of(index)
        segments = index.manifest.segments
        self.place = {
            each.id: (segments[at.segment].name, at.row)
            for each, at in zip(self.documents, index.locate([each.id for each in self.documents]), strict=True)
            if at is not None
        }
        self.rows = {segment.name: segment.documents for segment in segments}
        if [*index.ids] != [each.id for each in self.documents] or len(self.place) != len(self.documents):
            raise AssertionError("the index does not hold what was added")
        check_brute_force(index, self.documents)
        generations = [each.generation for each in check_index(self.root).generations[:-1]]
        self.older = {number: older_answers(open_index(self.root, generation=number)) for number in generations}

    def near(self, damage: Damage) -> set[str]:
        """Documents that may have bytes in the damaged blocks of a file of a segment; all for what all segments share."""
        if damage.path.parts[0] != "segments":
            return set()
        segment = damage.path.parts[1]
        if segment not in self.rows:
            return set()
        count, size = self.rows[segment], (self.root / damage.path).stat().st_size
        if damage.path.suffix == ".arrow":
            block = range(damage.begin // BLOCK * BLOCK, math.ceil(damage.end / BLOCK) * BLOCK)
            hit = np.zeros(count, bool) | rows_in(self.root / damage.path, block)
            return {key for key, (name, row) in self.place.items() if name == segment and hit[row]}
        slack = 2 if size % count == 0 else 2 + 0.06 * count
        first = damage.begin // BLOCK * BLOCK / size * count - slack
        last = math.ceil(damage.end / BLOCK) * BLOCK / size * count + slack
        return {key for key, (name, row) in self.place.items() if name == segment and first <= row <= last}


def rows_in(path: Path, block: range) -> NDArray[np.bool_]:
    """Rows of an Arrow file that have bytes in a block; all for columns of lists and dictionaries."""
    content = pa.py_buffer(path.read_bytes())
    found = []
    for batch in map(pa.ipc.open_file(content).get_batch, range(pa.ipc.open_file(content).num_record_batches)):
        hit = np.zeros(len(batch), bool)
        for column in batch.columns:
            begins = [0 if each is None else each.address - content.address for each in column.buffers()]
            rows = np.arange(len(batch))
            if pa.types.is_string(column.type):
                offsets = np.frombuffer(column.buffers()[1], np.int32, len(batch) + 1).astype(np.int64)
                spans = [(begins[1] + 4 * rows, begins[1] + 4 * rows + 8), (begins[2] + offsets[:-1], begins[2] + offsets[1:])]
            elif pa.types.is_primitive(column.type):
                width = column.type.bit_width // 8
                spans = [(begins[1] + width * rows, begins[1] + width * (rows + 1))]
            else:
                spans = [(rows * 0, rows * 0 + len(content))]
            for first, last in spans:
                hit |= (first < block.stop) & (last > block.start)
        found.append(hit)
    return np.concatenate(found)


def older_answers(index: IndexReader) -> object:
    return sorted(index.ids), listed(index, k=1000, effort="exact")


def scores_of(index: IndexReader) -> dict[str, tuple[float, ...]]:
    """The scores of every document that is found where everything is looked at."""
    found = [dict(each) for each in listed(index, k=2000, effort="exact")]
    return {key: tuple(each[key] for each in found) for key in found[0]}


def check_brute_force(index: IndexReader, documents: Sequence[Document]) -> float:
    """Compare a search that looks at everything with float64; the largest difference in standard deviations of the scores.

    Raises:
        AssertionError: A document is missing or too many, or the scores are not those of the texts.
    """
    found = listed(index, k=max(1, len(documents)), effort="exact")
    worst = 0.0
    for query, hits in zip(QUERIES, found, strict=True):
        truth = dict(
            zip((each.id for each in documents), WordModel(index.kind).scores(query, [each.text for each in documents]), strict=True)
        )
        if len(hits) != len(truth) or {key for key, _ in hits} != set(truth):
            raise AssertionError(f"{len(hits)} hits of {len(truth)} documents: {sorted({key for key, _ in hits} ^ set(truth))[:5]}")
        spread = float(np.std(list(truth.values()))) or 1.0
        errors = np.abs([score - truth[key] for key, score in hits]) / spread
        worst = max(worst, float(errors.max(initial=0)))
        if errors.max(initial=0) > TOLERANCE[index.kind] or [score for _, score in hits] != sorted(
            (score for _, score in hits), reverse=True
        ):
            raise AssertionError(f"{hits[int(errors.argmax())]} is {errors.max():.3g} standard deviations from float64")
    return worst


TOLERANCE = {"exact-dense": 1e-5, "ivf-dense": 0.1, "ivf-tokens": 1.5}


def used(index: IndexReader) -> dict[str, object]:
    """What an index answers; an exception where it says that something is damaged."""
    found: dict[str, object] = {}
    for use, action in USES.items():
        try:
            found[use] = action(index)
        except DamagedIndexError as error:
            found[use] = error
    return found


class Trial:
    """One damaged copy of an index."""

    def __init__(self, healthy: Healthy, work: Path, damage: Damage, counts: Counter[str]) -> None:
        self.healthy, self.work, self.damage, self.counts = healthy, work, damage, counts
        self.part = part_of(work / damage.path, work)
        self.model = WordModel(healthy.engine)

    def wrong(self, *words: object) -> None:
        self.counts["wrong"] += 1
        say("WRONG", self.healthy.engine, self.damage.words, *words)

    def ask(self) -> None:
        """Use it: an answer is right, or an exception says that something is damaged; what is damaged does not hurt the rest."""
        try:
            index = open_index(self.work)
        except DamagedIndexError as error:
            self.counts["refused to open"] += 1
            if self.part in ("texts", "metadata") and self.damage.kind != "missing":
                self.wrong("an index with damaged", self.part, "does not open:", error)
            return
        for use, answer in used(index).items():
            if isinstance(answer, Exception):
                self.counts["refused"] += 1
                if (self.part == "texts" and use not in SHOWN) or (self.part == "metadata" and use in SEARCHES):
                    self.wrong(f"'{use}' is hurt by damaged {self.part}:", answer)
            elif answer != self.healthy.answers[use]:
                self.wrong(f"'{use}' answers otherwise, silently")
        self.ask_older()

    def ask_older(self) -> None:
        for number, right in self.healthy.older.items():
            try:
                if older_answers(open_index(self.work, generation=number)) != right:
                    self.wrong("generation", number, "answers otherwise, silently")
            except InputError:
                self.counts["older refused"] += 1

    def check(self) -> None:
        """A check sees every damage; a manifest of an older state that is gone is none, as old states go."""
        try:
            report = check_index(self.work)
        except DamagedIndexError:
            return
        newest = max(self.healthy.root.glob("manifests/*")).name
        if self.damage.kind == "missing" and self.damage.path.parts[0] == "manifests" and self.damage.path.name != newest:
            return
        if not report.problems and not any(each.problems for each in report.generations):
            self.wrong("a check finds nothing")

    def repair(self, *, compare: bool) -> None:
        """Repair it: what is healthy is kept, and what is lost is named."""
        before = digests(self.work) if compare else {}
        planned = None
        try:
            if compare:
                planned = repair_index(self.work, model=self.model, dry_run=True)
                if digests(self.work) != before:
                    self.wrong("a dry run changes files")
            report = repair_index(self.work, model=self.model)
        except InputError as error:
            self.wrong("repair refuses:", type(error).__name__, error)
            return
        if compare:
            after = set(digests(self.work).values())
            if gone := [path for path, content in before.items() if content not in after]:
                self.wrong("repair has deleted", gone)
            if planned is not None and (planned.lost, planned.lost_unnamed, planned.documents, planned.encoded) != (
                report.lost, report.lost_unnamed, report.documents, report.encoded
            ):  # fmt: skip
                self.wrong("the dry run said otherwise than the repair did", planned, report)
        self.compare(report)

    def compare(self, report: Any) -> None:
        """Compare a repaired index with what it was."""
        if check_index(self.work).problems:
            self.wrong("it is damaged after repair:", check_index(self.work).problems)
            return
        healthy, near = self.healthy, self.healthy.near(self.damage)
        index = open_index(self.work)
        there, scores = set(index.ids), scores_of(index)
        if len(there) != len(index):
            self.wrong(f"{len(index) - len(there)} ids are there twice")
        expected = list(healthy.documents)
        lost = {each.id for each in expected} - there
        self.counts["documents lost"] += len(lost)
        self.counts["lost without name"] += report.lost_unnamed
        if set(report.encoded) - near:
            self.wrong("healthy documents were encoded again:", sorted(set(report.encoded) - near)[:3])
        self.counts["encoded again"] += len(report.encoded)
        if not set(report.lost) <= lost or len(lost) > len(report.lost) + report.lost_unnamed:
            self.wrong(f"{len(lost)} documents are gone where {len(report.lost)} + {report.lost_unnamed} are reported")
        if lost - near:
            self.wrong(f"{len(lost - near)} healthy documents are lost, such as", sorted(lost - near)[:3])
        if self.part in ("metadata", "manifests", "codec") and lost:
            self.wrong(f"damaged {self.part} cost {len(lost)} documents")
        back = there - {each.id for each in expected}
        if len(back) > report.undone_deletions or (back and self.damage.kind in ("bit", "byte")):
            self.wrong(f"{len(back)} deleted documents return, {report.undone_deletions} reported")
        self.counts["deleted documents back"] += len(back)
        if report.documents != len(index):
            self.wrong(f"{len(index)} documents where the report says {report.documents}")
        self.compare_documents(index, scores, report)

    def compare_documents(self, index: IndexReader, scores: Mapping[str, tuple[float, ...]], report: Any) -> None:
        """Everything that is there is what it was: the scores of what was encoded again may differ in the last bits."""
        for each in self.healthy.documents:
            if each.id not in scores:
                continue
            right, found = self.healthy.scores[each.id], index.document(each.id)
            same = np.allclose(scores[each.id], right, rtol=1e-4, atol=1e-4) if each.id in report.encoded else scores[each.id] == right
            if not same:
                self.wrong(f"{each.id} is scored {scores.get(each.id)}, not {right}")
            if (found.text, found.metadata) != (each.text, each.metadata):
                self.wrong(f"{each.id} has become {found}")


def damage_many(folder: Path, engine: str, kinds: Callable[[random.Random], str], parts: Sequence[str], count: int, seed: int) -> None:
    """Damage a copy of an index again and again, use it, and repair it."""
    base, work = folder / "base", folder / "work"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    healthy = Healthy(base, engine, collection(base, engine))
    files = [path.relative_to(base) for path in sorted(base.rglob("*")) if path.is_file() and path.stat().st_size and path.name != "LOCK"]
    chosen = [path for path in files if part_of(base / path, base) in parts]
    say(len(chosen), "files:", *chosen)
    counts = Counter[str]()
    for number in range(count):
        rng = random.Random(seed * 1_000_003 + number)
        shutil.rmtree(work, ignore_errors=True)
        shutil.copytree(base, work)
        trial = Trial(healthy, work, damaged(work, rng.choice(chosen), kinds(rng), rng), counts)
        counts[trial.damage.kind] += 1
        try:
            trial.ask()
            trial.check()
            trial.repair(compare=number % 10 == 0)
        except Exception as error:
            trial.wrong("raises", type(error).__name__, error, traceback.format_exc().splitlines()[-3:])
        if number % 100 == 99:
            say("after", number + 1, *(f"| {key}: {value}" for key, value in sorted(counts.items())))
    shutil.rmtree(work, ignore_errors=True)
    say("damaged", count, engine, *parts, *(f"| {key}: {value}" for key, value in sorted(counts.items())))


def bit_or_byte(rng: random.Random) -> str:
    return rng.choice(["bit", "byte"])


def spoiling(rng: random.Random) -> str:
    return rng.choice(["sector", "cut", "missing"])


# Kills.


class Change(NamedTuple):
    """A change of an index.

    Attributes:
        kind: add, replace, delete, compact, refresh or build.
        documents: What it adds.
        ids: What it deletes.
    """

    kind: str
    documents: tuple[Document, ...] = ()
    ids: tuple[str, ...] = ()

    def on(self, live: Mapping[str, Document]) -> dict[str, Document]:
        """What there is afterwards."""
        gone = {*(live if self.kind == "build" else self.ids), *(each.id for each in self.documents)}
        return {key: value for key, value in live.items() if key not in gone} | {each.id: each for each in self.documents}

    def run(self, path: Path, engine: str, live: Mapping[str, Document]) -> IndexReader:
        if self.kind == "compact":
            return compact_index(path)
        if self.kind == "build":
            return build(path, engine, self.documents, overwrite=True)
        if self.kind == "refresh":
            source = path.with_suffix(".jsonl")
            lines = [{"_id": key, "text": each.text, **(each.metadata or {})} for key, each in self.on(live).items()]
            source.write_text("".join(json.dumps(line) + "\n" for line in lines))
            return refresh_index(path, WordModel(engine), source, force=True).index
        if self.kind == "delete":
            return delete_documents(path, self.ids)
        return add_documents(path, self.documents, WordModel(engine), replace_existing=self.kind == "replace")


def drawn(live: Mapping[str, Document], rng: random.Random) -> Change:
    """A change by chance, such that some hundred documents are there."""
    kinds = ["add", "replace", "delete", "compact", "refresh", "build"]
    kind = rng.choices(kinds, [5, 2, 3 if len(live) < 500 else 8, 2, 2, 1])[0]
    if kind == "compact":
        return Change(kind)
    count = rng.choice([1, 2, 5, 20, 60])
    if kind == "delete":
        return Change(kind, ids=tuple(rng.sample(sorted(live), min(count, len(live) // 3))))
    there = rng.sample(sorted(live), min(count // 2, len(live))) if kind in ("replace", "refresh") else []
    gone = rng.sample(sorted(live.keys() - there), min(count // 3, len(live) // 3)) if kind == "refresh" else []
    fresh = [f"k{rng.getrandbits(48):012x}" for _ in range(300 if kind == "build" else count - len(there))]
    return Change(kind, tuple(document(key, rng) for key in (*there, *fresh)), tuple(gone))


def digest_of(live: Mapping[str, Document]) -> str:
    return hashlib.sha256(repr(sorted((key, each.text) for key, each in live.items())).encode()).hexdigest()[:16]


def write(path: Path, engine: str, live: dict[str, Document], first: Change | None, seed: int, log: Path) -> None:
    """Change an index for ever; what has been acknowledged is written down."""
    rng = random.Random(seed)
    with log.open("a") as file:
        while True:
            change = first or drawn(live, rng)
            first = None
            file.write(json.dumps(["begun", change]) + "\n")
            file.flush()
            index = change.run(path, engine, live)
            live = change.on(live)
            file.write(json.dumps(["done", index.manifest.generation, digest_of(live)]) + "\n")
            file.flush()


def read(path: Path, engine: str, stop: int, log: Path, seed: int) -> None:
    """Open and search until something comes through the pipe; each snapshot is compared with float64 over the documents that it shows."""
    held: list[tuple[IndexReader, object]] = []
    rng = random.Random(seed)
    with log.open("a") as file:
        while not select.select([stop], [], [], 0.01)[0]:
            index = open_index(path)
            documents = list(index.documents)
            if [each.id for each in documents] != list(index.ids) or len(set(index.ids)) != len(documents):
                raise AssertionError("ids and documents differ")
            check_brute_force(index, documents)
            file.write(json.dumps([index.manifest.generation, digest_of({each.id: each for each in documents})]) + "\n")
            file.flush()
            held.append((index, listed(index, k=20)))
            if len(held) > 4:
                former, answer = held.pop(rng.randrange(len(held)))
                if listed(former, k=20) != answer or len(list(former.documents)) != len(former):
                    raise AssertionError("an open index has changed")


def fork(action: Callable[[], None]) -> int:
    """Run something in a child; its exit status is 1 if it raises."""
    sys.stdout.flush()
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        action()
        code = 0
    except BaseException as error:
        say("WRONG a child raises", type(error).__name__, error, traceback.format_exc().splitlines()[-4:])
    os._exit(code)


def lines_of(log: Path) -> Iterator[Any]:
    if log.exists():
        for line in log.read_text().splitlines(keepends=True):
            if line.endswith("\n"):
                yield json.loads(line)


def kill(folder: Path, engine: str, kills: int, seed: int) -> None:
    """Kill a writer at random moments, again and again, while two readers search; compare what is there with what was acknowledged."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    path, rng, counts = folder / "index", random.Random(seed), Counter[str]()
    live = {f"a{number}": document(f"a{number}", rng) for number in range(300)}
    build(path, engine, list(live.values()))
    states = {open_index(path).manifest.generation: digest_of(live)}
    # Compiled code is loaded here once, and not by every child.
    check_brute_force(open_index(path), list(live.values()))
    warm = folder / "warm"
    build(warm, engine, list(live.values()))
    add_documents(warm, [document("k", rng)], WordModel(engine))
    compact_index(delete_documents(warm, ["k"]).path)
    stop, stopping = os.pipe()
    readers = [fork(partial(read, path, engine, stop, folder / f"reader{number}", number)) for number in range(2)]
    pending: Change | None = None
    for number in range(kills):
        log = folder / f"writer{number}"
        # Half the changes that were killed are repeated first; another change goes ahead of the others, and they never come.
        first = pending if pending is not None and rng.random() < 0.5 else None
        counts["repeated"] += first is not None
        writer = fork(partial(write, path, engine, live, first, seed * 1_000_003 + number, log))
        time.sleep(0.02 + rng.random() * rng.choice([0.1, 0.4, 1.2]))
        os.kill(writer, signal.SIGKILL)
        if os.waitstatus_to_exitcode(os.waitpid(writer, 0)[1]) != -signal.SIGKILL:
            counts["wrong"] += 1
            say("WRONG", engine, "kill", number, "the writer had ended; it had begun", (first or "a new change") and str(first)[:200])
        live, pending = settled(path, engine, log, live, states, counts, number)
        log.unlink(missing_ok=True)
    os.write(stopping, b"x")
    codes = [os.waitstatus_to_exitcode(os.waitpid(reader, 0)[1]) for reader in readers]
    seen = [tuple(line) for number in range(2) for line in lines_of(folder / f"reader{number}")]
    for generation, found in seen:
        if states.setdefault(generation, found) != found:
            counts["wrong"] += 1
            say("WRONG", engine, "a reader saw a state of generation", generation, "that was never committed")
    counts["wrong"] += sum(codes)
    say(
        "killed", kills, engine, "| readers:", *codes, "| read:", len(seen), *(f"| {key}: {value}" for key, value in sorted(counts.items()))
    )


def settled(
    path: Path, engine: str, log: Path, live: dict[str, Document], states: dict[int, str], counts: Counter[str], number: int
) -> tuple[dict[str, Document], Change | None]:
    """What an index holds after its writer was killed, and the change that it had begun and that is not there."""
    pending: Change | None = None
    for line in lines_of(log):
        if line[0] == "begun":
            kind, documents, ids = line[1]
            pending = Change(kind, tuple(Document(*each) for each in documents), tuple(ids))
        elif pending is not None:
            live, pending = pending.on(live), None
            counts["acknowledged"] += 1
            states[line[1]] = line[2]
    index = open_index(path)
    found = {each.id: each for each in index.documents}
    if pending is not None:
        counts[f"killed in {pending.kind}"] += 1
    if pending is not None and pending.kind != "compact" and digest_of(found) == digest_of(pending.on(live)):
        counts["committed, not acknowledged"] += 1
        live, pending = pending.on(live), None
    problems = check_index(path).problems
    if problems or digest_of(found) != digest_of(live):
        counts["wrong"] += 1
        say(
            "WRONG",
            engine,
            "kill",
            number,
            problems,
            "missing",
            sorted(set(live) - set(found))[:5],
            "too many",
            sorted(set(found) - set(live))[:5],
        )
        live = found
    try:
        check_brute_force(index, list(found.values()))
    except AssertionError as error:
        counts["wrong"] += 1
        say("WRONG", engine, "kill", number, error)
    states[index.manifest.generation] = digest_of(live)
    return live, pending


# Full disks.


def fill(folder: Path, engine: str, count: int, seed: int) -> None:
    """Leave too little room for a change of an index, again and again, on a small disk that is mounted here for this process alone."""
    folder.mkdir(parents=True, exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=24m,nr_inodes=2000", "quiver", folder], check=True)
    counts, rng = Counter[str](), random.Random(seed)
    base, path, filler = folder / "base", folder / "index", folder / "filler"
    documents = [document(f"a{number}", rng) for number in range(300)]
    live = {each.id: each for each in documents}
    build(base, engine, documents)
    for _ in range(3):
        change = drawn(live, rng)
        change.run(base, engine, live)
        live = change.on(live)
    number, most = 0, dict.fromkeys(ROOM, 700)
    while counts["without room"] < count:
        fill_once(base, path, filler, engine, live, number, rng, counts, most)
        number += 1
    say("filled", number, engine, *(f"| {key}: {value}" for key, value in sorted(counts.items())))


ROOM = ("add", "replace", "delete", "compact", "build", "repair")


def fill_once(
    base: Path,
    path: Path,
    filler: Path,
    engine: str,
    live: dict[str, Document],
    number: int,
    rng: random.Random,
    counts: Counter[str],
    most: dict[str, int],
) -> None:
    """Do something that may find no room: the state is the one before or the one after, and with room again it succeeds."""
    shutil.rmtree(path, ignore_errors=True)
    operation = ROOM[number % len(ROOM)]
    if operation != "build":
        shutil.copytree(base, path)
    change = Change("compact")
    while operation in ("add", "replace", "delete") and change.kind != operation:
        change = drawn(live, rng)
    if operation == "repair":
        flip_vector(path)
    acts: Mapping[str, Callable[[], object]] = {
        "build": lambda: build(path, engine, list(live.values())),
        "repair": lambda: repair_index(path, model=WordModel(engine)),
    }
    act, after = acts.get(operation, lambda: change.run(path, engine, live)), change.on(live)
    pages = rng.randrange(most[operation])
    room, inodes = pages * 4096, rng.randrange(1, 30) if rng.random() < 0.25 else None
    full = take_room(filler, room, inodes)
    try:
        outcome = attempted(act)
        counts[f"{operation} {outcome}"] += 1
        counts["without room"] += outcome == "had no room"
        if inodes is None:  # most rooms are to be too small, and hardly
            most[operation] = max(4, pages) if outcome == "had room" else min(700, most[operation] * 5 // 4 + 1)
        if operation not in ("build", "repair"):
            expect(path, (live, after))
        shutil.rmtree(full)
        again(act)
        expect(path, (after,))
        if problems := check_index(path).problems:
            raise AssertionError(problems)
    except Exception as error:
        counts["wrong"] += 1
        words = (engine, "full disk", number, operation, f"room {room}, inodes {inodes}:")
        say("WRONG", *words, type(error).__name__, error, traceback.format_exc().splitlines()[-4:])
    finally:
        shutil.rmtree(full, ignore_errors=True)


def flip_vector(path: Path) -> None:
    """Flip one bit of a vector, whose document repair encodes again."""
    name = {"exact-dense": "vectors.f32", "ivf-dense": "fine.i8", "ivf-tokens": "fine.u8"}[open_index(path).kind]
    victim = min(path.glob(f"segments/*/{name}"))
    content = victim.read_bytes()
    victim.write_bytes(content[:5] + bytes([content[5] ^ 4]) + content[6:])


def attempted(act: Callable[[], object]) -> str:
    """Do something; whether there was room. Any other error goes on."""
    try:
        act()
    except DamagedIndexError:
        raise
    except InputError:
        return "had no room"
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        return "had no room"
    return "had room"


def again(act: Callable[[], object]) -> None:
    """Do something once more, which may have been done."""
    try:
        act()
    except InputError as error:
        if "already" not in str(error) and "is not in this index" not in str(error):
            raise


def take_room(filler: Path, room: int, inodes: int | None) -> Path:
    """Leave so many bytes, and so many files where a number is given."""
    filler.mkdir()
    if inodes is not None:
        free = os.statvfs(filler).f_ffree
        for number in range(free - inodes):
            (filler / f"empty{number}").touch()
        return filler
    free = os.statvfs(filler).f_bavail * os.statvfs(filler).f_frsize
    with (filler / "full").open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, max(1, free - room))
    return filler


def expect(path: Path, states: Sequence[Mapping[str, Document]]) -> None:
    index = open_index(path)
    found = {each.id: each for each in index.documents}
    if digest_of(found) not in {digest_of(state) for state in states}:
        raise AssertionError("neither the state before nor the one after")
    check_brute_force(index, list(found.values()))


if __name__ == "__main__":
    command, where, engine, *rest = sys.argv[1:]
    if command == "kill":
        kill(Path(where), engine, *map(int, rest))
    elif command == "flip":
        damage_many(Path(where), engine, bit_or_byte, [rest[0]], *map(int, rest[1:]))
    elif command == "spoil":
        damage_many(Path(where), engine, spoiling, PARTS, *map(int, rest))
    else:
        fill(Path(where), engine, *map(int, rest))
