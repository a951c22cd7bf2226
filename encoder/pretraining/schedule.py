"""How learning rate and batch size go over the tokens of a phase.

Source: ModernBERT, arXiv:2412.13663, section 2.2.2 and appendix A.1: a trapezoidal schedule (Xing et al., arXiv:1802.08770; Zhai et al.,
arXiv:2106.04560) with the 1-sqrt decay of Hägele et al., arXiv:2405.18392; a batch-size warm-up with equal steps at each size.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Mapping
from itertools import accumulate

from quiver.encoder.pretraining.sections import PhaseSection

DECAYS: Mapping[str, Callable[[float], float]] = {
    "one_minus_sqrt": lambda done: 1.0 - math.sqrt(done),
    "linear": lambda done: 1.0 - done,
}
"""Decay -> share of the way down that is left, given the share of the decay's tokens that are read."""


def learning_rate_share(phase: PhaseSection, tokens: int) -> float:
    """Share of the peak learning rate that an update is done with.

    Args:
        phase: Its length, warm-up and decay, in tokens.
        tokens: Tokens of the phase that were read before the update.

    Returns:
        0 at the first token of a warm-up, 1 between warm-up and decay, ``final_share`` where the decay ends.
    """
    if tokens < phase.warmup_tokens:
        return tokens / phase.warmup_tokens
    begin = phase.tokens - phase.decay_tokens
    if tokens <= begin or not phase.decay_tokens:
        return 1.0
    done = min(1.0, (tokens - begin) / phase.decay_tokens)
    return phase.final_share + (1.0 - phase.final_share) * DECAYS[phase.decay](done)


class BatchWarmup:
    """How many packed rows an update has.

    Every size from the first to the one before the full batch gets the same number of updates, so it gets tokens in proportion to itself.

    Args:
        phase: Its batch, micro-batch and warm-up; a row holds one micro-batch.
    """

    def __init__(self, phase: PhaseSection) -> None:
        self.full = phase.batch_size // phase.micro_batch
        self.first = self.full
        self._ends: list[int] = []
        if phase.batch_warmup_tokens:
            self.first = (phase.batch_warmup_from or phase.micro_batch) // phase.micro_batch
            sizes = range(self.first, self.full)
            shares = accumulate(sizes)
            self._ends = [math.ceil(phase.batch_warmup_tokens * share / sum(sizes)) for share in shares]

    def rows(self, tokens: int) -> int:
        """Rows of an update.

        Args:
            tokens: Tokens of the phase that were read before it.
        """
        return self.first + bisect_right(self._ends, tokens)
