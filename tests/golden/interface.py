"""What the golden recordings use of Quiver: every Python name, command, option and key, in one place.

A rename is adapted here and nowhere else. Each row of a table has the spelling of the first version and, where it differs, that of the
version with all packages under ``quiver.``. Which one counts is decided by whether ``quiver.encoder`` is there.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn


def _is_new() -> bool:
    # The folder of recipes or of the console script may be called quiver too: the package with an encoder counts.
    return importlib.util.find_spec("quiver") is not None and importlib.util.find_spec("quiver.encoder") is not None


NEW = _is_new()

# ---- Python names: key -> "module:attribute" of the first version, or (first, new). Without a pair the new one has "quiver." before it.
NAMES: dict[str, str | tuple[str, str]] = {
    "Encoder": "encoder:Encoder",
    "EncoderConfig": "encoder:EncoderConfig",
    "Tokenizer": "encoder:Tokenizer",
    "MaskedLM": "encoder:MaskedLM",
    "SequenceClassifier": "encoder:SequenceClassifier",
    "SpanQA": "encoder:SpanQA",
    "init_head": "encoder:init_head",
    "init_weights": "encoder:init_weights",
    "pack_ids": "encoder:pack_ids",
    "preset": "encoder:preset",
    "freeze": ("encoder:freeze", "quiver.encoder:optimize_for_inference"),
    "load_encoder": "encoder:load_encoder",
    "save_encoder": "encoder:save_encoder",
    "load_masked_lm": "encoder:load_masked_lm",
    "save_masked_lm": "encoder:save_masked_lm",
    "load_classifier": "encoder:load_classifier",
    "save_classifier": "encoder:save_classifier",
    "load_span_qa": "encoder:load_span_qa",
    "save_span_qa": "encoder:save_span_qa",
    # One function each for all tasks since.
    "load_head": "encoder:load_head",
    "save_head": "encoder:save_head",
    "BiEncoder": "retrieval:BiEncoder",
    "ColBERT": "retrieval:ColBERT",
    "build_index": "retrieval:build_index",
    "open_index": "retrieval:open_index",
    "evaluate": "eval:evaluate",
    # Not of the packages' own __all__: the stream of packed batches, and what the two-step training of journeys.py needs.
    "load_pretraining_recipe": "encoder.pretraining.recipe:load_pretraining_recipe",
    "open_corpus": "encoder.pretraining.corpus:open_corpus",
    "PhaseStream": "encoder.pretraining.stream:PhaseStream",
    "Processes": ("encoder.running.processes:Processes", "quiver.encoder.training.processes:Processes"),
    "load_recipe": "retrieval.training.recipe:load_recipe",
    "train_recipe": ("retrieval.training.run:train_recipe", "quiver.retrieval.training.run:train"),
    "main": ("retrieval.cli.main:main", "quiver.cli.main:main"),
}

# ---- Modules: what `import retrieval` and the command line load, and which folders of the checkout hold own files.
PACKAGE = "quiver.retrieval" if NEW else "retrieval"
OWN_PACKAGES = ("encoder", "retrieval", "eval", "quiver")

# ---- Commands of the command line: key -> words.
COMMANDS: dict[str, str | tuple[str, str]] = {
    "evaluate": "evaluate",
    "export": "export",
    "index build": "index build",
    "index info": "index info",
    "search": "search",
    "serve": "serve",
    "train": "train",
    "pretrain": "pretrain",
    "glue": "glue",
    "qa train": "qa train",
    "qa evaluate": "qa evaluate",
}

# ---- Options of the command line: key -> spelling.
OPTIONS: dict[str, str | tuple[str, str]] = {
    "model": "--model",
    "data": "--data",
    "out": "--out",
    "index": "--index",
    "int8": ("--int8", "--dtype"),
    "cache": "--cache",
    "no_bm25": "--no-bm25",
    "overwrite": "--overwrite",
    "layout": "--layout",
    "engine": "--engine",
    "set": "--set",
    "seed": "--seed",
    "no_calibrate": "--no-calibrate",
    "queries": "--queries",
    "run": ("--run", "--out"),
    "k": "-k",
    "effort": "--effort",
    "filter": "--filter",
    "with": ("--with", "--fuse"),
    "rerank": "--rerank",
    "port": "--port",
    "json": "--json",
    "prepare": "--prepare",
    "official": "--official",
    "max_length": "--max-length",
    "overlap": "--overlap",
    "max_question_length": "--max-question-length",
    "max_answer_length": "--max-answer-length",
}

# ---- Values of options: engines and layouts.
VALUES: dict[str, str | tuple[str, str]] = {
    "exact": "exact",
    "auto": "auto",
    "exact-dense": "exact-dense",
    "pq-dense": "pq-dense",
    "ivf-dense": "ivf-dense",
    "faiss-dense": "faiss-dense",
    "exact-tokens": "exact-tokens",
    "ivf-tokens": "ivf-tokens",
    "balanced": "balanced",
    "fast": "fast",
    "bm25": "bm25",
    "sentence-transformers": "sentence-transformers",
    "pylate": "pylate",
    "hf": "hf",
    "stanford": "stanford",
    "onnx": "onnx",
}

# ---- Files of a run and keys of what is written.
FILES: dict[str, str | tuple[str, str]] = {
    "log": "log.jsonl",
    "results": "results.json",
    "predictions": "predictions.json",
    "model": "model",
    "corpus": "corpus",
    "tokenizer": "tokenizer",
}


def _choose(table: Mapping[str, str | tuple[str, str]], key: str) -> str:
    found = table[key]
    return found if isinstance(found, str) else found[NEW]


def name(key: str) -> Any:
    """The Python object of a key of `NAMES`."""
    found = NAMES[key]
    path = found[NEW] if isinstance(found, tuple) else f"quiver.{found}" if NEW else found
    module, _, attribute = path.partition(":")
    return getattr(importlib.import_module(module), attribute)


def value(key: str) -> str:
    """An engine or a layout as the command line has it."""
    return _choose(VALUES, key)


def file(key: str) -> str:
    """The name of a file or a folder that a run writes."""
    return _choose(FILES, key)


def arguments(command: str, *positional: object, **options: object) -> list[str]:
    """The arguments of a command, without the executable.

    Args:
        command: A key of `COMMANDS`.
        positional: What stands behind it.
        options: Key of `OPTIONS` -> value; True for one without a value, a list for one that is repeated, None and False to leave it out.
    """
    words = [*_choose(COMMANDS, command).split(), *map(str, positional)]
    for key, given in options.items():
        if given is None or given is False:
            continue
        spelling = _choose(OPTIONS, key)
        for each in given if isinstance(given, list) else [given]:
            words += [spelling] if each is True else [spelling, str(each)]
    return words


def executable() -> list[str]:
    """The ``quiver`` beside this Python; else the module that holds the command line."""
    beside = Path(sys.executable).parent / "quiver"
    module = NAMES["main"][NEW] if isinstance(NAMES["main"], tuple) else f"{'quiver.' * NEW}{NAMES['main']}"
    return [str(beside)] if beside.is_file() else [sys.executable, "-m", module.partition(":")[0]]


def environment(cache: Path) -> dict[str, str]:
    """What a child runs under: one thread, no network, a cache of its own."""
    return {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "QUIVER_CACHE": str(cache), "COLUMNS": "200"}


def quiver(command: str, *positional: object, cwd: Path, **options: object) -> str:
    """Run a command to its end, in a process of its own.

    Where processes can be forked, the child is a copy of this one with the command line imported, which saves the seconds of the imports;
    with QUIVER_GOLDEN_SPAWN=1, or elsewhere, it is the executable.

    Args:
        command: As of `arguments`.
        positional: As of `arguments`.
        cwd: Where it runs; the cache lies there too.
        options: As of `arguments`.

    Returns:
        Its standard output.

    Raises:
        RuntimeError: It failed; with the end of its standard error.
    """
    words = arguments(command, *positional, **options)
    forks = hasattr(os, "fork") and os.environ.get("QUIVER_GOLDEN_SPAWN") != "1"
    code, out, err = (_forked if forks else _spawned)(words, cwd)
    if code:
        raise RuntimeError(f"quiver {' '.join(words)}: exit status {code}\n{err[-3000:]}")
    return out


def _spawned(words: Sequence[str], cwd: Path) -> tuple[int, str, str]:
    done = subprocess.run([*executable(), *words], cwd=cwd, env=environment(cwd / "cache"), capture_output=True, text=True, check=False)
    return done.returncode, done.stdout, done.stderr


def _forked(words: Sequence[str], cwd: Path) -> tuple[int, str, str]:
    main = name("main")
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        sys.stdout.flush()
        sys.stderr.flush()
        child = os.fork()
        if not child:
            _become(main, words, cwd, out.fileno(), err.fileno())
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        return code, *(each.seek(0) or each.read().decode("utf-8", "replace") for each in (out, err))


def _become(main: Callable[[], object], words: Sequence[str], cwd: Path, out: int, err: int) -> NoReturn:
    """Be the command line, in a child that has just been forked."""
    code = 1
    try:
        os.dup2(out, 1)
        os.dup2(err, 2)
        os.chdir(cwd)
        os.environ.update(environment(cwd / "cache"))
        sys.argv = ["quiver", *words]
        main()
        code = 0
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def start(words: Sequence[str], *, cwd: Path) -> subprocess.Popen[str]:
    """Start a command that goes on, with its standard output to be read."""
    return subprocess.Popen(
        [*executable(), *words], cwd=cwd, env=environment(cwd / "cache"), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )


def first_url(process: subprocess.Popen[str], *, seconds: float = 120.0) -> str:
    """The first URL that a process prints."""
    end, read = time.monotonic() + seconds, ""
    while process.stdout is not None and time.monotonic() < end and (line := process.stdout.readline()):
        read += line
        if found := re.search(r"http://[\w.]+:\d+", read):
            return found[0]
    raise RuntimeError(f"no URL in {read!r}")
