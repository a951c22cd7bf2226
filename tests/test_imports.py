"""A user's own folders do not hide Quiver's modules."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

COLLIDING = ("encoder", "retrieval", "eval", "recipes")
SCRIPT = "from quiver import BiEncoder, ColBERT, build_index, open_index\nprint(BiEncoder.__name__, ColBERT.__name__)\n"


@pytest.fixture
def research(tmp_path: Path) -> Path:
    """A research repository with folders and files of the same names as Quiver's packages."""
    for name in COLLIDING:
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise ImportError('this is the user\\'s own package')\n")
    (tmp_path / "files").mkdir()
    for name in COLLIDING:
        (tmp_path / "files" / f"{name}.py").write_text("raise ImportError('this is the user\\'s own module')\n")
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "files" / "script.py").write_text(SCRIPT)
    return tmp_path


@pytest.mark.parametrize(
    ("command", "place"), [("--help", "."), ("--help", "files"), ("script", "."), pytest.param("script", "files", marks=pytest.mark.slow)]
)
def test_quiver_runs_beside_folders_and_files_of_the_same_names(research: Path, place: str, command: str) -> None:
    executable = shutil.which("quiver", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}")
    assert executable is not None
    arguments = [executable, "--help"] if command == "--help" else [sys.executable, "script.py"]
    done = subprocess.run(
        arguments, cwd=research / place, env={**os.environ, "PYTHONPATH": "."}, capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr
