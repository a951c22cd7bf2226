"""``quiver pretrain``; like bench.py beside it, a file of retrieval that may import eval."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import typer

from quiver.cli.output import JsonOption, ProgressOption, command_line, print_json, print_table, say, say_error, show_progress
from quiver.encoder.pretraining import load_pretraining_recipe
from quiver.encoder.pretraining import prepare as prepare_recipe
from quiver.encoder.pretraining import pretrain as run_recipe
from quiver.encoder.training.stopping import RunStoppedError
from quiver.eval.report.training import write_training_report


def pretrain(
    recipe: Annotated[str, typer.Argument(help="A .yaml file, or the name of a shipped recipe: pretrain_small, pretrain_base, ...")],
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder to write: model/, run.json, log.jsonl, checkpoints/, report.md.")],
    overrides: Annotated[list[str] | None, typer.Argument(help="Settings to change, as training.seed=2 or phases.0.tokens=1e6.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the unfinished run in --out.")] = False,
    prepare: Annotated[bool, typer.Option("--prepare", help="Vocabulary and token ids alone, by one process; --resume trains.")] = False,
    progress: Annotated[bool | None, ProgressOption] = None,
    as_json: Annotated[bool, JsonOption] = False,
) -> None:
    """Pretrain an encoder by masked language modelling, phase after phase.

    SIGTERM and Ctrl-C finish the update and save; --resume goes on from the last checkpoint and ends with the same weights. For
    several processes: torchrun --no-python --nproc-per-node 8 quiver pretrain ...; of a large corpus begin with --prepare alone.

    Example: quiver pretrain pretrain_small --out runs/small phases.0.tokens=500000
    """
    resolved = load_pretraining_recipe(recipe, overrides or [])
    if prepare:
        prepare_recipe(resolved, out, resume=resume)
        say(f"prepared: {out}; the same command with --resume instead of --prepare trains")
        return
    leads = os.environ.get("RANK", "0") == "0"  # set by torchrun
    try:
        record = run_recipe(resolved, out, resume=resume, progress=show_progress(progress), command=command_line())
    except RunStoppedError as stopped:
        if leads:
            say_error(f"{stopped}; the same command with --resume goes on" if not resume else f"{stopped}; the same command goes on")
        raise typer.Exit(1) from stopped
    if leads:
        report = write_training_report(out)
        print_json(record) if as_json else _print(record, out, report)


def _print(record: dict[str, Any], out: Path, report: Path) -> None:
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
