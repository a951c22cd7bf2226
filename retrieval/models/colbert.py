"""ColBERT: one vector per token, compared by MaxSim.

Queries are padded with [MASK] tokens whose vectors are scored (expansion). By default no token attends to them, while they attend to the
text: in a packed batch ``key_lengths`` excludes them from the keys, so nothing else is padded.

Shapes: B texts, N packed tokens, D width of the encoder, n_i vectors of text i, d width of a vector.
Source: ColBERT, arXiv:2004.12832; ColBERTv2, arXiv:2112.01488; the conventions of PyLate 1.6.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from itertools import accumulate, chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from quiver.encoder import Encoder, InputError, PackedBatch, Tokenizer
from quiver.retrieval.models.batches import ModelInputs
from quiver.retrieval.models.encoding import (
    Devices,
    Documents,
    EncodingJob,
    Precision,
    Texts,
    contents,
    describe_tokens,
    pool_tokens,
    quantize_embeddings,
)
from quiver.retrieval.models.export.sentence_transformers import write_colbert
from quiver.retrieval.models.maxsim import maxsim_ragged
from quiver.retrieval.models.options import ModelFolder, ModelOptions
from quiver.retrieval.models.pretrained import PretrainedModel
from quiver.retrieval.records import Dtype, ModelCard, Role, TokenEncoding, TokenVectors

if TYPE_CHECKING:
    from quiver.retrieval.cluster.executors import LocalProcesses


TokenMatrices: TypeAlias = TokenVectors | Tensor | Sequence[TokenVectors | Tensor]
"""Token vectors of texts: an array of (n_i, d) for each, one array (B, n, d), or (n, d) for one text."""


def _list_matrices(texts: TokenMatrices) -> list[Tensor]:
    """Vectors of each text without rows of zeros, (n_i, d)."""
    if isinstance(texts, np.ndarray | Tensor) and texts.ndim == 2:
        texts = [texts]
    flat = [torch.as_tensor(each).flatten(0, -2) for each in texts]  # padding makes (1, n, d)
    return [each[each.any(-1)] for each in flat]


def _split_rows(rows: NDArray[Any], lengths: NDArray[np.int64]) -> list[NDArray[Any]]:
    """Rows of texts as one view per text."""
    ends = np.cumsum(lengths).tolist()
    return [rows[start:end] for start, end in zip([0, *ends], ends, strict=False)]


def _vector_token_ids(inputs: ModelInputs) -> list[NDArray[np.uint32]]:
    """Ids of the tokens that have a vector, per text."""
    ids = np.fromiter(chain.from_iterable(inputs.ids), np.uint32)
    return _split_rows(ids if inputs.keep is None or not len(ids) else ids[np.concatenate(inputs.keep)], inputs.vectors)


class ColBERT(PretrainedModel[TokenEncoding]):
    """Encoder and projections with one unit vector per token.

    Names, arguments and results of `encode` are those of PyLate's ``ColBERT``; `encode_query` and `encode_document` have the names and
    arguments of sentence-transformers 6, and return arrays of unit vectors by default, as `encode` does.

    Args:
        model_name_or_path: Folder of PyLate, Stanford's ColBERT or sentence-transformers 6, or Hub id.
        device: ``cpu``, ``cuda`` or ``cuda:1``; None for a GPU if available. On a CPU the model is for inference only.
        revision: Branch, tag or commit on the Hub.
        dtype: Dtype of the encoder's weights in memory; None for that of `quiver.retrieval.models.pretrained.default_dtype`.
        batch_tokens: Tokens per batch; None to choose, see `quiver.retrieval.models.batches.BatchSize`.
        query_length: Maximum tokens of a query, special tokens included; None for that of the folder.
        document_length: The same for documents.
        prompts: Texts put after the prefix token of every query and document, by the names ``query`` and ``document``.

    Raises:
        InputError: The checkpoint is a bi-encoder, has no projection, or lacks a token that its settings name; the device is not available.

    Example:
        >>> from quiver import ColBERT
        >>> model = ColBERT("lightonai/GTE-ModernColBERT-v1")
        >>> [vectors.shape[1] for vectors in model.encode_document(["Owls have wings.", "Trout have fins."])]  # one vector per token
        [128, 128]
        >>> model.encode_query("which animal has wings").shape  # filled up to 32 tokens
        (32, 128)
    """

    def __init__(
        self,
        model_name_or_path: str | Path,
        *,
        device: str | torch.device | None = None,
        revision: str | None = None,
        dtype: Dtype | torch.dtype | None = None,
        batch_tokens: int | None = None,
        query_length: int | None = None,
        document_length: int | None = None,
        prompts: Mapping[str, str] | None = None,
    ) -> None:
        given = prompts or {}
        options = ModelOptions(query_length, document_length, given.get("query"), given.get("document"))
        super().__init__(model_name_or_path, revision=revision, dtype=dtype, device=device, batch_tokens=batch_tokens, options=options)

    def _assemble(self, encoder: Encoder, tokenizer: Tokenizer, settings: ModelFolder, source: str, batch_tokens: int | None) -> None:
        name = source or "this model"
        if settings.kind != "colbert":
            raise InputError(f"{name}: not a ColBERT checkpoint (one vector per text); load it with BiEncoder")
        if not settings.projections:
            raise InputError(f"{name}: a ColBERT checkpoint needs at least one Dense module")
        super()._assemble(encoder, tokenizer, settings, source, batch_tokens)
        colbert = settings.colbert
        longest = max(colbert.query_length, colbert.document_length)
        if longest > encoder.config.max_positions:
            raise InputError(
                f"{name}: query_length or document_length {longest} exceeds the encoder's {encoder.config.max_positions} positions"
            )
        prefixes: dict[Role, str] = {"query": colbert.query_prefix, "document": colbert.document_prefix}
        for role, prefix in prefixes.items():
            if prefix and tokenizer.token_id(prefix) is None:
                raise InputError(f"{name}: the prefix {prefix!r} is not a token of its tokenizer")
            self._prefix_ids[role] = tokenizer.token_id(prefix) if prefix else None
        self._expansion_id = tokenizer.special_id("mask")
        if colbert.query_expansion and self._expansion_id is None:
            raise InputError(f"{name}: query expansion needs a mask token, but the tokenizer has none")
        # A skiplist word that is not a single token means [UNK], as in PyLate.
        skipped = {tokenizer.special_id("unk") if (token := tokenizer.token_id(word)) is None else token for word in colbert.skiplist}
        self.skipped_ids: list[int] = sorted(token for token in skipped if token is not None)
        """Ids of the tokens whose document vectors are dropped, ascending."""

    def _length(self, role: Role) -> int:
        return self.settings.colbert.query_length if role == "query" else self.settings.colbert.document_length

    def _fingerprinted_settings(self) -> list[object]:
        colbert = {name: value for name, value in asdict(self.settings.colbert).items() if value is not None}
        prompts = [prompt for prompt in (self.settings.query_prompt, self.settings.document_prompt) if prompt]
        return [colbert, self.settings.lower_case, *prompts]

    def with_card(self, card: ModelCard) -> ColBERT:
        """The model with the settings of a card; see `PretrainedModel`.

        :meta private:
        """
        colbert = self.settings.colbert
        if card.kind != "colbert" or max(card.query_length, card.document_length) > self.encoder.config.max_positions:
            return self
        query, document = card.query_prompt.removeprefix(colbert.query_prefix), card.document_prompt.removeprefix(colbert.document_prefix)
        settings = ModelOptions(card.query_length, card.document_length, query, document).applied(self.settings)
        if settings == self.settings:
            return self
        return ColBERT.from_parts(self.encoder, self.tokenizer, settings, source=self.source, batch_tokens=self.batch_tokens)

    def encode(  # noqa: PLR0913 - the arguments of PyLate, in its order
        self,
        sentences: Texts,
        prompt_name: Role | None = None,
        prompt: str | None = None,
        batch_size: int | None = None,
        show_progress_bar: bool | None = None,
        *,
        precision: Precision | None = "float32",
        convert_to_numpy: bool = True,
        convert_to_tensor: bool = False,
        padding: bool = False,
        device: Devices | None = None,
        normalize_embeddings: bool = True,
        is_query: bool = True,
        pool_factor: int = 1,
        protected_tokens: int = 1,
        pool: LocalProcesses | None = None,
        chunk_size: int | None = None,
    ) -> Any:
        """Encode texts to one vector per token, as PyLate does.

        Args:
            sentences: A text, or B texts; an empty text has vectors too.
            prompt_name: ``query`` or ``document``: the prompt that is put before every text; None for that of ``is_query``.
            prompt: Prompt that is put before every text, behind the prefix token, instead of the model's.
            batch_size: Maximum number of texts per batch; None for no limit. Batches are limited by tokens in any case (``batch_tokens``).
            show_progress_bar: Show a progress bar on standard error.
            precision: ``float32``, as None; ``int8`` and ``uint8`` (each column's range over all vectors of the call in 255 steps),
                ``binary`` and ``ubinary`` (one bit per column, eight in a byte), see
                `quiver.retrieval.models.encoding.quantize_embeddings`.
            convert_to_numpy: Return arrays; if false, tensors.
            convert_to_tensor: Return tensors on the model's device; takes precedence.
            padding: Pad the vectors of each text with zeros to the longest of the call; each is then (1, n, d), as in PyLate.
            device: Move the model to this device first; several devices encode with one process each, which end with the call.
            normalize_embeddings: Scale vectors to length 1, before they are pooled.
            is_query: Encode queries, with their prefix, length and expansion; otherwise documents, without the vectors of the skiplist.
            pool_factor: Number of vectors that one pooled vector of a document replaces on average; queries are not pooled. See
                `quiver.retrieval.models.encoding.pool_tokens`.
            protected_tokens: First vectors of a document that are not pooled.
            pool: Processes of `start_multi_process_pool` to encode with.
            chunk_size: Texts that a process takes at a time; None for a tenth of its share, at most 5,000.

        Returns:
            (n, d) float32 for a text, a list of B of them for a list of texts, in input order.

        Raises:
            InputError: There is no such prompt, the device is not available, or a number is too small.
            ValueError: An item of ``sentences`` is not a string, or the precision does not exist.

        Example:
            >>> from quiver import ColBERT
            >>> model = ColBERT("lightonai/GTE-ModernColBERT-v1")
            >>> vectors = model.encode("Owls have wings.", is_query=False)
            >>> pooled = model.encode("Owls have wings.", is_query=False, pool_factor=2)
            >>> len(pooled) < len(vectors)
            True
        """
        role: Role = "query" if is_query else "document"
        if prompt_name not in (None, "query", "document"):
            raise InputError(f"prompt_name must be query or document, got {prompt_name!r}")
        chosen = prompt if prompt is not None else self._role_prompt(prompt_name or role)
        pooling = (1, 1) if is_query else (pool_factor, protected_tokens)
        job = EncodingJob(role, chosen, batch_size, normalize_embeddings, None, *pooling)
        vectors = self._encode_call(sentences, job, device, pool, chunk_size, bool(show_progress_bar)).vectors
        found: list[Any] = vectors
        if padding:
            longest = max(map(len, vectors), default=0)
            found = [np.pad(each, ((0, longest - len(each)), (0, 0)))[None] for each in vectors]  # (1, n, d)
        if precision not in (None, "float32") and found:
            flat = quantize_embeddings(np.concatenate([each.reshape(-1, self.dim) for each in found]), precision)
            parts = _split_rows(flat, np.array([each.shape[-2] for each in found]))
            found = [part.reshape(*each.shape[:-1], -1) for part, each in zip(parts, found, strict=True)]
        if convert_to_tensor or not convert_to_numpy:
            found = [torch.from_numpy(each).to(self.device) for each in found]
        return found[0] if isinstance(sentences, str) else found

    def encode_query(  # noqa: PLR0913 - the arguments of sentence-transformers
        self,
        sentences: Texts,
        prompt_name: Role | None = None,
        prompt: str | None = None,
        batch_size: int | None = None,
        show_progress_bar: bool | None = None,
        *,
        precision: Precision | None = "float32",
        convert_to_numpy: bool = True,
        convert_to_tensor: bool = False,
        padding: bool = False,
        device: Devices | None = None,
        normalize_embeddings: bool = True,
        pool: LocalProcesses | None = None,
        chunk_size: int | None = None,
    ) -> Any:
        """Encode queries: as `encode`; with expansion every query has as many vectors as the query length.

        Example:
            >>> from quiver import ColBERT
            >>> model = ColBERT("lightonai/GTE-ModernColBERT-v1")
            >>> model.encode_query(["which animal has wings"], padding=True)[0].shape
            (1, 32, 128)
        """
        return self.encode(
            sentences,
            prompt_name,
            prompt,
            batch_size,
            show_progress_bar,
            precision=precision,
            convert_to_numpy=convert_to_numpy,
            convert_to_tensor=convert_to_tensor,
            padding=padding,
            device=device,
            normalize_embeddings=normalize_embeddings,
            pool=pool,
            chunk_size=chunk_size,
        )

    def encode_document(  # noqa: PLR0913 - the arguments of sentence-transformers
        self,
        sentences: Documents,
        prompt_name: Role | None = None,
        prompt: str | None = None,
        batch_size: int | None = None,
        show_progress_bar: bool | None = None,
        *,
        precision: Precision | None = "float32",
        convert_to_numpy: bool = True,
        convert_to_tensor: bool = False,
        padding: bool = False,
        device: Devices | None = None,
        normalize_embeddings: bool = True,
        pool_factor: int = 1,
        protected_tokens: int = 1,
        pool: LocalProcesses | None = None,
        chunk_size: int | None = None,
    ) -> Any:
        """Encode documents or their texts: as `encode` with ``is_query=False``; a title is put before the text.

        Example:
            >>> from quiver import ColBERT, Document
            >>> model = ColBERT("lightonai/GTE-ModernColBERT-v1")
            >>> [vectors.shape[1] for vectors in model.encode_document([Document("owl", "It has wings.", "The owl"), "a fish"])]
            [128, 128]
        """
        return self.encode(
            contents(sentences),
            prompt_name,
            prompt,
            batch_size,
            show_progress_bar,
            precision=precision,
            convert_to_numpy=convert_to_numpy,
            convert_to_tensor=convert_to_tensor,
            padding=padding,
            device=device,
            normalize_embeddings=normalize_embeddings,
            is_query=False,
            pool_factor=pool_factor,
            protected_tokens=protected_tokens,
            pool=pool,
            chunk_size=chunk_size,
        )

    def similarity(self, queries: TokenMatrices, documents: TokenMatrices) -> Tensor:
        """MaxSim of each of A queries with each of B documents, (A, B): for each query vector the best inner product, summed.

        Args:
            queries: A arrays or tensors of (n_i, d) as `encode` returns them, one array (A, n, d), or one query (n, d). Rows of zeros are
                padding.
            documents: B documents in the same forms. The scores are on their device.

        Example:
            >>> from quiver import ColBERT
            >>> model = ColBERT("lightonai/GTE-ModernColBERT-v1")
            >>> query, document = [[1.0, 0.0], [0.0, 1.0]], [[1.0, 0.0], [0.5, 0.0]]
            >>> model.similarity([query], [document]).tolist()
            [[1.0]]
        """
        texts, others = _list_matrices(queries), _list_matrices(documents)
        if not texts or not others:
            return torch.zeros(len(texts), len(others))
        device = others[0].device
        query_offsets, document_offsets = (torch.tensor([0, *accumulate(map(len, each))], dtype=torch.int32) for each in (texts, others))
        return maxsim_ragged(torch.cat(texts).to(device), query_offsets, torch.cat(others), document_offsets.to(device))

    def similarity_pairwise(self, queries: TokenMatrices, documents: TokenMatrices) -> Tensor:
        """MaxSim of the queries and documents at the same positions of two lists of B, (B,).

        Args:
            queries: As in `similarity`.
            documents: As many, in the same forms.

        Raises:
            ValueError: There are more of the one than of the other.

        Example:
            >>> from quiver import ColBERT
            >>> model = ColBERT("lightonai/GTE-ModernColBERT-v1")
            >>> query, document = [[1.0, 0.0], [0.0, 1.0]], [[1.0, 0.0], [0.5, 0.0]]
            >>> model.similarity_pairwise([query, query], [document, query]).tolist()
            [1.0, 2.0]
        """
        texts, others = _list_matrices(queries), _list_matrices(documents)
        pairs = [self.similarity([query], [document])[0] for query, document in zip(texts, others, strict=True)]
        return torch.cat(pairs) if pairs else torch.zeros(0)

    def project(self, hidden: Tensor) -> Tensor:
        """Project hidden states (N, D) to unit vectors (N, d).

        :meta private:
        """
        return F.normalize(self.projections(hidden.float()), dim=-1)

    def _forward(self, job: EncodingJob) -> Callable[[PackedBatch], Tensor]:
        def forward(batch: PackedBatch) -> Tensor:
            hidden = self.encoder(batch)
            projected: Tensor = self.project(hidden) if job.normalize else self.projections(hidden.float())
            return projected

        return forward

    def document_token_ids(self, texts: Sequence[str]) -> list[NDArray[np.uint32]]:
        """Return the ids of the tokens whose vectors `encode_texts` returns, without computing the vectors; B arrays of (n_i,).

        :meta private:
        """
        return _vector_token_ids(self._inputs(texts, EncodingJob("document", self._role_prompt("document"))))

    def expand(self, queries: list[list[int]], *, max_length: int | None = None) -> tuple[list[list[int]], list[int] | None]:
        """Pad tokenized queries with [MASK] tokens, if the model expands queries; ``max_length`` is that of `tokenize`.

        With the token ids returns the number of leading tokens of each query that are attended to; None for all.

        :meta private:
        """
        colbert = self.settings.colbert
        if not colbert.query_expansion or self._expansion_id is None:
            return queries, None
        length = colbert.expanded_length or min(colbert.query_length, max_length or colbert.query_length)
        expanded = [query + [self._expansion_id] * (length - len(query)) for query in queries]
        return expanded, None if colbert.attend_to_expansion else [len(query) for query in queries]

    def _inputs(self, texts: Sequence[str], job: EncodingJob) -> ModelInputs:
        tokens = self._tokenize(texts, job.role, job.prompt, self._length(job.role))
        counts = describe_tokens(texts, tokens.ids, tokens.truncated)
        if job.role == "query":
            ids, key_lengths = self.expand(tokens.ids)
            return ModelInputs(ids, counts, np.fromiter(map(len, ids), np.int64, len(ids)), key_lengths)
        kept = ~np.isin(np.fromiter(chain.from_iterable(tokens.ids), np.uint32), self.skipped_ids)
        keep = _split_rows(kept, counts.tokens.astype(np.int64))
        return ModelInputs(tokens.ids, counts, np.fromiter(map(np.count_nonzero, keep), np.int64, len(keep)), keep=keep)

    def _encoding(self, inputs: ModelInputs, vectors: Tensor, job: EncodingJob) -> TokenEncoding:
        texts = _split_rows(vectors.numpy(), inputs.vectors)
        if job.pool_factor > 1:
            return TokenEncoding([pool_tokens(each, job.pool_factor, protected=job.protected_tokens) for each in texts], inputs.tokens)
        return TokenEncoding(texts, inputs.tokens, _vector_token_ids(inputs))

    def save_pretrained(self, path: str | Path) -> None:
        """Save the model as a folder that opens in Quiver, PyLate 1.6 and sentence-transformers 6.

        Raises:
            InputError: The model needs a feature that only sentence-transformers 6 has; nothing is written.

        Example:
            >>> from quiver import ColBERT
            >>> model = ColBERT("lightonai/GTE-ModernColBERT-v1")
            >>> model.save_pretrained("models/copy")
            >>> ColBERT("models/copy").card.fingerprint == model.card.fingerprint
            True
        """
        write_colbert(Path(path), self.settings, self.encoder, self.tokenizer)

    def _facts(self) -> list[tuple[str, str]]:
        colbert = self.settings.colbert
        return [("texts", f"queries of {colbert.query_length}, documents of {colbert.document_length} tokens")]
