"""The record of a pretraining run, ``run.json``: enough to run it again, to know whether that would be the same run, and how it went.

What stands in it:

    schema, recipe, command, date, versions, platform, device, threads, processes
    corpus      sha256 of its files and of the vocabulary; documents and tokens of each source, by side
    model       parameters, vocabulary (ids, rows of the embedding)
    result      steps, tokens, packing (share of the rows that held tokens); curves as [[step, value], ...] by key of the log;
                phases as [{name, last_step}, ...]; kept_steps (whose weights the model has; their mean if there are several);
                average (the moving average makes the model); seconds (of all sessions), resumed_at, peak_memory_bytes;
                flop_utilisation (median of flops_per_second over what the GPUs could do in bfloat16; null where that is not known)
"""

from __future__ import annotations

import platform
import statistics
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from quiver.encoder.heads import MaskedLM
from quiver.encoder.pretraining.flops import peak_flops
from quiver.encoder.pretraining.loop import HELD_OUT, Session
from quiver.encoder.pretraining.run_folder import SCHEMA
from quiver.encoder.pretraining.snapshot import Progress
from quiver.encoder.training.log import LOG, curve, read_log
from quiver.encoder.training.processes import peak_memory

PACKAGES = ("quiver-retrieval", "torch", "numpy", "tokenizers", "safetensors", "torch-optimi")

CURVES = ("loss", HELD_OUT, "learning_rate", "grad_norm", "batch_size", "tokens_per_second", "flops_per_second", "packing", "tokens")
"""Keys of the log that are quantities over the updates."""


def versions() -> dict[str, str | None]:
    """Of Python and of what a run depends on; None for what is not installed."""
    return {"python": platform.python_version(), **{name: _installed(name) for name in PACKAGES}}


def _installed(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def describe_run(
    session: Session, progress: Progress, model: MaskedLM, *, kept_steps: Sequence[int], command: str | None
) -> dict[str, Any]:
    """The record of a run that has come to its end."""
    recipe, quantities = session.recipe, curves(session.out)
    return {
        "schema": SCHEMA,
        "recipe": recipe.model_dump(),
        "command": command,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "versions": versions(),
        "platform": platform.platform(),
        "device": session.device,
        "threads": torch.get_num_threads(),
        "processes": session.processes.size,
        "corpus": session.corpus.facts,
        "model": {
            "parameters": sum(weight.numel() for weight in model.parameters()),
            "vocabulary": {"ids": len(session.tokenizer), "rows": model.encoder.config.vocab_size},
        },
        "result": {
            "steps": progress.step,
            "tokens": progress.tokens,
            "packing": progress.tokens / progress.packed_room,
            "curves": quantities,
            "phases": [{"name": phase.name, "last_step": step} for phase, step in zip(recipe.phases, progress.phase_ends, strict=True)],
            "kept_steps": list(kept_steps),
            "average": recipe.training.averaging.ema_half_life is not None,
            "seconds": progress.seconds,
            "resumed_at": list(progress.resumed_at),
            "peak_memory_bytes": peak_memory(),
            "flop_utilisation": _utilisation(quantities["flops_per_second"], session.processes.size),
        },
    }


def curves(out: Path) -> Mapping[str, list[tuple[int, float]]]:
    """The quantities of a run's log; of one that goes on, as far as it has come."""
    lines = read_log(out / LOG) if (out / LOG).exists() else []
    return {key: curve(lines, key) for key in CURVES}


def _utilisation(flops_per_second: Sequence[tuple[int, float]], processes: int) -> float | None:
    peak = peak_flops()
    return None if peak is None else statistics.median(value for _, value in flops_per_second) / (peak * processes)
