"""Near-duplicates: the same as comparing all pairs, with the thresholds of the paper."""

from __future__ import annotations

import random

from quiver.retrieval.data.docstrings import first_of_each


def naive(texts: list[str]) -> list[int]:
    """Compare every text with every kept one, with lists as multisets; independent of the tested module."""
    kept: list[int] = []
    for row, text in enumerate(texts):
        words = text.split()
        for earlier in kept:
            others = texts[earlier].split()
            overlap = sum(min(words.count(word), others.count(word)) for word in set(words))
            sets = len(set(words) & set(others)) / max(1, len(set(words) | set(others)))
            multisets = overlap / max(1, len(words) + len(others) - overlap)
            if sets >= 0.8 and multisets >= 0.7:
                break
        else:
            kept.append(row)
    return kept


def test_near_duplicates_agree_with_comparing_all_pairs() -> None:
    rng = random.Random(5)
    texts = []
    for _ in range(60):
        words = rng.sample([f"w{number}" for number in range(40)], rng.randint(1, 20))
        texts.append(" ".join(words))
        for _ in range(4):
            variant = words[rng.randint(0, 1) :] + rng.choices(words, k=rng.randint(0, 6))
            if rng.random() < 0.5:
                variant[:1] = [f"w{rng.randrange(40)}"]
            texts.append(" ".join(variant))
    kept = first_of_each(texts)
    assert kept == naive(texts)
    assert 100 < len(kept) < 200, "the comparison is of use only where both outcomes are frequent"


def test_a_set_similarity_of_exactly_four_fifths_is_a_duplicate() -> None:
    assert first_of_each(["a b c d", "a b c d e"]) == [0]  # 4 shared of 5
    assert first_of_each(["a b c", "a b c d"]) == [0, 1]  # 3 shared of 4


def test_repeated_words_count_in_the_multiset() -> None:
    assert first_of_each(["a b c d e", "a b c d e e e"]) == [0]  # 5 of 7 is above 0.7
    assert first_of_each(["a b c d e", "a b c d e e e e"]) == [0, 1]  # 5 of 8 is below


def test_keywords_numbers_and_layout_do_not_count() -> None:
    assert first_of_each(["def f(x):\n    return x + 1", "def f(x): yield x - 2"]) == [0]


def test_texts_without_identifiers_are_no_duplicates() -> None:
    assert first_of_each(["1 + 1", "1 + 1", "", ""]) == [0, 1, 2, 3]
    assert first_of_each([]) == []
