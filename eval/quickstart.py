"""The quickstart: mine pairs, split, train, index, evaluate, report and search, without network or input files.

Contents of the output folder:

    data/                 what ``quiver collections docstrings`` writes: functions, docstrings, judgements, training pairs
    untrained/            the random model        trained/         the model, and run.json
    results/*/            results.json, runs      index/           all functions, searchable
    report.html           the report              report.md        the same as text
    .quiver-quickstart    marks the folder as output of a quickstart: without it nothing in the folder is replaced

Source of the task: CodeSearchNet, arXiv:1909.09436 (docstring -> function).
"""

from __future__ import annotations

import importlib.util
import json
import logging
import shlex
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory, mkdtemp

from quiver.encoder.errors import InputError, RunStoppedError
from quiver.eval.evaluation import evaluate, require_baselines
from quiver.eval.report.retrieval import write_report
from quiver.eval.results import Results
from quiver.retrieval.data.docstrings import mine, split_pairs, write_collection
from quiver.retrieval.index import IndexReader, build_index
from quiver.retrieval.models.biencoder import BiEncoder
from quiver.retrieval.models.colbert import ColBERT
from quiver.retrieval.models.loading import load_model
from quiver.retrieval.records import DenseModel, Query, TokenModel
from quiver.retrieval.search.retrievers import IndexSearcher
from quiver.retrieval.training.data import TrainingRows, rows_of_pairs
from quiver.retrieval.training.model import build_model, require_extra
from quiver.retrieval.training.recipe import Recipe, load_recipe
from quiver.retrieval.training.run import check_rows, train_and_save

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Question:
    """A question to search for; it is not part of the collection."""

    text: str
    right: tuple[str, ...]
    lesson: str = ""


QUESTIONS = (
    Question("wrap a paragraph of text", ("textwrap.wrap", "textwrap.fill")),
    Question("compute the median of numbers", ("statistics.median",)),
    Question("shuffle a list", ("random.Random.shuffle",)),
    Question(
        "average of a list of numbers",
        ("statistics.mean", "statistics.fmean"),
        'The word "average" is in no training pair. A model that starts from random weights knows only the words of its pairs; a'
        " pretrained one knows more (all-MiniLM-L6-v2 ranks statistics.mean first).",
    ),
)
"""Questions asked at the end: three whose right function the model finds, one that it answers wrongly. A test asserts both."""

ANSWERS = 3
"""Functions shown for each question."""

SERVICE = ("fastapi", "uvicorn", "prometheus_client")
"""Modules of the extra ``serve``, which training and evaluation do not need."""

NEEDS = "no download, 3 GB of memory, and three to six minutes on two CPU cores"
"""What a quickstart takes."""

BASELINES = ("bm25",)
"""Baselines that both models are compared with."""

REPORTS = ("report.html", "report.md")
"""Reports that a quickstart writes."""

MADE = ("data", "untrained", "trained", "results", "index", *REPORTS)
"""Names that a quickstart creates in its folder; it moves or removes nothing else there."""

MARKER = ".quiver-quickstart"
"""Marker file: the folder's ``MADE`` come from a quickstart."""


@dataclass(frozen=True)
class Answer:
    """One function found for a question."""

    id: str
    score: float
    code: str
    right: bool


@dataclass(frozen=True)
class QuickstartResult:
    """Outcome of a quickstart."""

    train_pairs: int
    test_queries: int
    functions: int
    untrained: Results
    trained: Results
    answers: dict[str, list[Answer]]
    seconds: dict[str, float]
    report: Path
    next_commands: dict[str, str]


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
    """Train and evaluate a small code search model from scratch.

    Errors in the arguments are reported before ``out`` is changed. A run that fails later removes its own files and restores an earlier
    quickstart. If the process is killed, the earlier quickstart remains, complete, in a hidden folder ``.replaced-...``.

    Args:
        out: Output folder; see the module's docstring for its contents.
        packages: Installed packages to mine in addition to the standard library.
        overrides: Changes to the shipped recipe, as ``section.setting=value``.
        overwrite: Replace an earlier quickstart in ``out`` once this one is complete. Nothing but a quickstart is ever replaced.
        progress: Show progress bars.
        command: Command line to record in the results.
        say: Receives one line at the beginning of each stage.

    Raises:
        InputError: ``out`` is in use or cannot be written, a package is not installed, an override is invalid, or an extra is not
            installed.
    """
    recipe = load_recipe("quickstart", overrides)
    _refuse_existing(out, overwrite=overwrite)
    require_extra(recipe.kind)
    require_baselines(BASELINES)
    clock = _Clock(say)

    clock.start("mining", "mining docstrings and functions")
    splits = split_pairs(mine(packages=packages, progress=progress))
    train, collection = splits.train, out / "data"
    with TemporaryDirectory(prefix="quiver-quickstart-") as work:
        rows = rows_of_pairs(train, Path(work))
        check_rows(recipe, rows)

        clock.start("training", f"training on {len(train):,} pairs; {len(splits.test):,} functions of other packages are test queries")
        model = build_model(recipe, rows.texts())
        with _making_room(out):
            write_collection(splits, collection)
            model.save_pretrained(out / "untrained" / "model")
            _train_model(recipe, rows, model, out / "trained", progress=progress, command=command)

            clock.start("evaluation", "scoring the untrained model, the trained one and BM25")
            results = {
                name: evaluate(
                    str(out / name / "model"),
                    collection,
                    out=out / "results" / name,
                    baselines=BASELINES,
                    progress=progress,
                    command=command,
                )
                for name in ("untrained", "trained")
            }
            write_report([out / "results" / name for name in results], *(out / report for report in REPORTS))

            clock.start("search", f"indexing all functions and asking {len(QUESTIONS)} questions")
            trained = load_model(out / "trained" / "model")
            index = build_index(collection, trained, out / "index", progress=progress)
            answers = _ask_questions(index, trained)
    seconds = clock.stop()
    return QuickstartResult(
        train_pairs=len(train),
        test_queries=len(splits.test),
        functions=len(index),
        untrained=results["untrained"],
        trained=results["trained"],
        answers=answers,
        seconds=seconds,
        report=out / REPORTS[0],
        next_commands=next_commands(out),
    )


def _train_model(recipe: Recipe, rows: TrainingRows, model: BiEncoder | ColBERT, out: Path, *, progress: bool, command: str | None) -> None:
    try:
        train_and_save(recipe, rows, model, out, progress=progress, command=command)
    except RunStoppedError as stopped:
        # A quickstart is short and has no --resume, so the caller restores the folder.
        raise KeyboardInterrupt from stopped


def _refuse_existing(out: Path, *, overwrite: bool) -> None:
    """Check early that the output folder can be used."""
    if out.exists() and not out.is_dir():
        raise InputError(f"{out} is a file; --out must name a folder")
    taken = [name for name in MADE if (out / name).exists()]
    if taken and not (out / MARKER).is_file():
        raise InputError(f"{out} already holds {taken[0]}, which quiver quickstart did not write; choose another --out")
    if taken and not overwrite:
        raise InputError(f"{out} already holds {taken[0]}; choose another --out, or add --overwrite")


@contextmanager
def _making_room(out: Path) -> Iterator[None]:
    """Move an earlier quickstart aside while a new one is made; remove the old one on success, the new one on failure.

    The new one is made in place because its records and reports name their folders.
    """
    created = not out.exists()
    try:
        out.mkdir(parents=True, exist_ok=True)
        old = Path(mkdtemp(prefix=".replaced-", dir=out))
    except OSError as error:
        raise InputError(f"{out}: cannot be written ({error.strerror})") from error
    with ExitStack() as undo:  # undone in reverse: remove the new files, put back the old ones, remove their folder
        if created:
            undo.callback(_remove_if_empty, out)
        undo.callback(old.rmdir)
        for name in MADE:
            if (out / name).exists():
                (out / name).rename(old / name)
                undo.callback((old / name).rename, out / name)
        if not (out / MARKER).exists():
            undo.callback((out / MARKER).unlink, missing_ok=True)
            (out / MARKER).write_text("Written by quiver quickstart. A later run may replace: " + ", ".join(MADE) + ".\n", encoding="utf-8")
        undo.callback(_remove_own, out)
        yield
        undo.pop_all()
    shutil.rmtree(old)


def _remove_if_empty(folder: Path) -> None:
    if not any(folder.iterdir()):
        folder.rmdir()


def _remove_own(out: Path) -> None:
    for name in MADE:
        if (out / name).is_dir():
            shutil.rmtree(out / name)
        else:
            (out / name).unlink(missing_ok=True)


def _ask_questions(index: IndexReader, model: DenseModel | TokenModel) -> dict[str, list[Answer]]:
    hits = IndexSearcher(index, model).search([Query(question.text, question.text) for question in QUESTIONS], ANSWERS)
    found = hits.to_run([question.text for question in QUESTIONS])
    return {
        question.text: [
            Answer(key, score, index.text_of(key), key.rpartition(":")[0] in question.right) for key, score in found[question.text].items()
        ]
        for question in QUESTIONS
    }


def next_commands(out: Path) -> dict[str, str]:
    """Commands that work in the folder of a finished quickstart, in the working directory of the call: what it does -> command.

    A command whose extra is not installed says how to install it first.
    """
    files = Path(json.__file__).parent
    has_service = all(importlib.util.find_spec(name) is not None for name in SERVICE)
    first = "" if has_service else ", after: pip install 'quiver-retrieval[serve]'"
    commands = {
        "search, together with BM25": f"search {_quote_path(out / 'index')} 'read a zip archive' -k 5 --fuse bm25 --explain",
        f"open a search page in the browser{first}": f"serve {_quote_path(out / 'index')}",
        "test the difference to BM25": f"report compare bm25 {_quote_path(out / 'results' / 'trained')}",
        "index a folder of files: here Python's json, then yours": (
            f"index build {_quote_path(files)} --model {_quote_path(out / 'trained' / 'model')} --out {_quote_path(out / 'files')}"
        ),
        "see what a longer training would take": "train quickstart training.epochs=4 --dry-run",
    }
    return {what: f"quiver {command}" for what, command in commands.items()}


def _quote_path(path: Path) -> str:
    return shlex.quote(str(path))


class _Clock:
    """Wall-clock time per stage."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._seconds: dict[str, float] = {}
        self._stage: tuple[str, float] | None = None

    def start(self, stage: str, message: str) -> None:
        """End the current stage and begin a new one."""
        self.stop()
        self._say(message)
        self._stage = (stage, time.perf_counter())

    def stop(self) -> dict[str, float]:
        """End the current stage and return the seconds of all stages so far."""
        if self._stage is not None:
            name, began = self._stage
            self._seconds[name] = time.perf_counter() - began
            self._stage = None
        return self._seconds
