"""Groups of options: a dataclass becomes options of a command, and comes back filled."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest
import typer
from typer.testing import CliRunner

from quiver.cli.options import GROUPS, argument, command, group, option
from quiver.encoder.errors import InputError


@dataclass(frozen=True)
@group
class Base:
    kind: Literal["one", "two"] = option("one", "Kind.", "-t")
    names: tuple[str, ...] = option((), "Names.", "--name")
    limit: int | None = option(None, "Limit.", min=1)


@dataclass(frozen=True)
@group
class Extended(Base):
    size: int = option("2k", "Size.", parse=lambda text: 1000 * int(text.removesuffix("k")))
    rate: float = option(0.5, "Rate.")


@dataclass(frozen=True)
class Library:
    label: str = "kept"
    fields: tuple[str, ...] = ("a", "b")


GROUPS[Library] = {"fields": option(None, "Fields.", parse=lambda text: text.split(","))}


@pytest.fixture
def run() -> Callable[..., Any]:
    """Runs a command of a path and three groups; what it gets, or the outcome if it was not called."""
    got: list[Any] = []

    @command
    def act(path: Path = argument("Path."), *, more: Extended = Extended(limit=7), plain: Base, outside: Library) -> None:
        got.extend([path, more, plain, outside])

    app = typer.Typer()
    app.command()(act)

    def call(*words: str) -> Any:
        got.clear()
        done = CliRunner().invoke(app, words)
        return got[:] or done

    return call


def test_groups_are_filled_with_defaults_given_values_and_defaults_of_the_command(run: Callable[..., Any]) -> None:
    path, more, plain, outside = run("here")
    assert (path, more, plain) == (Path("here"), Extended("one", (), 7, 2000, 0.5), Base("one", (), None))
    assert outside == Library()
    assert run("here", "--size", "3k", "--rate", "2", "--fields", "x,y")[1:] == [
        Extended("one", (), 7, 3000, 2.0),
        Base(),
        Library("kept", ["x", "y"]),  # type: ignore[arg-type]
    ]


@pytest.mark.parametrize("words", [(), ("here", "--limit", "0"), ("here", "-t", "three"), ("here", "--label", "x")])
def test_what_typer_refuses_is_refused(run: Callable[..., Any], words: tuple[str, ...]) -> None:
    assert run(*words).exit_code == 2


@pytest.mark.parametrize("value", ["nan", "inf", "-inf"])
def test_numbers_that_are_not_finite_are_refused_by_the_name_of_the_option(run: Callable[..., Any], value: str) -> None:
    failed = run("here", "--rate", value)
    assert isinstance(failed.exception, InputError)
    assert str(failed.exception) == f"--rate must be a finite number, got {value}"


def test_a_required_field_has_no_default() -> None:
    @dataclass(frozen=True)
    @group
    class Required:
        name: str = option(..., "Name.")

    with pytest.raises(TypeError):
        Required()  # type: ignore[call-arg]
