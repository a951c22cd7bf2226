"""``quiver``: the composition root, where the command families meet and errors become exit statuses.

Exit status: 0 done, 2 the user's mistake (one line on standard error), 1 a failure.
"""

from __future__ import annotations

import logging
import sys
from typing import Annotated, Any

import typer

from quiver.cli import (
    bench,
    cache,
    collections,
    doctor,
    enlarging,
    evaluation,
    glue,
    index,
    interchange,
    mining,
    planning,
    positions,
    pretraining,
    qa,
    reports,
    search,
    serving,
    sweep,
    training,
)
from quiver.cli.output import help_alone, quiver_version, say_error
from quiver.encoder import InputError

# Typer exports one of Click's usage errors, whose parent is what all of them are: it is found here whether Click is a dependency of
# Typer or, as in its later versions, a part of it.
UsageError: type[Exception] = typer.BadParameter.__mro__[1]

app = typer.Typer(
    name="quiver",
    help="Train, index, search and benchmark retrievers on a native, unpadded ModernBERT encoder.",
    invoke_without_command=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("quickstart")(evaluation.quickstart)
app.command("train")(training.train)
app.command("pretrain")(pretraining.pretrain)
app.command("average")(training.average)
app.command("validate")(training.validate)
app.command("sweep")(sweep.sweep)
app.command("mine")(mining.mine)
app.command("score")(mining.score)
app.add_typer(index.app, name="index")
app.command("search")(search.search)
app.command("serve")(serving.serve)
app.command("evaluate")(evaluation.evaluate)
app.command("plan")(planning.plan)
app.add_typer(qa.app, name="qa")
app.command("glue")(glue.glue)
app.add_typer(reports.app, name="report")
app.add_typer(collections.app, name="collections")
app.add_typer(cache.app, name="cache")
app.add_typer(bench.app, name="bench")
app.command("export")(interchange.export)
app.command("enlarge")(enlarging.enlarge)
app.command("extend-positions")(positions.extend_positions)
app.command("doctor")(doctor.doctor)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"quiver {quiver_version()}")
        raise typer.Exit


@app.callback()
def options(
    context: typer.Context,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Show what is decided on the way.")] = False,
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and stop.")] = False,
) -> None:
    """Options that stand before the command."""
    del version
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s: %(message)s", stream=sys.stderr)
    level = logging.INFO if verbose else logging.WARNING
    logging.getLogger("quiver").setLevel(level)
    help_alone(context)


def main() -> None:
    """The console script."""
    try:
        # Not standalone: otherwise Typer prints usage errors itself, as a box of five lines. It returns the status of typer.Exit.
        status = app(standalone_mode=False)
        if status:
            sys.exit(status)
    except UsageError as error:
        say_error(_one_line(error))
        sys.exit(2)
    except typer.Abort:
        say_error("interrupted")
        sys.exit(130)
    except InputError as error:
        say_error(str(error))
        sys.exit(2)
    except OSError as error:
        # A full disk or a missing permission: the reason is all there is to say.
        say_error(str(error))
        sys.exit(1)


def _one_line(error: Any) -> str:
    """A usage error of Click's, with the parameter it is about and the help that tells more."""
    message = " ".join(error.format_message().split()).rstrip(".")
    return f"{message} (see {error.ctx.command_path} --help)" if error.ctx else message


if __name__ == "__main__":
    main()
