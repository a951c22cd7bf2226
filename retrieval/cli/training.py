"""``quiver train`` and ``quiver validate``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from encoder import InputError
from retrieval.cli.output import JsonOption, OverwriteOption, ProgressOption, command_line, print_json, print_table, say, show_progress
from retrieval.training.recipe import load_recipe
from retrieval.training.run import train_recipe


def train(
    recipe: Annotated[str, typer.Argument(help="A .yaml file, or the name of a shipped recipe.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder to write: model/ and run.json.")],
    overrides: Annotated[list[str] | None, typer.Argument(help="Settings to change, as section.setting=value.")] = None,
    overwrite: Annotated[bool, OverwriteOption] = False,
    progress: Annotated[bool | None, ProgressOption] = None,
    as_json: Annotated[bool, JsonOption] = False,
) -> None:
    """Train a retriever from a recipe.

    Example: quiver train recipes/quickstart.yaml --out runs/mine training.batch_size=128
    """
    record = train_recipe(
        load_recipe(recipe, overrides or []), out, overwrite=overwrite, progress=show_progress(progress), command=command_line()
    )
    if as_json:
        print_json(record)
        return
    result = record["result"]
    loss = f"{result['losses'][-1][1]:.4f}" if result["losses"] else "not logged"
    rows = [
        ("pairs", f"{result['pairs']:,}"),
        ("steps", f"{result['steps']:,}"),
        ("last loss", loss),
        ("seconds", f"{result['seconds']:.0f}"),
    ]
    print_table(str(out), ("", "value"), rows)
    say(f"model: {out / 'model'}")


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
            load_recipe(name)
        except InputError as error:
            problems[name] = str(error)
    if as_json:
        print_json({"checked": len(recipes), "problems": problems})
    if problems:
        raise InputError("\n".join(problems.values()))
    if not as_json:
        say(f"{len(recipes)} recipe{'s' if len(recipes) != 1 else ''} checked, no problems")
