"""Kills at random moments, damage of every part and full disks: no data is lost, and no answer is silently wrong.

The slow run (``-m slow``) takes a few of each; ``pytest -m exhaustive -s tests/retrieval/index/test_random_kills.py`` makes 600 kills,
1,000 flips in each part and 200 full disks, and prints what it counted. ``--basetemp`` on a memory file system makes it faster.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.processes import imported_python

SCRIPT = Path(__file__).with_name("endurance.py")
ENGINES = ["exact-dense", "ivf-dense", "ivf-tokens"]
PARTS = ["vectors", "ids", "texts", "metadata", "manifests", "codec"]

# How often in the slow run, and in the exhaustive one.
KILLS = (4, 200)
FLIPS = (4, 334)
SPOILT = (7, 150)
FULL_DISKS = (8, 67)

# The slow run takes one engine.
SOME = [pytest.param(engine, 0, marks=pytest.mark.slow) for engine in ENGINES[:1]]
ALL = [pytest.param(engine, 1, marks=pytest.mark.exhaustive) for engine in ENGINES]

# A disk of a few megabytes needs a mount, which only this process sees.
PRIVATE_MOUNT = ["unshare", "--mount"] if os.name == "posix" and os.geteuid() == 0 else ["unshare", "--user", "--map-root-user", "--mount"]


def can_mount() -> bool:
    try:
        return subprocess.run([*PRIVATE_MOUNT, "mount", "-t", "tmpfs", "t", "/mnt"], check=False, capture_output=True).returncode == 0
    except FileNotFoundError:
        return False


def run(*words: object, within: list[str] | None = None) -> None:
    """Run the script: it ends well, and says nothing that is wrong."""
    command = [*(within or []), sys.executable if within else imported_python(), str(SCRIPT), *map(str, words)]
    done = subprocess.run(command, check=False, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    lines = done.stdout.splitlines()
    assert done.returncode == 0, (done.returncode, lines[-3:], done.stderr[-2000:])
    assert [line for line in lines if line.startswith("WRONG")] == []
    sys.stdout.write(f"{lines[-1]}\n")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize(("engine", "which"), [*SOME, *ALL])
def test_acknowledged_changes_are_present_once_after_kills_and_readers_are_correct(engine: str, which: int, tmp_path: Path) -> None:
    run("kill", tmp_path / "kill", engine, KILLS[which], 1)


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize(("engine", "which"), [*SOME, *ALL])
def test_every_flipped_bit_or_byte_is_detected_and_repair_keeps_intact_documents(
    engine: str, which: int, part: str, tmp_path: Path
) -> None:
    run("flip", tmp_path / "flip", engine, part, FLIPS[which], 1)


@pytest.mark.parametrize(("engine", "which"), [*SOME, *ALL])
def test_wiped_sectors_and_missing_files_are_detected_and_repair_keeps_intact_documents(engine: str, which: int, tmp_path: Path) -> None:
    run("spoil", tmp_path / "spoil", engine, SPOILT[which], 1)


@pytest.mark.skipif(not can_mount(), reason="needs a mount of its own")
@pytest.mark.parametrize(("engine", "which"), [*SOME, *ALL])
def test_a_full_disk_leaves_the_state_before_or_after_and_the_change_succeeds_with_room(engine: str, which: int, tmp_path: Path) -> None:
    run("fill", tmp_path / "small", engine, FULL_DISKS[which], 1, within=PRIVATE_MOUNT)
