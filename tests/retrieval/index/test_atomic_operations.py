"""Atomic operations: one that fails at any call of the disk leaves either the state before it or the state after it.

A power cut that loses nothing leaves what a kill leaves. Every test prints what it counted; ``pytest -m exhaustive -s`` runs the sweeps
over every call, the default run over some of them.
"""

from __future__ import annotations

import errno
import os
import random
import shutil
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import faiss
import pytest

from quiver.encoder.errors import InputError
from quiver.retrieval.index import check_index, delete_documents, open_index, repair_index
from quiver.retrieval.index.files import REAL, Disk, put_file
from quiver.retrieval.index.pieces import sealed_pieces
from quiver.retrieval.index.store import writing
from tests.processes import imported_python

SCRIPT = Path(__file__).with_name("faults.py")
OPERATIONS = ["build", "resume", "overwrite", "add", "add and merge", "refresh", "delete", "compact", "collect garbage", "repair"]
# Calls that each operation makes at least: a test over few of them would prove little.
LEAST = {
    "build": 250,
    "resume": 110,
    "overwrite": 70,
    "add": 70,
    "add and merge": 100,
    "refresh": 80,
    "delete": 10,
    "compact": 60,
    "collect garbage": 30,
    "repair": 10,
    "calibrate": 10,
}

EXACT = "exact-dense"
COMPRESSED = ["pq-dense", "ivf-dense", "ivf-tokens"]
OTHERS = ["faiss-dense", "exact-tokens", "bm25"]

EVERY_CALL = [pytest.param(EXACT, name, 1, marks=pytest.mark.exhaustive) for name in OPERATIONS]
"""Sweeps over all calls."""
MEASURED = ("pq-dense", "calibrate", 11)
"""What only an engine that may miss something has done to it."""
QUICK = ("build", "add", "delete", "compact")
SOME_CALLS = [
    *(pytest.param(EXACT, name, max(7, LEAST[name] // 4), marks=() if name in QUICK else pytest.mark.slow) for name in OPERATIONS),
    *(pytest.param("bm25", name, LEAST[name] // 2, marks=pytest.mark.slow) for name in ("build", "add and merge", "compact", "repair")),
]
"""Sweeps over a few calls of every operation; the default run has those of ``QUICK``."""
# What the operations make with an engine that trains a codec, about.
CALLS = {
    "build": 840,
    "resume": 420,
    "overwrite": 340,
    "add": 170,
    "add and merge": 230,
    "refresh": 180,
    "delete": 36,
    "compact": 175,
    "collect garbage": 61,
    "repair": 41,
}
# Each engine is met at other calls.
MANY_CALLS = [
    pytest.param(engine, name, max(3, CALLS[name] // 10) + place, marks=pytest.mark.exhaustive)
    for place, engine in enumerate(COMPRESSED)
    for name in OPERATIONS
]
"""Sweeps over many calls of every operation with the engines that train a codec."""
A_FEW_CALLS = [
    ("pq-dense", "build", 307),
    ("ivf-dense", "resume", 211),
    ("ivf-tokens", "build", 293),
    ("ivf-tokens", "compact", 89),
    ("ivf-tokens", "add and merge", 89),
    MEASURED,
]
"""Sweeps over a few calls of those operations in which these engines do most."""
COMPRESSED_CALLS = [pytest.param(*each, marks=pytest.mark.slow) for each in A_FEW_CALLS]


def script(*words: object, threads: int = 1, **environment: str) -> str:
    """What ``faults.py`` prints."""
    command = [imported_python(), str(SCRIPT), *map(str, words)]
    variables = {**os.environ, "OMP_NUM_THREADS": str(threads), **environment}
    done = subprocess.run(command, check=False, capture_output=True, text=True, env=variables)
    assert done.returncode == 0, (done.returncode, done.stdout[-200:], done.stderr)
    assert "Traceback" not in done.stderr, done.stderr
    return done.stdout


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize(
    ("engine", "stride"),
    [
        pytest.param(EXACT, 29, marks=pytest.mark.slow),
        pytest.param("ivf-tokens", 83, marks=pytest.mark.exhaustive),
        *(pytest.param(each, 5, marks=pytest.mark.exhaustive) for each in (EXACT, *COMPRESSED)),
    ],
)
def test_other_changes_go_ahead_of_a_killed_addition_and_it_adds_everything_once(engine: str, stride: int, tmp_path: Path) -> None:
    rows = [line.split(" ", 3) for line in script("ahead", tmp_path, engine, stride).splitlines()]
    assert [code for _, code, _, _ in rows] == ["137"] * (len(rows) - 1) + ["0"]
    assert {verdict for _, _, verdict, _ in rows} == {"right"}
    assert len(rows) > 5
    encoded = [int(texts) for _, _, _, texts in rows]
    assert encoded[0] == 10
    assert {2, 6} & set(encoded)  # what a killed addition had finished was not encoded again
    assert encoded[-1] == 0  # the last one was not killed


FAILURES = [errno.EIO, errno.ENOSPC]
"""Errors of a disk. Sweeps over all or many calls have both at each call; those over some, whose code knows neither, have them in turn."""
KEPT = [1.0, 0.0, 0.5]
"""Shares of the unsynced changes that survive a power cut. Where all do, that is a kill; sweeps over some calls have the others in turn."""


@pytest.mark.parametrize(("engine", "name", "stride"), [*SOME_CALLS, *COMPRESSED_CALLS, *EVERY_CALL, *MANY_CALLS])
def test_an_error_of_the_disk_loses_nothing(
    engine: str, name: str, stride: int, tmp_path: Path, faults: ModuleType, request: pytest.FixtureRequest
) -> None:
    """An input/output error or a full disk, once or from then on; the operation says so and can be done again."""
    operation, base, work = faults.OPERATIONS[name], tmp_path / "base", tmp_path / "work"
    operation.prepare(base, engine)
    old = faults.state(base)
    faults.fresh_copy(base, work)
    operation.run(work, engine, faults.FAST)
    new = faults.state(work)
    failing, outcomes, errors, raised = 1, list[str](), 0, True
    both = request.node.get_closest_marker("exhaustive") is not None
    while raised:
        for code in FAILURES if both else [FAILURES[len(outcomes) % 2]]:
            faults.fresh_copy(base, work)
            raised = fail(faults, lambda disk: operation.run(work, engine, disk), failing, code, forever=len(outcomes) % 3 == 1)
            found = faults.state(work)
            assert found in (old, new), (failing, found)
            outcomes.append("new" if found == new else "old")
            assert faults.again(name, engine, work).content == new.content
            errors += raised
        failing += stride
    assert outcomes == sorted(outcomes, reverse=True)
    assert outcomes[-1] == "new"
    assert failing >= LEAST[name]
    sys.stdout.write(f"{engine}, {name}: {errors} errors at {failing - stride} calls, {outcomes.count('old')} times the old state\n")


def fail(faults: ModuleType, run: Callable[[Any], object], failing: int, code: int, *, forever: bool) -> bool:
    """Do an operation on a disk that fails at a call; whether its error came out."""
    calls = 0

    def hook(call: str, path: Path) -> None:
        nonlocal calls
        calls += 1
        if calls == failing or (forever and calls > failing and call not in ("unlink", "rmdir")):
            raise OSError(code, os.strerror(code), str(path))

    try:
        run(faults.HookedDisk(hook, shorten=lambda size: max(1, size // 2)))
    except (OSError, InputError) as error:
        if os.strerror(code) not in str(error):
            raise
        return True
    return False


@pytest.mark.parametrize(("engine", "name", "stride"), [*SOME_CALLS, *COMPRESSED_CALLS, *EVERY_CALL, *MANY_CALLS])
def test_a_power_cut_loses_only_unsynced_data(
    engine: str, name: str, stride: int, tmp_path: Path, faults: ModuleType, power: ModuleType, request: pytest.FixtureRequest
) -> None:
    operation, base, folder, after = faults.OPERATIONS[name], tmp_path / "base", tmp_path / "disk", tmp_path / "after"
    operation.prepare(base, engine)
    old = faults.state(base)
    faults.fresh_copy(base, tmp_path / "done")
    operation.run(tmp_path / "done", engine, faults.FAST)
    new = faults.state(tmp_path / "done")
    cuts = lost = 0
    seen: set[str] = set()
    every = request.node.get_closest_marker("exhaustive") is not None
    fatal = 1
    while True:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        work = folder / "index"
        faults.fresh_copy(base, work)
        cut = True
        try:
            with power.PowerSupply(folder, fatal) as disk:
                operation.run(work, engine, REAL)
            cut = False
        except power.PowerCutError:
            pass
        for kept in KEPT if every or not cut else (KEPT[0], KEPT[1 + cuts // 2 % 2]):
            shutil.rmtree(after, ignore_errors=True)
            lost += disk.copy().after(after, random.Random(fatal), kept=kept)
            found = faults.state(after / "index")
            # What the operation has acknowledged by returning is there.
            assert found in ((old, new) if cut else (new,)), (fatal, kept, found)
            seen.add("new" if found == new else "old")
            assert faults.again(name, engine, after / "index").content == new.content
            cuts += 1
        if not cut:
            break
        fatal += stride
    assert seen == {"old", "new"}
    assert lost > 0
    sys.stdout.write(f"{engine}, {name}: {cuts} power cuts, {lost} changes lost or spoilt\n")


@pytest.mark.parametrize("kept", [0.0, 1.0])
def test_after_a_power_cut_a_replaced_file_is_the_old_one_or_the_new_one(tmp_path: Path, power: ModuleType, kept: float) -> None:
    found: list[bytes] = []
    cut = True
    for fatal in range(1, 20):
        folder = tmp_path / f"disk{fatal}"
        folder.mkdir()
        (folder / "HEAD").write_bytes(b"old")
        try:
            with power.PowerSupply(folder, fatal) as disk:
                put_file(folder / "HEAD", b"new", REAL)
            cut = False
        except power.PowerCutError:
            pass
        disk.after(tmp_path / f"after{fatal}", random.Random(fatal), kept=kept)
        found.append((tmp_path / f"after{fatal}" / "HEAD").read_bytes())
        if not cut:
            break
    assert not cut
    assert {*found[:-1]} <= {b"old", b"new"}
    assert (found[0], found[-1]) == (b"old", b"new")


@pytest.mark.parametrize(
    ("name", "stride"), [("build", 97), ("delete", 11), *(pytest.param(name, 7, marks=pytest.mark.exhaustive) for name in OPERATIONS)]
)
def test_unsynced_files_of_a_killed_process_do_not_fail_the_next_one(
    name: str, stride: int, tmp_path: Path, faults: ModuleType, power: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process is killed, another one does the same and returns, and then the power goes: what that one has acknowledged is there."""
    monkeypatch.setattr(writing, "remove_unused", lambda layout, *, remove_root: None)  # who is killed tidies nothing
    operation, base, folder, after = faults.OPERATIONS[name], tmp_path / "base", tmp_path / "disk", tmp_path / "after"
    operation.prepare(base, EXACT)
    fatal, cuts, killed = 1, 0, True
    while killed:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        faults.fresh_copy(base, folder / "index")
        acknowledged = killed = False
        disk = power.PowerSupply(folder, fatal)
        try:
            with disk:
                operation.run(folder / "index", EXACT, REAL)
        except power.PowerCutError:
            killed = True
        disk.dead, disk.fatal = False, 0
        try:
            with disk:
                operation.run(folder / "index", EXACT, REAL)
            acknowledged = True
        except InputError:  # the one that was killed had come far enough
            acknowledged = not killed
        shutil.rmtree(after, ignore_errors=True)
        disk.after(after, random.Random(fatal), kept=0.0)
        if acknowledged:
            assert faults.state(after / "index") == faults.state(folder / "index"), fatal
            cuts += 1
        # Each of the first calls of a build: they make the folders, which no later one makes durable.
        fatal += 1 if name == "build" and fatal < 21 else stride
    assert cuts > 1
    sys.stdout.write(f"{name}: {cuts} kills before a power cut, and nothing lost that was acknowledged\n")


def test_a_marker_never_outlives_the_files_of_its_piece(tmp_path: Path, power: ModuleType) -> None:
    """A power cut at any call: a piece whose marker is left is whole, whichever changes of names are lost."""
    fatal, cut, seen = 0, True, Counter[bool]()
    while cut:
        fatal, cut = fatal + 1, False
        folder = tmp_path / f"disk{fatal}"
        folder.mkdir()
        try:
            with (
                power.PowerSupply(folder, fatal) as disk,
                sealed_pieces(folder, REAL).writing("piece") as piece,
                REAL.create(piece.folder / "part") as file,
            ):
                file.write(b"content")
        except power.PowerCutError:
            cut = True
        for number, lost in enumerate([None, *disk.pending]):
            after = tmp_path / f"after{fatal}-{number}"
            twin = disk.copy()
            changes = dict(zip(map(id, twin.pending), disk.pending, strict=True))
            twin.after(after, random.Random(fatal), kept=lambda change, lost=lost, changes=changes: changes[id(change)] is not lost)
            finished = sealed_pieces(after, REAL).finished("piece", "")
            assert (finished is not None) == (after / "piece").exists(), fatal
            assert finished is not None or cut
            seen[finished is not None] += 1
    assert len(seen) == 2


def test_a_manifest_never_outlives_its_files(tmp_path: Path, faults: ModuleType, power: ModuleType) -> None:
    """A power cut while old generations are removed: each generation that is left has all its files."""
    faults.compacted(tmp_path / "base", EXACT)
    fatal, cut, lost = 0, True, 0
    while cut:
        fatal, cut = fatal + 1, False
        folder, after = tmp_path / "disk", tmp_path / "after"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.rmtree(after, ignore_errors=True)
        shutil.copytree(tmp_path / "base", folder / "index")
        try:
            with power.PowerSupply(folder, fatal) as disk:
                delete_documents(folder / "index", ["a0"])
        except power.PowerCutError:
            cut = True
        manifests = disk.nodes[folder / "index" / "manifests"]
        lost += disk.after(
            after, random.Random(fatal), kept=lambda change, own=manifests: all(step.folder is not own for step in change.steps)
        )
        report = check_index(after / "index")
        assert not any(each.problems for each in report.generations), (fatal, report)
    assert lost > 0
    assert [each.generation for each in report.generations] == [4, 5]


def test_the_next_writer_restores_the_head_of_a_killed_one(tmp_path: Path, faults: ModuleType) -> None:
    """A writer is killed right after its commit, the next one changes nothing, and then the newest manifest is damaged."""

    class Killed(BaseException):
        pass

    def kill_at_head(call: str, path: Path) -> None:
        if call == "create" and path.name == "HEAD.tmp":
            raise Killed

    faults.build(tmp_path / "i", EXACT)
    with pytest.raises(Killed):
        delete_documents(tmp_path / "i", ["a0"], disk=faults.HookedDisk(kill_at_head))
    with pytest.raises(InputError, match="is not in this index"):
        delete_documents(tmp_path / "i", ["absent"])
    assert check_index(tmp_path / "i").problems == ()
    (tmp_path / "i" / "manifests" / "m-000000000002.json").write_text("{}")
    report = repair_index(tmp_path / "i")
    assert (report.documents_before, report.documents) == (8, 8)
    assert "a0" not in open_index(tmp_path / "i").ids


@pytest.mark.skipif(not hasattr(signal, "alarm"), reason="needs alarms")
@pytest.mark.parametrize(
    ("engine", "flips"),
    [
        pytest.param("ivf-tokens", 60, marks=pytest.mark.slow),
        *(pytest.param(engine, 1000, marks=pytest.mark.exhaustive) for engine in [*COMPRESSED, *OTHERS]),
    ],
)
def test_an_unverified_flipped_bit_does_not_end_the_process(engine: str, flips: int, tmp_path: Path, faults: ModuleType) -> None:
    faults.prepared(tmp_path / "i", engine)
    *tried, outcomes = script("flip", tmp_path / "i", flips).splitlines()
    assert len(tried) == flips
    assert len({line.split()[2] for line in tried}) >= 10  # kinds of files
    counts = dict(word.split("=") for word in outcomes.split()[1:])
    assert sum(map(int, counts.values())) == flips
    # A scale of a vector that has become huge is taken for a query that float32 cannot hold the scores of.
    assert set(counts) <= {"answers", "DamagedIndexError", "ValueError"}
    assert int(counts["DamagedIndexError"]) > 0
    assert int(counts["answers"]) > 0
    sys.stdout.write(f"{engine}: {flips} bits flipped in files that nobody compared with their checksums: {outcomes}\n")


def test_short_writes_are_completed(tmp_path: Path, faults: ModuleType) -> None:
    base, work = tmp_path / "base", tmp_path / "work"
    operation = faults.OPERATIONS["add"]
    operation.prepare(base, EXACT)
    states = []
    shorteners: list[Callable[[int], int]] = [lambda size: size, lambda size: 1, lambda size: max(1, size - 3)]
    for shorten in shorteners:
        faults.fresh_copy(base, work)
        operation.run(work, EXACT, faults.HookedDisk(lambda call, path: None, shorten=shorten, real=Disk()))
        states.append((faults.state(work), files_of(work)))
    assert states[0] == states[1] == states[2]


def files_of(folder: Path) -> dict[str, bytes]:
    found = {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    return {name: content for name, content in found.items() if "manifests" not in name and not name.endswith(("LOCK", "HEAD"))}


@pytest.mark.parametrize("engine", [EXACT, *COMPRESSED, *OTHERS])
def test_a_build_that_was_interrupted_gives_the_bytes_of_one_that_was_not(engine: str, tmp_path: Path, faults: ModuleType) -> None:
    faults.interrupted(tmp_path / "resumed", engine)
    faults.build(tmp_path / "resumed", engine)
    faults.build(tmp_path / "whole", engine)
    faults.several_pieces(tmp_path / "merged", engine, faults.FAST)
    whole = files_of(tmp_path / "whole")
    assert len(whole) > 10
    assert files_of(tmp_path / "resumed") == whole
    assert files_of(tmp_path / "merged") == whole


@pytest.mark.slow
def test_another_process_with_other_hashes_and_threads_writes_the_same_bytes(tmp_path: Path, faults: ModuleType) -> None:
    former = faiss.omp_get_max_threads()
    try:
        faiss.omp_set_num_threads(1)
        faults.make(tmp_path / "here")
    finally:
        faiss.omp_set_num_threads(former)
    script("make", tmp_path / "there", threads=2, PYTHONHASHSEED="7")
    here, there = files_of(tmp_path / "here"), files_of(tmp_path / "there")
    compared = {name: there.get(name) == content for name, content in here.items()}
    assert len(compared) > 90
    assert [name for name, same in compared.items() if not same] == []
    assert set(here) == set(there)
