"""Near-duplicate texts of code: which of a list are new, and which repeat an earlier one almost word for word.

Two texts are near-duplicates if the Jaccard similarity of their sets of identifiers is at least 0.8 and that of their
multisets at least 0.7. An identifier is a run of letters, digits and underscores that starts with no digit and is no
Python keyword; words in comments and strings count as well. The search is exact, not hashed: two sets that similar must
share one of their few rarest members, so only texts that do are compared.

Source: Allamanis 2019, arXiv:1812.06469 (measure and thresholds; CodeSearchNet uses the method, but joins duplicates of
duplicates into one group where we keep the first of each); the prefix filter is Chaudhuri, Ganti and Kaushik 2006, "A
primitive operator for similarity joins in data cleaning".
"""

from __future__ import annotations

import keyword
import math
import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from fractions import Fraction

SET_SIMILARITY = Fraction(8, 10)
"""Least Jaccard similarity of two sets of identifiers. A fraction: 0.8 times a count must round up exactly."""

MULTISET_SIMILARITY = Fraction(7, 10)
"""Least Jaccard similarity of two multisets of identifiers."""

_IDENTIFIER = re.compile(r"[A-Za-z_]\w*")


def first_of_each(texts: Sequence[str]) -> list[int]:
    """Rows of the texts that are no near-duplicate of an earlier row in this list, ascending.

    No two of the rows that come back are near-duplicates of each other. A text without identifiers repeats nothing.

    Args:
        texts: Source code, in order of preference.

    Example:
        >>> first_of_each(["total = a + b + c + d", "total = a+b + c + d # sum", "total = x * y", "TOTAL = a + b + c + d"])
        [0, 2, 3]
    """
    bags = [Counter(word for word in _IDENTIFIER.findall(text) if not keyword.iskeyword(word)) for text in texts]
    frequency = Counter(word for bag in bags for word in bag)
    kept: list[int] = []
    by_rare_word: defaultdict[str, list[int]] = defaultdict(list)
    for row, bag in enumerate(bags):
        words = sorted(bag, key=lambda word: (frequency[word], word))
        # Two sets that share at least ceil(t * n) of n words share one of the first n - ceil(t * n) + 1 in any common order.
        rare = words[: len(words) - math.ceil(SET_SIMILARITY * len(words)) + 1]
        candidates = {earlier for word in rare for earlier in by_rare_word[word]}
        if any(_similar(bag, bags[earlier]) for earlier in candidates):
            continue
        kept.append(row)
        for word in rare:
            by_rare_word[word].append(row)
    return kept


def _similar(first: Counter[str], second: Counter[str]) -> bool:
    shared = len(first.keys() & second.keys())
    if shared < SET_SIMILARITY * (len(first) + len(second) - shared):
        return False
    overlap = sum((first & second).values())
    return overlap >= MULTISET_SIMILARITY * (first.total() + second.total() - overlap)
