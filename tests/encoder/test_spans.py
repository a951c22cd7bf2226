"""Spans in packed sequences: the loss against one sequence at a time, the search against brute force."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from quiver.encoder import PackedBatch, pack_ids
from quiver.encoder.heads import Span, best_spans, position_loss


def batch_of(lengths: list[int]) -> PackedBatch:
    return pack_ids([[1] * length for length in lengths])


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 30), min_size=1, max_size=8), st.data())
def test_loss_is_the_mean_of_the_sequences_losses(lengths: list[int], data: st.DataObject) -> None:
    batch = batch_of(lengths)
    places = torch.tensor([data.draw(st.integers(-2, length + 2)) for length in lengths])
    logits = torch.randn(batch.num_tokens, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    losses = [
        F.cross_entropy(part[None], place[None]) for part, place in zip(batch.unpack(logits), places, strict=True) if 0 <= place < len(part)
    ]
    found = position_loss(logits, batch, places)
    expected = torch.stack(losses).mean() if losses else logits.sum() * 0
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(torch.autograd.grad(found, logits), torch.autograd.grad(expected, logits))


def test_huge_logits_do_not_overflow() -> None:
    logits = torch.tensor([3e38, -3e38, 0.0, 88.0, 89.0, -104.0]).requires_grad_()
    loss = position_loss(logits, batch_of([3, 3]), torch.tensor([0, 1]))
    loss.backward()
    assert loss.isfinite()
    assert logits.grad is not None
    assert logits.grad.isfinite().all()


def test_half_precision_logits_give_a_float32_loss() -> None:
    logits = torch.randn(5, dtype=torch.bfloat16)
    found = position_loss(logits, batch_of([5]), torch.tensor([2]))
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, F.cross_entropy(logits.float()[None], torch.tensor([2])))


def brute_force(start: Tensor, end: Tensor, first: int, stop: int, longest: int) -> list[Span]:
    spans = [Span(i, j, start[i].item() + end[j].item()) for i in range(first, stop) for j in range(i, stop) if j - i + 1 <= longest]
    return sorted(spans, key=lambda span: (-span.score, span.start, span.end))


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_spans_are_those_of_brute_force(data: st.DataObject) -> None:
    lengths = data.draw(st.lists(st.integers(1, 14), min_size=1, max_size=4))
    batch = batch_of(lengths)
    # Few values, so that many spans tie.
    values = st.sampled_from([-1.5, 0.0, 0.25, 2.0])
    start, end = (torch.tensor(data.draw(st.lists(values, min_size=batch.num_tokens, max_size=batch.num_tokens))) for _ in range(2))
    allowed = [tuple(sorted((data.draw(st.integers(0, length)), data.draw(st.integers(0, length))))) for length in lengths]
    n_best, longest = data.draw(st.integers(1, 200)), data.draw(st.integers(1, 16))
    found = best_spans(start, end, batch, max_answer_length=longest, n_best=n_best, allowed=allowed)
    parts = zip(batch.unpack(start), batch.unpack(end), allowed, strict=True)
    assert found == [brute_force(one, other, *ranges, longest)[:n_best] for one, other, ranges in parts]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"max_answer_length": 0}, "must be >= 1"),
        ({"n_best": 0}, "must be >= 1"),
        ({"allowed": [(0, 3)]}, "one range per sequence, 2, got 1"),
        ({"allowed": [(0, 3), (0, 3)]}, r"sequence 1: allowed must lie in 0\.\.2, got \(0, 3\)"),
        ({"allowed": [(2, 1), (0, 2)]}, r"sequence 0: .* got \(2, 1\)"),
    ],
)
def test_wrong_arguments_are_named(wrong: dict[str, object], message: str) -> None:
    arguments: dict[str, object] = {"max_answer_length": 4, **wrong}
    with pytest.raises(ValueError, match=message):
        best_spans(torch.zeros(5), torch.zeros(5), batch_of([3, 2]), **arguments)  # type: ignore[arg-type]


def test_a_nan_logit_is_refused() -> None:
    start, end = torch.tensor([0.0, math.nan, 1.0]), torch.tensor([0.0, 1.0, 2.0])
    with pytest.raises(ValueError, match="must not contain NaN"):
        best_spans(start, end, pack_ids([[1, 2, 3]]), max_answer_length=2)
