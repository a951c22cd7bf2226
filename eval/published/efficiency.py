"""Speed tables of the ModernBERT paper as data.

Source: ModernBERT, arXiv:2412.13663, Tables 2 (section 4), 10 and 11 (appendix F): 8,192 documents of random tokens per set,
one NVIDIA RTX 4090, means of ten runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

EFFICIENCY_SOURCE = "ModernBERT, arXiv:2412.13663, Tables 2 and 11: one NVIDIA RTX 4090, 8,192 documents a set, means of 10 runs"
"""Source of the figures, for reports."""

EFFICIENCY_SETS = ("fixed-512", "variable-256", "fixed-8192", "variable-4096")
"""The four sets in the order of the columns: short fixed, short variable, long fixed, long variable."""


@dataclass(frozen=True)
class SetStatistics:
    """A row of Table 10: one set, in tokens.

    Attributes:
        documents: Number of sequences.
        tokens: Total tokens.
        shortest: Tokens of the shortest sequence.
        longest: Tokens of the longest sequence.
    """

    documents: int
    tokens: int
    shortest: int
    longest: int


TABLE_10: Mapping[str, SetStatistics] = {
    "fixed-512": SetStatistics(8_192, 4_194_304, 512, 512),
    "variable-256": SetStatistics(8_192, 2_096_510, 32, 476),
    "fixed-8192": SetStatistics(8_192, 67_108_864, 8_192, 8_192),
    "variable-4096": SetStatistics(8_192, 33_604_913, 171, 7_624),
}
"""Name of a set -> its statistics."""


@dataclass(frozen=True)
class Runtime:
    """A cell of Table 11.

    Attributes:
        seconds: Mean of ten runs.
        deviation: Standard deviation of these runs.
    """

    seconds: float
    deviation: float


@dataclass(frozen=True)
class EncoderEfficiency:
    """A row of Tables 2 and 11; sets with a dash in the tables are missing.

    Attributes:
        model: Name in the paper.
        size: ``base`` or ``large``.
        largest_batch: Tokens per document -> documents in the largest batch that fits into 24 GB.
        kilotokens: Set -> thousands of tokens per second (Table 2), without padding.
        runtimes: Set -> seconds for the whole set (Table 11).
    """

    model: str
    size: Literal["base", "large"]
    largest_batch: Mapping[int, int]
    kilotokens: Mapping[str, float]
    runtimes: Mapping[str, Runtime]


def _row(
    model: str,
    size: Literal["base", "large"],
    batches: tuple[int, ...],
    kilotokens: tuple[float, ...],
    runtimes: tuple[tuple[float, float] | None, ...],
) -> EncoderEfficiency:
    return EncoderEfficiency(
        model=model,
        size=size,
        largest_batch=dict(zip((512, 8_192), batches, strict=False)),
        kilotokens=dict(zip(EFFICIENCY_SETS, kilotokens, strict=False)),
        runtimes={name: Runtime(*cell) for name, cell in zip(EFFICIENCY_SETS, runtimes, strict=False) if cell},
    )


# Table 11 gives a runtime for a variable set only if it was measured. A model that pads needs as long as for the fixed set, and
# Table 2 gives half of the fixed set's throughput. In some copies of the paper, three cells of the large models (4144.7, 4059.1 and
# 1433.9 seconds) have a digit swapped or missing; the values here agree with Tables 2 and 10, and a test checks that for all cells.
ENCODER_EFFICIENCY: tuple[EncoderEfficiency, ...] = (
    _row("BERT", "base", (1096,), (180.4, 90.2), ((23.3, 0.02),)),
    _row("RoBERTa", "base", (664,), (179.9, 89.9), ((23.3, 0.19),)),
    _row("DeBERTaV3", "base", (236,), (70.2, 35.1), ((59.7, 0.11),)),
    _row("NomicBERT", "base", (588, 36), (117.1, 58.5, 46.1, 23.1), ((35.8, 0.01), None, (1455.5, 0.31))),
    _row("GTE-en-MLM", "base", (640, 38), (123.7, 61.8, 46.8, 23.4), ((33.9, 1.21), None, (1434.7, 3.69))),
    _row(
        "GTE-en-MLM xformers",
        "base",
        (640, 38),
        (122.5, 128.6, 47.5, 67.3),
        ((34.2, 0.10), (16.3, 0.04), (1412.6, 3.19), (499.2, 0.11)),
    ),
    _row("ModernBERT", "base", (1604, 98), (148.1, 147.3, 123.7, 133.8), ((28.3, 0.55), (14.2, 0.01), (542.4, 0.20), (251.2, 0.32))),
    _row("BERT", "large", (792,), (54.4, 27.2), ((77.1, 1.50),)),
    _row("RoBERTa", "large", (460,), (42.0, 21.0), ((99.8, 1.79),)),
    _row("DeBERTaV3", "large", (134,), (24.6, 12.3), ((170.8, 0.06),)),
    _row("GTE-en-MLM", "large", (472, 28), (38.7, 19.3, 16.2, 8.1), ((108.4, 0.07), None, (4144.7, 0.05))),
    _row(
        "GTE-en-MLM xformers",
        "large",
        (472, 28),
        (38.5, 40.4, 16.5, 22.8),
        ((109.0, 0.14), (51.9, 0.02), (4059.1, 4.55), (1476.3, 0.94)),
    ),
    _row("ModernBERT", "large", (770, 48), (52.3, 52.9, 46.8, 49.8), ((80.1, 1.65), (39.6, 0.02), (1433.9, 0.99), (674.9, 0.15))),
)
"""All rows of Tables 2 and 11."""
