"""Memory, measured from outside: fresh processes that load one library each, and the search for the largest batch.

A run that ends for want of memory must not end the benchmark, and a process that has loaded three libraries can tell the memory of
none.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryFile
from threading import Timer
from types import TracebackType
from typing import IO, Any, ClassVar, Literal, Protocol

import quiver
from quiver.eval.bench.encoder.results import LargestBatch, PeakMemory, Settings

MODULE = "quiver.eval.bench.encoder.child"

# Blocks above 64 KiB are mappings of their own and go back to the system when they are freed, so that the resident set is what the
# process uses; by default glibc keeps blocks of up to 32 MiB for later. Other C libraries ignore it.
ENVIRONMENT = {"MALLOC_MMAP_THRESHOLD_": "65536", "TOKENIZERS_PARALLELISM": "false"}

OVER_BUDGET = "over the budget"


class ChildError(RuntimeError):
    """A child process failed for another reason than memory; the message is its last line."""


class Killed(Exception):  # noqa: N818 - not an error: it is how a kernel says that memory has run out
    """A signal ended the child."""


class Opening(Protocol):
    """What a child loads: a dataclass, the first line that it is sent."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def library(self) -> str:
        """A library's name."""

    @property
    def model(self) -> str:
        """Preset, folder or hub id."""


@dataclass(frozen=True)
class ChildModel:
    """What a child of `MODULE` loads.

    Attributes:
        kind: ``ids`` for `quiver.eval.bench.encoder.libraries`, ``texts`` for `quiver.eval.bench.encoder.text_libraries`.
        library: Its name there.
        model: Preset, folder or hub id.
        settings: As in the parent.
        texts: What an int8 library of kind ``texts`` is calibrated on.
    """

    kind: Literal["ids", "texts"]
    library: str
    model: str
    settings: Settings
    texts: Sequence[str] = ()


class Child:
    """A running child process; ends with the block.

    Args:
        model: What it loads.
        module: What it runs; another one in tests.
        environment: Variables beside those of this process.
        timeout: Seconds that it may take to answer, to the first line too; then it is ended, with what it has started. None for any time.

    Raises:
        ChildError: It could not load the model, or not in time.
    """

    def __init__(
        self, model: Opening, *, module: str = MODULE, environment: Mapping[str, str] = ENVIRONMENT, timeout: float | None = None
    ) -> None:
        self._timeout = timeout
        self._expired = False
        self._stderr: IO[str] = TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115 - closed with the child
        # In the folder that holds our package: "-m" looks in the working folder first, where a user may have a "quiver" too.
        root = Path(quiver.__file__).resolve().parents[1]
        self._process = subprocess.Popen(
            [sys.executable, "-m", module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            cwd=root,
            env={**os.environ, **environment},
            text=True,
            encoding="utf-8",
            # A group of its own: what it starts in turn would hold its pipe open, and whoever waits for an answer would wait for ever.
            start_new_session=timeout is not None,
        )
        source = str(Path(model.model).resolve()) if Path(model.model).exists() else model.model
        try:
            # Bytes of the weights; None where the library does not show them.
            self.weights: int | None = self.ask({**asdict(model), "model": source})["weights"]
        except Killed as killed:
            self.close()
            raise ChildError(f"{model.library}: {killed} while loading {model.model}") from killed
        except ChildError:
            self.close()
            raise

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """Send a request and wait for the answer.

        Raises:
            Killed: A signal ended the child.
            ChildError: It ended in another way, or had not answered in time.
        """
        line = self._exchange(json.dumps(request))
        if line:
            return json.loads(line)  # type: ignore[no-any-return]
        status = self._process.wait()
        if self._expired:
            raise ChildError(f"gave no answer in {self._timeout:g} seconds and was stopped")
        if status < 0:
            raise Killed(f"killed by signal {-status}")
        self._stderr.seek(0)
        lines = [line for line in self._stderr.read().splitlines() if line.strip()]
        raise ChildError(lines[-1] if lines else f"the child process ended with status {status} and without a word")

    def close(self) -> None:
        """End the child."""
        self._kill()
        self._process.communicate()
        self._stderr.close()

    def _exchange(self, request: str) -> str:
        """Send a line and wait for the answer, which is empty where the child has ended or was ended."""
        if self._process.stdin is None or self._process.stdout is None:
            raise RuntimeError("the child has no pipes")
        timer = None if self._timeout is None else Timer(self._timeout, self._expire)
        if timer is not None:
            timer.daemon = True
            timer.start()
        try:
            self._process.stdin.write(request + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # it has ended: the empty answer says so
        try:
            return self._process.stdout.readline()
        finally:
            if timer is not None:
                timer.cancel()

    def _expire(self) -> None:
        self._expired = True
        self._kill()

    def _kill(self) -> None:
        """End the child, and what it has started where it has a group of its own."""
        if self._timeout is not None and hasattr(os, "killpg") and self._process.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
        self._process.kill()

    def __enter__(self) -> Child:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def peak_memory(model: Opening, request: dict[str, Any], *, module: str = MODULE) -> PeakMemory:
    """Peak memory of one run in a fresh process.

    Args:
        model: What to load.
        request: The run, as the module wants it.
        module: What the child runs.

    Raises:
        ChildError: There was not enough memory, or the run failed; says which.
    """
    with Child(model, module=module) as child:
        try:
            answer = child.ask(request)
        except Killed as killed:
            raise ChildError(str(killed)) from killed
    if answer.get("out_of_memory"):
        raise ChildError("out of memory")
    return PeakMemory(**answer)


def search_largest(refusal: Callable[[int], str | None], *, ceiling: int, tolerance: float = 0.0) -> tuple[int, int | None, str | None]:
    """The largest batch that fits: doubled until one does not, then halved in between.

    Args:
        refusal: Documents to why they do not fit, None where they do; what does not fit must not fit when it is larger.
        ceiling: Nothing larger is tried.
        tolerance: Stop when what fits and what does not are this share of the former apart; 0 for the exact limit.

    Returns:
        The largest that was seen to fit (0 for none), the smallest that was not (None if the ceiling fits), and why not.

    Example:
        >>> search_largest(lambda documents: "too many" if documents > 37 else None, ceiling=1000)
        (37, 38, 'too many')
    """
    fits, fails, reason = 0, None, None
    probe = 1
    while fails is None and fits < ceiling:
        found = refusal(probe)
        if found is None:
            fits, probe = probe, min(2 * probe, ceiling)
        else:
            fails, reason = probe, found
    while fails is not None and fails - fits > max(1, int(tolerance * fits)):
        probe = (fits + fails) // 2
        found = refusal(probe)
        if found is None:
            fits = probe
        else:
            fails, reason = probe, found
    return fits, fails, reason


def largest_batch(model: ChildModel, length: int, *, ceiling: int, tolerance: float, module: str = MODULE) -> LargestBatch:
    """Search for the largest batch of documents of one length that fits.

    On CUDA a batch fits unless torch runs out of memory (of ``memory_gib``, where that is given). On a CPU it fits if the
    weights and what the run takes beyond the loaded process stay within ``memory_gib``, measured at the peak; the libraries' code is
    not counted, as it is not on a GPU. A limit set on the process from outside (RLIMIT_AS, RLIMIT_DATA) would count what is only
    reserved, and some kernels crash at it or take slower ways. A killed child is a batch that does
    not fit; after one, or when torch ran out of memory, the next run starts afresh.

    Args:
        model: What to load, of kind ``ids``.
        length: Tokens of each document.
        ceiling: Largest number of documents tried.
        tolerance: How exact, as a share; 0 for the exact limit.
        module: What the children run; another one in tests.

    Raises:
        ChildError: A run failed for another reason than memory.
    """
    budget = None if model.settings.memory_gib is None else model.settings.memory_gib * 2**30
    children: list[Child] = []

    def refusal(documents: int) -> str | None:
        if not children:
            children.append(Child(model, module=module))
        reason = _refusal(children[0], {"batches": [[length] * documents]}, budget)
        if reason not in (None, OVER_BUDGET):
            children.pop().close()
        return reason

    try:
        fits, fails, reason = search_largest(refusal, ceiling=ceiling, tolerance=tolerance)
    finally:
        for child in children:
            child.close()
    return LargestBatch(model.library, length, fits, fails, reason)


def _refusal(child: Child, request: dict[str, Sequence[Sequence[int]]], budget: float | None) -> str | None:
    try:
        answer = child.ask(request)
    except Killed as killed:
        return str(killed)
    if answer.get("out_of_memory"):
        return "out of memory"
    if answer["reserved"] is None and budget is not None and (child.weights or 0) + answer["above"] > budget:
        return OVER_BUDGET
    return None
