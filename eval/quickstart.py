"""The whole path on one page: mine, split, train, index, score, report, ask; no network and no file needed.

What lands in the output folder:

    data/train.jsonl.gz   training pairs          data/held_out/   a BEIR folder of functions never seen in training
    untrained/            the random model        trained/         the model, and run.json
    results/*/            results.json, runs      index/           the held-out functions, searchable
    report.md             the table, with provenance
    .quiver-quickstart    says that the names above are ours: without it nothing in the folder is replaced

Source of the task: CodeSearchNet, arXiv:1909.09436 (docstring -> function).
"""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory, mkdtemp

from quiver.encoder import InputError
from quiver.eval.evaluation import evaluate, require_baselines
from quiver.eval.report.retrieval import write_report
from quiver.eval.results import Results
from quiver.retrieval.data.docstrings import mine, split_by_module, write_collection, write_pairs
from quiver.retrieval.index import Index, build_index
from quiver.retrieval.models.biencoder import BiEncoder
from quiver.retrieval.models.colbert import ColBERT
from quiver.retrieval.models.loading import load_model
from quiver.retrieval.protocols import DenseModel, TokenModel
from quiver.retrieval.records import Query
from quiver.retrieval.search.search import search
from quiver.retrieval.training.data import HELD_OUT, TrainingRows, rows_of_pairs
from quiver.retrieval.training.recipe import load_recipe
from quiver.retrieval.training.run import RunStoppedError, check_rows, train_and_save
from quiver.retrieval.training.sections import Recipe
from quiver.retrieval.training.start import build_model, require_extra

logger = logging.getLogger(__name__)

QUESTIONS = (
    "open a web page in the browser",
    "send a mail message",
    "draw a circle",
)
"""What is asked at the end; not taken from the collection."""

ANSWERS = 3
"""Functions shown for each question."""

BASELINES = ("bm25",)
"""What both models are scored beside."""

MADE = ("data", "untrained", "trained", "results", "index", "report.md")
"""What a quickstart makes in its folder, and all that it ever moves or removes there."""

MARKER = ".quiver-quickstart"
"""The file that says the folder's ``MADE`` come from a quickstart."""


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

    What can be found wrong is found before ``out`` is touched. A run that fails later takes away what it made and puts an
    earlier quickstart back; a process that is killed outright leaves the earlier one, whole, in a hidden ``.replaced-...``.

    Args:
        out: Folder for everything; see the module's docstring.
        packages: Installed packages to mine beside the standard library.
        overrides: Changes to the shipped recipe, as ``section.setting=value``.
        overwrite: Replace an earlier quickstart there once this one is complete; nothing but a quickstart is ever replaced.
        progress: Show bars.
        command: The command line to record.
        say: Takes one line as each stage begins.

    Raises:
        InputError: ``out`` is taken or cannot be written, a package is not installed, an override is wrong, or an extra is
            missing.
    """
    recipe = load_recipe("quickstart", overrides)
    _refuse_existing(out, overwrite=overwrite)
    require_extra()
    require_baselines(BASELINES)
    clock = _Clock(say)

    clock.start("mining", "mining docstrings and functions")
    train, held_out = split_by_module(mine(packages=packages, progress=progress), held_out=HELD_OUT, seed=recipe.training.seed)
    collection, report = out / "data" / "held_out", out / "report.md"
    with TemporaryDirectory(prefix="quiver-quickstart-") as work:
        rows = rows_of_pairs(train, Path(work))
        check_rows(recipe, rows)

        clock.start("training", f"training on {len(train):,} pairs; {len(held_out):,} functions of other modules are held out")
        model = build_model(recipe, rows.texts())
        with _making_room(out):
            write_pairs(train, out / "data" / "train.jsonl.gz")
            write_collection(held_out, collection)
            model.save(out / "untrained" / "model")
            _train(recipe, rows, model, out / "trained", progress=progress, command=command)

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
            write_report([out / "results" / name for name in results], report)

            clock.start("search", "indexing the held-out functions and asking three questions")
            trained = load_model(out / "trained" / "model")
            index = build_index(collection, trained, out / "index", progress=progress)
            answers = _ask(index, trained)
    seconds = clock.stop()
    return QuickstartResult(len(train), len(held_out), results["untrained"], results["trained"], answers, seconds, report)


def _train(recipe: Recipe, rows: TrainingRows, model: BiEncoder | ColBERT, out: Path, *, progress: bool, command: str | None) -> None:
    try:
        train_and_save(recipe, rows, model, out, progress=progress, command=command)
    except RunStoppedError as stopped:
        # A quickstart is short, and has no --resume: its folder goes back to what it was.
        raise KeyboardInterrupt from stopped


def _refuse_existing(out: Path, *, overwrite: bool) -> None:
    """Say early that the output cannot go there."""
    if out.exists() and not out.is_dir():
        raise InputError(f"{out}: a file; --out names a folder")
    taken = [name for name in MADE if (out / name).exists()]
    if taken and not (out / MARKER).is_file():
        raise InputError(f"{out}: holds {taken[0]} already, and not from a quickstart; choose another --out")
    if taken and not overwrite:
        raise InputError(f"{out}: holds {taken[0]} already; choose another --out, or --overwrite")


@contextmanager
def _making_room(out: Path) -> Iterator[None]:
    """Move an earlier quickstart aside while a new one is made in its place; whichever is not wanted in the end is removed.

    The new one is not made elsewhere and moved, since its records and reports name the folders that they lie in.
    """
    created = not out.exists()
    try:
        out.mkdir(parents=True, exist_ok=True)
        old = Path(mkdtemp(prefix=".replaced-", dir=out))
    except OSError as error:
        raise InputError(f"{out}: cannot be written ({error.strerror})") from error
    with ExitStack() as undo:  # in reverse: remove the new, put back the old, remove what held it
        if created:
            undo.callback(_remove_empty, out)
        undo.callback(old.rmdir)
        for name in MADE:
            if (out / name).exists():
                (out / name).rename(old / name)
                undo.callback((old / name).rename, out / name)
        if not (out / MARKER).exists():
            undo.callback((out / MARKER).unlink, missing_ok=True)
            (out / MARKER).write_text("A quickstart may replace what one made here: " + ", ".join(MADE) + ".\n", encoding="utf-8")
        undo.callback(_remove, out)
        yield
        undo.pop_all()
    shutil.rmtree(old)


def _remove_empty(folder: Path) -> None:
    if not any(folder.iterdir()):
        folder.rmdir()


def _remove(out: Path) -> None:
    for name in MADE:
        if (out / name).is_dir():
            shutil.rmtree(out / name)
        else:
            (out / name).unlink(missing_ok=True)


def _ask(index: Index, model: DenseModel | TokenModel) -> dict[str, list[Answer]]:
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
