"""Micro-batches: waiting work is run together, and a full queue refuses at once."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pytest

from quiver.retrieval.serving.retrievers import Batcher
from quiver.retrieval.serving.schemas import RequestError


@dataclass(frozen=True)
class Letters:
    text: str

    def __len__(self) -> int:
        return len(self.text)


class Engine:
    """Runs batches after ``free`` is set, and records them."""

    def __init__(self) -> None:
        self.batches: list[list[str]] = []
        self.free = threading.Event()

    def run(self, work: Sequence[Letters]) -> list[str | Exception]:
        self.free.wait(30)
        texts = [letters.text for letters in work]
        self.batches.append(texts)
        if "fault" in texts:
            raise ZeroDivisionError
        return [KeyError(text) if text == "bad" else text.upper() for text in texts]


def batcher(engine: Engine, **changes: int) -> Batcher[Letters, str]:
    options = {"workers": 1, "largest": 8, "room": 12, **changes}
    return Batcher(engine.run, ThreadPoolExecutor(4), observe=lambda size: None, **options)


async def asked(batches: Batcher[Letters, str], engine: Engine, texts: Sequence[str]) -> list[str | BaseException]:
    tasks = []
    for text in texts:
        tasks.append(asyncio.ensure_future(batches.ask(Letters(text))))
        await asyncio.sleep(0)  # it asks
        await asyncio.sleep(0)  # a worker that is free takes it
    engine.free.set()
    return list(await asyncio.gather(*tasks, return_exceptions=True))


def test_waiting_queries_become_one_batch() -> None:
    engine = Engine()
    assert asyncio.run(asked(batcher(engine), engine, ["a", "b", "c", "d"])) == ["A", "B", "C", "D"]
    assert engine.batches == [["a"], ["b", "c", "d"]]


def test_a_batch_has_a_maximum_size_and_keeps_the_order() -> None:
    engine = Engine()
    found = asyncio.run(asked(batcher(engine, room=50), engine, ["a", "bbbbb", "ccc", "ddddddddddd", "e"]))
    assert found == ["A", "BBBBB", "CCC", "DDDDDDDDDDD", "E"]
    assert engine.batches == [["a"], ["bbbbb", "ccc"], ["ddddddddddd"], ["e"]]


def test_a_full_queue_refuses_at_once() -> None:
    engine = Engine()
    batches = batcher(engine)
    found = asyncio.run(asked(batches, engine, ["a", "bbbbbb", "cccccc", "d", "e"]))
    assert found[:3] == ["A", "BBBBBB", "CCCCCC"]
    for refused in found[3:]:
        assert isinstance(refused, RequestError)
        assert (refused.status, refused.headers) == (429, {"Retry-After": "1"})
    assert batches.waiting == 0


def test_an_error_reaches_only_its_own_request() -> None:
    engine = Engine()
    found = asyncio.run(asked(batcher(engine), engine, ["a", "b", "bad"]))
    assert found[:2] == ["A", "B"]
    assert isinstance(found[2], KeyError)


def test_a_failed_batch_is_run_again_piece_by_piece_and_does_not_affect_the_next() -> None:
    engine = Engine()
    found = asyncio.run(asked(batcher(engine, room=50), engine, ["a", "fault", "b", "cccccccc"]))
    assert [type(each) for each in found] == [str, ZeroDivisionError, str, str]


def test_cancelled_requests_are_not_searched() -> None:
    engine = Engine()

    async def leave() -> str:
        batches = batcher(engine)
        first = asyncio.ensure_future(batches.ask(Letters("a")))
        await asyncio.sleep(0.01)
        gone = asyncio.ensure_future(batches.ask(Letters("b")))
        last = asyncio.ensure_future(batches.ask(Letters("c")))
        await asyncio.sleep(0.01)
        gone.cancel()
        await asyncio.sleep(0)
        engine.free.set()
        with pytest.raises(asyncio.CancelledError):
            await gone
        return await first + await last

    assert asyncio.run(leave()) == "AC"
    assert engine.batches == [["a"], ["c"]]
