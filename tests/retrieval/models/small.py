"""A small random bi-encoder and a small random ColBERT model, as objects and as folders."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from quiver.encoder import Encoder, EncoderConfig, Tokenizer, init_weights
from quiver.retrieval.models.batches import Projection
from quiver.retrieval.models.biencoder import BiEncoder
from quiver.retrieval.models.colbert import ColBERT
from quiver.retrieval.models.options import ColBERTSettings, ModelFolder

CONFIG = EncoderConfig.modernbert(
    vocab_size=320, hidden_size=32, num_heads=2, intermediate_size=48, layer_types=["global", "local"], max_positions=64
)
TEXTS = ["a bird has wings", "wings, and a beak!", "x", "query: passage:"]


def make_tokenizer(texts: Sequence[str] = TEXTS, **settings: Any) -> Tokenizer:
    made = Tokenizer.train(texts, vocab_size=300, **settings)
    for prefix in ("[Q] ", "[D] "):
        made.add_token(prefix)
    return made


def make_dense(
    tokenizer: Tokenizer | None = None, encoder: Encoder | None = None, *, batch_tokens: int | None = None, **settings: Any
) -> BiEncoder:
    about = dataclasses.replace(ModelFolder("dense", Path(), max_length=32), **settings)
    parts = encoder or init_weights(Encoder(CONFIG), seed=1).eval(), tokenizer or make_tokenizer()
    return BiEncoder.from_parts(*parts, about, batch_tokens=batch_tokens)


def make_colbert(
    tokenizer: Tokenizer | None = None,
    encoder: Encoder | None = None,
    *,
    batch_tokens: int | None = None,
    projections: tuple[Projection, ...] | None = None,
    prompts: dict[str, str] | None = None,
    **settings: Any,
) -> ColBERT:
    colbert = ColBERTSettings(**{"document_length": 60, **settings})
    about = ModelFolder("colbert", Path(), projections=projections or (Projection(32, 8),), similarity="maxsim", colbert=colbert)
    parts = encoder or init_weights(Encoder(CONFIG), seed=1).eval(), tokenizer or make_tokenizer()
    return ColBERT.from_parts(*parts, dataclasses.replace(about, **(prompts or {})), batch_tokens=batch_tokens)
