"""Options as data: a command is a function, and its parameters are options, arguments, or groups of options.

An option is declared once, with `option`, as the default of a parameter, of a field of a group (a dataclass), or as a constant that
several commands share. `command` makes of it what Typer reads, and calls the function with filled groups and parsed values.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, NamedTuple, TypeVar, get_args, get_origin, get_type_hints

import typer

from quiver.encoder.errors import InputError


@dataclasses.dataclass(frozen=True, eq=False)
class Option:
    """An option or an argument: default, help text, names, and how its text is read."""

    default: Any  # ... if it must be given
    flags: Sequence[str]  # such as -m or --verify/--no-verify; without a long one, the field's is put before them
    parse: Callable[[Any], Any] | None  # reads the text of the command line, or the texts of a repeated option
    declare: Callable[..., Any]  # typer.Option or typer.Argument
    settings: Mapping[str, Any]  # what else it takes: help, min, metavar, ...

    def with_default(self, default: Any) -> Option:
        """The option with another default."""
        return dataclasses.replace(self, default=default)

    def names(self, field: str) -> Sequence[str]:
        """Names on the command line of the option of a field or parameter."""
        long = any("--" in flag for flag in self.flags)
        return self.flags if long else (f"-{'-' * (len(field) > 1)}{field.replace('_', '-')}", *self.flags)

    def parameter(self, name: str, field: str, kind: Any) -> inspect.Parameter:
        """The parameter of a function that Typer reads: of the field of a group, or of the same name."""
        default, several = self.default, isinstance(self.default, tuple) or (get_origin(kind) is tuple and self.parse is None)
        if several:
            kind, default = list[str if self.parse else get_args(kind)[0]], default or None  # type: ignore[misc]
        elif self.parse is not None:
            kind = str
        declared = self.declare(*(self.names(field) if self.declare is typer.Option else ()), **self.settings)
        return inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default=inspect.Parameter.empty if default is ... else default,
            annotation=Annotated[kind | None if default is None else kind, declared],
        )

    def value(self, given: Any, field: str, kind: Any) -> Any:
        """The value of the field: the text of the command line is parsed; None stands for the default."""
        given = self.default if given is None else given
        if isinstance(given, float) and not math.isfinite(given):
            raise InputError(f"{self.names(field)[0]} must be a finite number, got {given}")
        if self.parse is not None:
            return None if given is None else self.parse(given)
        return tuple(given) if get_origin(kind) is tuple else given


def option(default: Any, help: str, *flags: str, parse: Callable[[Any], Any] | None = None, **settings: Any) -> Any:  # noqa: A002
    """Declare an option, see `Option`. A field of type ``tuple[T, ...]`` is one that may be repeated."""
    return Option(default, flags, parse, typer.Option, {"help": help, **settings})


def argument(help: str, default: Any = ..., **settings: Any) -> Any:  # noqa: A002
    """Declare an argument, see `Option`."""
    return Option(default, (), None, typer.Argument, {"help": help, **settings})


GROUPS: dict[type, Mapping[str, Option]] = {}
"""Groups -> options of their fields. A dataclass of the library is a group if it is entered here; its other fields keep their defaults."""

Group = TypeVar("Group", bound=type)


def group(found: Group) -> Group:
    """Make a group of a class that will be a dataclass: write ``@dataclass`` above it."""
    own = {name: value for name, value in vars(found).items() if isinstance(value, Option)}
    for name, value in own.items():
        delattr(found, name) if value.default is ... else setattr(found, name, value.default)
    GROUPS[found] = {
        name: each for base in reversed(found.__mro__) for name, each in GROUPS.get(base, own if base is found else {}).items()
    }
    return found


class _Slot(NamedTuple):
    """An option in the signature that Typer reads, for a parameter of the command or a field of its group."""

    name: str
    field: str
    option: Option
    kind: Any


def _find_slots(name: str, kind: Any, default: Any) -> list[_Slot]:
    """The slots of a parameter; none for the context."""
    if kind not in GROUPS:
        return [_Slot(name, name, default, kind)] if isinstance(default, Option) else []
    kinds, slots = get_type_hints(kind), []
    for field, each in GROUPS[kind].items():
        unique = field if each.declare is typer.Argument else f"{name}_{field}"  # the help shows the name of an argument
        slots.append(_Slot(unique, field, each.with_default(getattr(default, field, each.default)), kinds[field]))
    return slots


def command(function: Callable[..., None]) -> Callable[..., None]:
    """Make a command of a function whose parameters are options, arguments, groups, or the context.

    A default of a group, such as ``encoding: Encoding = Encoding(executor="ray")``, replaces defaults of its options in this command.
    """
    hints, found = get_type_hints(function), list[inspect.Parameter]()
    plan: dict[str, list[_Slot]] = {}
    for name, parameter in inspect.signature(function).parameters.items():
        plan[name] = _find_slots(name, hints[name], parameter.default)
        context = parameter.replace(annotation=hints[name], kind=inspect.Parameter.KEYWORD_ONLY)
        found += [slot.option.parameter(slot.name, slot.field, slot.kind) for slot in plan[name]] or [context]

    def call(**given: Any) -> None:
        values = {}
        for name, slots in plan.items():
            read = {slot.field: slot.option.value(given[slot.name], slot.field, slot.kind) for slot in slots}
            if hints[name] in GROUPS:  # where nothing was given, the default of the group counts
                values[name] = hints[name](**{field: value for field, value in read.items() if value is not None})
            else:
                values[name] = read[name] if slots else given[name]
        function(**values)

    call.__name__, call.__doc__, call.__module__ = function.__name__, function.__doc__, function.__module__
    call.__signature__ = inspect.Signature(found)  # type: ignore[attr-defined]
    call.__annotations__ = {each.name: each.annotation for each in found}
    return call
