"""GLUE results of the ModernBERT paper as data: scores on the development sets, and ModernBERT's fine-tuning settings.

Source: ModernBERT, arXiv:2412.13663, Tables 5 and 6 (appendix E.1), read from two copies of the paper with identical cells. According to
the caption, the rows of the other encoders come from Liu et al. 2019, Table 8 (RoBERTa), Portes et al. 2023, Table S3 (BERT, MosaicBERT),
Nussbaum et al. 2024, Table 2 (NomicBERT), Zhang et al. 2024, Table 21 (GTE-en-MLM), Qiang et al. 2024, Table 2 (DeBERTaV3-base), and He
et al. 2023, Table 3 (DeBERTaV3-large).

Table 5 has no averages. Table 1 has them, for all rows except MosaicBERT's. They are the means of the eight columns, rounded to one
decimal, except in three rows (`AVERAGES_OFF_BY_MORE_THAN_ROUNDING`), for which the paper's averages are kept.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from quiver.eval.published.retrieval import TABLE_1, PublishedRow, Size

GLUE_SOURCE = "ModernBERT, arXiv:2412.13663, Table 5; averages from its Table 1"
"""Source of the figures, for reports."""

GLUE_COLUMNS = ("CoLA", "SST-2", "MRPC", "STS-B", "QQP", "MNLI", "QNLI", "RTE")
"""Columns of Table 5."""

_AVERAGES = {row.name: row.scores["GLUE"] for row in TABLE_1}

AVERAGES_OFF_BY_MORE_THAN_ROUNDING: frozenset[str] = frozenset({"DeBERTaV3-base", "NomicBERT-base", "ModernBERT-large"})
"""Rows whose published average is 0.1 or 0.2 below the mean of their columns."""


def _row(model: str, size: Size, points: tuple[float, ...]) -> PublishedRow:
    row = PublishedRow(model, size, dict(zip(GLUE_COLUMNS, points, strict=True)))
    return PublishedRow(model, size, row.scores, _AVERAGES.get(row.name))


TABLE_5: tuple[PublishedRow, ...] = (
    _row("BERT", "base", (59.0, 93.1, 89.5, 89.4, 91.4, 85.4, 91.6, 78.2)),
    _row("RoBERTa", "base", (63.6, 94.8, 90.2, 91.2, 91.9, 87.6, 92.8, 78.7)),
    _row("DeBERTaV3", "base", (69.2, 95.6, 89.5, 91.6, 92.4, 90.0, 94.0, 83.8)),
    _row("MosaicBERT-128", "base", (58.2, 93.5, 89.0, 90.3, 92.0, 85.6, 91.4, 83.0)),
    _row("NomicBERT", "base", (50.0, 93.0, 88.0, 90.0, 92.0, 86.0, 92.0, 82.0)),
    _row("GTE-en-MLM", "base", (57.0, 93.4, 92.1, 90.2, 88.8, 86.7, 91.9, 84.8)),
    _row("ModernBERT", "base", (65.1, 96.0, 92.2, 91.8, 92.1, 89.1, 93.9, 87.4)),
    _row("BERT", "large", (56.2, 93.3, 87.8, 90.6, 90.9, 86.3, 92.8, 83.8)),
    _row("RoBERTa", "large", (68.0, 96.4, 90.9, 92.4, 92.2, 90.2, 94.7, 86.6)),
    _row("DeBERTaV3", "large", (75.3, 96.9, 92.2, 93.0, 93.3, 91.8, 96.0, 92.7)),
    _row("GTE-en-MLM", "large", (60.4, 95.1, 93.5, 91.4, 89.2, 89.2, 93.9, 88.1)),
    _row("ModernBERT", "large", (71.4, 97.1, 91.7, 92.8, 92.7, 90.8, 95.2, 92.1)),
)
"""Rows of Table 5 in the paper's order; their averages are those of Table 1."""


@dataclass(frozen=True)
class HyperParameters:
    """A cell of Table 6.

    Attributes:
        learning_rate: Peak learning rate.
        weight_decay: Weight decay, in the convention of the release's optimiser.
        epochs: Maximum number of epochs; runs were stopped early.
    """

    learning_rate: float
    weight_decay: float
    epochs: int


TABLE_6: Mapping[tuple[str, Size], HyperParameters] = {
    ("CoLA", "base"): HyperParameters(8e-5, 1e-6, 5),
    ("MNLI", "base"): HyperParameters(5e-5, 5e-6, 1),
    ("MRPC", "base"): HyperParameters(5e-5, 5e-6, 10),
    ("QNLI", "base"): HyperParameters(8e-5, 5e-6, 2),
    ("QQP", "base"): HyperParameters(5e-5, 5e-6, 10),
    ("RTE", "base"): HyperParameters(5e-5, 1e-5, 3),
    ("SST-2", "base"): HyperParameters(8e-5, 1e-5, 2),
    ("STS-B", "base"): HyperParameters(8e-5, 5e-6, 10),
    ("CoLA", "large"): HyperParameters(3e-5, 8e-6, 5),
    ("MNLI", "large"): HyperParameters(3e-5, 1e-5, 1),
    ("MRPC", "large"): HyperParameters(8e-5, 5e-6, 2),
    ("QNLI", "large"): HyperParameters(3e-5, 5e-6, 2),
    ("QQP", "large"): HyperParameters(5e-5, 8e-6, 2),
    ("RTE", "large"): HyperParameters(5e-5, 8e-6, 3),
    ("SST-2", "large"): HyperParameters(1e-5, 1e-6, 3),
    ("STS-B", "large"): HyperParameters(8e-5, 1e-5, 10),
}
"""(task, size) -> settings of ModernBERT's fine-tuning."""
