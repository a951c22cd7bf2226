"""Executors of this process, for what does not depend on other processes."""

from __future__ import annotations

from collections.abc import Generator, Iterable
from typing import Any

from quiver.encoder.progress import Advance


class Backwards:
    """An executor that finishes the items in reverse order, or does each of them twice, as if its worker had died at its end."""

    name, remote = "local", True

    def __init__(self, *, twice: bool = False) -> None:
        self.twice = twice
        self.done: list[Any] = []

    def threads(self, here: int) -> int:
        return here

    def run(
        self, task: Any, items: Iterable[Any], *, threads: int = 1, advance: Advance = lambda steps: None
    ) -> Generator[tuple[Any, Any], None, None]:
        work = task.open(advance)
        for item in reversed(list(items)):
            self.done.append(item)
            if self.twice:
                work(item)
            yield item, work(item)
