"""Work on several processes and machines: executors, and indexes that are distributed over shards."""

from quiver.retrieval.cluster.executors import EXECUTORS, LocalProcesses, WorkerError, open_executor

__all__ = ["EXECUTORS", "LocalProcesses", "WorkerError", "open_executor"]
