"""What both kinds of benchmark share: who takes part, what memory they need, and the record of the run."""

from __future__ import annotations

import gc
import os
import platform
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from quiver.encoder.errors import InputError
from quiver.eval.bench.encoder.children import ChildError, ChildModel, peak_memory
from quiver.eval.bench.encoder.libraries import DTYPES
from quiver.eval.bench.encoder.results import OWN, NotRun, PeakMemory, SetTimes, Settings, with_memory
from quiver.eval.provenance import Provenance, provenance
from quiver.retrieval.progress import progress_bar
from quiver.retrieval.versions import installed_version

PEER_PACKAGES = ("transformers", "sentence-transformers", "pylate", "flash-attn", "optimum", "onnxruntime", "openvino")
"""Distributions of the peers, for the record of versions."""


def check_settings(settings: Settings) -> None:
    """Refuse early what cannot be run.

    Raises:
        InputError: An unknown dtype, a device that is not there, or a search for the largest batch on a CPU without a budget.
        ValueError: rounds < 1.
    """
    if settings.rounds < 1:
        raise ValueError(f"rounds must be >= 1, got {settings.rounds}")
    if settings.dtype not in DTYPES:
        raise InputError(f"dtype must be one of {', '.join(DTYPES)}, got {settings.dtype!r}")
    if settings.device not in ("cpu", "cuda"):
        raise InputError(f"device must be cpu or cuda, got {settings.device!r}")
    if settings.device == "cuda" and not torch.cuda.is_available():
        raise InputError("device cuda: torch sees no GPU here; give --device cpu")
    if settings.batch_size is not None and settings.batch_tokens is not None:
        raise InputError("give --batch-size or --batch-tokens, not both")
    if settings.largest_batch and settings.device == "cpu" and settings.memory_gib is None:
        raise InputError(
            "the largest batch on a CPU needs --memory-gib, the memory to stay within; up to twice as much may be used on the way"
        )


def choose(
    asked: Sequence[str] | None, known: Iterable[str], peers: Iterable[str], unsupported_reason: Callable[[str], str | None]
) -> tuple[list[str], list[NotRun]]:
    """Who takes part.

    Args:
        asked: Names of libraries beside Quiver; None for every peer that can run.
        known: All names.
        peers: The names that None stands for.
        unsupported_reason: A name to why it cannot run, None if it can.

    Returns:
        Quiver and the others, in order, and those that None stands for and that cannot run.

    Raises:
        InputError: A name is unknown, or one that was asked for cannot run.
    """
    if asked is not None:
        names = list(dict.fromkeys(asked))
        if unknown := sorted(set(names) - set(known)):
            raise InputError(f"unknown peer {unknown[0]!r}; there are {', '.join(name for name in known if name != OWN)}")
        for name in names:
            if reason := unsupported_reason(name):
                raise InputError(f"{name}: {reason}")
        return [OWN, *(name for name in names if name != OWN)], []
    obstacles = {name: unsupported_reason(name) for name in peers}
    return (
        [OWN, *(name for name, reason in obstacles.items() if reason is None)],
        [NotRun(name, reason) for name, reason in obstacles.items() if reason is not None],
    )


def add_memory(
    sets: Sequence[SetTimes], requests: Sequence[dict[str, Any]], child: Callable[[str], ChildModel], *, progress: bool
) -> tuple[list[SetTimes], list[NotRun]]:
    """Measure every library's peak memory on every set, each in a fresh process.

    Args:
        sets: What was timed.
        requests: For each set the run that a child does.
        child: A library to what a child of it loads.
        progress: Show a bar on standard error.

    Returns:
        The sets with memory, and the runs that failed: the times are worth keeping all the same.
    """
    free_memory()
    measured, failed = [], []
    with progress_bar("memory", sum(len(times.libraries) for times in sets), enabled=progress) as advance:
        for times, request in zip(sets, requests, strict=True):
            memory: dict[str, PeakMemory] = {}
            for library in times.libraries:
                try:
                    memory[library.name] = peak_memory(child(library.name), request)
                except ChildError as error:
                    failed.append(NotRun(f"memory of {library.name} on {times.name}", str(error)))
                advance(1)
            measured.append(with_memory(times, memory))
    return measured, failed


def free_memory() -> None:
    """Give back what models that are no longer needed hold, so that a child finds it free."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def load_average() -> tuple[float, ...]:
    """Running processes over the last 1, 5 and 15 minutes; empty where the system does not tell."""
    return tuple(os.getloadavg()) if hasattr(os, "getloadavg") else ()


def processor(device: str) -> str:
    """Name of the GPU or CPU that computes."""
    if device == "cuda":
        return torch.cuda.get_device_name()
    facts = Path("/proc/cpuinfo")
    found = re.search(r"^model name\s*:\s*(.+)$", facts.read_text(encoding="utf-8"), re.MULTILINE) if facts.is_file() else None
    return found[1] if found else platform.processor() or platform.machine()


def origin(command: str | None) -> Provenance:
    """The provenance of this run, with the versions of the peers."""
    found = provenance(command)
    peers = {name: version for name in PEER_PACKAGES if (version := installed_version(name)) is not None}
    return replace(found, versions={**found.versions, **peers})
