"""What a peer's tokenizer does to texts, counted: the libraries truncate without a word."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np

from quiver.retrieval.models.encoding import clean
from quiver.retrieval.records import TextTokens

logger = logging.getLogger(__name__)


def count_tokens(
    tokenizer: Any,
    texts: Sequence[str],
    max_length: int,
    *,
    prompt: str = "",
    strip: bool = True,
    lower_case: bool = False,
    inserted: int = 0,
) -> TextTokens:
    """Tokens of each text, and which texts lose some, by tokenising them once without a limit.

    Args:
        tokenizer: The library's own, of transformers.
        texts: B texts.
        max_length: Tokens the library cuts a text to, special and inserted tokens included.
        prompt: Put before each text by the library.
        strip: The library strips texts itself.
        lower_case: The library lower-cases texts itself.
        inserted: Tokens the library adds behind the tokenizer's.

    Returns:
        Counts before a query is filled up with expansion tokens.
    """
    prompted = clean(texts, prompt=prompt, lower_case=lower_case) if strip else [prompt + text for text in texts]
    # verbose: the limit is applied below, so the library's warning that one will be needed is noise.
    ids = tokenizer(prompted, truncation=False, padding=False, verbose=False)["input_ids"] if prompted else []
    lengths = np.fromiter(map(len, ids), np.int32, len(ids)) + np.int32(inserted)
    truncated = lengths > max_length
    if truncated.any():
        logger.info("%d of %d texts were cut to the model's length", truncated.sum(), len(texts))
    return TextTokens(
        tokens=np.minimum(lengths, np.int32(max_length)),
        truncated=truncated,
        empty=np.fromiter((not text.strip() for text in texts), bool, len(texts)),
    )
