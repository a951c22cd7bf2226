"""Index benchmark: recall, latency, size and cost of Quiver's engines, compared with other libraries on the same vectors.

Every index is built in its own process. Then all indexes are opened, each in its own process, and searched in turns. The settings limit the
number of CPUs per process. Recall is measured against exact search over the stored vectors. If a system fails, the failure is reported and
the others continue. Finished systems are saved and not measured again when the command is repeated.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from statistics import median
from time import perf_counter, process_time
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from quiver.encoder.environment import installed_version, resident
from quiver.encoder.errors import InputError
from quiver.encoder.progress import Advance, progress_bar
from quiver.eval.bench.child import Answer, Child, ChildError, KilledError, checked, reset_peak
from quiver.eval.bench.harness import Recording, interleave
from quiver.eval.bench.index_backends import LIBRARIES, NOT_COMPARED, OpenIndex, Point, System, unsupported_reason
from quiver.eval.bench.index_data import ExactHits, VectorFolder, exact_search, invalid_hits, ndcg, recall
from quiver.eval.bench.report import (
    MEBIBYTE,
    Column,
    backend,
    draw_search,
    make_report,
    over_rounds,
    rows_table,
    short_name,
    single,
    variant,
)
from quiver.eval.bench.results import OWN, Benchmark, Case, FinishedRows, NotRun, Row, Scalar, Series, file_name
from quiver.eval.report.formats import Details, Paragraph, Report, Section
from quiver.retrieval.index.engines import format_settings

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Drawing

SEARCH, BUILD = "search", "build"
"""Names of the two cases: one row per system and point, and one row per system."""

TIMEOUT = 7200.0
"""Default time limit of a build or of one pass over all queries, in seconds."""

# Environment variables that set the number of threads in libraries.
_THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS", "RAYON_NUM_THREADS")


@dataclass(frozen=True)
class Settings:
    """Settings of the index benchmark.

    Attributes:
        k: Hits per query of the timed searches.
        deep: Hits per query of one additional pass, for the recall at that depth.
        rounds: Timed passes over all queries, after one warm-up pass.
        threads: Numbers of threads to measure throughput with; single queries use one thread.
        build_threads: Threads for building.
    """

    k: int = 10
    deep: int = 100
    rounds: int = 3
    threads: tuple[int, ...] = (1,)
    build_threads: int = 1


@dataclass(frozen=True)
class Running:
    """Options that do not affect the measurements.

    Attributes:
        progress: Show progress bars.
        timeout: Time limit of a build or of one pass over all queries, in seconds; a system that exceeds it is stopped and left out.
        target: Target of child processes; see `quiver.eval.bench.child`.
    """

    progress: bool = False
    timeout: float = TIMEOUT
    target: str = "quiver.eval.bench.index:open_system"


@dataclass
class _Measured:
    """Measurements of one point."""

    rounds: list[list[float]] = field(default_factory=list)
    processor: list[float] = field(default_factory=list)
    found: dict[int, list[list[int]]] = field(default_factory=dict)
    deep: list[float] = field(default_factory=list)
    seconds: dict[int, list[float]] = field(default_factory=dict)


@dataclass
class _State:
    """A system while it is measured; ``failed`` is the reason why it was dropped."""

    system: System
    key: str
    folder: Path
    build: dict[str, Scalar] = field(default_factory=dict)
    memory: dict[str, Scalar] = field(default_factory=dict)
    points: dict[int, _Measured] = field(default_factory=dict)
    refused: dict[int, str] = field(default_factory=dict)
    failed: str | None = None


DEFAULTS = Running()


def bench_index(
    vectors: VectorFolder,
    systems: Sequence[System],
    settings: Settings,
    *,
    work: Path,
    name: str,
    model: str | None = None,
    command: str | None = None,
    running: Running = DEFAULTS,
) -> Benchmark:
    """Build and search indexes of the same vectors, and measure them.

    Args:
        vectors: Documents and queries.
        systems: Indexes with different names. A system whose library is not installed is left out.
        settings: Settings of the benchmark.
        work: Folder for indexes and finished measurements; created if missing.
        name: Name of the data.
        model: Model that encoded the vectors; None if unknown.
        command: Command line to record.
        running: Progress, time limit and child process.

    Raises:
        InputError: The vectors are damaged, or nothing could be measured.
        ValueError: Two systems have the same name, or a setting is out of range.
    """
    _check(systems, settings, running)
    vectors.check()
    recording, fingerprint = Recording("index", name, settings, command), vectors.fingerprint()
    not_run = [NotRun(library, reason) for library, reason in NOT_COMPARED[vectors.kind].items()]
    finished = FinishedRows(work / "finished")
    done: dict[str, Mapping[str, tuple[Row, ...]]] = {}
    states = []
    for system in systems:
        if reason := unsupported_reason(system.library):
            not_run.append(NotRun(system.name, reason))
            continue
        key = _key(system, fingerprint, settings)
        saved = finished.load(system.name, key)
        if saved is not None:
            done[system.name] = saved
        else:
            states.append(_State(system, key, work / "indexes" / file_name(system.name)))
    exact_folder = work / f"exact-{fingerprint[:16]}-{settings.deep}"
    exact = {} if vectors.synthetic is not None else _exact_hits(vectors, settings, systems, exact_folder)
    _Measuring(vectors, settings, running, exact.get(None)).measure(states, FinishedRows(work / "indexes"))
    date = datetime.now(timezone.utc).isoformat(timespec="seconds")
    for state in states:
        not_run += [NotRun(f"{state.system.name} {state.system.points[position].name}", why) for position, why in state.refused.items()]
        if state.failed is None and not state.points:
            state.failed = "no search parameters were accepted"
        if state.failed is not None:
            not_run.append(NotRun(state.system.name, state.failed))
            continue
        done[state.system.name] = _rows(state, vectors, settings, exact, date)
        finished.save(state.system.name, state.key, done[state.system.name])
    ordered = [done[system.name] for system in systems if system.name in done]
    if not ordered:
        raise InputError("nothing could be measured: " + "; ".join(f"{each.what}: {each.reason}" for each in not_run))
    shutil.rmtree(work / "indexes", ignore_errors=True)
    return recording.benchmark(
        metadata=_metadata(vectors, model, exact.get(None)),
        cases=[
            Case(SEARCH, "Search", {}, tuple(row for rows in ordered for row in rows[SEARCH])),
            Case(BUILD, "Build, disk and memory", {}, tuple(row for rows in ordered for row in rows[BUILD])),
        ],
        not_run=not_run,
        threads=max(settings.threads),
    )


def _check(systems: Sequence[System], settings: Settings, running: Running) -> None:
    names = [system.name for system in systems]
    if len(names) != len(set(names)):
        raise ValueError(f"two systems have the same name: {', '.join(names)}")
    if settings.rounds < 1 or settings.k < 1 or settings.deep < settings.k or min(settings.threads, default=0) < 1:
        raise ValueError(f"rounds, k and threads must be >= 1 and deep >= k, got {settings}")
    if not running.timeout > 0:
        raise ValueError(f"timeout must be > 0, got {running.timeout}")


def _key(system: System, fingerprint: str, settings: Settings) -> str:
    """Hash of everything that the measurements of a system depend on."""
    what = {
        "system": {"name": system.name, "library": system.library, "settings": system.settings, "points": list(map(asdict, system.points))},
        "vectors": fingerprint,
        "settings": asdict(settings),
        "versions": _versions(system),
    }
    return hashlib.sha256(json.dumps(what, sort_keys=True, default=dict).encode()).hexdigest()


def _versions(system: System) -> str:
    found = {name: installed_version(name) for name in LIBRARIES[system.library].packages}
    return ", ".join(f"{name} {version}" for name, version in sorted(found.items()) if version is not None)


def _metadata(vectors: VectorFolder, model: str | None, exact: ExactHits | None) -> dict[str, Scalar]:
    qrels = vectors.qrels
    return {
        "model": model,
        "kind": vectors.kind,
        "documents": len(vectors),
        "synthetic": vectors.synthetic is not None,
        "vectors": int(vectors.lengths.sum()),
        "dim": vectors.dim,
        "queries": len(vectors.queries),
        "query_vectors": sum(1 if query.ndim == 1 else len(query) for query in vectors.queries),
        "judged": len(qrels or {}),
        "exact_ndcg": None if qrels is None or exact is None else ndcg([rows.tolist()[:10] for rows in exact.rows], vectors, qrels),
    }


def _exact_hits(vectors: VectorFolder, settings: Settings, systems: Sequence[System], stem: Path) -> dict[int | None, ExactHits]:
    """Hits of exact search over all documents, and over each filtered subset of documents."""
    found: dict[int | None, ExactHits] = {}
    for allowed in dict.fromkeys([None, *(point.allowed for system in systems for point in system.points)]):
        path = stem.with_name(f"{stem.name}{'' if allowed is None else f'-{allowed}'}.npz")
        if path.is_file():
            found[allowed] = ExactHits.load(path)
        else:
            found[allowed] = exact_search(vectors, settings.deep, allowed=allowed)
            found[allowed].save(path)
    return found


class _Measuring:
    """Builds all systems and searches those that were built; the measurements are stored in the states."""

    def __init__(self, vectors: VectorFolder, settings: Settings, running: Running, exact: ExactHits | None) -> None:
        self._vectors, self._settings, self._running = vectors, settings, running
        self._exact = exact
        self._rows = {key: row for row, key in enumerate(vectors.ids)}

    def measure(self, states: Sequence[_State], builds: FinishedRows) -> None:
        """Build all systems, then search all of them."""
        progress = self._running.progress
        with progress_bar("building", len(states), enabled=progress) as advance:
            for state in states:
                with _failing(state):
                    self._build(state, builds)
                advance(1)
        rounds, points = self._settings.rounds, sum(len(state.system.points) for state in states if state.failed is None)
        passes = points * (rounds + (1 if self._exact is None else 2) + rounds * len(self._settings.threads))
        with progress_bar("searching", passes, enabled=progress) as advance:
            for threads in sorted({1, *self._settings.threads}):
                with ExitStack() as stack:
                    children = self._open(states, threads, stack)
                    if threads == 1:
                        self._single_queries(states, children, advance)
                    if threads in self._settings.threads:
                        self._throughput(states, children, threads, advance)

    def _build(self, state: _State, builds: FinishedRows) -> None:
        name = state.system.name
        saved = builds.load(name, state.key)
        if saved is not None:
            state.build = dict(saved[BUILD][0].values)
            return
        builds.remove(name)
        shutil.rmtree(state.folder, ignore_errors=True)
        state.folder.parent.mkdir(parents=True, exist_ok=True)
        with self._child(state, self._settings.build_threads, opened=False) as child:
            answer = checked(child.ask({"task": "build"}))
        disk = sum(path.stat().st_size for path in state.folder.rglob("*") if path.is_file())
        chosen = format_settings({**state.system.settings, **answer.pop("settings")})
        state.build = {"settings": chosen, "disk": disk, **answer}
        builds.save(name, state.key, {BUILD: (Row(name, {}, state.build),)})

    def _single_queries(self, states: Sequence[_State], children: Mapping[str, Child], advance: Advance) -> None:
        """Search with one query at a time on one thread; the first pass is not timed, and its hits are checked."""
        for _, state, position in _turns(states, children, 1):
            with _failing(state):
                self._first_pass(state, position, children[state.system.name])
            advance(1 if self._exact is None else 2)
        for _, state, position in _turns(states, children, self._settings.rounds):
            with _failing(state):
                answer = self._ask(children[state.system.name], "single", position, self._settings.k)
                state.points[position].rounds.append(answer["milliseconds"])
                state.points[position].processor.append(1000 * answer["processor_seconds"] / len(answer["milliseconds"]))
            advance(1)
        for state in states:
            if state.failed is None:
                with _failing(state):
                    state.memory = checked(children[state.system.name].ask({"task": "memory"}))

    def _first_pass(self, state: _State, position: int, child: Child) -> None:
        measured = _Measured()
        for k in [self._settings.k] if self._exact is None else [self._settings.deep, self._settings.k]:
            answer = self._ask(child, "single", position, k, rows=True)
            if "refused" in answer:
                state.refused[position] = answer["refused"]
                return
            rows = [[self._row(each) for each in found] for found in answer["rows"]]
            wrong = invalid_hits(rows, documents=len(self._vectors), queries=len(self._vectors.queries), k=k)
            if wrong is not None:
                raise ChildError(f"{state.system.points[position].name}: {wrong}")
            measured.found[k] = rows
            measured.deep = measured.deep or answer["milliseconds"]
        state.points[position] = measured

    def _throughput(self, states: Sequence[_State], children: Mapping[str, Child], threads: int, advance: Advance) -> None:
        """Search with all queries in one call."""
        for _, state, position in _turns(states, children, self._settings.rounds):
            with _failing(state):
                answer = self._ask(children[state.system.name], "all", position, self._settings.k)
                state.points[position].seconds.setdefault(threads, []).append(answer["seconds"])
            advance(1)

    def _open(self, states: Sequence[_State], threads: int, stack: ExitStack) -> dict[str, Child]:
        children = {}
        for state in states:
            if state.failed is None:
                with _failing(state):
                    children[state.system.name] = stack.enter_context(self._child(state, threads, opened=True))
        return children

    def _child(self, state: _State, threads: int, *, opened: bool) -> Child:
        system = state.system
        arguments = {
            "vectors": {**asdict(self._vectors), "path": str(self._vectors.path.resolve())},
            "system": {**asdict(system), "settings": dict(system.settings)},
            "folder": str(state.folder.resolve()),
            "opened": opened,
            "threads": threads,
        }
        # Quiver's searches run on several Python threads, each of which computes with one thread.
        environment = dict.fromkeys(_THREADS, str(1 if opened and system.library == OWN else threads))
        with _cpus(threads):
            return Child(self._running.target, arguments, label=system.name, environment=environment, timeout=self._running.timeout)

    def _ask(self, child: Child, task: str, position: int, k: int, *, rows: bool = False) -> dict[str, Any]:
        return checked(child.ask({"task": task, "point": position, "k": k, "rows": rows}))

    def _row(self, found: int | str) -> int:
        """Row of a document given by row or id; -1 for an unknown id."""
        return self._rows.get(found, -1) if isinstance(found, str) else found


@contextmanager
def _cpus(count: int) -> Iterator[None]:
    """Restrict processes started in the block to ``count`` CPUs, if the system supports it: some libraries use all CPUs they see."""
    if not hasattr(os, "sched_setaffinity"):
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, set(sorted(before)[:count]))
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


@contextmanager
def _failing(state: _State) -> Iterator[None]:
    """Record the failure of a child and drop only its system."""
    try:
        yield
    except (ChildError, KilledError) as error:
        state.failed = str(error)


def _turns(states: Sequence[_State], children: Mapping[str, Child], rounds: int) -> Iterator[tuple[int, _State, int]]:
    """Yield systems and their points in interleaved rounds, without dropped systems; the first points of all systems come first."""
    most = max((len(state.system.points) for state in states), default=0)
    turns = [(state, position) for position in range(most) for state in states if position < len(state.system.points)]
    for number, (state, position) in interleave(turns, rounds):
        if state.system.name in children and state.failed is None and position not in state.refused:
            yield number, state, position


def _rows(
    state: _State, vectors: VectorFolder, settings: Settings, exact: Mapping[int | None, ExactHits], date: str
) -> dict[str, tuple[Row, ...]]:
    """Result rows of a measured system."""
    system = state.system
    common: dict[str, Scalar] = {"library": system.library, "versions": _versions(system), "date": date}
    return {
        SEARCH: tuple(_search_row(state, position, vectors, settings, exact) for position in sorted(state.points)),
        BUILD: (Row(system.name, {}, {**common, **state.build, **state.memory}),),
    }


def _search_row(state: _State, position: int, vectors: VectorFolder, settings: Settings, exact: Mapping[int | None, ExactHits]) -> Row:
    point, measured = state.system.points[position], state.points[position]
    values: dict[str, Scalar] = {"library": state.system.library, "params": format_settings(point.params)}
    truth, k, deep = exact.get(point.allowed), settings.k, settings.deep
    if point.allowed is not None:
        values["allowed"] = point.allowed
    if truth is not None:
        values |= {f"recall@{depth}": recall(measured.found[k], truth, depth) for depth in (1, k)}
        values[f"recall@{deep}"] = recall(measured.found[deep], truth, deep)
        values["deep_p50"] = median(measured.deep)
        if vectors.qrels is not None and point.allowed is None:  # with a filter, the judged documents may be excluded
            values["ndcg@10"] = ndcg([rows[:10] for rows in measured.found[deep if k < 10 else k]], vectors, vectors.qrels)
            values["ndcg_difference"] = float(values["ndcg@10"] or 0) - ndcg(
                [each.tolist()[:10] for each in truth.rows], vectors, vectors.qrels
            )
    series = {f"p{share}": Series.of([float(np.percentile(each, share)) for each in measured.rounds]) for share in (50, 95, 99)}
    series["processor_ms"] = Series.of(measured.processor)
    count = len(vectors.queries)
    series |= {f"queries_per_second_{threads}": Series.of([count / each for each in times]) for threads, times in measured.seconds.items()}
    return Row(state.system.name, series, values, variant=point.name)


def open_system(
    vectors: dict[str, Any], system: dict[str, Any], folder: str, opened: bool, threads: int
) -> tuple[Callable[[dict[str, Any]], Answer], Answer]:
    """Target of child processes: builds or searches one index.

    Args:
        vectors: The fields of `VectorFolder`.
        system: The fields of `System`.
        folder: Folder of the index.
        opened: Open the index for searching; otherwise build it.
        threads: Number of threads.

    Returns:
        The function for requests, and an empty first answer. A request has a ``task``: ``build`` (answers seconds, processor seconds,
        memory, chosen settings), ``memory`` (memory of the open index), ``single`` (milliseconds of each single query, processor seconds of
        all, found rows) or ``all`` (seconds of all queries in one call).
    """
    torch.set_num_threads(threads)
    source = VectorFolder(**{**vectors, "path": Path(vectors["path"])})
    chosen = System(**{**system, "points": tuple(Point(**point) for point in system["points"])})
    library = LIBRARIES[chosen.library]
    if not opened:
        return lambda request: _build_reply(source, chosen, Path(folder), threads), {}
    for module in library.imports:
        importlib.import_module(module)
    queries = source.queries
    before, started = _memory(), perf_counter()
    index = library.open(source, chosen, Path(folder), threads)
    return _Searcher(index, queries, chosen, threads, open_seconds=perf_counter() - started, before=before).reply, {}


def _build_reply(vectors: VectorFolder, system: System, folder: Path, threads: int) -> Answer:
    library = LIBRARIES[system.library]
    for module in library.imports:
        importlib.import_module(module)
    folder.mkdir(parents=True)
    reset_peak()
    before = resident("VmRSS")
    built = library.build(vectors, system, folder, threads)
    return {**asdict(built), "memory_before": before, "memory_peak": resident("VmHWM")}


class _Searcher:
    """An open index with prepared queries."""

    def __init__(
        self,
        index: OpenIndex,
        queries: Sequence[NDArray[np.float32]],
        system: System,
        threads: int,
        *,
        open_seconds: float,
        before: Mapping[str, int],
    ) -> None:
        self._index, self._system, self._threads = index, system, threads
        self._open_seconds, self._before = open_seconds, before
        self._one_by_one, self._together = index.prepare(queries)

    def reply(self, request: dict[str, Any]) -> Answer:
        """Run a task; if the library rejects the search parameters, that is an answer and not a failure."""
        tasks: Mapping[str, Callable[[dict[str, Any]], Answer]] = {
            "memory": self._memory_taken,
            "single": self._search_one_by_one,
            "all": self._search_all,
        }
        try:
            return tasks[request["task"]](request)
        except InputError as error:
            return {"refused": str(error)}

    def _memory_taken(self, request: dict[str, Any]) -> Answer:
        del request
        now, before = _memory(), self._before
        return {
            "open_seconds": self._open_seconds,
            "open_before": before["VmRSS"],
            "private": max(0, now["RssAnon"] - before["RssAnon"]),
            "mapped": max(0, now["RssFile"] - before["RssFile"]),
            "open_peak": resident("VmHWM"),
        }

    def _search_one_by_one(self, request: dict[str, Any]) -> Answer:
        k, point = int(request["k"]), self._system.points[request["point"]]
        milliseconds, found = [], []
        processor = process_time()
        for query in self._one_by_one:
            started = perf_counter()
            hits = self._index.search(query, k, point, 1)
            milliseconds.append(1000 * (perf_counter() - started))
            found.append(hits)
        processor = process_time() - processor
        rows = [row for hits in found for row in self._index.rows(hits)] if request["rows"] else []
        return {"milliseconds": milliseconds, "processor_seconds": processor, "rows": rows}

    def _search_all(self, request: dict[str, Any]) -> Answer:
        started = perf_counter()
        self._index.search(self._together, int(request["k"]), self._system.points[request["point"]], self._threads)
        return {"seconds": perf_counter() - started}


def _memory() -> dict[str, int]:
    return {name: resident(name) for name in ("VmRSS", "RssAnon", "RssFile")}


def threads_up_to(most: int) -> tuple[int, ...]:
    """Return the powers of two below a number, followed by the number itself.

    Example:
        >>> threads_up_to(1), threads_up_to(6)
        ((1,), (1, 2, 4, 6))
    """
    powers = [2**power for power in range(most.bit_length()) if 2**power < most]
    return (*powers, most)


def milliseconds(value: float) -> str:
    """Format a time with three significant digits.

    Example:
        >>> milliseconds(0.01234), milliseconds(4.567), milliseconds(437.2)
        ('0.0123', '4.57', '437')
    """
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _times(quantity: str) -> Callable[[Row], str | None]:
    return lambda row: milliseconds(row.series[quantity].median) if quantity in row.series else None


def _range(row: Row) -> str:
    return f"{milliseconds(row.series['p50'].lowest)} to {milliseconds(row.series['p50'].highest)}"


def _deep(row: Row) -> str | None:
    return milliseconds(float(row.values["deep_p50"] or 0)) if "deep_p50" in row.values else None


def _mebibytes(quantity: str, base: str | None = None) -> Callable[[Row], str | None]:
    """Cells in MiB; if ``base`` is given, the excess over that quantity."""

    def text(row: Row) -> str:
        taken = float(row.values[quantity] or 0) - (0 if base is None else float(row.values[base] or 0))
        return f"{max(0.0, taken) / MEBIBYTE:,.1f}"

    return text


def _search_columns(benchmark: Benchmark) -> list[Column]:
    depths = [key for key in dict.fromkeys(key for row in benchmark.case(SEARCH).rows for key in row.values) if key.startswith("recall@")]
    return [
        Column("system", backend, numeric=False),
        Column("search", variant, numeric=False),
        *(Column(depth, single(depth, ".4f")) for depth in depths),
        Column("nDCG@10", single("ndcg@10", ".4f")),
        Column("- exact", single("ndcg_difference", "+.4f")),
        Column("p50 ms", _times("p50")),
        Column("range", _range, numeric=False),
        Column("p95", _times("p95")),
        Column("p99", _times("p99")),
        Column("CPU ms", _times("processor_ms")),
        Column(f"p50 @{benchmark.settings['deep']}", _deep),
    ]


def _throughput_columns(benchmark: Benchmark) -> list[Column]:
    counts = [int(count) for count in str(benchmark.settings["threads"]).split(",")]
    return [
        Column("system", backend, numeric=False),
        Column("search", variant, numeric=False),
        *(Column(f"{count} thread{'s' * (count != 1)}", over_rounds(f"queries_per_second_{count}", ",.1f")) for count in counts),
    ]


def _build_columns(benchmark: Benchmark) -> list[Column]:
    per = {"token": benchmark.metadata["vectors"], "document": benchmark.metadata["documents"]}
    if benchmark.metadata["kind"] == "dense":
        del per["token"]
    specs = {"token": ",.1f", "document": ",.0f"}
    return [
        Column("system", backend, numeric=False),
        Column("disk MiB", _mebibytes("disk")),
        *(Column(f"bytes/{unit}", single("disk", specs[unit], scale=1 / float(count or 1))) for unit, count in per.items()),
        Column("build s", single("seconds", ",.2f")),
        Column("build CPU s", single("processor_seconds", ",.2f")),
        Column("build peak MiB", _mebibytes("memory_peak", "memory_before")),
        Column("open s", single("open_seconds", ".2f")),
        Column("private MiB", _mebibytes("private")),
        Column("mapped MiB", _mebibytes("mapped")),
        Column("search peak MiB", _mebibytes("open_peak", "open_before")),
    ]


SYSTEM_COLUMNS = (
    Column("system", backend, numeric=False),
    Column("settings", single("settings"), numeric=False),
    Column("versions", single("versions"), numeric=False),
    Column("measured", single("date"), numeric=False),
)


def report(benchmark: Benchmark) -> Report:
    """Make the report of an index benchmark."""
    search, build = benchmark.case(SEARCH), benchmark.case(BUILD)
    throughput = "All queries in one call, in a process limited to that number of CPUs; queries per second, median over the rounds."
    size = (
        "Disk is all files of the index. A build is timed until the index is on disk, without encoding or reading the vectors. Peaks are"
        " the resident set beyond that of the process with its libraries; the vectors count in builds that take all of them at once."
        " Private and mapped are what the open index takes after all queries: memory of its own, and pages of its files."
    )
    return make_report(
        benchmark,
        conditions=_conditions(benchmark),
        sections=[
            Section("Search", (rows_table("Search", _search_columns(benchmark), search.rows), Paragraph(_search_note(benchmark)))),
            Section(
                "Queries per second",
                (rows_table("Queries per second", _throughput_columns(benchmark), search.rows), Paragraph(throughput)),
            ),
            Section(build.title, (rows_table(build.title, _build_columns(benchmark), build.rows), Paragraph(size))),
            Details("Systems", (rows_table("Systems", SYSTEM_COLUMNS, build.rows),)),
        ],
        draw=lambda: draw(benchmark),
        alt="Recall over latency, and bytes on disk",
    )


def draw(benchmark: Benchmark) -> Drawing:
    """Draw the chart of an index benchmark."""
    metadata, k = benchmark.metadata, benchmark.settings["k"]
    unit, count = ("token", metadata["vectors"]) if metadata["kind"] == "colbert" else ("document", metadata["documents"])
    title = f"{short_name(benchmark.name)}: {metadata['documents']:,} documents, {metadata['vectors']:,} vectors"
    searches: dict[str, list[Row]] = {}
    for row in benchmark.case(SEARCH).rows:
        searches.setdefault(row.backend, []).append(row)
    sizes = {row.backend: float(row.values["disk"] or 0) / float(count or 1) for row in benchmark.case(BUILD).rows}
    quality = None if metadata["synthetic"] else (f"recall@{k}", f"recall@{k} against exact search")
    return draw_search(f"{title}\n{benchmark.processor}, one thread", searches, sizes, quality=quality, unit=unit)


def _conditions(benchmark: Benchmark) -> str:
    metadata, settings = benchmark.metadata, benchmark.settings
    token = metadata["kind"] == "colbert"
    average = float(metadata["query_vectors"] or 0) / float(metadata["queries"] or 1)
    parts = [
        f"{metadata['documents']:,} documents, {metadata['vectors']:,} vectors of {metadata['dim']} dimensions, one per"
        f" {'token' if token else 'document'}; {metadata['queries']:,} queries{f' of {average:.1f} vectors' if token else ''}."
    ]
    if metadata["model"] is not None:
        parts.append(f"Model: {metadata['model']}.")
    if metadata["synthetic"]:
        parts.append("Documents beyond those of the collection are noisy copies of them: latency and size are meaningful, quality is not.")
    parts += [
        "Every system gets the same float32 vectors and a process of its own, which may use as many CPUs as it has threads:"
        f" {settings['build_threads']} to build.",
        f"Single queries: {settings['rounds']} rounds over all queries in turns, every other round in reverse, after a warm-up round that"
        f" is not counted; {settings['k']} hits, one thread.",
        "On a machine with other work, processor time is more reliable than wall clock.",
    ]
    return " ".join(parts)


def _search_note(benchmark: Benchmark) -> str:
    metadata, settings = benchmark.metadata, benchmark.settings
    percentiles = (
        "p50, p95 and p99 are milliseconds of a single query: percentiles over the queries, median over the rounds, with the range of p50."
        " CPU is processor time per query."
    )
    if metadata["synthetic"]:
        return percentiles
    deep, k = settings["deep"], settings["k"]
    parts = [
        f"Recall is the share of exact search's best documents over the float32 vectors that a search finds. recall@{deep} is of a search"
        f" for {deep} hits, whose p50 is of one pass; the others are of searches for {k} hits.",
        percentiles,
    ]
    if any("allowed" in row.values for row in benchmark.case(SEARCH).rows):
        parts.append("With a filter that matches a random share of the documents, exact search is over these documents.")
    if metadata["exact_ndcg"] is not None:
        parts.append(f"nDCG@10 of exact search: {metadata['exact_ndcg']:.4f} over {metadata['judged']:,} judged queries.")
    return " ".join(parts)
