"""Training data: from files, folders, BEIR collections, the hub or the standard library to rows on disk that a trainer reads."""

from quiver.retrieval.training.data.prepare import HELD_OUT, discard_rows, prepare_rows, rows_of_pairs
from quiver.retrieval.training.data.rows import TrainingRows

__all__ = ["HELD_OUT", "TrainingRows", "discard_rows", "prepare_rows", "rows_of_pairs"]
