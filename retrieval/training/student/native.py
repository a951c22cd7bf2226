"""The native encoder as the first module of a model of sentence-transformers or PyLate.

The collator's padded ids are packed before the embedding, so no pad token reaches a matrix or the attention. What comes out
is laid out as the module behind it expects: padded again for one of the library's own, packed for one of ours.

Importing this module imports sentence-transformers (extra ``train``).

Shapes: B texts, S the longest of them in tokens, N packed tokens, D model width.
Source: the contracts of sentence-transformers 5.3 and 6.2 for a first module, and of PyLate 1.6's ``ColBERT``.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import sentence_transformers
import torch
from sentence_transformers.models import InputModule, Transformer
from torch import Tensor

from quiver.encoder import Encoder, PackedBatch, Tokenizer, load_encoder, save_encoder
from quiver.encoder.files import read_json, write_json
from quiver.encoder.packing import masked_lengths, pack_rows
from quiver.encoder.tokenizer import SPECIAL_TOKENS
from quiver.retrieval.models.encoding import clean
from quiver.retrieval.training.start import resize_vocabulary

EXPANDED = "expanded"
"""Feature (B,): rows whose every place is a token, though their attention mask says which may be attended to."""

LENGTHS = "lengths"
"""Feature: what the attention mask sums up to in each row, B integers on the host; without it the mask's device is waited for."""

COLUMNS = "columns"
"""Feature: a function that takes the encoder and gives hidden states (N, D) and their batch; other columns are encoded with it."""

PACKED = ("packed_embeddings", "packed_batch")
"""Features between our own modules: hidden states (N, D) and where their sequences begin and end."""


# PyLate, when it reloads a model, drops a first module that is no Transformer. sentence-transformers 6, which no PyLate runs on, asks
# a Transformer for the model of transformers inside of it.
FIRST_MODULE = InputModule if int(sentence_transformers.__version__.partition(".")[0]) >= 6 else Transformer


class LibraryTokenizer:
    """What PyLate and sentence-transformers ask of a transformers tokenizer, over ours.

    Args:
        tokenizer: It gains the tokens that are added here.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.native = tokenizer
        self.mask_token_id = tokenizer.special_id("mask")
        self.pad_token_id = tokenizer.special_id("pad") or 0
        self.eos_token_id = tokenizer.special_id("sep")

    def __len__(self) -> int:
        return len(self.native)

    @property
    def all_special_ids(self) -> list[int]:
        """Ids of [CLS], [SEP] and so on."""
        found = (self.native.special_id(name) for name in SPECIAL_TOKENS)
        return [token for token in found if token is not None]

    def convert_tokens_to_ids(self, token: str) -> int:
        """A token's id; [UNK]'s where there is no such token, and -1, which no text holds, where there is no [UNK] either."""
        found = self.native.token_id(token)
        unknown = self.native.special_id("unk")
        return found if found is not None else -1 if unknown is None else unknown

    def add_tokens(self, tokens: list[str]) -> int:
        """Add tokens; the number of those that were new."""
        new = [token for token in tokens if self.native.token_id(token) is None]
        for token in new:
            self.native.add_token(token)
        return len(new)


class NativeTransformer(FIRST_MODULE):  # type: ignore[misc, valid-type]  # the library is untyped
    """What the libraries ask of a first module, over the native encoder.

    Args:
        encoder: It is trained in place.
        tokenizer: Its vocabulary.
        max_seq_length: Tokens a text is cut to.
        do_lower_case: Texts are lower-cased before tokenising.
        pads: What comes out is padded; false where the module behind is one of ours and takes `PACKED`.
    """

    config_file_name = "sentence_bert_config.json"
    config_keys = ("max_seq_length", "do_lower_case", "pads")

    def __init__(
        self, encoder: Encoder, tokenizer: Tokenizer, *, max_seq_length: int, do_lower_case: bool = False, pads: bool = True
    ) -> None:
        InputModule.__init__(self)  # past a Transformer's own, which would load a model of transformers
        if encoder.prepacked:
            raise ValueError("a prepacked encoder has no gradients; take the one of retrieval.model_folder.load_parts")
        self.encoder = encoder
        self.tokenizer = LibraryTokenizer(tokenizer)
        self.max_seq_length = max_seq_length
        self.do_lower_case = do_lower_case
        self.pads = pads

    def __repr__(self) -> str:
        return f"NativeTransformer({self.encoder.config.family}, max_seq_length={self.max_seq_length})"

    @property
    def auto_model(self) -> SimpleNamespace:
        """What PyLate asks of the transformers model that it takes this module to hold."""
        return SimpleNamespace(
            config=SimpleNamespace(architectures=None, hidden_size=self.encoder.config.hidden_size),
            device=self.encoder.device,
            resize_token_embeddings=self.resize_token_embeddings,
        )

    def resize_token_embeddings(self, rows: int) -> None:
        """Room for ``rows`` token ids. Rows that no id selects are kept: an embedding padded for alignment stays so."""
        resize_vocabulary(self.encoder, rows)

    def tokenize(self, texts: list[str], padding: bool | str = True, task: str | None = None) -> dict[str, Tensor]:
        """B texts to ``input_ids`` and ``attention_mask``, (B, S) each, padded on the right.

        Args:
            texts: Without prompts.
            padding: ``max_length`` for S = ``max_seq_length``. PyLate asks for it where the places behind a query's end are its
                expansion, and does not say whether they are; so they are encoded, as readers of the text.
            task: One length and no prefix for both sides; not used.
        """
        del task
        ids = self.tokenizer.native.encode(clean(texts, lower_case=self.do_lower_case), max_length=self.max_seq_length).ids
        features = pad_ids(ids, pad=self.tokenizer.pad_token_id, length=self.max_seq_length if padding == "max_length" else None)
        return features | ({EXPANDED: torch.ones(len(ids), dtype=torch.bool)} if padding == "max_length" else {})

    def preprocess(
        self,
        inputs: list[str],
        prompt: str | None = None,
        task: str | None = None,
        max_length: int | None = None,
        processing_kwargs: dict[str, object] | None = None,
    ) -> dict[str, Tensor]:
        """As `tokenize`, by the name that sentence-transformers 6 uses: there the module puts the prompt before the texts."""
        del task, processing_kwargs
        texts = clean(inputs, prompt=prompt or "", lower_case=self.do_lower_case)
        longest = min(self.max_seq_length, max_length or self.max_seq_length)
        return pad_ids(self.tokenizer.native.encode(texts, max_length=longest).ids, pad=self.tokenizer.pad_token_id)

    def forward(self, features: dict[str, Any]) -> dict[str, Any]:
        """Adds ``token_embeddings``, (B, S, D), zeros where there is padding; or ``packed_embeddings``, (N, D), and their batch."""
        if COLUMNS in features:
            hidden, batch = features[COLUMNS](self.encoder)
        else:
            batch = pack_features(features)
            hidden = self.encoder(batch)
        if self.pads:
            return {**features, "token_embeddings": pad_to(hidden, batch, features["input_ids"].shape[1])}
        return {**features, **dict(zip(PACKED, (hidden, batch), strict=True))}

    def gradient_checkpointing_enable(self, gradient_checkpointing_kwargs: dict[str, object] | None = None) -> None:
        """Keep one hidden state a layer and compute the rest again in the backward pass; never with reentrant autograd."""
        del gradient_checkpointing_kwargs
        self.encoder.gradient_checkpointing = True

    def get_word_embedding_dimension(self) -> int:
        """D."""
        return self.encoder.config.hidden_size

    def save(self, output_path: str, *args: object, safe_serialization: bool = True) -> None:
        """Write the encoder as transformers does, the tokenizer and this module's settings."""
        del args, safe_serialization  # always safetensors
        save_encoder(self.encoder, output_path)
        self.tokenizer.native.save(output_path)
        write_json(Path(output_path) / self.config_file_name, {key: getattr(self, key) for key in self.config_keys})

    @classmethod
    def load(cls, model_name_or_path: str, subfolder: str = "", **hub: object) -> NativeTransformer:
        """Read what `save` wrote; ``hub`` are sentence-transformers' download options, of no use for a folder."""
        del hub
        folder = Path(model_name_or_path) / subfolder
        return cls(load_encoder(folder), Tokenizer.from_pretrained(folder), **read_json(folder / cls.config_file_name))


def pad_ids(ids: list[list[int]], *, pad: int, length: int | None = None) -> dict[str, Tensor]:
    """Token lists as ``input_ids`` and ``attention_mask``, (B, S) int64 each.

    Args:
        ids: B lists, none empty.
        pad: Id that fills up.
        length: S; by default that of the longest list.

    Example:
        >>> pad_ids([[5, 6], [7]], pad=0)
        {'input_ids': tensor([[5, 6],
                [7, 0]]), 'attention_mask': tensor([[1, 1],
                [1, 0]])}
    """
    width = max(map(len, ids)) if length is None else length
    return {
        "input_ids": torch.tensor([text + [pad] * (width - len(text)) for text in ids]),
        "attention_mask": torch.tensor([[1] * len(text) + [0] * (width - len(text)) for text in ids]),
    }


def pack_features(features: dict[str, Any]) -> PackedBatch:
    """The tokens of a padded batch; where rows are expanded, every place is one, and those that the mask leaves out only read."""
    ids = features["input_ids"]
    lengths = features[LENGTHS] if LENGTHS in features else masked_lengths(features["attention_mask"])
    if EXPANDED not in features:
        return pack_rows(ids, lengths)
    rows, width = ids.shape
    return replace(pack_rows(ids, [width] * rows), key_lengths=None if min(lengths) == width else tuple(lengths))


def packed_of(features: dict[str, Any]) -> tuple[Tensor, PackedBatch]:
    """The hidden states and their batch that a `NativeTransformer` which does not pad has left."""
    hidden, batch = (features[key] for key in PACKED)
    return hidden, batch


def pad_to(hidden: Tensor, batch: PackedBatch, length: int) -> Tensor:
    """(N, D) to (B, ``length``, D), zeros where there is padding; a batch may be padded further than its longest text."""
    return torch.nn.functional.pad(batch.pad(hidden), (0, 0, 0, length - batch.max_seqlen))
