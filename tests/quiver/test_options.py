"""An option has one meaning: one help text and one type in every command, except where a reason is written here."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from typer.main import get_command

from quiver.cli.main import app

REASONS = {
    "--data": "what is evaluated or measured: several collections, or one file or folder",
    "--dtype": "of training (autocast), of a model's weights, and with auto for training benchmarks",
    "--format": "what mine writes is what teacher-scores reads",
    "--fuse": "search names files and folders, the service names of its retrievers",
    "--gpu": "GPUs whose speed of encoding is known, and the GPUs of the paper; the default",
    "--layout": "each exporter has layouts of its own",
    "--max-length": "of windows, and of texts",
    "--model": "what kinds of models a command takes, and the default",
    "--normalize": "search also normalizes by z-scores, and teacher-scores not at all by default",
    "--out": "what each command writes",
    "--queries": "a source of texts with ids, a file to search for, and a file to calibrate with",
    "--qrels": "a file of judgements, and a folder with a file for each split",
    "--query-field": "the default depends on --format in teacher-scores",
    "--rerank": "search takes models and folders, the service names of its retrievers",
    "--split": "the published split is the default of evaluate",
    "--title": "the field of a table that holds titles, and the title of a report",
    "-d": "short for --data",
    "-k": "repeatable in index calibrate",
    "-m": "short for --model",
    "-o": "short for --out",
}
"""Option with several help texts or types -> why one would be wrong."""


def commands(name: str, command: Any) -> Iterator[tuple[str, Any]]:
    for each, inner in getattr(command, "commands", {}).items():
        yield from commands(f"{name} {each}".strip(), inner)
    yield name, command


def meanings() -> dict[str, dict[tuple[object, ...], list[str]]]:
    """Option -> help text and type -> commands."""
    found: dict[str, dict[tuple[object, ...], list[str]]] = defaultdict(lambda: defaultdict(list))
    for name, command in commands("", get_command(app)):
        for parameter in command.params:
            names = [*parameter.opts, *parameter.secondary_opts]
            if names and names[0].strip().startswith("-"):
                kind = getattr(getattr(parameter, "type_descriptor", None), "annotation", None)
                for option in names:
                    found[option][(parameter.help, str(kind), parameter.multiple)].append(name)
    return found


def test_an_option_means_the_same_in_every_command() -> None:
    several = {option: texts for option, texts in meanings().items() if len(texts) > 1}
    unexplained = {option: list(texts.values()) for option, texts in several.items() if option not in REASONS}
    assert not unexplained
    assert set(REASONS) == set(several), "a reason for an option that has one meaning by now"


def test_every_option_has_a_help_text() -> None:
    for option, texts in meanings().items():
        for help_text, _, _ in texts:
            assert help_text, f"{option} of {texts}"
    assert {"--memory", "--timeout", "--run", "--index", "--set", "--resume"} & meanings().keys()
    for option in ("--memory", "--timeout", "--resume", "--overwrite", "--progress", "--json", "--seed"):
        assert len(meanings()[option]) == 1
