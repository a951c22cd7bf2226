"""Which of a query's candidates become its hard negatives: copies out, a range of ranks, margins below the positive, the choice.

Nothing here knows of texts, models or files: a candidate is a row, and its score.

Shapes: n candidates of one query, best first.
Source: NV-Retriever, arXiv:2407.15831, section 3: TopK-PercPos (95 % of the positive's score), TopK-MarginPos, TopK-Abs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from quiver.encoder.errors import InputError


class MarginKind(NamedTuple):
    """What the value of a margin means.

    Attributes:
        limit: The highest score that a negative may have, from the positive's score and the value.
        allowed: Whether the value is one.
        bounds: The same in words.
    """

    limit: Callable[[float, float], float]
    allowed: Callable[[float], bool]
    bounds: str


MARGINS: dict[str, MarginKind] = {
    # Of a score below zero a share would lie above it: the distance is what counts.
    "perc-pos": MarginKind(
        lambda positive, share: positive - (1 - share) * abs(positive),
        lambda share: 0 < share <= 1,
        "a share of the positive's score, above 0 and at most 1 (0.95 for 95 %)",
    ),
    "margin-pos": MarginKind(
        lambda positive, margin: positive - margin, lambda margin: margin >= 0, "a distance from the positive's score, at least 0"
    ),
    "max-score": MarginKind(lambda positive, limit: limit, math.isfinite, "a finite score"),
}
"""Name -> what its value is, beside the positive's score."""

NO_MARGIN = "none"


class Margin(NamedTuple):
    """One condition that a negative has to meet: a key of ``MARGINS`` and its value."""

    name: str
    value: float

    def limit(self, positive: float) -> float:
        """The highest score that a negative may have beside a positive with this one."""
        return MARGINS[self.name].limit(positive, self.value)


PERC_POS = Margin("perc-pos", 0.95)
"""What NV-Retriever found best: a negative scores at most 95 % of what the positive does."""


class Ranks(NamedTuple):
    """The first and the last rank of the candidates, from 1; positives and copies are not counted."""

    first: int
    last: int


TOP_200 = Ranks(1, 200)
"""The usual range: the margin keeps what is too good, and ranks need not."""


class Ranked(NamedTuple):
    """Documents of one query, best first.

    Attributes:
        rows: (n,) int64.
        scores: (n,) float32.
    """

    rows: NDArray[np.int64]
    scores: NDArray[np.float32]

    def at(self, places: NDArray[np.intp]) -> Ranked:
        """Those in the places given."""
        return Ranked(self.rows[places], self.scores[places])


@dataclass(frozen=True)
class Rules:
    """How negatives are chosen.

    Attributes:
        negatives: Number wanted for each query.
        ranks: Ranks they are taken from.
        margins: What all of them have to meet.
        choice: The best of what is left, or any of it.
        seed: Of the random choice; each query draws by itself.
    """

    negatives: int = 7
    ranks: Ranks = TOP_200
    margins: tuple[Margin, ...] = (PERC_POS,)
    choice: Literal["top", "random"] = "top"
    seed: int = 42

    def __post_init__(self) -> None:
        if self.negatives < 1:
            raise InputError(f"negatives must be >= 1, got {self.negatives}")
        if not 1 <= self.ranks.first <= self.ranks.last:
            raise InputError(f"ranks must be FIRST-LAST with 1 <= FIRST <= LAST, got {self.ranks.first}-{self.ranks.last}")
        width = self.ranks.last - self.ranks.first + 1
        if width < self.negatives:
            raise InputError(f"ranks {self.ranks.first}-{self.ranks.last} hold {width} documents, fewer than the {self.negatives} wanted")
        for margin in self.margins:
            kind = MARGINS[margin.name]
            if not kind.allowed(margin.value):
                raise InputError(f"the margin {margin.name} is {kind.bounds}; got {margin.value:g}")


@dataclass(frozen=True)
class Negatives:
    """What was chosen for one query, and what was not.

    Attributes:
        chosen: The negatives, best first.
        suspects: Candidates that a margin left out, best first: they may be unlabelled positives.
        ranks: Their ranks.
        candidates: Documents within the ranks.
        left_out: Documents found that have no rank.
        dropped: Margin -> candidates that it left out; one counts for the first margin that it fails.
    """

    chosen: Ranked
    suspects: Ranked
    ranks: NDArray[np.int64]
    candidates: int
    left_out: int
    dropped: dict[str, int]


def rankable(same: NDArray[np.int64], excluded: NDArray[np.int64]) -> NDArray[np.intp]:
    """Places of the documents that have a rank, among those that were found.

    Args:
        same: (n,) for each document found the first document of the corpus that is the same.
        excluded: Values of ``same`` that are no negatives: of the positives, of the query itself, of a blank text.

    Example:
        >>> rankable(np.array([4, 2, 2, 7]), np.array([4]))
        array([1, 3])
    """
    first = np.zeros(len(same), bool)
    first[np.unique(same, return_index=True)[1]] = True
    return np.flatnonzero(first & ~np.isin(same, excluded))


def choose_negatives(found: Ranked, ranked: NDArray[np.intp], positive_score: float, rules: Rules, *, query: int) -> Negatives:
    """Choose the negatives of one query.

    Args:
        found: What the search found, positives among it, no deeper than the last rank.
        ranked: What `rankable` gives for it.
        positive_score: Of the positive; of several the lowest, which is the strictest.
        rules: What is chosen.
        query: Number of the query, of which its random choice depends.

    Example:
        >>> found = Ranked(np.array([4, 2, 7, 9]), np.array([0.9, 0.88, 0.7, 0.6], np.float32))
        >>> rules = Rules(negatives=1, ranks=Ranks(1, 3))
        >>> picked = choose_negatives(found, rankable(found.rows, np.array([4])), 0.9, rules, query=0)
        >>> picked.chosen.rows.tolist(), picked.suspects.rows.tolist(), picked.dropped
        ([7], [2], {'perc-pos': 1})
    """
    places = ranked[rules.ranks.first - 1 : rules.ranks.last]
    candidates = found.at(places)
    kept = np.ones(len(places), bool)
    dropped: dict[str, int] = {}
    for margin in rules.margins:
        passes = candidates.scores.astype(np.float64) <= margin.limit(positive_score)
        dropped[margin.name] = int((kept & ~passes).sum())
        kept &= passes
    left = np.flatnonzero(kept)
    if rules.choice == "random" and len(left) > rules.negatives:
        generator = np.random.default_rng((rules.seed, query))
        left = np.sort(generator.choice(left, rules.negatives, replace=False))
    out = np.flatnonzero(~kept)
    return Negatives(
        chosen=candidates.at(left[: rules.negatives]),
        suspects=candidates.at(out),
        ranks=out + rules.ranks.first,
        candidates=len(places),
        left_out=len(found.rows) - len(ranked),
        dropped=dropped,
    )


def parse_ranks(text: str) -> Ranks:
    """Ranks as the command line has them.

    Raises:
        InputError: Not ``FIRST-LAST``.

    Example:
        >>> parse_ranks("10-200")
        Ranks(first=10, last=200)
    """
    first, dash, last = text.partition("-")
    if not dash or not first.isdecimal() or not last.isdecimal():
        raise InputError(f"ranks must be FIRST-LAST, as in 10-200, got {text!r}")
    return Ranks(int(first), int(last))


def parse_margins(texts: Sequence[str]) -> tuple[Margin, ...]:
    """Margins as the command line has them: ``NAME=VALUE``, or ``none`` alone.

    Raises:
        InputError: An unknown name (lists those there are), no number, or ``none`` beside others.

    Example:
        >>> parse_margins(["perc-pos=0.9", "max-score=0.7"])
        (Margin(name='perc-pos', value=0.9), Margin(name='max-score', value=0.7))
    """
    if list(texts) == [NO_MARGIN]:
        return ()
    margins: list[Margin] = []
    for text in texts:
        name, equals, number = text.partition("=")
        if name not in MARGINS or not equals:
            raise InputError(f"a margin is one of {', '.join(f'{known}=VALUE' for known in MARGINS)}, or {NO_MARGIN} alone; got {text!r}")
        if name in (margin.name for margin in margins):
            raise InputError(f"the margin {name} is given twice")
        margins.append(Margin(name, _number(text, number)))
    return tuple(margins)


def _number(text: str, number: str) -> float:
    try:
        value = float(number)
    except ValueError as error:
        raise InputError(f"a margin's value must be a number, got {text!r}") from error
    if not math.isfinite(value):
        raise InputError(f"a margin's value must be finite, got {text!r}")
    return value
