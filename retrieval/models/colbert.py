"""ColBERT: one vector per token, compared by MaxSim.

Queries are padded with [MASK] tokens whose vectors are scored (expansion). By default no token attends to them, while they attend to the
text: in a packed batch ``key_lengths`` excludes them from the keys, so nothing else is padded.

Shapes: B texts, N packed tokens, D width of the encoder, n_i vectors of text i, d width of a vector.
Source: ColBERT, arXiv:2004.12832; ColBERTv2, arXiv:2112.01488; the conventions of PyLate 1.6.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Sequence
from contextlib import closing
from dataclasses import asdict
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from quiver.encoder import Encoder, InputError, Tokenizer
from quiver.encoder.tokenizer import TokenizedTexts
from quiver.retrieval.models.batches import BatchLoop, ModelInputs, copies_for, text_windows
from quiver.retrieval.models.encoding import check_texts, clean, describe_tokens, document_texts, fingerprint, joined_tokens
from quiver.retrieval.models.export.pylate import write_colbert
from quiver.retrieval.models.loading import ModelFolder, PretrainedModel, dtype_of
from quiver.retrieval.progress import Advance, progress_bar
from quiver.retrieval.records import Document, ModelCard, Role, TokenEncoding, TokenVectors


def _flat(ids: Sequence[Sequence[int]]) -> NDArray[np.uint32]:
    """Token ids of all texts."""
    return np.fromiter(chain.from_iterable(ids), np.uint32)


def _split(rows: NDArray[Any], lengths: NDArray[np.int64]) -> list[NDArray[Any]]:
    """Rows of texts as one view per text."""
    ends = np.cumsum(lengths).tolist()
    return [rows[start:end] for start, end in zip([0, *ends], ends, strict=False)]


def _vector_token_ids(inputs: ModelInputs) -> list[NDArray[np.uint32]]:
    """Ids of the tokens that have a vector, per text."""
    ids = _flat(inputs.ids)
    return _split(ids if inputs.keep is None or not len(ids) else ids[np.concatenate(inputs.keep)], inputs.vectors)


def _encoding(inputs: ModelInputs, vectors: Tensor) -> TokenEncoding:
    """The encoding of texts whose vectors are in one matrix, (T, d)."""
    return TokenEncoding(_split(vectors.numpy(), inputs.vectors), inputs.tokens, _vector_token_ids(inputs))


class ColBERT(PretrainedModel):
    """Encoder and projections with one unit vector per token.

    Args:
        encoder: The native encoder.
        tokenizer: The encoder's tokenizer, which has the two prefixes as tokens.
        settings: Lengths, prefixes, expansion, skiplist and projections.
        source: Folder or Hub id, for manifests and reports.
        batch_tokens: Tokens per batch; None to choose, see `quiver.retrieval.models.batches.BatchSize`.

    Raises:
        InputError: The checkpoint is a bi-encoder, has no projection, or lacks a token that its settings name.
    """

    def __init__(
        self, encoder: Encoder, tokenizer: Tokenizer, settings: ModelFolder, *, source: str = "", batch_tokens: int | None = None
    ) -> None:
        name = source or "this model"
        if settings.kind != "colbert":
            raise InputError(f"{name}: not a ColBERT checkpoint (one vector per text); load it with BiEncoder")
        if not settings.projections:
            raise InputError(f"{name}: a ColBERT checkpoint needs at least one Dense module")
        super().__init__(encoder, tokenizer, settings, source=source, batch_tokens=batch_tokens)
        colbert = settings.colbert
        longest = max(colbert.query_length, colbert.document_length)
        if longest > encoder.config.max_positions:
            raise InputError(
                f"{name}: query_length or document_length {longest} exceeds the encoder's {encoder.config.max_positions} positions"
            )
        self._prefix_ids = {"query": self._token(colbert.query_prefix, name), "document": self._token(colbert.document_prefix, name)}
        self._expansion_id = self._expansion(name)
        unknown = tokenizer.special_id("unk")
        # A skiplist word that is not a single token means [UNK], as in PyLate.
        self._skiplist = {tokenizer.token_id(word) if tokenizer.token_id(word) is not None else unknown for word in colbert.skiplist}

    def _token(self, prefix: str, name: str) -> int | None:
        if not prefix:
            return None
        found = self.tokenizer.token_id(prefix)
        if found is None:
            raise InputError(f"{name}: the prefix {prefix!r} is not a token of its tokenizer")
        return found

    def _expansion(self, name: str) -> int | None:
        mask = self.tokenizer.special_id("mask")
        if self.settings.colbert.query_expansion and mask is None:
            raise InputError(f"{name}: query expansion needs a mask token, but the tokenizer has none")
        return mask

    @cached_property
    def card(self) -> ModelCard:
        """Facts about the model for indexes and reports."""
        colbert = self.settings.colbert
        # Optional settings are hashed only if set: fingerprints are stored in indexes and must not change.
        described = [{name: value for name, value in asdict(colbert).items() if value is not None}, self.settings.lower_case]
        described += [prompt for prompt in (self.settings.query_prompt, self.settings.document_prompt) if prompt]
        return ModelCard(
            source=self.source,
            kind="colbert",
            fingerprint=fingerprint(self.encoder, self.projections, self.tokenizer, described),
            dim=self.dim,
            similarity="maxsim",
            query_length=colbert.query_length,
            document_length=colbert.document_length,
            query_prompt=colbert.query_prefix + self.settings.query_prompt,
            document_prompt=colbert.document_prefix + self.settings.document_prompt,
            dtype=dtype_of(self.encoder),
        )

    @property
    def skipped_ids(self) -> list[int]:
        """Ids of the tokens whose document vectors are dropped, ascending."""
        return sorted(token for token in self._skiplist if token is not None)

    def project(self, hidden: Tensor) -> Tensor:
        """Project hidden states (N, D) to unit vectors (N, d)."""
        return F.normalize(self.projections(hidden.float()), dim=-1)

    def encode(self, texts: Sequence[str], role: Role, *, progress: bool = False) -> TokenEncoding:
        """Encode texts to token vectors, with token counts.

        Args:
            texts: B texts; an empty text has vectors too.
            role: Queries or documents; decides prefix, length, expansion and skiplist.
            progress: Show a progress bar on standard error.

        Returns:
            B arrays of (n_i, d) float32, in input order, with the ids of their tokens.
        """
        check_texts(texts)
        windows = text_windows(texts, self.batch_size)
        with (
            progress_bar("queries" if role == "query" else "documents", len(texts), enabled=progress) as advance,
            closing(
                self._loop(role, advance).run(windows, lambda window: self._inputs(texts[window], role), threaded=len(windows) > 1)
            ) as groups,
        ):
            parts = [_encoding(inputs, vectors) for inputs, vectors in groups]
        ids = [ids for part in parts for ids in part.token_ids or ()]
        return TokenEncoding([each for part in parts for each in part.vectors], joined_tokens([part.tokens for part in parts]), ids)

    def encode_chunks(self, chunks: Iterable[Sequence[str]], role: Role) -> Generator[TokenEncoding, None, None]:
        """Yield the encoding of each chunk of texts, as `encode` returns it; a GPU does not wait between chunks.

        Args:
            chunks: Chunks of some hundreds of texts; on a GPU the next two are read while one is encoded.
            role: Queries or documents; decides prefix, length, expansion and skiplist.
        """
        with closing(self._loop(role).run(chunks, lambda texts: self._inputs(texts, role))) as groups:
            for inputs, vectors in groups:
                joined_tokens([inputs.tokens])
                yield _encoding(inputs, vectors)

    def _loop(self, role: Role, advance: Advance = lambda texts: None) -> BatchLoop[Any]:
        copies = copies_for(self.encoder.device)
        return BatchLoop(
            lambda batch: self.project(self.encoder(batch)),
            dim=self.dim,
            size=self.batch_size,
            copies=copies,
            role=role,
            advance=advance,
        )

    def document_token_ids(self, texts: Sequence[str]) -> list[NDArray[np.uint32]]:
        """Return the ids of the tokens whose vectors `encode` returns, without computing the vectors; B arrays of (n_i,)."""
        return _vector_token_ids(self._inputs(texts, "document"))

    def tokenize(self, texts: Sequence[str], role: Role, *, max_length: int | None = None) -> TokenizedTexts:
        """Clean and tokenize texts with the prefix of their role, without query expansion.

        Args:
            texts: B texts.
            role: Queries or documents; decides prefix and length.
            max_length: Tokens to which texts are truncated, if fewer than the model's limit.
        """
        length = self._length(role, max_length)
        prefix = self._prefix_ids[role]
        prompt = self.settings.query_prompt if role == "query" else self.settings.document_prompt
        cleaned = clean(texts, prompt=prompt, lower_case=self.settings.lower_case)
        tokens = self.tokenizer.encode(cleaned, max_length=length - (prefix is not None))
        if prefix is None:
            return tokens
        return TokenizedTexts([[*text[:1], prefix, *text[1:]] for text in tokens.ids], tokens.truncated)

    def expand(self, queries: list[list[int]], *, max_length: int | None = None) -> tuple[list[list[int]], list[int] | None]:
        """Pad tokenized queries with [MASK] tokens, if the model expands queries.

        Args:
            queries: Token ids of B queries.
            max_length: As in `tokenize`.

        Returns:
            The token ids, and for each query the number of leading tokens that are attended to; None for all.
        """
        colbert = self.settings.colbert
        if not colbert.query_expansion or self._expansion_id is None:
            return queries, None
        length = colbert.expanded_length or self._length("query", max_length)
        expanded = [query + [self._expansion_id] * (length - len(query)) for query in queries]
        return expanded, None if colbert.attend_to_expansion else [len(query) for query in queries]

    def _length(self, role: Role, max_length: int | None) -> int:
        own = self.settings.colbert.query_length if role == "query" else self.settings.colbert.document_length
        return min(own, max_length or own)

    def _inputs(self, texts: Sequence[str], role: Role) -> ModelInputs:
        tokens = self.tokenize(texts, role)
        counts = describe_tokens(texts, tokens.ids, tokens.truncated)
        if role == "query":
            ids, key_lengths = self.expand(tokens.ids)
            return ModelInputs(ids, counts, np.fromiter(map(len, ids), np.int64, len(ids)), key_lengths)
        keep = _split(~np.isin(_flat(tokens.ids), self.skipped_ids), np.fromiter(map(len, tokens.ids), np.int64, len(tokens.ids)))
        return ModelInputs(tokens.ids, counts, np.fromiter(map(np.count_nonzero, keep), np.int64, len(keep)), keep=keep)

    def encode_queries(self, texts: Sequence[str], *, progress: bool = False) -> list[TokenVectors]:
        """Encode queries to B arrays of (n_i, d) float32; with expansion n_i is the query length."""
        return self.encode(texts, "query", progress=progress).vectors

    def encode_documents(self, documents: Sequence[str | Document], *, progress: bool = False) -> list[TokenVectors]:
        """Encode documents or their texts to B arrays of (n_i, d) float32, without skiplist tokens."""
        return self.encode(document_texts(documents), "document", progress=progress).vectors

    def save(self, folder: str | Path) -> None:
        """Save the model as a folder that opens in Quiver, PyLate 1.6 and sentence-transformers 6."""
        write_colbert(Path(folder), self.settings, self.encoder, self.tokenizer)
