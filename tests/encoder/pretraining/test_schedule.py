"""Learning rate and batch size over a phase, against an independent implementation of the published formulas."""

from __future__ import annotations

import math

import pytest

from quiver.encoder.pretraining.phases import BatchWarmup, learning_rate_share
from quiver.encoder.pretraining.recipe import PhaseSection


def phase(**settings: object) -> PhaseSection:
    usual: dict[str, object] = {
        "name": "p",
        "tokens": 1000,
        "context": 8,
        "global_theta": 1.0,
        "learning_rate": 1.0,
        "batch_size": 8,
        "micro_batch": 2,
    }
    return PhaseSection(**(usual | settings))  # type: ignore[arg-type]


def published(tokens: int, warmup: int, total: int, decay: int, final: float, *, root: bool) -> float:
    """Warm-up, constant and decay as in the release's schedulers: a floor under one minus the (square root of the) share done."""
    if tokens < warmup:
        return tokens / warmup
    if tokens < total - decay:
        return 1.0
    done = (tokens - (total - decay)) / decay
    return max(final, final + (1 - final) * (1 - (math.sqrt(done) if root else done)))


@pytest.mark.parametrize("decay", ["one_minus_sqrt", "linear"])
@pytest.mark.parametrize(("warmup", "falling", "final"), [(100, 400, 0.001), (0, 1000, 0.0), (300, 700, 0.25)])
def test_the_learning_rate_equals_the_published_schedule(decay: str, warmup: int, falling: int, final: float) -> None:
    section = phase(warmup_tokens=warmup, decay_tokens=falling, final_share=final, decay=decay)
    for tokens in range(1001):
        expected = published(tokens, warmup, 1000, falling, final, root=decay == "one_minus_sqrt")
        assert learning_rate_share(section, tokens) == pytest.approx(expected, abs=1e-12), tokens


def test_the_batch_warmup_has_equal_steps_at_each_size() -> None:
    """Sizes 1..3 precede the full size 4: 600 tokens are split 1 : 2 : 3, so that each size has 100 steps of one token per row."""
    warmup = BatchWarmup(phase(batch_warmup_tokens=600))
    assert [warmup.rows(tokens) for tokens in (0, 99, 100, 299, 300, 599, 600, 10_000)] == [1, 1, 2, 2, 3, 3, 4, 4]
    updates: dict[int, int] = {}
    tokens = 0
    while tokens < 600:
        rows = warmup.rows(tokens)
        updates[rows] = updates.get(rows, 0) + 1
        tokens += rows
    assert updates == {1: 100, 2: 100, 3: 100}


def test_the_batch_warmup_of_the_paper_is_reproduced() -> None:
    """Base: 768 to 4,608 sequences over 50 billion tokens; a row is one micro-batch of 96."""
    section = phase(batch_size=4608, micro_batch=96, batch_warmup_from=768, batch_warmup_tokens=50_000_000_000)
    warmup = BatchWarmup(section)
    assert (warmup.first, warmup.full) == (8, 48)
    ends = [50_000_000_000 * sum(range(8, size + 1)) / sum(range(8, 48)) for size in range(8, 48)]
    for size, end in zip(range(8, 48), ends, strict=True):
        assert warmup.rows(math.ceil(end) - 1) == size
        assert warmup.rows(math.ceil(end)) == size + 1
