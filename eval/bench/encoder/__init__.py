"""How fast and how lean an encoder is, beside other libraries that run the same weights.

All of them run in one process on the same threads and the same documents, in turns: a machine that slows down slows all of
them, so that the ratio of a round means something where its seconds do not. How far the outputs are apart is part of the
result, since speed at other numbers is no speed.
"""

from quiver.eval.bench.encoder.results import EncoderBenchmark, Settings, read_benchmark, to_json, write_benchmark
from quiver.eval.bench.encoder.sets import BATCH_TOKENS, bench_sets, default_documents
from quiver.eval.bench.encoder.texts import bench_texts
from quiver.eval.bench.encoder.workloads import CPU_TABLE, PAPER_DOCUMENTS, PAPER_SETS, Workload, paper_workload, parse_lengths

__all__ = [
    "BATCH_TOKENS",
    "CPU_TABLE",
    "PAPER_DOCUMENTS",
    "PAPER_SETS",
    "EncoderBenchmark",
    "Settings",
    "Workload",
    "bench_sets",
    "bench_texts",
    "default_documents",
    "paper_workload",
    "parse_lengths",
    "read_benchmark",
    "to_json",
    "write_benchmark",
]
