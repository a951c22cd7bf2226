"""Pretraining with probes: a short training on another task from a run's current weights, whose score is logged beside the loss.

Pretraining knows nothing of retrieval or of GLUE, so `pretrain` reads the probe of a recipe and hands it to the run.

Source: ModernBERT, arXiv:2412.13663, appendix A (MNLI as a live evaluation) and appendix D (retrieval scores of its ablations).
"""

from __future__ import annotations

import gc
import shutil
import statistics
from pathlib import Path
from typing import Any

from quiver.encoder.errors import InputError
from quiver.encoder.files import expand_home
from quiver.encoder.pretraining import run as pretraining_run
from quiver.encoder.pretraining.recipe import PretrainingRecipe, ProbeSection
from quiver.encoder.pretraining.task import Probe
from quiver.encoder.training.optimization import require_optimizer
from quiver.encoder.training.recipe_file import find_recipe, recipe_kind
from quiver.encoder.training.run_folder import DATA, MODEL
from quiver.eval.development import development_scorer
from quiver.eval.nlu.glue import choose_tasks, train_glue
from quiver.eval.nlu.glue_tasks import TASKS, read_split
from quiver.eval.nlu.recipes import GLUE_KINDS, load_glue_recipe
from quiver.retrieval.training.data.sources import iter_source
from quiver.retrieval.training.model import require_extra
from quiver.retrieval.training.recipe import COLBERT_LENGTHS, LOSSES_BY_KIND, SCORE, STDLIB_DOCSTRINGS, load_recipe
from quiver.retrieval.training.run import train

RUN = "run"  # name of the folder of the short training


def pretrain(
    recipe: PretrainingRecipe,
    out: Path,
    *,
    resume: bool = False,
    progress: bool = False,
    device: str | None = None,
    command: str | None = None,
) -> dict[str, Any]:
    """Run a recipe with the probe that it may have; otherwise as `quiver.encoder.pretraining.pretrain`.

    Raises:
        InputError: As there; or the probe cannot be run: its recipe, data or lengths.
        RunStoppedError: SIGTERM or SIGINT arrived; the run is saved and can be resumed.
    """
    probe = open_probe(recipe, device=device)
    return pretraining_run.pretrain(recipe, out, resume=resume, progress=progress, command=command, device=device, probe=probe)


def open_probe(recipe: PretrainingRecipe, *, device: str | None = None) -> Probe | None:
    """Read the probe of a recipe, if it has one, and check that it can run: its recipe, data and lengths."""
    section = recipe.probe
    if section is None:
        return None
    context = min(phase.context for phase in recipe.phases)
    try:
        kind = recipe_kind(find_recipe(section.recipe))
        if kind in GLUE_KINDS:
            return _open_glue_probe(section, context, device)
        if kind in LOSSES_BY_KIND:
            return _open_retrieval_probe(section, context, device)
        raise InputError(f"{section.recipe} has the kind {kind}; a probe trains a retriever ({', '.join(LOSSES_BY_KIND)}) or on GLUE")
    except InputError as error:
        raise InputError(f"probe: {error}; probe=null trains without one") from error


def _open_glue_probe(section: ProbeSection, context: int, device: str | None) -> Probe:
    """The mean score of the tasks, as a fraction."""
    recipe = load_glue_recipe(section.recipe, section.settings)
    tasks = choose_tasks(recipe, Path(), section.tasks)
    _check_context("data.max_length", recipe.data.max_length, context)
    for name in tasks:
        read_split(recipe.data.source, TASKS[name], "train", limit=1)

    def probe(folder: Path) -> float:
        started = recipe.replace(model=recipe.model.replace(init=str(folder / MODEL)))
        shutil.rmtree(folder / RUN, ignore_errors=True)
        results = train_glue(started, folder / RUN, tasks=tasks, device=device)
        return statistics.fmean(run.scores.score for run in results.runs.values())

    return probe


def _open_retrieval_probe(section: ProbeSection, context: int, device: str | None) -> Probe:
    """nDCG@10 on the development collection, as a fraction; the rows of all probes are prepared once."""
    recipe = load_recipe(section.recipe, section.settings)
    if recipe.development is None:
        raise InputError(f"{section.recipe} has no development collection to score; add development.data=FOLDER_OR_NAME to probe.settings")
    if section.tasks:
        raise InputError(f"probe.tasks are tasks of GLUE, and {section.recipe} trains a retriever; remove them")
    colbert = {name: getattr(recipe.model.colbert, name, None) or default for name, default in COLBERT_LENGTHS.items()}
    lengths = {f"colbert.{name}": length for name, length in colbert.items()} if recipe.kind == "colbert" else {}
    for name, length in {"max_length": recipe.model.max_length or 0, **lengths}.items():
        _check_context(f"model.{name}", length, context)
    require_extra(recipe.kind)
    require_optimizer(recipe.training.optimizer)
    data, scorer = recipe.data, development_scorer(recipe.development)
    for source in (*data.train, *(data.queries or ()), *(data.documents or ())):
        if data.format == "beir" and not expand_home(source).is_dir():
            raise InputError(f"{source}: no such folder")
        if data.format != "beir" and source != STDLIB_DOCSTRINGS:
            next(iter_source(source), None)

    def probe(folder: Path) -> float:
        model = recipe.model.replace(init=str(folder / MODEL), tokenizer=None, architecture=None)
        shutil.rmtree(folder / RUN, ignore_errors=True)
        record = train(recipe.replace(model=model), folder / RUN, scorer=scorer, data_folder=folder / DATA, device=device)
        gc.collect()  # the schedules of torch form reference cycles with the model
        return float(record["result"]["development"][-1][SCORE])

    return probe


def _check_context(name: str, length: int, context: int) -> None:
    if length > context:
        raise InputError(f"{name} must be <= {context}, the shortest context of the phases, got {length}; add {name}=... to probe.settings")
