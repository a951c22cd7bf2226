"""Estimate an index before it is built: tokens, hours, disk, memory, shards and cost."""

from quiver.retrieval.planning.plan import (
    FORMULAS,
    TEXTS,
    Corpus,
    Footprint,
    Machine,
    ModelSize,
    Plan,
    footprint,
    from_sample,
    from_words,
    make_plan,
)
from quiver.retrieval.planning.rates import DEVICES, Rates, estimated, read_rates

__all__ = [
    "DEVICES",
    "FORMULAS",
    "TEXTS",
    "Corpus",
    "Footprint",
    "Machine",
    "ModelSize",
    "Plan",
    "Rates",
    "estimated",
    "footprint",
    "from_sample",
    "from_words",
    "make_plan",
    "read_rates",
]
