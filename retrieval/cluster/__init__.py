"""Long work on one worker or many: in this process, in processes of this machine, on a Ray cluster."""

from quiver.retrieval.cluster.choice import EXECUTORS, open_executor
from quiver.retrieval.cluster.in_process import HERE, InProcess
from quiver.retrieval.cluster.processes import LocalProcesses
from quiver.retrieval.cluster.protocol import Executor, Task
from quiver.retrieval.cluster.worker import WorkerError

__all__ = ["EXECUTORS", "HERE", "Executor", "InProcess", "LocalProcesses", "Task", "WorkerError", "open_executor"]
