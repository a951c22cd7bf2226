"""Training commands: train, pretrain, sweep, validate, average-checkpoints, mine, teacher-scores."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import typer

from quiver.cli import options
from quiver.cli.options import argument, command, command_line, option, print_json, print_result, print_table, print_values, say, say_error
from quiver.encoder.environment import is_main_process
from quiver.encoder.errors import InputError
from quiver.retrieval.models.options import ModelOptions

if TYPE_CHECKING:
    from quiver.encoder.pretraining.recipe import PretrainingRecipe
    from quiver.eval.sweep import Sweep, Trainer
    from quiver.retrieval.training.dry_run import DryRun, PretrainingDryRun
    from quiver.retrieval.training.mining.negatives import MiningSystem
    from quiver.retrieval.training.recipe import Recipe


@command
def train(
    recipe: str = argument("Recipe file (.yaml, .json), or the name of a shipped recipe."),
    overrides: tuple[str, ...] = options.OVERRIDES,
    *,
    out: Path | None = options.RUN_OUT,
    training: options.ResumableTraining,
    dry_run: bool = options.DRY_RUN,
    output: options.Output,
) -> None:
    """Train a retriever from a recipe.

    SIGTERM and Ctrl-C finish the current step and save a checkpoint; --resume continues from it.

    --dry-run checks data, model and settings, trains a few batches, and prints rows, tokens, updates, memory and duration.

    For several processes: torchrun --no-python --nproc-per-node 8 quiver train ...

    Examples: quiver train quickstart --out runs/mine training.batch_size=128

    quiver train quickstart --dry-run training.batch_size=128

    quiver train mldr --encoder bert-base --out runs/mldr-bert-base
    """
    from quiver.encoder.training.recipe_file import naming_fetch_command
    from quiver.eval.training import train as run_recipe
    from quiver.retrieval.training.recipe import load_recipe

    resolved = load_recipe(recipe, training.overrides(overrides))
    with naming_fetch_command(recipe, resolved.data):
        if dry_run:
            _check_dry_run(out, resume=training.resume, overwrite=training.overwrite)
            _predict_training(resolved, training.device, output)
            return
        folder = _require_out(out)
        record = run_recipe(resolved, folder, **training.arguments(output))
    if not is_main_process():
        return
    result, batch = record["result"], record["batch"]
    values = {
        "rows": _describe_rows(record["data"]),
        "rows per update": batch["effective"],
        "negatives per query": batch["negatives_per_query"],
        "updates": result["steps"],
        "last loss": result["losses"][-1][1],
        "last nDCG@10": f"{100 * result['development'][-1]['ndcg@10']:.2f}" if result["development"] else None,
        "truncated texts": f"{result['texts_truncated'] / result['texts']:.1%}",
    }
    _print_run(folder, record, values, output)


def _predict_training(recipe: Recipe, device: str | None, output: options.Output) -> None:
    """Check all that `train` needs, and print what it would do."""
    from quiver.eval.development import development_scorer
    from quiver.retrieval.training.dry_run import dry_run

    section = recipe.development
    read = (lambda: None) if section is None else partial(development_scorer, section, progress=output.progress)
    say_next = None if output.json else partial(typer.echo, err=True)
    found = dry_run(recipe, device=device, progress=output.progress, say=say_next, check=read)
    if output.json:
        print_json({**dataclasses.asdict(found), "updates": found.updates, "seconds": found.seconds})
        return
    about = "" if found.exact else "about "
    left_out = 0 if recipe.training.no_duplicates else found.rows % recipe.training.batch_size  # with it, an epoch may have fewer batches
    values = {
        "rows": _describe_rows(vars(found), left_out),
        "documents per row": found.documents_per_row,
        "rows per update": found.batch["effective"],
        "negatives per query": found.batch["negatives_per_query"],
        "updates": found.updates,
        "tokens": f"{about}{found.tokens:,} in {found.texts:,} texts",
        "truncated texts": f"{about}{found.truncated:.1%}",
        **_dry_run_values(found),
        "tokens/s": f"{found.tokens_per_second:,.0f}, measured on {found.measured_batches} batch{'es' * (found.measured_batches > 1)}",
    }
    print_values(f"{recipe.name}: dry run, nothing was written", values)


def _describe_rows(data: Mapping[str, Any], left_out: int = 0) -> str:
    """The number of training rows, and the numbers of those that are not as the others."""
    counts = {
        "skipped": data["skipped"],
        "left out by their label": data["not_relevant"],
        f"with fewer than {data['documents_per_row']:,} documents": data["rows_short"],
        f"with more than {data['documents_per_row']:,} documents": data["rows_cut"],
        "left out of each epoch: batches are full": left_out,
    }
    notes = "; ".join(f"{count:,} {what}" for what, count in counts.items() if count)
    return f"{data['rows']:,}" + f" ({notes})" * bool(notes)


def _require_out(out: Path | None) -> Path:
    if out is None:
        raise InputError("--out names the run folder; add --out FOLDER, or --dry-run to write nothing")
    return out


def _check_dry_run(out: Path | None, *, resume: bool, overwrite: bool | None) -> None:
    from quiver.encoder.training.run_folder import refuse_existing

    if resume:
        raise InputError("--dry-run predicts a new run; remove --resume")
    if out is not None:
        refuse_existing(out, overwrite=overwrite)


def _dry_run_values(found: DryRun | PretrainingDryRun) -> dict[str, str | None]:
    """Weights, peak memory and duration."""
    return {
        "trained weights": f"{found.parameters:,} on {found.device}, {found.dtype}",
        "peak memory": None if found.peak_memory is None else f"{found.peak_memory / 1e9:.2f} GB",
        "duration": f"{_duration(found.seconds)}, evaluation and saving not counted",
    }


def _duration(seconds: float) -> str:
    minutes, hours = seconds / 60, seconds / 3600
    return f"{hours:.1f} hours" if hours >= 1 else f"{minutes:.0f} minutes" if minutes >= 2 else f"{seconds:.0f} seconds"


def _print_run(out: Path, record: dict[str, Any], values: dict[str, object], output: options.Output) -> None:
    """Print the record of a finished run."""
    from quiver.encoder.training.run_folder import REPORTS

    if output.json:
        print_json(record)
        return
    print_values(str(out), values | {"seconds": round(record["result"]["seconds"])})
    report = next(path for name in reversed(REPORTS) if (path := out / name).exists())
    say(f"model: {out / 'model'}\nreport: {report}")


@command
def pretrain(
    recipe: str = argument("Recipe file, or the name of a shipped recipe: pretrain-small, pretrain-base, ..."),
    overrides: tuple[str, ...] = options.OVERRIDES,
    *,
    out: Path | None = options.RUN_OUT,
    training: options.Training,
    resume: bool = options.RESUME,
    dry_run: bool = options.DRY_RUN,
    prepare: bool = option(False, "Only train the tokenizer and tokenize the corpus, in one process; --resume then trains."),
    output: options.Output,
) -> None:
    """Pretrain an encoder by masked language modelling, in one or more phases.

    SIGTERM and Ctrl-C finish the current step and save a checkpoint; --resume continues from it.

    --dry-run checks corpus, model and settings, trains a few packed rows of each phase, and prints documents, updates, memory and duration.

    For several processes: torchrun --no-python --nproc-per-node 8 quiver pretrain ... Tokenize a large corpus with --prepare first, without
    torchrun.

    Examples: quiver pretrain pretrain-small --out runs/small phases.0.tokens=500000

    quiver pretrain pretrain-small --dry-run phases.0.tokens=500000
    """
    from quiver.encoder.pretraining import load_pretraining_recipe
    from quiver.encoder.pretraining import prepare as prepare_recipe
    from quiver.encoder.training.recipe_file import naming_fetch_command
    from quiver.eval.probe import pretrain as run_recipe
    from quiver.eval.report.training import write_training_report
    from quiver.retrieval.models.pretrained import check_device

    device = None if training.device is None else check_device(training.device)
    resolved = load_pretraining_recipe(recipe, training.overrides(overrides))
    if dry_run:
        if prepare:
            raise InputError("--dry-run writes nothing, and --prepare writes the corpus; remove one of the two")
        _check_dry_run(out, resume=resume, overwrite=None)
        with naming_fetch_command(recipe, resolved.data):
            _predict_pretraining(resolved, device, output)
        return
    folder = _require_out(out)
    with naming_fetch_command(recipe, resolved.data):
        if prepare:
            prepare_recipe(resolved, folder, resume=resume)
            say(f"prepared: {out}; repeat the command with --resume instead of --prepare to train")
            return
        record = run_recipe(resolved, folder, resume=resume, progress=output.progress, command=command_line(), device=device)
    if not is_main_process():
        return
    write_training_report(folder)
    result, curves = record["result"], record["result"]["curves"]
    measured = {"held-out loss": "held_out_loss", "held-out accuracy": "held_out_accuracy", "probe": "probe_score"}
    values = {
        "parameters": record["model"]["parameters"],
        "updates": result["steps"],
        "tokens": result["tokens"],
        "packing": f"{result['packing']:.2%}",
        "last loss": curves["loss"][-1][1],
        **{name: curves[key][-1][1] if curves[key] else None for name, key in measured.items()},
    }
    _print_run(folder, record, values, output)


def _predict_pretraining(recipe: PretrainingRecipe, device: str | None, output: options.Output) -> None:
    """Check all that `pretrain` needs, and print what it would do."""
    from quiver.eval.probe import open_probe
    from quiver.retrieval.training.dry_run import dry_run_pretraining

    open_probe(recipe, device=device)
    found = dry_run_pretraining(recipe, device=device, progress=output.progress)
    if output.json:
        phases = [{**dataclasses.asdict(phase), "seconds": phase.seconds} for phase in found.phases]
        print_json({**dataclasses.asdict(found), "updates": found.updates, "seconds": found.seconds, "phases": phases})
        return
    more = "" if found.exact else "more than "
    values = {
        "documents": f"{more}{found.documents:,}, {found.held_out:,} held out",
        "tokens of the corpus": f"{more}{found.corpus_tokens:,}",
        "vocabulary": found.vocabulary,
        "tokens of the run": sum(phase.tokens for phase in found.phases),
        "updates": f"about {found.updates:,}",
        **_dry_run_values(found),
    }
    print_values(f"{recipe.name}: dry run, nothing was written", values)
    header = ("phase", "tokens", "passes", "updates", "split documents", "packing", "tokens/s", "duration")
    rows = []
    for phase in found.phases:
        counts = (f"{phase.tokens:,}", f"{phase.passes:.1f}", f"{phase.updates:,}", f"{phase.split:.1%}", f"{phase.packing:.1%}")
        rows.append((phase.name, *counts, f"{phase.tokens_per_second:,.0f}", _duration(phase.seconds)))
    print_table("phases", header, rows)


@command
def sweep(
    recipe: str = argument("Recipe of any kind: a file, or the name of a shipped one; a retriever's needs a development section."),
    settings: tuple[str, ...] = argument(
        "section.setting=value,value to sweep; section.setting=value for all runs. Default for retrievers: the learning rates.", ()
    ),
    *,
    out: Path = option(..., "Folder to write: one folder per run, sweep.json, sweep.md and sweep.svg.", "-o"),
    training: options.Training,
    overwrite: bool = options.OVERWRITE,
    output: options.Output,
) -> None:
    """Train a recipe with every combination of some settings, or the runs that a sweep recipe lists, and rank them by their scores.

    Retrievers are ranked by nDCG@10 on their development collection, pretraining by the held-out loss, GLUE by the mean of its tasks, span
    answers by F1. A GLUE recipe without settings for all tasks is swept task by task, with the grid of the ModernBERT paper: 48 runs each.

    An interrupted sweep resumes when the command is repeated; values may be added to a finished sweep. Seeds are replicates:
    candidates are compared by their mean over the seeds.

    Examples: quiver sweep docstrings-dense --out sweeps/docstrings training.learning_rate=3e-5,8e-5 training.seed=1,2

    quiver sweep glue-base --out sweeps/glue
    """
    from quiver.eval.report.training import candidate_table, cautions, train_command, write_sweep_report
    from quiver.eval.sweep import GLUE, RECORD, Trainer, kind_of, make_grid, run_sweep

    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise InputError("quiver sweep runs in one process: start it without torchrun, or train each run with torchrun and quiver train")
    train = Trainer(progress=output.progress, command=command_line(), device=training.device)
    if kind_of(recipe) is GLUE and _sweep_glue(recipe, out, training.overrides(settings), train, overwrite, output):
        return
    grid = make_grid(recipe, training.overrides(settings))
    train.check_data(grid)
    sweep = run_sweep(
        grid,
        out,
        train=train,
        overwrite=overwrite,
        command=command_line(),
        report=partial(typer.echo, err=True) if output.progress else lambda line: None,
        changed=lambda sweep: write_sweep_report(sweep, out),
    )
    if output.json:
        say((out / RECORD).read_text(encoding="utf-8").rstrip())
    else:
        shown = candidate_table(sweep)
        title = f"{', '.join(measure.label for measure in sweep.measures)} on {sweep.scored_on}; fractions in points"
        print_table(title, [column.label for column in shown.columns], [[cell.text for cell in row.cells] for row in shown.rows])
        for caution in cautions(sweep):
            say(caution)
        if sweep.best is not None:
            say(f"best: {', '.join(str(out / folder / 'model') for folder in sweep.best.folders)}")
            say(f"to train it again: {train_command(sweep, out / 'best')}")
        say(f"report: {out / 'sweep.md'}")
    _report_failures({out: sweep})


def _report_failures(sweeps: Mapping[Path, Sweep]) -> None:
    runs = [(folder / run.folder, run.error) for folder, sweep in sweeps.items() for run in sweep.runs]
    if failed := [run for run in runs if run[1] is not None]:
        folder, error = failed[0]
        say_error(f"{len(failed)} of {len(runs)} runs failed, {folder} with: {error}; repeat the command to try again")
        raise typer.Exit(1)


def _sweep_glue(recipe: str, out: Path, settings: list[str], train: Trainer, overwrite: bool, output: options.Output) -> bool:
    """Sweep each GLUE task by itself, with the grid of the paper; False if the settings ask for runs of all tasks."""
    from quiver.cli.nlu import print_glue
    from quiver.eval.nlu.glue import has_own_grid, sweep_glue
    from quiver.eval.report.training import write_sweep_report

    if has_own_grid(settings):
        return False
    say_next = partial(typer.echo, err=True) if output.progress else lambda line: None
    sweeps, results = sweep_glue(
        recipe, out, settings, train=train, overwrite=overwrite, command=command_line(), report=say_next, changed=write_sweep_report
    )
    print_glue(results, out, output)
    _report_failures({out / task: each for task, each in sweeps.items()})
    return True


@command
def validate(
    recipes: tuple[str, ...] = argument(
        "Recipe files, names of shipped recipes, and settings for all: section.setting=value.", metavar="RECIPES..."
    ),
    encoder: str | None = options.ENCODER,
    json: bool = options.JSON,
) -> None:
    """Check recipes of any kind without training, and list all their problems.

    Of a recipe with a table of encoders, all rows are checked, or that of --encoder. The data and the model are not opened:
    quiver train RECIPE --dry-run does that.

    Examples: quiver validate quickstart docstrings-dense

    quiver validate recipes/*.yaml

    quiver validate quickstart data.train=pairs.jsonl training.batch_size=32

    quiver validate mldr --encoder bert-base
    """
    overrides = [word for word in recipes if "=" in word and not Path(word).exists()]
    names = [word for word in recipes if word not in overrides]
    if not names:
        raise InputError("name at least one recipe before the settings to change")
    overrides += [] if encoder is None else [f"encoder={encoder}"]
    checks, problems = [(name, row) for name in names for row in _rows_to_check(name, overrides)], dict[str, str]()
    for name, row in checks:
        try:
            _load_recipe(name, [*overrides, *row])
        except InputError as error:
            problems[" ".join([name, *row])] = str(error)
    if json:
        print_json({"checked": len(checks), "problems": problems})
    if problems:
        raise InputError("\n".join(problems.values()))
    if not json:
        say(f"{len(checks)} recipe{'s' if len(checks) != 1 else ''} checked, no problems")


def _rows_to_check(name: str, overrides: Sequence[str]) -> list[list[str]]:
    """The overrides that choose each row of a recipe's table; nothing to choose if it has none, or if a row is chosen."""
    from quiver.encoder.training.recipe_file import recipe_encoders

    chosen = any(override.startswith("encoder=") for override in overrides)
    return [[f"encoder={row}"] for row in ([] if chosen else recipe_encoders(name))] or [[]]


@command
def recipes(json: bool = options.JSON) -> None:
    """List the recipes that are shipped, with the command that runs each and the expected result; a row for each encoder of a table.

    Example: quiver recipes
    """
    from quiver.encoder.training.recipe_file import shipped_recipes

    found = []
    for name in shipped_recipes():
        verb, recipe = _load_recipe(name, [])
        shown = ("kind", "encoder", "description", "source", "cost", "expected")
        found.append({"name": name, "command": f"quiver {verb}", **{key: getattr(recipe, key) for key in shown}})
    if json:
        print_json(found)
    else:
        # The rows of a table have the same description.
        about = [(each["description"] if each["encoder"] is None else None, each["expected"]) for each in found]
        rows = [(each["name"], each["command"], " Expected: ".join(filter(None, text))) for each, text in zip(found, about, strict=True)]
        print_table(f"{len(rows)} recipes", ("recipe", "run with", "about"), rows)


def _load_recipe(name: str, overrides: Sequence[str]) -> tuple[str, Any]:
    """The command of a recipe and the recipe, by its ``kind``."""
    from quiver.eval.sweep import kind_of

    kind = kind_of(name)
    return kind.command, kind.load(name, overrides)


@command
def average_checkpoints(
    models: tuple[str, ...] = argument("Model folders or hub ids; a checkpoint of a run is a model folder."),
    *,
    out: Path = options.MODEL_OUT,
    overwrite: bool = options.OVERWRITE,
    json: bool = options.JSON,
) -> None:
    """Average the weights of models that have the same architecture, tokenizer and settings.

    Example: quiver average-checkpoints runs/mine/checkpoints/step-000400 runs/mine/checkpoints/step-000500 --out runs/averaged
    """
    from quiver.retrieval.training.state import write_average

    card = write_average(models, out, overwrite=overwrite)
    record = {"out": str(out), "models": models, "fingerprint": card.fingerprint}
    print_result(record, f"model: {out}, the mean of {len(models)} models", json=json)


@command
def mine(
    data: tuple[str, ...] = argument("BEIR folder; or files of pairs (.jsonl, .csv, .tsv, .parquet), folders of them, or hub:// sources."),
    *,
    out: Path = options.OUT,
    model: str | None = option(None, "Model to search with: a bi-encoder, a ColBERT model or bm25. Default: the model of --index.", "-m"),
    index: Path | None = options.SEARCHED_INDEX,
    corpus: Path | None = option(None, "Additional documents to search when mining for pairs: a corpus.jsonl[.gz] or its folder."),
    split: str = options.SPLIT,
    query_field: str = option("query", "Name of the field with the query of a pair."),
    positive_field: str = option("positive", "Name of the field with the positive of a pair, or a list of positives."),
    negatives: int = option(7, "Number of hard negatives per query.", "-n", min=1),
    ranks: str = option("1-200", "Range of ranks to take negatives from; positives and duplicates of them are not ranked."),
    choose: Literal["top", "random"] = option("top", "Take the best candidates within --ranks, or random ones."),
    margins: tuple[str, ...] = option(
        (),
        "Upper limit on the score of a negative: perc-pos=SHARE of the positive's score, margin-pos=DISTANCE below it, or max-score=VALUE;"
        " none for no limit. Repeatable. Default: perc-pos=0.95.",
        "--margin",
    ),
    seed: int = options.SEED.with_default(42),
    form: Literal["texts", "ids"] = option("texts", "Form of the rows: texts, or ids with the texts in separate files.", "--format"),
    suspects: int = option(5, "Number of suspected false negatives to list per query.", min=0),
    limit: int | None = option(None, "Number of queries to mine for, from the first. Default: all.", min=1),
    use_title: bool = options.USE_TITLE,
    encoding: options.Encoding,
    settings: ModelOptions,
    cache: options.VectorCache,
    overwrite: bool = options.OVERWRITE,
    output: options.Output,
) -> None:
    """Mine hard negatives with a model, an index or BM25. Repeat the command to resume an interrupted run.

    Examples: quiver mine data/scifact --model MODEL --out mined

    quiver mine pairs.jsonl.gz --positive-field pos -m bm25 --margin none --ranks 10-200 --choose random --out mined
    """
    from quiver.encoder.files import expand_home
    from quiver.retrieval.models.bm25 import NAME
    from quiver.retrieval.training.mining.negatives import (
        PERC_POS,
        ROWS,
        SUSPECTS,
        Output,
        Rules,
        mine_negatives,
        parse_margins,
        parse_ranks,
        why_all_short,
    )
    from quiver.retrieval.training.mining.texts import BeirSource, PairSource

    rules = Rules(negatives, parse_ranks(ranks), parse_margins(margins) if margins else (PERC_POS,), choose, seed)
    folder = expand_home(data[0])
    if len(data) == 1 and (folder / "qrels").is_dir():
        if corpus is not None:
            raise InputError(f"{folder}: a BEIR folder has a corpus of its own; --corpus is only for pairs")
        source: BeirSource | PairSource = BeirSource(folder, split, use_title)
    else:
        source = PairSource(data, query_field, positive_field, corpus, use_title)
    if index is not None and corpus is not None:
        raise InputError("--index and --corpus exclude each other: the index already holds the documents")
    if model == NAME and (encoding.executor, encoding.workers, encoding.address, encoding.devices) != ("local", None, None, None):
        raise InputError(f"--executor, --workers, --address and --devices distribute encoding, and {NAME} encodes nothing; remove them")
    record = mine_negatives(
        source,
        _open_system(model, index, encoding, settings, cache.folder()),
        out,
        rules=rules,
        output=Output(ids=form == "ids", suspects=suspects, limit=limit),
        overwrite=overwrite,
        progress=output.progress,
        command=command_line(),
    )
    result, ids = record["result"], form == "ids"
    reason = why_all_short(result, rules)
    if output.json:
        print_json(record)
    else:
        shown = {name: value for name, value in result.items() if name != "suspects"}
        print_values(str(out), shown | {"documents": record["data"]["documents"], "seconds": round(record["seconds"])})
    if reason:
        say_error(f"{out / ROWS}: {reason}")
        raise typer.Exit(1)
    if output.json:
        return
    say(f"suspected false negatives: {out / SUSPECTS}, {result['suspects']:,}\nrows: {out / ROWS}; in a recipe:\n\ndata:")
    fields: dict[str, object] = {"train": f"[{out / ROWS}]", "document_fields": "[positive, negatives]"}
    if ids:
        fields |= {"document_fields": "[document_ids]", "format": "ids", "query_field": "query_id"}
        fields |= {name: out / f"{name}.jsonl.gz" for name in ("queries", "documents")}
    for name, value in {**fields, "documents_per_row": negatives + 1, "short_rows": "skip"}.items():
        say(f"  {name}: {value}")


def _open_system(
    model: str | None, folder: Path | None, encoding: options.Encoding, settings: ModelOptions, cache: Path | None
) -> MiningSystem:
    """Open what searches for negatives: a model, an index with its own model, or BM25."""
    from quiver.retrieval.index import open_index
    from quiver.retrieval.models.bm25 import BM25, NAME
    from quiver.retrieval.models.loading import load_index_model
    from quiver.retrieval.training.mining.negatives import MiningSystem

    if model is None and folder is None:
        raise InputError(f"pass --model (a folder, a hub id or {NAME}) or --index")
    index = None if folder is None else open_index(folder)
    built, source = (str(model), None) if index is None or model == NAME else (index.manifest.model, model)
    if not isinstance(built, str) and built.kind != NAME:
        if encoding.dtype is not None:
            raise InputError("--dtype: the model of an index runs in the dtype of the index; remove the option")
        if settings != ModelOptions():
            raise InputError("lengths, prompts and --truncate-dim: the model of an index has those of the index; remove the options")
    executor = encoding.open_executor()
    loaded = load_index_model(built, source, **encoding.model_arguments(), options=settings)
    return MiningSystem(None if isinstance(loaded, BM25) else loaded, index, cache, executor)


@command
def teacher_scores(
    data: tuple[str, ...] = argument("Training rows: .jsonl, .csv, .tsv or .parquet files, folders of such files, or hub:// sources."),
    *,
    teachers: tuple[str, ...] = option(
        ..., "Folder or hub id of a cross-encoder, a bi-encoder or a ColBERT model. Repeatable.", "--teacher", "-t"
    ),
    out: Path = options.OUT,
    form: Literal["texts", "ids"] = option("texts", "Format of the rows: texts, or ids of texts in --queries and --documents.", "--format"),
    query_field: str | None = option(None, "Name of the field with the query. Default: query; with --format ids query_id."),
    document_fields: tuple[str, ...] = option(
        (),
        "Field with documents of a row. Repeatable. Default: positive and negatives; with --format ids: document_ids.",
        "--document-field",
    ),
    queries: str | None = option(None, "Source of the query texts, with --format ids."),
    documents: str | None = option(None, "Source of the document texts, with --format ids."),
    query_id_field: str = option("query_id", "Name of the field with the id in --queries."),
    document_id_field: str = option("document_id", "Name of the field with the id in --documents."),
    text_field: str = option("text", "Name of the field with the text in --queries and --documents."),
    weights: tuple[float, ...] = option(
        (),
        "Weight of a teacher's scores in their sum; one --weight per --teacher. Default: the mean of the teachers' scores, each scaled to"
        " 0..1 within a row.",
        "--weight",
    ),
    normalize: Literal["none", "min-max"] = option("none", "Normalization of the scores of a row: none, or min-max to 0..1."),
    encoding: options.Encoding,
    settings: ModelOptions,
    cache: options.VectorCache,
    overwrite: bool = options.OVERWRITE,
    output: options.Output,
) -> None:
    """Score the documents of training rows with one or more teachers, for distillation. Repeat the command to resume an interrupted run.

    Examples: quiver teacher-scores mined/train.jsonl.gz --teacher BAAI/bge-reranker-v2-m3 --normalize min-max --out scored

    quiver teacher-scores mined/train.jsonl.gz -t runs/colbert/model -t runs/dense/model --weight 0.5 --weight 10 --out scored

    quiver teacher-scores kd.parquet --format ids --queries queries.parquet --documents docs.parquet -t BAAI/bge-m3 --out scored
    """
    from quiver.encoder.schema import parse_options
    from quiver.retrieval.training.mining.teacher_scores import ROWS, Ensemble, check_teacher, check_weights, load_teacher, score_rows
    from quiver.retrieval.training.recipe import DataSection

    fields = {
        "train": data,
        "format": form,
        "query_field": query_field or ("query" if form == "texts" else "query_id"),
        "document_fields": document_fields or (("positive", "negatives") if form == "texts" else ("document_ids",)),
        "queries": queries,
        "documents": documents,
        "query_id_field": query_id_field,
        "document_id_field": document_id_field,
        "text_field": text_field,
    }
    section = parse_options(DataSection, fields, source="options")
    executor = encoding.open_executor()
    if len(teachers) == 1 and weights:
        raise InputError("--weight is for several teachers, and only one --teacher is given")
    if len(teachers) > 1:  # before models are downloaded and loaded
        check_weights(len(teachers), weights or None)
        for source in teachers:
            check_teacher(source, dtype=encoding.dtype, options=settings)
    loaded = [load_teacher(source, **encoding.model_arguments(), options=settings, executor=executor) for source in teachers]
    record = score_rows(
        section,
        loaded[0] if len(loaded) == 1 else Ensemble(loaded, weights or None),
        out,
        normalize=normalize,
        cache=cache.folder(),
        overwrite=overwrite,
        progress=output.progress,
        command=command_line(),
    )
    if output.json:
        print_json(record)
        return
    print_values(str(out), record["result"] | {"seconds": round(record["seconds"])})
    say(f"rows: {out / ROWS} (in a recipe: data.score_fields: [scores])")
