"""Train a bi-encoder from a recipe, with sentence-transformers' trainer and losses around the native encoder.

Source: sentence-transformers' ``SentenceTransformerTrainer``; the DPR setting of ModernBERT, arXiv:2412.13663, section 3.1.2.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from encoder import Encoder, EncoderConfig, InputError, Tokenizer, init_weights, load_encoder
from encoder.config import global_every
from encoder.hub import local_folder
from retrieval.biencoder import BiEncoder
from retrieval.model_folder import ModelFolder, read_model_folder
from retrieval.training.data import Row
from retrieval.training.recipe import ModelSection, Recipe

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class TrainingResult:
    """A trained model and how it came about.

    Attributes:
        model: In evaluation mode.
        steps: Optimiser steps done.
        seconds: Wall time of the training loop.
        losses: (step, mean loss since the last entry) every ``log_every`` steps.
        pairs: Training rows read.
        texts_truncated: Texts of the training rows that exceed the model's length.
    """

    model: BiEncoder
    steps: int
    seconds: float
    losses: list[tuple[int, float]]
    pairs: int
    texts_truncated: int


def build_model(section: ModelSection, texts: Sequence[str], *, seed: int) -> BiEncoder:
    """The model a recipe starts from.

    Args:
        section: Where it comes from, its architecture, pooling and prompts.
        texts: What a new vocabulary is learnt from, if the recipe asks for one.
        seed: Of the initial weights.

    Raises:
        InputError: The checkpoint it starts from cannot be used.
    """
    if section.init == "random":
        encoder, tokenizer, folder = _random_encoder(section, texts, seed=seed)
    else:
        folder = local_folder(section.init)
        start = read_model_folder(folder)
        if start.projections:
            raise InputError(f"{section.init}: training a checkpoint with Dense modules is not supported by kind: dense")
        tokenizer = Tokenizer.from_pretrained(start.encoder_folder)
        encoder, folder = load_encoder(start.encoder_folder), start.encoder_folder
    settings = ModelFolder(
        kind="dense",
        encoder_folder=folder,
        max_length=section.max_length,
        pooling=section.pooling,
        normalize=section.normalize,
        query_prompt=section.query_prompt,
        document_prompt=section.document_prompt,
    )
    return BiEncoder(encoder, tokenizer, settings, source=section.init)


def _random_encoder(section: ModelSection, texts: Sequence[str], *, seed: int) -> tuple[Encoder, Tokenizer, Path]:
    shape = section.architecture
    if shape is None or section.tokenizer is None:  # the loader refuses such a recipe; this guards recipes made in code
        raise InputError("model.architecture and model.tokenizer are needed where model.init is random")
    if section.tokenizer == "train":
        tokenizer = Tokenizer.train(texts, vocab_size=shape.vocab_size, max_length=shape.max_positions, split=section.vocabulary)
    else:
        tokenizer = Tokenizer.from_pretrained(local_folder(section.tokenizer))
    config = EncoderConfig(
        family="modernbert",
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        num_heads=shape.heads,
        intermediate_size=shape.intermediate_size,
        layer_types=global_every(shape.layers, shape.global_every),
        max_positions=shape.max_positions,
        norm_position="pre",
        mlp="gated",
        positions="rope",
        window=shape.window,
        global_theta=shape.global_theta,
        local_theta=shape.local_theta,
        first_attention_norm=False,
        final_norm=True,
        pad_token_id=tokenizer.special_id("pad") or 0,
        cls_token_id=tokenizer.special_id("cls"),
        sep_token_id=tokenizer.special_id("sep"),
    )
    return init_weights(Encoder(config), seed=seed).eval(), tokenizer, Path()


def train_dense(recipe: Recipe, rows: Sequence[Row], model: BiEncoder, work: Path, *, progress: bool = False) -> TrainingResult:
    """Train a model in place.

    Args:
        recipe: Loss and optimisation.
        rows: ``query``, ``positive`` and perhaps ``negative`` texts.
        model: What `build_model` gave.
        work: Folder the trainer may write to.
        progress: Show a bar with the loss and the remaining time.

    Raises:
        InputError: sentence-transformers is not installed, there are fewer rows than one batch, or the loss is not finite.
    """
    try:
        from retrieval.training import trainer
    except ImportError as error:
        raise InputError(f"training needs {error.name}: pip install 'quiver-retrieval[train]'") from error
    settings = recipe.training
    if len(rows) < settings.batch_size:
        raise InputError(f"data.train: {len(rows)} rows are fewer than training.batch_size {settings.batch_size}")
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
    return TrainingResult(trained, done, seconds, history, len(rows), truncated)


def total_steps(recipe: Recipe, rows: int) -> int:
    """Optimiser steps of a run: full batches an epoch times epochs, or fewer if the recipe caps them."""
    steps = max(1, math.ceil(rows // recipe.training.batch_size * recipe.training.epochs))
    return steps if recipe.training.max_steps is None else min(steps, recipe.training.max_steps)


def _count_truncated(model: BiEncoder, rows: Sequence[Row]) -> int:
    texts = [text for row in rows for text in row.values()]
    truncated = model.tokenizer.encode(texts, max_length=model.max_length).truncated
    if truncated:
        logger.info("%d of %d training texts are cut to %d tokens", truncated, len(texts), model.max_length)
    return truncated
