"""Settings of a model that the caller chooses instead of its folder."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from quiver.encoder.errors import InputError, check_utf8

if TYPE_CHECKING:
    from quiver.retrieval.models.loading import ModelFolder


@dataclass(frozen=True)
class ModelOptions:
    """Settings that replace those of a model folder; None keeps the folder's. The card and the fingerprint of the model have them.

    Attributes:
        query_length: Maximum tokens of a query, special tokens included (ColBERT).
        document_length: Maximum tokens of a document, special tokens included; for a bi-encoder of every text.
        query_prompt: Text put before every query; for ColBERT after the prefix token.
        document_prompt: Text put before every document.
        truncate_dim: Width to which the vectors of a bi-encoder are cut (Matryoshka).

    Raises:
        InputError: A prompt contains half of a surrogate pair.

    Example:
        >>> from quiver.retrieval import load_model
        >>> from quiver.retrieval.models.options import ModelOptions
        >>> options = ModelOptions(document_length=128, query_prompt="query: ", truncate_dim=64)
        >>> load_model("sentence-transformers/all-MiniLM-L6-v2", options=options).card.dim
        64
    """

    query_length: int | None = None
    document_length: int | None = None
    query_prompt: str | None = None
    document_prompt: str | None = None
    truncate_dim: int | None = None

    def __post_init__(self) -> None:
        for name in ("query_prompt", "document_prompt"):
            check_utf8(getattr(self, name) or "", f"{name} (--{name.replace('_', '-')})")

    def applied(self, settings: ModelFolder) -> ModelFolder:
        """Return the settings of a folder with these in their place.

        Raises:
            InputError: The kind of model has no such setting, or a length is too small.
        """
        prompts = {name: text for name in ("query_prompt", "document_prompt") if (text := getattr(self, name)) is not None}
        if settings.kind == "dense":
            if self.query_length is not None:
                raise InputError("a bi-encoder has one maximum length for queries and documents; pass document_length (--document-length)")
            if self.document_length is not None and self.document_length < 3:
                raise InputError(f"document_length (--document-length) must be >= 3, [CLS], a token and [SEP], got {self.document_length}")
            return replace(settings, max_length=self.document_length or settings.max_length, **prompts)
        if self.truncate_dim is not None:
            raise InputError("truncate_dim (--truncate-dim) applies to bi-encoders; this is a ColBERT model")
        lengths = {name: length for name in ("query_length", "document_length") if (length := getattr(self, name)) is not None}
        changed = replace(settings.colbert, **lengths)
        changed.check_lengths(settings.encoder_folder)
        return replace(settings, colbert=changed, **prompts)


FOLDERS_SETTINGS = ModelOptions()
"""Keeps all settings of a folder."""
