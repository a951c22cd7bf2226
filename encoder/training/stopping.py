"""SIGTERM and SIGINT while a run trains: the step is finished and saved first."""

from __future__ import annotations

import logging
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

logger = logging.getLogger(__name__)

_SAME = 1.0
"""Seconds within which a second signal is the first one again: a terminal and torchrun both pass a Ctrl-C on."""


class StopRequest:
    """Whether somebody has asked the run to stop.

    Attributes:
        name: ``SIGTERM`` or ``SIGINT``; None while nobody has.
    """

    def __init__(self) -> None:
        self.name: str | None = None
        self._when = 0.0

    def take(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal.

        Raises:
            KeyboardInterrupt: It is a second SIGINT.
        """
        del frame
        if number == signal.SIGINT and self.name is not None and time.monotonic() - self._when > _SAME:
            raise KeyboardInterrupt
        if self.name is None:
            self.name = signal.Signals(number).name
            self._when = time.monotonic()
            # By another thread: the signal may have come in the middle of a write to the very stream that the log goes to.
            message = "%s: stopping after this step, with a checkpoint; Ctrl-C again stops at once"
            threading.Thread(target=logger.warning, args=(message, self.name)).start()


class RunStoppedError(Exception):
    """A session has ended before the run's last update, for somebody asked it to; its checkpoint is saved.

    Attributes:
        step: Updates done.
    """

    def __init__(self, step: int) -> None:
        super().__init__(f"stopped after step {step}, with a checkpoint")
        self.step = step


@contextmanager
def stop_requests() -> Iterator[StopRequest]:
    """In the block SIGTERM and SIGINT are requests; outside of the main thread, where Python has no signals, there are none."""
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield request
        return
    before = {number: signal.signal(number, request.take) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
