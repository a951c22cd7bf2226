"""Training data: rows read from files, folders, BEIR collections, the Hub or docstrings, prepared as memory-mapped Arrow files."""

from quiver.retrieval.training.data.prepare import SCORES, TrainingRows, discard_rows, prepare_rows, rows_of_pairs, source_stamps

__all__ = ["SCORES", "TrainingRows", "discard_rows", "prepare_rows", "rows_of_pairs", "source_stamps"]
