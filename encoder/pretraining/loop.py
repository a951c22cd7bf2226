"""The phases of a run, update after update: the log, the held-out loss, the checkpoints, the end."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quiver.encoder.heads import MaskedLM
from quiver.encoder.model import compile_encoder
from quiver.encoder.pretraining.averaging import MovingAverage
from quiver.encoder.pretraining.corpus import Corpus
from quiver.encoder.pretraining.evaluation import HeldOut
from quiver.encoder.pretraining.optimizer import make_optimizer, restore_optimizer
from quiver.encoder.pretraining.phases import first_model, in_form, phase_config, start_from_frequencies
from quiver.encoder.pretraining.sections import PretrainingRecipe
from quiver.encoder.pretraining.snapshot import Progress, Snapshot, TrainState, read_snapshot, write_snapshot
from quiver.encoder.pretraining.stream import PhaseStream, UpdateBatch
from quiver.encoder.pretraining.update import Update, Updater
from quiver.encoder.tokenizer import Tokenizer
from quiver.encoder.training.callbacks import FORMS, Show, training_bar
from quiver.encoder.training.checkpoints import Checkpoints
from quiver.encoder.training.log import LOG, RunLog
from quiver.encoder.training.processes import Processes, RunStoppedError, StopRequest, stop_requests
from quiver.encoder.training.state import preserve_rng_state, random_state, seed_random, set_random_state

logger = logging.getLogger(__name__)

HELD_OUT = "held_out_loss"
"""Key of the held-out loss in a line of the log."""

BAR = {**FORMS, "packing": "{:.1%} full", HELD_OUT: "held out {:.4f}"}
"""What the bar of a run tells."""


@dataclass(frozen=True)
class Session:
    """What a session is about.

    Attributes:
        recipe: What is pretrained, and how.
        out: Folder of the run.
        checkpoints: Of the run.
        corpus: What is read.
        tokenizer: Of the model.
        processes: Those of the session.
        device: Where the model is trained.
        progress: Show a bar, in the process that leads.
    """

    recipe: PretrainingRecipe
    out: Path
    checkpoints: Checkpoints
    corpus: Corpus
    tokenizer: Tokenizer
    processes: Processes
    device: str
    progress: bool


def pretrain_session(session: Session, *, step: int | None) -> tuple[Progress, MaskedLM]:
    """Train until the end of the run.

    Args:
        session: Its recipe, folder, corpus and processes.
        step: Updates that the checkpoint to go on from has done, 0 for a resumed run that has none; None for a run that begins.

    Returns:
        The progress at the end, and the model: the last weights, or their moving average.

    Raises:
        RunStoppedError: A signal came, and the run is saved.
        InputError: The loss is no number, or the model to start from cannot be used.
    """
    loop = _Loop(session, read_snapshot(session.checkpoints.path(step)) if step else None)
    if step is not None:
        loop.progress.resumed_at.append(step)
    total = sum(phase.tokens for phase in session.recipe.phases)
    shown = session.progress and session.processes.is_main_process
    with stop_requests() as stop, training_bar(loop.progress.tokens, total, enabled=shown, forms=BAR, unit="tokens") as show:
        return loop.progress, loop.run(stop, show)


class _Loop:
    """A session in the doing."""

    def __init__(self, session: Session, snapshot: Snapshot | None) -> None:
        self._session = session
        self._snapshot = snapshot
        self.progress = Progress() if snapshot is None else snapshot.progress
        self._log = RunLog(session.out / LOG)
        self._earlier = self.progress.seconds
        self._start = self._mark = time.perf_counter()
        self._rows = 0

    def run(self, stop: StopRequest, show: Show) -> MaskedLM:
        """All phases that are left."""
        session, progress, recipe = self._session, self.progress, self._session.recipe
        rank = session.processes.rank
        train_state = self._first_train_state()
        if self._snapshot is None:
            seed_random(recipe.training.seed + rank)  # ranks with equal generators would drop out the same units
        else:
            set_random_state(self._snapshot.random[rank])
        while True:
            self._phase(train_state, stop, show)
            if progress.phase + 1 == len(recipe.phases):
                break
            progress.phase += 1
            progress.phase_tokens = 0
            train_state = self._next_train_state(train_state)
        if train_state.average is not None:
            train_state.average.copy_to(train_state.model)
        return train_state.model.eval()

    def _phase(self, train_state: TrainState, stop: StopRequest, show: Show) -> None:
        """The updates of a phase that are left; none if a session was killed behind the last."""
        session, progress = self._session, self.progress
        number, phase = progress.phase, session.recipe.phases[progress.phase]
        stream = PhaseStream(session.recipe, number, session.corpus, session.tokenizer, session.processes)
        if train_state.stream is not None and progress.phase_tokens:
            stream.restore(train_state.stream)
        elif train_state.stream is not None:
            stream.follow(train_state.stream)
        held_out = None
        if len(session.corpus.held_out):
            held_out = HeldOut(session.recipe, phase, session.corpus.held_out, session.tokenizer, session.processes)
        updater = Updater(train_state, phase, number, session.processes, session.recipe.training.precision, session.out, session.tokenizer)
        train_state.model.train()
        self._mark = time.perf_counter()
        for batch in stream.updates():
            asked = stop.name is not None
            update = updater.do(batch, step=progress.step + 1, tokens=progress.phase_tokens, stop=asked)
            self._count(batch, update)
            show(progress.tokens, {})
            ended = progress.phase_tokens >= phase.tokens
            if ended:
                progress.phase_ends.append(progress.step)
            self._after(train_state, update, held_out, show, ended=ended)
            if update.stop and not (ended and number + 1 == len(session.recipe.phases)):
                raise RunStoppedError(progress.step)
            self._mark = time.perf_counter()  # what was done here is no part of the next update's time

    def _after(self, train_state: TrainState, update: Update, held_out: HeldOut | None, show: Show, *, ended: bool) -> None:
        """Log, evaluate, save, in this order, so that a checkpoint knows all that was logged."""
        training, progress = self._session.recipe.training, self.progress
        if ended or progress.step % training.log_every == 0:
            self._write_window(update, show)
        best = False
        if held_out is not None and (ended or _due(training.evaluate_every, progress.step)):
            with preserve_rng_state():
                best = self._evaluated(held_out.loss(train_state.model), show)
        if ended or best or update.stop or _due(training.save_every, progress.step):
            self._save(train_state)

    def _count(self, batch: UpdateBatch, update: Update) -> None:
        progress, now = self.progress, time.perf_counter()
        progress.step += 1
        progress.tokens += batch.tokens
        progress.phase_tokens += batch.tokens
        progress.packed_room += batch.room
        progress.window_updates += 1
        progress.window_loss += update.loss
        progress.window_tokens += batch.tokens
        progress.window_room += batch.room
        progress.window_flops += update.flops
        progress.window_seconds += now - self._mark
        progress.seconds = self._earlier + now - self._start
        self._rows = batch.count

    def _write_window(self, update: Update, show: Show) -> None:
        progress, phase = self.progress, self._session.recipe.phases[self.progress.phase]
        line = {
            "phase": progress.phase,
            "tokens": progress.tokens,
            "loss": progress.window_loss / progress.window_updates,
            "learning_rate": update.learning_rate,
            "grad_norm": update.grad_norm,
            "batch_size": self._rows * phase.micro_batch,
            "tokens_per_second": progress.window_tokens / progress.window_seconds,
            "flops_per_second": progress.window_flops / progress.window_seconds,
            "packing": progress.window_tokens / progress.window_room,
        }
        self._write(line, show)
        progress.window_updates = progress.window_tokens = progress.window_room = 0
        progress.window_loss = progress.window_flops = progress.window_seconds = 0.0

    def _write(self, values: Mapping[str, int | float], show: Show) -> None:
        show(self.progress.tokens, values)
        if self._session.processes.is_main_process:
            self._log.append({"step": self.progress.step, **values, "seconds": self.progress.seconds})

    def _evaluated(self, loss: float, show: Show) -> bool:
        """Log a held-out loss; whether its weights are among the best that averaging asks for."""
        progress, recipe = self.progress, self._session.recipe
        progress.seconds = self._earlier + time.perf_counter() - self._start
        self._write({"phase": progress.phase, HELD_OUT: loss}, show)
        if progress.phase + 1 < len(recipe.phases):
            return False
        progress.best = sorted([*progress.best, [loss, progress.step]])[: recipe.training.averaging.best]
        return [loss, progress.step] in progress.best

    def _save(self, train_state: TrainState) -> None:
        session, progress = self._session, self.progress
        states = session.processes.gather(random_state())
        progress.seconds = self._earlier + time.perf_counter() - self._start
        if not session.processes.is_main_process:
            return
        self._log.sync()
        with session.checkpoints.writing(progress.step) as folder:
            write_snapshot(folder, train_state, session.tokenizer, progress, states)
        newest = session.checkpoints.steps()[-session.recipe.training.keep_checkpoints :]
        session.checkpoints.keep({progress.step, *newest, *progress.phase_ends, *(int(step) for _, step in progress.best)})
        logger.info("checkpoint of step %d saved", progress.step)

    def _first_train_state(self) -> TrainState:
        session, snapshot = self._session, self._snapshot
        if snapshot is None:
            model = first_model(session.recipe, session.tokenizer)
            if session.recipe.model.decoder_bias == "frequencies":
                start_from_frequencies(model, session.corpus.train.shares(model.encoder.config.vocab_size))
            return self._train_state(model, None, None)
        config = phase_config(session.recipe.model, session.recipe.phases[self.progress.phase], session.tokenizer)
        model = in_form(snapshot.model, config, where=str(session.checkpoints.path(self.progress.step)))
        train_state = self._train_state(model, snapshot.optimizer, snapshot.average)
        train_state.stream = snapshot.stream
        return train_state

    def _next_train_state(self, done: TrainState) -> TrainState:
        """What a phase hands to the next."""
        recipe = self._session.recipe
        config = phase_config(recipe.model, recipe.phases[self.progress.phase], self._session.tokenizer)
        model = in_form(done.model.cpu(), config, where="the phase before")
        average = None if done.average is None else done.average.state()
        train_state = self._train_state(model, done.optimizer.state_dict(), average)
        train_state.stream = done.stream
        return train_state

    def _train_state(self, model: MaskedLM, optimizer: dict[str, Any] | None, average: dict[str, Any] | None) -> TrainState:
        recipe, session = self._session.recipe, self._session
        model = model.to(session.device)
        model.encoder.gradient_checkpointing = recipe.training.gradient_checkpointing
        if recipe.training.compiled:
            compile_encoder(model.encoder)
        phase, half_life = recipe.phases[self.progress.phase], recipe.training.averaging.ema_half_life
        train_state = TrainState(
            model,
            make_optimizer(model, recipe.training, phase),
            None if half_life is None else MovingAverage(model, half_life=half_life),
        )
        if optimizer is not None:
            restore_optimizer(train_state.optimizer, optimizer)
        if train_state.average is not None and average is not None:
            train_state.average.restore(average)
        return train_state


def _due(every: int | None, step: int) -> bool:
    return every is not None and step % every == 0
