"""Public names of a package, listed once in its ``__init__.pyi`` and imported on first use.

The list serves type checkers, and ``import quiver`` loads neither torch nor faiss (Scientific Python SPEC 1).
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path


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
