"""How fast a training step is, beside plain sentence-transformers and PyLate on the Hugging Face model.

Both sides start from the same weights and take the same batches, step by step and in turns in one process; how far their losses are
apart is part of the result, since a faster step to other weights is none.
"""

from quiver.eval.bench.training.benchmark import bench_training
from quiver.eval.bench.training.results import (
    TrainingBenchmark,
    TrainingSettings,
    read_training_benchmark,
    to_json,
    write_training_benchmark,
)
from quiver.eval.bench.training.workloads import WORKLOADS, TrainingWorkload, synthetic_source, texts_of_collection

__all__ = [
    "WORKLOADS",
    "TrainingBenchmark",
    "TrainingSettings",
    "TrainingWorkload",
    "bench_training",
    "read_training_benchmark",
    "synthetic_source",
    "texts_of_collection",
    "to_json",
    "write_training_benchmark",
]
