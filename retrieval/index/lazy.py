"""What is made in memory when it is first wanted, once, however many threads want it at the same moment."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

Made = TypeVar("Made")


class Lazy(Generic[Made]):
    """A place for something that takes seconds to make, and several times its own memory: one thread makes it, the others wait.

    Since Python 3.12 ``functools.cached_property`` lets every thread that comes in time make its own. How it is made is not kept: a bound
    method here would lead back to its owner, and what was made would stay until Python looks for circles.

    Example:
        >>> calls = []
        >>> once = Once()
        >>> once.get(lambda: calls.append("made")), once.get(lambda: calls.append("made again")), calls
        (None, None, ['made'])
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._made: list[Made] = []

    def get(self, make: Callable[[], Made]) -> Made:
        """What was made, now if it was not before; after an error the next one who asks tries again."""
        if not self._made:
            with self._lock:
                if not self._made:
                    self._made.append(make())
        return self._made[0]
