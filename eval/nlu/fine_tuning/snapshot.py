"""What a checkpoint of a fine-tuning holds: the model as it would be used, and beside it all that makes a resumed run the same run.

config.json, model.safetensors, tokenizer.json, ...    a model with its head that opens like any other
trainer.json, trainer.safetensors                      optimiser, random generators, progress

The order of the examples follows from the seed and the number of updates done.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from torch.optim import AdamW

from quiver.encoder.errors import InputError
from quiver.encoder.training.random_state import random_state
from quiver.encoder.training.state_files import read_state, write_state

STATE = "trainer"


@dataclass
class Progress:
    """How far a run has come; all counts are over all sessions.

    Attributes:
        step: Updates done.
        tokens: Tokens that went through the model.
        seconds: Time, scoring and saving included.
        window_updates: Updates since the last line of the log.
        window_loss: Sum of their losses.
        window_tokens: Sum of their tokens.
        window_seconds: Time they took, scoring and saving not included.
        marked: The last update behind which the model was scored, or saved where there is nothing to score on.
        best_step: Update with the best score so far; None before the first.
        best_score: That score.
        worse: Scores since then.
        resumed_at: Updates that a session went on from.
    """

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    window_updates: int = 0
    window_loss: float = 0.0
    window_tokens: int = 0
    window_seconds: float = 0.0
    marked: int = 0
    best_step: int | None = None
    best_score: float | None = None
    worse: int = 0
    resumed_at: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Snapshot:
    """What stands beside the weights.

    Attributes:
        progress: Of the run.
        optimizer: State.
        random: State of the generators.
    """

    progress: Progress
    optimizer: dict[str, Any]
    random: dict[str, Any]


def write_snapshot(folder: Path, optimizer: AdamW, progress: Progress) -> None:
    """Put all but the model, between two updates, into the folder of a checkpoint."""
    write_state(folder / STATE, {"optimizer": optimizer.state_dict(), "random": random_state(), "progress": asdict(progress)})


def read_snapshot(folder: Path) -> Snapshot:
    """Read what `write_snapshot` wrote.

    Raises:
        InputError: It is damaged, or written by another version.
    """
    state = read_state(folder / STATE)
    try:
        if missing := [one.name for one in fields(Progress) if one.name not in state["progress"]]:  # defaults are for a run that begins
            raise KeyError(*missing)
        return Snapshot(Progress(**state["progress"]), state["optimizer"], state["random"])
    except (KeyError, TypeError) as error:
        raise InputError(f"{folder}: written by another version of Quiver ({error}); start the run again") from error
