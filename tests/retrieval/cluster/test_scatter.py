"""Who is asked, and what happens when they do not answer: replicas that die, hang, are slow or cannot be started, without a process."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quiver.encoder.errors import InputError
from quiver.retrieval.cluster.index import ReplicaSet, Timeouts, scatter
from quiver.retrieval.cluster.shard import ShardHits, ShardLostError, ShardSpec
from quiver.retrieval.index import DamagedIndexError
from quiver.retrieval.index.store.reading import CodecEntry, Manifest, Policy, SegmentEntry
from quiver.retrieval.records import Hits, Missing, ModelCard, TokenCounts

FOREVER = float("inf")
IMPATIENT = Timeouts(attempt=0.05, answer=0.4, query=0.0, alive=0.2, start=0.3)
PATIENT = Timeouts(attempt=FOREVER, answer=FOREVER)


def spec() -> ShardSpec:
    card = ModelCard("words", "dense", "ab" * 32, 8, "dot", 9, 9)
    segments = (SegmentEntry("s-000000000001-0000", 7, 7, TokenCounts(0, 0, 0, 0), {}, None),)
    return ShardSpec(
        Path("an index"), Manifest(1, "", "build", {}, card, Policy(), CodecEntry("exact-dense", "c", {}, {}), segments), {}, 9, True
    )


class Fake:
    """A replica that does as it is told: ``answer``, ``lost``, ``hang`` or raise an exception."""

    def __init__(self, name: str, does: Any, *, opens: Any = None, breathes: bool = True) -> None:
        self.name, self.does, self.opens, self.breathes = name, does, opens, breathes
        self.asked, self.closed, self.hanging = 0, 0, list[Future[ShardHits]]()

    def opened(self) -> Future[None]:
        return self._settled(self.opens, None)

    def alive(self) -> Future[None]:
        return self._settled(None if self.breathes else "hang", None)

    def search(self, message: Any) -> Future[ShardHits]:
        assert message == "a message"
        self.asked += 1
        found = self._settled(None if self.does == "answer" else self.does, ShardHits.of(Hits([[self.name]], [np.float32([1])])))
        if self.does == "hang":
            self.hanging.append(found)
        return found

    def close(self) -> None:
        self.closed += 1

    def _settled(self, how: Any, value: Any) -> Future[Any]:
        future: Future[Any] = Future()
        if how is None:
            future.set_result(value)
        elif how == "lost":
            future.set_exception(ShardLostError(f"{self.name} is dead"))
        elif isinstance(how, BaseException):
            future.set_exception(how)
        return future


class Launcher:
    """Gives the replicas that it was given, one after the other; then ones that answer."""

    def __init__(self, *handles: Fake) -> None:
        self.to_come = [*handles]
        self.launched: list[Fake] = []

    def message(self, request: Any) -> Any:
        return request

    def launch(self, spec: ShardSpec) -> Fake:
        self.launched.append(self.to_come.pop(0) if self.to_come else Fake(f"new {len(self.launched)}", "answer"))
        return self.launched[-1]


@pytest.fixture
def made() -> Iterator[list[ReplicaSet]]:
    made: list[ReplicaSet] = []
    yield made
    for each in made:
        each.close()


@pytest.fixture
def replicated(made: list[ReplicaSet]) -> Callable[..., tuple[ReplicaSet, Launcher]]:
    def make(*handles: Fake, timeouts: Timeouts = PATIENT) -> tuple[ReplicaSet, Launcher]:
        launcher = Launcher(*handles)
        shard = ReplicaSet(spec(), launcher, len(handles), replace(timeouts, restart=0.01))
        made.append(shard)
        return shard, launcher

    return make


def asked(*shards: ReplicaSet, timeouts: Timeouts = PATIENT, queries: int = 1) -> list[str | None]:
    answers = scatter(shards, "a message", queries=queries, timeouts=timeouts)
    return [None if answer is None else answer.ids[0] for answer in answers]


def eventually(holds: Callable[[], bool], seconds: float = 20) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "has not come about"
        time.sleep(0.005)


def test_searches_are_spread_over_the_replicas(replicated: Any) -> None:
    shard, launcher = replicated(*(Fake(f"r{number}", "answer") for number in range(3)))
    for _ in range(30):
        asked(shard)
    assert [each.asked for each in launcher.launched] == [10, 10, 10]


def test_a_lost_replica_fails_no_query_and_is_replaced(replicated: Any) -> None:
    dead, alive = Fake("dead", "lost"), Fake("alive", "answer")
    shard, launcher = replicated(dead, alive)
    other, _ = replicated(Fake("other", "answer"))
    answers = [asked(shard, other) for _ in range(50)]
    assert {each for each, _ in answers} <= {"alive", "new 2"}
    assert {each for _, each in answers} == {"other"}
    assert (dead.asked, dead.closed) == (1, 1)
    eventually(lambda: shard.alive == 2)
    assert {asked(shard)[0] for _ in range(4)} == {"alive", "new 2"}
    assert len(launcher.launched) == 3


def test_without_replicas_results_lack_the_shard_until_it_is_restarted(replicated: Any) -> None:
    starting = Fake("second", "answer", opens="hang")
    shard, launcher = replicated(Fake("only", "lost"))
    launcher.to_come = [starting]
    assert asked(shard) == [None]
    assert asked(shard) == [None]  # nobody waits for one that is being started
    assert shard.alive == 0
    assert shard.spec.part == Missing(("s-000000000001-0000",), 7)
    shard.close()


def test_restarting_a_replica_is_tried_until_it_succeeds(replicated: Any) -> None:
    shard, launcher = replicated(Fake("only", "lost"))
    failing = [
        Fake("dies", "answer", opens="lost"),
        Fake("no file", "answer", opens=FileNotFoundError(2, "No such file", "vectors.f32")),
        Fake("damaged", "answer", opens=DamagedIndexError("damaged")),
    ]
    launcher.to_come = [*failing, Fake("well", "answer")]
    assert asked(shard) == [None]
    eventually(lambda: shard.alive == 1)
    assert asked(shard) == ["well"]
    assert [each.closed for each in failing] == [1, 1, 1]


def test_all_replicas_of_a_shard_may_be_lost_at_once(replicated: Any) -> None:
    shard, launcher = replicated(*(Fake(f"r{number}", "lost") for number in range(3)), timeouts=IMPATIENT)
    launcher.to_come = [Fake(f"stuck {number}", "answer", opens="hang") for number in range(3)]
    assert asked(shard) == [None]
    eventually(lambda: shard.alive == 3)
    assert len(launcher.launched) == 9
    assert all(each.closed == 1 for each in launcher.launched[:6])


def test_an_error_raised_by_a_shard_is_raised_and_loses_no_replica(replicated: Any) -> None:
    shard, launcher = replicated(Fake("one", ValueError("too long")), Fake("two", ValueError("too long")))
    with pytest.raises(ValueError, match=r"^too long$"):
        asked(shard)
    assert shard.alive == 2
    assert sum(each.asked for each in launcher.launched) == 1


def test_a_slow_replica_is_asked_last_until_it_answers_a_health_check(replicated: Any) -> None:
    slow, quick = Fake("slow", "hang"), Fake("quick", "answer")
    shard, _ = replicated(slow, quick, timeouts=IMPATIENT)
    assert [asked(shard, timeouts=IMPATIENT) for _ in range(2)] == [["quick"]] * 2
    assert slow.asked == 1
    eventually(lambda: slow.asked == 1 and shard.suspects == 0)  # it said that it is there
    slow.does = "answer"
    for future in slow.hanging:
        future.set_result(ShardHits.of(Hits([["late"]], [np.float32([1])])))  # nobody waits for that any more
    assert {asked(shard, timeouts=IMPATIENT)[0] for _ in range(4)} == {"slow", "quick"}


def test_a_replica_that_answers_no_health_check_is_lost(replicated: Any) -> None:
    hung = Fake("hung", "hang", breathes=False)
    shard, launcher = replicated(hung, Fake("quick", "answer"), timeouts=IMPATIENT)
    answers = [asked(shard, timeouts=IMPATIENT)[0] for _ in range(20)]
    assert set(answers) == {"quick"}
    eventually(lambda: shard.alive == 2 and len(launcher.launched) == 3)
    assert (hung.asked, hung.closed) == (1, 1)
    assert {asked(shard)[0] for _ in range(4)} == {"quick", "new 2"}


def test_a_search_continues_without_shards_that_do_not_answer_in_time(replicated: Any) -> None:
    hung, _ = replicated(Fake("hung", "hang"), timeouts=IMPATIENT)
    well, _ = replicated(Fake("well", "answer"), timeouts=IMPATIENT)
    begun = time.monotonic()
    assert asked(hung, well, timeouts=IMPATIENT) == [None, "well"]
    assert 0.35 < time.monotonic() - begun < 5
    assert hung.alive == 1  # it breathes: a heavy query is no reason to end it


def test_a_search_with_more_queries_has_longer_timeouts(replicated: Any) -> None:
    timeouts = Timeouts(attempt=0.01, answer=0.02, query=0.01)
    hung, _ = replicated(Fake("hung", "hang"))
    begun = time.monotonic()
    assert asked(hung, timeouts=timeouts, queries=21) == [None]
    assert 0.2 < time.monotonic() - begun < 5


def test_an_infinite_timeout_waits(replicated: Any) -> None:
    slow = Fake("slow", "hang")
    shard, _ = replicated(slow)
    threading.Timer(0.3, lambda: slow.hanging[0].set_result(ShardHits.of(Hits([["late"]], [np.float32([1])])))).start()
    assert asked(shard) == ["late"]


def test_a_shard_that_does_not_open_is_reported(replicated: Any) -> None:
    shard, _ = replicated(Fake("slow", "answer", opens="hang"), timeouts=IMPATIENT)
    with pytest.raises(InputError, match=r"generation 1: not opened within 0.3 s; it needs 9 bytes of free memory"):
        shard.wait()
    shard, _ = replicated(Fake("dead", "answer", opens="lost"))
    with pytest.raises(
        InputError, match=r"from s-000000000001-0000, generation 1: the process ended while the shard was opened \(dead is dead\)"
    ):
        shard.wait()


def test_many_threads_search_while_replicas_die(replicated: Any) -> None:
    """Whenever a replica is lost another one is there: of all searches none fails."""

    class Mortal(Fake):
        """Answers five times."""

        def search(self, message: Any) -> Future[ShardHits]:
            self.does = "answer" if self.asked < 5 else "lost"
            return super().search(message)

    shard, launcher = replicated(*(Mortal(f"r{number}", "answer") for number in range(3)), Fake("old", "answer"))
    launcher.to_come = [Mortal(f"m{number}", "answer") for number in range(400)]
    answers: list[str | None] = []

    def searching() -> None:
        for _ in range(100):
            answers.extend(asked(shard))

    threads = [threading.Thread(target=searching) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(answers) == 400
    assert None not in answers
    eventually(lambda: shard.alive == 4)
    lost = [each for each in launcher.launched if each.closed]
    assert len(lost) >= 3
    assert len(launcher.launched) == 4 + len(lost)
    shard.close()
    assert {each.closed for each in launcher.launched} == {1}
