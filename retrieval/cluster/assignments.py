"""Which items are still to be handed out, and how often each was: what executors with several workers share."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice
from typing import Generic

from quiver.encoder.errors import InputError
from quiver.retrieval.cluster.protocol import Item
from quiver.retrieval.cluster.worker import Outcome, WorkerError

logger = logging.getLogger(__name__)

# A machine that is gone takes its item along once or twice; an item that takes three workers along is itself the reason.
_ATTEMPTS = 3


@dataclass(frozen=True)
class Assignment(Generic[Item]):
    """An item that a worker has.

    Attributes:
        item: The item.
        attempt: Which attempt this is, from 1.
    """

    item: Item
    attempt: int = 1


class Assignments(Generic[Item]):
    """Items in order, those that come back first.

    Args:
        items: Gone through as they are asked for.
    """

    def __init__(self, items: Iterable[Item]) -> None:
        self._items = iter(items)
        self._returned: deque[Assignment[Item]] = deque()

    def take(self) -> Assignment[Item] | None:
        """The next item to hand out; None where there is none at the moment."""
        return self._returned.popleft() if self.waiting else None

    @property
    def waiting(self) -> bool:
        """Whether there is an item to hand out now; one that a worker has may still come back."""
        if not self._returned:
            self._returned.extend(Assignment(item) for item in islice(self._items, 1))
        return bool(self._returned)

    def put_back(self, assignment: Assignment[Item], reason: str) -> None:
        """An attempt has failed; the item is handed out again.

        Raises:
            WorkerError: It was the last attempt.
        """
        if assignment.attempt >= _ATTEMPTS:
            raise WorkerError(f"a part of the work failed {_ATTEMPTS} times, the last time with: {reason}")
        logger.warning("a part of the work is done again by another worker: %s", reason)
        self._returned.append(Assignment(assignment.item, assignment.attempt + 1))

    def settle(self, assignment: Assignment[Item], outcome: Outcome) -> bool:
        """Whether an item is done; one that may succeed elsewhere is put back.

        Raises:
            InputError: It failed, and would again.
            WorkerError: It was the last attempt.
        """
        if outcome.problem is None:
            return True
        if not outcome.again:
            raise InputError(outcome.problem)
        self.put_back(assignment, outcome.problem)
        return False
