"""What a benchmark of indexes found, and under which conditions: the fields of its ``results.json``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from quiver.encoder.files import write_json
from quiver.eval.bench.encoder.results import NotRun, Spread
from quiver.eval.decoding import encode, read_record
from quiver.eval.provenance import Provenance

SCHEMA = "quiver-index-benchmark/1"
"""Name and version of the format, the value of ``schema`` in the file."""

SYSTEM_SCHEMA = "quiver-index-benchmark-system/1"
"""That of a finished system, which a run that is started again does not measure again."""


BUILD_SCHEMA = "quiver-index-benchmark-build/1"
"""That of an index that was built, which a run that is started again does not build again."""


@dataclass(frozen=True)
class IndexSettings:
    """How a benchmark is run.

    Attributes:
        k: Hits of the searches that are timed.
        deep: Hits of a search for the recall at that depth.
        rounds: Passes over all queries that are timed, after one that is not.
        threads: Numbers of threads that queries a second are measured with; a single query has one.
        build_threads: Threads of a build.
    """

    k: int = 10
    deep: int = 100
    rounds: int = 3
    threads: tuple[int, ...] = (1,)
    build_threads: int = 1


@dataclass(frozen=True)
class Build:
    """What making an index took.

    Attributes:
        seconds: Wall clock until it is on the disk, without encoding and reading the vectors.
        processor_seconds: What all threads worked, the reading of vectors and, for Quiver, of an index to warm up among it.
        before: Bytes resident in the process before, libraries alone.
        peak: Bytes resident at the peak.
        disk: Bytes of all its files.
    """

    seconds: float
    processor_seconds: float
    before: int
    peak: int
    disk: int


@dataclass(frozen=True)
class FinishedBuild:
    """An index that is built and waits to be searched.

    Attributes:
        key: As in `SystemResult`.
        build: What making it took.
        parameters: Settings that were chosen.
    """

    key: str
    build: Build
    parameters: Mapping[str, str | int | float | bool | None]


@dataclass(frozen=True)
class Memory:
    """What an open index takes in a process of its own, once every query was searched.

    Attributes:
        open_seconds: Wall clock of opening it.
        before: Bytes resident before, libraries alone.
        private: Bytes more that the process has to itself.
        mapped: Bytes more of mapped files that are in memory.
        peak: Bytes resident at the peak, opening among it.
    """

    open_seconds: float
    before: int
    private: int
    mapped: int
    peak: int


@dataclass(frozen=True)
class Throughput:
    """Queries a second where all are asked at once.

    Attributes:
        threads: That the process could use.
        queries_per_second: Over the rounds.
    """

    threads: int
    queries_per_second: Spread


@dataclass(frozen=True)
class PointResult:
    """One way of searching a system.

    Attributes:
        name: In tables.
        knobs: What the library was given.
        recall: Depth -> share of exact search's best documents that is found; empty for made-up documents. Those up to ``k`` are of
            the searches that are timed, the deeper one is of its own.
        ndcg: nDCG@10 against judgements; None without any, and under a filter.
        p50: Milliseconds of a single query on one thread: the median over the queries, its spread over the rounds.
        p95: The 95th percentile, likewise.
        p99: The 99th.
        processor: Milliseconds of processor time a query, over the rounds: where others use the machine, it says more than wall clock.
        deep_p50: The median of the one pass with ``deep`` hits.
        throughput: For each number of threads.
        allowed: How many documents, drawn at random, a filter let it find; None for all.
    """

    name: str
    knobs: Mapping[str, str | int | float | bool | None]
    recall: Mapping[str, float]
    ndcg: float | None
    p50: Spread
    p95: Spread
    p99: Spread
    processor: Spread
    deep_p50: float
    throughput: tuple[Throughput, ...]
    allowed: int | None = None


@dataclass(frozen=True)
class SystemResult:
    """One index.

    Attributes:
        name: In tables.
        library: Whose it is.
        versions: Package -> version, those that it is made of.
        parameters: Settings, given or chosen.
        build: What making it took.
        memory: What it takes when it is open.
        points: How it was searched.
        key: sha256 over all that the result depends on; a run that is started again knows by it what is done.
        date: When it was measured: systems with one date were measured in turns.
    """

    name: str
    library: str
    versions: Mapping[str, str]
    parameters: Mapping[str, str | int | float | bool | None]
    build: Build
    memory: Memory
    points: tuple[PointResult, ...]
    key: str
    date: str


@dataclass(frozen=True)
class IndexBenchmark:
    """A run of ``quiver bench index``.

    Attributes:
        data: What was indexed.
        model: Whose vectors they are; None where they were given as they are.
        kind: One vector a document, or one a token.
        documents: How many.
        synthetic: Whether some of them are noisy copies, so that nothing is said of quality.
        vectors: Of all documents.
        dim: Width of one.
        queries: How many.
        query_vectors: Of all queries.
        judged: Queries with judgements.
        exact_ndcg: nDCG@10 of exact search; None without judgements.
        settings: How it was run.
        systems: What was measured.
        not_run: What was left out.
        processor: The CPU's name.
        load_average: Running processes over the last 1, 5 and 15 minutes when the benchmark began; empty where the system
            does not tell.
        provenance: Command, versions, machine.
    """

    data: str
    model: str | None
    kind: Literal["dense", "colbert"]
    documents: int
    synthetic: bool
    vectors: int
    dim: int
    queries: int
    query_vectors: int
    judged: int
    exact_ndcg: float | None
    settings: IndexSettings
    systems: tuple[SystemResult, ...]
    not_run: tuple[NotRun, ...]
    processor: str
    load_average: tuple[float, ...]
    provenance: Provenance


def to_json(benchmark: IndexBenchmark) -> dict[str, object]:
    """A benchmark as parsed JSON."""
    return encode(benchmark, SCHEMA)


def write_index_benchmark(benchmark: IndexBenchmark, path: Path) -> None:
    """Write a benchmark as JSON, whole or not at all."""
    write_json(path, to_json(benchmark))


def read_index_benchmark(path: Path) -> IndexBenchmark:
    """Read what `write_index_benchmark` wrote.

    Raises:
        InputError: The file is missing, damaged, or of another program or version.
    """
    return read_record(IndexBenchmark, path, schema=SCHEMA, command="quiver bench index")


def write_system(result: SystemResult, path: Path) -> None:
    """Write a finished system; its folder is made if it is missing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, encode(result, SYSTEM_SCHEMA))


def read_system(path: Path, key: str) -> SystemResult | None:
    """A finished system; None where it is not, or was another.

    Raises:
        InputError: The file is damaged, or of another version.
    """
    if not path.is_file():
        return None
    result = read_record(SystemResult, path, schema=SYSTEM_SCHEMA, command="quiver bench index --overwrite")
    return result if result.key == key else None


def write_build(result: FinishedBuild, path: Path) -> None:
    """Write what a build took."""
    write_json(path, encode(result, BUILD_SCHEMA))


def read_build(path: Path, key: str) -> FinishedBuild | None:
    """A finished build; None where it is not, or was another.

    Raises:
        InputError: The file is damaged, or of another version.
    """
    if not path.is_file():
        return None
    result = read_record(FinishedBuild, path, schema=BUILD_SCHEMA, command="quiver bench index --overwrite")
    return result if result.key == key else None
