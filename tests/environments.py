"""Environments with a part of what is installed here: what users have who install few extras."""

from __future__ import annotations

import re
import subprocess
import venv
from collections.abc import Collection
from importlib import metadata
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent


def pyproject() -> str:
    return (REPOSITORY / "pyproject.toml").read_text(encoding="utf-8")


def extras() -> dict[str, str]:
    """Extra -> its requirements, as written in pyproject.toml."""
    section = pyproject().partition("[project.optional-dependencies]\n")[2].partition("\n[project.")[0]
    return dict(re.findall(r"^(\w+) = \[(.*?)\]$", section, re.MULTILINE | re.DOTALL))


def required_distributions(names: Collection[str] = ()) -> set[str]:
    """Names of the distributions that Quiver's core and some extras require, with what they require."""
    packaging = pytest.importorskip("packaging.requirements")
    listed = pyproject().partition("\ndependencies = [")[2].partition("\n]")[0]
    lines = [
        *re.findall(r'^ *"([^"]+)"', listed, re.MULTILINE),
        *(each for name in names for each in re.findall(r'"([^"]+)"', extras()[name])),
    ]
    waiting, found = [packaging.Requirement(line) for line in lines], set[str]()
    while waiting:
        requirement = waiting.pop()
        if requirement.name in found or (requirement.marker is not None and not requirement.marker.evaluate({"extra": ""})):
            continue
        try:
            waiting += map(packaging.Requirement, metadata.distribution(requirement.name).requires or [])
        except metadata.PackageNotFoundError:  # of another platform
            continue
        found.add(requirement.name)
    return found


def bare_environment(folder: Path, names: Collection[str] = ()) -> tuple[Path, Path]:
    """An environment with links to what the core and some extras require and nothing else: its interpreter and its site-packages."""
    venv.create(folder, symlinks=True)
    python = folder / "bin" / "python"
    asked = subprocess.run([python, "-c", "import site; print(site.getsitepackages()[0])"], capture_output=True, text=True, check=True)
    site = Path(asked.stdout.strip())
    for name in required_distributions(names):
        found = metadata.distribution(name)
        for top in {file.parts[0] for file in found.files or () if file.parts[0] not in ("..", "__pycache__")}:
            source = Path(str(found.locate_file(top)))
            if source.exists() and not (site / top).exists():
                (site / top).symlink_to(source)
    return python, site
