"""The phases of a run: vocabulary, architecture and weights, learning rate and batch size.

All phases train the same weights. They differ in context, RoPE base and mix, and in their schedules, which are measured in tokens.

Source: ModernBERT, arXiv:2412.13663, section 2.2.2 (1,024 tokens at a RoPE base of 10,000, then 8,192 at 160,000 in the global layers) and
appendix A.1 (a trapezoidal learning rate, and a batch-size warm-up with equally many steps at each size).
"""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import fields
from itertools import accumulate

import numpy as np
import torch
from numpy.typing import NDArray

from quiver.encoder.checkpoints.checkpoint import local_folder
from quiver.encoder.checkpoints.head_checkpoint import load_head
from quiver.encoder.config import DROPOUTS, EncoderConfig
from quiver.encoder.errors import InputError
from quiver.encoder.heads import MaskedLM, init_head
from quiver.encoder.model import Encoder, init_weights
from quiver.encoder.pretraining.corpus import train_texts
from quiver.encoder.pretraining.recipe import PhaseSection, PretrainingRecipe
from quiver.encoder.pretraining.tiling import enlarge_masked_lm
from quiver.encoder.tokenizer import SPECIAL_TOKENS, Tokenizer
from quiver.encoder.training import optimization

ALIGNMENT = 64  # the number of rows of the token embedding is a multiple of this

FREE = frozenset(
    {*("family", "max_positions", "global_theta", "initializer_range", "pad_token_id", "cls_token_id", "sep_token_id"), *DROPOUTS}
)
"""Settings in which an initial checkpoint may differ from the recipe: each phase sets them, or they do not affect the weights."""


def learning_rate_share(phase: PhaseSection, tokens: int) -> float:
    """Learning rate of a step as a share of the peak, by the number of tokens of the phase that were read before it."""
    start, total = phase.tokens - phase.decay_tokens, phase.tokens
    return optimization.learning_rate_share(
        tokens, warmup=phase.warmup_tokens, decay_start=start, total=total, decay=phase.decay, final=phase.final_share
    )


class BatchWarmup:
    """Batch-size warm-up: number of packed rows per step.

    Every size below the full batch gets the same number of steps, and therefore tokens in proportion to the size.
    """

    def __init__(self, phase: PhaseSection) -> None:
        self.full = phase.batch_size // phase.micro_batch
        self.first = self.full
        self._ends: list[int] = []
        if phase.batch_warmup_tokens:
            self.first = (phase.batch_warmup_from or phase.micro_batch) // phase.micro_batch
            sizes = range(self.first, self.full)
            shares = accumulate(sizes)
            self._ends = [math.ceil(phase.batch_warmup_tokens * share / sum(sizes)) for share in shares]

    def rows(self, tokens: int) -> int:
        """Number of rows of a step."""
        return self.first + bisect_right(self._ends, tokens)


def make_tokenizer(recipe: PretrainingRecipe, *, characters: int | None = None) -> Tokenizer:
    """Train the tokenizer of a run on the corpus, or load it."""
    model, longest = recipe.model, recipe.phases[-1].context
    if model.tokenizer == "train":
        vocabulary = model.vocabulary
        texts = train_texts(recipe.data, share=vocabulary.share, characters=characters)
        return Tokenizer.train(texts, vocab_size=vocabulary.size, max_length=longest, split=vocabulary.split, unused=vocabulary.unused)
    revision = model.revision if model.tokenizer == model.init else None
    tokenizer = Tokenizer.from_pretrained(local_folder(model.tokenizer, revision=revision))
    try:
        special_ids(tokenizer)
    except InputError as error:
        raise InputError(f"model.tokenizer: {model.tokenizer}: {error}") from error
    return tokenizer


def special_ids(tokenizer: Tokenizer) -> dict[str, int]:
    """Return the ids of the special tokens by role, such as ``mask``."""
    found = {name: tokenizer.special_id(name) for name in SPECIAL_TOKENS}
    if missing := [name for name, token in found.items() if token is None]:
        raise InputError(
            f"the vocabulary has no token for {', '.join(missing)}; name it in tokenizer_config.json ({missing[0]}_token), "
            "or train a vocabulary with model.tokenizer: train"
        )
    return {name: token for name, token in found.items() if token is not None}


def phase_config(recipe: PretrainingRecipe, phase: PhaseSection, tokenizer: Tokenizer) -> EncoderConfig:
    """Return the encoder configuration of a phase; phases differ only in ``max_positions`` and ``global_theta``.

    A table of learnt positions has rows for the longest phase from the beginning.
    """
    model, special = recipe.model, special_ids(tokenizer)
    config = model.config(
        vocab_size=-(-len(tokenizer) // ALIGNMENT) * ALIGNMENT,
        max_positions=recipe.phases[-1].context if model.positions == "absolute" else phase.context,
        global_theta=phase.global_theta,
        token_ids={f"{role}_token_id": special[role] for role in ("pad", "cls", "sep")},
    )
    if config.position_offset not in (0, config.pad_token_id + 1):
        raise InputError(f"model.position_offset: must be 0, or {config.pad_token_id + 1}, the id of the padding token and 1")
    return config


def first_model(recipe: PretrainingRecipe, tokenizer: Tokenizer) -> MaskedLM:
    """Make the initial model of a run with the configuration of the first phase and random weights or those of a checkpoint."""
    config = phase_config(recipe, recipe.phases[0], tokenizer)
    model = MaskedLM(Encoder(config))
    if recipe.model.init == "random":
        init_weights(model.encoder, seed=recipe.training.seed, method=recipe.model.init_method)
        init_head(model, seed=recipe.training.seed + 1, method=recipe.model.init_method)
        return model
    # A checkpoint that was enlarged, or written by another library, may lack a head; then the head is random.
    section, seed = recipe.model, recipe.training.seed
    start = load_head(MaskedLM, section.init, revision=section.revision, new_head_seed=seed + 1)
    if section.tiling is not None:
        try:
            start = enlarge_masked_lm(
                start, config, shared=section.tiling_shared, tiling=section.tiling, seed=seed, method=section.init_method
            )
        except InputError as error:
            raise InputError(f"model.tiling: {section.init}: {error}") from error
    model = in_form(start, config, where=recipe.model.init)
    # Models whose tensors have the same shapes can still differ in their global layers, window or activation.
    for name in sorted({each.name for each in fields(EncoderConfig)} - FREE):
        has, wanted = getattr(start.encoder.config, name), getattr(config, name)
        if has != wanted:
            raise InputError(f"model.init: {recipe.model.init} differs from the recipe: its {name} is {has!r}, the recipe has {wanted!r}")
    return model


def start_from_frequencies(model: MaskedLM, shares: NDArray[np.float64]) -> None:
    """Set the decoder's bias to the logarithm of each token's relative frequency, (V,), above 0: the best prediction without context."""
    bias = model.decoder.bias
    if bias is None:
        raise ValueError("the decoder has no bias")
    with torch.no_grad():
        bias.copy_(torch.from_numpy(np.log(shares)))


def in_form(model: MaskedLM, config: EncoderConfig, *, where: str) -> MaskedLM:
    """Return a model with the same weights and another configuration, from which the RoPE tables are built anew."""
    formed = MaskedLM(Encoder(config), tied=model.decoder.weight is None)
    state, expected = model.state_dict(), formed.state_dict()
    for name in dict.fromkeys([*expected, *state]):
        has, wanted = (tuple(held[name].shape) if name in held else None for held in (state, expected))
        if has != wanted:
            raise InputError(
                f"model: {where} differs from the recipe: {name} is {has or 'missing'}, the recipe requires {wanted or 'none'}"
            )
    formed.load_state_dict(state)
    return formed
