"""Masks: shares over many tokens, special tokens, and dependence on seed and sequence number only."""

from __future__ import annotations

import math

import numpy as np
import pytest

from quiver.encoder import Tokenizer
from quiver.encoder.heads import IGNORE_INDEX
from quiver.encoder.pretraining.phases import special_ids
from quiver.encoder.pretraining.stream import Masker

COUNT = 400_000


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.train(["a bird has wings and a nest of twigs"] * 2, vocab_size=320, unused=8)


def test_shares_of_masked_random_and_kept_tokens_are_as_specified(tokenizer: Tokenizer) -> None:
    """Shares must be within five standard deviations of a binomial distribution."""
    word = tokenizer.encode_bare(["bird"])[0][0]
    ids = np.full(COUNT, word)
    seen, labels = Masker(tokenizer, probability=0.3, seed=1)(ids, 0)
    masked = labels != IGNORE_INDEX
    mask, special = special_ids(tokenizer)["mask"], set(special_ids(tokenizer).values())

    def check(found: int, out_of: int, share: float) -> None:
        assert abs(found - out_of * share) < 5 * math.sqrt(out_of * share * (1 - share))

    check(int(masked.sum()), COUNT, 0.3)
    assert set(labels[masked].tolist()) == {word}
    assert (seen[~masked] == word).all()
    total = int(masked.sum())
    check(int((seen[masked] == mask).sum()), total, 0.8)
    other = seen[masked & (seen != mask) & (seen != word)]
    words = len(tokenizer) - len(special)
    check(len(other), total, 0.1 * (words - 1) / words)  # a random token may be the token itself
    assert not special & set(other.tolist())
    counts = np.bincount(other, minlength=len(tokenizer))
    drawn = [int(counts[token]) for token in range(len(tokenizer)) if token not in special and token != word]
    expected = len(other) / len(drawn)
    chi_squared = sum((count - expected) ** 2 / expected for count in drawn)
    assert chi_squared < len(drawn) + 5 * math.sqrt(2 * len(drawn)), "random tokens are not uniform"


def test_special_tokens_are_never_masked(tokenizer: Tokenizer) -> None:
    special = special_ids(tokenizer)
    word = tokenizer.encode_bare(["bird"])[0][0]
    ids = np.array([special["cls"], word, special["pad"], special["mask"], special["unk"], word, special["sep"]] * 500)
    kept = np.isin(ids, list(special.values()))
    seen, labels = Masker(tokenizer, probability=0.9, seed=3)(ids, 4)
    assert kept.sum() == 2500
    assert (seen[kept] == ids[kept]).all()
    assert (labels[kept] == IGNORE_INDEX).all()
    assert (labels[~kept] != IGNORE_INDEX).mean() > 0.8


def test_seed_and_sequence_number_determine_the_mask(tokenizer: Tokenizer) -> None:
    ids = np.arange(200) + 5
    masker = Masker(tokenizer, probability=0.3, seed=5)
    masks = [masker(ids, serial) for serial in (9, 2, 9)]
    again = Masker(tokenizer, probability=0.3, seed=5)(ids, 9)
    other = Masker(tokenizer, probability=0.3, seed=6)(ids, 9)
    for seen, labels in (masks[2], again):
        np.testing.assert_array_equal(masks[0][0], seen)
        np.testing.assert_array_equal(masks[0][1], labels)
    assert (masks[0][1] != masks[1][1]).any()
    assert (masks[0][1] != other[1]).any()
    np.testing.assert_array_equal(ids, np.arange(200) + 5)
