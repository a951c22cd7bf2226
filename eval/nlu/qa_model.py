"""Span question answering models: open one with its tokenizer, extend its positions, and save it for other libraries.

Source: BERT, arXiv:1810.04805, section 4.2.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

from quiver.encoder.checkpoints import config_to_hf
from quiver.encoder.checkpoints.head_checkpoint import load_head, save_head
from quiver.encoder.config import EncoderConfig
from quiver.encoder.errors import InputError
from quiver.encoder.heads import SpanQA
from quiver.encoder.model import Encoder
from quiver.encoder.pretraining.position_extension import extend_positions
from quiver.encoder.tokenizer import Tokenizer
from quiver.eval.nlu.fine_tuning.start import TYPES, encoder_folder, save_tokenizer

logger = logging.getLogger(__name__)


def open_span_qa(
    source: str | Path, *, seed: int | None, extend: int = 1, attention_dropout: float | None = None
) -> tuple[SpanQA, Tokenizer]:
    """Open a span question answering model, or an encoder with a new head.

    Args:
        source: Folder or hub id; of a sentence-transformers model, the encoder is used.
        seed: Random seed of head weights that the folder lacks; None raises an error if any are missing.
        extend: Factor by which the absolute positions are extended.
        attention_dropout: Dropout of the attention weights in training; None for the model's own.

    Raises:
        InputError: The source is not a model, has no tokenizer, lacks a head, its positions cannot be extended, or the config.json of its
            family cannot express that dropout.
    """
    folder = encoder_folder(source)
    tokenizer = Tokenizer.from_pretrained(folder)
    model = load_head(SpanQA, folder, new_head_seed=seed)
    if extend == 1 and attention_dropout is None:
        return model, tokenizer
    encoder = extend_positions(model.encoder, extend) if extend > 1 else model.encoder
    if attention_dropout is not None:
        weights, config = encoder.state_dict(), replace(encoder.config, attention_dropout=attention_dropout)
        _refuse_what_cannot_be_written(config)
        encoder = Encoder(config)
        encoder.load_state_dict(weights)
    changed = SpanQA(encoder, dropout=model.dropout.p, transform=None if model.transform is None else model.transform.config)
    head = {name: tensor for name, tensor in model.state_dict().items() if not name.startswith("encoder.")}
    changed.load_state_dict(changed.state_dict() | head)
    if extend > 1:
        tokenizer.settings["model_max_length"] = encoder.config.max_positions
    return changed.eval(), tokenizer


def _refuse_what_cannot_be_written(config: EncoderConfig) -> None:
    try:
        config_to_hf(config)
    except InputError as error:
        remedy = "leave it out for this model, whose config.json has no such setting of its own"
        raise InputError(f"model.attention_dropout: {remedy} ({error})") from error


def save_qa_model(model: SpanQA, tokenizer: Tokenizer, folder: Path) -> None:
    """Save a model with its tokenizer so that transformers computes the same logits.

    Args:
        model: Model to save, on any device.
        tokenizer: Its tokenizer; its settings are changed so that transformers passes no token types.
        folder: Target folder; created if missing.

    Raises:
        InputError: The config.json of the model's family cannot express the head.
    """
    save_head(model, folder)
    save_tokenizer(tokenizer, folder)


def warn_of_token_types(model: SpanQA, tokenizer: Tokenizer, source: str) -> None:
    """Warn that a model was trained elsewhere with BERT's second token type for paragraphs, which Quiver does not use."""
    names = tokenizer.settings.get("model_input_names", [TYPES])
    if model.encoder.config.type_vocab_size > 1 and TYPES in names:
        logger.warning("%s: was trained with two token types, of which the first is used here; its answers may be worse", source)
