"""A worker: opens a task when the first item comes, and says what became of an item in a form that can be sent.

Mistakes of the user and errors of the disk are told apart here: the first end a run, the second are tried again elsewhere. Any other
exception is a defect or a broken machine; it ends the worker, with its traceback where the worker's output goes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from quiver.encoder.errors import InputError
from quiver.retrieval.cluster.protocol import Task


class WorkerError(OSError):
    """The machines, not the input: workers died, or an item failed on each of several."""


@dataclass(frozen=True)
class Outcome:
    """What became of an item.

    Attributes:
        result: What it gave; of no use where there is a problem.
        problem: What went wrong, in a line; None where nothing did.
        again: Whether another attempt may succeed.
    """

    result: Any
    problem: str | None = None
    again: bool = False


class Worker:
    """Does items of one task; in a process or an actor of its own.

    Args:
        task: What is done.
    """

    def __init__(self, task: Task[Any, Any]) -> None:
        self._task = task
        self._work: Callable[[Any], Any] | None = None

    def ready(self) -> bool:
        """Answer as soon as the worker is there."""
        return True

    def attempt(self, item: Any) -> Outcome:
        """Do an item."""
        try:
            if self._work is None:
                self._work = self._task.open()
            return Outcome(self._work(item))
        except InputError as error:
            return Outcome(None, str(error))
        except OSError as error:
            return Outcome(None, str(error), again=True)
