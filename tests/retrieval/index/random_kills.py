"""Kills at random moments against the public interface of an index; run as a script, it prints a line for everything that is wrong.

``python random_kills.py FOLDER ENGINE KILLS SEED`` kills a writer while two readers search. A line that starts with WRONG says what is
wrong and how to repeat it; the last line counts what happened.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import select
import shutil
import signal
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from faults import Words, listed, say, word_vector
from numpy.typing import NDArray

from quiver.retrieval.index import (
    BuildOptions,
    IndexReader,
    add_documents,
    build_index,
    check_index,
    compact_index,
    delete_documents,
    open_index,
    refresh_index,
)
from quiver.retrieval.records import Document

ENGINES: Mapping[str, Mapping[str, Any]] = {"exact-dense": {}, "ivf-dense": {"nlist": 4}, "ivf-tokens": {"centroids": 16}}
QUERIES = ["w3 w5 w8", "w1 w1", "w40 w41 w42 w43"]


class WordModel(Words):
    """A model whose vectors follow from the words: one for each word, or their sum."""

    def __init__(self, engine: str) -> None:
        super().__init__("colbert" if engine.endswith("tokens") else "dense")

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


def search(index: IndexReader, **asked: Any) -> list[list[tuple[str, float]]]:
    return listed(index.search(WordModel(index.kind).encode_texts(QUERIES, "query").vectors, **asked))


def check_brute_force(index: IndexReader, documents: Sequence[Document]) -> float:
    """Compare a search that looks at everything with float64; the largest difference in standard deviations of the scores.

    Raises:
        AssertionError: A document is missing or too many, or the scores are not those of the texts.
    """
    found = search(index, k=max(1, len(documents)), effort="exact")
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
            held.append((index, search(index, k=20)))
            if len(held) > 4:
                former, answer = held.pop(rng.randrange(len(held)))
                if search(former, k=20) != answer or len(list(former.documents)) != len(former):
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


if __name__ == "__main__":
    where, engine, *rest = sys.argv[1:]
    kill(Path(where), engine, *map(int, rest))
