"""Pretraining as a task of the trainer: the phases of a recipe, one after the other, with held-out loss, probes and checkpoints.

The loss of a step is the mean over all masked tokens of the step, in whatever row or process they are. A checkpoint is a masked language
model that opens like any other, and beside it the train state: optimizer, stream, moving average, random generators and progress.

Shapes: N tokens of a row, n of a sequence, D model width, I MLP width, V vocabulary, M masked tokens.
Source: PaLM, arXiv:2204.02311, appendix B (utilization: model FLOPs without recomputation).
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from quiver.encoder.checkpoints.head_checkpoint import load_head, save_head
from quiver.encoder.config import EncoderConfig
from quiver.encoder.errors import RunStoppedError
from quiver.encoder.heads import MaskedLM, MaskedLMLoss
from quiver.encoder.model import Encoder, compile_encoder
from quiver.encoder.pretraining.corpus import Corpus, Documents
from quiver.encoder.pretraining.phases import first_model, in_form, learning_rate_share, phase_config, start_from_frequencies
from quiver.encoder.pretraining.recipe import PhaseSection, PretrainingRecipe
from quiver.encoder.pretraining.stream import MaskedRow, Masker, PhaseStream, RowMaker, UpdateBatch, empty_row, held_out_rows
from quiver.encoder.progress import WorkStoppedError, should_stop
from quiver.encoder.tokenizer import Tokenizer
from quiver.encoder.training.averaging import MovingAverage
from quiver.encoder.training.optimization import (
    OptimizerName,
    OptimizerSettings,
    autocast,
    make_optimizer,
    restore_optimizer,
    set_learning_rate,
)
from quiver.encoder.training.processes import Processes, nested_training
from quiver.encoder.training.run_folder import MODEL, PROBE, Checkpoints
from quiver.encoder.training.sharding import reshard, shard, whole_optimizer_state, whole_weights
from quiver.encoder.training.trainer import Progress, SavedState, TrainingBatch, save_train_state

logger = logging.getLogger(__name__)

HELD_OUT, ACCURACY = "held_out_loss", "held_out_accuracy"  # log keys of the mean loss and of the share of tokens predicted rightly
Z_LOSS, SCORE = "z_loss", "probe_score"  # log keys of the z-loss of a step and of a probe

Probe: TypeAlias = Callable[[Path], float]
"""Scores the encoder in ``model/`` of a folder, where it may write, by a short training; `quiver.eval.probe` makes one."""

COUNTS = ("room", "flops")  # counts of a batch: tokens that its row could hold, and model FLOPs
STATES = ("optimizer", "average", "stream", "phase", "phase_tokens", "phase_ends")  # keys of the state of this task in a checkpoint

OPTIMIZER: OptimizerName = "stable_adamw"

PEAKS: Mapping[str, float] = {
    "B200": 2.25e15,
    "H200": 989.4e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835.5e12,
    "H100": 989.4e12,
    "A100": 312e12,
    "L40S": 362e12,
    "RTX 4090": 165.2e12,
}
"""Part of a GPU's name -> peak FLOP/s in bfloat16 without sparsity, by NVIDIA's data sheets; the first match counts."""


@dataclass(frozen=True)
class Session:
    """One session of a pretraining run."""

    recipe: PretrainingRecipe
    out: Path
    checkpoints: Checkpoints
    corpus: Corpus
    tokenizer: Tokenizer
    processes: Processes
    device: str
    progress: bool = False  # show a progress bar, in the main process
    # Chooses the steps of each phase that are trained, for a trial; by default all.
    chosen: Callable[[Iterator[list[TrainingBatch]]], Iterator[list[TrainingBatch]]] = iter
    probe: Probe | None = None  # called in the main process


class PretrainingTask:
    """The phases of a recipe as the trainer's task; ``model`` has the form of the current phase."""

    def __init__(self, session: Session, progress: Progress, checkpoint: tuple[Path, SavedState] | None = None) -> None:
        self._session = session
        self._progress = progress
        self._number = self._tokens = 0
        self._stream: dict[str, Any] | None = None
        self._step: UpdateBatch | None = None
        self._share = 0.0
        self._losses: list[MaskedLMLoss] = []  # of the rows of the current step
        self.phase_ends: list[int] = []
        if checkpoint is None:
            recipe, corpus = session.recipe, session.corpus
            model = first_model(recipe, session.tokenizer)
            if recipe.model.decoder_bias == "frequencies":
                start_from_frequencies(model, corpus.train.shares(model.encoder.config.vocab_size))
            self._begin_phase(model, None, None)
        else:
            folder, state = checkpoint[0], checkpoint[1].state
            self._stream, self._number, self._tokens = state["stream"], state["phase"], state["phase_tokens"]
            self.phase_ends = list(state["phase_ends"])
            model = in_form(load_head(MaskedLM, folder), self._config(), where=str(folder))
            self._begin_phase(model, state["optimizer"], state["average"])

    @property
    def module(self) -> nn.Module:
        """The model."""
        return self.model

    @property
    def optimizer(self) -> Optimizer:
        """StableAdamW over all weights."""
        return self._optimizer

    @property
    def device(self) -> torch.device:
        """Device of the model."""
        return self.model.encoder.device

    @property
    def learning_rate_setting(self) -> str:
        """Name of the phase's learning rate in the recipe."""
        return f"phases.{self._number}.learning_rate"

    @property
    def keep_best(self) -> int:
        """Number of best checkpoints to keep for averaging, in the last phase; one more if the last, which may be one, is averaged too."""
        averaging = self._session.recipe.training.averaging
        return averaging.best + averaging.with_last if averaging.best and self._is_last_phase else 0

    @property
    def _phase(self) -> PhaseSection:
        return self._session.recipe.phases[self._number]

    @property
    def _is_last_phase(self) -> bool:
        return self._number + 1 == len(self._session.recipe.phases)

    @property
    def _phase_ended(self) -> bool:
        return self._tokens >= self._phase.tokens

    def steps(self) -> Iterator[list[TrainingBatch]]:
        """The remaining steps of the phase."""
        session = self._session
        stream = PhaseStream(session.recipe, self._number, session.corpus, session.tokenizer, session.processes)
        if self._stream is not None and self._tokens:
            stream.restore(self._stream)
        elif self._stream is not None:
            stream.follow(self._stream)
        return session.chosen(self._batches(stream, self._phase))

    def next_phase(self) -> bool:
        """Give the model the context and RoPE base of the next phase; optimizer state and moving average are kept."""
        if self._is_last_phase:
            return False
        average = None if self._average is None else self._average.state()
        model, optimizer = self._whole_model(), whole_optimizer_state(self._optimizer)
        self._number, self._tokens, self._progress.best = self._number + 1, 0, []
        self._begin_phase(in_form(model.cpu(), self._config(), where="the previous phase"), optimizer, average)
        return True

    def _batches(self, stream: PhaseStream, phase: PhaseSection) -> Iterator[list[TrainingBatch]]:
        for self._step in stream.updates():
            self._share = learning_rate_share(phase, self._tokens)
            set_learning_rate(self._optimizer, peak=phase.learning_rate, share=self._share, weight_decay=phase.weight_decay)
            self._losses = []
            yield [self._batch(row) for row in self._step.rows]

    def _batch(self, row: MaskedRow) -> TrainingBatch:
        flops = training_flops(self.model.encoder.config, row.batch.lengths, masked=row.masked)
        return TrainingBatch(
            {"packed": row.batch, "labels": row.labels},
            self._describe_row(row),
            tokens=row.batch.num_tokens if row.pieces else 0,
            counts={"room": self._phase.micro_batch * self._phase.context, "flops": flops} if row.pieces else dict.fromkeys(COUNTS, 0),
            weight=row.masked,
            on_host=("labels",),  # on the host they need no synchronization with the device
        )

    def _describe_row(self, row: MaskedRow) -> Iterator[dict[str, Any]]:
        for piece, ids in zip(row.pieces, row.batch.unpack(row.batch.ids), strict=True):
            yield {**piece._asdict(), "masked_text": self._session.tokenizer.decode(ids.tolist())}

    def loss(self, inputs: Mapping[str, Any]) -> Tensor:
        """Mean cross entropy over the masked tokens of a row, and the z-loss."""
        training = self._session.recipe.training
        with autocast(training.dtype, self.device):
            found: MaskedLMLoss = self.model(inputs["packed"], inputs["labels"], z_loss=training.z_loss)
        self._losses.append(found._replace(loss=found.loss.detach()))
        return found.loss

    def backward_passes(self, inputs: Mapping[str, Any]) -> int:
        """Return 1."""
        del inputs
        return 1

    def after_step(self, step: int) -> None:
        """Update the moving average, and move on in the stream."""
        if self._step is None:
            raise ValueError("after_step was called before the first step")
        if self._average is not None:
            self._average.update(self.model)
        self._stream = self._step.state
        self._tokens += self._step.tokens
        if self._phase_ended:
            self.phase_ends.append(step)

    def learning_rate(self, step: int) -> float:
        """Learning rate of the current step."""
        del step
        return self._phase.learning_rate * self._share

    def finished(self, progress: Progress) -> bool:
        """Whether the last phase has read its tokens."""
        del progress
        return self._phase_ended and self._is_last_phase

    def log_due(self, progress: Progress) -> bool:
        """Whether a log line is due: at the end of a phase, and every `training.log_every` steps."""
        return self._phase_ended or _due(self._session.recipe.training.log_every, progress.step)

    def position(self, progress: Progress) -> Mapping[str, float]:
        """The number of the phase."""
        del progress
        return {"phase": self._number}

    def log_values(self, progress: Progress) -> Mapping[str, float]:
        """Tokens so far, batch size in sequences of full context, FLOP/s, share of the rows that held tokens; the step's z-loss if any."""
        rows, z_loss = 0 if self._step is None else self._step.count, {}
        if self._session.recipe.training.z_loss:
            sums = [float(found.z_loss) * found.masked for found in self._losses], [found.masked for found in self._losses]
            total, masked = self._session.processes.sum([sum(sums[0]), sum(sums[1])])
            z_loss = {Z_LOSS: total / max(1.0, masked)}
        return {
            **z_loss,
            "tokens": progress.tokens,
            "batch_size": rows * self._phase.micro_batch,
            "flops_per_second": progress.window_counts["flops"] / progress.window_seconds,
            "packing": progress.window_tokens / progress.window_counts["room"],
        }

    def evaluation_due(self, progress: Progress) -> bool:
        """Whether to evaluate after this step: at the end of a phase and at the recipe's intervals, if there is something to evaluate."""
        return self._is_probe_due(progress) or self._is_held_out_due(progress)

    def _is_held_out_due(self, progress: Progress) -> bool:
        every = self._session.recipe.training.evaluate_every
        return self._held_out is not None and (self._phase_ended or _due(every, progress.step))

    def _is_probe_due(self, progress: Progress) -> bool:
        probe = self._session.recipe.probe
        return probe is not None and (self._phase_ended or _due(probe.every, progress.step))

    def evaluate(self) -> Mapping[str, float]:
        """The held-out loss and accuracy, and the score of a probe, as they are due: a probe adds no candidate for averaging."""
        measures: dict[str, float] = {}
        if self._held_out is not None and self._is_held_out_due(self._progress):
            with autocast(self._session.recipe.training.dtype, self.device):
                measures |= self._held_out.measure(self.model)
        if self._is_probe_due(self._progress):
            measures[SCORE] = self._run_probe()
        return measures

    def _run_probe(self) -> float:
        """Score the current weights by the probe, which the main process trains alone."""
        session, folder = self._session, self._session.out / PROBE
        model = self._whole_model()
        score: float | None = None
        if session.processes.is_main_process:
            if session.probe is None:
                raise ValueError("the recipe has a probe, and the caller gave none")
            shutil.rmtree(folder / MODEL, ignore_errors=True)
            save_model(model, session.tokenizer, folder / MODEL)
            try:
                with nested_training():
                    score = session.probe(folder)
            except RunStoppedError as error:
                logger.info("the probe was stopped after its step %d; it starts again when the run is resumed", error.step)
        found = session.processes.gather(score)[0]
        if found is None:
            raise WorkStoppedError
        return found

    def save_due(self, progress: Progress) -> bool:
        """Whether a checkpoint is due: at the end of a phase, and every `training.save_every` steps."""
        return self._phase_ended or _due(self._session.recipe.training.save_every, progress.step)

    def save(self, folder: Path | None, progress: Progress, random_states: list[dict[str, Any]]) -> None:
        """Write a checkpoint."""
        if folder is None and not self._sharded:
            return
        weights = whole_weights(self.model, keep=folder is not None) if self._sharded else None
        optimizer = whole_optimizer_state(self._optimizer, keep=folder is not None)
        average = None if self._average is None else self._average.state()
        if folder is None:
            return
        save_model(self.model if weights is None else self._with_weights(weights), self._session.tokenizer, folder)
        state = {
            "optimizer": optimizer,
            "average": average,
            "stream": self._stream,
            "phase": self._number,
            "phase_tokens": self._tokens,
            "phase_ends": self.phase_ends,
        }
        save_train_state(folder, state, progress, random_states)

    def kept_steps(self, saved: list[int], progress: Progress) -> set[int]:
        """All, or the newest that the recipe asks for, the last of each phase, and in the last phase the best."""
        if self._session.recipe.training.keep == "all":
            return set(saved)
        newest = saved[-self._session.recipe.training.keep_checkpoints :]
        best = [step for _, step in progress.best] if self.keep_best else []
        return {progress.step, *newest, *self.phase_ends, *best}

    def trained_model(self) -> MaskedLM:
        """The model after the last step: its last weights, or their moving average; called by all processes."""
        if self._average is not None:
            reshard(self.model)  # the last evaluation left its weights whole
            self._average.copy_to(self.model)
        return self._whole_model().eval()

    @property
    def _sharded(self) -> bool:
        return self._session.recipe.training.sharding == "full" and self._session.processes.size > 1

    def _whole_model(self) -> MaskedLM:
        """The model with whole weights, in CPU memory if they are sharded; called by all processes."""
        return self._with_weights(whole_weights(self.model)) if self._sharded else self.model

    def _with_weights(self, weights: Mapping[str, Tensor]) -> MaskedLM:
        model = MaskedLM(Encoder(self.model.encoder.config), tied=self.model.decoder.weight is None)
        model.load_state_dict(weights)
        return model

    def _config(self) -> EncoderConfig:
        return phase_config(self._session.recipe, self._phase, self._session.tokenizer)

    def _begin_phase(self, model: MaskedLM, optimizer: dict[str, Any] | None, average: dict[str, Any] | None) -> None:
        """Prepare model, optimizer, moving average and held-out rows of the current phase."""
        session, phase, training = self._session, self._phase, self._session.recipe.training
        self.model = model.to(session.device).train()
        model.encoder.gradient_checkpointing = training.gradient_checkpointing
        if training.compiled:
            compile_encoder(model.encoder)
        if self._sharded:
            shard(model, model.encoder.layers, session.processes, self.device)
        settings = OptimizerSettings(OPTIMIZER, phase.learning_rate, phase.weight_decay, training.beta1, training.beta2, training.eps)
        self._optimizer = make_optimizer(settings, model.parameters())
        if optimizer is not None:
            restore_optimizer(self._optimizer, optimizer)
        half_life = training.averaging.ema_half_life
        self._average = None if half_life is None else MovingAverage(model, half_life=half_life)
        if self._average is not None and average is not None:
            self._average.restore(average)
        held_out = session.corpus.held_out
        self._held_out = HeldOut(session.recipe, phase, held_out, session.tokenizer, session.processes) if len(held_out) else None


class HeldOut:
    """The held-out documents as a phase reads them: the same tokens under the same masks in every evaluation."""

    def __init__(
        self, recipe: PretrainingRecipe, phase: PhaseSection, documents: Documents, tokenizer: Tokenizer, processes: Processes
    ) -> None:
        training = recipe.training
        masker = Masker(tokenizer, probability=training.held_out_mask_probability, seed=training.seed)
        rows = held_out_rows(documents, phase, longest=recipe.phases[-1].context, most=recipe.data.held_out_tokens)
        make = RowMaker(documents, tokenizer, masker)
        self._rows = [make(row) for row in rows[processes.rank :: processes.size]]
        if training.sharding == "full":
            self._rows += [empty_row()] * (-(-len(rows) // processes.size) - len(self._rows))
        self._processes = processes
        self._sharded = training.sharding == "full" and processes.size > 1

    @torch.no_grad()
    def measure(self, model: MaskedLM) -> dict[str, float]:
        """Mean cross entropy and accuracy over the masked tokens; the model is in training mode before and after."""
        model.eval()
        # Summed on the device, so that the host prepares the next row while the device computes.
        sums = torch.zeros(2, dtype=torch.float64, device=model.encoder.device)
        stopped = False
        for row in self._rows:
            # Sharded weights are gathered in all processes, so that none of them may stop alone.
            stopped = bool(self._processes.sum([should_stop()])[0]) if self._sharded else should_stop()
            if stopped:
                break
            found = model(row.batch, row.labels)
            sums += torch.stack([found.loss * row.masked, found.correct])
        model.train()
        # The processes have different numbers of rows; here they meet, and stop together.
        loss, correct, count, stops = self._processes.sum([*sums.tolist(), sum(row.masked for row in self._rows), stopped])
        if stops:
            raise WorkStoppedError
        return {HELD_OUT: loss / max(1.0, count), ACCURACY: correct / max(1.0, count)}


def save_model(model: MaskedLM, tokenizer: Tokenizer, folder: Path) -> None:
    """Write model and tokenizer; the configuration has no dropout, as in published models."""
    folder.mkdir(parents=True, exist_ok=True)
    encoder = model.encoder
    trained, encoder.config = encoder.config, encoder.config.without_dropout()
    try:
        save_head(model, folder)
    finally:
        encoder.config = trained
    tokenizer.save(folder)


def training_flops(config: EncoderConfig, lengths: Sequence[int], *, masked: int) -> int:
    """Model FLOPs of the forward and backward pass of a masked language model; logits are computed only for masked tokens."""
    width, tokens = config.hidden_size, sum(lengths)
    gates = sum(config.layer_mlp(layer) == "gated" for layer in range(config.num_layers))
    forward = tokens * width * (4 * width * config.num_layers + (2 * config.num_layers + gates) * config.intermediate_size)
    seen = {"global": sum(length * length for length in lengths), "local": sum(_pairs(length, config.window // 2) for length in lengths)}
    forward += sum(2 * width * seen[kind] for kind in config.layer_types)  # scores, and the sum of values
    forward += masked * (width**2 + width * config.vocab_size)
    return 3 * 2 * forward  # the backward pass has two products for each of the forward pass


def _pairs(length: int, reach: int) -> int:
    """Number of ordered pairs of tokens of a sequence at a distance of at most ``reach``, each token with itself included."""
    reach = min(reach, length - 1)
    return length + 2 * reach * length - reach * (reach + 1)


def peak_flops() -> float | None:
    """Peak FLOP/s in bfloat16 of this process's GPU; None without a GPU, for one that is not in `PEAKS`, and for a part of one (MIG)."""
    if not torch.cuda.is_available():
        return None
    name = torch.cuda.get_device_name()
    return None if "MIG" in name else next((peak for part, peak in PEAKS.items() if part in name), None)


def _due(every: int | None, step: int) -> bool:
    return every is not None and step % every == 0
