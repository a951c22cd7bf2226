"""One update: forward and backward over its rows, gradients summed over processes, the optimiser's step.

The loss of an update is the mean over all tokens that are asked for in it, whatever row or process they are in, so neither the number of
rows nor that of processes changes what is learnt. For the same reason gradients are summed here and not averaged by
DistributedDataParallel, which besides needs as many rows in every process: a batch-size warm-up would have to be in steps of their number.

Shapes: N tokens of a row.
"""

from __future__ import annotations

import math
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, distributed
from torch.nn.utils import get_total_norm

from quiver.encoder.errors import InputError
from quiver.encoder.heads import MaskedLM
from quiver.encoder.pretraining.flops import training_flops
from quiver.encoder.pretraining.optimizer import set_learning_rate
from quiver.encoder.pretraining.schedule import learning_rate_share
from quiver.encoder.pretraining.sections import PhaseSection
from quiver.encoder.pretraining.snapshot import TrainState
from quiver.encoder.pretraining.stream import MaskedRow, UpdateBatch
from quiver.encoder.tokenizer import Tokenizer
from quiver.encoder.training.log import NONFINITE, SeenBatch, keep_batches, nonfinite_error
from quiver.encoder.training.processes import Processes


@dataclass(frozen=True)
class Update:
    """What was measured in an update, over all processes.

    Attributes:
        loss: Mean over the tokens that were asked for.
        grad_norm: L2 norm of its gradient.
        learning_rate: It was done with.
        flops: Operations of the model, see `quiver.encoder.pretraining.flops`.
        stop: Somebody has asked one of the processes to stop.
    """

    loss: float
    grad_norm: float
    learning_rate: float
    flops: float
    stop: bool


def casting(precision: str, device: torch.device) -> AbstractContextManager[None]:
    """Autocast to bfloat16, where a recipe asks for it and the device is a GPU."""
    casts: AbstractContextManager[None] = torch.autocast("cuda", torch.bfloat16, enabled=precision == "bf16" and device.type == "cuda")
    return casts


@dataclass(frozen=True)
class Updater:
    """Does the updates of a phase.

    Attributes:
        train_state: Changed in place.
        phase: Its schedule.
        number: Of the phase.
        processes: Of the run.
        precision: ``fp32`` or ``bf16``.
        out: Folder of the run; a batch that cannot be trained on is left in it.
        tokenizer: Says what its text was.
    """

    train_state: TrainState
    phase: PhaseSection
    number: int
    processes: Processes
    precision: str
    out: Path
    tokenizer: Tokenizer

    def do(self, batch: UpdateBatch, *, step: int, tokens: int, stop: bool) -> Update:
        """One update.

        Args:
            batch: This process's rows, and what all have in common.
            step: Number of the update in the run, from 1.
            tokens: Tokens of the phase that were read before it.
            stop: This process was asked to stop.

        Raises:
            InputError: The loss or the gradient is no number; nothing has been updated.
        """
        train_state = self.train_state
        model, optimizer = train_state.model, train_state.optimizer
        own_flops = sum(training_flops(model.encoder.config, row.batch.lengths, asked=row.asked) for row in batch.rows)
        [asked, flops, stops] = self.processes.sum([sum(row.asked for row in batch.rows), own_flops, stop])
        losses = [self._backward(model, row, row.asked / max(1.0, asked)) for row in batch.rows]
        gradients = self._summed_gradients(model)
        # One wait for the device an update.
        *own, norm = torch.stack([*losses, get_total_norm(gradients)]).tolist()
        [loss] = self.processes.sum([sum(own)])
        if not (math.isfinite(loss) and math.isfinite(norm)):
            raise self._refuse(batch.rows, own, step=step, loss=loss, norm=norm)
        share = learning_rate_share(self.phase, tokens)
        set_learning_rate(optimizer, self.phase, share)
        optimizer.step()
        optimizer.zero_grad()
        if train_state.average is not None:
            train_state.average.update(model)
        train_state.stream = batch.state
        return Update(loss, norm, self.phase.learning_rate * share, flops, stops > 0)

    def _backward(self, model: MaskedLM, row: MaskedRow, share: float) -> Tensor:
        """A row's part of the update's loss, its gradient added."""
        with casting(self.precision, model.encoder.device):
            loss = model(row.batch, row.labels).loss * share
        loss.backward()
        part: Tensor = loss.detach()
        return part

    def _summed_gradients(self, model: MaskedLM) -> list[Tensor]:
        weights = [weight for weight in model.parameters() if weight.requires_grad]
        for weight in weights:
            if weight.grad is None:  # a process without a row in this update
                weight.grad = torch.zeros_like(weight)
        gradients = [weight.grad for weight in weights if weight.grad is not None]
        if self.processes.size > 1:
            works = [distributed.all_reduce(gradient, async_op=True) for gradient in gradients]
            for work in works:
                if work is not None:
                    work.wait()
        return gradients

    def _refuse(self, rows: list[MaskedRow], losses: list[float], *, step: int, loss: float, norm: float) -> InputError:
        """Keep the rows that the update came from, those of the process whose loss it is; what to raise."""
        folder = self.out / NONFINITE / f"step-{step:06d}"
        place = folder if self.processes.size == 1 else folder / f"process-{self.processes.rank}"
        if math.isfinite(loss) or not all(map(math.isfinite, losses)):
            keep_batches(place, [self._seen(row, own) for row, own in zip(rows, losses, strict=True)], step=step, grad_norm=norm)
        return nonfinite_error(folder, step=step, loss=loss, grad_norm=norm, setting=f"phases.{self.number}.learning_rate")

    def _seen(self, row: MaskedRow, loss: float) -> SeenBatch:
        texts = [self.tokenizer.decode(ids.tolist()) for ids in row.batch.unpack(row.batch.ids)]
        pieces = [{**piece._asdict(), "masked_text": text} for piece, text in zip(row.pieces, texts, strict=True)]
        return SeenBatch(pieces, {"ids": row.batch.ids, "labels": row.labels, "cu_seqlens": row.batch.cu_seqlens}, loss)
