"""Executors: every item once, workers that die replaced, errors in one line, nobody left behind."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from quiver.cli.options import Encoding, parse_devices
from quiver.encoder.errors import InputError
from quiver.retrieval.cluster import LocalProcesses, WorkerError
from quiver.retrieval.records import IN_PROCESS

TASKS = '''
import os
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from quiver.encoder.errors import InputError


@dataclass(frozen=True)
class Squares:
    """Squares numbers; 7 takes its worker along as often as asked, 8 is a mistake, 9 an error of the disk at first.

    An item has as many steps as its number.
    """

    notes: Path
    deaths: int = 0

    def open(self, advance):
        (self.notes / f"opened-{os.getpid()}").touch()
        return partial(self.square, advance)

    def square(self, advance, number):
        (self.notes / f"visible-{os.getpid()}").write_text(os.environ.get("CUDA_VISIBLE_DEVICES", "all"))
        attempt = len(list(self.notes.glob(f"{number}-*")))
        (self.notes / f"{number}-{attempt}").touch()
        advance(number - 1)
        if number == 7 and attempt < self.deaths:
            os._exit(9)
        if number == 8:
            raise InputError("8 cannot be squared")
        if number == 9 and attempt == 0:
            raise OSError("the disk has gone")
        advance(1)
        return number * number
'''


@pytest.fixture
def tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A module that worker processes can import as well."""
    (tmp_path / "quiver_test_tasks.py").write_text(TASKS)
    monkeypatch.syspath_prepend(str(tmp_path))
    import quiver_test_tasks  # type: ignore[import-not-found]

    yield quiver_test_tasks
    del sys.modules["quiver_test_tasks"]


def notes(tmp_path: Path) -> Path:
    folder = tmp_path / "notes"
    folder.mkdir()
    return folder


def test_processes_run_every_item_once_and_dead_ones_are_replaced(
    tmp_path: Path, tasks: ModuleType, caplog: pytest.LogCaptureFixture
) -> None:
    folder = notes(tmp_path)
    found = dict(LocalProcesses(2).run(tasks.Squares(folder, deaths=1), [1, 7, 9, 3]))
    assert found == {1: 1, 3: 9, 7: 49, 9: 81}
    tried = {number: len(list(folder.glob(f"{number}-*"))) for number in (1, 3, 7, 9)}
    assert tried == {1: 1, 3: 1, 7: 2, 9: 2}
    opened = [int(path.name.split("-")[1]) for path in folder.glob("opened-*")]
    assert 2 <= len(opened) <= 3  # two workers, and one in the place of the dead one
    assert not any(alive(pid) for pid in opened)
    assert "a worker process ended with status 9" in caplog.text
    assert "the disk has gone" in caplog.text


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.parametrize(
    ("item", "error", "message", "attempts"),
    [
        (7, WorkerError, "failed 3 times, the last time with: a worker process ended with status 9", 3),
        (8, InputError, "8 cannot be squared", 1),
    ],
)
def test_an_item_that_kills_every_worker_or_is_a_mistake_ends_the_run(
    tmp_path: Path, tasks: ModuleType, item: int, error: type[Exception], message: str, attempts: int
) -> None:
    folder = notes(tmp_path)
    with pytest.raises(error, match=message):
        list(LocalProcesses(1).run(tasks.Squares(folder, deaths=9), [item]))
    assert len(list(folder.glob(f"{item}-*"))) == attempts


def test_executors_are_made_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Encoding(executor="local").open_executor() is IN_PROCESS
    assert Encoding(executor="local", workers=1).open_executor() is IN_PROCESS
    two = Encoding(executor="local", workers=2).open_executor()
    assert (two.remote, two.threads(8), two.threads(1)) == (True, 4, 1)
    wrong: list[tuple[Callable[[], object], str]] = [
        (lambda: Encoding(executor="slurm").open_executor(), "unknown executor 'slurm'; choose one of local, ray"),
        (lambda: Encoding(executor="local", workers=0).open_executor(), "workers must be >= 1, got 0"),
        (
            lambda: Encoding(executor="local", address="a:1").open_executor(),
            "--address is the address of a Ray cluster; add --executor ray",
        ),
    ]
    for attempt, message in wrong:
        with pytest.raises(InputError, match=message):
            attempt()
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(InputError, match=r"Ray is not installed; run: pip install 'quiver-retrieval\[ray\]'"):
        Encoding(executor="ray").open_executor()


def test_each_worker_sees_its_own_device(tmp_path: Path, tasks: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,GPU-8932")
    folder, seen = notes(tmp_path), ["", "4", "GPU-8932"]
    found = dict(LocalProcesses(["cuda:0", "cpu", "cuda:1"]).run(tasks.Squares(folder), range(7)))
    assert found == {number: number * number for number in range(7)}
    assert sorted(path.read_text() for path in folder.glob("visible-*")) == seen
    # The worker in the place of a dead one has its device.
    assert dict(LocalProcesses(["cuda:1"]).run(tasks.Squares(folder, deaths=2), [7])) == {7: 49}
    shown = sorted(path.read_text() for path in folder.glob("visible-*"))
    assert shown == sorted([*seen, *[seen[2]] * 3])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"workers": 2}, "--devices starts one worker per device and excludes --workers; remove one of the two"),
        ({"device": "cuda"}, "excludes --device"),
        ({"address": "a:1"}, "excludes --address"),
        ({"executor": "ray"}, "excludes --executor ray"),
    ],
)
def test_devices_exclude_other_choices_of_workers(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        Encoding(**options, devices=["cpu", "cpu"]).open_executor()


def test_devices_are_parsed_and_checked() -> None:
    assert parse_devices("cpu, cpu") == ["cpu", "cpu"]
    for text, message in (("0,99", "device cuda:"), ("cpu,tpu", "got 'tpu'"), ("", "got ''"), ("cpu,", "got ''"), ("cpu:1", "got 'cpu:1'")):
        with pytest.raises(InputError, match=message):
            parse_devices(text)


def test_an_address_without_a_cluster_is_reported_at_once() -> None:
    pytest.importorskip("ray")
    started = time.monotonic()
    for address in ("127.0.0.1:1", "ray://127.0.0.1:1"):
        with pytest.raises(InputError, match=f"ray: no cluster at {address} "):
            Encoding(executor="ray", address=address).open_executor()
    for address in ("somewhere", "host:port"):
        with pytest.raises(InputError, match=f"ray: '{address}' is not an address; write HOST:PORT"):
            Encoding(executor="ray", address=address).open_executor()
    assert time.monotonic() - started < 30


WITHOUT_GPU = """
import sys
import torch.cuda

def refuse(*_, **__):
    raise SystemExit("a GPU was used")

for name in ("is_available", "device_count", "init", "_lazy_init", "_cuda_init", "_cuda_getDeviceCount"):
    for module in (torch.cuda, torch._C):
        if hasattr(module, name):
            setattr(module, name, refuse)
import quiver.retrieval.data.embedding_store, quiver.retrieval.index.pieces, quiver.retrieval.models.colbert
import quiver.retrieval.training.mining.teacher_scores
assert "triton" not in sys.modules
"""


@pytest.mark.slow
def test_modules_of_tasks_use_no_gpu_while_they_are_imported() -> None:
    """Workers are forked from a process that has imported them: they could not use a GPU that it has used."""
    done = subprocess.run([sys.executable, "-c", WITHOUT_GPU], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
