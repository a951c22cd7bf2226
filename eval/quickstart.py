"""The whole path on one page: mine, split, train, index, score, report, ask; no network and no file needed.

What lands in the output folder:

    data/train.jsonl.gz   training pairs          data/held_out/   a BEIR folder of functions never seen in training
    untrained/            the random model        trained/         the model, and run.json
    results/*/            results.json, runs      index/           the held-out functions, searchable
    report.md             the table, with provenance

Source of the task: CodeSearchNet, arXiv:1909.09436 (docstring -> function).
"""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from encoder import InputError
from eval.evaluation import evaluate
from eval.report.markdown import write_report
from eval.results import Results
from retrieval.biencoder import BiEncoder
from retrieval.docstrings import mine, split_by_module, write_collection, write_pairs
from retrieval.indexes import IndexFolder, build_index
from retrieval.records import Query
from retrieval.search import search
from retrieval.training.data import HELD_OUT, rows_of_pairs
from retrieval.training.dense import build_model
from retrieval.training.recipe import load_recipe
from retrieval.training.run import texts_of, train_and_save

logger = logging.getLogger(__name__)

QUESTIONS = (
    "open a web page in the browser",
    "send a mail message",
    "draw a circle",
)
"""What is asked at the end; not taken from the collection."""

ANSWERS = 3
"""Functions shown for each question."""

SUBFOLDERS = ("data", "untrained", "trained", "results", "index")


@dataclass(frozen=True)
class Answer:
    """One function found for a question."""

    id: str
    score: float
    code: str


@dataclass(frozen=True)
class QuickstartResult:
    """What was made and how well it does.

    Attributes:
        train_pairs: Pairs trained on.
        held_out: Functions indexed and queries asked, as many of each.
        untrained: Results of the random model.
        trained: Results of the same model after training, with BM25 beside it.
        answers: For each question the functions found.
        seconds: Wall time of each stage, by name.
        report: The Markdown report.
    """

    train_pairs: int
    held_out: int
    untrained: Results
    trained: Results
    answers: dict[str, list[Answer]]
    seconds: dict[str, float]
    report: Path


def quickstart(
    out: Path,
    *,
    packages: Sequence[str] = (),
    overrides: Sequence[str] = (),
    overwrite: bool = False,
    progress: bool = False,
    command: str | None = None,
    say: Callable[[str], None] = logger.info,
) -> QuickstartResult:
    """Train and score a small code search model from nothing.

    Args:
        out: Folder for everything; see the module's docstring.
        packages: Installed packages to mine beside the standard library.
        overrides: Changes to the shipped recipe, as ``section.setting=value``.
        overwrite: Replace an earlier quickstart there.
        progress: Show bars.
        command: The command line to record.
        say: Takes one line as each stage begins.

    Raises:
        InputError: ``out`` is taken, a package is not installed, an override is wrong, or an extra is missing.
    """
    recipe = load_recipe("quickstart", overrides)
    _prepare(out, overwrite=overwrite)
    clock = _Clock(say)

    clock.start("mining", "mining docstrings and functions")
    train, held_out = split_by_module(mine(packages=packages, progress=progress), held_out=HELD_OUT, seed=recipe.training.seed)
    collection = out / "data" / "held_out"
    write_pairs(train, out / "data" / "train.jsonl.gz")
    write_collection(held_out, collection)
    rows = rows_of_pairs(train)

    clock.start("training", f"training on {len(train):,} pairs; {len(held_out):,} functions of other modules are held out")
    model = build_model(recipe.model, texts_of(rows), seed=recipe.training.seed)
    model.save(out / "untrained" / "model")
    train_and_save(recipe, rows, model, out / "trained", progress=progress, command=command)

    clock.start("evaluation", "scoring the untrained model, the trained one and BM25")
    results = {
        name: evaluate(str(folder), collection, out=out / "results" / name, progress=progress, command=command)
        for name, folder in (("untrained", out / "untrained" / "model"), ("trained", out / "trained" / "model"))
    }
    report = out / "report.md"
    write_report([out / "results" / name for name in results], report)

    clock.start("search", "indexing the held-out functions and asking three questions")
    trained = BiEncoder.from_pretrained(out / "trained" / "model")
    index = build_index(collection, trained, out / "index", progress=progress)
    answers = _ask(index, trained)
    seconds = clock.stop()
    return QuickstartResult(len(train), len(held_out), results["untrained"], results["trained"], answers, seconds, report)


def _prepare(out: Path, *, overwrite: bool) -> None:
    """Make room; only what an earlier quickstart made is removed."""
    taken = [name for name in (*SUBFOLDERS, "report.md") if (out / name).exists()]
    if taken and not overwrite:
        raise InputError(f"{out}: holds {taken[0]} already; choose another --out, or --overwrite")
    for name in SUBFOLDERS:
        shutil.rmtree(out / name, ignore_errors=True)
    (out / "report.md").unlink(missing_ok=True)
    out.mkdir(parents=True, exist_ok=True)


def _ask(index: IndexFolder, model: BiEncoder) -> dict[str, list[Answer]]:
    found = search(index, model, [Query(question, question) for question in QUESTIONS], ANSWERS).run
    return {question: [Answer(key, score, index.text_of(key)) for key, score in found[question].items()] for question in QUESTIONS}


class _Clock:
    """Wall time by stage."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._seconds: dict[str, float] = {}
        self._stage: tuple[str, float] | None = None

    def start(self, stage: str, message: str) -> None:
        """End the stage before and begin this one."""
        self.stop()
        self._say(message)
        self._stage = (stage, time.perf_counter())

    def stop(self) -> dict[str, float]:
        """End the stage; all of them so far."""
        if self._stage is not None:
            name, began = self._stage
            self._seconds[name] = time.perf_counter() - began
            self._stage = None
        return self._seconds
