"""Rankings to numbers to reports: collections, measures, baselines, results."""

from eval.evaluation import evaluate

__all__ = ["evaluate"]
