"""Training rows to the tensors that the losses read: prompts, prefixes, lengths and query expansion as the model has them.

One text policy for training and search: what `BiEncoder.encode` and `ColBERT.encode` do to a text is done here.

Importing this module imports sentence-transformers (extra ``train``).

Shapes: B rows, n documents of a row, S the longest text in tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from encoder.tokens import TokenizedTexts
from retrieval.biencoder import BiEncoder
from retrieval.colbert import ColBERT
from retrieval.encoding import clean
from retrieval.records import Role
from retrieval.training.student.native import EXPANDED, pad_ids

SCORES = "scores"
"""Column of the teacher's scores; any other is text, the first the query, the rest its documents."""

EPSILON = 1e-8
"""PyLate's, against a division by zero where all scores of a row are equal."""


@dataclass
class TextCounts:
    """What the collator has seen so far.

    Attributes:
        texts: Texts.
        truncated: Texts that were cut.
        tokens: Tokens after the cut, prompts, prefixes and special tokens included, query expansion not.
    """

    texts: int = 0
    truncated: int = 0
    tokens: int = 0


class _DenseTexts:
    """What `BiEncoder.encode` does to a text, as features.

    Args:
        model: Its prompts and its limit.
        max_length: A lower limit, or None.
    """

    def __init__(self, model: BiEncoder, max_length: int | None) -> None:
        self._settings = model.settings
        self._tokenizer = model.tokenizer
        self._length = min(model.max_length, max_length or model.max_length)
        prompts: dict[Role, str] = {"query": model.settings.query_prompt, "document": model.settings.document_prompt}
        self._prompts = prompts
        self._skip = {role: 0 if model.settings.include_prompt or not prompt else self._leading(prompt) for role, prompt in prompts.items()}

    def _leading(self, prompt: str) -> int:
        """Tokens that a prompt takes at the start of a text: [CLS] and its own."""
        [ids] = self._tokenizer.encode(clean([prompt], lower_case=self._settings.lower_case), max_length=self._length).ids
        return len(ids) - (ids[-1] == self._tokenizer.special_id("sep"))

    def tokens(self, texts: Sequence[str], role: Role) -> TokenizedTexts:
        return self._tokenizer.encode(
            clean(texts, prompt=self._prompts[role], lower_case=self._settings.lower_case), max_length=self._length
        )

    def features(self, ids: list[list[int]], role: Role, longest: int) -> dict[str, Tensor]:
        del longest  # only vectors of whole texts are compared, so every column has its own length
        features = pad_ids(ids, pad=self._tokenizer.special_id("pad") or 0)
        if skip := self._skip[role]:
            features["prompt_length"] = torch.full((len(ids),), skip)
        return features


class _ColBERTTexts:
    """What `ColBERT.encode` does to a text, as features.

    Args:
        model: Its prefixes, its limits, its query expansion.
        max_length: A lower limit, or None.
        filled: Documents are padded to their limit.
    """

    def __init__(self, model: ColBERT, max_length: int | None, *, filled: bool) -> None:
        colbert = model.settings.colbert
        self._colbert = colbert
        self._lower_case = model.settings.lower_case
        self._tokenizer = model.tokenizer
        self._filled = filled
        limits: dict[Role, int] = {"query": colbert.query_length, "document": colbert.document_length}
        self._limits = {role: min(limit, max_length or limit) for role, limit in limits.items()}
        self._prefixes = {"query": colbert.query_prefix, "document": colbert.document_prefix}
        mask = model.tokenizer.special_id("mask")
        self._pad = mask if mask is not None else model.tokenizer.special_id("pad") or 0

    def tokens(self, texts: Sequence[str], role: Role) -> TokenizedTexts:
        prefix = self._tokenizer.token_id(self._prefixes[role]) if self._prefixes[role] else None
        cleaned = clean(texts, lower_case=self._lower_case)
        tokens = self._tokenizer.encode(cleaned, max_length=self._limits[role] - (prefix is not None))
        if prefix is None:
            return tokens
        return TokenizedTexts([[*text[:1], prefix, *text[1:]] for text in tokens.ids], tokens.truncated)

    def features(self, ids: list[list[int]], role: Role, longest: int) -> dict[str, Tensor]:
        limit = self._limits[role]
        if role == "query":
            if not self._colbert.query_expansion:
                return pad_ids(ids, pad=self._pad)
            features = pad_ids(ids, pad=self._pad, length=limit)
            if self._colbert.attend_to_expansion:
                features["attention_mask"].fill_(1)
            return features | {EXPANDED: torch.ones(len(ids), dtype=torch.bool)}
        # PyLate's scores multiply what is masked by zero, and pad to the limit: a document with padding scores no less than 0
        # a query token. One place behind the longest document is enough for the same scores.
        return pad_ids(ids, pad=self._pad, length=limit if self._filled else min(longest + 1, limit))


class Collator:
    """Rows to features, ``{column}_input_ids`` and ``{column}_attention_mask`` of each column of text, and ``label``.

    Args:
        model: Its tokenizer and its text policy.
        max_length: Tokens that texts are cut to, if that is less than the model's own limit.
        merged: All documents of a batch are one column ``documents``, row by row: what PyLate's distillation reads.
        filled: A ColBERT's documents are padded to their limit and not only to the longest of the batch, so that processes
            can exchange them.
        minmax: The teacher's scores of each row are brought to 0..1.
    """

    valid_label_columns: ClassVar[list[str]] = [SCORES]
    """For the trainer's sampler: these columns hold no text."""

    def __init__(
        self, model: BiEncoder | ColBERT, *, max_length: int | None = None, merged: bool = False, filled: bool = False, minmax: bool = False
    ) -> None:
        self.counts = TextCounts()
        self._texts = _DenseTexts(model, max_length) if isinstance(model, BiEncoder) else _ColBERTTexts(model, max_length, filled=filled)
        self._merged = merged
        self._minmax = minmax

    def __call__(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
        """One batch.

        Args:
            rows: B rows with equal keys: texts, the query first, and perhaps ``scores``.

        Returns:
            int64 (B, S) tensors, or (B n, S) of merged documents, row by row; ``label`` (B, n) float32.
        """
        query, *documents = (column for column in rows[0] if column != SCORES)
        columns = {column: [row[column] for row in rows] for column in documents}
        if self._merged:
            columns = {"documents": [row[column] for row in rows for column in documents]}
        ids = {column: self._tokens(texts, "document") for column, texts in columns.items()}
        longest = max(len(text) for column in ids.values() for text in column)
        batch = self._features(query, self._tokens([row[query] for row in rows], "query"), "query", longest)
        for column, texts in ids.items():
            batch |= self._features(column, texts, "document", longest)
        if SCORES in rows[0]:
            batch["label"] = teacher_scores([row[SCORES] for row in rows], minmax=self._minmax)
        return batch

    def _tokens(self, texts: Sequence[str], role: Role) -> list[list[int]]:
        found = self._texts.tokens(texts, role)
        self.counts.texts += len(found.ids)
        self.counts.truncated += sum(found.truncated)
        self.counts.tokens += sum(map(len, found.ids))
        return found.ids

    def _features(self, column: str, ids: list[list[int]], role: Role, longest: int) -> dict[str, Tensor]:
        return {f"{column}_{key}": value for key, value in self._texts.features(ids, role, longest).items()}


def teacher_scores(scores: Sequence[Sequence[float]], *, minmax: bool) -> Tensor:
    """Teacher scores as labels, (B, n) float32.

    Args:
        scores: Of each row's documents.
        minmax: Bring each row's scores to 0..1; a row of equal scores becomes zeros.

    Example:
        >>> teacher_scores([[9.0, 3.0, 6.0]], minmax=True)
        tensor([[1.0000, 0.0000, 0.5000]])
    """
    labels = torch.tensor([list(row) for row in scores], dtype=torch.float32)
    if not minmax:
        return labels
    low, high = labels.amin(dim=1, keepdim=True), labels.amax(dim=1, keepdim=True)
    return (labels - low) / (high - low + EPSILON)
