"""Weights, optimizer, learning rate and sharding of a run, the checkpoint that holds them, and averages of checkpoints.

A checkpoint folder opens like any model folder and makes a resumed run equal to one that was not interrupted, on a CPU bit for bit:

    config.json, model.safetensors, ...     the model as it would be used, by `BiEncoder.save` or `ColBERT.save`
    trained_weights.safetensors             the weights in training, where they differ from the model's: LoRA, schedule-free AdamW
    trainer.json, trainer.safetensors       optimizer, schedule, random generators of all processes, progress

The frozen weights of a LoRA run are not in its checkpoints but in ``start/``, see `quiver.encoder.training.run_folder`.
"""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from quiver.encoder import Encoder
from quiver.encoder.checkpoints.checkpoint import local_folder
from quiver.encoder.errors import InputError
from quiver.encoder.files import save_tensors
from quiver.encoder.training import optimization, sharding
from quiver.encoder.training.averaging import average_weights
from quiver.encoder.training.optimization import OptimizerSettings
from quiver.encoder.training.processes import Processes
from quiver.encoder.training.sharding import whole_tensor
from quiver.encoder.training.trainer import Progress, load_train_state, save_train_state
from quiver.retrieval.models.biencoder import BiEncoder
from quiver.retrieval.models.colbert import ColBERT
from quiver.retrieval.models.export.export import check_target, replacing_folder
from quiver.retrieval.models.loading import build_model
from quiver.retrieval.models.pretrained import load_parts
from quiver.retrieval.records import ModelCard
from quiver.retrieval.training.recipe import Recipe, TrainingSection

logger = logging.getLogger(__name__)

WEIGHTS = "trained_weights.safetensors"
SCHEDULE_FREE = "schedule_free_adamw"


def warmup_steps(training: TrainingSection, steps: int) -> int:
    """Return the number of steps in which the learning rate rises."""
    return math.ceil(steps * training.warmup_ratio)


def learning_rate_share(training: TrainingSection, step: int, steps: int) -> float:
    """Return the learning rate of a step as a share of its peak."""
    warmup = warmup_steps(training, steps)
    if training.optimizer == SCHEDULE_FREE and step < warmup:
        return (step + 1) / warmup  # schedule-free AdamW begins with the first step of the warm-up, transformers' schedules with zero
    return optimization.learning_rate_share(step, warmup=warmup, decay_start=warmup, total=steps, decay=training.scheduler)


def make_optimizer(training: TrainingSection, parameters: Iterable[tuple[str, nn.Parameter]], steps: int) -> tuple[Optimizer, LambdaLR]:
    """Make the optimizer of a recipe and its schedule."""
    settings = OptimizerSettings(
        training.optimizer, training.learning_rate, training.weight_decay, warmup_steps=warmup_steps(training, steps)
    )
    optimizer = optimization.make_optimizer(settings, (parameter for _, parameter in parameters))
    if training.optimizer == SCHEDULE_FREE:
        return optimizer, LambdaLR(optimizer, lambda step: 1.0)  # the optimizer has a schedule of its own
    return optimizer, LambdaLR(optimizer, lambda step: learning_rate_share(training, step, steps))


def has_two_weights(optimizer: Optimizer) -> bool:
    """Whether evaluation needs other weights than training, as with schedule-free optimizers."""
    return callable(getattr(optimizer, "eval", None))


@contextmanager
def weights_for_use(optimizer: Optimizer) -> Iterator[None]:
    """Give the model the weights that it is used with while the block runs; afterwards it has, bit for bit, those in training."""
    if not has_two_weights(optimizer):
        yield
        return
    groups: list[dict[str, Any]] = optimizer.param_groups
    parameters: list[Tensor] = [parameter for group in groups for parameter in group["params"]]
    kept = [parameter.detach().clone() for parameter in parameters]
    modes = [group["train_mode"] for group in groups]
    optimizer.eval()  # type: ignore[attr-defined]  # checked by has_two_weights
    try:
        yield
    finally:
        # Not optimizer.train(): interpolating there and back rounds, so saving a checkpoint would change the run.
        with torch.no_grad():
            for parameter, value in zip(parameters, kept, strict=True):
                parameter.copy_(value)
        for group, mode in zip(groups, modes, strict=True):
            group["train_mode"] = mode


@dataclass(frozen=True)
class Schedule:
    """Length of a run in steps, and the steps after which it logs, evaluates and saves.

    The number of steps is fixed in advance. The number of batches per epoch is not, if no text may occur twice in a batch.
    """

    steps: int
    batches_per_epoch: int
    accumulation: int

    @classmethod
    def of(cls, recipe: Recipe, batches_per_epoch: int) -> Schedule:
        """Return the schedule of a recipe."""
        training = recipe.training
        steps = max(1, math.ceil(batches_per_epoch * training.epochs / training.accumulation))
        return cls(steps if training.max_steps is None else min(steps, training.max_steps), batches_per_epoch, training.accumulation)

    def epochs(self, epoch: int, batches: int) -> float:
        """Return the number of passes over the rows, as a fraction."""
        return epoch + batches / self.batches_per_epoch

    def due(self, every: int | None, step: int, ends: Collection[int]) -> bool:
        """Whether an action with a period in steps (None: each epoch) is due after a step; after the last step it always is."""
        return step == self.steps or (step % every == 0 if every else step in ends)

    def planned(self, steps: Iterable[int], every: int | None, ends: Collection[int]) -> list[int]:
        """Return the steps after which a periodic action is due, see `due`."""
        return [step for step in steps if self.due(every, step, ends)]


@dataclass(frozen=True)
class Shards:
    """A model whose weights are sharded over the processes, see `quiver.encoder.training.sharding`."""

    model: BiEncoder | ColBERT
    whole: BiEncoder | ColBERT | None

    @contextmanager
    def gathered(self) -> Iterator[BiEncoder | ColBERT | None]:
        """Yield the model with whole weights on the device of the shards in the main process, None in the others; called by all."""
        whole = () if self.whole is None else (self.whole.encoder, self.whole.projections)
        copies = [weight for module in whole for weight in module.parameters()]
        shares = [weight for module in (self.model.encoder, self.model.projections) for weight in module.parameters()]
        for number, weight in enumerate(shares):
            full = whole_tensor(weight.detach())  # all processes take part; one weight at a time, to save memory
            if copies:
                copies[number].data.copy_(full)
        if self.whole is None:
            yield None
            return
        for module in whole:
            module.to(self.model.encoder.device).eval()
        try:
            yield without_cache(self.whole)
        finally:
            for module in whole:
                module.to("cpu")


def shard(model: BiEncoder | ColBERT, module: nn.Module, processes: Processes) -> Shards:
    """Shard the weights of a model in place, see `quiver.encoder.training.sharding`."""
    whole = None
    if processes.is_main_process:
        settings = replace(model.settings, projections=tuple(copy.deepcopy(one).to("cpu") for one in model.settings.projections))
        whole = type(model).from_parts(copy.deepcopy(model.encoder).to("cpu"), model.tokenizer, settings, source=model.source)
    sharding.shard(module, model.encoder.layers if isinstance(model.encoder, Encoder) else (), processes, model.encoder.device)
    return Shards(model, whole)


def without_cache(model: BiEncoder | ColBERT) -> BiEncoder | ColBERT:
    """Return the model with the same weights and nothing cached from earlier ones, such as its fingerprint."""
    return type(model).from_parts(model.encoder, model.tokenizer, model.settings, source=model.source)


@dataclass
class TrainState:
    """What changes during a run."""

    model: BiEncoder | ColBERT
    module: nn.Module
    optimizer: Optimizer
    schedule: LambdaLR
    lora: bool
    shards: Shards | None = None

    def trained(self) -> dict[str, nn.Parameter]:
        """Return the weights that have gradients, by name."""
        return {name: weight for name, weight in self.module.named_parameters() if weight.requires_grad}

    @contextmanager
    def model_for_use(self) -> Iterator[BiEncoder | ColBERT | None]:
        """Yield the model as it would be saved and searched with, at least in the main process; called by all processes."""
        with weights_for_use(self.optimizer):
            if self.shards is None:
                yield without_cache(self.model)
                return
            with self.shards.gathered() as model:
                yield model


def write_checkpoint(folder: Path | None, train_state: TrainState, progress: Progress, random_states: list[dict[str, Any]]) -> None:
    """Write the state of a run into a folder; called by all processes."""
    if folder is None and train_state.shards is None:
        return
    with train_state.model_for_use() as model:
        if folder is not None and model is not None:
            model.save_pretrained(folder)
    shards = train_state.shards
    optimizer = sharding.whole_optimizer_state(train_state.optimizer, keep=shards is None or shards.whole is not None)
    if folder is None:
        return
    if train_state.lora or has_two_weights(train_state.optimizer):
        save_tensors({name: weight.detach().cpu().contiguous() for name, weight in train_state.trained().items()}, folder / WEIGHTS)
    save_train_state(folder, {"optimizer": optimizer, "schedule": train_state.schedule.state_dict()}, progress, random_states)


def load_trainable(folder: Path, *, device: str = "cpu") -> BiEncoder | ColBERT:
    """Load the model of a checkpoint, or of any model folder, with weights that can be trained, on a device."""
    return build_model(load_parts(folder, device=device), folder)


def read_checkpoint(folder: Path, train_state: TrainState) -> tuple[Progress, list[dict[str, Any]]]:
    """Restore optimizer, schedule and, if they are not those of the model, the weights in training."""
    if (folder / WEIGHTS).is_file():
        saved, trained = load_file(folder / WEIGHTS), train_state.trained()
        if {name: tensor.shape for name, tensor in saved.items()} != {name: weight.shape for name, weight in trained.items()}:
            raise InputError(f"{folder / WEIGHTS}: contains the weights of another model")
        with torch.no_grad():
            for name, weight in trained.items():
                weight.copy_(saved[name])
    checkpoint = load_train_state(folder, ("optimizer", "schedule"))
    try:
        sharding.load_whole_optimizer_state(train_state.optimizer, checkpoint.state["optimizer"])
        train_state.schedule.load_state_dict(checkpoint.state["schedule"])
        return checkpoint.progress, checkpoint.random_states
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(f"{folder}: written by another version of Quiver or torch ({error}); start the run again") from error


def average_models(sources: Sequence[str | Path]) -> BiEncoder | ColBERT:
    """Load models one by one, two in memory at a time, and average their weights."""
    if not sources:
        raise ValueError("an average needs at least one model")
    mean = load_trainable(local_folder(sources[0]))
    if len(sources) == 1:
        return mean

    def weights() -> Iterator[dict[str, Tensor]]:
        yield _tensors(mean)
        for source in sources[1:]:
            other = load_trainable(local_folder(source))
            if difference := _difference(mean, other):
                raise InputError(f"{source} and {sources[0]} cannot be averaged: they differ in {difference}")
            yield _tensors(other)

    averages = average_weights(weights())
    with torch.no_grad():
        for name, tensor in _tensors(mean).items():
            tensor.copy_(averages[name])
    return mean


def write_average(sources: Sequence[str | Path], out: Path, *, overwrite: bool = False) -> ModelCard:
    """Average models and write the result by one rename (into a git clone, file by file)."""
    if any(Path(source).resolve().is_relative_to(out.resolve()) for source in sources):
        raise InputError(f"{out}: is or contains one of the models to average; choose another --out")
    for source in sources:
        check_target(out, Path(source), overwrite=overwrite)
    mean = average_models(sources)
    model = type(mean).from_parts(mean.encoder, mean.tokenizer, mean.settings, source=str(out))
    try:
        with replacing_folder(out) as folder:
            model.save_pretrained(folder)
    except OSError as error:
        raise InputError(f"{out}: cannot be written ({error.strerror})") from error
    return model.card


def _tensors(model: BiEncoder | ColBERT) -> dict[str, Tensor]:
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
        "the shapes of their weights": tuple({name: t.shape for name, t in _tensors(model).items()} for model in (first, second)),
        "their settings": tuple(replace(model.settings, encoder_folder=Path(), projections=()) for model in (first, second)),
        "their Dense modules": tuple(
            [(one.activation, one.use_residual) for one in model.settings.projections] for model in (first, second)
        ),
    }
    return next((what for what, (one, other) in compared.items() if one != other), None)
