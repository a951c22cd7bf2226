"""Work on several processes and machines: executors, and indexes that are distributed over shards."""

from quiver.retrieval.cluster.executors import LocalProcesses, WorkerError

__all__ = ["LocalProcesses", "WorkerError"]
