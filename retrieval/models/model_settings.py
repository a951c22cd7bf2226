"""What a model folder says beside its weights, in one record for all layouts."""

from __future__ import annotations

import string
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from quiver.retrieval.models.projection import Projection

Kind = Literal["dense", "colbert"]


@dataclass(frozen=True)
class ColBERTSettings:
    """How a multi-vector model reads queries and documents; PyLate's defaults.

    Attributes:
        query_prefix: Token put behind [CLS] of a query; empty for none.
        document_prefix: The same for documents.
        query_length: Tokens of a query, prefix and special tokens included; with expansion every query has that many.
        document_length: Tokens a document is cut to, prefix and special tokens included.
        query_expansion: Fill queries up with [MASK] tokens, whose vectors count.
        attend_to_expansion: The other tokens see the expansion tokens.
        expanded_length: Tokens that queries are filled up to where that is less than the query length; None for the query length.
        skiplist: Tokens whose document vectors are dropped.
    """

    query_prefix: str = "[Q] "
    document_prefix: str = "[D] "
    query_length: int = 32
    document_length: int = 180
    query_expansion: bool = True
    attend_to_expansion: bool = False
    expanded_length: int | None = None
    skiplist: tuple[str, ...] = tuple(string.punctuation)


@dataclass(frozen=True)
class ModelFolder:
    """What a model folder says beside its weights.

    Attributes:
        kind: ``dense`` or ``colbert``.
        encoder_folder: Where config.json, the weights and the tokenizer lie.
        max_length: Tokens a text is cut to; None where the folder does not say.
        lower_case: Texts are lower-cased before tokenising.
        pooling: A key of `quiver.retrieval.models.pooling.POOLINGS`.
        include_prompt: Prompt tokens are pooled too.
        projections: Dense modules in order.
        normalize: The last module scales vectors to length 1.
        query_prompt: Text put before every query; of a ColBERT model behind its prefix.
        document_prompt: Text put before every document.
        similarity: ``cosine`` or ``dot`` (dense), ``maxsim`` (ColBERT).
        colbert: Only for ColBERT models.
    """

    kind: Kind
    encoder_folder: Path
    max_length: int | None = None
    lower_case: bool = False
    pooling: str = "mean"
    include_prompt: bool = True
    projections: tuple[Projection, ...] = ()
    normalize: bool = False
    query_prompt: str = ""
    document_prompt: str = ""
    similarity: Literal["cosine", "dot", "maxsim"] = "cosine"
    colbert: ColBERTSettings = field(default_factory=ColBERTSettings)
