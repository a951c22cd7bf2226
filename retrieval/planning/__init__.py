"""What an index will take before it is built: tokens, hours, disk, memory, shards, money. Formulas, and rates that were measured."""

from quiver.retrieval.planning.corpora import TEXTS, Corpus, from_sample, from_words
from quiver.retrieval.planning.footprint import Footprint, footprint
from quiver.retrieval.planning.plan import FORMULAS, Machine, ModelSize, Plan, make_plan
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
