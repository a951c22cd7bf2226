"""A pretraining run, from the beginning or resumed: vocabulary, corpus, training, model, record.

A session can be interrupted at any point: the folder (`quiver.encoder.training.run_folder`) then holds the run at its last checkpoint. A
resumed run ends with the same weights as an uninterrupted one, bit for bit on a CPU.

Parts of ``run.json`` beside recipe, command, date, versions, platform, device, threads and processes:

    corpus      sha256 of its files and of the vocabulary; documents and tokens of each source, by side
    model       parameters, vocabulary (ids, rows of the embedding)
    result      steps, tokens, packing (share of the rows that held tokens); curves as [[step, value], ...] by log key;
                phases as [{name, last_step}, ...]; kept_steps (whose weights the model has; their mean if there are several);
                average (whether the model is the moving average); seconds (of all sessions), resumed_at, peak_memory_bytes;
                flop_utilisation (median of flops_per_second over the peak of the GPUs in bfloat16; null if the peak is unknown)
"""

from __future__ import annotations

import logging
import statistics
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from quiver.encoder.checkpoints.head_checkpoint import load_head
from quiver.encoder.errors import InputError
from quiver.encoder.files import read_json
from quiver.encoder.heads import MaskedLM
from quiver.encoder.pretraining.corpus import open_corpus, prepare_corpus
from quiver.encoder.pretraining.phases import first_model, make_tokenizer
from quiver.encoder.pretraining.recipe import PretrainingRecipe
from quiver.encoder.pretraining.task import (
    ACCURACY,
    COUNTS,
    HELD_OUT,
    OPTIMIZER,
    SCORE,
    STATES,
    Z_LOSS,
    PretrainingTask,
    Probe,
    Session,
    peak_flops,
    save_model,
)
from quiver.encoder.tokenizer import Tokenizer
from quiver.encoder.training.averaging import average_weights
from quiver.encoder.training.optimization import require_optimizer, with_training_dtype
from quiver.encoder.training.processes import Processes, stop_requests
from quiver.encoder.training.recipe_file import WITHOUT_WEIGHT
from quiver.encoder.training.run_folder import (
    CHECKPOINTS,
    CORPUS,
    LOG,
    RECORD,
    TOKENIZER,
    Checkpoints,
    RunIdentity,
    curve,
    describe_session,
    finish_run,
    lock_run,
    read_log,
    refuse_existing,
    refuse_nothing_to_resume,
    refuse_other_run,
    remove_made,
    resume_run,
    session_environment,
    with_commit,
    write_part,
)
from quiver.encoder.training.trainer import FORMS, Callback, Progress, Trainer, TrainerSettings, load_train_state, training_bar

logger = logging.getLogger(__name__)

SCHEMA = "quiver-run/pretraining-1"  # schema of ``run.json``

CURVES = (
    *("loss", Z_LOSS, HELD_OUT, ACCURACY, SCORE, "learning_rate", "grad_norm", "batch_size"),
    *("tokens_per_second", "flops_per_second", "packing", "tokens"),
)
"""Log keys that are recorded as curves."""

_WITHOUT_WEIGHT = WITHOUT_WEIGHT | {
    *("training.save_every", "training.keep"),
    *("probe", "probe.recipe", "probe.settings", "probe.tasks", "probe.every"),
}
"""Settings that do not affect the weights; a resumed session may change them."""

BAR = {**FORMS, "packing": "{:.1%} full", HELD_OUT: "held out {:.4f}", SCORE: "probe {:.2%}"}  # formats of the values on the progress bar


def pretrain(
    recipe: PretrainingRecipe,
    out: Path,
    *,
    resume: bool = False,
    progress: bool = False,
    command: str | None = None,
    callbacks: Sequence[Callback] = (),
    device: str | None = None,
    probe: Probe | None = None,
) -> dict[str, Any]:
    """Run a recipe; under torchrun, as one of its processes. `quiver.eval.probe.pretrain` gives it the probe of the recipe.

    ``resume`` resumes the unfinished run in ``out`` from its last checkpoint, or from the beginning if it has none. ``device`` is ``cpu``,
    ``cuda`` or, in one process, ``cuda:1``; None for a GPU if available. Returns the content of ``run.json``.

    Raises:
        InputError: torch-optimi is not installed; the corpus, the vocabulary or the initial model cannot be used; ``out`` already holds a
            run, or is training there; there is no run to resume, or it was started with other settings or data; or the loss
            is not finite.
        RunStoppedError: SIGTERM or SIGINT was received; the run was saved and can be resumed.
    """
    require_optimizer(OPTIMIZER)
    if (recipe.probe is None) is not (probe is None):
        raise ValueError("a probe is given if and only if the recipe has one; quiver.eval.probe.pretrain does that")
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    with session_environment(out, device) as processes:
        resumed = out if resume else None
        recipe = with_commit(with_training_dtype(recipe, device, resumed=resumed), resumed=resumed)
        _check_folder(recipe, out, resume=resume, writes=processes.is_main_process)
        processes.barrier()  # all have read what is written now
        if processes.is_main_process:
            _prepare(recipe, out, begins=not resume)
        processes.barrier()
        session = replace(open_session(recipe, out, processes, device, progress=progress), probe=probe)
        fixed = {"processes": processes.size, "corpus": session.corpus.identity}
        identity = replace(_identify_recipe(recipe), fixed=fixed, about=describe_session(command, device))
        if not resume and processes.is_main_process:
            identity.write(out)
        done, task = _train(session, callbacks, step=resume_run(out, identity, processes) if resume else None)
        model = task.trained_model()
        if processes.is_main_process:
            _finish(session, done, task.phase_ends, model, identity)
        processes.barrier()
        return read_json(out / RECORD)


def open_session(recipe: PretrainingRecipe, out: Path, processes: Processes, device: str, *, progress: bool = False) -> Session:
    """Open a run folder that `prepare` has filled."""
    corpus, tokenizer = open_corpus(out / CORPUS), _tokenizer(recipe, out)
    return Session(recipe, out, Checkpoints(out / CHECKPOINTS), corpus, tokenizer, processes, device, progress)


def prepare(recipe: PretrainingRecipe, out: Path, *, resume: bool = False, characters: int | None = None) -> None:
    """Start a run without training, in one process that needs no GPU: train the tokenizer and tokenize the corpus."""
    with lock_run(out):
        recipe = with_commit(recipe, resumed=out if resume else None)
        _check_folder(recipe, out, resume=resume, writes=True)
        _prepare(recipe, out, begins=not resume, characters=characters)


def _identify_recipe(recipe: PretrainingRecipe) -> RunIdentity:
    """Identity of a run before its corpus is known."""
    return RunIdentity(recipe.model_dump(), {}, {}, PretrainingRecipe, _WITHOUT_WEIGHT)


def _check_folder(recipe: PretrainingRecipe, out: Path, *, resume: bool, writes: bool) -> None:
    if resume:
        refuse_nothing_to_resume(out)
        refuse_other_run(out, _identify_recipe(recipe))
    elif writes:
        refuse_existing(out, overwrite=None)


def _prepare(recipe: PretrainingRecipe, out: Path, *, begins: bool, characters: int | None = None) -> None:
    """Train the tokenizer and tokenize the corpus, unless an earlier session has done it; remove all that is new if that fails."""
    if begins:
        _identify_recipe(recipe).write(out)
    try:
        if recipe.model.tokenizer == "train" and not (out / TOKENIZER).is_dir():
            write_part(out, TOKENIZER, make_tokenizer(recipe, characters=characters).save)
        if begins and recipe.model.init != "random":
            first_model(recipe, _tokenizer(recipe, out))  # an initial model that does not fit is reported before days of tokenizing
        prepare_corpus(recipe.data, _tokenizer(recipe, out), out / CORPUS, characters=characters)
    except InputError:
        if begins:
            remove_made(out)
        raise


def _tokenizer(recipe: PretrainingRecipe, out: Path) -> Tokenizer:
    return Tokenizer.from_pretrained(out / TOKENIZER) if recipe.model.tokenizer == "train" else make_tokenizer(recipe)


def _train(session: Session, callbacks: Sequence[Callback], *, step: int | None) -> tuple[Progress, PretrainingTask]:
    """Train until the end of the run; ``step`` is the step of the checkpoint to resume, 0 if there is none, None for a new run."""
    recipe, processes = session.recipe, session.processes
    total, shown = sum(phase.tokens for phase in recipe.phases), session.progress and processes.is_main_process
    with stop_requests() as stop:  # a signal that arrives while the model is loaded stops the run too, after its first step
        folder = session.checkpoints.path(step or 0)
        saved = load_train_state(folder, STATES) if step else None
        progress, random_states = (Progress(), None) if saved is None else (saved.progress, saved.random_states)
        if step is not None:
            progress.resumed_at.append(step)
        task = PretrainingTask(session, progress, None if saved is None else (folder, saved))
        del saved  # the optimizer has its own copy
        bar = training_bar(progress.tokens, total, enabled=shown, forms=BAR, unit="tokens", position=lambda step: progress.tokens)
        with bar as shown_bar:
            shown_by = [shown_bar, *callbacks]
            settings = TrainerSettings(recipe.training.seed, counts=COUNTS, ranked_by=HELD_OUT, lower_is_better=True, callbacks=shown_by)
            Trainer(task, settings, session.out, processes, stop, progress, random_states).train()
    return progress, task


def _finish(session: Session, progress: Progress, phase_ends: Sequence[int], model: MaskedLM, identity: RunIdentity) -> None:
    """Write the model and the record."""
    recipe, averaging = session.recipe, session.recipe.training.averaging
    kept = [progress.step]
    if averaging.best:
        last = [progress.step] if averaging.with_last else []
        best = [step for _, step in progress.best if step not in last][: averaging.best]
        if len(best) < averaging.best:
            text = "training.averaging.best: the last phase has %d evaluated checkpoints%s, not %d; lower training.evaluate_every"
            logger.warning(text, len(best), " before the last one" if last else "", averaging.best)
        kept = session.checkpoints.sound(sorted([*best, *last])) or [progress.step]
        model = average_checkpoints([session.checkpoints.path(step) for step in kept])
    log = read_log(session.out / LOG)
    curves = {key: curve(log, key) for key in CURVES}
    peak, rates = peak_flops(), [rate for _, rate in curves["flops_per_second"]]
    phases = [{"name": phase.name, "last_step": step} for phase, step in zip(recipe.phases, phase_ends, strict=True)]
    parts = {
        "model": {
            "parameters": sum(weight.numel() for weight in model.parameters()),
            "vocabulary": {"ids": len(session.tokenizer), "rows": model.encoder.config.vocab_size},
        },
        "result": {
            **progress.totals(),
            "packing": progress.tokens / progress.counts["room"],
            "curves": curves,
            "phases": phases,
            "kept_steps": kept,
            "average": averaging.ema_half_life is not None,
            "flop_utilisation": None if peak is None else statistics.median(rates) / (peak * session.processes.size),
        },
    }
    finish_run(session.out, lambda folder: save_model(model, session.tokenizer, folder), identity.record(SCHEMA, parts))


def average_checkpoints(folders: Sequence[Path]) -> MaskedLM:
    """Mean of the weights of checkpoints of one phase."""
    model = load_head(MaskedLM, folders[0])
    model.load_state_dict(average_weights(load_head(MaskedLM, folder).state_dict() for folder in folders))
    return model
