"""The Python source files of the running interpreter's standard library and of installed packages, found without importing.

Test code is left out: every module one part of whose name has the word ``test`` or ``tests`` in it, and ``conftest``.
This module knows where files are; it opens none.
"""

from __future__ import annotations

import difflib
import importlib.metadata
import importlib.util
import re
import sys
import sysconfig
from collections.abc import Mapping
from pathlib import Path

from quiver.encoder.errors import InputError

_APPLICATIONS = frozenset({"idlelib", "turtledemo"})
"""Parts of the standard library that are programs, not libraries."""

_TEST = re.compile(r"(^|_)tests?(_|$)|^conftest$")
"""The word in a part of a module's name; ``unittest`` and ``doctest`` have it not, they are libraries."""


def stdlib_files() -> dict[str, Path]:
    """Module name -> file of the standard library, by name of the top-level module.

    IDLE and the turtle demos are programs and left out; modules written in C have no file.

    Raises:
        InputError: The interpreter was installed without the library's source.
    """
    root = Path(sysconfig.get_path("stdlib"))
    files: dict[str, Path] = {}
    for name in sorted(sys.stdlib_module_names - _APPLICATIONS):  # neither site-packages nor the test package is in it
        if (root / name).is_dir():
            files.update(_files_below(root / name, name))
        elif (root / f"{name}.py").is_file():
            files[name] = root / f"{name}.py"
    if not files:
        raise InputError(f"{root}: no source of the standard library here; install it, or mine packages alone")
    return files


def package_files(package: str) -> dict[str, Path]:
    """Module name -> file of an installed package, by name.

    Args:
        package: The name it is imported by, top level.

    Raises:
        InputError: Not installed, without Python source, or a part of the standard library.
    """
    if package in sys.stdlib_module_names:
        raise InputError(f"{package!r} belongs to the standard library, which is mined as a whole")
    # find_spec would import the parent of a dotted name, and a script's __main__ has no spec.
    spec = importlib.util.find_spec(package) if package.isidentifier() and package != "__main__" else None
    if spec is None:
        raise InputError(f"package {package!r} is not installed{_hint(package, importlib.metadata.packages_distributions())}")
    files: dict[str, Path] = {}
    for folder in spec.submodule_search_locations or ():
        files.update(_files_below(Path(folder), package))
    if spec.submodule_search_locations is None and spec.origin is not None and spec.origin.endswith(".py"):
        files[package] = Path(spec.origin)
    if not files:
        raise InputError(f"package {package!r} has no Python source where it is installed")
    return files


def _hint(name: str, distributions: Mapping[str, list[str]]) -> str:
    """What to do about a name that is not found; ``distributions`` maps import names to what is installed under them."""
    wanted = name.lower().replace("_", "-")
    imports = sorted(module for module, owners in distributions.items() if wanted in {owner.lower().replace("_", "-") for owner in owners})
    if imports:
        return f": that is a distribution, give the name it is imported by: {' or '.join(imports)}"
    close = difflib.get_close_matches(name, distributions, n=1)
    return f"; did you mean {close[0]!r}?" if close else "; install it, or give the name it is imported by, without dots"


def _files_below(folder: Path, package: str) -> dict[str, Path]:
    """Module name -> file of a package's folder and its sub-packages, by name."""
    if not folder.is_dir():  # an editable install lists a placeholder among a namespace package's folders
        return {}
    files: dict[str, Path] = {}
    for path in sorted(folder.iterdir()):
        if not path.stem.isidentifier() or _TEST.search(path.stem):
            continue
        if path.suffix == ".py" and path.is_file():
            files[package if path.stem == "__init__" else f"{package}.{path.stem}"] = path
        elif path.suffix == "" and path.is_dir() and not path.is_symlink():  # a link may lead back up
            files.update(_files_below(path, f"{package}.{path.stem}"))
    return files
