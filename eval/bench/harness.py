"""Shared parts of the benchmark subjects: choosing backends, interleaved rounds, memory in fresh processes, and the record of a run.

All backends run in turns on the same work and with the same number of threads. If the machine slows down, all of them slow down, so the
ratio of times within a round is more reliable than the times themselves.
"""

from __future__ import annotations

import gc
import logging
import os
import platform
import re
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from importlib import import_module
from pathlib import Path
from time import perf_counter, process_time
from typing import Any, TypeAlias, TypeVar

import torch

from quiver.encoder.environment import installed_version
from quiver.encoder.errors import InputError
from quiver.encoder.progress import Advance, progress_bar
from quiver.eval.bench.child import ChildError, ask_once, is_out_of_memory
from quiver.eval.bench.results import OWN, Benchmark, Case, NotRun, Scalar, Subject
from quiver.eval.results import provenance

Item = TypeVar("Item")

Pass: TypeAlias = Callable[[], object]
"""One backend's work of one round; it returns when the work is done, not when it is queued."""

BASELINE_PACKAGES = ("transformers", "sentence-transformers", "pylate", "flash-attn", "optimum", "onnxruntime", "openvino")
"""Distributions whose versions are recorded in the results."""

# Libraries that log a lot while they load and export models.
_VERBOSE = ("transformers", "sentence_transformers", "pylate", "optimum", "nncf")


def choose(
    requested: Sequence[str] | None,
    available: Collection[str],
    unsupported_reason: Callable[[str], str | None],
) -> tuple[list[str], list[NotRun]]:
    """Choose the backends of a benchmark.

    Args:
        requested: Names besides `OWN`; None for all supported other libraries, without Quiver's variants.
        available: All names.
        unsupported_reason: Why a backend cannot run; None if it can.

    Returns:
        `OWN` and the chosen backends, in order; and the other libraries that were left out.

    Raises:
        InputError: A requested name is unknown or cannot run.

    Example:
        >>> choose(None, ["quiver", "quiver-int8", "fast", "cuda"], lambda name: "needs CUDA" if name == "cuda" else None)
        (['quiver', 'fast'], [NotRun(what='cuda', reason='needs CUDA')])
    """
    if requested is not None:
        names = [name for name in dict.fromkeys(requested) if name != OWN]
        for name in names:
            if name not in available:
                raise InputError(f"unknown backend {name!r}; choose from {', '.join(each for each in available if each != OWN)}")
            if reason := unsupported_reason(name):
                raise InputError(f"{name}: {reason}")
        return [OWN, *names], []
    reasons = {name: unsupported_reason(name) for name in available if not name.startswith(OWN)}
    supported = [name for name, reason in reasons.items() if reason is None]
    return [OWN, *supported], [NotRun(name, reason) for name, reason in reasons.items() if reason is not None]


def interleave(items: Sequence[Item], rounds: int) -> Iterator[tuple[int, Item]]:
    """Yield every item once per round, in reverse in every other round, so that no item always follows the same neighbour.

    Example:
        >>> list(interleave("ab", 2))
        [(0, 'a'), (0, 'b'), (1, 'b'), (1, 'a')]
    """
    for number in range(rounds):
        for item in items[:: -1 if number % 2 else 1]:
            yield number, item


@dataclass(frozen=True)
class Timing:
    """Times of one backend.

    Attributes:
        seconds: Wall clock of each round.
        processor_seconds: Processor time of each round, summed over the threads of this process. On a busy machine its ratio is more
            reliable than that of the wall clock; on a GPU it is not meaningful.
    """

    seconds: tuple[float, ...]
    processor_seconds: tuple[float, ...]


def time_rounds(
    passes: Mapping[str, Pass],
    *,
    rounds: int,
    seconds: float | None = None,
    advance: Advance = lambda steps: None,
    clock: Callable[[], float] = perf_counter,
    processor_clock: Callable[[], float] = process_time,
) -> dict[str, Timing]:
    """Run every pass once per round, interleaved, and time it.

    Args:
        passes: Backend -> its pass, warmed up.
        rounds: Number of rounds, >= 1.
        seconds: Time for all rounds: none begins that would probably end later. The first always runs. None for no limit.
        advance: Called after every pass.
        clock: Wall clock, in seconds.
        processor_clock: Processor time of this process, in seconds.

    Raises:
        ValueError: rounds < 1.
    """
    if rounds < 1:
        raise ValueError(f"rounds must be >= 1, got {rounds}")
    taken: dict[str, list[float]] = {name: [] for name in passes}
    processor: dict[str, list[float]] = {name: [] for name in passes}
    spent, begun = 0.0, 0
    for number, name in interleave(list(passes), rounds):
        if number > begun and seconds is not None and spent * (number + 1) / number > seconds:
            break
        begun = number
        started, processor_started = clock(), processor_clock()
        passes[name]()
        taken[name].append(clock() - started)
        processor[name].append(processor_clock() - processor_started)
        spent += taken[name][-1]
        advance(1)
    return {name: Timing(tuple(taken[name]), tuple(processor[name])) for name in passes}


@contextmanager
def naming_out_of_memory(backend: str, case: str) -> Iterator[None]:
    """Convert an out-of-memory error to one that names the backend and the case.

    Raises:
        InputError: The block ran out of memory.
    """
    try:
        yield
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        raise InputError(f"{backend} ran out of memory on {case}; reduce --batch-size or --batch-tokens") from error


@contextmanager
def torch_threads(threads: int | None) -> Iterator[None]:
    """Set torch's number of threads inside the block; None keeps it."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def quiet_libraries() -> Iterator[None]:
    """Hide the libraries' progress bars, warnings and info messages while they load and export models; errors are still shown."""
    if installed_version("transformers") is None:
        yield
        return
    logging_of = import_module("transformers.utils.logging")
    bars = logging_of.is_progress_bar_enabled()
    levels = {name: logging.getLogger(name).level for name in _VERBOSE}
    logging_of.disable_progress_bar()
    for name in _VERBOSE:
        logging.getLogger(name).setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)
        if bars:
            logging_of.enable_progress_bar()


@dataclass(frozen=True)
class MemoryRun:
    """Description of the memory measurement of one case in fresh processes.

    Attributes:
        target: Function that loads the backend; see `quiver.eval.bench.child`.
        arguments: Maps a backend to the arguments of ``target``.
        request: Request that runs the work.
    """

    target: str
    arguments: Callable[[str], Mapping[str, Any]]
    request: Mapping[str, Any]


def with_memory(cases: Sequence[Case], runs: Sequence[MemoryRun], *, progress: bool) -> tuple[list[Case], list[NotRun]]:
    """Measure the peak memory of every backend in every case, each in a fresh process.

    Args:
        cases: The timed cases.
        runs: Memory measurements, one per case.
        progress: Show a progress bar.

    Returns:
        The cases with ``memory_before``, ``memory_above`` and ``memory_reserved`` in bytes (see `quiver.eval.bench.child.measure_memory`),
        and the measurements that failed; the times of these cases are kept.
    """
    free_memory()
    measured, failed = [], []
    with progress_bar("memory", sum(len(case.rows) for case in cases), enabled=progress) as advance:
        for case, run in zip(cases, runs, strict=True):
            rows = []
            for row in case.rows:
                try:
                    answer = ask_once(run.target, run.arguments(row.backend), run.request, label=row.backend)
                    row = replace(row, values={**row.values, **{f"memory_{name}": value for name, value in answer.items()}})
                except ChildError as error:
                    failed.append(NotRun(f"memory of {row.backend} on {case.name}", str(error)))
                rows.append(row)
                advance(1)
            measured.append(replace(case, rows=tuple(rows)))
    return measured, failed


def free_memory() -> None:
    """Release memory of unused models, so that it is available to child processes."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


class Recording:
    """Collects the record of a run; create it before the benchmark starts, because it stores the load of the machine.

    Args:
        subject: Subject of the benchmark.
        name: Name of the model or data.
        settings: A dataclass; sequences and mappings in it are stored as text.
        command: Command line; None if the library was called from Python.
    """

    def __init__(self, subject: Subject, name: str, settings: Any, command: str | None) -> None:
        self._subject: Subject = subject
        self._name, self._settings, self._command = name, settings, command
        self._load = tuple(os.getloadavg()) if hasattr(os, "getloadavg") else ()

    def benchmark(
        self,
        *,
        metadata: Mapping[str, Scalar],
        cases: Sequence[Case],
        not_run: Sequence[NotRun],
        device: str = "cpu",
        threads: int | None = None,
    ) -> Benchmark:
        """Assemble the results, with versions and machine.

        Args:
            metadata: Description of the model or data.
            cases: The measurements.
            not_run: Backends and cases without measurements.
            device: Device of the benchmark.
            threads: Threads of the benchmark; None for torch's.
        """
        found = provenance(self._command)
        packages = {package: version for package in BASELINE_PACKAGES if (version := installed_version(package)) is not None}
        return Benchmark(
            subject=self._subject,
            name=self._name,
            metadata=dict(metadata),
            settings={key: _as_scalar(value) for key, value in asdict(self._settings).items()},
            cases=tuple(cases),
            not_run=tuple(not_run),
            processor=_processor(device),
            load_average=self._load,
            provenance=replace(found, versions={**found.versions, **packages}, threads=threads or found.threads),
        )


def _as_scalar(value: Any) -> Scalar:
    if isinstance(value, Mapping):
        return ",".join(f"{key}={each}" for key, each in value.items())
    if isinstance(value, list | tuple):
        return ",".join(map(str, value))
    return value  # type: ignore[no-any-return]


def _processor(device: str) -> str:
    """Name of the GPU or CPU."""
    if device == "cuda":
        return torch.cuda.get_device_name()
    cpuinfo = Path("/proc/cpuinfo")
    found = re.search(r"^model name\s*:\s*(.+)$", cpuinfo.read_text(encoding="utf-8"), re.MULTILINE) if cpuinfo.is_file() else None
    return found[1] if found else platform.processor() or platform.machine()


def absolute(model: str) -> str:
    """A model's name for a child process, which has another working folder: paths of folders become absolute."""
    return str(Path(model).resolve()) if Path(model).exists() else model


def check_out(out: Path, results: str, *, overwrite: bool) -> None:
    """Check before the benchmark that its output can be written.

    Args:
        out: Folder for results, report and plot.
        results: Name of the results file.
        overwrite: Allow replacing existing results.

    Raises:
        InputError: Results exist already, or the folder cannot be created.
    """
    if (out / results).exists() and not overwrite:
        raise InputError(f"{out / results}: results exist already; choose another --out, or add --overwrite")
    # The folder is created only when results are written, so a run that fails leaves no folder behind.
    parent = next(path for path in (out.absolute(), *out.absolute().parents) if path.exists())
    if not parent.is_dir():
        raise InputError(f"{out}: {parent} is a file, not a folder; choose another --out")
    if not os.access(parent, os.W_OK | os.X_OK):
        raise InputError(f"{out}: cannot be created (no permission in the folder {parent})")
