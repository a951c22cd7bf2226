"""Which tokens a model is asked for, and what it sees in their place.

A sequence's masks depend on the seed and on its number in the stream alone, not on the batch or process it lands in: a resumed run masks
the same, and so do any number of processes.

Shapes: n tokens of a sequence.
Source: BERT, arXiv:1810.04805, section 3.1 (80% [MASK], 10% a random token, 10% as it is); ModernBERT, arXiv:2412.13663, section 2.2.2
(30%, as in arXiv:2202.08005).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from quiver.encoder.errors import InputError
from quiver.encoder.heads import IGNORE_INDEX
from quiver.encoder.tokenizer import SPECIAL_TOKENS, Tokenizer

MASKED, RANDOM = 0.8, 0.1
"""Shares of the asked tokens that are replaced by [MASK], and by a random token; the rest stays."""


class Masker:
    """Masks sequences of one vocabulary.

    Args:
        tokenizer: Has all of `quiver.encoder.tokenizer.SPECIAL_TOKENS`, see `require_special_tokens`.
        probability: Share of the other tokens that is asked for.
        seed: Of all draws.
    """

    def __init__(self, tokenizer: Tokenizer, *, probability: float, seed: int) -> None:
        special = special_ids(tokenizer)
        self._mask = special["mask"]
        self._special = np.zeros(len(tokenizer), bool)
        self._special[list(special.values())] = True
        self._words = np.flatnonzero(~self._special)
        self._probability = probability
        self._seed = seed

    def __call__(self, ids: NDArray[Any], serial: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Mask a sequence.

        Args:
            ids: Token ids, (n,).
            serial: The sequence's number in the stream; equal numbers give equal draws.

        Returns:
            The ids as the model sees them, (n,), and the labels, (n,): the token where it is asked for, else -100.
        """
        # The key is the seed, the counter the sequence: Philox gives each its own stretch of 2**128 numbers, at no cost of seeding.
        generator = np.random.Generator(np.random.Philox(key=self._seed, counter=serial << 128))
        draw = generator.random(len(ids))
        draw[self._special[ids]] = 1.0  # asked for by nobody
        seen = ids.astype(np.int64)
        labels = np.where(draw < self._probability, seen, IGNORE_INDEX)
        seen[draw < self._probability * MASKED] = self._mask
        random = (draw >= self._probability * MASKED) & (draw < self._probability * (MASKED + RANDOM))
        seen[random] = generator.choice(self._words, int(random.sum()))
        return seen, labels


def special_ids(tokenizer: Tokenizer) -> dict[str, int]:
    """The ids of all special tokens by role.

    Raises:
        InputError: The vocabulary lacks one; names all that it lacks.
    """
    found = {name: tokenizer.special_id(name) for name in SPECIAL_TOKENS}
    if missing := [name for name, token in found.items() if token is None]:
        raise InputError(
            f"the vocabulary has no token for {', '.join(missing)}; name it in tokenizer_config.json ({missing[0]}_token), "
            "or train a vocabulary with model.tokenizer: train"
        )
    return {name: token for name, token in found.items() if token is not None}
