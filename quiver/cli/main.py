"""``quiver``: the commands, loaded when they are used, and the translation of errors to exit statuses.

Exit status: 0 success, 1 failure, 2 mistake of the user (one line on standard error), 130 interrupted.

``quiver --help`` loads no command family, and a command family imports torch, faiss and numba inside its functions.
"""

from __future__ import annotations

import logging
import re
import sys
from collections import UserDict
from collections.abc import Sequence
from importlib import import_module
from io import TextIOWrapper
from types import TracebackType
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command, get_group

from quiver.cli.options import help_alone, quiver_version, say_error
from quiver.encoder.environment import is_main_process
from quiver.encoder.errors import InputError, RunStoppedError, describe_failure, full_disk

# Typer exports one of Click's usage errors. Its parent is the base class of all of them, whether Click is a dependency of Typer or,
# as in later versions, a part of it.
UsageError: type[Exception] = typer.BadParameter.__mro__[1]

COMMANDS: dict[str, tuple[str, str]] = {
    "quickstart": ("quiver.cli.evaluate:quickstart", "Train and evaluate a small code search model, offline, in a few minutes."),
    "train": ("quiver.cli.train:train", "Train a retriever from a recipe."),
    "pretrain": ("quiver.cli.train:pretrain", "Pretrain an encoder by masked language modelling."),
    "sweep": ("quiver.cli.train:sweep", "Train a recipe with several settings and select the best."),
    "recipes": ("quiver.cli.train:recipes", "List the recipes that are shipped."),
    "validate": ("quiver.cli.train:validate", "Check recipes without training, and list all their problems."),
    "average-checkpoints": ("quiver.cli.train:average_checkpoints", "Average the weights of models of the same architecture."),
    "mine": ("quiver.cli.train:mine", "Mine hard negatives with a model, an index or BM25."),
    "teacher-scores": ("quiver.cli.train:teacher_scores", "Score the documents of training rows with teacher models."),
    "index": ("quiver.cli.index:app", "Build, change and inspect indexes."),
    "search": ("quiver.cli.search:search", "Search an index."),
    "serve": ("quiver.cli.serve:serve", "Serve indexes over HTTP, with a search page."),
    "mcp": ("quiver.cli.serve:mcp", "Let agents search indexes, by the Model Context Protocol."),
    "estimate": ("quiver.cli.estimate:app", "Estimate the time, disk, memory and cost of an index, or how well a model fits GPUs."),
    "evaluate": ("quiver.cli.evaluate:evaluate", "Evaluate a model on collections."),
    "report": ("quiver.cli.evaluate:report_app", "Turn results into reports."),
    "collections": ("quiver.cli.evaluate:collections_app", "List, download and make collections."),
    "glue": ("quiver.cli.nlu:glue", "Fine-tune a model on the GLUE tasks."),
    "qa": ("quiver.cli.nlu:qa_app", "Train and evaluate models that answer questions with spans of a text."),
    "export": ("quiver.cli.models:export", "Export a model for other libraries."),
    "enlarge": ("quiver.cli.models:enlarge", "Initialize a larger encoder from a smaller one."),
    "extend-positions": ("quiver.cli.models:extend_positions", "Extend the absolute positions of a model to longer texts."),
    "doctor": ("quiver.cli.doctor:doctor", "Show versions, devices and the attention backend, and test the encoder."),
    "cache": ("quiver.cli.doctor:cache_app", "Show and prune the cache of vectors and words."),
}
"""Command -> "module:attribute" of its function or Typer application, and its line in ``quiver --help``."""

INTERRUPTED = 130
"""Exit status after Ctrl-C."""

RESUMED = ("index build", "index add", "index refresh", "evaluate", "mine", "teacher-scores", "sweep", "collections fetch")
"""Commands that go on when they are repeated; commands that train need ``--resume`` for it."""


def _load_command(name: str) -> Any:
    """The command of a function or of a Typer application."""
    module, _, attribute = COMMANDS[name][0].partition(":")
    found = getattr(import_module(module), attribute)
    if isinstance(found, typer.Typer):
        command: Any = get_group(found)
    else:
        alone = typer.Typer(add_completion=False)
        alone.command(name)(found)
        command = get_command(alone)
    command.name = name
    _format_plainly(command)
    return command


def _format_plainly(command: Any) -> None:
    """Let Click write the help: rich's tables cut names of options at 80 columns, and wrap examples."""
    command.rich_markup_mode = None
    command.short_help = re.split(r"(?<=\.)\s|\n\n", command.help or "", maxsplit=1)[0]  # Click would cut the sentence
    command.help = with_examples(command.help or "")
    for inner in getattr(command, "commands", {}).values():
        _format_plainly(inner)


def with_examples(text: str) -> str:
    r"""Move the examples of a help text to a paragraph that Click does not wrap, which begins with ``\b``.

    Example:
        >>> with_examples("Build an index.\n\nExamples: quiver index build a\n\nquiver index build b")
        'Build an index.\n\n\x08\nExamples:\n  quiver index build a\n  quiver index build b'
    """
    prose, examples = list[str](), list[str]()
    for paragraph in text.split("\n\n"):
        before, found, example = re.sub("Examples?: ", "\0", paragraph, count=1).partition("\0")
        if found or paragraph.startswith("quiver "):
            prose += [before.strip()] * bool(found and before.strip())
            examples.append(" ".join((example if found else paragraph).split()))
        else:
            prose.append(paragraph)
    return "\n\n".join([*prose, *(["\n  ".join(["\b\nExamples:", *examples])] if examples else [])])


class _LazyCommands(UserDict[str, Any]):
    """Commands by name; the module of a command is imported when the command is looked up."""

    def __getitem__(self, name: str) -> Any:
        if isinstance(self.data[name], tuple):
            self.data[name] = _load_command(name)
        return self.data[name]


class _LazyGroup(TyperGroup):
    """The top level of the command line, which loads a command only to run or complete it."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.commands = _LazyCommands(COMMANDS)

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the help with the lines of ``COMMANDS``."""
        lines: dict[str, Any] = {name: TyperCommand(name, short_help=line) for name, (_, line) in COMMANDS.items()}
        outline = TyperGroup(name=self.name, commands=lines, params=self.params, help=self.help, rich_markup_mode=self.rich_markup_mode)
        outline.format_help(ctx, formatter)


app = typer.Typer(
    name="quiver",
    cls=_LazyGroup,
    help="Train, index, search and evaluate text retrievers on a native, unpadded ModernBERT encoder.",
    invoke_without_command=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"quiver {quiver_version()}")
        raise typer.Exit


@app.callback()
def options(
    context: typer.Context,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Log which backend, device and index settings are chosen; show tracebacks.")
    ] = False,
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")] = False,
) -> None:
    """Options that stand before the command."""
    del version
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(OneLineFormatter("%(levelname)s: %(message)s"))
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
    logging.getLogger("quiver").setLevel(logging.INFO if verbose else logging.WARNING)
    sys.excepthook = sys.__excepthook__ if verbose else _report_failure
    help_alone(context)


class OneLineFormatter(logging.Formatter):
    """Writes a message on one line, also if it quotes an error with a line per problem (`quiver.encoder.schema.SchemaError`)."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 (the name of logging's method)
        """Format the message without a traceback."""
        return re.sub(r"\s*\n\s*", "; ", super().formatMessage(record).rstrip())


def _report_failure(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Report an unexpected error in one line; Python then exits with status 1."""
    del trace
    message = " ".join(str(error).split())
    say_error(f"{kind.__name__}: {message} (unexpected; quiver --verbose COMMAND shows where it happened)")


def main() -> None:
    """Run the command line; the entry point of the console script."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):  # a file name that is not UTF-8 is printed with escapes
            stream.reconfigure(errors="backslashreplace")
    try:
        # In standalone mode Typer would print usage errors as a box of five lines. Without it, it returns the status of typer.Exit.
        status = app(prog_name="quiver", standalone_mode=False)
        if status == INTERRUPTED:  # as later versions of Typer report Ctrl-C
            raise typer.Abort
        if status:
            sys.exit(status)
    except UsageError as error:
        say_error(_one_line(error))
        sys.exit(2)
    except (typer.Abort, RunStoppedError) as stopped:
        sys.exit(_report_stop(stopped, sys.argv[1:]))
    except (InputError, OSError) as error:  # an OSError is a full disk or a missing permission
        say_error(describe_failure(error))
        sys.exit(2 if isinstance(error, InputError) and full_disk(error) is None else 1)
    except UnicodeEncodeError as error:  # of an argument that no other check has seen
        around = ascii(error.object[max(0, error.start - 20) : error.end + 20])
        say_error(f"{around} contains a character that {error.encoding} cannot hold; replace it")
        sys.exit(2)


def _report_stop(stopped: typer.Abort | RunStoppedError, arguments: Sequence[str]) -> int:
    """Say what to type to go on: commands of `RESUMED` are repeated, others that train need ``--resume``. Return the exit status."""
    words = [word for word in arguments if not word.startswith("-")]
    repeated = words and (words[0] in RESUMED or " ".join(words[:2]) in RESUMED)
    trained = isinstance(stopped, RunStoppedError)
    discards = "--overwrite" in arguments and words[0] != "index"  # an index keeps its unfinished work whatever it replaces
    resume = "" if repeated or "--resume" in arguments else " with --resume"
    again = f"; repeat the command{' without --overwrite' * discards}{resume} to {'resume' if trained else 'go on'}"
    if is_main_process():
        say_error((str(stopped) if trained else "interrupted") + again * bool(repeated or trained))
    return 1 if trained else INTERRUPTED


def _one_line(error: Any) -> str:
    """Format a usage error with the name of the parameter and a pointer to the help."""
    message = " ".join(error.format_message().replace("Value error, ", "").split()).rstrip(".")
    return f"{message}{_meant(error)} (see {error.ctx.command_path} --help)" if error.ctx else message


def _meant(error: Any) -> str:
    """What other tools call an option, or a command of a group without the group, as what to type."""
    if getattr(error, "option_name", None) in ("-n", "--top", "--top-k", "--topk", "--limit", "--k"):
        return "; the number of results is -k" * any("-k" in each.opts for each in error.ctx.command.params)
    if getattr(error, "option_name", None) == "--store" and error.ctx.command.name == "export":
        return "; write files with --out FOLDER, and load documents.jsonl and vectors.npy with the client of the store"
    name = re.match(r"No such command '([\w-]+)'", error.message)
    if name is None or error.ctx.parent is not None:
        return ""
    if name[1] == "bench":
        return "; the benchmarks are scripts of the repository, such as python benchmarks/encoder.py"
    typed = [f"{group} {name[1]}" for group, command in _LazyCommands(COMMANDS).items() if name[1] in getattr(command, "commands", ())]
    return f"; type {' or '.join(f'quiver {each}' for each in typed)}" if typed else ""


if __name__ == "__main__":
    main()
