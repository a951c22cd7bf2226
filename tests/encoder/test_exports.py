"""Public names of a package come from its stub and are imported on first use."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A package of two names."""
    folder = tmp_path / "lazy_sample"
    folder.mkdir()
    (folder / "__init__.py").write_text(
        "from quiver.encoder.exports import attach_stub\n\n__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)\n"
    )
    (folder / "__init__.pyi").write_text("from .parts import bolt as bolt\nfrom .parts import nut as nut\n")
    (folder / "parts.py").write_text("bolt, nut = object(), object()\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield folder.name
    for name in [name for name in sys.modules if name.partition(".")[0] == folder.name]:
        del sys.modules[name]


def test_names_are_imported_on_first_use(package: str) -> None:
    module = importlib.import_module(package)
    assert module.__all__ == dir(module) == ["bolt", "nut"]
    assert f"{package}.parts" not in sys.modules
    assert module.nut is importlib.import_module(f"{package}.parts").nut
    assert "nut" in vars(module), "the second access does not search again"


def test_an_unknown_name_is_an_attribute_error(package: str) -> None:
    with pytest.raises(AttributeError, match="module 'lazy_sample' has no attribute 'screw'"):
        getattr(importlib.import_module(package), "screw")  # noqa: B009 - an expression of its own


def test_a_name_that_its_module_would_replace_is_refused(package: str, tmp_path: Path) -> None:
    (tmp_path / package / "__init__.pyi").write_text("from .parts import parts as parts\n")
    with pytest.raises(ValueError, match=r"^lazy_sample: public names equal their modules' names: parts$"):
        importlib.import_module(package)
