"""What both kinds of model share when they encode texts: cleaning, token-budget batches, input order, fingerprints.

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
from quiver.retrieval.progress import progress_bar
from quiver.retrieval.records import Role, TextTokens

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

# Tokens of one forward pass. On CPU larger batches leave the cache and gain nothing; a GPU needs far more to be busy.
BATCH_TOKENS = {"cpu": 4096, "cuda": 65_536}


def clean(texts: Sequence[str], *, prompt: str = "", lower_case: bool = False) -> list[str]:
    """Prompt, strip and lower-case texts, as sentence-transformers does before it tokenises.

    Raises:
        ValueError: One string was given instead of a list of them, or an item is not a string.
    """
    if isinstance(texts, str):
        raise ValueError("texts must be a list of strings, got one string")
    for place, text in enumerate(texts):
        if not isinstance(text, str):
            raise ValueError(f"text {place} must be a string, got {type(text).__name__}")
    stripped = [(prompt + text).strip() for text in texts]
    return [text.lower() for text in stripped] if lower_case else stripped


def describe_tokens(texts: Sequence[str], ids: Sequence[Sequence[int]], truncated: Sequence[bool]) -> TextTokens:
    """What tokenising did to each text, with one line in the log when texts lost tokens."""
    if any(truncated):
        logger.info("%d of %d texts were cut to the model's length", sum(truncated), len(texts))
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
    """Run a model over token lists in token-budget batches sorted by length; results in input order.

    Args:
        ids: Token ids of B texts.
        forward: One batch to one result a sequence, in batch order.
        key_lengths: For each text how many leading tokens may be attended to.
        device: Where the model is; gives the budget.
        role: What the texts are. A document's result is the same to the bit in every batch: pieces of an index may be made again in other
            company. A query's is made as fast as it can be.
        progress: Show one.

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
    return [results[place] for place in range(len(ids))]


# Fields of a configuration that change no vector.
WITHOUT_EFFECT = frozenset({"family", "initializer_range", "pad_token_id", "cls_token_id", "sep_token_id", *DROPOUTS})


def fingerprint(encoder: Encoder, projections: nn.Sequential, tokenizer: Tokenizer, settings: object) -> str:
    """sha256 over weights, architecture, tokenizer and settings: equal fingerprints give equal vectors.

    Args:
        encoder: Its weights and its configuration are hashed.
        projections: `quiver.retrieval.models.pooling.Projection` modules, in order.
        tokenizer: Its rules are hashed, and which ids its special tokens have.
        settings: Anything else that changes vectors; JSON with sorted keys.
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
