"""The papers' tables: a few figures by hand, and every cell of one table against the others."""

from __future__ import annotations

import math

import pytest

from quiver.eval.published import ENCODER_EFFICIENCY, TABLE_10, EncoderEfficiency

# Models that compute on padding: the variable sets take them as long as the fixed ones of twice the tokens.
PADDING = {"BERT", "RoBERTa", "DeBERTaV3", "NomicBERT", "GTE-en-MLM"}


def row(model: str, size: str) -> EncoderEfficiency:
    (found,) = [each for each in ENCODER_EFFICIENCY if (each.model, each.size) == (model, size)]
    return found


@pytest.mark.parametrize("model", ENCODER_EFFICIENCY, ids=lambda row: f"{row.model}-{row.size}")
def test_seconds_and_throughput_say_the_same(model: EncoderEfficiency) -> None:
    """Table 10's tokens over Table 11's seconds are Table 2's throughput, to the rounding of both."""
    assert model.runtimes
    for name, runtime in model.runtimes.items():
        given = TABLE_10[name].tokens / runtime.seconds / 1000
        rounding = 0.05 + given * 0.05 / runtime.seconds
        assert math.isclose(given, model.kilotokens[name], abs_tol=rounding + 0.3 * (runtime.deviation / runtime.seconds) * given), name


@pytest.mark.parametrize("model", [row for row in ENCODER_EFFICIENCY if row.model in PADDING], ids=lambda row: f"{row.model}-{row.size}")
def test_padding_halves_the_throughput(model: EncoderEfficiency) -> None:
    for fixed, variable in (("fixed-512", "variable-256"), ("fixed-8192", "variable-4096")):
        if fixed in model.kilotokens:
            assert math.isclose(model.kilotokens[variable], model.kilotokens[fixed] / 2, abs_tol=0.1)
            assert variable not in model.runtimes
