"""What a checkpoint of pretraining holds: the model as it would be used, and beside it all that makes a resumed run the same run.

config.json, model.safetensors, tokenizer.json, ...    a masked language model that opens like any other
trainer.json, trainer.safetensors                      optimiser, stream, moving average, random generators, progress
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from torch.optim import Optimizer

from quiver.encoder.checkpoints.head_checkpoint import load_head, save_head
from quiver.encoder.errors import InputError
from quiver.encoder.heads import MaskedLM
from quiver.encoder.pretraining.averaging import MovingAverage
from quiver.encoder.tokenizer import Tokenizer
from quiver.encoder.training.state import read_state, write_state

STATE = "trainer"


@dataclass
class Progress:
    """How far a run has come; all counts are over all processes and sessions.

    Attributes:
        step: Updates done.
        tokens: Tokens read.
        phase: Number of the phase.
        phase_tokens: Tokens read in it.
        phase_ends: Last updates of the phases that are done.
        seconds: Time, evaluating and saving included.
        window_updates: Updates since the last line of the log.
        window_loss: Sum of their losses.
        window_tokens: Sum of their tokens.
        window_room: Tokens that their rows could have held.
        window_flops: Operations that they were.
        window_seconds: Time they took, evaluating and saving not included.
        packed_room: Tokens that the rows of the whole run could have held.
        best: Of the last phase, [held-out loss, step], lowest first: the checkpoints that averaging keeps.
        resumed_at: Steps that a session went on from.
    """

    step: int = 0
    tokens: int = 0
    phase: int = 0
    phase_tokens: int = 0
    phase_ends: list[int] = field(default_factory=list)
    seconds: float = 0.0
    window_updates: int = 0
    window_loss: float = 0.0
    window_tokens: int = 0
    window_room: int = 0
    window_flops: float = 0.0
    window_seconds: float = 0.0
    packed_room: int = 0
    best: list[list[float]] = field(default_factory=list)
    resumed_at: list[int] = field(default_factory=list)


@dataclass
class TrainState:
    """What changes while a phase goes on.

    Attributes:
        model: In the phase's form.
        optimizer: Of its weights.
        average: Of its weights, if the recipe asks for one.
        stream: State of the stream behind the last update; None before the first.
    """

    model: MaskedLM
    optimizer: Optimizer
    average: MovingAverage | None
    stream: dict[str, Any] | None = None


@dataclass(frozen=True)
class Snapshot:
    """A checkpoint that was read.

    Attributes:
        model: Its weights, in the form in which they were saved.
        progress: Of the run.
        optimizer: State.
        average: State, or None.
        stream: State.
        random: States of the generators by process.
    """

    model: MaskedLM
    progress: Progress
    optimizer: dict[str, Any]
    average: dict[str, Any] | None
    stream: dict[str, Any]
    random: list[dict[str, Any]]


def save_model(model: MaskedLM, tokenizer: Tokenizer, folder: Path) -> None:
    """Write a model to be used: without dropout, as published ones are."""
    folder.mkdir(parents=True, exist_ok=True)
    with _without_dropout(model):
        save_head(model, folder)
    tokenizer.save(folder)


def write_snapshot(folder: Path, train_state: TrainState, tokenizer: Tokenizer, progress: Progress, random: list[dict[str, Any]]) -> None:
    """Put the state of a run into an empty folder.

    Args:
        folder: Exists.
        train_state: Between two updates.
        tokenizer: Of the model.
        progress: Of the run.
        random: `quiver.encoder.training.state.random_state` of every process by rank.
    """
    save_model(train_state.model, tokenizer, folder)
    state = {
        "optimizer": train_state.optimizer.state_dict(),
        "average": None if train_state.average is None else train_state.average.state(),
        "stream": train_state.stream,
        "random": random,
        "progress": asdict(progress),
    }
    write_state(folder / STATE, state)


def read_snapshot(folder: Path) -> Snapshot:
    """Read a sound checkpoint.

    Raises:
        InputError: It is damaged, or written by another version.
    """
    state = read_state(folder / STATE)
    try:
        if missing := [one.name for one in fields(Progress) if one.name not in state["progress"]]:  # defaults are for a run that begins
            raise KeyError(*missing)
        progress = Progress(**state["progress"])
        rest = {name: state[name] for name in ("optimizer", "average", "stream", "random")}
    except (KeyError, TypeError) as error:
        raise InputError(f"{folder}: written by another version of Quiver ({error}); start the run again") from error
    return Snapshot(load_head(MaskedLM, folder), progress, **rest)


@contextmanager
def _without_dropout(model: MaskedLM) -> Iterator[None]:
    """In the block the model's configuration, which is what is written, has no dropout; its modules keep theirs."""
    encoder = model.encoder
    trained, encoder.config = encoder.config, replace(encoder.config, attention_output_dropout=0.0)
    try:
        yield
    finally:
        encoder.config = trained
