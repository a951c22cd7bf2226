"""The training loop: sentence-transformers' trainer around a student, for both kinds of model.

The library iterates, accumulates, casts, wraps for several processes and steps the optimiser. What it does otherwise is done here
or in `Watch`: it would drop the native module from its checkpoints, read pickles, number epochs wrongly where a sampler runs out
early, log a plausible number in place of NaN, and forget the losses since the last log line when it resumes.

Importing this module imports sentence-transformers, transformers and accelerate (extra ``train``).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from sentence_transformers import SentenceTransformerTrainer, SentenceTransformerTrainingArguments
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from transformers import PrinterCallback

from quiver.encoder.errors import InputError
from quiver.encoder.training.nonfinite import NONFINITE, SeenBatch, keep_batches, nonfinite_error
from quiver.encoder.training.processes import Processes
from quiver.encoder.training.stopping import StopRequest
from quiver.retrieval.training.loop.feed import FED, Fed, Feed
from quiver.retrieval.training.loop.fsdp import whole_tensor
from quiver.retrieval.training.loop.snapshot import Trainee
from quiver.retrieval.training.loop.watch import Update, Watch
from quiver.retrieval.training.sections import Recipe
from quiver.retrieval.training.student.build import Student


@dataclass(frozen=True)
class Fitting:
    """What a trainer is given.

    Attributes:
        recipe: Its ``training``.
        steps: Updates of the whole run.
        student: What is trained.
        trainee: The same, with its optimiser.
        feed: Batches that are left.
        processes: Of the run.
        watch: Told of every update.
        stop: Asked at every update.
    """

    recipe: Recipe
    steps: int
    student: Student
    trainee: Trainee
    feed: Feed
    processes: Processes
    watch: Watch
    stop: StopRequest


class Trainer(SentenceTransformerTrainer):  # type: ignore[misc]  # the library is untyped
    """One run, or the rest of one.

    Args:
        fitting: What is trained on what.
        out: Folder of the run; a batch that cannot be trained on is left in it.
    """

    def __init__(self, fitting: Fitting, out: Path) -> None:
        self._fitting = fitting
        self._out = out
        self._seen: list[tuple[Fed, dict[str, Any], Tensor]] = []
        self._grad_norm: float | None = None
        trainee = fitting.trainee
        super().__init__(
            model=fitting.student.library,
            args=_arguments(fitting, out),
            loss=fitting.student.loss,
            data_collator=fitting.student.collator,
            callbacks=[fitting.watch],
            optimizers=(trainee.optimizer, trainee.schedule),
        )
        self.remove_callback(PrinterCallback)  # standard output is the command's
        if trainee.shards is not None:  # a model of shares brings its gradients together itself, and takes no second wrapping for that
            self.accelerator.prepare_model = partial(self.accelerator.prepare_model, evaluation_mode=True)

    def add_model_card_callback(self, default_args_dict: dict[str, Any]) -> None:
        """None: the library's card would describe the data by reading it."""

    def get_train_dataloader(self) -> Feed:
        """The batches that are left, each process's own part of them."""
        return self._fitting.feed

    def training_step(self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Tensor | int | None = None) -> Tensor:
        """One batch forward and backward; behind the last of an update its gradient is clipped and looked at.

        Raises:
            InputError: The loss or the gradient is no number; nothing has been updated.
        """
        fed = inputs.pop(FED)
        features = dict(inputs)
        loss: Tensor = super().training_step(model, inputs, num_items_in_batch)
        self._seen.append((fed, features, loss))
        if self.accelerator.sync_gradients:
            self._measure(model)
        return loss

    def _measure(self, model: nn.Module) -> None:
        fitting, training = self._fitting, self._fitting.recipe.training
        norm = whole_tensor(clip_grad_norm_([weight for weight in model.parameters() if weight.requires_grad], training.max_grad_norm))
        # The library has divided each batch's loss by their number. One wait for the device an update.
        *losses, grad_norm = torch.stack([*(loss for _, _, loss in self._seen), norm.to(self._seen[0][2].device)]).tolist()
        read = [fed for fed, _, _ in self._seen]
        mine = [
            sum(losses),  # math.fsum refuses inf - inf
            sum(fed.texts for fed in read),
            sum(fed.truncated for fed in read),
            sum(fed.tokens for fed in read),
            fitting.stop.name is not None,
        ]
        loss, texts, truncated, tokens, stop = fitting.processes.sums(mine)
        loss /= fitting.processes.size
        # Gradients are the same in all processes, and so is the mean of the losses: all of them stop, or none.
        if not (math.isfinite(loss) and math.isfinite(grad_norm)):
            raise self._refuse(loss, losses, grad_norm)
        self._seen.clear()
        self._grad_norm = grad_norm
        batches = [fed.batch for fed in read]
        fitting.watch.measured(Update(loss, grad_norm, int(texts), int(truncated), int(tokens), stop > 0, batches))

    def _refuse(self, loss: float, losses: list[float], norm: float) -> InputError:
        """Keep the batches that the update came from, those of the process whose loss it is; what to raise."""
        step, processes = self._fitting.watch.progress.step + 1, self._fitting.processes
        folder = self._out / NONFINITE / f"step-{step:06d}"
        place = folder if processes.size == 1 else folder / f"process-{processes.rank}"
        if math.isfinite(loss) or not all(map(math.isfinite, losses)):
            whole = [
                SeenBatch(fed.examples, features, own * len(losses)) for (fed, features, _), own in zip(self._seen, losses, strict=True)
            ]
            keep_batches(place, whole, step=step, grad_norm=norm)
        return nonfinite_error(folder, step=step, loss=loss, grad_norm=norm, setting="training.learning_rate")

    def _get_grad_norm(self, model: nn.Module, grad_norm: object = None) -> float | None:
        """What transformers logs as the norm; it would compute it a second time."""
        del model, grad_norm
        return self._grad_norm


def _arguments(fitting: Fitting, out: Path) -> SentenceTransformerTrainingArguments:
    training = fitting.recipe.training
    arguments = SentenceTransformerTrainingArguments(
        output_dir=str(out),
        max_steps=fitting.steps,
        per_device_train_batch_size=training.batch_size,
        gradient_accumulation_steps=training.accumulation,
        max_grad_norm=0.0,  # clipped in training_step, where the norm is known before the update
        bf16=training.precision == "bf16",
        seed=training.seed,
        ddp_find_unused_parameters=False,
        ddp_broadcast_buffers=False,  # they are tables, alike in all processes
        save_strategy="no",
        logging_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=fitting.student.model.encoder.device.type == "cpu",
    )
    # transformers takes it from ACCELERATE_MIXED_PRECISION where it is not asked for bf16.
    arguments.mixed_precision = "bf16" if training.precision == "bf16" else "no"
    # DataParallel would give every device a batch of its own, and the run would not be the one that its record describes.
    arguments._n_gpu = min(arguments.n_gpu, 1)
    return arguments
