"""Train a bi-encoder from a recipe, with sentence-transformers' trainer and losses around the native encoder.

Source: sentence-transformers' ``SentenceTransformerTrainer``; the DPR setting of ModernBERT, arXiv:2412.13663, section 3.1.2.
"""

from __future__ import annotations

import importlib.util
import logging
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from encoder import Encoder, EncoderConfig, InputError, Tokenizer, init_weights
from encoder.config import global_every
from encoder.hub import local_folder
from retrieval.biencoder import BiEncoder
from retrieval.encoding import clean
from retrieval.model_folder import ModelFolder, Parts, load_parts
from retrieval.models import default_device
from retrieval.training.data import Row, column_prompts
from retrieval.training.recipe import ModelSection, Recipe

logger = logging.getLogger(__name__)

EXTRA = ("sentence_transformers", "transformers", "datasets", "accelerate")
"""Modules that the trainer imports and the core does not have."""


@dataclass(frozen=True)
class TrainingResult:
    """A trained model and how it came about.

    Attributes:
        model: In evaluation mode.
        steps: Optimiser steps done.
        steps_planned: Optimiser steps that the learning rate's schedule was made for.
        seconds: Wall time of the training loop.
        losses: (step, mean loss since the last entry) every ``log_every`` steps.
        pairs: Training rows read.
        texts_truncated: Texts of the training rows that exceed the model's length, prompts included.
    """

    model: BiEncoder
    steps: int
    steps_planned: int
    seconds: float
    losses: list[tuple[int, float]]
    pairs: int
    texts_truncated: int


def build_model(section: ModelSection, texts: Sequence[str], *, seed: int) -> BiEncoder:
    """The model a recipe starts from, on the device that `default_device` names.

    Of a checkpoint the recipe replaces what it has a setting for; the rest stays: lower case, whether prompts are pooled.

    Args:
        section: Where it comes from, its architecture, pooling and prompts.
        texts: What a new vocabulary is learnt from, if the recipe asks for one.
        seed: Of the initial weights.

    Raises:
        InputError: The checkpoint it starts from cannot be used.
    """
    if section.init == "random":
        start = _random_parts(section, texts, seed=seed)
    else:
        start = load_parts(section.init, device=default_device())
        if start.settings.projections and start.settings.kind == "dense":  # a ColBERT is refused below, by its own name
            raise InputError(f"{section.init}: training a checkpoint with Dense modules is not supported by kind: dense")
    settings = replace(
        start.settings,
        max_length=section.max_length,
        pooling=section.pooling,
        normalize=section.normalize,
        similarity="cosine" if section.normalize else "dot",
        query_prompt=section.query_prompt,
        document_prompt=section.document_prompt,
    )
    return BiEncoder(start.encoder, start.tokenizer, settings, source=section.init)


def _random_parts(section: ModelSection, texts: Sequence[str], *, seed: int) -> Parts:
    shape = section.architecture
    if shape is None or section.tokenizer is None:  # the loader refuses such a recipe; this guards recipes made in code
        raise InputError("model.architecture and model.tokenizer are needed where model.init is random")
    if section.tokenizer == "train":
        tokenizer = Tokenizer.train(texts, vocab_size=shape.vocab_size, max_length=shape.max_positions, split=section.vocabulary)
    else:
        tokenizer = Tokenizer.from_pretrained(local_folder(section.tokenizer))
    config = EncoderConfig.modernbert(
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        num_heads=shape.heads,
        intermediate_size=shape.intermediate_size,
        layer_types=global_every(shape.layers, shape.global_every),
        max_positions=shape.max_positions,
        window=shape.window,
        global_theta=shape.global_theta,
        local_theta=shape.local_theta,
        pad_token_id=tokenizer.special_id("pad") or 0,
        cls_token_id=tokenizer.special_id("cls"),
        sep_token_id=tokenizer.special_id("sep"),
    )
    encoder = init_weights(Encoder(config), seed=seed).eval()  # before it moves: equal seeds give equal weights on every device
    return Parts(ModelFolder(kind="dense", encoder_folder=Path()), encoder.to(default_device()), tokenizer)


def require_extra() -> None:
    """Say before anything is read or written that training is not installed.

    Raises:
        InputError: A module of the extra ``train`` cannot be found.
    """
    if missing := [name for name in EXTRA if importlib.util.find_spec(name) is None]:
        raise InputError(f"training needs {missing[0]}: pip install 'quiver-retrieval[train]'")


def check_rows(recipe: Recipe, rows: Sequence[Row]) -> None:
    """Say before anything is written that the rows do not make one batch.

    Raises:
        InputError: There are fewer rows than ``training.batch_size``.
    """
    if len(rows) < recipe.training.batch_size:
        raise InputError(f"data.train: {len(rows)} rows are fewer than training.batch_size {recipe.training.batch_size}")


def train_dense(recipe: Recipe, rows: Sequence[Row], model: BiEncoder, work: Path, *, progress: bool = False) -> TrainingResult:
    """Train a model in place.

    Args:
        recipe: Loss and optimisation.
        rows: ``query``, ``positive`` and perhaps ``negative`` texts.
        model: What `build_model` gave.
        work: Folder the trainer may write to.
        progress: Show a bar with the loss and the remaining time.

    Raises:
        InputError: sentence-transformers is not installed, there are fewer rows than one batch, no batch could be filled, or
            the loss is not finite.
    """
    require_extra()
    check_rows(recipe, rows)
    from retrieval.training import trainer  # not above: it imports the libraries of the extra

    steps = total_steps(recipe, len(rows))
    truncated = _count_truncated(model, rows)
    history: list[tuple[int, float]] = []
    started = time.perf_counter()
    model.encoder.train()
    try:
        done = trainer.run(recipe, rows, model, work, steps=steps, history=history, progress=progress)
    finally:
        model.encoder.eval()
    seconds = time.perf_counter() - started
    # The vectors have changed, and with them the fingerprint: a fresh object forgets the cached card.
    trained = BiEncoder(model.encoder, model.tokenizer, model.settings, source=model.source)
    return TrainingResult(trained, done, steps, seconds, history, len(rows), truncated)


def total_steps(recipe: Recipe, rows: int) -> int:
    """Optimiser steps of a run: full batches an epoch times epochs, or fewer if the recipe caps them."""
    steps = max(1, math.ceil(rows // recipe.training.batch_size * recipe.training.epochs))
    return steps if recipe.training.max_steps is None else min(steps, recipe.training.max_steps)


def _count_truncated(model: BiEncoder, rows: Sequence[Row]) -> int:
    settings = model.settings
    prompts = column_prompts(query=settings.query_prompt, document=settings.document_prompt)
    truncated = 0
    for column in rows[0]:
        texts = clean([row[column] for row in rows], prompt=prompts[column], lower_case=settings.lower_case)
        truncated += sum(model.tokenizer.encode(texts, max_length=model.max_length).truncated)
    if truncated:
        logger.info("%d of %d training texts are cut to %d tokens", truncated, len(rows) * len(rows[0]), model.max_length)
    return truncated
