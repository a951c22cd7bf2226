"""A fresh process that loads one library and reports what its runs take: ``python -m eval.efficiency.child``.

It speaks JSON, one object a line. The first line says what to load and is answered with the bytes of the weights when the model
has run once on a short text; each further line is a run, answered with its memory, or with why there was none left:

    {"kind": "ids", "library": "quiver", "model": "DIR", "settings": {...}, "texts": []}   -> {"weights": 4096}
    {"batches": [[512, 512], [512]]}  (kind ids: tokens of each document)        -> {"before": 1, "above": 2, "reserved": null}
    {"texts": ["a", "b"]}             (kind texts)                               -> {"out_of_memory": true}

On a CPU the peak is the kernel's high-water mark of the resident set (Linux), reset before each run; on CUDA it is torch's.
"""

from __future__ import annotations

import json
import os
import re
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

import torch

from quiver.encoder import Encoder
from quiver.encoder.cpu.support import MIN_TOKENS_PER_THREAD
from quiver.encoder.errors import InputError
from quiver.eval.bench.encoder.libraries import LIBRARIES, open_encoder
from quiver.eval.bench.encoder.passes import Prepared
from quiver.eval.bench.encoder.results import Settings
from quiver.eval.bench.encoder.rounds import is_out_of_memory
from quiver.eval.bench.encoder.text_libraries import TEXT_LIBRARIES
from quiver.eval.bench.encoder.workloads import random_documents

Run = Callable[[], None]
Make = Callable[[dict[str, Any]], Run]
Reply = Callable[[dict[str, Any]], Mapping[str, Any]]

WARM_UP = "a short text"
STATUS = Path("/proc/self/status")


def main() -> None:
    """Answer requests until the input ends."""
    serve(_load)


def serve(load: Callable[[dict[str, Any]], tuple[Make, int | None]], *, on_cuda: bool | None = None) -> None:
    """Answer requests for the memory of runs until the input ends.

    Args:
        load: The first line, and what it gives: the function that makes a run of a further line, warm, and the bytes of the weights.
        on_cuda: The runs are on CUDA; None where the first line's ``settings`` name the device.
    """

    def open_runs(first: dict[str, Any]) -> tuple[Reply, int | None]:
        make, weights = load(first)
        cuda = first["settings"]["device"] == "cuda" if on_cuda is None else on_cuda
        return lambda request: measure(make(request), on_cuda=cuda), weights

    answer_requests(open_runs)


def answer_requests(load: Callable[[dict[str, Any]], tuple[Reply, int | None]]) -> None:
    """Answer requests until the input ends.

    Args:
        load: The first line, and what it gives: the function that answers a further line, and what is said of the weights.
    """
    requests, answers = sys.stdin, _private_stdout()
    _offer_to_be_killed()
    sys.excepthook = _one_line_last
    first = json.loads(requests.readline())
    if threads := first["settings"]["threads"]:
        torch.set_num_threads(threads)
    reply, weights = load(first)
    _answer(answers, {"weights": weights})
    for line in requests:
        try:
            _answer(answers, reply(json.loads(line)))
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            _answer(answers, {"out_of_memory": True})


def _load(request: dict[str, Any]) -> tuple[Make, int | None]:
    settings = Settings(**request["settings"])
    _limit_cuda(settings)
    if request["kind"] == "ids":
        return _ids(request["library"], request["model"], settings)
    return _texts(request["library"], request["model"], settings, request["texts"]), None


def _private_stdout() -> TextIO:
    """Keep standard output for answers: what libraries print goes to standard error."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return answers


def _one_line_last(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """The traceback, and below it what the parent quotes: torch ends many messages with lines of general advice."""
    traceback.print_exception(kind, error, trace)
    lines = str(error).strip().splitlines()
    sys.stderr.write(f"{kind.__name__}: {lines[0] if lines else 'no message'}\n")


def _answer(answers: TextIO, content: Mapping[str, Any]) -> None:
    answers.write(json.dumps(content) + "\n")
    answers.flush()


def _offer_to_be_killed() -> None:
    """Where memory runs out, Linux shall end this process and no other."""
    score = Path("/proc/self/oom_score_adj")
    if score.is_file():
        score.write_text("1000", encoding="ascii")


def _limit_cuda(settings: Settings) -> None:
    if settings.device == "cuda" and settings.memory_gib is not None:
        total = torch.cuda.get_device_properties(settings.device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, settings.memory_gib * 2**30 / total))


def _ids(library: str, model: str, settings: Settings) -> tuple[Make, int]:
    encoder: Encoder = open_encoder(model, settings)
    config, loaded = encoder.config, LIBRARIES[library].load(encoder)
    # A peer has its own copy of the weights; ours would count as its memory.
    del encoder

    def make(request: dict[str, Any]) -> Run:
        documents = [list(random_documents(lengths, config, seed=settings.seed)) for lengths in request["batches"]]
        prepared = Prepared(loaded, [loaded.prepare(batch) for batch in documents])
        return lambda: prepared.encode(train=settings.train)

    # One document, and a batch that keeps every thread busy: ours takes torch's kernels for the one and compiled loops for the other,
    # and the libraries of either, which are read at its first batch, are no activations.
    short = min(8, config.max_positions)
    busy = -(-MIN_TOKENS_PER_THREAD * torch.get_num_threads() // short)
    make({"batches": [[short], [short] * busy]})()
    return make, sum(weight.nbytes for weight in loaded.module.state_dict().values())


def _texts(library: str, model: str, settings: Settings, texts: list[str]) -> Make:
    encode = TEXT_LIBRARIES[library].load(model, settings, texts)

    def make(request: dict[str, Any]) -> Run:
        def run() -> None:
            encode(request["texts"])

        return run

    make({"texts": [WARM_UP]})()
    return make


def measure(run: Run, *, on_cuda: bool) -> dict[str, int | None]:
    """Run once and say what it took: the fields of ``quiver.eval.bench.encoder.results.PeakMemory``.

    Raises:
        InputError: This system does not tell a process its peak.
    """
    if on_cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run()
        return {"before": before, "above": torch.cuda.max_memory_allocated() - before, "reserved": torch.cuda.max_memory_reserved()}
    reset_high_water_mark()
    before = resident("VmRSS")
    run()
    return {"before": before, "above": max(0, resident("VmHWM") - before), "reserved": None}


def reset_high_water_mark() -> None:
    """Let ``VmHWM`` begin again at what is resident now.

    Raises:
        InputError: This system does not tell a process its peak.
    """
    try:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    except OSError as error:
        raise InputError(
            "peak memory on a CPU is read from Linux's /proc, which this system does not offer; leave --memory away"
        ) from error


def resident(name: str) -> int:
    """A line of /proc/self/status, in bytes: ``VmRSS``, ``VmHWM``, ``RssAnon`` or ``RssFile``."""
    found = re.search(rf"^{name}:\s+(\d+) kB$", STATUS.read_text(encoding="ascii"), re.MULTILINE)
    if found is None:
        raise RuntimeError(f"{STATUS} has no {name}")
    return int(found[1]) * 1024


if __name__ == "__main__":
    main()
