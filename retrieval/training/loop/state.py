"""What a checkpoint holds: the model as it would be used, and beside it all that makes a resumed run the same run.

On a CPU it is the same to the bit.

    config.json, model.safetensors, ...     the model, by `BiEncoder.save` or `ColBERT.save`: it opens like any other
    trained_weights.safetensors             where those are not the weights being trained: LoRA, schedule-free
    trainer.json, trainer.safetensors       optimiser, schedule, random generators of every process, progress

Where the frozen weights of a LoRA run come from is not the checkpoint's business: see ``start`` in `quiver.retrieval.training.run_folder`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from quiver.encoder.errors import InputError
from quiver.encoder.files import save_tensors
from quiver.encoder.training.state_files import read_state, write_state
from quiver.encoder.training.trainer import Progress, read_progress
from quiver.retrieval.models.biencoder import BiEncoder
from quiver.retrieval.models.colbert import ColBERT
from quiver.retrieval.models.loading import default_device, load_parts
from quiver.retrieval.training.loop.optimization import has_two_weights, weights_for_use

if TYPE_CHECKING:
    from quiver.retrieval.training.loop.fsdp import Shards  # imports torch.distributed, which one process does not need

WEIGHTS = "trained_weights.safetensors"
STATE = "trainer"


@dataclass
class TrainState:
    """What changes while a run goes on.

    Attributes:
        model: Ours.
        library: The same weights as the trainer sees them.
        optimizer: Over those that have gradients.
        schedule: Of its learning rate.
        lora: The encoder's own weights are frozen.
        shards: How the weights are shared out over the processes, if they are.
    """

    model: BiEncoder | ColBERT
    library: nn.Module
    optimizer: Optimizer
    schedule: LambdaLR
    lora: bool
    shards: Shards | None = None

    def trained(self) -> dict[str, nn.Parameter]:
        """The weights that have gradients, by name."""
        return {name: weight for name, weight in self.library.named_parameters() if weight.requires_grad}

    def for_use(self) -> BiEncoder | ColBERT:
        """The model without what it has cached of earlier weights, its fingerprint above all; the weights are shared."""
        return type(self.model)(self.model.encoder, self.model.tokenizer, self.model.settings, source=self.model.source)

    @contextmanager
    def together(self) -> Iterator[BiEncoder | ColBERT | None]:
        """The model as it is used, in the process that leads at least; where the weights are shared out, all processes enter together."""
        with weights_for_use(self.optimizer):
            if self.shards is None:
                yield self.for_use()
                return
            with self.shards.together() as model:
                yield model

    def optimizer_state(self) -> dict[str, Any]:
        """The optimiser's, as of one over whole weights; where they are shared out, all processes ask, and the one that leads is told."""
        return self.optimizer.state_dict() if self.shards is None else self.shards.optimizer_state(self.optimizer)

    def load_optimizer_state(self, state: dict[str, Any]) -> None:
        """Put it back."""
        if self.shards is None:
            self.optimizer.load_state_dict(state)
        else:
            self.shards.load_optimizer_state(self.optimizer, state)


def write_snapshot(folder: Path | None, trained_state: TrainState, progress: Progress, random_states: list[dict[str, Any]]) -> None:
    """Put the state of a run into a folder; all processes call it.

    Args:
        folder: Exists, and is empty; None in the processes that do not write.
        trained_state: Between two updates.
        progress: Of it.
        random_states: `random_state` of every process by rank.
    """
    if folder is None and trained_state.shards is None:
        return
    with trained_state.together() as model:
        if folder is not None and model is not None:
            model.save(folder)
    optimizer = trained_state.optimizer_state()
    if folder is None:
        return
    if trained_state.lora or has_two_weights(trained_state.optimizer):
        save_tensors({name: weight.detach().cpu().contiguous() for name, weight in trained_state.trained().items()}, folder / WEIGHTS)
    state = {
        "optimizer": optimizer,
        "schedule": trained_state.schedule.state_dict(),
        "random": random_states,
        "progress": asdict(progress),
    }
    write_state(folder / STATE, state)


def open_snapshot_model(folder: Path) -> BiEncoder | ColBERT:
    """The model of a checkpoint, or of any model folder, with weights that can be trained on.

    Raises:
        InputError: It is no model, or not one that Quiver runs.
    """
    parts = load_parts(folder, device=default_device())
    kind: type[BiEncoder] | type[ColBERT] = ColBERT if parts.settings.kind == "colbert" else BiEncoder
    return kind(parts.encoder, parts.tokenizer, parts.settings, source=str(folder))


def read_snapshot(folder: Path, trained_state: TrainState) -> tuple[Progress, list[dict[str, Any]]]:
    """Put optimiser, schedule and, where they are not the model's own, the trained weights back.

    Args:
        folder: A sound checkpoint.
        trained_state: Made of its model; changed in place.

    Returns:
        The progress, and the state of the random generators of every process by rank, which the caller puts back when all that
        draws numbers on the way to the next update has been done.

    Raises:
        InputError: The checkpoint is of another model, or written by another version.
    """
    if (folder / WEIGHTS).is_file():
        saved, trained = load_file(folder / WEIGHTS), trained_state.trained()
        if {name: tensor.shape for name, tensor in saved.items()} != {name: weight.shape for name, weight in trained.items()}:
            raise InputError(f"{folder / WEIGHTS}: the weights of another model")
        with torch.no_grad():
            for name, weight in trained.items():
                weight.copy_(saved[name])
    state = read_state(folder / STATE)
    try:
        trained_state.load_optimizer_state(state["optimizer"])
        trained_state.schedule.load_state_dict(state["schedule"])
        return read_progress(state, folder), state["random"]
    except InputError:
        raise
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(f"{folder}: written by another version of Quiver or torch ({error}); start the run again") from error
