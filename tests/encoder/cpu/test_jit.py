"""Compiled code on disk: what is damaged is made anew, and where nothing can be kept nothing is compiled."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from quiver.encoder.cpu.support import kernels_available
from tests.processes import imported_python

REPOSITORY = Path(__file__).resolve().parents[3]
pytestmark = pytest.mark.skipif(not kernels_available(), reason="nothing is compiled on this machine")

ENCODE = """
import logging, sys, tempfile, time
logging.basicConfig(level=logging.WARNING, format="%(message)s")
if len(sys.argv) > 1:
    tempfile.tempdir = sys.argv[1]
import torch
from quiver.encoder import Encoder, EncoderConfig, init_weights, pack_ids
torch.set_num_threads(1)
config = EncoderConfig.modernbert(
    vocab_size=64, hidden_size=64, num_heads=2, intermediate_size=48, layer_types=["global", "local"], max_positions=512
)
encoder = init_weights(Encoder(config), seed=0).eval()
begun = time.process_time()
with torch.inference_mode():
    print(float(encoder(pack_ids([list(range(64)) * 5])).sum()), time.process_time() - begun)
"""


def run(cwd: Path, *arguments: str, **environment: str) -> tuple[float, float, list[str]]:
    """The sum of the hidden states, the seconds of processor time that they took, and the lines of the log."""
    command = [sys.executable, "-c", ENCODE, *arguments]
    variables = {**os.environ, "PYTHONPATH": str(cwd), **environment}
    done = subprocess.run(command, cwd=cwd, env=variables, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    total, seconds = map(float, done.stdout.split())
    return total, seconds, done.stderr.splitlines()


LOOPS = """
import logging, sys
logging.basicConfig(level=logging.WARNING, format="%(message)s")
import numpy as np
from quiver.encoder.cpu.jit import jit
def total(values):
    found = 0.0
    for value in values:
        found += value
    return found
def squares(values):
    found = 0.0
    for value in values:
        found += value * value
    return found
def largest(values):
    found = values[0]
    for value in values:
        found = max(found, value)
    return found
def count(values):
    found = 0
    for value in values:
        found += value > 0.5
    return found
values = np.linspace(0, 1, 64)
print(sum(float(jit(each)(values)) for each in (total, squares, largest, count)))
"""


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of four small compiled functions, which prints a sum of their results."""
    path = tmp_path_factory.mktemp("loops") / "loops.py"
    path.write_text(LOOPS)
    return path


def run_loops(script: Path, cache: Path, *, limit: int | None = None) -> tuple[float, list[str]]:
    """The printed sum and the lines of the log; no file of the process grows beyond ``limit`` bytes."""
    first = f"import numba, resource, sys; numba.config.CACHE_DIR = {str(cache)!r}; "
    if limit is not None:
        first += f"resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, resource.getrlimit(resource.RLIMIT_FSIZE)[1])); "
    command = [imported_python(), "-c", f"{first}sys.path.insert(0, {str(script.parent)!r}); import loops"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    return float(done.stdout), done.stderr.splitlines()


@pytest.fixture(scope="module")
def made(script: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, float]:
    """A folder of compiled functions, and the printed sum."""
    folder = tmp_path_factory.mktemp("code")
    total, log = run_loops(script, folder)
    assert log == []
    return folder, total


def flip(content: bytes) -> bytes:
    """In the middle is machine code, which unpickles as well as any other."""
    middle = len(content) // 2
    return content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]


@pytest.mark.slow
@pytest.mark.parametrize(("kept", "damage"), [("*.nbc", lambda content: content[:100]), ("*.nbi", lambda _content: b""), ("*.nbc", flip)])
def test_damaged_code_is_not_run_and_compiled_again(
    kept: str, damage: Callable[[bytes], bytes], script: Path, made: tuple[Path, float], tmp_path: Path
) -> None:
    cache, right = tmp_path / "cache", made[1]
    shutil.copytree(made[0], cache)
    files = sorted(cache.rglob(kept))
    assert len(files) == 4
    for path in files:
        path.write_bytes(damage(path.read_bytes()))
    again, log = run_loops(script, cache)
    assert again == right
    assert log
    assert all("deleted damaged compiled code" in line and "is compiled again" in line for line in log)
    healed, log = run_loops(script, cache)
    assert (healed, log) == (right, [])


def test_a_full_disk_costs_the_kept_code_and_not_the_run(script: Path, made: tuple[Path, float], tmp_path: Path) -> None:
    total, log = run_loops(script, tmp_path, limit=500)
    assert total == made[1]
    assert len(log) == 1
    assert "cannot be saved (File too large)" in log[0]


@pytest.fixture
def sealed(tmp_path: Path) -> Path:
    """A copy of the package in which no folder can be made for compiled code, whoever asks."""
    package = tmp_path / "quiver"
    shutil.copytree(REPOSITORY / "encoder", package / "encoder", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("__init__.py", "__init__.pyi"):
        shutil.copy(REPOSITORY / "quiver" / name, package)
    for folder in (package / "encoder").rglob("*.py"):
        (folder.parent / "__pycache__").touch()
    return tmp_path


@pytest.mark.slow
def test_a_private_folder_for_temporary_files_keeps_code_where_no_other_can(sealed: Path, tmp_path: Path) -> None:
    nowhere = {"HOME": "/dev/null", "XDG_CACHE_HOME": "/dev/null", "NUMBA_CACHE_DIR": ""}
    right, _, log = run(sealed, str(tmp_path), **nowhere)
    (folder,) = tmp_path.glob("quiver-*")
    assert folder.stat().st_mode & 0o077 == 0
    assert [str(folder) in line for line in log] == [True]
    count = len(list(folder.rglob("*.nbc")))
    assert count > 3
    again, _, _ = run(sealed, str(tmp_path), **nowhere)
    assert (again, len(list(folder.rglob("*.nbc")))) == (right, count)
    folder.chmod(0o777)  # others could put code there
    _, _, log = run(sealed, str(tmp_path), **nowhere)
    assert "compiled code cannot be cached" in log[0]


@pytest.mark.slow
def test_code_is_compiled_again_when_a_module_that_it_calls_changes(tmp_path: Path) -> None:
    own = "from quiver.encoder.cpu.jit import jit\nfrom other import constant\n\n\n@jit\ndef own(x):\n    return x + constant(x)\n"
    (tmp_path / "own.py").write_text(own)
    results = []
    for value in (1, 2, 2):
        (tmp_path / "other.py").write_text(f"import numba\n\n\n@numba.njit\ndef constant(x):\n    return {value}\n")
        code = "from own import own; print(own(1), sum(own.stats.cache_hits.values()))"
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path]), "PYTHONDONTWRITEBYTECODE": "1"}
        environment["NUMBA_CACHE_DIR"] = str(tmp_path / "cache")
        done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
        results.append(done.stdout.split())
    assert results == [["2", "0"], ["3", "0"], ["3", "1"]]


def test_without_a_compiler_a_warning_is_logged_and_pytorch_attends() -> None:
    code = """
import logging, sys, torch
logging.basicConfig(stream=sys.stdout)
from quiver.encoder import pack_ids
from quiver.encoder.attention import attend
q, k, v = torch.ones(3, 300, 2, 16)
print(attend(q, k, v, pack_ids([[1] * 300]), None).sum().item())
"""
    environment = {**os.environ, "NUMBA_DISABLE_JIT": "1"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "slower than it could be: numba is told" in done.stdout
    assert done.stdout.splitlines()[-1] == "9600.0"
