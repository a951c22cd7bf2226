"""Encoding shared by bi-encoders and ColBERT models: cleaning texts, batches by token budget, and fingerprints.

Shapes: B texts, N packed tokens.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import TypeVar

import numpy as np
import torch
from torch import nn

from quiver.encoder import Encoder, PackedBatch, Tokenizer, pack
from quiver.encoder.config import DROPOUTS
from quiver.encoder.tokenizer import SPECIAL_TOKENS
from quiver.retrieval.models.pooling import Projection
from quiver.retrieval.records import Role, TextTokens
from quiver.retrieval.utils import progress_bar

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

# Tokens per forward pass. On a CPU larger batches leave the cache and gain nothing; a GPU needs far more to be busy.
BATCH_TOKENS = {"cpu": 4096, "cuda": 65_536}


def clean(texts: Sequence[str], *, prompt: str = "", lower_case: bool = False) -> list[str]:
    """Prepend the prompt, strip and lower-case texts, as sentence-transformers does before tokenizing.

    Raises:
        ValueError: ``texts`` is one string, or an item is not a string.
    """
    if isinstance(texts, str):
        raise ValueError("texts must be a list of strings, got a string")
    for number, text in enumerate(texts):
        if not isinstance(text, str):
            raise ValueError(f"text {number} must be a string, got {type(text).__name__}")
    stripped = [(prompt + text).strip() for text in texts]
    return [text.lower() for text in stripped] if lower_case else stripped


def describe_tokens(texts: Sequence[str], ids: Sequence[Sequence[int]], truncated: Sequence[bool]) -> TextTokens:
    """Count the tokens of each text, and log how many texts were truncated."""
    if any(truncated):
        logger.info("%d of %d texts were truncated to the model's maximum length", sum(truncated), len(texts))
    return TextTokens(
        tokens=np.fromiter(map(len, ids), np.int32, len(ids)),
        truncated=np.array(truncated, bool),
        empty=np.fromiter((not text.strip() for text in texts), bool, len(texts)),
    )


def run_batches(
    ids: Sequence[Sequence[int]],
    forward: Callable[[PackedBatch], Sequence[Result]],
    *,
    key_lengths: Sequence[int] | None = None,
    device: torch.device,
    role: Role,
    progress: bool,
) -> list[Result]:
    """Run a model over tokenized texts in batches of similar length; results are in input order.

    Args:
        ids: Token ids of B texts.
        forward: Function from a batch to one result per sequence, in batch order.
        key_lengths: Leading tokens that may be attended to, per text; None for all.
        device: Device of the model; decides the tokens per batch.
        role: Queries or documents. Documents are encoded batch-invariantly, since parts of an index may be built again with other batches;
            queries by the fastest kernels.
        progress: Show a progress bar.

    Returns:
        B results.
    """
    budget = max(BATCH_TOKENS.get(device.type, BATCH_TOKENS["cpu"]), max(map(len, ids), default=0))
    results: dict[int, Result] = {}
    description = "queries" if role == "query" else "documents"
    with torch.inference_mode(), progress_bar(description, len(ids), enabled=progress) as advance:
        for batch in pack(ids, max_tokens=budget, key_lengths=key_lengths):
            results.update(zip(batch.rows, forward(replace(batch, batch_invariant=role == "document")), strict=True))
            advance(len(batch))
    return [results[row] for row in range(len(ids))]


# Configuration fields that do not affect vectors.
WITHOUT_EFFECT = frozenset({"family", "initializer_range", "pad_token_id", "cls_token_id", "sep_token_id", *DROPOUTS})


def fingerprint(encoder: Encoder, projections: nn.Sequential, tokenizer: Tokenizer, settings: object) -> str:
    """Hash weights, architecture, tokenizer and settings with sha256: equal fingerprints mean equal vectors.

    Args:
        encoder: Encoder; its weights and configuration are hashed.
        projections: `quiver.retrieval.models.pooling.Projection` modules, in order.
        tokenizer: Tokenizer; its rules and the ids of its special tokens are hashed.
        settings: JSON values of all other settings that affect vectors.
    """
    digest = hashlib.sha256()
    for module in (encoder, projections):
        for name, tensor in module.state_dict().items():
            digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
            digest.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().data)
    digest.update(tokenizer.to_json().encode())
    described = {
        "architecture": {name: value for name, value in asdict(encoder.config).items() if name not in WITHOUT_EFFECT},
        "projections": [(module.activation, module.use_residual) for module in projections if isinstance(module, Projection)],
        "special": [tokenizer.special_id(name) for name in SPECIAL_TOKENS],
        "truncation": tokenizer.truncation_side,
        "settings": settings,
    }
    digest.update(json.dumps(described, sort_keys=True).encode())
    return digest.hexdigest()
