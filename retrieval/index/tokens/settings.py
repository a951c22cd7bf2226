"""Settings and search parameters of ``ivf-tokens``, and their defaults by the size of an index.

Shapes: n vectors of an index, K centroids, k hits.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated

from quiver.encoder.schema import Field, Positive
from quiver.retrieval.index.engines import IVF_TOKENS, EngineSettings, Preset
from quiver.retrieval.index.quantization import Grouping
from quiver.retrieval.index.tokens.token_quantizer import Bits

# From so many vectors on, k-means over all of them takes longer than the rest of the build.
_GROUPED = 1_000_000
# From so many on, a query token has more occurrences than a thousand that are worth meeting.
_MET_MORE = 5_000_000
# Vectors a codec is trained on: a centroid learns from 64 at most, and needs half of them.
_SAMPLE_A_CENTROID = 32
_SAMPLE = 131_072

# Below ``fast``: parts of its search_params, and what they do to the slack.
_CHEAP = ((0.25, -1.0), (0.5, -0.5))
# Above ``balanced``, each step multiplies the candidates by two, and lists and tokens by its root: of 2 million tokens that lie almost
# anywhere it finds 0.93 of the best in the time in which twice as much of everything finds 0.89. Each step adds to the slack.
_STEP, _SLACK = 2.0, 0.25


class TokenSettings(EngineSettings):
    """Settings of ``ivf-tokens``.

    Attributes:
        bits: Bits per coordinate of the fine codes: 2, 3, 3.5 or 4.
        centroids: Approximate number K of inverted lists; None chooses by size.
        clustering: ``tokens``, ``two-level`` or ``flat``; None chooses by size and by whether the model provides token ids.
        pool_factor: Number of token vectors that one pooled vector replaces on average; 1 keeps all.
    """

    engine = IVF_TOKENS
    bits: Bits = 4
    centroids: Positive | None = None
    clustering: Grouping | None = None
    pool_factor: Positive = 1


@dataclass(frozen=True)
class TokenParams:
    """Search parameters of ``ivf-tokens``.

    Attributes:
        nprobe: Inverted lists searched per query token.
        tokens_k: Number k' of document tokens to find per query token.
        candidates: Number of documents whose scores are estimated from their coarse parts.
        slack: Final scores are computed best estimate first, and the search stops where the next would have to beat its estimate by more
            than so many standard deviations to be among the best.
        exhaustive: Compute the final scores of all documents; the other parameters are ignored.
    """

    nprobe: Positive
    tokens_k: Positive
    candidates: Positive
    slack: Annotated[float, Field(ge=0)] = 3.5
    exhaustive: bool = False


def default_centroids(vectors: int) -> int:
    """Default number of centroids: a power of two near 4 sqrt(n), or near 6 sqrt(n) from a million vectors on.

    More of them make shorter lists and smaller errors, and cost bytes: 256 each for 128 dimensions on the disk, and a list that is not
    full. Never more than 65,536, whose numbers fit into two bytes and which a query can be compared with one by one.

    Example:
        >>> default_centroids(282_550), default_centroids(2_600_000), default_centroids(11_000_000)
        (2048, 8192, 16384)
    """
    factor = 4 if vectors < _GROUPED else 6
    exponent = round(math.log2(factor * max(vectors, 1) ** 0.5))
    return int(2 ** min(max(exponent, 0), 16))


def default_grouping(vectors: int, *, token_ids: bool) -> Grouping:
    """Default clustering for a number of vectors."""
    if vectors < _GROUPED:
        return "flat"
    return "tokens" if token_ids else "two-level"


def sample_size(vectors: int) -> int:
    """Number of vectors to train a codec on."""
    return min(vectors, max(_SAMPLE, _SAMPLE_A_CENTROID * default_centroids(vectors)))


def preset_params(name: Preset, *, k: int, vectors: int) -> TokenParams:
    """Search parameters of a preset for k hits in an index of ``vectors`` vectors."""
    # Candidates matter more than lists: to estimate one costs an eighth of its final score.
    nprobe, tokens_k, candidates, slack = 32, 500, 500, 3.0
    if name == "fast":
        nprobe, tokens_k, candidates, slack = 16, 300, 300, 3.0
    if vectors >= _MET_MORE:
        tokens_k *= 2
    if k > 10:  # a hundred hits are spread over more lists
        nprobe, tokens_k, candidates = 2 * nprobe, 2 * tokens_k, max(20 * k, candidates)
    return TokenParams(nprobe, tokens_k, candidates, slack, exhaustive=name == "exact")


def param_grid(fast: TokenParams, balanced: TokenParams, exact: TokenParams, *, k: int, lists: int, documents: int) -> list[TokenParams]:
    """The parameter grid, cheap to exhaustive, without duplicates: fractions of ``fast``, the presets, steps from ``balanced`` upward.

    Args:
        fast: Parameters of the preset; the grid begins with a quarter and a half of them.
        balanced: Parameters of the preset; they are increased until all documents are candidates.
        exact: Parameters of the preset.
        k: Number of hits, the lower limit of the candidates.
        lists: Number of lists of the index, the upper limit of nprobe.
        documents: Number of documents of the largest segment.
    """

    def scaled(params: TokenParams, factor: float, candidates: float, slack: float) -> TokenParams:
        return TokenParams(
            nprobe=min(lists, max(1, round(factor * params.nprobe))),
            tokens_k=max(1, round(factor * params.tokens_k)),
            candidates=max(k, round(candidates * params.candidates)),
            slack=params.slack + slack,
        )

    cheap = [scaled(fast, factor, factor, slack) for factor, slack in _CHEAP]
    # Two steps at least: which documents are met says more than how many there are.
    steps = max(2, math.ceil(math.log(max(1.0, documents / balanced.candidates), _STEP)))
    thorough = [scaled(balanced, _STEP ** (step / 2), _STEP**step, _SLACK * step) for step in range(1, steps + 1)]
    return list(dict.fromkeys([*cheap, fast, balanced, *thorough, exact]))
