"""Help, version and completion import no heavy library, so that they are fast."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from quiver.cli.main import COMMANDS, app

HEAVY = {"torch", "faiss", "numba", "transformers", "pyarrow", "datasets", "fastapi"}
SCRIPT = """
import sys
from quiver.cli.main import main
for words in {commands!r}:
    sys.argv = ["quiver", *words]
    try:
        main()
    except SystemExit as stop:
        if stop.code:
            raise
print("loaded", *sorted(sys.modules))
"""
COMPLETION = "import sys; from quiver.cli.main import main; sys.argv = ['quiver']; main(); "


def loaded(*commands: list[str]) -> set[str]:
    """Return the modules that a new process has imported after these commands."""
    done = subprocess.run([sys.executable, "-c", SCRIPT.format(commands=commands)], capture_output=True, text=True, check=True)
    return set(done.stdout.splitlines()[-1].split())


def test_help_and_version_load_no_command_and_no_heavy_library() -> None:
    modules = loaded(["--help"], ["--version"])
    assert not modules & (HEAVY | {"numpy"})
    assert {name for name in modules if name.startswith("quiver.cli.")} == {"quiver.cli.main", "quiver.cli.options"}


def test_help_of_a_command_loads_no_heavy_library() -> None:
    assert not loaded(*([name, "--help"] for name in COMMANDS)) & (HEAVY | {"numpy", "pyarrow"})


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        ("quiver tr", {"train"}),
        ("quiver cache ", {"info", "prune"}),
        ("quiver search --ef", {"--effort"}),
        ("quiver search index --effort b", {"balanced"}),
    ],
)
def test_completion_offers_commands_options_and_values(typed: str, expected: set[str]) -> None:
    words = typed.split(" ")
    environment = {"_QUIVER_COMPLETE": "complete_bash", "COMP_WORDS": typed, "COMP_CWORD": str(len(words) - 1)}
    done = subprocess.run([sys.executable, "-c", COMPLETION], capture_output=True, text=True, env=environment, check=True)
    assert set(done.stdout.split()) == expected


@pytest.mark.parametrize("name", list(COMMANDS))
def test_help_at_80_columns_has_examples_and_options_in_one_piece(name: str) -> None:
    runner = CliRunner(env={"COLUMNS": "80"})

    def check(words: list[str], command: Any) -> None:
        shown = runner.invoke(app, [*words, "--help"])
        assert shown.exit_code == 0
        lines = shown.output.splitlines()
        examples = [line for line in lines if line.startswith("    quiver ")]
        assert all(len(line) <= 80 or line in examples for line in lines)
        names = {word.strip(",") for line in lines for word in line.split() if re.match(r" {2,3}[-/]", line)}
        for parameter in command.params:
            if parameter.param_type_name == "option":
                assert {name.strip() for name in (*parameter.opts, *parameter.secondary_opts)} <= names, words
        inner = getattr(command, "commands", {})
        assert inner or examples, words
        written = " ".join((command.callback.__doc__ or "").split())
        assert all(line.strip() in written for line in examples), words  # in one piece
        for each, found in inner.items():
            assert re.search(rf"^  {each}  +\S", shown.output, re.MULTILINE), words
            check([*words, each], found)

    check([name], get_command(app).commands[name])


def test_help_names_each_command_with_a_whole_sentence() -> None:
    runner = CliRunner(env={"COLUMNS": "80"})
    for words in ([], ["index"]):
        text = " ".join(runner.invoke(app, [*words, "--help"]).output.split())
        assert "..." not in text.partition("Commands:")[2]
    assert "extend-positions Extend the absolute positions of a model to longer texts." in " ".join(
        runner.invoke(app, ["--help"]).output.split()
    )


def test_a_switch_has_one_help_text_in_every_command() -> None:
    switches: dict[str, set[str]] = {}
    for name in COMMANDS:
        for option in options_of(get_command(app).commands[name]):
            if option.is_flag:
                switches.setdefault((option.opts or option.secondary_opts)[0], set()).add(option.help)
    assert {name: texts for name, texts in switches.items() if len(texts) > 1} == {}


def options_of(command: Any) -> Iterator[Any]:
    for each in getattr(command, "commands", {}).values():
        yield from options_of(each)
    if not hasattr(command, "commands"):
        yield from (parameter for parameter in command.params if parameter.param_type_name == "option")
