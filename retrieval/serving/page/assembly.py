"""The page as one text: the markup with the style sheet and the scripts put into it, and a policy that names their checksums.

The parts lie beside this module, so that each can be read alone; the scripts are joined in the order of `SCRIPTS` into one strict function,
in which a part may use what any other part defines. Nothing here knows of the service: the page asks ``api/`` beside itself.
"""

from __future__ import annotations

import base64
import hashlib
from functools import cache
from importlib.resources import files

SCRIPTS = ("elements", "address", "service", "passages", "heat", "filters", "lists", "reader", "searching", "start")
"""Names of the scripts in the order in which they run."""


@cache
def page_html() -> str:
    """The whole page; it asks for nothing but ``api/...`` relative to its own address."""
    policy = f'<meta http-equiv="Content-Security-Policy" content="{_policy()}">'
    whole = _part("page.html")
    for mark, content in (("<!-- policy -->", policy), ("/* style */", _style()), ("/* script */", _script())):
        whole = whole.replace(mark, content, 1)
    return whole


def content_security_policy() -> str:
    """What the service should send with the page as its ``Content-Security-Policy``: only the page's own style and script run.

    It is the page's own policy and what only a header may say: that no other page frames this one.
    """
    return f"{_policy()}; frame-ancestors 'none'"


@cache
def _policy() -> str:
    return (
        f"default-src 'none'; script-src '{_checksum(_script())}'; style-src '{_checksum(_style())}'; connect-src 'self'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )


def _style() -> str:
    return _part("style.css")


@cache
def _script() -> str:
    return '"use strict";\n(() => {\n' + "\n".join(_part(f"{name}.js") for name in SCRIPTS) + "\n})();\n"


def _checksum(content: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()


def _part(name: str) -> str:
    return files("quiver.retrieval.serving.page").joinpath(name).read_text(encoding="utf-8")
