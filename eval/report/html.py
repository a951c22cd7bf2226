"""Results as one HTML page that needs nothing but itself: no request, no font, no library; it opens from a file.

The texts in it are others' words. Everything is escaped, nothing but the page's own script may run (its checksum is in the page's
content security policy), and characters that cannot be seen or turn the direction of writing are shown as signs.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

from quiver.encoder.errors import InputError
from quiver.eval.report import svg
from quiver.eval.report.systems import points

if TYPE_CHECKING:
    from jinja2 import Environment

_C0 = re.compile(r"[\x00-\x08\x0b-\x1f]")
# C1 controls, the two overrides of the direction of writing, and what is no character: UTF-8 cannot hold half a surrogate pair.
_NO_TEXT = re.compile("[\x7f-\x9f\u202d\u202e\ufffe\uffff\ud800-\udfff]")


def render_page(template: str, content: Mapping[str, object], *, title: str) -> str:
    """A template of this package with the style, the script and the filters that all pages share.

    Args:
        template: Its file name.
        content: What it shows, by the names it has there.
        title: Of the page.

    Raises:
        InputError: jinja2 is not installed.
    """
    environment = _environment()
    script = _source(environment, "page.js")
    return environment.get_template(template).render(
        content,
        title=title,
        script=script,
        script_hash="sha256-" + base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        style=_source(environment, "page.css"),
    )


def visible(value: object) -> object:
    r"""A text without characters that act instead of being seen; line ends and tabs stay, and so does what is no text.

    Example:
        >>> visible("a\x00b\r\nc\u202ed")
        'a␀b\nc�d'
    """
    if not isinstance(value, str) or hasattr(value, "__html__"):
        return value
    pictured = _C0.sub(lambda control: chr(0x2400 + ord(control[0])), value.replace("\r\n", "\n"))
    return _NO_TEXT.sub("\ufffd", pictured)


def _environment() -> Environment:
    try:
        from jinja2 import Environment, PackageLoader, StrictUndefined
    except ModuleNotFoundError as error:
        raise InputError("an HTML report needs jinja2: pip install 'quiver-retrieval[eval]'") from error
    environment = Environment(
        loader=PackageLoader("quiver.eval.report"),
        autoescape=True,
        finalize=visible,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.globals["svg"] = svg
    environment.filters.update(
        points=points,
        place=lambda number: f"{number:.1f}".removesuffix(".0"),
    )
    return environment


def _source(environment: Environment, name: str) -> str:
    """A file of the templates as it is: in a style sheet or a script, braces are no markup."""
    if environment.loader is None:
        raise ValueError("the environment has no loader")
    return environment.loader.get_source(environment, name)[0]
