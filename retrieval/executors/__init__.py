"""Long work on one worker or many: in this process, in processes of this machine, on a Ray cluster."""

from retrieval.executors.choice import EXECUTORS, open_executor
from retrieval.executors.in_process import HERE, InProcess
from retrieval.executors.processes import LocalProcesses
from retrieval.executors.protocol import Executor, Task
from retrieval.executors.worker import WorkerError

__all__ = ["EXECUTORS", "HERE", "Executor", "InProcess", "LocalProcesses", "Task", "WorkerError", "open_executor"]
