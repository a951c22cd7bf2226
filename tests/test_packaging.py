"""The list of packages is complete, the wheel has one package at its top, and every doctest passes."""

from __future__ import annotations

import doctest
import importlib
import inspect
import pkgutil
import re
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from pydoc import locate
from types import FunctionType
from typing import Any

import pytest

import quiver
from quiver.eval.results import Results, ScoreTable, read_results
from quiver.retrieval.records import Hit, Hits, QueryHits
from quiver.retrieval.search.index import Index
from tests.hub import fill_hub

REPOSITORY = Path(__file__).resolve().parent.parent
FOLDERS = {"encoder": "quiver.encoder", "retrieval": "quiver.retrieval", "eval": "quiver.eval", "quiver": "quiver"}
# Kernels import Triton, which CPU builds of torch do not bring; tests/test_triton.py runs them.
NEEDS_TRITON = re.compile(r"quiver\.(encoder\.gpu|retrieval\.models)\.triton_\w+")


def packages() -> set[str]:
    """Every folder with files: setuptools warns of one that is not listed, even if it holds templates alone."""
    found = {"quiver.recipes"}
    for folder, name in FOLDERS.items():
        for path in (REPOSITORY / folder).rglob("*.*"):
            inner = path.parent.relative_to(REPOSITORY / folder).parts
            if path.is_file() and "__pycache__" not in inner:
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


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory, minilm: Path) -> Path:
    return fill_hub(tmp_path_factory.mktemp("hub") / "new", minilm)


@pytest.fixture
def readers_folder(hub: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working folder of somebody who has the models that the examples name."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(hub))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def reference() -> list[Any]:
    """The functions and classes that the pages of the reference describe."""
    found: list[Any] = []
    for page in sorted((REPOSITORY / "docs" / "reference").glob("python*.md")):
        for names in re.findall(r"^<!-- generated: api (.*) -->$", page.read_text(encoding="utf-8"), re.MULTILINE):
            for each in map(locate, names.split()):
                found += [getattr(each, name) for name in dir(each)] if inspect.ismodule(each) else [each]
    return [each for each in dict.fromkeys(each for each in found if callable(each)) if each.__module__.startswith("quiver.")]


REFERENCE = reference()


@pytest.mark.usefixtures("readers_folder")
@pytest.mark.parametrize("name", modules())
def test_the_examples_in_docstrings_are_right(name: str) -> None:
    """What the reference describes is run without the names of its module: a reader types what the example shows, and nothing else."""
    module = importlib.import_module(name)
    assert module.__doc__
    shown = {f"{each.__module__}.{each.__qualname__}" for each in REFERENCE}
    for example in doctest.DocTestFinder().find(module):
        if example.name in shown or example.name.rpartition(".")[0] in shown:
            example.globs = {"__name__": "__main__"}
        assert doctest.DocTestRunner().run(example).failed == 0


PUBLIC = (
    *(getattr(quiver, name) for name in quiver.__all__ if name != "__version__"),
    *(Index, Hits, QueryHits, Hit, Results, ScoreTable, read_results),
)
"""The public names, and what they return: docs/python.md is about them."""


def documented(public: Any) -> Iterator[tuple[str, Any, str]]:
    """A public function or class and the public methods and properties of the class: qualified name, object, docstring."""
    yield public.__qualname__, public, public.__doc__
    for name in dir(public) if inspect.isclass(public) else ():
        owner = next(each for each in public.__mro__ if name in vars(each))
        raw = vars(owner)[name]
        if not name.startswith("_") and owner.__module__.startswith("quiver.") and isinstance(raw, METHODS):
            yield f"{public.__qualname__}.{name}", raw, raw.__doc__


METHODS = (FunctionType, classmethod, staticmethod, property, cached_property)


@pytest.mark.usefixtures("readers_folder")
@pytest.mark.parametrize("public", PUBLIC, ids=lambda public: public.__qualname__)
def test_every_public_name_and_method_has_an_example(public: Any) -> None:
    """The test above runs them, but for those of cached properties, which doctest does not find."""
    without = []
    for name, found, text in documented(public):
        example = doctest.DocTestParser().get_doctest(text or "", {"__name__": "__main__"}, name, None, None)
        if not example.examples and ":meta private:" not in (text or ""):  # which the reference leaves out
            without.append(name)
        elif isinstance(found, cached_property):
            assert doctest.DocTestRunner().run(example).failed == 0
    assert not without


def test_the_overview_of_the_reference_lists_every_public_name() -> None:
    text = (REPOSITORY / "docs" / "reference" / "python.md").read_text(encoding="utf-8")
    listed = re.findall(r"^\| `(quiver\.[\w.]+)` \| \S.*\|$", text.partition(" in detail")[0], re.MULTILINE)
    assert len(listed) == len(set(listed)) > 30
    assert {*PUBLIC} <= {locate(name) for name in listed}


def test_the_public_names_can_be_imported() -> None:
    assert {"BiEncoder", "ColBERT", "Document", "InputError", "build_index", "evaluate", "open_corpus", "open_index", "train"} < set(
        quiver.__all__
    )
    for name in quiver.__all__:
        assert getattr(quiver, name) is not None
    assert re.match(r"\d+\.\d+", quiver.__version__)
