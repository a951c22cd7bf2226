"""ColBERT: one vector a token, compared by MaxSim.

Queries are filled up with [MASK] tokens whose vectors count (expansion). By default no token attends to them, while they
attend to the text: in a packed batch they are tokens that only read (``key_lengths``), so nothing is padded.

Shapes: B texts, N packed tokens, D width of the encoder, n_i vectors of text i, d width of a vector.
Source: ColBERT, arXiv:2004.12832; ColBERTv2, arXiv:2112.01488; the conventions of PyLate 1.6.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from quiver.encoder import Encoder, InputError, PackedBatch, Tokenizer
from quiver.encoder.config import Precision
from quiver.retrieval.models.biencoder import document_texts
from quiver.retrieval.models.encoding import clean, describe_tokens, fingerprint, run_batches
from quiver.retrieval.models.export.pylate import write_colbert
from quiver.retrieval.models.loading import INFERENCE_DTYPE, ModelFolder, load_for_inference, projection_stack
from quiver.retrieval.records import Document, ModelCard, Role, TextTokens, TokenEncoding, TokenVectors


@dataclass(frozen=True)
class _Read:
    """Texts as the encoder reads them.

    Attributes:
        ids: Tokens of each text.
        described: What tokenising did.
        key_lengths: How many of its tokens are attended to, for each text; None for all.
        keep: Whether each token has a vector; None where all have.
    """

    ids: list[list[int]]
    described: TextTokens
    key_lengths: list[int] | None
    keep: list[list[bool]] | None

    def spoken(self) -> list[NDArray[np.uint32]]:
        """The tokens that have a vector, of each text."""
        if self.keep is None:
            return [np.array(text, np.uint32) for text in self.ids]
        return [
            np.array([token for token, kept in zip(*text, strict=True) if kept], np.uint32)
            for text in zip(self.ids, self.keep, strict=True)
        ]


class ColBERT:
    """Encoder and projections with one unit vector a token.

    Args:
        encoder: The native encoder.
        tokenizer: Its vocabulary, with the two prefixes in it.
        settings: Lengths, prefixes, expansion, skiplist, projections.
        source: Folder or hub id, for manifests and reports.

    Raises:
        InputError: The checkpoint is a bi-encoder, has no projection, or lacks a token that its settings name.
    """

    def __init__(self, encoder: Encoder, tokenizer: Tokenizer, settings: ModelFolder, *, source: str = "") -> None:
        name = source or "this model"
        if settings.kind != "colbert":
            raise InputError(f"{name}: not a ColBERT checkpoint (one vector a text); load it with BiEncoder")
        if not settings.projections:
            raise InputError(f"{name}: a ColBERT checkpoint needs at least one Dense module")
        if len(tokenizer) > encoder.config.vocab_size:
            raise InputError(f"{name}: the tokenizer has {len(tokenizer)} ids, the encoder {encoder.config.vocab_size}")
        self.encoder = encoder
        self.tokenizer = tokenizer
        self.settings = settings
        self.projections: nn.Sequential = projection_stack(settings, encoder.config.hidden_size, where=name).to(encoder.device)
        self.source = source
        colbert = settings.colbert
        longest = max(colbert.query_length, colbert.document_length)
        if longest > encoder.config.max_positions:
            raise InputError(
                f"{name}: query_length or document_length {longest} exceeds the encoder's {encoder.config.max_positions} positions"
            )
        self._prefix_ids = {"query": self._token(colbert.query_prefix, name), "document": self._token(colbert.document_prefix, name)}
        self._expansion_id = self._expansion(name)
        unknown = tokenizer.special_id("unk")
        # A skipped word that is no single token stands for [UNK], as in PyLate.
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
            raise InputError(f"{name}: query expansion needs a mask token, and the tokenizer has none")
        return mask

    @classmethod
    def from_pretrained(
        cls,
        source: str | Path,
        *,
        revision: str | None = None,
        dtype: torch.dtype = INFERENCE_DTYPE,
        device: str | None = None,
        precision: Precision = "float",
    ) -> ColBERT:
        """Load a PyLate folder from disk or from the hub.

        Args:
            source: Folder or hub id.
            revision: Branch, tag or commit on the hub.
            dtype: Of the encoder's weights in memory.
            device: Where they go; by default a GPU where there is one. On a CPU the model is for inference only.
            precision: ``int8`` quantises the encoder's matrices, on a CPU.

        Raises:
            InputError: It is no ColBERT model, or one that Quiver does not run; one line says why.
        """
        parts = load_for_inference(source, revision=revision, dtype=dtype, device=device, precision=precision)
        return cls(parts.encoder, parts.tokenizer, parts.settings, source=str(source))

    @property
    def dim(self) -> int:
        """Width of a vector, d."""
        return self.settings.projections[-1].linear.out_features

    @cached_property
    def card(self) -> ModelCard:
        """What an index or a report has to know of this model."""
        colbert = self.settings.colbert
        # What only some models have is told only of them: fingerprints are kept in indexes.
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
            precision=self.encoder.frozen or "float",
        )

    @property
    def skipped_ids(self) -> list[int]:
        """Tokens whose document vectors are dropped, ascending."""
        return sorted(token for token in self._skiplist if token is not None)

    def project(self, hidden: Tensor) -> Tensor:
        """Hidden states (N, D) to unit vectors (N, d)."""
        return F.normalize(self.projections(hidden.float()), dim=-1)

    def encode(self, texts: Sequence[str], role: Role, *, progress: bool = False) -> TokenEncoding:
        """Texts to token vectors, with counts of what tokenising did.

        Args:
            texts: B texts; an empty one is encoded like any other.
            role: Which prefix, length, expansion and skiplist apply.
            progress: Show a bar on standard error.

        Returns:
            B arrays of (n_i, d) float32, in input order, with the ids of their tokens.
        """
        read = self._read(texts, role)
        keep = read.keep

        def forward(batch: PackedBatch) -> list[TokenVectors]:
            vectors = self.project(self.encoder(batch)).cpu()
            parts = batch.unpack(vectors)
            if keep is not None:
                parts = [part[torch.tensor(keep[row])] for part, row in zip(parts, batch.rows, strict=True)]
            return [part.numpy().copy() for part in parts]

        vectors = run_batches(read.ids, forward, key_lengths=read.key_lengths, device=self.encoder.device, role=role, progress=progress)
        return TokenEncoding(vectors, read.described, read.spoken())

    def document_token_ids(self, texts: Sequence[str]) -> list[NDArray[np.uint32]]:
        """The tokens of documents whose vectors ``encode`` gives, found without computing these; B arrays of (n_i,)."""
        return self._read(texts, "document").spoken()

    def _read(self, texts: Sequence[str], role: Role) -> _Read:
        colbert = self.settings.colbert
        length = colbert.query_length if role == "query" else colbert.document_length
        prefix = self._prefix_ids[role]
        prompt = self.settings.query_prompt if role == "query" else self.settings.document_prompt
        cleaned = clean(texts, prompt=prompt, lower_case=self.settings.lower_case)
        tokens = self.tokenizer.encode(cleaned, max_length=length - (prefix is not None))
        ids = tokens.ids if prefix is None else [[*text[:1], prefix, *text[1:]] for text in tokens.ids]
        described = describe_tokens(texts, ids, tokens.truncated)
        key_lengths = None
        if role == "query" and colbert.query_expansion and self._expansion_id is not None:
            key_lengths = None if colbert.attend_to_expansion else [len(text) for text in ids]
            ids = [text + [self._expansion_id] * ((colbert.expanded_length or length) - len(text)) for text in ids]
        keep = [[token not in self._skiplist for token in text] for text in ids] if role == "document" else None
        return _Read(ids, described, key_lengths, keep)

    def encode_queries(self, texts: Sequence[str], *, progress: bool = False) -> list[TokenVectors]:
        """Queries to B arrays of (n_i, d) float32; with expansion n_i is the query length."""
        return self.encode(texts, "query", progress=progress).vectors

    def encode_documents(self, documents: Sequence[str | Document], *, progress: bool = False) -> list[TokenVectors]:
        """Documents, or their texts, to B arrays of (n_i, d) float32, skiplist tokens left out."""
        return self.encode(document_texts(documents), "document", progress=progress).vectors

    def save(self, folder: str | Path) -> None:
        """Write a folder that opens here, in PyLate 1.6 and in sentence-transformers 6."""
        write_colbert(Path(folder), self.settings, self.encoder, self.tokenizer)
