"""Tables of published papers as data, for comparison with measured results in reports. Nothing in this module is measured.

Source: ModernBERT, arXiv:2412.13663, read from two copies of the paper:

- Tables 1 (section 3), 7 and 8 (appendix E.2): retrieval on BEIR, long text and code, nDCG@10 in points (GLUE in Table 1 in its own
  measures). All cells of Tables 7 and 8 agree in both copies, and all cells of Table 1 except one, which is illegible in one copy (CSN of
  the base ModernBERT, 56.4 in the other).
- Table 5 (appendix E.1): GLUE scores on the development sets. According to the caption, the rows of the other encoders come from Liu et al.
  2019, Table 8 (RoBERTa), Portes et al. 2023, Table S3 (BERT, MosaicBERT), Nussbaum et al. 2024, Table 2 (NomicBERT), Zhang et al. 2024,
  Table 21 (GTE-en-MLM), Qiang et al. 2024, Table 2 (DeBERTaV3-base), and He et al. 2023, Table 3 (DeBERTaV3-large).

The scores on KorQuAD 1.0 are those of Jeong et al., HCLT 2023, Table 2.

An average in Tables 7 and 8 is the mean of its fifteen columns, rounded to one decimal. In four rows the rounded columns give 0.1 more
or less (`AVERAGES_OFF_BY_ROUNDING`). The paper's averages are kept; Table 1 repeats them. Table 5 has no averages. Table 1 has them, for
all rows except MosaicBERT's: the means of the eight columns, rounded to one decimal, but 0.1 or 0.2 lower for DeBERTaV3-base,
NomicBERT-base and ModernBERT-large, for which the paper's averages are kept.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

RETRIEVAL_SOURCE = "ModernBERT, arXiv:2412.13663, Tables 1, 7 and 8"
"""Source of the figures, for reports."""

Size: TypeAlias = Literal["base", "large"]
"""Sizes of the paper's encoders; NomicBERT has only one."""


@dataclass(frozen=True)
class Column:
    """A column of Table 7 or 8.

    Attributes:
        title: Title in the paper.
        data_set: The collection, or the group of collections, in the registry.
        splits: Splits to compare with, in order of preference: the first is that of the published scores, later ones replace it if it was
            not measured.
    """

    title: str
    data_set: str
    splits: tuple[str, ...] = ("test",)


@dataclass(frozen=True)
class PublishedRow:
    """An encoder's row of a table."""

    model: str
    size: Size
    scores: Mapping[str, float]
    average: float | None = None

    @property
    def name(self) -> str:
        """Name in reports: ``ModernBERT-base``."""
        return f"{self.model}-{self.size}"


@dataclass(frozen=True)
class BeirTable:
    """Table 7 or 8."""

    number: int
    what: str
    columns: tuple[Column, ...]
    rows: tuple[PublishedRow, ...]


_BEFORE_MSMARCO = (
    Column("NFCorpus", "nfcorpus"),
    Column("SciFact", "scifact"),
    Column("TREC-Covid", "trec-covid"),
    Column("FiQA", "fiqa"),
    Column("ArguAna", "arguana"),
    Column("Climate-FEVER", "climate-fever"),
    Column("DBPedia", "dbpedia-entity"),
    Column("FEVER", "fever"),
    Column("HotpotQA", "hotpotqa"),
)
_AFTER_MSMARCO = (
    Column("NQ", "nq"),
    Column("Quora", "quora"),
    Column("SciDocs", "scidocs"),
    Column("Touche2020", "webis-touche2020"),
    Column("CQADupstack", "cqadupstack"),
)
# The paper does not name the split of MS MARCO. Table 8 has 39.4 to 47.0, the range of late interaction on the dev split. Table 7 has
# 25.2 to 64.9, with single-vector models about twelve points above ColBERTs: values typical of TREC DL 2019, which is BEIR's test split
# (BM25 has 22.8 on dev and 47.7 on test, github.com/beir-cellar/beir/issues/143).
SINGLE_VECTOR_COLUMNS = (*_BEFORE_MSMARCO, Column("MSMARCO", "msmarco", ("test", "dev")), *_AFTER_MSMARCO)
"""Columns of Table 7; the split of MS MARCO is inferred."""

MULTI_VECTOR_COLUMNS = (*_BEFORE_MSMARCO, Column("MSMARCO", "msmarco", ("dev",)), *_AFTER_MSMARCO)
"""Columns of Table 8."""

MSMARCO_NOTE = (
    "The paper does not name the split of its MS MARCO figures. Judging by the values, Table 7 uses TREC DL 2019"
    " (BEIR's test split) and Table 8 the"
    " dev split, which is BEIR's own choice. A measured row of Table 7 has the test split where it was measured and the dev split"
    " otherwise: its MS MARCO, and its average, are then not comparable with the paper's."
)
"""Note on the MS MARCO column, for reports."""

LONG_TEXT = Column("MLDR", "mldr-en")
"""The English part of MLDR, searched in all of its documents."""

CODE = (Column("CSN", "coir-codesearchnet"), Column("SQA", "coir-stackoverflow-qa"))
"""CodeSearchNet (mean over CoIR's six languages) and StackOverflow-QA, both of CoIR."""

OVERVIEW_COLUMNS = ("DPR BEIR", "DPR MLDR OOD", "DPR MLDR ID", "ColBERT BEIR", "ColBERT MLDR OOD", "GLUE", "CSN", "SQA")
"""Columns of Table 1: CSN is CodeSearchNet and SQA StackOverflow-QA, both as in CoIR; ID means fine-tuned on MLDR's training data."""


def _beir(model: str, size: Size, points: tuple[float, ...]) -> PublishedRow:
    *scores, average = points
    titles = [column.title for column in SINGLE_VECTOR_COLUMNS]
    return PublishedRow(model, size, dict(zip(titles, scores, strict=True)), average)


def _overview(model: str, size: Size, points: tuple[float, ...]) -> PublishedRow:
    return PublishedRow(model, size, dict(zip(OVERVIEW_COLUMNS, points, strict=True)))


TABLE_1: tuple[PublishedRow, ...] = (
    _overview("BERT", "base", (38.9, 23.9, 32.2, 49.0, 28.1, 84.7, 41.2, 59.5)),
    _overview("RoBERTa", "base", (37.7, 22.9, 32.8, 48.7, 28.2, 86.4, 44.3, 59.6)),
    _overview("DeBERTaV3", "base", (20.2, 5.4, 13.4, 47.1, 21.9, 88.1, 17.5, 18.6)),
    _overview("NomicBERT", "base", (41.0, 26.7, 30.3, 49.9, 61.3, 84.0, 41.6, 61.4)),
    _overview("GTE-en-MLM", "base", (41.4, 34.3, 44.4, 48.2, 69.3, 85.6, 44.9, 71.4)),
    _overview("ModernBERT", "base", (41.6, 27.4, 44.0, 51.3, 80.2, 88.4, 56.4, 73.6)),
    _overview("BERT", "large", (38.9, 23.3, 31.7, 49.5, 28.5, 85.2, 41.6, 60.8)),
    _overview("RoBERTa", "large", (41.4, 22.6, 36.1, 49.8, 28.8, 88.9, 47.3, 68.1)),
    _overview("DeBERTaV3", "large", (25.6, 7.1, 19.2, 46.7, 23.0, 91.4, 21.2, 19.7)),
    _overview("GTE-en-MLM", "large", (42.5, 36.4, 48.9, 50.7, 71.3, 87.6, 40.5, 66.9)),
    _overview("ModernBERT", "large", (44.0, 34.3, 48.6, 52.4, 80.4, 90.4, 59.5, 83.9)),
)
"""Table 1: all tasks; the BEIR columns are the averages of Tables 7 and 8."""

TABLE_7 = BeirTable(
    7,
    "single-vector retrieval",
    SINGLE_VECTOR_COLUMNS,
    (
        _beir("BERT", "base", (24.3, 51.3, 49.5, 22.8, 31.6, 21.9, 28.2, 64.1, 47.9, 58.5, 37.9, 83.1, 12.9, 20.4, 28.5, 38.9)),
        _beir("RoBERTa", "base", (20.4, 45.6, 52.2, 26.1, 35.2, 22.3, 23.1, 60.2, 45.0, 56.0, 34.7, 84.0, 11.4, 21.1, 28.8, 37.7)),
        _beir("DeBERTaV3", "base", (8.0, 22.6, 48.4, 11.5, 26.1, 9.7, 5.3, 17.3, 8.0, 25.2, 12.5, 74.7, 5.4, 14.2, 14.2, 20.2)),
        _beir("NomicBERT", "base", (25.7, 52.0, 63.0, 23.5, 35.5, 22.9, 30.3, 65.0, 48.0, 60.6, 42.6, 84.5, 12.6, 19.0, 29.2, 41.0)),
        _beir("GTE-en-MLM", "base", (26.3, 54.1, 49.7, 30.1, 35.7, 24.5, 28.9, 66.5, 49.9, 63.1, 41.7, 85.2, 14.1, 19.1, 32.5, 41.4)),
        _beir("ModernBERT", "base", (23.7, 57.0, 72.1, 28.8, 35.7, 23.6, 23.8, 59.9, 46.1, 61.6, 39.5, 85.9, 12.5, 20.8, 33.1, 41.6)),
        _beir("BERT", "large", (23.3, 50.7, 48.9, 24.0, 35.2, 22.1, 27.2, 61.7, 45.9, 59.8, 39.5, 83.6, 13.0, 19.5, 28.9, 38.9)),
        _beir("RoBERTa", "large", (23.9, 53.4, 55.0, 33.4, 37.6, 23.5, 25.4, 65.2, 47.1, 60.4, 43.3, 85.8, 13.7, 21.1, 33.0, 41.4)),
        _beir("DeBERTaV3", "large", (9.6, 31.2, 56.6, 15.8, 26.3, 14.4, 6.8, 29.4, 15.3, 32.4, 21.5, 79.1, 7.0, 18.8, 19.9, 25.6)),
        _beir("GTE-en-MLM", "large", (27.7, 57.6, 48.4, 34.0, 35.3, 24.0, 27.0, 65.4, 50.8, 64.1, 44.9, 85.3, 15.6, 21.4, 35.5, 42.5)),
        _beir("ModernBERT", "large", (26.2, 60.4, 74.1, 33.1, 38.2, 20.5, 25.1, 62.7, 49.2, 64.9, 45.5, 86.5, 13.8, 23.1, 36.5, 44.0)),
    ),
)
"""Table 7: nDCG@10 on BEIR with one vector per text."""

TABLE_8 = BeirTable(
    8,
    "multi-vector retrieval",
    MULTI_VECTOR_COLUMNS,
    (
        _beir("BERT", "base", (34.2, 71.5, 69.9, 35.0, 49.9, 19.2, 42.4, 83.1, 69.8, 45.4, 55.4, 84.1, 14.7, 27.0, 34.2, 49.0)),
        _beir("RoBERTa", "base", (33.7, 70.8, 69.8, 37.4, 48.9, 18.9, 39.3, 81.2, 66.1, 43.7, 56.3, 83.6, 14.8, 31.7, 34.4, 48.7)),
        _beir("DeBERTaV3", "base", (31.9, 68.5, 75.5, 35.5, 46.5, 18.3, 35.6, 78.1, 65.3, 39.5, 50.4, 83.7, 14.6, 31.1, 32.3, 47.1)),
        _beir("NomicBERT", "base", (35.5, 72.2, 73.5, 35.9, 44.8, 19.0, 43.6, 83.9, 71.1, 46.3, 58.5, 84.0, 15.1, 31.3, 33.9, 49.9)),
        _beir("GTE-en-MLM", "base", (35.1, 71.5, 69.4, 36.0, 48.5, 17.4, 41.2, 79.9, 67.0, 44.4, 52.8, 85.2, 15.0, 25.4, 34.6, 48.2)),
        _beir("ModernBERT", "base", (35.2, 73.0, 80.5, 38.0, 49.1, 22.2, 42.0, 85.8, 70.4, 45.4, 57.1, 86.3, 16.0, 33.9, 35.1, 51.3)),
        _beir("BERT", "large", (34.6, 72.9, 68.8, 35.5, 48.3, 19.7, 42.4, 83.6, 70.7, 45.9, 57.2, 84.8, 15.2, 28.9, 34.9, 49.5)),
        _beir("RoBERTa", "large", (35.0, 72.3, 74.4, 38.7, 50.0, 19.6, 41.0, 82.0, 66.2, 44.7, 57.5, 85.9, 15.3, 27.9, 36.0, 49.8)),
        _beir("DeBERTaV3", "large", (31.7, 70.2, 73.3, 35.0, 46.2, 18.0, 36.5, 79.0, 63.2, 39.4, 51.6, 81.1, 14.1, 28.6, 33.1, 46.7)),
        _beir("GTE-en-MLM", "large", (35.2, 72.4, 67.2, 39.6, 50.3, 20.8, 44.4, 82.5, 72.0, 47.0, 60.1, 86.4, 15.9, 30.9, 35.4, 50.7)),
        _beir("ModernBERT", "large", (36.0, 73.2, 81.3, 40.3, 50.3, 22.3, 44.1, 85.8, 72.5, 46.0, 59.9, 86.1, 16.9, 34.6, 35.9, 52.4)),
    ),
)
"""Table 8: nDCG@10 on BEIR with ColBERT models."""

AVERAGES_OFF_BY_ROUNDING: frozenset[tuple[int, str]] = frozenset(
    {(7, "RoBERTa-large"), (8, "BERT-base"), (8, "BERT-large"), (8, "ModernBERT-large")}
)
"""(table, row) pairs whose published average is not the mean of the rounded columns, rounded to one decimal."""


BM25_SOURCE = "pyserini's two-click reproductions, BM25 over flat BEIR indexes, github.com/castorini/pyserini"
"""Source of `BM25_FLAT`, for reports."""

BM25_FLAT: Mapping[str, float] = {
    "trec-covid": 59.5,
    "nfcorpus": 32.2,
    "nq": 30.6,
    "hotpotqa": 63.3,
    "fiqa": 23.6,
    "arguana": 39.7,
    "webis-touche2020": 44.2,
    "cqadupstack": 30.2,
    "quora": 78.9,
    "dbpedia-entity": 31.8,
    "scidocs": 14.9,
    "fever": 65.1,
    "climate-fever": 16.5,
    "scifact": 67.9,
}
"""Data set -> nDCG@10 of BM25 in points, the minimum that a trained model should reach; MS MARCO has no entry."""


GLUE_SOURCE = "ModernBERT, arXiv:2412.13663, Table 5; averages from its Table 1"
"""Source of the figures, for reports."""

GLUE_COLUMNS = ("CoLA", "SST-2", "MRPC", "STS-B", "QQP", "MNLI", "QNLI", "RTE")
"""Columns of Table 5."""

_AVERAGES = {row.name: row.scores["GLUE"] for row in TABLE_1}


def _glue_row(model: str, size: Size, points: tuple[float, ...]) -> PublishedRow:
    row = PublishedRow(model, size, dict(zip(GLUE_COLUMNS, points, strict=True)))
    return PublishedRow(model, size, row.scores, _AVERAGES.get(row.name))


TABLE_5: tuple[PublishedRow, ...] = (
    _glue_row("BERT", "base", (59.0, 93.1, 89.5, 89.4, 91.4, 85.4, 91.6, 78.2)),
    _glue_row("RoBERTa", "base", (63.6, 94.8, 90.2, 91.2, 91.9, 87.6, 92.8, 78.7)),
    _glue_row("DeBERTaV3", "base", (69.2, 95.6, 89.5, 91.6, 92.4, 90.0, 94.0, 83.8)),
    _glue_row("MosaicBERT-128", "base", (58.2, 93.5, 89.0, 90.3, 92.0, 85.6, 91.4, 83.0)),
    _glue_row("NomicBERT", "base", (50.0, 93.0, 88.0, 90.0, 92.0, 86.0, 92.0, 82.0)),
    _glue_row("GTE-en-MLM", "base", (57.0, 93.4, 92.1, 90.2, 88.8, 86.7, 91.9, 84.8)),
    _glue_row("ModernBERT", "base", (65.1, 96.0, 92.2, 91.8, 92.1, 89.1, 93.9, 87.4)),
    _glue_row("BERT", "large", (56.2, 93.3, 87.8, 90.6, 90.9, 86.3, 92.8, 83.8)),
    _glue_row("RoBERTa", "large", (68.0, 96.4, 90.9, 92.4, 92.2, 90.2, 94.7, 86.6)),
    _glue_row("DeBERTaV3", "large", (75.3, 96.9, 92.2, 93.0, 93.3, 91.8, 96.0, 92.7)),
    _glue_row("GTE-en-MLM", "large", (60.4, 95.1, 93.5, 91.4, 89.2, 89.2, 93.9, 88.1)),
    _glue_row("ModernBERT", "large", (71.4, 97.1, 91.7, 92.8, 92.7, 90.8, 95.2, 92.1)),
)
"""Rows of Table 5 in the paper's order; their averages are those of Table 1."""


KORQUAD_SOURCE = "Jeong et al., HCLT 2023, Table 2"
"""Source of the figures, for reports."""

KORQUAD: Mapping[tuple[str, int], Mapping[str, float]] = {
    ("BERT", 512): {"exact": 78.13, "f1": 88.91},
    ("BERT", 1024): {"exact": 77.23, "f1": 88.04},
    ("RoBERTa", 512): {"exact": 80.90, "f1": 90.64},
    ("RoBERTa", 1024): {"exact": 78.28, "f1": 88.77},
}
"""Model and number of positions -> scores on KorQuAD 1.0. Paragraphs are truncated. The table's other data sets have no open download."""
