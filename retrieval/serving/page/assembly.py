"""Assemble the search page: HTML with inlined style sheet and scripts, and a content security policy with their checksums.

The parts are files beside this module. The scripts are joined in the order of `SCRIPTS` into one function in strict mode, so a script may
use the functions of every other. The page sends its requests to ``v1/`` below its own address.
"""

from __future__ import annotations

import base64
import hashlib
from functools import cache
from importlib.resources import files

SCRIPTS = ("elements", "address", "service", "passages", "heat", "filters", "facets", "lists", "reader", "searching", "start")
"""Names of the scripts in the order in which they run."""


@cache
def page_html() -> str:
    """Return the page; it sends requests only to ``v1/...``, relative to its own address."""
    policy = f'<meta http-equiv="Content-Security-Policy" content="{_policy()}">'
    whole = _part("page.html")
    for mark, content in (("<!-- policy -->", policy), ("/* style */", _part("style.css")), ("/* script */", _script())):
        whole = whole.replace(mark, content, 1)
    return whole


def content_security_policy() -> str:
    """Return the ``Content-Security-Policy`` header of the page: only its own style and script run, and no other page may frame it.

    The page contains the same policy, except for ``frame-ancestors``, which browsers accept only in a header.
    """
    return f"{_policy()}; frame-ancestors 'none'"


@cache
def _policy() -> str:
    script, style = (base64.b64encode(hashlib.sha256(content.encode()).digest()).decode() for content in (_script(), _part("style.css")))
    return (
        f"default-src 'none'; script-src 'sha256-{script}'; style-src 'sha256-{style}'; connect-src 'self'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )


def _script() -> str:
    return '"use strict";\n(() => {\n' + "\n".join(_part(f"{name}.js") for name in SCRIPTS) + "\n})();\n"


@cache
def _part(name: str) -> str:
    return files("quiver.retrieval.serving.page").joinpath(name).read_text(encoding="utf-8")
