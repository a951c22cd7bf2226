"""``quiver`` for shell scripts of tests without the seconds of its imports: a process that has imported everything forks for each command.

``python quiver_server.py SOCKET`` serves. ``python quiver_server.py SOCKET ARGUMENT...`` runs one command there, with its own folder,
environment and standard streams, passes SIGTERM and SIGINT on, and ends with the command's status.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
from importlib import import_module


def serve(path: str) -> None:
    """Run commands until the process is killed."""
    libraries = (
        "faiss",
        "quiver.eval.evaluation",
        "quiver.retrieval.index.build",
        "quiver.retrieval.models.colbert",
        "quiver.retrieval.search.search",
    )
    for name in {module.partition(":")[0] for module, _ in import_module("quiver.cli.main").COMMANDS.values()} | {*libraries}:
        import_module(name)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(path)
        listening.listen()
        while True:
            connection, _ = listening.accept()
            if not os.fork():
                listening.close()
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                _supervise(connection)
            connection.close()


def _supervise(connection: socket.socket) -> None:
    request, streams, _, _ = socket.recv_fds(connection, 1 << 20, 3)
    child = os.fork()
    if not child:
        connection.close()
        _command(json.loads(request), streams)
    connection.sendall(f"{child}\n".encode())
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    connection.sendall(f"{code % 256}\n".encode())
    os._exit(0)


def _command(request: dict[str, object], streams: list[int]) -> None:
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
    os.chdir(str(request["folder"]))
    os.environ.clear()
    os.environ.update(request["environment"])  # type: ignore[call-overload]
    sys.argv = ["quiver", *request["arguments"]]  # type: ignore[misc]
    code = 0
    try:
        import_module("quiver.cli.main").main()
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except BaseException as error:  # a process that returned from here would serve a second time
        sys.excepthook(type(error), error, error.__traceback__)
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def ask(path: str, arguments: list[str]) -> int:
    """Run one command and return its status."""
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
    if len(sys.argv) > 2:
        sys.exit(ask(sys.argv[1], sys.argv[2:]))
    serve(sys.argv[1])
