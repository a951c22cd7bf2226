"""Several processes on this machine, each with a worker.

They are spawned, not forked: a process that has used threads or a GPU cannot be forked safely. A script that calls this therefore needs
the usual ``if __name__ == "__main__":``. Workers end with the process that started them, however that one ends.
"""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections.abc import Generator, Iterable
from multiprocessing.connection import Connection, wait
from typing import Any

from quiver.encoder.errors import InputError
from quiver.retrieval.cluster.assignments import Assignment, Assignments
from quiver.retrieval.cluster.protocol import Item, Result, Task
from quiver.retrieval.cluster.worker import Outcome, Worker

# Seconds that a worker is given to end by itself once its pipe is closed.
_PATIENCE = 5.0


class LocalProcesses:
    """Worker processes on this machine.

    Args:
        workers: How many; fewer are started where there are fewer items.

    Raises:
        InputError: Fewer than one.
    """

    name = "local"
    remote = True

    def __init__(self, workers: int) -> None:
        if workers < 1:
            raise InputError(f"workers must be >= 1, got {workers}")
        self._workers = workers

    def threads(self, here: int) -> int:
        """This process's, shared out among the workers."""
        return max(1, here // self._workers)

    def run(self, task: Task[Item, Result], items: Iterable[Item], *, threads: int = 1) -> Generator[tuple[Item, Result], None, None]:
        """See `quiver.retrieval.cluster.protocol.Executor`."""
        del threads  # a machine's own processes share its cores as they can
        waiting, idle, busy = Assignments(items), list[_Process](), dict[Connection, tuple[_Process, Assignment[Item]]]()
        try:
            while True:
                while len(busy) < self._workers and (assignment := waiting.take()) is not None:
                    process = idle.pop() if idle else _Process(task)
                    busy[process.pipe] = (process, assignment)
                    process.send(assignment.item)
                if not busy:
                    return
                for pipe in wait(list(busy)):
                    process, assignment = busy.pop(_connection(pipe))
                    outcome = process.outcome()
                    if outcome is None:
                        waiting.put_back(assignment, process.end())
                        continue
                    idle.append(process)
                    if waiting.settle(assignment, outcome):
                        yield assignment.item, outcome.result
        finally:
            for process in [*idle, *(process for process, _ in busy.values())]:
                process.stop(at_once=bool(busy))


class _Process:
    """A worker process, and the pipe to it."""

    def __init__(self, task: Task[Any, Any]) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, task), daemon=True, name="quiver-worker")
        self._process.start()
        theirs.close()  # so that the pipe ends when the worker does

    def send(self, item: Any) -> None:
        """Hand out an item; that a worker is gone shows when its outcome is asked for."""
        try:
            self.pipe.send(item)
        except (BrokenPipeError, ConnectionResetError):
            return

    def outcome(self) -> Outcome | None:
        """What became of the item; None where the worker died of it."""
        try:
            outcome: Outcome = self.pipe.recv()
        except (EOFError, ConnectionResetError):
            return None
        return outcome

    def end(self) -> str:
        """Wait for a dead worker; how it ended."""
        self._process.join(_PATIENCE)
        self.stop(at_once=True)
        return f"a worker process ended with status {self._process.exitcode}"

    def stop(self, *, at_once: bool) -> None:
        """End the worker."""
        self.pipe.close()
        if not at_once:
            self._process.join(_PATIENCE)
        self._process.kill()
        self._process.join()


def _connection(pipe: object) -> Connection:
    if not isinstance(pipe, Connection):
        raise TypeError(f"expected a connection, got {type(pipe).__name__}")
    return pipe


def _serve(pipe: Connection, task: Task[Any, Any]) -> None:
    """The life of a worker process."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    worker = Worker(task)
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
        os._exit(1)  # nobody wants the result any more, and a long item would go on for minutes
