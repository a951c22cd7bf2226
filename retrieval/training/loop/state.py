"""What a checkpoint holds: the model as it would be used, and beside it all that makes a resumed run the same run.

On a CPU it is the same to the bit.

    config.json, model.safetensors, ...     the model, by `BiEncoder.save` or `ColBERT.save`: it opens like any other
    trained_weights.safetensors             where those are not the weights being trained: LoRA, schedule-free
    trainer.json, trainer.safetensors       optimiser, schedule, random generators of every process, progress

Where the frozen weights of a LoRA run come from is not the checkpoint's business: see ``start`` in `quiver.encoder.training.run_folder`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from quiver.encoder.checkpoints.folder import local_folder
from quiver.encoder.errors import InputError
from quiver.encoder.files import save_tensors
from quiver.encoder.training.averaging import average_weights
from quiver.encoder.training.state import read_state, write_state
from quiver.encoder.training.trainer import Progress, read_progress
from quiver.retrieval.models.biencoder import BiEncoder
from quiver.retrieval.models.colbert import ColBERT
from quiver.retrieval.models.export.export import check_target, replacing_folder
from quiver.retrieval.models.loading import default_device, load_parts
from quiver.retrieval.records import ModelCard
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


def write_snapshot(folder: Path | None, train_state: TrainState, progress: Progress, random_states: list[dict[str, Any]]) -> None:
    """Put the state of a run into a folder; all processes call it.

    Args:
        folder: Exists, and is empty; None in the processes that do not write.
        train_state: Between two updates.
        progress: Of it.
        random_states: `random_state` of every process by rank.
    """
    if folder is None and train_state.shards is None:
        return
    with train_state.together() as model:
        if folder is not None and model is not None:
            model.save(folder)
    optimizer = train_state.optimizer_state()
    if folder is None:
        return
    if train_state.lora or has_two_weights(train_state.optimizer):
        save_tensors({name: weight.detach().cpu().contiguous() for name, weight in train_state.trained().items()}, folder / WEIGHTS)
    state = {
        "optimizer": optimizer,
        "schedule": train_state.schedule.state_dict(),
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


def read_snapshot(folder: Path, train_state: TrainState) -> tuple[Progress, list[dict[str, Any]]]:
    """Put optimiser, schedule and, where they are not the model's own, the trained weights back.

    Args:
        folder: A sound checkpoint.
        train_state: Made of its model; changed in place.

    Returns:
        The progress, and the state of the random generators of every process by rank, which the caller puts back when all that
        draws numbers on the way to the next update has been done.

    Raises:
        InputError: The checkpoint is of another model, or written by another version.
    """
    if (folder / WEIGHTS).is_file():
        saved, trained = load_file(folder / WEIGHTS), train_state.trained()
        if {name: tensor.shape for name, tensor in saved.items()} != {name: weight.shape for name, weight in trained.items()}:
            raise InputError(f"{folder / WEIGHTS}: the weights of another model")
        with torch.no_grad():
            for name, weight in trained.items():
                weight.copy_(saved[name])
    state = read_state(folder / STATE)
    try:
        train_state.load_optimizer_state(state["optimizer"])
        train_state.schedule.load_state_dict(state["schedule"])
        return read_progress(state, folder), state["random"]
    except InputError:
        raise
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(f"{folder}: written by another version of Quiver or torch ({error}); start the run again") from error


def average_models(sources: Sequence[str | Path]) -> BiEncoder | ColBERT:
    """Load models one by one and average their weights.

    Two models are in memory at a time.

    Args:
        sources: Folders or Hub ids, at least one. A model that occurs twice counts twice.

    Returns:
        The average, with the common settings.

    Raises:
        InputError: A source is not a model, or two models differ in more than their weights (names both and the difference).
    """
    if not sources:
        raise ValueError("an average needs at least one model")
    mean = open_snapshot_model(local_folder(sources[0]))
    if len(sources) == 1:
        return mean

    def weights() -> Iterator[dict[str, Tensor]]:
        yield _weights(mean)
        for source in sources[1:]:
            other = open_snapshot_model(local_folder(source))
            if difference := _difference(mean, other):
                raise InputError(f"{source} and {sources[0]} cannot be averaged: they differ in {difference}")
            yield _weights(other)

    averages = average_weights(weights())
    with torch.no_grad():
        for name, tensor in _weights(mean).items():
            tensor.copy_(averages[name])
    return mean


def write_average(sources: Sequence[str | Path], out: Path, *, overwrite: bool = False) -> ModelCard:
    """Average models and write the result by one rename (into a git clone, file by file).

    Args:
        sources: See `average_models`.
        out: Target folder.
        overwrite: Replace an existing model.

    Returns:
        The card of the average.

    Raises:
        InputError: The models cannot be averaged (see `average_models`); or ``out`` is a file, contains one of the sources, holds a model
            and ``overwrite`` is False, holds other files, or cannot be written.
    """
    if any(Path(source).resolve().is_relative_to(out.resolve()) for source in sources):
        raise InputError(f"{out}: is or contains one of the models to average; choose another --out")
    for source in sources:
        check_target(out, Path(source), overwrite=overwrite)
    mean = average_models(sources)
    model = type(mean)(mean.encoder, mean.tokenizer, mean.settings, source=str(out))
    try:
        with replacing_folder(out) as folder:
            model.save(folder)
    except OSError as error:
        raise InputError(f"{out}: cannot be written ({error.strerror})") from error
    return model.card


def _weights(model: BiEncoder | ColBERT) -> dict[str, Tensor]:
    """Tensors of the model by name, not copied."""
    return {
        f"{part}.{name}": tensor
        for part, module in (("encoder", model.encoder), ("projections", model.projections))
        for name, tensor in module.state_dict().items()
    }


def _difference(first: BiEncoder | ColBERT, second: BiEncoder | ColBERT) -> str | None:
    """Difference of two models besides their weights, in words; None if there is none."""
    compared = {
        "kind": (first.settings.kind, second.settings.kind),
        "architecture": (asdict(first.encoder.config), asdict(second.encoder.config)),
        "vocabulary": (first.tokenizer.to_json(), second.tokenizer.to_json()),
        "the shapes of their weights": tuple({name: t.shape for name, t in _weights(model).items()} for model in (first, second)),
        "their settings": tuple(replace(model.settings, encoder_folder=Path(), projections=()) for model in (first, second)),
        "their Dense modules": tuple(
            [(one.activation, one.use_residual) for one in model.settings.projections] for model in (first, second)
        ),
    }
    return next((what for what, (one, other) in compared.items() if one != other), None)
