"""What the benchmark scripts share: interleaved rounds, worker processes, results that resume, and one Markdown report.

All backends run in turns on the same work with the same number of threads. If the machine slows down, all of them slow down, so the ratio
of times within a round is more reliable than the times themselves: tables give the median and the range of these ratios.

A row is a dict: ``backend``, ``variant``, lists of one value per round (``seconds``, ``tokens_per_second``, ...), and single values.
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import os
import platform
import re
import shlex
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any
from unittest.mock import patch

from quiver.encoder.environment import installed_version, resident
from quiver.encoder.errors import InputError
from quiver.encoder.files import read_json, write_json
from quiver.encoder.progress import progress_bar

OWN = "quiver"
"""Name of the backend that the others are compared with."""

RESULTS, REPORT = "results.json", "report.md"
SCHEMA = "quiver-benchmark/3"
MEBIBYTE = 2**20
PACKAGES = (
    "quiver-retrieval", "torch", "triton", "transformers", "sentence-transformers", "pylate", "flash-attn", "faiss-cpu", "numba",
    "fast-plaid", "optimum", "onnxruntime", "openvino", "fastapi", "uvicorn",
)  # fmt: skip
OUT_OF_MEMORY = ("can't allocate memory", "CUDA error: out of memory", "Triton Error [CUDA]: out of memory", "CUBLAS_STATUS_ALLOC_FAILED")

Row = dict[str, Any]
Pass = Callable[[], object]


# Rounds.


def interleave(items: Sequence[Any], rounds: int) -> Iterator[tuple[int, Any]]:
    """Yield every item once per round, in reverse in every other round, so that no item always follows the same neighbour."""
    for number in range(rounds):
        for item in items[:: -1 if number % 2 else 1]:
            yield number, item


def time_rounds(
    passes: Mapping[str, Pass],
    *,
    rounds: int,
    seconds: float | None = None,
    label: str = "timing",
    clock: Callable[[], float] = perf_counter,
) -> dict[str, list[float]]:
    """Run every warmed-up pass once per round, in turns: backend -> seconds of each round.

    With ``seconds`` no round begins that would probably end later; the first always runs.
    """
    taken: dict[str, list[float]] = {name: [] for name in passes}
    spent, begun = 0.0, 0
    with progress_bar(label, rounds * len(passes), enabled=True) as advance:
        for number, name in interleave(list(passes), rounds):
            if number > begun and seconds is not None and spent * (number + 1) / number > seconds:
                break
            begun = number
            started = clock()
            passes[name]()
            taken[name].append(clock() - started)
            spent += taken[name][-1]
            advance(1)
    return taken


def with_ratios(rows: Sequence[Row], quantity: str = "seconds", ratio: str = "ratio") -> list[Row]:
    """Add to the rows of other backends the ratio of a quantity to Quiver's in the same round."""
    own = next(row for row in rows if row["backend"] == OWN)
    return [
        row if row is own else {**row, ratio: [each / base for each, base in zip(row[quantity], own[quantity], strict=True)]}
        for row in rows
    ]


# Workers: processes that each hold one backend.


class WorkerError(RuntimeError):
    """A worker failed; the message is one line."""


def is_out_of_memory(error: RuntimeError) -> bool:
    return type(error).__name__ == "OutOfMemoryError" or any(words in str(error) for words in OUT_OF_MEMORY)


class Worker:
    """A fresh process that holds one backend: its memory peak is its own, and what ends it does not end the benchmark.

    ``open_backend`` loads the backend and returns the function that answers requests. ``threads`` restricts the CPUs that the process sees,
    since some libraries use all. An answer may take ``timeout`` seconds; then the process group is killed.
    """

    def __init__(
        self,
        open_backend: Callable[..., Callable[[Any], Any]],
        arguments: Mapping[str, Any],
        *,
        threads: int | None = None,
        environment: Mapping[str, str] | None = None,
        log: Path | None = None,
        timeout: float | None = None,
    ) -> None:
        context = multiprocessing.get_context("spawn")
        self._timeout = timeout
        self._pipe, other = context.Pipe()
        self._process = context.Process(target=_answer_requests, args=(other, open_backend, dict(arguments), log), daemon=False)
        cpus = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_setaffinity") else []  # Linux alone restricts a process
        if cpus:
            os.sched_setaffinity(0, cpus[:threads])
        try:
            with patch.dict(os.environ, environment or {}):
                self._process.start()
        finally:
            if cpus:
                os.sched_setaffinity(0, cpus)
        other.close()
        self.ask(None)  # loading ended

    def ask(self, request: Any) -> Any:
        """Send a request and wait for the answer.

        Raises:
            WorkerError: The backend failed, ran out of memory, was killed, or took too long.
        """
        try:
            if request is not None:
                self._pipe.send(request)
            if not self._pipe.poll(self._timeout):
                self.close()
                raise WorkerError(f"no answer within {self._timeout:g} seconds; stopped")
            error, answer = self._pipe.recv()
        except (EOFError, OSError):
            self._process.join()
            status = self._process.exitcode or 0
            raise WorkerError(f"killed by signal {-status}" if status < 0 else f"ended with status {status}") from None
        if error is not None:
            raise WorkerError(error)
        return answer

    def close(self) -> None:
        if self._process.pid is not None and self._process.is_alive():
            try:
                os.killpg(self._process.pid, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):
                self._process.kill()
        self._process.join()
        self._pipe.close()

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _answer_requests(pipe: Any, open_backend: Callable[..., Callable[[Any], Any]], arguments: dict[str, Any], log: Path | None) -> None:
    os.setsid()  # a process group of its own, which `close` kills
    if log is not None:
        target = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        os.dup2(target, 1)
        os.dup2(target, 2)
    score = Path("/proc/self/oom_score_adj")  # Linux ends this process first if memory runs out
    if score.is_file():
        score.write_text("1000", encoding="ascii")
    reply, request = None, None
    while True:
        try:
            answer = None
            if reply is None:
                reply = open_backend(**arguments)
            else:
                answer = reply(request)
            pipe.send((None, answer))
        except Exception as error:  # the other side reports whatever ended a backend
            traceback.print_exc()
            full = isinstance(error, RuntimeError) and is_out_of_memory(error)
            pipe.send(("out of memory" if full else describe(error), None))
            if reply is None:
                return
        try:
            request = pipe.recv()
        except EOFError:
            return


def open_echo() -> Callable[[Any], Any]:
    """A backend that returns its requests and kills itself on request, to test workers."""
    return lambda request: os.kill(os.getpid(), signal.SIGKILL) if request == "kill" else request


def describe(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else 'no message'}"


# Memory.

MEMORY_ENVIRONMENT = {"MALLOC_MMAP_THRESHOLD_": "65536", "TOKENIZERS_PARALLELISM": "false"}
"""malloc returns blocks above 64 KiB when they are freed, so that the resident set equals the memory in use (glibc keeps up to 32 MiB)."""


def peak_memory(run: Pass, *, on_cuda: bool = False) -> dict[str, int]:
    """Run once in this process: ``before``, the bytes in use, and ``above``, the bytes more at the peak.

    On a CPU it is the resident set (Linux), with CUDA what torch has allocated.
    """
    if on_cuda:
        import torch

        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run()
        return {"before": before, "above": torch.cuda.max_memory_allocated() - before}
    reset_peak()
    before = resident("VmRSS")
    run()
    return {"before": before, "above": max(0, resident("VmHWM") - before)}


def reset_peak() -> None:
    try:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    except OSError as error:
        raise InputError("peak memory is read from Linux's /proc, which this system does not have; omit --peak-memory") from error


# Results and report.


class Column:
    """A column of a table: a label, a quantity of the rows, and the format of its numbers.

    A list of rounds shows its median, with ``spread`` also its lowest and highest value: ``2.10 (2.09-2.23)``.
    """

    def __init__(self, label: str, quantity: str, spec: str = ",.0f", *, scale: float = 1.0, spread: bool = False) -> None:
        self.label, self.quantity, self.spec, self.scale, self.spread = label, quantity, spec, scale, spread

    def text(self, row: Row) -> str:
        value = row.get(self.quantity)
        if value is None or isinstance(value, str):
            return value or ""
        rounds = [self.scale * each for each in (value if isinstance(value, list) else [value])]
        middle = format(median(rounds), self.spec)
        return f"{middle} ({min(rounds):{self.spec}}-{max(rounds):{self.spec}})" if self.spread and len(rounds) > 1 else middle


BACKEND, VARIANT = Column("backend", "backend"), Column("variant", "variant")
RATIO = Column("time / quiver's", "ratio", ".2f", spread=True)
MEMORY = Column("peak MiB", "memory", scale=1 / MEBIBYTE)


def markdown_table(columns: Sequence[Column], rows: Sequence[Row]) -> str:
    shown = [column for column in columns if any(column.text(row) for row in rows)]
    lines = [[column.label for column in shown], ["---"] * len(shown), *([column.text(row) for column in shown] for row in rows)]
    return "".join(f"| {' | '.join(cell.replace('|', '/') for cell in line)} |\n" for line in lines)


class Results:
    """The results of a run: written after every case, and continued when the same command is repeated.

    Results of other settings, of another machine or of other versions are refused; without ``out`` they are only printed.
    """

    def __init__(self, title: str, settings: Mapping[str, Any], out: Path | None, *, overwrite: bool = False) -> None:
        self.title, self.out = title, out
        self.cases: dict[str, dict[str, Any]] = {}
        self.notes: list[str] = []
        self._key = {"settings": json.loads(json.dumps(settings, default=str)), **machine()}
        self._load = [round(each, 2) for each in os.getloadavg()] if hasattr(os, "getloadavg") else []
        path = None if out is None else out / RESULTS
        if path is not None and path.is_file() and not overwrite:
            old = read_json(path)
            if old.get("schema") != SCHEMA:
                raise InputError(f"{path}: not written by this version of the benchmarks; choose another --out, or add --overwrite")
            for name, value in self._key.items():
                if old["conditions"].get(name) != value:
                    changed = f"{old['conditions'].get(name)}, now {value}"
                    raise InputError(f"{path}: measured with other {name} ({changed}); choose another --out, or add --overwrite")
            self.cases, self.notes = old["cases"], old["notes"]

    def add(self, name: str, title: str, columns: Sequence[Column], rows: Sequence[Row], note: str = "", **facts: Any) -> None:
        """Add a case, or replace the one of its name, and write everything."""
        table = markdown_table(columns, rows) if rows else ""
        self.cases[name] = {"title": title, "note": note, "table": table, "rows": list(rows), **facts}
        sys.stderr.write(f"\n{title}\n{table}{note}\n")
        self.write()

    def row(self, case: str, backend: str = OWN, variant: str | None = None) -> Row | None:
        rows = self.cases.get(case, {}).get("rows", [])
        return next((row for row in rows if row["backend"] == backend and variant in (None, row.get("variant"))), None)

    def write(self) -> None:
        if self.out is None:
            return
        self.out.mkdir(parents=True, exist_ok=True)
        command, date = shlex.join(["python", *sys.argv]), datetime.now(timezone.utc).isoformat(timespec="seconds")
        about = {"schema": SCHEMA, "title": self.title, "command": command, "date": date, "load": self._load, "conditions": self._key}
        write_json(self.out / RESULTS, {**about, "notes": self.notes, "cases": self.cases})
        (self.out / REPORT).write_text(self.markdown(), encoding="utf-8")

    def markdown(self) -> str:
        parts = [f"# {self.title}\n"]
        for case in self.cases.values():
            parts.append("\n".join(text for text in (f"## {case['title']}\n", case["table"], case["note"]) if text))
        if self.notes:
            parts.append("## Notes\n\n" + "".join(f"- {note}\n" for note in self.notes))
        versions = ", ".join(f"{name} {version}" for name, version in self._key["versions"].items())
        parts.append(
            f"## Machine\n\n{self._key['processor']}, {self._key['platform']}; load before: {self._load}; {versions}.\n\n"
            f"    {shlex.join(['python', *sys.argv])}\n"
        )
        return "\n".join(parts)


def machine() -> dict[str, Any]:
    import torch

    if torch.cuda.is_available():
        processor = torch.cuda.get_device_name()
    else:
        cpuinfo = Path("/proc/cpuinfo")
        found = re.search(r"^model name\s*:\s*(.+)$", cpuinfo.read_text(encoding="utf-8"), re.MULTILINE) if cpuinfo.is_file() else None
        processor = found[1] if found else platform.processor() or platform.machine()
    versions = {"python": platform.python_version()} | {name: version for name in PACKAGES if (version := installed_version(name))}
    return {"processor": processor, "platform": platform.platform(), "versions": versions}


# Command line.


def parser(description: str | None, example: str, *, rounds: int) -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        description=description, epilog=f"Example: {example}", formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    made.add_argument("--out", "-o", type=Path, help=f"Folder for {RESULTS} and {REPORT}; the same command goes on after an interruption.")
    made.add_argument("--overwrite", action="store_true", help="Start over if the folder has results.")
    made.add_argument("--rounds", type=int, default=rounds, help="Timed rounds (default: %(default)s).")
    made.add_argument("--threads", type=int, help="Threads on a CPU (default: torch's).")
    made.add_argument("--seed", type=int, default=42, help="Random seed of weights and data (default: %(default)s).")
    return made


def run_script(main: Callable[[], None]) -> None:
    """Run a script; the user's mistake is one line and exit status 2."""
    try:
        main()
    except InputError as error:
        sys.stderr.write(f"error: {error}\n")
        raise SystemExit(2) from None
