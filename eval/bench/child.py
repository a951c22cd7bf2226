"""Child processes that each measure one backend (``python -m quiver.eval.bench.child``), and the parent's side of the protocol.

A fresh process has its own memory peak, and can run out of memory without ending the benchmark. The protocol is JSON, one object per line.
The first line names a function of an importable module and its arguments. The function loads a backend, and returns the function that
answers the following lines:

    {"target": "quiver.eval.bench.encoder:open_token_ids", "arguments": {...}}   -> {"weights": 4096}
    {"batches": [[512, 512], [512]]}                                             -> {"before": 1, "above": 2, "reserved": null}

The answer is ``{"out_of_memory": true}`` if memory ran out. This module imports neither torch nor numpy.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryFile
from threading import Timer
from types import TracebackType
from typing import IO, Any, TextIO, TypeAlias

import quiver
from quiver.encoder.environment import resident
from quiver.encoder.errors import InputError

Answer: TypeAlias = Mapping[str, Any]

Target: TypeAlias = Callable[..., tuple[Callable[[dict[str, Any]], Answer], Answer]]
"""Loads a backend; returns the function that answers requests, and the answer to the first line."""

# malloc serves blocks above this threshold (64 KiB) by separate mappings, which return to the system when they are freed, so that the
# resident set equals the memory in use. By default glibc keeps freed blocks of up to 32 MiB. Other C libraries ignore the variable.
ENVIRONMENT = {"MALLOC_MMAP_THRESHOLD_": "65536", "TOKENIZERS_PARALLELISM": "false"}

# Out-of-memory messages of torch errors that are not OutOfMemoryError: from its CPU allocator, the CUDA runtime and cuBLAS.
OUT_OF_MEMORY = ("can't allocate memory", "CUDA error: out of memory", "Triton Error [CUDA]: out of memory", "CUBLAS_STATUS_ALLOC_FAILED")


class ChildError(RuntimeError):
    """A child process failed for another reason than a signal; the message is the last line of its output."""


class KilledError(Exception):
    """A signal ended the child process; on Linux, running out of memory ends this way."""


class Child:
    """A running child process; use it as a context manager.

    Args:
        target: ``module:function``, see `Target`. The module must be importable in the child.
        arguments: Keyword arguments of the function, as JSON. Paths must be absolute.
        label: Names the backend in errors.
        environment: Variables to set beside those of this process.
        log: File to which the child's standard error is appended; None for a temporary file.
        timeout: Time to answer one line, in seconds; then the child and its own children are killed. None waits without limit.

    Attributes:
        info: The answer to the first line.

    Raises:
        ChildError: The backend could not be loaded, or not in time.
    """

    def __init__(
        self,
        target: str,
        arguments: Mapping[str, Any],
        *,
        label: str,
        environment: Mapping[str, str] = ENVIRONMENT,
        log: Path | None = None,
        timeout: float | None = None,
    ) -> None:
        self._timeout = timeout
        self._expired = False
        # Closed with the child.
        self._stderr: IO[str] = (
            TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115
            if log is None
            else log.open("a+", encoding="utf-8", errors="replace")
        )
        self._process = subprocess.Popen(
            [sys.executable, "-m", "quiver.eval.bench.child"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            # Use the parent of this package as working folder: "-m" looks there first, and another folder may hold another "quiver". Links
            # are not followed: .ci/link-types makes a package of links.
            cwd=Path(quiver.__file__).absolute().parents[1],
            env={**os.environ, **environment},
            text=True,
            encoding="utf-8",
            # Start a new process group: after the child was killed, a surviving grandchild would keep the pipe open.
            start_new_session=timeout is not None,
        )
        try:
            self.info: dict[str, Any] = self.ask({"target": target, "arguments": arguments})
        except KilledError as killed:
            self.close()
            raise ChildError(f"{label}: {killed} while loading") from killed
        except ChildError:
            self.close()
            raise

    def ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Send a request and wait for the answer.

        Raises:
            KilledError: A signal ended the child.
            ChildError: The child ended in another way, or did not answer in time.
        """
        line = self._exchange(json.dumps(request))
        if line:
            return json.loads(line)  # type: ignore[no-any-return]
        status = self._process.wait()
        if self._expired:
            raise ChildError(f"no answer within {self._timeout:g} seconds; stopped")
        if status < 0:
            raise KilledError(f"killed by signal {-status}")
        self._stderr.seek(0)
        lines = [line for line in self._stderr.read().splitlines() if line.strip()]
        raise ChildError(lines[-1] if lines else f"the child process ended with status {status} and without output")

    def close(self) -> None:
        """End the child."""
        self._kill()
        self._process.communicate()
        self._stderr.close()

    def _exchange(self, request: str) -> str:
        """Send a line and read the answer; empty if the child has ended."""
        if self._process.stdin is None or self._process.stdout is None:
            raise RuntimeError("the child has no pipes")
        timer = None if self._timeout is None else Timer(self._timeout, self._expire)
        if timer is not None:
            timer.daemon = True
            timer.start()
        try:
            with suppress(BrokenPipeError):  # the child has ended, and readline below returns an empty line
                self._process.stdin.write(request + "\n")
                self._process.stdin.flush()
            return self._process.stdout.readline()
        finally:
            if timer is not None:
                timer.cancel()

    def _expire(self) -> None:
        self._expired = True
        self._kill()

    def _kill(self) -> None:
        """Kill the child, and its process group if it has one."""
        if self._timeout is not None and hasattr(os, "killpg") and self._process.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
        self._process.kill()

    def __enter__(self) -> Child:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def ask_once(target: str, arguments: Mapping[str, Any], request: Mapping[str, Any], *, label: str) -> dict[str, Any]:
    """Ask one request of a fresh child.

    Raises:
        ChildError: The child failed, was killed or ran out of memory; says which.
    """
    with Child(target, arguments, label=label) as child:
        try:
            return checked(child.ask(request))
        except KilledError as killed:
            raise ChildError(str(killed)) from killed


def checked(answer: dict[str, Any]) -> dict[str, Any]:
    """Return an answer.

    Raises:
        ChildError: The child ran out of memory.
    """
    if answer.get("out_of_memory"):
        raise ChildError("out of memory")
    return answer


def is_out_of_memory(error: RuntimeError) -> bool:
    """Whether torch ran out of memory."""
    return type(error).__name__ == "OutOfMemoryError" or any(words in str(error) for words in OUT_OF_MEMORY)


def main() -> None:
    """Answer requests until the input ends."""
    requests, answers = sys.stdin, _private_stdout()
    _prefer_to_be_killed()
    sys.excepthook = _one_line_last
    first = json.loads(requests.readline())
    module, _, name = first["target"].partition(":")
    target: Target = getattr(importlib.import_module(module), name)
    reply, info = target(**first["arguments"])
    _answer(answers, info)
    for line in requests:
        try:
            _answer(answers, reply(json.loads(line)))
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            _answer(answers, {"out_of_memory": True})


def _private_stdout() -> TextIO:
    """Reserve standard output for answers, and redirect what libraries print to standard error."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return answers


def _prefer_to_be_killed() -> None:
    """Make Linux end this process first if the system runs out of memory."""
    score = Path("/proc/self/oom_score_adj")
    if score.is_file():
        score.write_text("1000", encoding="ascii")


def _one_line_last(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print the traceback, then one line for the parent to quote: torch ends many messages with general advice."""
    traceback.print_exception(kind, error, trace)
    lines = str(error).strip().splitlines()
    sys.stderr.write(f"{kind.__name__}: {lines[0] if lines else 'no message'}\n")


def _answer(answers: TextIO, content: Answer) -> None:
    answers.write(json.dumps(content) + "\n")
    answers.flush()


def measure_memory(run: Callable[[], object], *, on_cuda: bool) -> dict[str, int | None]:
    """Run once in this process and return its memory in bytes.

    Returns:
        ``before``: resident set (CPU) or bytes allocated by torch (CUDA) with the model loaded; ``above``: bytes more at the peak;
        ``reserved``: bytes that torch had reserved on the GPU at the peak, None on a CPU.

    Raises:
        InputError: This system does not report the peak of a process.
    """
    if on_cuda:
        import torch

        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run()
        return {"before": before, "above": torch.cuda.max_memory_allocated() - before, "reserved": torch.cuda.max_memory_reserved()}
    reset_peak()
    before = resident("VmRSS")
    run()
    return {"before": before, "above": max(0, resident("VmHWM") - before), "reserved": None}


def reset_peak() -> None:
    """Reset the peak resident set, ``VmHWM``, to the current one.

    Raises:
        InputError: This system does not report the peak of a process.
    """
    try:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    except OSError as error:
        raise InputError("peak memory on a CPU is read from Linux's /proc, which this system does not have; omit --peak-memory") from error


if __name__ == "__main__":
    main()
