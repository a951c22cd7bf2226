"""The DPR bi-encoder: one vector per text.

Shapes: B texts, N packed tokens, D width of the encoder, d width of a vector.
Source: Dense Passage Retrieval, arXiv:2004.04906; sentence-transformers' conventions for prompts and pooling.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Sequence
from contextlib import closing
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from quiver.encoder import Encoder, InputError, PackedBatch, Tokenizer
from quiver.encoder.tokenizer import TokenizedTexts
from quiver.retrieval.models.batches import BatchLoop, ModelInputs, copies_for, text_windows
from quiver.retrieval.models.encoding import check_texts, clean, describe_tokens, document_texts, fingerprint, joined_tokens, pool
from quiver.retrieval.models.export.sentence_transformers import write_dense
from quiver.retrieval.models.loading import ModelFolder, PretrainedModel, dtype_of
from quiver.retrieval.progress import Advance, progress_bar
from quiver.retrieval.records import DenseEncoding, DenseVectors, Document, ModelCard, Role


class BiEncoder(PretrainedModel):
    """Encoder, pooling, projections and normalization, with prompts and lengths from the checkpoint.

    A text's vector does not depend on the rest of the batch, to 1e-6 in float32.

    Args:
        encoder: The native encoder.
        tokenizer: The encoder's tokenizer.
        settings: Pooling, prompts, lengths and projections.
        source: Folder or Hub id, for manifests and reports.
        batch_tokens: Tokens per batch; None to choose, see `quiver.retrieval.models.batches.BatchSize`.

    Raises:
        InputError: The checkpoint is a ColBERT model, or its parts do not fit each other.
    """

    def __init__(
        self, encoder: Encoder, tokenizer: Tokenizer, settings: ModelFolder, *, source: str = "", batch_tokens: int | None = None
    ) -> None:
        if settings.kind != "dense":
            raise InputError(f"{source or 'this model'}: a ColBERT checkpoint (one vector per token); load it with ColBERT")
        super().__init__(encoder, tokenizer, settings, source=source, batch_tokens=batch_tokens)
        limits = (settings.max_length, tokenizer.max_length, encoder.config.max_positions)
        self.max_length = settings.max_length or min(limit for limit in limits if limit is not None)
        if settings.max_length is not None and settings.max_length < 1:
            raise InputError(f"{source}: max_seq_length must be >= 1, got {settings.max_length}")
        if self.max_length > encoder.config.max_positions:
            raise InputError(f"{source}: max_seq_length {self.max_length} exceeds the encoder's {encoder.config.max_positions} positions")

    @cached_property
    def card(self) -> ModelCard:
        """Facts about the model for indexes and reports."""
        settings = self.settings
        described = [settings.pooling, settings.include_prompt, settings.normalize, settings.lower_case, self.max_length]
        described += [settings.query_prompt, settings.document_prompt, settings.similarity]
        return ModelCard(
            source=self.source,
            kind="dense",
            fingerprint=fingerprint(self.encoder, self.projections, self.tokenizer, described),
            dim=self.dim,
            similarity=settings.similarity,
            query_length=self.max_length,
            document_length=self.max_length,
            query_prompt=settings.query_prompt,
            document_prompt=settings.document_prompt,
            dtype=dtype_of(self.encoder),
        )

    def pool(self, hidden: Tensor, batch: PackedBatch, *, skip: int = 0) -> Tensor:
        """Pool, project and normalize hidden states: (N, D) to (B, d)."""
        vectors: Tensor = self.projections(pool(hidden, batch, self.settings.pooling, skip=skip))
        return F.normalize(vectors, dim=1) if self.settings.normalize else vectors

    def encode(self, texts: Sequence[str], role: Role, *, progress: bool = False) -> DenseEncoding:
        """Encode texts to vectors, with token counts.

        Args:
            texts: B texts; an empty text has a vector too.
            role: Queries or documents; decides the prompt.
            progress: Show a progress bar on standard error.

        Returns:
            (B, d) float32, in input order.
        """
        check_texts(texts)
        vectors = torch.empty(len(texts), self.dim)
        windows = text_windows(texts, self.batch_size)

        def tokenize(window: slice) -> ModelInputs:
            return self._inputs(texts[window], role, out=vectors[window])

        with (
            progress_bar("queries" if role == "query" else "documents", len(texts), enabled=progress) as advance,
            closing(self._loop(role, advance).run(windows, tokenize, threaded=len(windows) > 1)) as groups,
        ):
            tokens = [inputs.tokens for inputs, _ in groups]
        return DenseEncoding(vectors.numpy(), joined_tokens(tokens))

    def encode_chunks(self, chunks: Iterable[Sequence[str]], role: Role) -> Generator[DenseEncoding, None, None]:
        """Yield the encoding of each chunk of texts, as `encode` returns it; a GPU does not wait between chunks.

        Args:
            chunks: Chunks of some hundreds of texts; on a GPU the next two are read while one is encoded.
            role: Queries or documents; decides the prompt.
        """
        with closing(self._loop(role).run(chunks, lambda texts: self._inputs(texts, role))) as groups:
            for inputs, vectors in groups:
                yield DenseEncoding(vectors.numpy(), joined_tokens([inputs.tokens]))

    def _loop(self, role: Role, advance: Advance = lambda texts: None) -> BatchLoop[Any]:
        skip = self.skipped_tokens(role)

        def forward(batch: PackedBatch) -> Tensor:
            return self.pool(self.encoder(batch), batch, skip=skip)

        copies = copies_for(self.encoder.device)
        return BatchLoop(forward, dim=self.dim, size=self.batch_size, copies=copies, role=role, advance=advance)

    def _inputs(self, texts: Sequence[str], role: Role, *, out: Tensor | None = None) -> ModelInputs:
        tokens = self.tokenize(texts, role)
        described = describe_tokens(texts, tokens.ids, tokens.truncated)
        return ModelInputs(tokens.ids, described, np.ones(len(tokens.ids), np.int64), out=out)

    def tokenize(self, texts: Sequence[str], role: Role, *, max_length: int | None = None) -> TokenizedTexts:
        """Clean and tokenize texts with the prompt of their role.

        Args:
            texts: B texts.
            role: Queries or documents; decides the prompt.
            max_length: Tokens to which texts are truncated, if fewer than the model's limit.
        """
        prompt = self.settings.query_prompt if role == "query" else self.settings.document_prompt
        cleaned = clean(texts, prompt=prompt, lower_case=self.settings.lower_case)
        return self.tokenizer.encode(cleaned, max_length=min(self.max_length, max_length or self.max_length))

    def skipped_tokens(self, role: Role) -> int:
        """Number of leading tokens that pooling skips: those of the prompt, if the model does not pool it."""
        prompt = self.settings.query_prompt if role == "query" else self.settings.document_prompt
        return 0 if self.settings.include_prompt or not prompt else self.prompt_tokens(prompt)

    def prompt_tokens(self, prompt: str) -> int:
        """Number of leading tokens of a prompt, with [CLS] and without [SEP]."""
        ids = self.tokenizer.encode(clean([prompt], lower_case=self.settings.lower_case), max_length=self.max_length).ids[0]
        return len(ids) - (ids[-1] == self.tokenizer.special_id("sep"))

    def encode_queries(self, texts: Sequence[str], *, progress: bool = False) -> DenseVectors:
        """Encode queries to (B, d) float32."""
        return self.encode(texts, "query", progress=progress).vectors

    def encode_documents(self, documents: Sequence[str | Document], *, progress: bool = False) -> DenseVectors:
        """Encode documents or their texts to (B, d) float32."""
        return self.encode(document_texts(documents), "document", progress=progress).vectors

    def save(self, folder: str | Path) -> None:
        """Save the model as a folder that opens in Quiver and in sentence-transformers 5 and 6."""
        write_dense(Path(folder), self.settings, self.encoder, self.tokenizer, max_length=self.max_length)
