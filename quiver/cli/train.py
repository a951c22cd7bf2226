"""Training commands: train, pretrain, sweep, validate, average-checkpoints, mine, teacher-scores."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NoReturn

import typer

from quiver.cli import options
from quiver.cli.output import (
    command_line,
    place_encoding,
    print_json,
    print_table,
    say,
    say_error,
    vector_cache,
)
from quiver.encoder.environment import is_main_process
from quiver.encoder.errors import InputError

if TYPE_CHECKING:
    from quiver.encoder.pretraining.recipe import PretrainingRecipe
    from quiver.retrieval.index import Index
    from quiver.retrieval.models.options import ModelOptions
    from quiver.retrieval.records import Dtype, Executor
    from quiver.retrieval.training.dry_run import DryRun, PretrainingDryRun
    from quiver.retrieval.training.mining.negatives import MiningSystem
    from quiver.retrieval.training.mining.teacher_scores import Ensemble, Teacher
    from quiver.retrieval.training.mining.texts import BeirSource, PairSource
    from quiver.retrieval.training.recipe import Recipe
    from quiver.retrieval.training.sweep import Sweep

_NO_OUT = "--out names the run folder; add --out FOLDER, or --dry-run to write nothing"

DOCUMENT_FIELDS = {"texts": ["positive", "negatives"], "ids": ["document_ids"]}
"""Default fields of the documents of a row, by format: as ``quiver mine`` writes them."""


def report_stopped(stopped: Exception, *, resume: bool, overwrite: bool = False) -> NoReturn:
    """Print how to resume a run that a signal stopped, and exit.

    Raises:
        typer.Exit: With status 1.
    """
    if is_main_process():
        change = " without --overwrite" * overwrite + " with --resume" * (not resume)
        say_error(f"{stopped}; repeat the command{change} to resume")
    raise typer.Exit(1) from stopped


def with_dtype(overrides: Sequence[str] | None, dtype: str | None) -> list[str]:
    """Overrides of a recipe, and the dtype of the option."""
    return [*(overrides or []), *([] if dtype is None else [f"training.dtype={dtype}"])]


def train(
    recipe: Annotated[str, typer.Argument(help="Recipe file (.yaml, .json), or the name of a shipped recipe.")],
    out: options.RunOut = None,
    overrides: options.Overrides = None,
    dtype: options.TrainingDtype = None,
    device: options.Device = None,
    resume: options.Resume = False,
    overwrite: options.Overwrite = False,
    dry_run: options.DryRun = False,
    progress: options.Progress = True,
    as_json: options.Json = False,
) -> None:
    """Train a retriever from a recipe.

    SIGTERM and Ctrl-C finish the current step and save a checkpoint; --resume continues from it.

    --dry-run checks data, model and settings, trains a few batches, and prints rows, tokens, updates, memory and duration.

    For several processes: torchrun --no-python --nproc-per-node 8 quiver train ...

    Examples: quiver train quickstart --out runs/mine training.batch_size=128

    quiver train quickstart --dry-run training.batch_size=128
    """
    from quiver.eval import training
    from quiver.retrieval.training.recipe import load_recipe
    from quiver.retrieval.training.run import RunStoppedError

    resolved = load_recipe(recipe, with_dtype(overrides, dtype))
    if dry_run:
        _check_dry_run(out, resume=resume, overwrite=overwrite)
        _dry_run(resolved, device=device, progress=progress, as_json=as_json)
        return
    if out is None:
        raise InputError(_NO_OUT)
    try:
        record = training.train(resolved, out, resume=resume, overwrite=overwrite, progress=progress, command=command_line(), device=device)
    except RunStoppedError as stopped:
        report_stopped(stopped, resume=resume)
    if is_main_process():
        print_json(record) if as_json else _print_run(record, out)


def _dry_run(recipe: Recipe, *, device: str | None, progress: bool, as_json: bool) -> None:
    """Check all that `train` needs, and print what it would do."""
    from quiver.eval.development import development_scorer
    from quiver.retrieval.training.dry_run import dry_run

    if recipe.development is not None:
        development_scorer(recipe.development, progress=progress)  # reads the collection
    say_next = None if as_json else partial(typer.echo, err=True)
    found = dry_run(recipe, device=device, progress=progress, say=say_next)
    if as_json:
        print_json(_dry_run_json(found))
        return
    about = "" if found.exact else "about "
    left_out = 0 if recipe.training.no_duplicates else found.rows % recipe.training.batch_size  # with it, an epoch may have fewer batches
    notes = _row_notes(found.documents_per_row, found.skipped, found.not_relevant, found.rows_short, found.rows_cut)
    notes += [f"{left_out:,} left out of each epoch: batches are full"] if left_out else []
    rows = [
        ("rows", f"{found.rows:,}" + (f" ({'; '.join(notes)})" if notes else "")),
        ("documents per row", f"{found.documents_per_row:,}"),
        ("rows per update", f"{found.batch['effective']:,}"),
        ("negatives per query", f"{found.batch['negatives_per_query']:,}"),
        ("updates", f"{found.updates:,}"),
        ("tokens", f"{about}{found.tokens:,} in {found.texts:,} texts"),
        ("truncated texts", f"{about}{found.truncated:.1%}"),
        *_dry_run_rows(found),
        ("tokens/s", f"{found.tokens_per_second:,.0f}, measured on {found.measured_batches} batch{'es' * (found.measured_batches > 1)}"),
    ]
    print_table(f"{recipe.name}: dry run, nothing was written", ("", "value"), rows)


def _row_notes(documents: int, skipped: int, not_relevant: int, short: int, cut: int) -> list[str]:
    """What is said of rows that are not as the others."""
    counts = {
        "skipped": skipped,
        "left out by their label": not_relevant,
        f"with fewer than {documents:,} documents": short,
        f"with more than {documents:,} documents": cut,
    }
    return [f"{count:,} {what}" for what, count in counts.items() if count]


def _check_dry_run(out: Path | None, *, resume: bool, overwrite: bool | None) -> None:
    from quiver.encoder.training.run_folder import refuse_existing

    if resume:
        raise InputError("--dry-run predicts a new run; remove --resume")
    if out is not None:
        refuse_existing(out, overwrite=overwrite)


def _dry_run_json(found: DryRun | PretrainingDryRun) -> dict[str, Any]:
    return {**dataclasses.asdict(found), "updates": found.updates, "seconds": found.seconds}


def _dry_run_rows(found: DryRun | PretrainingDryRun) -> list[tuple[str, str]]:
    """Weights, peak memory and duration."""
    return [
        ("trained weights", f"{found.parameters:,} on {found.device}, {found.dtype}"),
        *([("peak memory", f"{found.peak_memory / 1e9:.2f} GB")] if found.peak_memory is not None else []),
        ("duration", f"{_duration(found.seconds)}, evaluation and saving not counted"),
    ]


def _duration(seconds: float) -> str:
    minutes, hours = seconds / 60, seconds / 3600
    return f"{hours:.1f} hours" if hours >= 1 else f"{minutes:.0f} minutes" if minutes >= 2 else f"{seconds:.0f} seconds"


def _print_run(record: dict[str, Any], out: Path) -> None:
    from quiver.encoder.training.run_folder import REPORTS

    result, data, batch = record["result"], record["data"], record["batch"]
    notes = _row_notes(data["documents_per_row"], data["skipped"], data["not_relevant"], data["rows_short"], data["rows_cut"])
    rows = [
        ("rows", f"{data['rows']:,}" + (f" ({'; '.join(notes)})" if notes else "")),
        ("rows per update", f"{batch['effective']:,}"),
        ("negatives per query", f"{batch['negatives_per_query']:,}"),
        ("updates", f"{result['steps']:,}"),
        ("last loss", f"{result['losses'][-1][1]:.4f}"),
        *([("last nDCG@10", f"{100 * result['development'][-1]['ndcg@10']:.2f}")] if result["development"] else []),
        ("truncated texts", f"{result['texts_truncated'] / result['texts']:.1%}"),
        ("seconds", f"{result['seconds']:.0f}"),
    ]
    print_table(str(out), ("", "value"), rows)
    say(f"model: {out / 'model'}")
    say(f"report: {next(path for name in reversed(REPORTS) if (path := out / name).exists())}")


def pretrain(
    recipe: Annotated[str, typer.Argument(help="Recipe file, or the name of a shipped recipe: pretrain_small, pretrain_base, ...")],
    out: options.RunOut = None,
    overrides: options.Overrides = None,
    dtype: options.TrainingDtype = None,
    device: options.Device = None,
    resume: options.Resume = False,
    dry_run: options.DryRun = False,
    prepare: Annotated[
        bool, typer.Option("--prepare", help="Only train the tokenizer and tokenize the corpus, in one process; --resume then trains.")
    ] = False,
    progress: options.Progress = True,
    as_json: options.Json = False,
) -> None:
    """Pretrain an encoder by masked language modelling, in one or more phases.

    SIGTERM and Ctrl-C finish the current step and save a checkpoint; --resume continues from it.

    --dry-run checks corpus, model and settings, trains a few packed rows of each phase, and prints documents, updates, memory and duration.

    For several processes: torchrun --no-python --nproc-per-node 8 quiver pretrain ... Tokenize a large corpus with --prepare first, without
    torchrun.

    Examples: quiver pretrain pretrain_small --out runs/small phases.0.tokens=500000

    quiver pretrain pretrain_small --dry-run phases.0.tokens=500000
    """
    from quiver.encoder.pretraining import load_pretraining_recipe
    from quiver.encoder.pretraining import prepare as prepare_recipe
    from quiver.encoder.pretraining import pretrain as run_recipe
    from quiver.encoder.training.processes import RunStoppedError
    from quiver.eval.report.training import write_training_report
    from quiver.retrieval.models.loading import check_device

    device = None if device is None else check_device(device)
    resolved = load_pretraining_recipe(recipe, with_dtype(overrides, dtype))
    if dry_run:
        if prepare:
            raise InputError("--dry-run writes nothing, and --prepare writes the corpus; remove one of the two")
        _check_dry_run(out, resume=resume, overwrite=None)
        _dry_run_pretraining(resolved, device=device, progress=progress, as_json=as_json)
        return
    if out is None:
        raise InputError(_NO_OUT)
    if prepare:
        prepare_recipe(resolved, out, resume=resume)
        say(f"prepared: {out}; repeat the command with --resume instead of --prepare to train")
        return
    try:
        record = run_recipe(resolved, out, resume=resume, progress=progress, command=command_line(), device=device)
    except RunStoppedError as stopped:
        report_stopped(stopped, resume=resume)
    if is_main_process():
        report = write_training_report(out)
        print_json(record) if as_json else _print_pretraining(record, out, report)


def _dry_run_pretraining(recipe: PretrainingRecipe, *, device: str | None, progress: bool, as_json: bool) -> None:
    """Check all that `pretrain` needs, and print what it would do."""
    from quiver.retrieval.training.dry_run import dry_run_pretraining

    found = dry_run_pretraining(recipe, device=device, progress=progress)
    if as_json:
        print_json({**_dry_run_json(found), "phases": [{**dataclasses.asdict(phase), "seconds": phase.seconds} for phase in found.phases]})
        return
    more = "" if found.exact else "more than "
    rows = [
        ("documents", f"{more}{found.documents:,}, {found.held_out:,} held out"),
        ("tokens of the corpus", f"{more}{found.corpus_tokens:,}"),
        ("vocabulary", f"{found.vocabulary:,}"),
        ("tokens of the run", f"{sum(phase.tokens for phase in found.phases):,}"),
        ("updates", f"about {found.updates:,}"),
        *_dry_run_rows(found),
    ]
    print_table(f"{recipe.name}: dry run, nothing was written", ("", "value"), rows)
    phases = [
        (
            phase.name,
            f"{phase.tokens:,}",
            f"{phase.passes:.1f}",
            f"{phase.updates:,}",
            f"{phase.split:.1%}",
            f"{phase.packing:.1%}",
            f"{phase.tokens_per_second:,.0f}",
            _duration(phase.seconds),
        )
        for phase in found.phases
    ]
    print_table("phases", ("phase", "tokens", "passes", "updates", "split documents", "packing", "tokens/s", "duration"), phases)


def _print_pretraining(record: dict[str, Any], out: Path, report: Path) -> None:
    result, held_out = record["result"], record["result"]["curves"]["held_out_loss"]
    rows = [
        ("parameters", f"{record['model']['parameters']:,}"),
        ("updates", f"{result['steps']:,}"),
        ("tokens", f"{result['tokens']:,}"),
        ("packing", f"{result['packing']:.2%}"),
        ("last loss", f"{result['curves']['loss'][-1][1]:.4f}"),
        *([("held-out loss", f"{held_out[-1][1]:.4f}")] if held_out else []),
        ("seconds", f"{result['seconds']:.0f}"),
    ]
    print_table(str(out), ("", "value"), rows)
    say(f"model: {out / 'model'}")
    say(f"report: {report}")


def sweep(
    recipe: Annotated[str, typer.Argument(help="Recipe file, or the name of a shipped recipe; it needs a development section.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder to write: one folder per run, sweep.json, sweep.md and sweep.svg.")],
    settings: Annotated[
        list[str] | None,
        typer.Argument(
            help="section.setting=value,value to sweep over; section.setting=value for all runs. Default: the paper's learning rates."
        ),
    ] = None,
    dtype: options.TrainingDtype = None,
    device: options.Device = None,
    overwrite: options.Overwrite = False,
    progress: options.Progress = True,
    as_json: options.Json = False,
) -> None:
    """Train a recipe with every combination of some settings and select the best on its development collection.

    An interrupted sweep resumes when the command is repeated; values may be added to a finished sweep. Seeds are replicates:
    candidates are compared by their mean over the seeds.

    Example: quiver sweep docstrings-dense --out sweeps/docstrings training.learning_rate=3e-5,8e-5 training.seed=1,2
    """
    from quiver.eval.development import development_scorer
    from quiver.eval.report.training import write_sweep_report
    from quiver.retrieval.training import run as training_run
    from quiver.retrieval.training.run import RunStoppedError
    from quiver.retrieval.training.sweep import RECORD, make_grid, run_sweep

    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise InputError("quiver sweep runs in one process: start it without torchrun, or train each run with torchrun and quiver train")
    grid = make_grid(recipe, with_dtype(settings, dtype))
    development = grid.runs[0].recipe.development
    if development is None:  # make_grid requires one
        raise ValueError("the runs of a sweep have a development section")
    scorer = development_scorer(development, progress=progress)

    def train(recipe: Recipe, out: Path, *, resume: bool, data_folder: Path) -> None:
        training_run.train(
            recipe, out, resume=resume, progress=progress, command=command_line(), scorer=scorer, data_folder=data_folder, device=device
        )

    def write_report(sweep: Sweep) -> None:
        write_sweep_report(sweep, out)

    report = (lambda line: typer.echo(line, err=True)) if progress else lambda line: None
    try:
        found = run_sweep(grid, out, train=train, overwrite=overwrite, command=command_line(), report=report, changed=write_report)
    except RunStoppedError as stopped:
        report_stopped(stopped, resume=True, overwrite=overwrite)
    if as_json:
        say((out / RECORD).read_text(encoding="utf-8").rstrip())
    else:
        _print_sweep(found, out)
    if failed := [run for run in found.runs if run.error is not None]:
        say_error(
            f"{len(failed)} of {len(found.runs)} runs failed, {failed[0].folder} with: {failed[0].error}; repeat the command to try again"
        )
        raise typer.Exit(1)


def _print_sweep(sweep: Sweep, out: Path) -> None:
    from quiver.eval.report.training import cautions, train_command
    from quiver.retrieval.training.sweep import show_settings

    rows = [
        (
            show_settings(candidate.settings) or "the recipe",
            "" if candidate.mean is None else f"{100 * candidate.mean:.2f}",
            "" if candidate.deviation is None else f"{100 * candidate.deviation:.2f}",
            str(len(candidate.scores)),
        )
        for candidate in sweep.candidates
    ]
    data = f"{sweep.development['data']}, split {sweep.development['split']}"
    print_table(f"nDCG@10 on {data}, in points", ("candidate", "mean", "deviation", "runs"), rows)
    for caution in cautions(sweep):
        say(caution)
    if sweep.best is not None:
        say(f"best: {', '.join(str(out / folder / 'model') for folder in sweep.best.folders)}")
        say(f"to train it again: {train_command(sweep, out / 'best')}")
    say(f"report: {out / 'sweep.md'}")


def validate(
    recipes: Annotated[
        list[str],
        typer.Argument(
            metavar="RECIPES...",
            help="Recipe files, names of shipped recipes, and settings to change in all of them: section.setting=value.",
        ),
    ],
    as_json: options.Json = False,
) -> None:
    """Check recipes of any kind without training, and list all their problems.

    The data and the model are not opened: quiver train RECIPE --dry-run does that.

    Examples: quiver validate quickstart docstrings-dense

    quiver validate recipes/*.yaml

    quiver validate quickstart data.train=pairs.jsonl training.batch_size=32
    """
    overrides = [word for word in recipes if "=" in word and not Path(word).exists()]
    names = [word for word in recipes if word not in overrides]
    if not names:
        raise InputError("name at least one recipe before the settings to change")
    problems = {}
    for name in names:
        try:
            _load_recipe(name, overrides)
        except InputError as error:
            problems[name] = str(error)
    if as_json:
        print_json({"checked": len(names), "problems": problems})
    if problems:
        raise InputError("\n".join(problems.values()))
    if not as_json:
        say(f"{len(names)} recipe{'s' if len(names) != 1 else ''} checked, no problems")


def _load_recipe(name: str, overrides: Sequence[str]) -> object:
    """Load a recipe according to its ``kind``; a recipe of an unknown kind as a retriever's, whose loader reports the kind."""
    from quiver.encoder.pretraining.recipe import KINDS as PRETRAINING_KINDS
    from quiver.encoder.pretraining.recipe import load_pretraining_recipe
    from quiver.encoder.training.recipe_file import find_recipe, recipe_kind
    from quiver.eval.nlu.recipes import GLUE_KINDS, QA_KINDS, load_glue_recipe, load_qa_recipe
    from quiver.retrieval.training.recipe import load_recipe

    kind = recipe_kind(find_recipe(name))
    if kind in PRETRAINING_KINDS:
        return load_pretraining_recipe(name, overrides)
    if kind in GLUE_KINDS:
        return load_glue_recipe(name, overrides)
    return load_qa_recipe(name, overrides) if kind in QA_KINDS else load_recipe(name, overrides)


def average_checkpoints(
    models: Annotated[list[str], typer.Argument(help="Model folders or hub ids; a checkpoint of a run is a model folder.")],
    out: options.ModelOut,
    overwrite: options.Overwrite = False,
    as_json: options.Json = False,
) -> None:
    """Average the weights of models that have the same architecture, tokenizer and settings.

    Example: quiver average-checkpoints runs/mine/checkpoints/step-000400 runs/mine/checkpoints/step-000500 --out runs/averaged
    """
    from quiver.retrieval.training.state import write_average

    card = write_average(models, out, overwrite=overwrite)
    if as_json:
        print_json({"out": str(out), "models": models, "fingerprint": card.fingerprint})
    else:
        say(f"model: {out}, the mean of {len(models)} models")


def mine(
    data: Annotated[
        list[str],
        typer.Argument(help="BEIR folder; or files of pairs (.jsonl, .csv, .tsv, .parquet), folders of such files, or hub:// sources."),
    ],
    out: options.Out,
    model: Annotated[
        str | None,
        typer.Option("--model", "-m", help="Model to search with: a bi-encoder, a ColBERT model or bm25. Default: the model of --index."),
    ] = None,
    index: options.SearchedIndex = None,
    corpus: Annotated[
        Path | None, typer.Option(help="Additional documents to search when mining for pairs: a corpus.jsonl[.gz] or its folder.")
    ] = None,
    split: options.Split = "train",
    query_field: Annotated[str, typer.Option(help="Name of the field with the query of a pair.")] = "query",
    positive_field: Annotated[
        str, typer.Option(help="Name of the field with the positive of a pair, or a list of positives.")
    ] = "positive",
    negatives: Annotated[int, typer.Option("--negatives", "-n", min=1, help="Number of hard negatives per query.")] = 7,
    ranks: Annotated[
        str, typer.Option(help="Range of ranks to take negatives from; positives and duplicates of them are not ranked.")
    ] = "1-200",
    choose: Annotated[Literal["top", "random"], typer.Option(help="Take the best candidates within --ranks, or random ones.")] = "top",
    margins: Annotated[
        list[str] | None,
        typer.Option(
            "--margin",
            help="Upper limit on the score of a negative: perc-pos=SHARE of the positive's score, margin-pos=DISTANCE below it, or"
            " max-score=VALUE; none for no limit. Repeatable. Default: perc-pos=0.95.",
        ),
    ] = None,
    seed: options.Seed = 42,
    form: Annotated[
        Literal["texts", "ids"], typer.Option("--format", help="Form of the rows: texts, or ids with the texts in separate files.")
    ] = "texts",
    suspects: Annotated[int, typer.Option(min=0, help="Number of suspected false negatives to list per query.")] = 5,
    limit: Annotated[int | None, typer.Option(min=1, help="Number of queries to mine for, from the first. Default: all.")] = None,
    title: options.Title = True,
    dtype: options.Dtype = None,
    device: options.Device = None,
    devices: options.Devices = None,
    batch_tokens: options.BatchTokens = None,
    query_length: options.QueryLength = None,
    document_length: options.DocumentLength = None,
    query_prompt: options.QueryPrompt = None,
    document_prompt: options.DocumentPrompt = None,
    truncate_dim: options.TruncateDim = None,
    cache: options.Cache = None,
    no_cache: options.NoCache = False,
    executor: options.Executor = "local",
    workers: options.Workers = None,
    address: options.Address = None,
    overwrite: options.Overwrite = False,
    progress: options.Progress = True,
    as_json: options.Json = False,
) -> None:
    """Mine hard negatives with a model, an index or BM25. Repeat the command to resume an interrupted run.

    Examples: quiver mine data/scifact --model MODEL --out mined

    quiver mine pairs.jsonl.gz --positive-field pos -m bm25 --margin none --ranks 10-200 --choose random --out mined
    """
    from quiver.retrieval.index import open_index
    from quiver.retrieval.models import bm25
    from quiver.retrieval.models.options import ModelOptions
    from quiver.retrieval.training.mining.negatives import PERC_POS, Output, Rules, mine_negatives, parse_margins, parse_ranks

    rules = Rules(
        negatives=negatives,
        ranks=parse_ranks(ranks),
        margins=(PERC_POS,) if margins is None else parse_margins(margins),
        choice=choose,
        seed=seed,
    )
    source = _pairs(data, split=split, query_field=query_field, positive_field=positive_field, corpus=corpus, use_title=title)
    opened = None if index is None else open_index(index)
    if opened is not None and corpus is not None:
        raise InputError("--index and --corpus exclude each other: the index already holds the documents")
    if model == bm25.NAME and (executor, workers, address, devices) != ("local", None, None, None):
        raise InputError(
            f"--executor, --workers, --address and --devices distribute encoding, and {bm25.NAME} encodes nothing; remove them"
        )
    encoding, here = place_encoding(executor, workers=workers, address=address, device=device, devices=devices)
    settings = ModelOptions(query_length, document_length, query_prompt, document_prompt, truncate_dim)
    record = mine_negatives(
        source,
        _searched(model, opened, dtype, here, batch_tokens, settings, vector_cache(cache, no_cache), encoding),
        out,
        rules=rules,
        output=Output(ids=form == "ids", suspects=suspects, limit=limit),
        overwrite=overwrite,
        progress=progress,
        command=command_line(),
    )
    if as_json:
        print_json(record)
        return
    _print_mined(record, out, negatives, ids=form == "ids")


def _pairs(
    data: list[str], *, split: str, query_field: str, positive_field: str, corpus: Path | None, use_title: bool
) -> BeirSource | PairSource:
    from quiver.encoder.files import expand_home
    from quiver.retrieval.training.mining.texts import BeirSource, PairSource

    folder = expand_home(data[0])
    if len(data) > 1 or not (folder / "qrels").is_dir():
        return PairSource(tuple(data), query_field, positive_field, corpus, use_title)
    if corpus is not None:
        raise InputError(f"{folder}: a BEIR folder has a corpus of its own; --corpus is only for pairs")
    return BeirSource(folder, split, use_title)


def _searched(
    model: str | None,
    index: Index | None,
    dtype: Dtype | None,
    device: str | None,
    batch_tokens: int | None,
    options: ModelOptions,
    cache: Path | None,
    executor: Executor,
) -> MiningSystem:
    from quiver.retrieval.models import bm25
    from quiver.retrieval.models.index_model import load_index_model
    from quiver.retrieval.models.options import FOLDERS_SETTINGS
    from quiver.retrieval.training.mining.negatives import MiningSystem

    if model is None and index is None:
        raise InputError(f"pass --model (a folder, a hub id or {bm25.NAME}) or --index")
    built, source = (str(model), None) if index is None or model == bm25.NAME else (index.manifest.model, model)
    if not isinstance(built, str) and built.kind != bm25.NAME:
        if dtype is not None:
            raise InputError("--dtype: the model of an index runs in the dtype of the index; remove the option")
        if options != FOLDERS_SETTINGS:
            raise InputError("lengths, prompts and --truncate-dim: the model of an index has those of the index; remove the options")
    loaded = load_index_model(built, source, dtype=dtype, device=device, batch_tokens=batch_tokens, options=options)
    return MiningSystem(None if isinstance(loaded, bm25.BM25) else loaded, index, cache, executor)


def _print_mined(record: dict[str, Any], out: Path, negatives: int, *, ids: bool) -> None:
    from quiver.retrieval.training.mining.negatives import ROWS, SUSPECTS

    result = record["result"]
    rows = [
        ("queries", f"{result['queries']:,}"),
        ("rows (one per positive)", f"{result['rows']:,}"),
        ("positives within the ranks", f"{result['positives_within_ranks']:,}"),
        ("documents", f"{record['data']['documents']:,}"),
        ("candidates within the ranks", f"{result['candidates']:,}"),
        *((f"dropped by {name}", f"{count:,}") for name, count in result["dropped"].items()),
        ("negatives", f"{result['negatives']:,}"),
        (f"rows with fewer than {negatives} negatives", f"{result['rows_short']:,}"),
        ("rows without negatives", f"{result['rows_without_negatives']:,}"),
        ("mean score of positives", f"{result['mean_scores']['positive']:.4f}"),
        ("mean score of negatives", f"{result['mean_scores']['negative']:.4f}"),
        ("seconds", f"{record['seconds']:,.0f}"),
    ]
    print_table(str(out), ("", "value"), rows)
    say(f"suspected false negatives: {out / SUSPECTS}, {result['suspects']:,}")
    say(f"rows: {out / ROWS}; in a recipe:\n")
    fields: Mapping[str, str] = {"format": "ids", "query_field": "query_id", "document_fields": "[document_ids]"} if ids else {}
    fields = {"train": f"[{out / ROWS}]", **(fields or {"document_fields": "[positive, negatives]"})}
    if ids:
        fields |= {name: str(out / f"{name}.jsonl.gz") for name in ("queries", "documents")}
    fields |= {"documents_per_row": str(negatives + 1), "short_rows": "skip"}
    say("\n".join(["data:", *(f"  {name}: {value}" for name, value in fields.items())]))


def teacher_scores(
    data: Annotated[
        list[str], typer.Argument(help="Training rows: .jsonl, .csv, .tsv or .parquet files, folders of such files, or hub:// sources.")
    ],
    teachers: Annotated[
        list[str],
        typer.Option(
            "--teacher", "-t", help="Teacher model: folder or hub id of a cross-encoder, a bi-encoder or a ColBERT model. Repeatable."
        ),
    ],
    out: options.Out,
    form: Annotated[
        Literal["texts", "ids"], typer.Option("--format", help="Format of the rows: texts, or ids of texts in --queries and --documents.")
    ] = "texts",
    query_field: Annotated[
        str | None, typer.Option(help="Name of the field with the query. Default: query; with --format ids query_id.")
    ] = None,
    document_fields: Annotated[
        list[str] | None,
        typer.Option(
            "--document-field",
            help="Field with documents of a row. Repeatable. Default: positive and negatives; with --format ids: document_ids.",
        ),
    ] = None,
    queries: Annotated[str | None, typer.Option("--queries", help="Source of the query texts, with --format ids.")] = None,
    documents: Annotated[str | None, typer.Option("--documents", help="Source of the document texts, with --format ids.")] = None,
    query_id_field: Annotated[str, typer.Option(help="Name of the field with the id in --queries.")] = "query_id",
    document_id_field: Annotated[str, typer.Option(help="Name of the field with the id in --documents.")] = "document_id",
    text_field: Annotated[str, typer.Option(help="Name of the field with the text in --queries and --documents.")] = "text",
    weights: Annotated[
        list[float] | None,
        typer.Option(
            "--weight",
            help="Weight of a teacher's scores in their sum; one --weight per --teacher. Default: the mean of the teachers' scores, each"
            " scaled to 0..1 within a row.",
        ),
    ] = None,
    normalize: Annotated[
        Literal["none", "min-max"], typer.Option("--normalize", help="Normalization of the scores of a row: none, or min-max to 0..1.")
    ] = "none",
    dtype: options.Dtype = None,
    device: options.Device = None,
    devices: options.Devices = None,
    batch_tokens: options.BatchTokens = None,
    query_length: options.QueryLength = None,
    document_length: options.DocumentLength = None,
    query_prompt: options.QueryPrompt = None,
    document_prompt: options.DocumentPrompt = None,
    truncate_dim: options.TruncateDim = None,
    cache: options.Cache = None,
    no_cache: options.NoCache = False,
    executor: options.Executor = "local",
    workers: options.Workers = None,
    address: options.Address = None,
    overwrite: options.Overwrite = False,
    progress: options.Progress = True,
    as_json: options.Json = False,
) -> None:
    """Score the documents of training rows with one or more teachers, for distillation. Repeat the command to resume an interrupted run.

    Examples: quiver teacher-scores mined/train.jsonl.gz --teacher BAAI/bge-reranker-v2-m3 --normalize min-max --out scored

    quiver teacher-scores mined/train.jsonl.gz -t runs/colbert/model -t runs/dense/model --weight 0.5 --weight 10 --out scored

    quiver teacher-scores kd.parquet --format ids --queries queries.parquet --documents docs.parquet -t BAAI/bge-m3 --out scored
    """
    from quiver.encoder.schema import parse_options
    from quiver.retrieval.models.options import ModelOptions
    from quiver.retrieval.training.mining.teacher_scores import check_teacher, load_teacher, score_rows
    from quiver.retrieval.training.recipe import DataSection

    fields = {
        "train": tuple(data),
        "format": form,
        "query_field": query_field or ("query" if form == "texts" else "query_id"),
        "document_fields": tuple(document_fields or DOCUMENT_FIELDS[form]),
        "queries": queries,
        "documents": documents,
        "query_id_field": query_id_field,
        "document_id_field": document_id_field,
        "text_field": text_field,
    }
    section = parse_options(DataSection, fields, source="options")
    encoding, here = place_encoding(executor, workers=workers, address=address, device=device, devices=devices)
    settings = ModelOptions(query_length, document_length, query_prompt, document_prompt, truncate_dim)
    load = partial(load_teacher, dtype=dtype, device=here, batch_tokens=batch_tokens, options=settings, executor=encoding)
    record = score_rows(
        section,
        _teacher(teachers, weights, load, partial(check_teacher, dtype=dtype, options=settings)),
        out,
        normalize=normalize,
        cache=vector_cache(cache, no_cache),
        overwrite=overwrite,
        progress=progress,
        command=command_line(),
    )
    if as_json:
        print_json(record)
        return
    _print_scores(record, out)


def _teacher(
    sources: list[str], weights: list[float] | None, load: Callable[[str], Teacher], check: Callable[[str], None]
) -> Teacher | Ensemble:
    from quiver.retrieval.training.mining.teacher_scores import Ensemble, check_weights

    if len(sources) == 1:
        if weights is not None:
            raise InputError("--weight is for several teachers, and only one --teacher is given")
        return load(sources[0])
    check_weights(len(sources), weights)  # before models are downloaded and loaded
    for source in sources:
        check(source)
    return Ensemble([load(source) for source in sources], weights)


def _print_scores(record: dict[str, Any], out: Path) -> None:
    from quiver.retrieval.training.mining.negatives import ROWS

    result = record["result"]
    rows = [
        ("rows", f"{result['rows']:,}"),
        ("pairs", f"{result['pairs']:,}"),
        ("rows whose positive has the highest score", f"{result['positive_first']:,}"),
        ("mean score of positives", f"{result['mean_scores']['positive']:.4f}"),
        ("mean score of the other documents", f"{result['mean_scores']['others']:.4f}"),
        ("lowest and highest score", f"{result['lowest']:.4f} {result['highest']:.4f}"),
        ("seconds", f"{record['seconds']:,.0f}"),
    ]
    print_table(str(out), ("", "value"), rows)
    say(f"rows: {out / ROWS} (in a recipe: data.score_fields: [scores])")
