"""Tables of published papers as data, for comparison with measured results in reports. Nothing in this package is measured."""

from __future__ import annotations

from quiver.eval.published.efficiency import (
    EFFICIENCY_SETS,
    EFFICIENCY_SOURCE,
    ENCODER_EFFICIENCY,
    TABLE_10,
    EncoderEfficiency,
    Runtime,
    SetStatistics,
)
from quiver.eval.published.glue import GLUE_SOURCE, TABLE_5, TABLE_6, HyperParameters
from quiver.eval.published.retrieval import (
    BM25_FLAT,
    BM25_SOURCE,
    OVERVIEW_COLUMNS,
    RETRIEVAL_SOURCE,
    TABLE_1,
    TABLE_7,
    TABLE_8,
    TABLE_9,
    BeirTable,
    Column,
    LearningRates,
    PublishedRow,
)

__all__ = [
    "BM25_FLAT",
    "BM25_SOURCE",
    "EFFICIENCY_SETS",
    "EFFICIENCY_SOURCE",
    "ENCODER_EFFICIENCY",
    "GLUE_SOURCE",
    "OVERVIEW_COLUMNS",
    "RETRIEVAL_SOURCE",
    "TABLE_1",
    "TABLE_5",
    "TABLE_6",
    "TABLE_7",
    "TABLE_8",
    "TABLE_9",
    "TABLE_10",
    "BeirTable",
    "Column",
    "EncoderEfficiency",
    "HyperParameters",
    "LearningRates",
    "PublishedRow",
    "Runtime",
    "SetStatistics",
]
