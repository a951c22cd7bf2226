"""The list of packages is complete, the wheel has one package at its top, and every doctest passes."""

from __future__ import annotations

import doctest
import importlib
import pkgutil
import re
import sys
from pathlib import Path

import pytest

import quiver

REPOSITORY = Path(__file__).resolve().parent.parent
FOLDERS = {"encoder": "quiver.encoder", "retrieval": "quiver.retrieval", "eval": "quiver.eval", "quiver": "quiver"}
# Kernels import Triton, which CPU builds of torch do not bring; tests/test_triton.py runs them.
NEEDS_TRITON = re.compile(r"quiver\.(encoder\.gpu|retrieval\.models)\.triton_\w+")


def packages() -> set[str]:
    found = {"quiver.recipes"}
    for folder, name in FOLDERS.items():
        for path in (REPOSITORY / folder).rglob("__init__.py"):
            inner = path.parent.relative_to(REPOSITORY / folder).parts
            found.add(".".join((name, *inner)))
    return found


def modules() -> list[str]:
    found = [module.name for module in pkgutil.walk_packages(quiver.__path__, "quiver.")]
    for folder, name in FOLDERS.items():
        for path in (REPOSITORY / folder).rglob("*.py"):
            inner = path.relative_to(REPOSITORY / folder).with_suffix("").parts
            found.append(".".join((name, *inner)).removesuffix(".__init__"))
    return sorted({name for name in found if not NEEDS_TRITON.fullmatch(name) and not name.endswith("__main__")})


def test_pyproject_lists_every_package() -> None:
    text = (REPOSITORY / "pyproject.toml").read_text(encoding="utf-8")
    listed = text.partition("packages = [\n")[2].partition("\n]")[0]
    assert re.findall(r'"([\w.]+)"', listed) == sorted(packages())


@pytest.mark.parametrize("name", modules())
def test_the_examples_in_docstrings_are_right(name: str) -> None:
    result = doctest.testmod(importlib.import_module(name))
    assert result.failed == 0
    assert sys.modules[name].__doc__


def test_the_public_names_can_be_imported() -> None:
    assert set(quiver.__all__) >= {"BiEncoder", "ColBERT", "Document", "InputError", "build_index", "evaluate", "open_index", "train"}
    for name in quiver.__all__:
        assert getattr(quiver, name) is not None
    assert re.match(r"\d+\.\d+", quiver.__version__)
