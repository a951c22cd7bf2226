"""A pretraining recipe run from start to end, or from where an earlier session left it.

A session may end at any instruction: what is there afterwards is the run as it was at its last checkpoint, and a run that is resumed ends
with the weights of one that was not interrupted, on a CPU to the bit.
"""

from __future__ import annotations

import logging
import shutil
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch

from quiver.encoder.errors import InputError
from quiver.encoder.files import read_json, write_json
from quiver.encoder.heads import MaskedLM
from quiver.encoder.pretraining.averaging import mean_of_checkpoints
from quiver.encoder.pretraining.corpus import open_corpus, prepare_corpus
from quiver.encoder.pretraining.loop import Session, pretrain_session
from quiver.encoder.pretraining.optimizer import require_optimizer
from quiver.encoder.pretraining.phases import first_model, make_tokenizer
from quiver.encoder.pretraining.record import describe_run, versions
from quiver.encoder.pretraining.run_folder import (
    BEGUN,
    CHECKPOINTS,
    CORPUS,
    MODEL,
    RECIPE,
    RECORD,
    SCHEMA,
    TOKENIZER,
    finish_run,
    give_name,
    refuse_existing,
    refuse_nothing_to_resume,
    refuse_other_facts,
    unfinished,
    warn_of_changes,
)
from quiver.encoder.pretraining.sections import PretrainingRecipe
from quiver.encoder.pretraining.snapshot import Progress, save_model
from quiver.encoder.tokenizer import Tokenizer
from quiver.encoder.training.checkpoints import Checkpoints
from quiver.encoder.training.log import LOG, RunLog
from quiver.encoder.training.processes import Processes, init_distributed, keep_freed_memory
from quiver.encoder.training.run_folder import exclusive_lock
from quiver.encoder.training.state import preserve_rng_state

logger = logging.getLogger(__name__)


def pretrain(
    recipe: PretrainingRecipe, out: Path, *, resume: bool = False, progress: bool = False, command: str | None = None
) -> dict[str, Any]:
    """Run a recipe; under torchrun, as one of its processes.

    Args:
        recipe: What is pretrained, on what, and how.
        out: Folder of the run, see `quiver.encoder.pretraining.run_folder`.
        resume: Go on with the unfinished run there, from its last checkpoint; from the beginning if it has none.
        progress: Show a bar.
        command: The command line to record.

    Returns:
        What ``run.json`` holds.

    Raises:
        InputError: torch-optimi is missing; the corpus, the vocabulary or the model to start from cannot be used; ``out`` holds a run
            already or another session runs there; there is nothing to resume, or what is there was begun otherwise; or the loss is no
            number.
        encoder.running.stopping.RunStoppedError: SIGTERM or SIGINT came; the run is saved and can be resumed.
    """
    require_optimizer()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with init_distributed(device) as processes, preserve_rng_state(), keep_freed_memory(), _folder(out, processes):
        if resume:
            refuse_nothing_to_resume(out, recipe.model_dump())
        elif processes.is_main_process:
            refuse_existing(out)
        processes.barrier()  # all have read what is written now
        if processes.is_main_process:
            _prepare(recipe, out, begins=not resume)
        processes.barrier()
        session = _session(recipe, out, processes, device, progress=progress)
        facts = {"processes": processes.size, "corpus": session.corpus.facts}
        about = {"device": device, "threads": torch.get_num_threads(), "versions": versions()}
        refuse_other_facts(out, facts)
        processes.barrier()
        if processes.is_main_process:
            warn_of_changes(out, about)
            write_json(out / BEGUN, {"schema": SCHEMA, "command": command, **about, **facts})
        done, model = pretrain_session(session, step=_last_step(session) if resume else None)
        if processes.is_main_process:
            _finish(session, done, model, command)
        processes.barrier()
        return read_json(out / RECORD)


def prepare(recipe: PretrainingRecipe, out: Path, *, resume: bool = False) -> None:
    """Begin a run without a model: learn its vocabulary and tokenise its corpus, by one process, which needs no GPU.

    `pretrain` does the same where it has not been done; but then the other processes wait for it, and not for ever
    (`quiver.encoder.training.processes.TIMEOUT`). A large corpus takes days.

    Args:
        recipe: Of the run.
        out: Folder of the run; `pretrain` goes on there with ``resume``.
        resume: Go on with what was begun there.

    Raises:
        InputError: As `pretrain`, of corpus, vocabulary, start and folder.
    """
    with exclusive_lock(out):
        if resume:
            refuse_nothing_to_resume(out, recipe.model_dump())
        else:
            refuse_existing(out)
        _prepare(recipe, out, begins=not resume)


def _folder(out: Path, processes: Processes) -> AbstractContextManager[None]:
    """The lock of the run's folder, which the process that leads holds for all of them."""
    return exclusive_lock(out) if processes.is_main_process else nullcontext()


def _prepare(recipe: PretrainingRecipe, out: Path, *, begins: bool) -> None:
    """Learn the vocabulary and tokenise the corpus, where an earlier session has not done that already.

    A run that cannot begin leaves nothing in its folder.
    """
    write_json(out / RECIPE, recipe.model_dump())
    try:
        if recipe.model.tokenizer == "train" and not (out / TOKENIZER).is_dir():
            tokenizer = make_tokenizer(recipe)
            shutil.rmtree(unfinished(out, TOKENIZER), ignore_errors=True)
            unfinished(out, TOKENIZER).mkdir()
            tokenizer.save(unfinished(out, TOKENIZER))
            give_name(out, TOKENIZER)
        if begins and recipe.model.init != "random":
            first_model(recipe, _tokenizer(recipe, out))
        prepare_corpus(recipe.data, _tokenizer(recipe, out), out / CORPUS)
    except InputError:
        if begins:
            for name in (TOKENIZER, CORPUS):
                for folder in (out / name, unfinished(out, name)):
                    shutil.rmtree(folder, ignore_errors=True)
            (out / RECIPE).unlink()
        raise


def _tokenizer(recipe: PretrainingRecipe, out: Path) -> Tokenizer:
    return Tokenizer.from_pretrained(out / TOKENIZER) if recipe.model.tokenizer == "train" else make_tokenizer(recipe)


def _session(recipe: PretrainingRecipe, out: Path, processes: Processes, device: str, *, progress: bool) -> Session:
    corpus, tokenizer = open_corpus(out / CORPUS), _tokenizer(recipe, out)
    return Session(recipe, out, Checkpoints(out / CHECKPOINTS), corpus, tokenizer, processes, device, progress)


def _last_step(session: Session) -> int:
    """The step that a resumed session goes on from; what was logged behind it is taken back."""
    newest = 0
    if session.processes.is_main_process:
        newest = session.checkpoints.newest() or 0
        RunLog(session.out / LOG).cut(newest)
        logger.info("%s: going on from step %d", session.out, newest)
    return int(session.processes.broadcast(newest))


def _finish(session: Session, progress: Progress, model: MaskedLM, command: str | None) -> None:
    """Write the model and the record."""
    averaging, kept = session.recipe.training.averaging, [progress.step]
    if averaging.best:
        best = {int(step) for _, step in progress.best}
        kept = session.checkpoints.sound(sorted(best | {progress.step} if averaging.with_last else best)) or [progress.step]
        model = mean_of_checkpoints([session.checkpoints.path(step) for step in kept])
    shutil.rmtree(unfinished(session.out, MODEL), ignore_errors=True)
    save_model(model, session.tokenizer, unfinished(session.out, MODEL))
    finish_run(session.out, describe_run(session, progress, model, kept_steps=kept, command=command))
