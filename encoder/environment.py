"""Packages and this process: public names that are imported on first use, versions of installed packages, rank, memory.

A package lists its public names once, in its ``__init__.pyi``. The list serves type checkers, and ``import quiver`` loads neither torch nor
faiss (Scientific Python SPEC 1). It loads this module, so what takes long to import is imported in functions.
"""

from __future__ import annotations

import ast
import os
import re
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

STATUS = Path("/proc/self/status")


def attach_stub(package: str, file: str) -> tuple[Callable[[str], object], Callable[[], list[str]], list[str]]:
    """Return ``__getattr__``, ``__dir__`` and ``__all__`` of a package whose stub beside its ``__init__.py`` lists its names.

    The stub holds only lines ``from .module import name as name``. A name that equals the first part of its module's name is a ValueError:
    importing that module would replace the name.
    """
    stub = ast.parse(Path(file).with_suffix(".pyi").read_text(encoding="utf-8"))
    imports = [node for node in stub.body if isinstance(node, ast.ImportFrom)]
    modules = {alias.name: f"{'.' * node.level}{node.module}" for node in imports for alias in node.names}
    if clashes := [name for name, module in modules.items() if module.split(".")[1] == name]:
        raise ValueError(f"{package}: public names equal their modules' names: {', '.join(clashes)}")

    def get(name: str) -> object:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        found: object = getattr(import_module(modules[name], package), name)
        setattr(sys.modules[package], name, found)  # the next access does not come here
        return found

    return get, lambda: sorted(modules), sorted(modules)


def installed_version(distribution: str) -> str | None:
    """Return the version of an installed distribution, by its name on the package index; None if it is not installed."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def is_main_process() -> bool:
    """Return whether this is process 0 of torchrun, or the only process."""
    return os.environ.get("RANK", "0") == "0"


def resident(name: str) -> int:
    """Return ``VmRSS``, ``VmHWM``, ``RssAnon`` or ``RssFile`` of this process in bytes, on Linux."""
    found = re.search(rf"^{name}:\s+(\d+) kB$", STATUS.read_text(encoding="ascii"), re.MULTILINE)
    if found is None:
        raise RuntimeError(f"{STATUS} has no {name}")
    return int(found[1]) * 1024
