"""Signals during training: the first one requests a stop, a second SIGINT interrupts."""

from __future__ import annotations

import logging
import signal
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from quiver.encoder.training import processes
from quiver.encoder.training.processes import StopRequest, stop_requests


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    """Check that each test restores the signal handlers of the process."""
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    yield
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == before


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(processes, "time", SimpleNamespace(monotonic=lambda: now[0]))
    return now


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_requests_a_stop(number: signal.Signals, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger=processes.__name__), stop_requests() as stop:
        names = [stop.name]
        signal.raise_signal(number)
        assert [*names, stop.name] == [None, number.name]
        deadline = time.monotonic() + 30
        while not caplog.messages and time.monotonic() < deadline:
            time.sleep(0.001)
    assert caplog.messages == [
        f"{number.name}: stopping after this step or batch of the evaluation, with a checkpoint; Ctrl-C again stops at once"
    ]


@pytest.mark.parametrize("first", [signal.SIGTERM, signal.SIGINT])
def test_a_second_ctrl_c_stops_at_once(first: signal.Signals, clock: list[float]) -> None:
    seen = []

    def interrupted() -> None:
        with stop_requests() as stop:
            signal.raise_signal(first)
            clock[0] += 0.9
            signal.raise_signal(signal.SIGINT)  # the same signal, forwarded by torchrun
            seen.append(stop.name)
            clock[0] += 0.2
            signal.raise_signal(signal.SIGTERM)  # SIGTERM requests a stop, however often it comes
            seen.append(stop.name)
            signal.raise_signal(signal.SIGINT)
            seen.append("still there")

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert seen == [first.name, first.name]


def test_handlers_are_restored_after_an_error() -> None:
    def fail() -> None:
        with stop_requests():
            assert signal.getsignal(signal.SIGINT) is not signal.default_int_handler
            raise ValueError("in the block")

    with pytest.raises(ValueError, match="in the block"):
        fail()


def test_signals_are_not_handled_in_another_thread() -> None:
    found: list[StopRequest] = []

    def train() -> None:
        with stop_requests() as stop:
            found.append(stop)

    thread = threading.Thread(target=train)
    thread.start()
    thread.join()
    assert [stop.name for stop in found] == [None]
