"""Spans of tokens in packed sequences: a softmax over the tokens of each sequence, and the best spans under it.

Shapes: B sequences, N packed tokens, n tokens of one sequence.
Source: BERT, arXiv:1810.04805, section 4.2 (a span's score is the sum of its start's and its end's).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quiver.encoder.packing import PackedBatch

# Scores looked at in one step of the search: 8 MiB of float64.
STEP_SCORES = 1 << 20


class Span(NamedTuple):
    """A span of one sequence."""

    start: int
    """First token."""
    end: int
    """Last token, inside the span."""
    score: float
    """Start logit plus end logit."""


def position_loss(logits: Tensor, batch: PackedBatch, places: Tensor) -> Tensor:
    """Cross entropy of one token a sequence under a softmax over the sequence's tokens.

    Args:
        logits: (N,).
        batch: Where the sequences begin and end.
        places: The token asked for in each sequence, (B,) int64; one outside its sequence (negative, or behind its end)
            is left out.

    Returns:
        The mean over the sequences that count, a scalar in float32 or better; zero, with a gradient, if none does.
    """
    device = logits.device
    starts, lengths = batch.cu_seqlens[:-1].to(device).long(), batch.cu_seqlens.to(device).diff().long()
    places = places.to(device)
    values = logits.to(torch.promote_types(logits.dtype, torch.float32))
    sequence = torch.repeat_interleave(torch.arange(len(batch), device=device), lengths, output_size=batch.num_tokens)
    peaks = values.new_full((len(batch),), -torch.inf).scatter_reduce(0, sequence, values.detach(), "amax")
    sums = values.new_zeros(len(batch)).index_add(0, sequence, (values - peaks[sequence]).exp())
    counts = (places >= 0) & (places < lengths)
    chosen = values[starts + places.where(counts, 0)]
    losses = (sums.log() + peaks - chosen).where(counts, 0)
    return losses.sum() / counts.sum().clamp(min=1)


def best_spans(
    start: Tensor,
    end: Tensor,
    batch: PackedBatch,
    *,
    max_answer_length: int,
    n_best: int = 1,
    allowed: Sequence[tuple[int, int]] | None = None,
) -> list[list[Span]]:
    """The spans of each sequence with the highest sum of start and end logit; exact.

    Args:
        start: Start logits, (N,).
        end: End logits, (N,).
        batch: Where the sequences begin and end.
        max_answer_length: Tokens a span may have.
        n_best: Spans wanted of each sequence.
        allowed: For each sequence the first token a span may have and the first behind its last one, (first, stop) with
            0 <= first <= stop <= n; the whole sequence by default.

    Returns:
        For each sequence at most ``n_best`` spans, best first, of equals the one with the earlier start, then the earlier
        end. Where ``allowed`` is empty there is none.

    Raises:
        ValueError: A length or number is below 1, a range lies outside its sequence, or there is not one range a sequence,
            or a logit is NaN.

    Example:
        >>> from quiver.encoder.packing import pack_ids
        >>> start, end = torch.tensor([0.0, 3.0, 1.0, 5.0]), torch.tensor([9.0, 1.0, 2.0, 0.0])
        >>> best_spans(start, end, pack_ids([[7, 7, 7], [7]]), max_answer_length=2)
        [[Span(start=0, end=0, score=9.0)], [Span(start=0, end=0, score=5.0)]]
        >>> best_spans(start, end, pack_ids([[7, 7, 7], [7]]), max_answer_length=2, allowed=[(1, 3), (0, 0)])
        [[Span(start=1, end=2, score=5.0)], []]
    """
    if max_answer_length < 1 or n_best < 1:
        raise ValueError(f"max_answer_length and n_best must be >= 1, got {max_answer_length} and {n_best}")
    ranges = [(0, length) for length in batch.lengths] if allowed is None else allowed
    if len(ranges) != len(batch):
        raise ValueError(f"allowed must hold one range a sequence, {len(batch)}, got {len(ranges)}")
    starts, ends = (logits.detach().to("cpu", torch.float64).numpy() for logits in (start, end))
    if np.isnan(starts).any() or np.isnan(ends).any():
        raise ValueError("start and end must not hold NaN: it has no place in a ranking")
    found = []
    for row, ((first, stop), offset, length) in enumerate(zip(ranges, batch.offsets, batch.lengths, strict=False)):
        if not 0 <= first <= stop <= length:
            raise ValueError(f"sequence {row}: allowed must lie in 0..{length}, got ({first}, {stop})")
        window = slice(offset + first, offset + stop)
        found.append(_best_of_one(starts[window], ends[window], first, min(max_answer_length, stop - first), n_best))
    return found


def _best_of_one(start: NDArray[np.float64], end: NDArray[np.float64], first: int, longest: int, n_best: int) -> list[Span]:
    """The best spans of one stretch of tokens; ``first`` is added to every place."""
    if not longest:
        return []
    # Beyond the stretch no span ends: -inf there, and such pairs are dropped.
    behind = np.concatenate([end, np.full(longest - 1, -np.inf)])
    ends = np.lib.stride_tricks.sliding_window_view(behind, longest)  # (n, longest): row i holds end[i], end[i + 1], ...
    rows = max(STEP_SCORES // longest, 1)
    best: list[Span] = []
    for low in range(0, len(start), rows):
        scores = (start[low : low + rows, None] + ends[low : low + rows]).ravel()
        kept = min(n_best, len(scores))
        # All that tie with the last one wanted are looked at, so that ties are broken by place and not by chance.
        threshold = np.partition(scores, len(scores) - kept)[len(scores) - kept]
        places = np.flatnonzero((scores >= threshold) & (scores > -np.inf))
        places = places[np.argsort(-scores[places], kind="stable")][:n_best]
        best += [
            Span(first + low + int(place) // longest, first + low + int(place) // longest + int(place) % longest, float(scores[place]))
            for place in places
        ]
    return sorted(best, key=lambda span: (-span.score, span.start, span.end))[:n_best]
