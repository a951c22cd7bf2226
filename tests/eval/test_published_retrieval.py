"""The retrieval tables: a sample by hand, and every row against what else the paper says of it."""

from __future__ import annotations

from fractions import Fraction

import pytest

from quiver.eval.published import (
    AVERAGES_OFF_BY_ROUNDING,
    BM25_FLAT,
    OVERVIEW_COLUMNS,
    TABLE_1,
    TABLE_7,
    TABLE_8,
    TABLE_9,
    BeirTable,
    PublishedRow,
)

MODELS = ["BERT", "RoBERTa", "DeBERTaV3", "NomicBERT", "GTE-en-MLM", "ModernBERT"]
ROWS = [f"{model}-base" for model in MODELS] + [f"{model}-large" for model in MODELS if model != "NomicBERT"]
TITLES = [
    *("NFCorpus", "SciFact", "TREC-Covid", "FiQA", "ArguAna", "Climate-FEVER", "DBPedia", "FEVER", "HotpotQA", "MSMARCO", "NQ"),
    *("Quora", "SciDocs", "Touche2020", "CQADupstack"),
]


def row(rows: tuple[PublishedRow, ...], name: str) -> PublishedRow:
    (found,) = [each for each in rows if each.name == name]
    return found


@pytest.mark.parametrize("paper", [TABLE_7, TABLE_8], ids=["table 7", "table 8"])
def test_every_encoder_and_every_column(paper: BeirTable) -> None:
    assert [each.name for each in paper.rows] == [each.name for each in TABLE_1] == ROWS
    assert [column.title for column in paper.columns] == TITLES
    assert all(list(each.scores) == TITLES for each in paper.rows)
    assert all(tuple(each.scores) == OVERVIEW_COLUMNS for each in TABLE_1)


def test_a_sample_of_table_7() -> None:
    assert list(row(TABLE_7.rows, "ModernBERT-base").scores.values()) == [
        *(23.7, 57.0, 72.1, 28.8, 35.7, 23.6, 23.8, 59.9, 46.1, 61.6, 39.5, 85.9, 12.5, 20.8, 33.1)
    ]
    assert row(TABLE_7.rows, "DeBERTaV3-base").scores["Touche2020"] == 14.2
    assert row(TABLE_7.rows, "NomicBERT-base").scores["TREC-Covid"] == 63.0
    assert row(TABLE_7.rows, "GTE-en-MLM-large").scores["CQADupstack"] == 35.5
    assert row(TABLE_7.rows, "ModernBERT-large").scores["Climate-FEVER"] == 20.5


def test_a_sample_of_table_8() -> None:
    assert list(row(TABLE_8.rows, "ModernBERT-large").scores.values()) == [
        *(36.0, 73.2, 81.3, 40.3, 50.3, 22.3, 44.1, 85.8, 72.5, 46.0, 59.9, 86.1, 16.9, 34.6, 35.9)
    ]
    assert row(TABLE_8.rows, "BERT-base").scores["NFCorpus"] == 34.2
    assert row(TABLE_8.rows, "RoBERTa-base").scores["NQ"] == 56.3
    assert row(TABLE_8.rows, "GTE-en-MLM-base").scores["Touche2020"] == 25.4
    assert row(TABLE_8.rows, "DeBERTaV3-large").scores["Quora"] == 81.1


def test_a_sample_of_tables_1_and_9() -> None:
    assert list(row(TABLE_1, "ModernBERT-base").scores.values()) == [41.6, 27.4, 44.0, 51.3, 80.2, 88.4, 56.4, 73.6]
    assert list(row(TABLE_1, "GTE-en-MLM-large").scores.values()) == [42.5, 36.4, 48.9, 50.7, 71.3, 87.6, 40.5, 66.9]
    assert len(TABLE_9) == len(TABLE_1)
    assert (TABLE_9["ModernBERT", "base"].single_vector, TABLE_9["ModernBERT", "base"].multi_vector) == (8e-5, 1e-4)
    assert (TABLE_9["RoBERTa", "large"].single_vector, TABLE_9["RoBERTa", "large"].multi_vector) == (3e-5, 1e-5)


@pytest.mark.parametrize("paper", [TABLE_7, TABLE_8], ids=["table 7", "table 8"])
def test_every_average_is_the_mean_of_its_columns(paper: BeirTable) -> None:
    """To one decimal; rounded columns may move it by 0.05, and a swapped digit moves it further."""
    off = set()
    for each in paper.rows:
        assert each.average is not None
        mean = sum(Fraction(str(score)) for score in each.scores.values()) / 15
        distance = abs(mean - Fraction(str(each.average)))
        assert distance < Fraction(1, 10) + Fraction(1, 1000), each.name
        if distance > Fraction(1, 20):
            off.add((paper.number, each.name))
            assert distance < Fraction(61, 1000), each.name
    assert off == {pair for pair in AVERAGES_OFF_BY_ROUNDING if pair[0] == paper.number}


def test_table_1_repeats_the_averages() -> None:
    for single, multiple, overview in zip(TABLE_7.rows, TABLE_8.rows, TABLE_1, strict=True):
        assert (single.average, multiple.average) == (overview.scores["DPR BEIR"], overview.scores["ColBERT BEIR"])


def test_bm25_has_every_data_set_but_one() -> None:
    assert {column.data_set for column in TABLE_7.columns} - set(BM25_FLAT) == {"msmarco"}
    assert set(BM25_FLAT) < {column.data_set for column in TABLE_7.columns}
    assert (BM25_FLAT["scifact"], BM25_FLAT["cqadupstack"]) == (67.9, 30.2)
