"""The measuring itself: every index is built in a process of its own; then all are opened, each in one, and asked in turns.

A process may use as many CPUs as the benchmark says and no more, whatever a library thinks of settings. What fails is told in a line,
and the others go on.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from quiver.eval.bench.encoder.children import Child, ChildError, Killed
from quiver.eval.bench.encoder.results import OWN
from quiver.eval.bench.index.child import MODULE, ChildSettings, IndexChild
from quiver.eval.bench.index.results import Build, FinishedBuild, IndexSettings, Memory, read_build, write_build
from quiver.eval.bench.index.systems import System
from quiver.eval.bench.index.truth import Exact, fault
from quiver.eval.bench.index.vectors import VectorFolder
from quiver.retrieval.progress import Advance, progress_bar

THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS", "RAYON_NUM_THREADS")
"""Variables by which libraries are told their threads."""


TIMEOUT = 7200.0
"""Seconds that a library may take for one task where nobody says otherwise: a build, or one pass over all queries."""


@dataclass(frozen=True)
class Running:
    """How a benchmark is run, of what decides nothing about its results.

    Attributes:
        progress: Show bars on standard error.
        timeout: Seconds that a library may take for one task; one that takes longer is stopped, and told of as what failed.
        module: What the children run; another one in tests.
    """

    progress: bool = False
    timeout: float = TIMEOUT
    module: str = MODULE


@dataclass
class Measured:
    """What is taken down of a point."""

    rounds: list[list[float]] = field(default_factory=list)
    processor: list[float] = field(default_factory=list)
    found: dict[int, list[list[int]]] = field(default_factory=dict)
    deep: list[float] = field(default_factory=list)
    seconds: dict[int, list[float]] = field(default_factory=dict)


@dataclass
class Subject:
    """A system while it is measured; ``failed`` is why it is no longer."""

    system: System
    key: str
    folder: Path
    parameters: Mapping[str, Any] = field(default_factory=dict)
    build: Build | None = None
    memory: Memory | None = None
    points: dict[int, Measured] = field(default_factory=dict)
    refused: dict[int, str] = field(default_factory=dict)
    failed: str | None = None


class Measuring:
    """Builds and asks; what it takes down is in the subjects."""

    def __init__(self, vectors: VectorFolder, settings: IndexSettings, running: Running, exact: Exact | None) -> None:
        self._vectors, self._settings, self._running = vectors, settings, running
        self._exact = exact
        self._rows = {key: row for row, key in enumerate(vectors.ids)}

    def measure(self, subjects: Sequence[Subject]) -> None:
        """Build all, then ask all that could be built."""
        progress = self._running.progress
        with progress_bar("building", len(subjects), enabled=progress) as advance:
            for subject in subjects:
                with _telling(subject):
                    self._build(subject)
                advance(1)
        rounds, points = self._settings.rounds, sum(len(subject.system.points) for subject in subjects if subject.failed is None)
        passes = points * (rounds + 2 * (self._exact is not None) + (self._exact is None) + rounds * len(self._settings.threads))
        with progress_bar("searching", passes, enabled=progress) as advance:
            for threads in sorted({1, *self._settings.threads}):
                with ExitStack() as stack:
                    children = self._opened(subjects, threads, stack)
                    if threads == 1:
                        self._single(subjects, children, advance)
                    if threads in self._settings.threads:
                        self._together(subjects, children, threads, advance)

    def _build(self, subject: Subject) -> None:
        record = subject.folder.with_name(f"{subject.folder.name}.json")
        done = read_build(record, subject.key)
        if done is not None:
            subject.build, subject.parameters = done.build, done.parameters
            return
        record.unlink(missing_ok=True)
        shutil.rmtree(subject.folder, ignore_errors=True)
        subject.folder.parent.mkdir(parents=True, exist_ok=True)
        with self._child(subject, self._settings.build_threads, opened=False) as child:
            answer = _asked(child, {"task": "build"})
        disk = sum(path.stat().st_size for path in subject.folder.rglob("*") if path.is_file())
        seconds = {name: answer[name] for name in ("seconds", "processor_seconds", "before", "peak")}
        subject.build, subject.parameters = Build(disk=disk, **seconds), answer["parameters"]
        write_build(FinishedBuild(subject.key, subject.build, subject.parameters), record)

    def _single(self, subjects: Sequence[Subject], children: Mapping[str, Child], advance: Advance) -> None:
        """One query at a time on one thread, all systems in turns; the first pass, which is not timed, is looked at."""
        for subject, place in _turns(subjects, children):
            with _telling(subject):
                self._first_pass(subject, place, children[subject.system.name])
            advance(1 if self._exact is None else 2)
        for number in range(self._settings.rounds):
            for subject, place in _turns(subjects, children, backwards=number % 2 == 1):
                with _telling(subject):
                    answer = _asked(children[subject.system.name], self._request("each", place, self._settings.k))
                    subject.points[place].rounds.append(answer["milliseconds"])
                    subject.points[place].processor.append(1000 * answer["processor_seconds"] / len(answer["milliseconds"]))
                advance(1)
        for subject in subjects:
            if subject.failed is None:
                with _telling(subject):
                    subject.memory = Memory(**_asked(children[subject.system.name], {"task": "memory"}))

    def _first_pass(self, subject: Subject, place: int, child: Child) -> None:
        measured = Measured()
        depths = [self._settings.k] if self._exact is None else [self._settings.deep, self._settings.k]
        for k in depths:
            answer = _asked(child, {**self._request("each", place, k), "rows": True})
            if "refused" in answer:
                subject.refused[place] = answer["refused"]
                return
            rows = [[self._row(each) for each in found] for found in answer["rows"]]
            wrong = fault(rows, documents=len(self._vectors), queries=len(self._vectors.queries), k=k)
            if wrong is not None:
                raise ChildError(f"{subject.system.points[place].name}: {wrong}")
            measured.found[k] = rows
            measured.deep = measured.deep or answer["milliseconds"]
        subject.points[place] = measured

    def _together(self, subjects: Sequence[Subject], children: Mapping[str, Child], threads: int, advance: Advance) -> None:
        """All queries in one call, all systems in turns."""
        for number in range(self._settings.rounds):
            for subject, place in _turns(subjects, children, backwards=number % 2 == 1):
                with _telling(subject):
                    answer = _asked(children[subject.system.name], self._request("all", place, self._settings.k))
                    subject.points[place].seconds.setdefault(threads, []).append(answer["seconds"])
                advance(1)

    def _opened(self, subjects: Sequence[Subject], threads: int, stack: ExitStack) -> dict[str, Child]:
        children = {}
        for subject in subjects:
            if subject.failed is None:
                with _telling(subject):
                    children[subject.system.name] = stack.enter_context(self._child(subject, threads, opened=True))
        return children

    def _child(self, subject: Subject, threads: int, *, opened: bool) -> Child:
        vectors = {name: value for name, value in asdict(self._vectors).items() if name != "path"}
        opening = IndexChild(
            subject.system.library,
            str(self._vectors.path),
            vectors,
            subject.system,
            str(subject.folder.resolve()),
            opened,
            ChildSettings(threads),
        )
        with _cpus(threads):
            environment = _environment(subject.system, threads, opened=opened)
            return Child(opening, module=self._running.module, environment=environment, timeout=self._running.timeout)

    def _row(self, found: int | str) -> int:
        """The row of a document that was found, by row or by id; -1 for an id that no document has."""
        return self._rows.get(found, -1) if isinstance(found, str) else found

    def _request(self, task: str, place: int, k: int) -> dict[str, Any]:
        return {"task": task, "point": place, "k": k, "rows": False}


def _environment(system: System, threads: int, *, opened: bool) -> dict[str, str]:
    """What a child is told of threads; a search of Quiver is asked by so many threads of Python, each of which has one."""
    return dict.fromkeys(THREADS, str(1 if opened and system.library == OWN else threads))


@contextmanager
def _cpus(threads: int) -> Iterator[None]:
    """Let what is started in the block use so many CPUs, where the system can say so: some libraries take what they see."""
    if not hasattr(os, "sched_setaffinity"):
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, set(sorted(before)[:threads]))
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


@contextmanager
def _telling(subject: Subject) -> Iterator[None]:
    """A child that fails ends its system and no other."""
    try:
        yield
    except (ChildError, Killed) as error:
        subject.failed = str(error)


def _asked(child: Child, request: dict[str, Any]) -> dict[str, Any]:
    answer = child.ask(request)
    if answer.get("out_of_memory"):
        raise ChildError("out of memory")
    return answer


def _turns(subjects: Sequence[Subject], children: Mapping[str, Child], *, backwards: bool = False) -> Iterator[tuple[Subject, int]]:
    """Systems and their points that are still measured: the first points of all systems, then the second ones."""
    most = max((len(subject.system.points) for subject in subjects), default=0)
    turns = [(subject, place) for place in range(most) for subject in subjects if place < len(subject.system.points)]
    for subject, place in turns[:: -1 if backwards else 1]:
        if subject.system.name in children and subject.failed is None and place not in subject.refused:
            yield subject, place
