"""One worker: the calling process itself, item after item."""

from __future__ import annotations

from collections.abc import Generator, Iterable

from quiver.retrieval.cluster.protocol import Item, Result, Task


class InProcess:
    """Does the work where it is asked for; an error comes out as it was raised."""

    name = "local"
    remote = False

    def threads(self, here: int) -> int:
        """All that this process has."""
        return here

    def run(self, task: Task[Item, Result], items: Iterable[Item], *, threads: int = 1) -> Generator[tuple[Item, Result], None, None]:
        """See `quiver.retrieval.cluster.protocol.Executor`; items are done in their order."""
        del threads
        work = None
        for item in items:
            work = work or task.open()
            yield item, work(item)


HERE = InProcess()
"""Work that is done by whoever asks for it."""
