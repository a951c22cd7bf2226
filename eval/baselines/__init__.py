"""Baselines and foreign harnesses: models of other libraries in Quiver's evaluation, and Quiver's models in BEIR's and MTEB's.

No library is imported before it is used.
"""

from quiver.eval.baselines.harnesses import DenseRetriever, IndexRetriever, QuiverSearch
from quiver.eval.baselines.models import LIBRARIES, load_baseline

__all__ = ["LIBRARIES", "DenseRetriever", "IndexRetriever", "QuiverSearch", "load_baseline"]
