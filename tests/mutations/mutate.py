"""Mutation tests: change one line of the source at a time and check that the named tests notice.

    python tests/mutations/mutate.py                          # every list in this folder
    python tests/mutations/mutate.py encoder.py --only rope   # mutations of one list whose name contains "rope"

A list is a Python file with ``MUTATIONS``, a list of tuples (name, file, old text, new text, tests): the old text must occur exactly once
in the file, and tests are arguments of pytest. Each mutation is made in a copy of the repository, so the work tree is not touched. First
all named tests run on the unchanged copy, where they have to pass. A mutation is killed if a test fails, and survives if all pass: then a
test is missing.
"""

from __future__ import annotations

import argparse
import os
import runpy
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parents[1]
PACKAGES = ("encoder", "retrieval", "eval", "recipes")
TIMEOUT = 300


class Mutation(NamedTuple):
    """A change of the source and the tests that have to notice it."""

    name: str
    file: str
    old: str
    new: str
    tests: Sequence[str]


def read_mutations(path: Path) -> list[Mutation]:
    """Read a list; refuse texts that do not occur exactly once."""
    mutations = [Mutation(*each) for each in runpy.run_path(str(path))["MUTATIONS"]]
    for mutation in mutations:
        count = (REPOSITORY / mutation.file).read_text(encoding="utf-8").count(mutation.old)
        if count != 1:
            sys.exit(f"{path.name}: {mutation.name}: the old text must occur once in {mutation.file}, it occurs {count} times")
    return mutations


def copy_repository(target: Path) -> None:
    """Copy packages and tests; the packages lie inside ``quiver``, as their import names say."""
    ignored = shutil.ignore_patterns("__pycache__", ".*")
    shutil.copytree(REPOSITORY / "quiver", target / "quiver", ignore=ignored)
    for name in PACKAGES:
        shutil.copytree(REPOSITORY / name, target / "quiver" / name, ignore=ignored)
        (target / name).symlink_to(target / "quiver" / name)
    shutil.copytree(REPOSITORY / "tests", target / "tests", ignore=ignored)
    shutil.copy(REPOSITORY / "pyproject.toml", target)


def fails(copy: Path, tests: Iterable[str]) -> bool:
    """Run tests in the copy; returns whether one fails or they take too long."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-x",
        "-q",
        "-p",
        "no:cacheprovider",
        "--override-ini=addopts=--import-mode=importlib",
        *tests,
    ]
    environment = {**os.environ, "PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        done = subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True, check=False, timeout=TIMEOUT)
    except subprocess.TimeoutExpired:
        return True
    if done.returncode not in (0, 1):  # a wrong name of a test must not count as a failure
        sys.exit(f"pytest could not run {' '.join(tests)}:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return done.returncode == 1


def say(line: str) -> None:
    """Write a line at once."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def run(mutations: Sequence[Mutation], *, baseline: bool) -> list[str]:
    """Run all mutations; returns the names of those that survive."""
    survivors = []
    with tempfile.TemporaryDirectory(prefix="mutations-") as folder:
        copy = Path(folder)
        copy_repository(copy)
        if baseline and fails(copy, dict.fromkeys(test for mutation in mutations for test in mutation.tests)):
            sys.exit("the named tests fail without a mutation")
        for mutation in mutations:
            path = copy / mutation.file
            original, stamp = path.read_text(encoding="utf-8"), path.stat().st_mtime
            path.write_text(original.replace(mutation.old, mutation.new), encoding="utf-8")
            begun = time.monotonic()
            killed = fails(copy, mutation.tests)
            path.write_text(original, encoding="utf-8")
            os.utime(path, (stamp, stamp))  # so that compiled code of the original is found again
            say(f"{'killed  ' if killed else 'SURVIVED'} {mutation.name} ({time.monotonic() - begun:.0f} s)")
            survivors += [] if killed else [mutation.name]
    return survivors


def main() -> None:
    """Run the lists named on the command line; exit status 1 if a mutation survives."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("lists", nargs="*", help="Files with mutations in this folder. Default: all.")
    parser.add_argument("--only", default="", help="Run mutations whose name contains this text.")
    parser.add_argument("--no-baseline", action="store_true", help="Skip the run without a mutation.")
    options = parser.parse_args()
    paths = [HERE / name for name in options.lists] or sorted(path for path in HERE.glob("*.py") if path != Path(__file__).resolve())
    mutations = [each for path in paths for each in read_mutations(path) if options.only in each.name]
    survivors = run(mutations, baseline=not options.no_baseline)
    say(f"{len(mutations) - len(survivors)} of {len(mutations)} mutations killed")
    if survivors:
        sys.exit(1)


if __name__ == "__main__":
    main()
