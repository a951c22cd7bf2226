"""Progress as a bar and as lines, and the slices of work between which it moves."""

from __future__ import annotations

import pytest

from quiver.encoder.progress import progress_bar, timed_slices


@pytest.mark.parametrize(
    ("scan", "item", "most", "sizes"),
    [
        (0.0, 0.001, None, {1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024}),  # until a slice takes a second
        (0.0, 0.001, 100, {1, 2, 4, 8, 16, 32, 64, 100}),
        (0.0, 20.0, None, {1, 2}),  # an item takes longer than a second
        (30.0, 1.0, None, {1, 2, 4, 8, 16, 32, 64}),  # every slice reads the corpus from disk, which longer slices do less often
    ],
)
def test_slices_take_about_a_second_and_grow_where_that_saves_time(scan: float, item: float, most: int | None, sizes: set[int]) -> None:
    work, seen = [0.0], list[slice]()
    for part in timed_slices(5001, most=most, clock=lambda: sum(work)):
        work.append(scan + item * (part.stop - part.start))
        seen.append(part)
    assert [position for part in seen for position in range(part.start, part.stop)] == list(range(5001))
    assert {part.stop - part.start for part in seen[:-1]} == sizes


def test_there_are_no_slices_of_nothing() -> None:
    assert list(timed_slices(0)) == []


def test_a_log_gets_a_line_a_minute_with_the_time_left(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # which logs of CI have, and which makes rich take them for terminals
    now = [0.0]
    monkeypatch.setattr("quiver.encoder.progress.time.monotonic", lambda: now[0])
    with progress_bar("encoding", 3000, enabled=True, done=1000) as advance:
        for seconds in (30, 59, 60, 100, 121, 3800):
            now[0] = seconds
            advance(100, "loss 0.5" if seconds > 1000 else "")
    assert capsys.readouterr().err.splitlines() == [
        "encoding: 1,300 of 3,000, 0:01:00 so far, 0:05:40 left",
        "encoding: 1,500 of 3,000, 0:02:01 so far, 0:06:03 left",
        "encoding: 1,600 of 3,000, 1:03:20 so far, 2:27:47 left, loss 0.5",
    ]
    with progress_bar("reading", None, enabled=True) as advance:
        now[0] += 60
        advance(7)
    assert capsys.readouterr().err == "reading: 7, 0:01:00 so far\n"
    with progress_bar("reading", 1, enabled=True) as advance:
        now[0] += 59
    assert capsys.readouterr().err == ""


def test_a_terminal_gets_a_bar_and_a_disabled_one_is_silent(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quiver.encoder.progress.shows_bars", lambda: True)
    with progress_bar("encoding", 30, enabled=True) as advance:
        advance(12)
    shown = capsys.readouterr().err
    assert "encoding" in shown
    assert "12/30" in shown
    with progress_bar("encoding", 30, enabled=False) as advance:
        advance(12)
    assert capsys.readouterr().err == ""
