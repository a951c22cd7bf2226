"""Processes of a run: one process needs no communication, and two exchange values."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed

from quiver.encoder import InputError
from quiver.encoder.training.processes import Processes, init_distributed


def test_one_process_needs_no_torch_distributed() -> None:
    alone = Processes()
    assert (alone.rank, alone.size, alone.is_main_process) == (0, 1, True)
    alone.barrier()
    assert alone.sum([0.1, 2]) == [0.1, 2]
    assert alone.broadcast(0.1) == 0.1
    assert alone.gather({"a": 1}) == [{"a": 1}]
    assert not distributed.is_initialized()


def exchange_in_pair(meeting: Path) -> list[Any]:
    """Call `exchange` in two fresh processes; return what each printed as JSON.

    multiprocessing cannot be used: a forked process with threads may deadlock, and a spawned process cannot import a test module.
    """
    from tests.processes import imported_python  # what the processes run does not find the tests

    pair = [
        subprocess.Popen(
            [imported_python(), __file__, str(meeting)],
            env={**os.environ, "RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank), "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        printed = [process.communicate(timeout=120)[0] for process in pair]
    finally:
        for process in pair:
            process.kill()
    assert [process.returncode for process in pair] == [0, 0]
    return [json.loads(text.splitlines()[-1]) for text in printed]


def exchange(meeting: str) -> list[Any]:
    """Sum, broadcast and gather in a group that was initialized before."""
    rank = int(os.environ["RANK"])
    distributed.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=2)
    with init_distributed("cpu") as processes:
        own = [processes.rank, processes.size, processes.is_main_process]
        sums = processes.sum([0.1, 2.0**60 + rank * 2.0**8, rank])  # float32 would round them
        first = processes.broadcast(0.1 + rank)
        states: list[dict[str, Any]] = processes.gather({"rank": rank, "state": (torch.tensor([rank, 7]), None)})
        processes.barrier()
        gathered = [[each["rank"], each["state"][0].tolist(), each["state"][1]] for each in states]
    assert distributed.is_initialized(), "only the caller that initialized the group may destroy it"
    distributed.destroy_process_group()
    return [own, sums, first, gathered]


def test_two_processes_exchange_sums_values_and_states(tmp_path: Path) -> None:
    found = exchange_in_pair(tmp_path / "meeting")
    assert [own for own, *_ in found] == [[0, 2, True], [1, 2, False]]
    for _, sums, first, gathered in found:
        assert sums == [0.2, 2.0**61 + 2.0**8, 1.0]
        assert first == 0.1
        assert gathered == [[0, [0, 7], None], [1, [1, 7], None]]


def test_more_processes_than_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_RANK", "2")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(InputError, match="torchrun: process 2 has no GPU, there are 2; lower --nproc-per-node"), init_distributed("cuda"):
        pass
    assert not distributed.is_initialized()


def test_several_processes_do_not_share_one_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(InputError, match="--device: under torchrun each process has a GPU of its own"), init_distributed("cuda:1"):
        pass
    assert not distributed.is_initialized()


if __name__ == "__main__":
    answer = exchange(sys.argv[1])
    sys.stdout.write(json.dumps(answer) + "\n")
