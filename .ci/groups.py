"""Which slow tests a run of CI needs, printed as arguments of pytest.

    python .ci/groups.py            # --slow FOLDER for each group whose sources or tests changed since they last passed
    python .ci/groups.py --record   # after a run of everything has passed: note what was tested

What was tested stands in ``passed.txt`` as one checksum per group, so a group runs whatever way a change came in. A group without a
line there runs; with ``QUIVER_FULL=1`` all run.
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PASSED = ROOT / ".ci" / "passed.txt"
# What any slow test may depend on.
COMMON = ("pyproject.toml", "tests/conftest.py", "encoder/*.py")
# Group | folders and files of its slow tests | what these guard beside COMMON.
TABLE = """
processors   | tests/encoder/cpu tests/encoder/test_model.py tests/test_platforms.py | encoder/cpu encoder/attention retrieval/index/kernels
golden       | tests/test_golden.py                             | encoder retrieval/data retrieval/models retrieval/search eval/metrics.py
gpu          | tests/test_triton.py tests/test_fake_cuda.py tests/test_fake_cuda_search.py tests/test_fake_cuda_training.py \
             | encoder/gpu encoder/attention encoder/training retrieval/models retrieval/index
pretraining  | tests/encoder/pretraining tests/encoder/training | encoder/pretraining encoder/training
training     | tests/retrieval/training                         | retrieval/training retrieval/models encoder/training
parity       | tests/parity                                     | encoder retrieval/models retrieval/training eval/metrics.py eval/nlu
models       | tests/retrieval/models                           | retrieval/models encoder/checkpoints
data         | tests/retrieval/data                             | retrieval/data
index        | tests/retrieval/index tests/retrieval/search     | retrieval/index retrieval/data retrieval/search
cluster      | tests/retrieval/cluster                          | retrieval/cluster retrieval/index retrieval/search
serving      | tests/retrieval/serving tests/retrieval/integrations \
             | retrieval/serving retrieval/integrations retrieval/search retrieval/index
evaluation   | tests/eval                                       | eval retrieval/search retrieval/index
commands     | tests/quiver                                     | quiver recipes eval retrieval
distribution | tests/test_distribution.py tests/test_docs.py tests/test_packaging.py | quiver setup.py README.md docs recipes
benchmarks   | tests/benchmarks                                 | benchmarks
"""
ROWS = [[cell.strip() for cell in line.split("|")] for line in TABLE.replace("\\\n", "").strip().splitlines()]
GROUPS = {group: (tests.split(), sources.split()) for group, tests, sources in ROWS}


def files(pattern: str) -> Iterator[Path]:
    """Files of a folder, or those of a pattern."""
    paths = (ROOT / pattern).rglob("*") if (ROOT / pattern).is_dir() else ROOT.glob(pattern)
    yield from sorted(path for path in paths if path.is_file() and "__pycache__" not in path.parts and path.suffix != ".pyc")


def checksum(group: str) -> str:
    """SHA-256 of the names and contents of what a group tests and of its tests."""
    tests, sources = GROUPS[group]
    total = hashlib.sha256()
    for path in sorted({path for pattern in (*COMMON, *tests, *sources) for path in files(pattern)}):
        total.update(f"{path.relative_to(ROOT).as_posix()} {hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode())
    return total.hexdigest()


def main() -> None:
    """The command line."""
    now = {group: checksum(group) for group in GROUPS}
    if sys.argv[1:] == ["--record"]:
        PASSED.write_text("".join(f"{digest} {group}\n" for group, digest in now.items()), encoding="utf-8")
        return
    lines = PASSED.read_text(encoding="utf-8").splitlines() if PASSED.is_file() else []
    passed = {group: digest for digest, _, group in (line.partition(" ") for line in lines)}
    run = [group for group in GROUPS if os.environ.get("QUIVER_FULL") == "1" or passed.get(group) != now[group]]
    print(f"slow tests: {', '.join(run) or 'none, nothing that they guard changed'}", file=sys.stderr)  # noqa: T201
    print(*[f"--slow={path}" for group in run for path in GROUPS[group][0]] or ["--slow=none"])  # noqa: T201


if __name__ == "__main__":
    main()
