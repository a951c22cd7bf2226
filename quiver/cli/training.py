"""``quiver train``, ``quiver average`` and ``quiver validate``; like bench.py beside it, a file of retrieval that may import eval."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import typer

from quiver.cli.output import (
    JsonOption,
    OverwriteOption,
    ProgressOption,
    command_line,
    print_json,
    print_table,
    say,
    say_error,
    show_progress,
)
from quiver.encoder import InputError
from quiver.encoder.pretraining.recipe import KINDS as PRETRAINING_KINDS
from quiver.encoder.pretraining.recipe import load_pretraining_recipe
from quiver.encoder.training.recipe_file import find_recipe, recipe_kind
from quiver.eval.development import development_scorer
from quiver.eval.nlu.glue_recipe import KINDS as GLUE_KINDS
from quiver.eval.nlu.glue_recipe import load_glue_recipe
from quiver.eval.nlu.qa_recipe import KINDS as QA_KINDS
from quiver.eval.nlu.qa_recipe import load_qa_recipe
from quiver.eval.report.training import write_training_report
from quiver.retrieval.training.averaging import write_average
from quiver.retrieval.training.recipe import load_recipe
from quiver.retrieval.training.run import RunStoppedError
from quiver.retrieval.training.run import train as train_recipe


def train(
    recipe: Annotated[str, typer.Argument(help="A .yaml file, or the name of a shipped recipe.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder to write: model/, run.json, log.jsonl, checkpoints/, report.md.")],
    overrides: Annotated[list[str] | None, typer.Argument(help="Settings to change, as section.setting=value.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the unfinished run in --out.")] = False,
    overwrite: Annotated[bool, OverwriteOption] = False,
    progress: Annotated[bool | None, ProgressOption] = None,
    as_json: Annotated[bool, JsonOption] = False,
) -> None:
    """Train a retriever from a recipe.

    SIGTERM and Ctrl-C finish the step and save; --resume goes on from the last checkpoint and ends with the same weights. For
    several processes: torchrun --no-python --nproc-per-node 8 quiver train ...

    Example: quiver train recipes/quickstart.yaml --out runs/mine training.batch_size=128
    """
    resolved = load_recipe(recipe, overrides or [])
    watched = show_progress(progress)
    leads = os.environ.get("RANK", "0") == "0"  # set by torchrun
    section = resolved.development
    # The collection is in one memory, that of the process that scores.
    scorer = None if section is None else development_scorer(section, progress=watched) if leads else _told_the_score
    try:
        record = train_recipe(resolved, out, resume=resume, overwrite=overwrite, progress=watched, command=command_line(), scorer=scorer)
    except RunStoppedError as stopped:
        if leads:
            say_error(f"{stopped}; the same command with --resume goes on" if not resume else f"{stopped}; the same command goes on")
        raise typer.Exit(1) from stopped
    if leads:
        report = write_training_report(out)
        print_json(record) if as_json else _print(record, out, report)


def _told_the_score(model: object) -> float:
    raise ValueError("process 0 scores, the others are told")


def _print(record: dict[str, Any], out: Path, report: Path) -> None:
    result, data, batch = record["result"], record["data"], record["batch"]
    rows = [
        ("rows", f"{data['rows']:,}"),
        ("rows an update", f"{batch['effective']:,}"),
        ("negatives a query", f"{batch['negatives_per_query']:,}"),
        ("updates", f"{result['steps']:,}"),
        ("last loss", f"{result['losses'][-1][1]:.4f}"),
        *([("last nDCG@10", f"{result['development'][-1]['ndcg@10']:.4f}")] if result["development"] else []),
        ("texts cut", f"{result['texts_truncated'] / result['texts']:.1%}"),
        ("seconds", f"{result['seconds']:.0f}"),
    ]
    print_table(str(out), ("", "value"), rows)
    say(f"model: {out / 'model'}")
    say(f"report: {report}")


def average(
    models: Annotated[list[str], typer.Argument(help="Folders or hub ids; checkpoints of a run are model folders too.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder to write the model to.")],
    overwrite: Annotated[bool, OverwriteOption] = False,
    as_json: Annotated[bool, JsonOption] = False,
) -> None:
    """Average the weights of models that are alike in all else.

    Example: quiver average runs/mine/checkpoints/step-000400 runs/mine/checkpoints/step-000500 --out runs/averaged
    """
    card = write_average(models, out, overwrite=overwrite)
    if as_json:
        print_json({"out": str(out), "models": models, "fingerprint": card.fingerprint})
    else:
        say(f"model: {out}, the mean of {len(models)}")


def validate(
    recipes: Annotated[list[str], typer.Argument(help="Files, or names of shipped recipes.")],
    as_json: Annotated[bool, JsonOption] = False,
) -> None:
    """Check recipes; all problems of all of them are listed.

    Example: quiver validate recipes/*.yaml
    """
    problems = {}
    for name in recipes:
        try:
            _load(name)
        except InputError as error:
            problems[name] = str(error)
    if as_json:
        print_json({"checked": len(recipes), "problems": problems})
    if problems:
        raise InputError("\n".join(problems.values()))
    if not as_json:
        say(f"{len(recipes)} recipe{'s' if len(recipes) != 1 else ''} checked, no problems")


def _load(name: str) -> object:
    """Read a recipe as what its ``kind`` says; one of no known kind as a retriever's, which tells what is wrong with it."""
    kind = recipe_kind(find_recipe(name))
    if kind in PRETRAINING_KINDS:
        return load_pretraining_recipe(name)
    if kind in GLUE_KINDS:
        return load_glue_recipe(name)
    return load_qa_recipe(name) if kind in QA_KINDS else load_recipe(name)
