"""The faulty disks of ``faults.py`` and ``power.py``, which are also run as scripts, for tests."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest


def load(name: str) -> ModuleType:
    key = f"quiver_test_{name}"
    if key not in sys.modules:
        spec = importlib.util.spec_from_file_location(key, Path(__file__).with_name(f"{name}.py"))
        if spec is None or spec.loader is None:
            raise ImportError(name)
        module = importlib.util.module_from_spec(spec)
        sys.modules[key] = module
        spec.loader.exec_module(module)
    return sys.modules[key]


@pytest.fixture(scope="session")
def faults() -> ModuleType:
    """Operations on a tiny index, and disks that announce every call."""
    return load("faults")


@pytest.fixture(scope="session")
def power() -> ModuleType:
    """A disk that forgets what was not synced."""
    return load("power")
