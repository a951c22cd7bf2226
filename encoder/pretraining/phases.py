"""What a phase makes of the model: the same weights under another context and RoPE base.

Source: ModernBERT, arXiv:2412.13663, section 2.2.2: 1,024 tokens at a base of 10,000, then 8,192 at 160,000 in the global layers.
"""

from __future__ import annotations

from dataclasses import fields, replace

import numpy as np
import torch
from numpy.typing import NDArray

from quiver.encoder.checkpoints.folder import local_folder
from quiver.encoder.checkpoints.head_checkpoint import load_head
from quiver.encoder.config import DROPOUTS, EncoderConfig, global_every
from quiver.encoder.errors import InputError
from quiver.encoder.heads import MaskedLM, init_head
from quiver.encoder.model import Encoder, init_weights
from quiver.encoder.pretraining.corpus import train_texts
from quiver.encoder.pretraining.masking import special_ids
from quiver.encoder.pretraining.sections import ModelSection, PhaseSection, PretrainingRecipe
from quiver.encoder.tokenizer import Tokenizer

ALIGNMENT = 64
"""The embedding's rows are a multiple of it."""

FREE = frozenset(
    {*("family", "max_positions", "global_theta", "initializer_range", "pad_token_id", "cls_token_id", "sep_token_id"), *DROPOUTS}
)
"""What a checkpoint that a run starts from may have otherwise than its recipe: what phases set, and what no result depends on."""


def make_tokenizer(recipe: PretrainingRecipe) -> Tokenizer:
    """The vocabulary of a run: learnt from the corpus, or read.

    Raises:
        InputError: The corpus cannot be read or is empty; or the vocabulary that is named cannot be read, or lacks a special token.
    """
    model, longest = recipe.model, recipe.phases[-1].context
    if model.tokenizer == "train":
        vocabulary = model.vocabulary
        texts = train_texts(recipe.data, share=vocabulary.share)
        return Tokenizer.train(texts, vocab_size=vocabulary.size, max_length=longest, split=vocabulary.split, unused=vocabulary.unused)
    tokenizer = Tokenizer.from_pretrained(local_folder(model.tokenizer))
    try:
        special_ids(tokenizer)
    except InputError as error:
        raise InputError(f"model.tokenizer: {model.tokenizer}: {error}") from error
    return tokenizer


def phase_config(model: ModelSection, phase: PhaseSection, tokenizer: Tokenizer) -> EncoderConfig:
    """The encoder of a phase; phases differ in ``max_positions`` and ``global_theta``."""
    special = special_ids(tokenizer)
    config = EncoderConfig.modernbert(
        vocab_size=-(-len(tokenizer) // ALIGNMENT) * ALIGNMENT,
        hidden_size=model.hidden_size,
        num_heads=model.heads,
        intermediate_size=model.intermediate_size,
        layer_types=global_every(model.layers, model.global_every),
        max_positions=phase.context,
        window=model.window,
        global_theta=phase.global_theta,
        local_theta=model.local_theta,
        pad_token_id=special["pad"],
        cls_token_id=special["cls"],
        sep_token_id=special["sep"],
    )
    return replace(config, attention_output_dropout=model.dropout, initializer_range=model.init_std)


def first_model(recipe: PretrainingRecipe, tokenizer: Tokenizer) -> MaskedLM:
    """The model that a run starts from: random weights, or those of a checkpoint, in the first phase's form.

    Raises:
        InputError: The checkpoint cannot be read, or is of another architecture than the recipe.
    """
    config = phase_config(recipe.model, recipe.phases[0], tokenizer)
    model = MaskedLM(Encoder(config))
    if recipe.model.init == "random":
        init_weights(model.encoder, seed=recipe.training.seed)
        init_head(model, seed=recipe.training.seed + 1)
        return model
    # A checkpoint that was enlarged or comes from elsewhere may have no head; it is drawn then.
    start = load_head(MaskedLM, recipe.model.init, new_head_seed=recipe.training.seed + 1)
    model = in_form(start, config, where=recipe.model.init)
    # Tensors of one shape may be of two models: other layers global, another window, another activation.
    for name in sorted({each.name for each in fields(EncoderConfig)} - FREE):
        has, asked = getattr(start.encoder.config, name), getattr(config, name)
        if has != asked:
            raise InputError(f"model: {recipe.model.init} is another model than the recipe's: {name} is {has!r}, asked for {asked!r}")
    return model


def start_from_frequencies(model: MaskedLM, shares: NDArray[np.float64]) -> None:
    """Set the decoder's bias to the logarithm of each token's share of the text: flat logits then guess as the frequencies do.

    Args:
        model: It has random weights.
        shares: Above 0, (V,).
    """
    bias = model.decoder.bias
    if bias is None:
        raise ValueError("the decoder has no bias")
    with torch.no_grad():
        bias.copy_(torch.from_numpy(np.log(shares)))


def in_form(model: MaskedLM, config: EncoderConfig, *, where: str) -> MaskedLM:
    """The same weights under another configuration.

    RoPE's tables follow from the configuration, so a model of another base and length is made and given the weights.

    Args:
        model: Gives the weights.
        config: Of the model that is made.
        where: What the weights come from, for the error.

    Raises:
        InputError: The configuration has other weights.
    """
    formed = MaskedLM(Encoder(config), tied=model.decoder.weight is None)
    state, wanted = model.state_dict(), formed.state_dict()
    for name in dict.fromkeys([*wanted, *state]):
        has, asked = (tuple(held[name].shape) if name in held else None for held in (state, wanted))
        if has != asked:
            raise InputError(f"model: {where} has another shape than the recipe: {name} is {has or 'missing'}, asked for {asked or 'none'}")
    formed.load_state_dict(state)
    return formed
