"""Tables 5 and 6: a sample by hand, and every row against what else the paper says of it."""

from __future__ import annotations

import pytest

from quiver.eval.published import AVERAGES_OFF_BY_MORE_THAN_ROUNDING, GLUE_COLUMNS, TABLE_1, TABLE_5, TABLE_6

ROWS = {row.name: row for row in TABLE_5}


def test_the_averages_are_those_of_table_1() -> None:
    off = set()
    for row in TABLE_1:
        mean = sum(ROWS[row.name].scores.values()) / 8
        assert ROWS[row.name].average == row.scores["GLUE"]
        assert row.scores["GLUE"] == pytest.approx(mean, abs=0.2)
        if abs(row.scores["GLUE"] - mean) > 0.05 + 1e-9:
            off.add(row.name)
    assert off == AVERAGES_OFF_BY_MORE_THAN_ROUNDING
    assert ROWS["MosaicBERT-128-base"].average is None


def test_table_6_is_of_the_values_that_were_searched() -> None:
    """Appendix E.1 names them: four rates, four decays, and the epochs by task."""
    assert {task for task, _ in TABLE_6} == set(GLUE_COLUMNS)
    assert len(TABLE_6) == 16
    for (task, _), chosen in TABLE_6.items():
        assert chosen.learning_rate in (1e-5, 3e-5, 5e-5, 8e-5)
        assert chosen.weight_decay in (1e-6, 5e-6, 8e-6, 1e-5)
        assert chosen.epochs in ((1, 2, 3) if task in ("SST-2", "MNLI", "RTE") else (2, 5, 10))
    assert (TABLE_6["SST-2", "large"].learning_rate, TABLE_6["MRPC", "large"].epochs) == (1e-5, 2)
    assert (TABLE_6["STS-B", "base"].weight_decay, TABLE_6["QQP", "base"].epochs) == (5e-6, 10)
