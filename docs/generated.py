"""Parts of the site that are made from the code while it is built: commands, recipes, the Python API, and notebooks.

A page holds ``<!-- generated: NAME ARGUMENTS -->`` where the output of the function ``NAME`` of `GENERATORS` belongs. No generated file is
written, so none can be out of date.
"""

from __future__ import annotations

import html
import importlib
import inspect
import json
import re
import types
import typing
from collections.abc import Callable, Iterator
from pydoc import locate
from typing import Any

import typer.main
from docutils import nodes
from pydantic.fields import FieldInfo
from sphinx.application import Sphinx
from sphinx.pycode import ModuleAnalyzer

from quiver.cli.main import app
from quiver.encoder.config import EncoderConfig, RopeScaling
from quiver.encoder.schema import Schema
from quiver.encoder.training.architecture import ArchitectureSection, ScalingSection

_MARK = re.compile(r"^<!-- generated: (\w+)(.*) -->$", re.MULTILINE)
_NAME_OF_ROW = re.compile(r"^\| `(quiver\.(?:\w+\.)*?([A-Z]\w+\.\w+)|quiver\.[\w.]+)` \|", re.MULTILINE)


def setup(sphinx: Sphinx) -> dict[str, Any]:
    """Register the replacement of marks and notebooks."""
    sphinx.connect("source-read", _complete)
    sphinx.connect("autodoc-process-docstring", _keep_first_line, priority=1)
    sphinx.connect("autodoc-process-signature", _shorten_factories)
    sphinx.connect("doctree-read", _polish)
    sphinx.connect("html-page-context", _level_captions, priority=900)  # after the theme
    return {"parallel_read_safe": True}


def _complete(sphinx: Sphinx, page: str, source: list[str]) -> None:
    if str(sphinx.env.doc2path(page)).endswith(".ipynb"):
        source[0] = notebook(source[0])
    source[0] = re.sub(r"\]\((\.\./[^)#]+\.md)\)", r"](path:\1)", source[0])  # Markdown outside docs/ is no page of the site
    if page.startswith("reference/python"):
        # The overview links to the descriptions; a method is shown with its class, without the package.
        source[0] = _NAME_OF_ROW.sub(lambda found: f"| {{py:obj}}`{found[2] or found[1]} <{found[1]}>` |", source[0])
    source[0] = _MARK.sub(lambda found: GENERATORS[found[1]](*found[2].split()), source[0])


def _keep_first_line(sphinx: Sphinx, kind: str, name: str, found: Any, options: Any, lines: list[str]) -> None:
    """Begin with an empty comment, because Napoleon would take an attribute's first line up to a colon for its type."""
    del sphinx, name, found, options
    if kind in ("attribute", "property", "data"):
        lines[:0] = ["..", ""]


def _shorten_factories(sphinx: Sphinx, kind: str, name: str, found: Any, options: Any, signature: str, returned: str) -> tuple[str, str]:
    """Write ``...`` for a default that a function makes: Sphinx cannot parse ``<factory>``."""
    del sphinx, kind, name, found, options
    return signature and signature.replace("<factory>", "..."), returned


def _polish(sphinx: Sphinx, doctree: nodes.document) -> None:
    """Mark code with words that may have to be broken, use a dash between an argument and its meaning, and call attributes so."""
    del sphinx
    for literal in doctree.findall(nodes.literal):
        in_table = isinstance(literal.parent, nodes.entry) or isinstance(literal.parent.parent, nodes.entry)
        if max(map(len, literal.astext().split()), default=0) > (16 if in_table else 36):
            literal["classes"].append("long")
    for text in list(doctree.findall(nodes.Text)):
        if text == " -- ":
            text.parent.replace(text, nodes.Text(" \N{EN DASH} "))
        elif text == "Variables" and isinstance(text.parent, nodes.field_name):
            text.parent.replace(text, nodes.Text("Attributes"))


def _level_captions(sphinx: Sphinx, page: str, template: str, context: dict[str, Any], doctree: nodes.document | None) -> None:
    """Give the captions of the navigation, which are headings, the level that screen readers need."""
    del sphinx, page, template, doctree
    tree = context.get("furo_navigation_tree", "")
    context["furo_navigation_tree"] = tree.replace('role="heading"', 'role="heading" aria-level="2"')


def escape(text: str) -> str:
    """Plain text as Markdown that shows the same characters."""
    return re.sub(r"([\\`*_{}\[\]<>#|~])", r"\\\1", text)


# Commands.


def commands() -> str:
    """Every command with its help, examples, arguments and options, as ``--help`` has them."""
    root: Any = typer.main.get_command(app)
    return "\n\n".join(_section(*found) for found in _walk(root, root.context_class(root, info_name="quiver")))


def _walk(command: Any, context: Any) -> Iterator[tuple[Any, Any]]:
    yield command, context
    for name in command.list_commands(context) if hasattr(command, "list_commands") else ():
        inner = command.get_command(context, name)
        yield from _walk(inner, inner.context_class(inner, info_name=name, parent=context))


def _section(command: Any, context: Any) -> str:
    path = context.command_path
    parts = [f"## {path}"] if path.count(" ") < 2 else [f"### {path}"]
    parts.append(f"```text\n{path} {' '.join(command.collect_usage_pieces(context))}\n```")
    examples: list[str] = []
    for paragraph in (command.help or "").split("\n\n"):
        if paragraph.startswith("\b\n"):  # which Click does not wrap
            examples = [line.strip() for line in paragraph.splitlines()[2:]]
        else:
            parts.append(_options(" ".join(paragraph.split())))
    if examples:
        parts.append("```sh\n" + "\n".join(examples) + "\n```")
    for parameter in command.get_params(context):
        record = parameter.get_help_record(context)
        if record and "--help" not in parameter.opts:
            name = record[0].strip().removeprefix("/ ").replace("list[", "").replace("]>", ">").replace("<int range>", "<int>")
            parts.append(f"`{name}`\n: {_options(' '.join(record[1].split()))}")
    return "\n\n".join(parts)


def _options(text: str) -> str:
    """Plain text as Markdown, with the names of options as code."""
    parts = re.split(r"(?<![\w-])(--[a-z][\w-]*)", text)
    return "".join(f"`{part}`" if number % 2 else escape(part) for number, part in enumerate(parts))


# Recipes and other settings.


def settings(name: str, title: str = "") -> str:
    """The fields of a schema and of the schemas in it: type, default, bounds and meaning."""
    module, _, attribute = name.rpartition(".")
    schema = getattr(importlib.import_module(module), attribute)
    return "\n\n".join(_schema(schema, title, set()))


def _schema(schema: type[Schema], path: str, seen: set[str]) -> Iterator[str]:
    meanings = _meanings(schema)
    if path:
        yield f"### {escape(path)}"
    yield _prose(" ".join((schema.__doc__ or "").split()))
    inner = []
    for name, field in schema.model_fields.items():
        meaning = meanings.get(name, "") or (field.description or "")
        yield f"`{name}`: {escape(_type(field))}\n: {_prose(' '.join(meaning.split()))}{_default(field)}"
        inner += [(f"{path}.{name}" if path else name, each) for each in _schemas(field.annotation)]
    for below, each in inner:
        if below not in seen:
            seen.add(below)
            yield from _schema(each, below, seen)


def _meanings(schema: type[Schema]) -> dict[str, str]:
    """The documentation of each field, from the schema or one that it extends; of switches from the configuration that they set."""
    owners = [each for each in schema.__mro__ if issubclass(each, Schema)]
    owners += [EncoderConfig] * issubclass(schema, ArchitectureSection) + [RopeScaling] * issubclass(schema, ScalingSection)
    found: dict[str, str] = {}
    for owner in owners:
        documented = ModuleAnalyzer.for_module(owner.__module__).find_attr_docs().items()
        found = {name: " ".join(lines).strip() for (holder, name), lines in documented if holder == owner.__name__} | found
    return found


def _schemas(hint: Any) -> Iterator[type[Schema]]:
    if isinstance(hint, type) and issubclass(hint, Schema):
        yield hint
    for each in typing.get_args(hint):
        yield from _schemas(each)


def _type(field: FieldInfo) -> str:
    bounds = []
    for each in field.metadata:
        for name, sign in (("ge", ">="), ("gt", ">"), ("le", "<="), ("lt", "<"), ("multiple_of", "multiple of")):
            if getattr(each, name, None) is not None:
                bounds.append(f"{sign} {getattr(each, name)}")
    return ", ".join([_hint(field.annotation), *bounds])


def _hint(hint: Any) -> str:
    origin, inner = typing.get_origin(hint), [each for each in typing.get_args(hint) if each not in (type(None), ...)]
    if origin is typing.Literal:
        return " or ".join(str(each) for each in inner)
    if origin is typing.Annotated:
        return _hint(inner[0])
    if origin in (typing.Union, types.UnionType):
        return " or ".join(dict.fromkeys(_hint(each) for each in inner))
    if origin is not None and issubclass(origin, tuple | list):
        return "list of " + _hint(inner[0])
    if origin is not None:
        return "mapping"
    if isinstance(hint, type) and issubclass(hint, Schema):
        return "section"
    return {"str": "text", "int": "whole number", "float": "number", "bool": "true or false"}.get(getattr(hint, "__name__", ""), str(hint))


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return " *Required.*"
    default = field.default
    if isinstance(default, Schema) or default in ((), None):
        return ""
    return f" *Default:* `{json.dumps(default) if not isinstance(default, str) else default or chr(34) * 2}`"


def _prose(text: str) -> str:
    """A docstring's text as Markdown: its double backticks are code, the rest is as written."""
    parts = re.split(r"(``?[^`]+``?)", text)
    return "".join(f"`{part.strip('`')}`" if number % 2 else escape(part) for number, part in enumerate(parts))


# Python.


def api(*names: str) -> str:
    """Directives for names such as ``quiver.BiEncoder``, and for the public names of packages, but for those that ``quiver`` has, too."""
    directives = []
    for name in documented(*names):
        found = locate(name)
        kind = "class" if isinstance(found, type) else "function" if callable(found) else "data"
        directives.append(f".. auto{kind}:: {name}\n")
    return "```{eval-rst}\n" + "\n".join(directives) + "```"


def documented(*names: str) -> list[str]:
    """The names that `api` describes: those given, and in the place of a package its public names that are not given or in ``quiver``."""
    quiver = locate("quiver")
    seen = {id(getattr(quiver, public)) for public in dir(quiver)} | {id(locate(name)) for name in names}
    found: list[str] = []
    for name in names:
        package = locate(name)
        if isinstance(package, types.ModuleType):
            found += [f"{name}.{public}" for public in dir(package) if id(getattr(package, public)) not in seen]
        else:
            found.append(name)
    return found


def module(name: str) -> str:
    """The docstring of a module, whose indented lines are shown as they are."""
    parts = []
    for block in re.split(r"\n\n(?=\S)", inspect.getdoc(importlib.import_module(name)) or ""):
        text, found, indented = block.partition("\n\n    ")
        parts.append(_prose(" ".join(text.split())) if not text.startswith(("- ", "    ")) else _prose(text))
        if found:
            parts.append("```text\n" + inspect.cleandoc("    " + indented) + "\n```")
    return "\n\n".join(parts)


# Notebooks.


def notebook(source: str) -> str:
    """A notebook as Markdown: its texts, its code, and the stored outputs of the code."""
    parts = []
    for cell in json.loads(source)["cells"]:
        text = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(text)
        else:
            parts += [f"```python\n{text}\n```", *(_output(each) for each in cell["outputs"])]
    return "\n\n".join(parts)


def _output(output: dict[str, Any]) -> str:
    data = output.get("data", {})
    if "image/png" in data:
        return f'<img alt="Output of the code above" src="data:image/png;base64,{"".join(data["image/png"]).strip()}">'
    if "text/html" in data:
        return '```{raw} html\n<div class="output">' + "".join(data["text/html"]) + "</div>\n```"
    text = "".join(output.get("text", data.get("text/plain", ""))).rstrip()
    return f'```{{raw}} html\n<pre class="output">{html.escape(text)}</pre>\n```'


GENERATORS: dict[str, Callable[..., str]] = {"commands": commands, "settings": settings, "api": api, "module": module}
