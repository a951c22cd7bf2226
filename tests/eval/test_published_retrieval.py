"""The retrieval tables: a sample by hand, and every row against what else the paper says of it."""

from __future__ import annotations

from fractions import Fraction

import pytest

from quiver.eval.published import AVERAGES_OFF_BY_ROUNDING, BM25_FLAT, TABLE_1, TABLE_7, TABLE_8, BeirTable, PublishedRow


def row(rows: tuple[PublishedRow, ...], name: str) -> PublishedRow:
    (found,) = [each for each in rows if each.name == name]
    return found


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
