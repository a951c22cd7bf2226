"""Processes of a run: alone everything is its own answer, and two tell each other the same."""

from __future__ import annotations

import multiprocessing
import os
import socket
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed

from quiver.encoder import InputError
from quiver.encoder.training.processes import Processes, RunStoppedError, init_distributed


def test_one_process_needs_no_torch_distributed() -> None:
    alone = Processes()
    assert (alone.rank, alone.size, alone.is_main_process) == (0, 1, True)
    alone.barrier()
    assert alone.sum([0.1, 2]) == [0.1, 2]
    assert alone.broadcast(0.1) == 0.1
    assert alone.gather({"a": 1}) == [{"a": 1}]
    assert not distributed.is_initialized()


def talk(rank: int, meeting: Path, answers: Any) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE="2", LOCAL_RANK=str(rank))
    distributed.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=2)
    with init_distributed("cpu") as processes:
        who = (processes.rank, processes.size, processes.is_main_process)
        sums = processes.sum([0.1, 2.0**60 + rank * 2.0**8, rank])  # float32 would round them
        told = processes.broadcast(0.1 + rank)
        said: dict[str, Any] = {"rank": rank, "state": (torch.tensor([rank, 7]), None)}
        gathered = processes.gather(said)
        processes.barrier()
        answers.put((who, sums, told, [(one["rank"], one["state"][0].tolist(), one["state"][1]) for one in gathered]))
    assert distributed.is_initialized(), "whoever has begun it ends it"
    distributed.destroy_process_group()


def test_two(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")  # a fork of a process with threads may wait for ever
    answers = context.Queue()
    pair = [context.Process(target=talk, args=(rank, tmp_path / "meeting", answers)) for rank in range(2)]
    for process in pair:
        process.start()
    found = sorted((answers.get(timeout=120) for _ in pair), key=lambda answer: answer[0])
    for process in pair:
        process.join(timeout=120)
    assert [process.exitcode for process in pair] == [0, 0]
    assert [who for who, *_ in found] == [(0, 2, True), (1, 2, False)]
    for _, sums, told, gathered in found:
        assert sums == [0.2, 2.0**61 + 2.0**8, 1.0]
        assert told == 0.1
        assert gathered == [(0, [0, 7], None), (1, [1, 7], None)]


def part(rank: int, port: int, ends: Any) -> None:
    """Meet, and part by each of the ways in which a block ends; the last is one after which nobody takes leave."""
    os.environ.update(RANK=str(rank), WORLD_SIZE="2", LOCAL_RANK=str(rank), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    found = []
    for error in (None, RunStoppedError(3), InputError("of one process, perhaps")):
        with suppress(RunStoppedError, InputError), init_distributed("cpu") as processes:
            processes.barrier()
            if error is not None:
                raise error
        found.append(distributed.is_initialized())
    ends.put(found)
    distributed.destroy_process_group()


@pytest.mark.slow
def test_who_has_met_parts() -> None:
    context = multiprocessing.get_context("spawn")  # a fork of a process with threads may wait for ever
    ends = context.Queue()
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    pair = [context.Process(target=part, args=(rank, port, ends)) for rank in range(2)]
    for process in pair:
        process.start()
    assert [ends.get(timeout=120) for _ in pair] == [[False, False, True]] * 2
    for process in pair:
        process.join(timeout=120)
    assert [process.exitcode for process in pair] == [0, 0]


def test_one_process_of_torchrun_is_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setenv("RANK", "0")
    with init_distributed("cpu") as processes:
        assert processes.size == 1
    assert not distributed.is_initialized()


def test_more_processes_than_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_RANK", "2")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(InputError, match="torchrun: process 2 has no GPU, there are 2; lower --nproc-per-node"), init_distributed("cuda"):
        pass
    assert not distributed.is_initialized()
