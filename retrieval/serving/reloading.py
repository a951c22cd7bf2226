"""An index that is served: the generation that answers now, and the change to a newer one while requests run.

Who has begun with a generation ends with it: it is held by a reference, and what only the past refers to is let go of.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import Executor
from pathlib import Path

from quiver.encoder.errors import InputError
from quiver.retrieval.index.store.layout import Layout
from quiver.retrieval.serving.generations import Generation

logger = logging.getLogger(__name__)


class ServedIndex:
    """An index of the service.

    Args:
        folder: The index.
        open_newest: Opens its newest generation, in a thread.
        first: The generation that it begins with.
        threads: Where generations are opened.

    Attributes:
        folder: The same.
        current: The generation that answers.
        observers: Told of every change of generation whether it has worked.
    """

    def __init__(self, folder: Path, open_newest: Callable[[], Generation], first: Generation, threads: Executor) -> None:
        self.folder = folder
        self.current = first
        self.observers: list[Callable[[bool], None]] = []
        self._open_newest = open_newest
        self._threads = threads
        self._layout = Layout(folder.resolve())
        self._changing = asyncio.Lock()
        self._refused: int | None = None

    async def refresh(self) -> Generation:
        """Change to the newest generation if there is one, and give it.

        Raises:
            InputError: It cannot be opened; the one before stays.
            OSError: It cannot be read.
        """
        async with self._changing:
            loop = asyncio.get_running_loop()
            newest = await loop.run_in_executor(self._threads, self._newest)
            if newest is not None and newest != self.current.number:
                opened = await loop.run_in_executor(self._threads, self._open_newest)
                logger.info("%s: generation %d after %d, %d documents", self.folder, opened.number, self.current.number, len(opened.index))
                self.current = opened
                self._tell(worked=True)
            return self.current

    async def watch(self, seconds: float) -> None:
        """Change to every newer generation, for ever; one that cannot be opened is told of once.

        Args:
            seconds: From one look to the next.
        """
        while True:
            await asyncio.sleep(seconds)
            try:
                await self.refresh()
                self._refused = None
            except (InputError, OSError) as error:
                newest = self._newest()
                if newest != self._refused:
                    self._refused = newest
                    self._tell(worked=False)
                    logger.error("generation %d goes on answering: %s", self.current.number, error)

    def _newest(self) -> int | None:
        try:
            return max(self._layout.generations(), default=None)
        except OSError:
            return None

    def _tell(self, *, worked: bool) -> None:
        for observer in self.observers:
            observer(worked)
