"""The reference of the API at ``/docs``: the OpenAPI schema as one page of HTML, without scripts, that needs no other host."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterator, Mapping
from functools import cache
from html import escape
from importlib.resources import files
from typing import Any

Schema = Mapping[str, Any]


def reference_html(openapi: Schema) -> str:
    """Describe an OpenAPI 3.1 schema: each operation with its parameters, its body, its answers and a call of curl.

    Args:
        openapi: The schema.
    """
    by_tag: dict[str, list[tuple[str, str, Schema]]] = {}
    for path, operations in openapi["paths"].items():
        for method, operation in operations.items():
            by_tag.setdefault(operation.get("tags", ["other"])[0], []).append((path, method, operation))
    schemas = openapi.get("components", {}).get("schemas", {})
    links = "".join(f'<li><a href="#{escape(tag)}">{escape(tag.capitalize())}</a></li>' for tag in by_tag)
    sections = "".join(
        _section(tag, "".join(_operation(*operation, schemas) for operation in operations)) for tag, operations in by_tag.items()
    )
    types = _section("types", "".join(_type(name, schema) for name, schema in sorted(schemas.items())))
    title = f"{openapi['info']['title']} {openapi['info']['version']}"
    summary = escape(openapi["info"].get("summary", ""))
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{escape(title)}: reference of the API</title>
<style>{_style()}</style>
</head>
<body>
<header>
<h1>{escape(title)}</h1>
<p>{summary} The schema for programs is <a href="openapi.json">openapi.json</a>; the <a href="./">search page</a> is beside this one.</p>
<nav><ul>{links}<li><a href="#types">Types</a></li></ul></nav>
</header>
<main>{sections}{types}</main>
</body>
</html>
"""


def _section(name: str, content: str) -> str:
    return f'<section id="{escape(name)}"><h2>{escape(name.capitalize())}</h2>{content}</section>\n'


def _folded(key: str, summary: str, content: str) -> str:
    return f'<details id="{escape(key)}"><summary>{summary}</summary>{content}</details>\n'


def reference_policy() -> str:
    """Return the ``Content-Security-Policy`` header of the page: its own style, and nothing else."""
    digest = base64.b64encode(hashlib.sha256(_style().encode()).digest()).decode()
    return f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"


@cache
def _style() -> str:
    return files("quiver.retrieval.serving.page").joinpath("reference.css").read_text(encoding="utf-8")


def _operation(path: str, method: str, operation: Schema, schemas: Schema) -> str:
    described = operation.get("description", operation["summary"])
    does = described.partition("\n\n")[0].partition(". ")[0].rstrip(".")
    parts = [] if described.rstrip(".") == does else [f"<p>{escape(described)}</p>"]
    if operation.get("parameters"):
        rows = [(each["name"], each["schema"], each.get("description", ""), bool(each.get("required"))) for each in operation["parameters"]]
        parts.append(_table("Parameters", rows))
    body = operation.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema")
    if body is not None:
        parts.append(f"<h3>Body</h3><p>{_name(body)}</p>")
    call = escape(_curl(path, method, operation, body, schemas))
    parts.append(f'<h3>Call</h3><pre tabindex="0" aria-label="Call"><code>{call}</code></pre>')
    answers = "".join(
        f"<tr><th><code>{escape(status)}</code></th><td>{_answer(each)}</td></tr>" for status, each in operation["responses"].items()
    )
    parts.append(f'<h3>Answers</h3><div class="wide"><table>{answers}</table></div>')
    head = f"<b>{method.upper()}</b> <code>{escape(path)}</code> <span>{escape(' '.join(does.split()))}</span>"
    return _folded(operation["operationId"], head, "".join(parts))


def _answer(answer: Schema) -> str:
    contents: list[Schema] = [*answer.get("content", {}).values()]
    content = contents[0].get("schema") if contents else None
    named = "" if content is None else f" {_name(content)}"
    return f"{escape(answer.get('description', ''))}{named}"


def _type(name: str, schema: Schema) -> str:
    required = schema.get("required", ())
    text = escape(schema.get("description", "").split("\n\nAttributes:")[0])
    described = _attributes(schema.get("description", ""))
    rows = [
        (key, each, described.get(key, each.get("description", "")), key in required) for key, each in schema.get("properties", {}).items()
    ]
    return _folded(f"type-{name}", f"<code>{escape(name)}</code>", f"<p>{text}</p>{_table('', rows) if rows else ''}")


def _attributes(docstring: str) -> dict[str, str]:
    """The descriptions in the ``Attributes`` section of a docstring, by name."""
    found: dict[str, str] = {}
    name = ""
    for line in docstring.partition("Attributes:\n")[2].splitlines():
        key, colon, text = line.strip().partition(": ")
        indent = len(line) - len(line.lstrip())
        if indent == 4 and colon and key.isidentifier():
            name, found[key] = key, text
        elif name:
            found[name] += f" {line.strip()}"
    return found


def _table(title: str, rows: list[tuple[str, Schema, str, bool]]) -> str:
    lines = "".join(
        f"<tr><th><code>{escape(name)}</code>{' <em>required</em>' * required}</th><td>{_name(schema)}</td><td>{escape(text)}</td></tr>"
        for name, schema, text, required in rows
    )
    return f'{f"<h3>{title}</h3>" if title else ""}<div class="wide"><table>{lines}</table></div>'


def _name(schema: Schema) -> str:
    """A type in short, in HTML, with links to the named ones and the limits that the schema gives."""
    if "$ref" in schema:
        name = escape(schema["$ref"].rpartition("/")[2])
        return f'<a href="#type-{name}"><code>{name}</code></a>'
    for key in ("anyOf", "oneOf"):
        if key in schema:
            return " or ".join(dict.fromkeys(_name(each) for each in schema[key]))
    if "enum" in schema or "const" in schema:
        return " or ".join(f"<code>{escape(json.dumps(each))}</code>" for each in schema.get("enum", [schema.get("const")]))
    kind = str(schema.get("type", "any"))
    if kind == "array":
        inner = _name(schema["items"]) if "items" in schema else ", ".join(_name(each) for each in schema.get("prefixItems", [])) or "any"
        kind = f"list of {inner}"
    limits = ", ".join(_limits(schema))
    return f"{kind} ({limits})" if limits else kind


def _limits(schema: Schema) -> Iterator[str]:
    for key, words in (
        ("minimum", "from"),
        ("exclusiveMinimum", "above"),
        ("maximum", "to"),
        ("maxLength", "up to"),
        ("maxItems", "up to"),
    ):
        if key in schema:
            yield f"{words} {schema[key]:,.10g}" + {"maxLength": " characters", "maxItems": " items"}.get(key, "")
    if schema.get("default") is not None:
        yield f"default {escape(json.dumps(schema['default']))}"


def _curl(path: str, method: str, operation: Schema, body: Schema | None, schemas: Schema) -> str:
    query = "&".join(
        f"{each['name']}={each['name'].upper()}"
        for each in operation.get("parameters", [])
        if each.get("required") and each["in"] == "query"
    )
    words = ["curl"] + ([] if method == "get" else ["-X", method.upper()])
    words.append(f"'http://localhost:8080{path.replace('{', '').replace('}', '')}{'?' + query if query else ''}'")
    if operation.get("security"):
        words.append("\\\n  -H 'Authorization: Bearer TOKEN'")
    if body is not None:
        words.append(f"\\\n  -H 'Content-Type: application/json' -d '{json.dumps(_example(body, schemas))}'")
    return " ".join(words)


def _example(schema: Schema, schemas: Schema) -> Any:
    """A small value of a schema: of an object its required properties."""
    if "$ref" in schema:
        schema = schemas[schema["$ref"].rpartition("/")[2]]
    for key in ("anyOf", "oneOf"):
        if key in schema:
            return _example(schema[key][0], schemas)
    if "enum" in schema or "const" in schema:
        return schema.get("enum", [schema.get("const")])[0]
    kind = schema.get("type")
    if kind == "object":
        return {name: _example(schema["properties"][name], schemas) for name in schema.get("required", ())}
    if kind == "array":
        return [_example(schema.get("items", {}), schemas)]
    return {"string": "...", "integer": 10, "number": 0.9, "boolean": True}.get(str(kind))
