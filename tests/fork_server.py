"""Python processes for tests without the seconds of their imports: a process that has imported everything forks for each of them.

``python fork_server.py SOCKET`` serves. ``python fork_server.py SOCKET ARGUMENT...`` stands for ``python ARGUMENT...`` with ``-c CODE``,
``-m MODULE`` or a script: it runs there with its own folder, environment and standard streams, receives SIGTERM and SIGINT, dies when this
process is killed, and this process ends as it does. Variables that a library reads when it is imported are those of the server, but for
OMP_NUM_THREADS.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import json
import os
import runpy
import select
import signal
import socket
import sys
import threading
import traceback
import warnings
from importlib import import_module
from types import ModuleType

MODULES = (
    "bm25s",
    "faiss",
    "matplotlib.backends.backend_svg",
    "matplotlib.figure",
    "numba",
    "quiver.encoder.cpu.attention",
    "quiver.encoder.cpu.block_kernels",
    "quiver.encoder.pretraining.run",
    "quiver.eval.development",
    "quiver.eval.evaluation",
    "quiver.eval.report.retrieval",
    "quiver.eval.report.training",
    "quiver.retrieval.index.build",
    "quiver.retrieval.models.colbert",
    "quiver.retrieval.search.search",
    "quiver.retrieval.serving.server",
    "quiver.retrieval.training.losses",
    "quiver.retrieval.training.mining.negatives",
    "quiver.retrieval.training.run",
    "torch.utils.tensorboard",
)


def serve(path: str) -> None:
    """Fork for each request until standard input ends, and with it this process."""
    import shutil

    for name in {module.partition(":")[0] for module, _ in import_module("quiver.cli.main").COMMANDS.values()} | {*MODULES}:
        with contextlib.suppress(ModuleNotFoundError):  # of an extra that is not installed
            import_module(name)
    gc.collect()
    gc.freeze()  # a collection in a child would copy every page
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(path)
        listening.listen()
        while listening in select.select([listening, sys.stdin], [], [])[0]:
            connection, _ = listening.accept()
            if not os.fork():
                listening.close()
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                _supervise(connection)
            connection.close()
    shutil.rmtree(os.path.dirname(path))  # noqa: PTH120 - pathlib is slow to import


def _supervise(connection: socket.socket) -> None:
    request, streams, _, _ = socket.recv_fds(connection, 1 << 20, 3)
    child = os.fork()
    if not child:
        connection.close()
        _run(json.loads(request), streams)
    for stream in streams:
        os.close(stream)  # so that a pipe ends with the child
    with contextlib.suppress(OSError):
        connection.sendall(f"{child}\n".encode())
    ended = os.pidfd_open(child)
    if ended not in select.select([ended, connection], [], [])[0]:  # the process that asked is gone
        os.kill(child, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    with contextlib.suppress(OSError):
        connection.sendall(f"{code}\n".encode())
    os._exit(0)


def _run(request: dict[str, object], streams: list[int]) -> None:
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    # Those of the server remember whether they were files, which can be sought.
    sys.stdout = open(1, "w", encoding=sys.stdout.encoding, closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, encoding=sys.stderr.encoding, errors="backslashreplace", closefd=False)  # noqa: SIM115
    os.chdir(str(request["folder"]))
    os.environ.clear()
    os.environ.update(request["environment"])  # type: ignore[call-overload]
    if threads := os.environ.get("OMP_NUM_THREADS"):
        import_module("torch").set_num_threads(int(threads))
        import_module("faiss").omp_set_num_threads(int(threads))
    code = 0
    try:
        _interpret(request["arguments"])  # type: ignore[arg-type]
    except SystemExit as stop:
        if isinstance(stop.code, str):
            sys.stderr.write(f"{stop.code}\n")
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except BaseException:  # a process that returned from here would serve a second time
        traceback.print_exc()
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _interpret(arguments: list[str]) -> None:
    """What Python does with its command line."""
    kind, *rest = arguments
    sys.path[:0] = os.environ["PYTHONPATH"].split(os.pathsep) if os.environ.get("PYTHONPATH") else []
    if kind == "-c":
        main = sys.modules["__main__"] = ModuleType("__main__")
        sys.path.insert(0, "")
        sys.argv = ["-c", *rest[1:]]
        exec(compile(rest[0], "<string>", "exec"), main.__dict__)
    elif kind == "-m":
        sys.path.insert(0, os.getcwd())  # noqa: PTH109 - as Python does
        sys.argv = rest
        warnings.filterwarnings("ignore", ".* found in sys.modules after import")
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(0, os.path.dirname(os.path.abspath(kind)))  # noqa: PTH100, PTH120 - as Python does
        sys.argv = arguments
        runpy.run_path(kind, run_name="__main__")


def ask(path: str, arguments: list[str]) -> int:
    """Run Python with these arguments and return its status, negative for a signal."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(path)
        request = {"folder": os.getcwd(), "environment": dict(os.environ), "arguments": arguments}  # noqa: PTH109 - pathlib is slow to import
        socket.send_fds(connection, [json.dumps(request).encode()], [0, 1, 2])
        answer = connection.makefile()
        child = int(answer.readline())
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda received, _: os.kill(child, received))
        return int(answer.readline() or 1)


if __name__ == "__main__":
    sys.path.pop(0)  # this folder has one called quiver
    if len(sys.argv) > 2:
        code = ask(sys.argv[1], sys.argv[2:])
        if code < 0:
            if code != -signal.SIGKILL:
                signal.signal(-code, signal.SIG_DFL)
            os.kill(os.getpid(), -code)
        sys.exit(code)
    serve(sys.argv[1])
