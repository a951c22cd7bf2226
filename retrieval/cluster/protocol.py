"""What long work expects of whoever runs it: a task that is opened once a worker, and executors that hand out its items.

An executor runs a task on items in any order, on one worker or on many, and gives each item's result once. An item may be *done* more
than once: a worker that dies is replaced and its item handed out again, and where a worker only seemed dead both may finish it. What an
item writes must therefore be harmless to write twice; `quiver.retrieval.index.pieces` shows how.

The module knows nothing of what the work is.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from typing import Protocol, TypeVar

Item = TypeVar("Item")
"""What is handed out: small, and such that it can be sent to another process."""

ItemIn = TypeVar("ItemIn", contravariant=True)
"""The items of a task."""

Result = TypeVar("Result")
"""What an item gives, which can be sent to another process too."""

ResultOut = TypeVar("ResultOut", covariant=True)
"""The results of a task."""


class Task(Protocol[ItemIn, ResultOut]):
    """Work on items; where an executor is remote the task is sent to its workers, which import it by the name of its module."""

    def open(self) -> Callable[[ItemIn], ResultOut]:
        """Load what all items need, such as a model: called by a worker when it gets its first item, and once.

        Raises:
            InputError: It cannot be loaded here; the whole run ends with this line.
        """


class Executor(Protocol):
    """Runs tasks."""

    @property
    def name(self) -> str:
        """What it is called on the command line."""

    @property
    def remote(self) -> bool:
        """Whether tasks go to other processes, which see only what is on the disk and what they are sent."""

    def threads(self, here: int) -> int:
        """Threads that a worker should compute with, given that this process has ``here``."""

    def run(self, task: Task[Item, Result], items: Iterable[Item], *, threads: int = 1) -> Generator[tuple[Item, Result], None, None]:
        """Do all items; results come as they are ready, in any order. Workers are gone when the iterator has ended or is closed.

        Args:
            task: What is done with an item.
            items: Gone through as workers become free.
            threads: How many each worker computes with, which is the task's to set: so much room it needs.

        Raises:
            InputError: An item, or opening the task, failed for a reason that the user can put right.
            WorkerError: An item failed on several workers, or no worker stays alive.
        """
