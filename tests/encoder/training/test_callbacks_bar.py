"""The progress bar of a run."""

from __future__ import annotations

import pytest

from quiver.encoder.training.trainer import FORMS, training_bar


@pytest.fixture(autouse=True)
def terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quiver.encoder.progress.shows_bars", lambda: True)


def test_the_bar_shows_the_latest_value_of_each_key(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    with training_bar(3, 10, enabled=True, forms={**FORMS, "ndcg@10": "nDCG@10 {:.4f}"}) as bar:
        bar.on_log(4, {"loss": 0.75, "tokens_per_second": 12345.6, "grad_norm": 2.0})
        bar.on_log(5, {"ndcg@10": 0.43219})
        bar.on_step(6)
        bar.on_log(6, {"loss": 0.5})
    found = capsys.readouterr()
    assert found.out == ""
    assert "step" in found.err
    assert "6/10" in found.err
    assert "loss 0.5000, 12,346 tokens/s, nDCG@10 0.4322" in found.err
    assert "eta" in found.err


def test_the_bar_starts_at_the_position_of_the_earlier_session(capsys: pytest.CaptureFixture[str]) -> None:
    with training_bar(3, 10, enabled=True):
        pass
    assert "3/10" in " ".join(capsys.readouterr().err.split())
