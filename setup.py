"""The README of the package index: its relative links lead to the repository, whose address is in pyproject.toml."""

from __future__ import annotations

import re
from pathlib import Path

from setuptools import setup

HERE = Path(__file__).resolve().parent
_LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!https?://|#|mailto:)([^)\s]+)\)")


def index_readme(text: str, repository: str) -> str:
    """Make relative links and images absolute, and drop comments, which a package index would show.

    Args:
        text: Markdown.
        repository: Address of the repository.

    Example:
        >>> index_readme("[guide](docs/a.md) ![chart](docs/b.svg)", "https://h/o/r")
        '[guide](https://h/o/r/blob/main/docs/a.md) ![chart](https://h/o/r/raw/main/docs/b.svg)'
    """
    text = re.sub(r"<!--.*?-->\n?", "", text, flags=re.DOTALL)
    return _LINK.sub(lambda found: f"{found[1]}[{found[2]}]({repository}/{'raw' if found[1] else 'blob'}/main/{found[3]})", text)


def repository(project: str) -> str:
    """The address of the repository in pyproject.toml; Python 3.10 has no reader of TOML."""
    found = re.search(r'^Repository = "([^"]+)"$', project, re.MULTILINE)
    if found is None:
        raise ValueError("pyproject.toml: [project.urls] needs Repository")
    return found[1]


if __name__ == "__main__":
    address = repository((HERE / "pyproject.toml").read_text(encoding="utf-8"))
    setup(
        long_description=index_readme((HERE / "README.md").read_text(encoding="utf-8"), address),
        long_description_content_type="text/markdown",
    )
