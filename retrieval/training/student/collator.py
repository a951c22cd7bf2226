"""Training rows to the tensors that the losses read: prompts, prefixes, lengths and query expansion as the model has them.

One text policy for training and search: what `BiEncoder.encode` and `ColBERT.encode` do to a text is done here.

Importing this module imports sentence-transformers (extra ``train``).

Shapes: B rows, n documents of a row, S the longest text in tokens.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from quiver.encoder import InputError
from quiver.encoder.tokenizer import TokenizedTexts
from quiver.retrieval.models.biencoder import BiEncoder
from quiver.retrieval.models.colbert import ColBERT
from quiver.retrieval.models.encoding import clean
from quiver.retrieval.records import Role
from quiver.retrieval.training.student.native import EXPANDED, LENGTHS, pad_ids

logger = logging.getLogger(__name__)

SCORES = "scores"
"""Column of the teacher's scores; any other is text, the first the query, the rest its documents."""

EPSILON = 1e-8
"""PyLate's, against a division by zero where all scores of a row are equal."""


MANY_CUT, EARLIEST = 0.2, 256
"""Share of all texts so far that are cut, and the number of texts, from which on it is worth a warning."""


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

    Raises:
        InputError: The limit leaves a prompt no text behind it.
    """

    def __init__(self, model: BiEncoder, max_length: int | None) -> None:
        self._settings = model.settings
        self._tokenizer = model.tokenizer
        self._length = min(model.max_length, max_length or model.max_length)
        prompts: dict[Role, str] = {"query": model.settings.query_prompt, "document": model.settings.document_prompt}
        self._prompts = prompts
        self._skip: dict[Role, int] = {}
        for role, prompt in prompts.items():
            [ids] = self._tokenizer.encode(clean([prompt], lower_case=self._settings.lower_case), max_length=self._length).ids
            if len(ids) >= self._length:
                raise _no_room(role, self._length, "model.max_length", asked=max_length, remedy=f", or shorten model.{role}_prompt")
            # [CLS] and the prompt's own.
            leading = len(ids) - (ids[-1] == self._tokenizer.special_id("sep"))
            self._skip[role] = 0 if model.settings.include_prompt or not prompt else leading

    def tokens(self, texts: Sequence[str], role: Role) -> TokenizedTexts:
        return self._tokenizer.encode(
            clean(texts, prompt=self._prompts[role], lower_case=self._settings.lower_case), max_length=self._length
        )

    def features(self, ids: list[list[int]], role: Role, longest: int) -> dict[str, Any]:
        del longest  # only vectors of whole texts are compared, so every column has its own length
        features = _padded(ids, pad=self._tokenizer.special_id("pad") or 0)
        return features | ({"prompt_length": self._skip[role]} if self._skip[role] else {})


class _ColBERTTexts:
    """What `ColBERT.encode` does to a text, as features.

    Args:
        model: Its prefixes, its limits, its query expansion.
        max_length: A lower limit, or None.
        filled: Documents are padded to their limit.

    Raises:
        InputError: A limit leaves a prefix no text behind it.
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
        for role, limit in self._limits.items():
            if len(self.tokens([""], role).ids[0]) >= limit:
                raise _no_room(role, limit, f"model.colbert.{role}_length", asked=max_length)

    def tokens(self, texts: Sequence[str], role: Role) -> TokenizedTexts:
        prefix = self._tokenizer.token_id(self._prefixes[role]) if self._prefixes[role] else None
        cleaned = clean(texts, lower_case=self._lower_case)
        tokens = self._tokenizer.encode(cleaned, max_length=self._limits[role] - (prefix is not None))
        if prefix is None:
            return tokens
        return TokenizedTexts([[*text[:1], prefix, *text[1:]] for text in tokens.ids], tokens.truncated)

    def features(self, ids: list[list[int]], role: Role, longest: int) -> dict[str, Any]:
        limit = self._limits[role]
        if role == "query":
            if not self._colbert.query_expansion:
                return _padded(ids, pad=self._pad)
            features = _padded(ids, pad=self._pad, length=limit)
            if self._colbert.attend_to_expansion:
                features["attention_mask"].fill_(1)
                features[LENGTHS] = (limit,) * len(ids)
            return features | {EXPANDED: torch.ones(len(ids), dtype=torch.bool)}
        # PyLate's scores multiply what is masked by zero, and pad to the limit: a document with padding scores no less than 0
        # a query token. One place behind the longest document is enough for the same scores.
        return _padded(ids, pad=self._pad, length=limit if self._filled else min(longest + 1, limit))


def _padded(ids: list[list[int]], *, pad: int, length: int | None = None) -> dict[str, Any]:
    """`pad_ids`, and the lengths: once the tensors are on a GPU, to count them there would make every step wait for it."""
    return {**pad_ids(ids, pad=pad, length=length), LENGTHS: tuple(map(len, ids))}


def _no_room(role: Role, limit: int, own: str, *, asked: int | None, remedy: str = "") -> InputError:
    """What is wrong with a limit: the model's ``own``, or the lower one that is ``asked`` for in training."""
    name = own if asked is None or asked > limit else "training.max_length"
    return InputError(f"{name}: the {limit} tokens of a {role} are filled before its text begins; raise it{remedy}")


class Collator:
    """Rows to features, ``{column}_input_ids``, ``{column}_attention_mask`` and so on of each column of text, and ``label``.

    One warning is logged where many texts are cut.

    Args:
        model: Its tokenizer and its text policy.
        max_length: Tokens that texts are cut to, if that is less than the model's own limit.
        merged: All documents of a batch are one column ``documents``, row by row: what PyLate's distillation reads.
        filled: A ColBERT's documents are padded to their limit and not only to the longest of the batch, so that processes
            can exchange them.
        minmax: The teacher's scores of each row are brought to 0..1.

    Raises:
        InputError: A limit leaves nothing of a text behind its prompt or prefix.
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
        self._warns = os.environ.get("RANK", "0") == "0"  # set by torchrun

    def __call__(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """One batch.

        Args:
            rows: B rows with equal keys: texts, the query first, and perhaps ``scores``.

        Returns:
            int64 (B, S) tensors, or (B n, S) of merged documents, row by row; `LENGTHS` as integers; ``label`` (B, n) float32.
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
        self._warn_of_cuts()
        return batch

    def _warn_of_cuts(self) -> None:
        counts = self.counts
        if self._warns and counts.texts >= EARLIEST and counts.truncated > MANY_CUT * counts.texts:
            self._warns = False
            logger.warning(
                "%.0f%% of the texts so far are cut to the model's or to training.max_length; what is behind is not trained on",
                100 * counts.truncated / counts.texts,
            )

    def _tokens(self, texts: Sequence[str], role: Role) -> list[list[int]]:
        found = self._texts.tokens(texts, role)
        self.counts.texts += len(found.ids)
        self.counts.truncated += sum(found.truncated)
        self.counts.tokens += sum(map(len, found.ids))
        return found.ids

    def _features(self, column: str, ids: list[list[int]], role: Role, longest: int) -> dict[str, Any]:
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
