"""Executors: run the items of a task in this process, in processes of this machine, or on a Ray cluster.

Local workers are forked from a fresh process that has only imported the module of the first task (this one may have used threads or a GPU),
or are fresh processes themselves. A script that uses them therefore needs the usual ``if __name__ == "__main__":``.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from multiprocessing.connection import Connection, wait
from typing import Any, Generic, NamedTuple

from quiver.encoder.errors import InputError
from quiver.encoder.progress import Advance
from quiver.retrieval.records import Item, Result, WorkerTask

logger = logging.getLogger(__name__)


class WorkerError(OSError):
    """Workers died, or an item failed on several of them."""


class Outcome(NamedTuple):
    """Outcome of an item: its result, or an error of one line; whether another attempt may succeed; steps that this attempt reported."""

    result: Any
    problem: str | None = None
    again: bool = False
    steps: int = 0


class Worker:
    """Runs items of a task in a process of its own, and reports the number of steps of the current attempt.

    Mistakes of the user end the run; errors of the disk are tried again by another worker. Other exceptions are bugs or broken machines:
    they end the worker, with a traceback in its output.
    """

    def __init__(self, task: WorkerTask[Any, Any], report: Callable[[int], None] = lambda steps: None) -> None:
        self._task, self._report = task, report
        self._work: Callable[[Any], Any] | None = None
        self._steps = 0

    def attempt(self, item: Any) -> Outcome:
        """Run an item."""
        try:
            if self._work is None:
                self._work = self._task.open(self._advance)
            result = self._work(item)
            return Outcome(result, steps=self._steps)
        except InputError as error:
            return Outcome(None, str(error))
        except OSError as error:
            return Outcome(None, str(error), again=True)
        finally:
            self._steps = 0

    def _advance(self, steps: int) -> None:
        self._steps += steps
        self._report(self._steps)


_ATTEMPTS = 3  # an item that ended three workers is itself the cause


@dataclass
class Assignment(Generic[Item]):
    """An item assigned to a worker, the number of the attempt, and its steps that `Assignments` has counted."""

    item: Item
    attempt: int = 1
    steps: int = 0


class Assignments(Generic[Item]):
    """Queue of items for executors with several workers, taken one by one; failed items are assigned again first.

    ``advance`` is called with the number of further steps; those of a failed attempt are taken back.
    """

    def __init__(self, items: Iterable[Item], advance: Advance = lambda steps: None) -> None:
        self._items = iter(items)
        self._advance = advance
        self._returned: deque[Assignment[Item]] = deque()

    def take(self) -> Assignment[Item] | None:
        """Take the next item; None if there is none at the moment: an item that a worker has may still come back."""
        if not self._returned:
            self._returned.extend(Assignment(item) for item in islice(self._items, 1))
        return self._returned.popleft() if self._returned else None

    def count(self, assignment: Assignment[Item], steps: int) -> None:
        """Set the steps of an attempt so far."""
        if steps != assignment.steps:
            self._advance(steps - assignment.steps)
            assignment.steps = steps

    def put_back(self, assignment: Assignment[Item], reason: str) -> None:
        """Queue an item again after a failed attempt; a WorkerError if it was the last."""
        self.count(assignment, 0)
        if assignment.attempt >= _ATTEMPTS:
            raise WorkerError(f"a work item failed {_ATTEMPTS} times, the last time with: {reason}")
        logger.warning("a work item is repeated by another worker: %s", reason)
        self._returned.append(Assignment(assignment.item, assignment.attempt + 1))

    def settle(self, assignment: Assignment[Item], outcome: Outcome) -> bool:
        """Return whether an item succeeded; queue it again if another attempt may succeed; an InputError for a mistake of the user."""
        if outcome.problem is None:
            self.count(assignment, outcome.steps)
            return True
        if not outcome.again:
            raise InputError(outcome.problem)
        self.put_back(assignment, outcome.problem)
        return False


_STOP_SECONDS = 5.0  # time for a worker to end after its pipe is closed


class LocalProcesses:
    """Executor with worker processes on this machine.

    Args:
        workers: Number of workers, or the device of each: ``cpu``, ``cuda`` or ``cuda:1``; a worker sees no other GPU. Fewer are
            started for fewer items.

    Raises:
        InputError: There is no worker.

    Example:
        >>> LocalProcesses(2).threads(8), LocalProcesses(["cuda:0", "cuda:1", "cpu"]).threads(2)
        (4, 1)
    """

    name = "local"
    remote = True

    def __init__(self, workers: int | Sequence[str]) -> None:
        self._devices: list[str | None] = [None] * workers if isinstance(workers, int) else list(workers)
        if not self._devices:
            raise InputError(f"workers must be >= 1, got {workers if isinstance(workers, int) else 'no device'}")

    @property
    def workers(self) -> int:
        """Number of workers."""
        return len(self._devices)

    def threads(self, here: int) -> int:
        """Return the threads of this process, divided among the workers."""
        return max(1, here // len(self._devices))

    def run(
        self, task: WorkerTask[Item, Result], items: Iterable[Item], *, threads: int = 1, advance: Advance = lambda steps: None
    ) -> Generator[tuple[Item, Result], None, None]:
        """See `quiver.retrieval.records.Executor`."""
        del threads  # local processes reserve nothing
        waiting, idle, busy = Assignments(items, advance), list[_Process](), dict[Connection, tuple[_Process, Assignment[Item]]]()
        devices = self._devices[::-1]  # of workers that are not running
        try:
            while True:
                while len(busy) < len(self._devices) and (assignment := waiting.take()) is not None:
                    process = idle.pop() if idle else _Process(task, devices.pop())
                    busy[process.pipe] = (process, assignment)
                    process.send(assignment.item)
                if not busy:
                    return
                for pipe in wait(list(busy)):
                    process, assignment = busy[pipe]  # type: ignore[index]  # one of those that were waited for
                    outcome = process.receive()
                    if isinstance(outcome, int):
                        waiting.count(assignment, outcome)
                        continue
                    del busy[process.pipe]
                    if outcome is None:
                        devices.append(process.device)
                        waiting.put_back(assignment, process.end())
                        continue
                    idle.append(process)
                    if waiting.settle(assignment, outcome):
                        yield assignment.item, outcome.result
        finally:
            for process in [*idle, *(process for process, _ in busy.values())]:
                process.stop(at_once=bool(busy))


class _Process:
    """A worker process and the pipe to it."""

    def __init__(self, task: WorkerTask[Any, Any], device: str | None) -> None:
        self.device = device
        # macOS has it too, but libraries there do not survive a fork.
        context = multiprocessing.get_context("forkserver") if sys.platform == "linux" else multiprocessing.get_context("spawn")
        context.set_forkserver_preload([type(task).__module__])  # no effect once the fresh process runs, or where there is none
        self.pipe, theirs = context.Pipe()
        arguments = (theirs, task, device, dict(os.environ))
        self._process = context.Process(target=_serve, args=arguments, daemon=True, name="quiver-worker")
        self._process.start()
        theirs.close()  # so that the pipe ends when the worker does

    def send(self, item: Any) -> None:
        """Send an item; `receive` reports if the worker is gone."""
        with suppress(BrokenPipeError, ConnectionResetError):
            self.pipe.send(item)

    def receive(self) -> Outcome | int | None:
        """Receive the outcome of the item, or before it the number of its steps so far; None if the worker died."""
        try:
            received: Outcome | int = self.pipe.recv()
        except (EOFError, ConnectionResetError):
            return None
        return received

    def end(self) -> str:
        """Wait for a dead worker, and describe how it ended."""
        self._process.join(_STOP_SECONDS)
        self.stop(at_once=True)
        return f"a worker process ended with status {self._process.exitcode}"

    def stop(self, *, at_once: bool) -> None:
        if at_once:  # before the pipe is closed, since the worker may be about to report steps
            self._process.kill()
        self.pipe.close()
        self._process.join(_STOP_SECONDS)
        self._process.kill()
        self._process.join()


VISIBLE = "CUDA_VISIBLE_DEVICES"


def visible_devices(device: str, visible: str | None) -> str:
    """Return the ``CUDA_VISIBLE_DEVICES`` of a worker that uses ``device``, one of those that this process sees with its ``visible``.

    Example:
        >>> visible_devices("cuda:1", None), visible_devices("cuda:1", "2,GPU-8932"), visible_devices("cpu", "0,1")
        ('1', 'GPU-8932', '')
    """
    kind, _, number = device.partition(":")
    if kind == "cpu":
        return ""
    return number or "0" if visible is None else visible.split(",")[int(number or 0)].strip()


def _serve(pipe: Connection, task: WorkerTask[Any, Any], device: str | None, environment: Mapping[str, str]) -> None:
    """Main loop of a worker process."""
    os.environ.clear()  # it is that of the first worker's start
    os.environ.update(environment)
    if device is not None:
        # CUDA reads the variable when it is used for the first time, which is when the task loads its model.
        os.environ[VISIBLE] = visible_devices(device, os.environ.get(VISIBLE))
    threading.Thread(target=_end_with_parent, daemon=True).start()
    worker = Worker(task, pipe.send)
    while True:
        try:
            item = pipe.recv()
        except EOFError:
            return
        pipe.send(worker.attempt(item))


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)  # the result is no longer needed, and an item may run for minutes
