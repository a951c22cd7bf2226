"""How good and how fast indexes are on the same vectors: Quiver's engines beside the libraries that others would use.

Recall is counted against exact search over the vectors as they were stored, by the documents themselves and not by a library's word.
"""

from quiver.eval.bench.index.benchmark import bench_index
from quiver.eval.bench.index.measuring import TIMEOUT, Running
from quiver.eval.bench.index.results import IndexBenchmark, IndexSettings, read_index_benchmark, to_json, write_index_benchmark
from quiver.eval.bench.index.sources import encode_collection, threads_up_to
from quiver.eval.bench.index.systems import PEERS, default_peers, filtered, own_points, own_system, peer_systems
from quiver.eval.bench.index.vectors import VectorFolder, write_vectors

__all__ = [
    "PEERS",
    "TIMEOUT",
    "IndexBenchmark",
    "IndexSettings",
    "Running",
    "VectorFolder",
    "bench_index",
    "default_peers",
    "encode_collection",
    "filtered",
    "own_points",
    "own_system",
    "peer_systems",
    "read_index_benchmark",
    "threads_up_to",
    "to_json",
    "write_index_benchmark",
    "write_vectors",
]
