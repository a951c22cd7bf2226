"""The native encoder as the first module of a sentence-transformers model.

The collator's padded ids are packed before the embedding and the hidden states padded after the last norm, so no pad
token reaches a matrix or the attention; the module behind it (pooling) sees what it expects.

Importing this module imports sentence-transformers (extra ``train``).

Shapes: B texts, S the longest of them in tokens, D model width.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from sentence_transformers.models import InputModule
from torch import Tensor

from encoder import Encoder, Tokenizer, load_encoder, pack_padded, save_encoder
from encoder.files import read_json, write_json
from retrieval.encoding import clean


class NativeTransformer(InputModule):  # type: ignore[misc]  # the library is untyped
    """What sentence-transformers asks of a first module, over the native encoder.

    Args:
        encoder: It is trained in place.
        tokenizer: Its vocabulary.
        max_seq_length: Tokens a text is cut to.
        do_lower_case: Texts are lower-cased before tokenising.
    """

    config_file_name = "sentence_bert_config.json"
    config_keys = ("max_seq_length", "do_lower_case")

    def __init__(self, encoder: Encoder, tokenizer: Tokenizer, *, max_seq_length: int, do_lower_case: bool = False) -> None:
        super().__init__()
        if encoder.frozen:
            raise ValueError("a frozen encoder has no gradients; take the one of retrieval.model_folder.load_parts")
        self.encoder = encoder
        self.tokenizer = tokenizer
        self.max_seq_length = max_seq_length
        self.do_lower_case = do_lower_case

    def tokenize(self, texts: list[str], task: str | None = None) -> dict[str, Tensor]:
        """B texts to ``input_ids`` and ``attention_mask``, (B, S) each, padded on the right."""
        del task  # one length and no prefix for both sides; prompts come from the trainer
        ids = self.tokenizer.encode(clean(texts, lower_case=self.do_lower_case), max_length=self.max_seq_length).ids
        longest = max(map(len, ids))
        pad = self.tokenizer.special_id("pad") or 0
        return {
            "input_ids": torch.tensor([text + [pad] * (longest - len(text)) for text in ids]),
            "attention_mask": torch.tensor([[1] * len(text) + [0] * (longest - len(text)) for text in ids]),
        }

    def forward(self, features: dict[str, Any]) -> dict[str, Any]:
        """Adds ``token_embeddings``, (B, S, D), zeros where there is padding."""
        batch = pack_padded(features["input_ids"], features["attention_mask"])
        hidden = batch.pad(self.encoder(batch))
        missing = features["input_ids"].shape[1] - batch.max_seqlen  # a gathered batch may be padded further than it needs
        if missing:
            hidden = torch.nn.functional.pad(hidden, (0, 0, 0, missing))
        return {**features, "token_embeddings": hidden}

    def get_word_embedding_dimension(self) -> int:
        """D."""
        return self.encoder.config.hidden_size

    def save(self, output_path: str, *args: object, safe_serialization: bool = True) -> None:
        """Write the encoder as transformers does, the tokenizer and this module's settings."""
        del args, safe_serialization  # always safetensors
        save_encoder(self.encoder, output_path)
        self.tokenizer.save(output_path)
        write_json(Path(output_path) / self.config_file_name, {key: getattr(self, key) for key in self.config_keys})

    @classmethod
    def load(cls, model_name_or_path: str, subfolder: str = "", **hub: object) -> NativeTransformer:
        """Read what `save` wrote; ``hub`` are sentence-transformers' download options, of no use for a folder."""
        del hub
        folder = Path(model_name_or_path) / subfolder
        return cls(load_encoder(folder), Tokenizer.from_pretrained(folder), **read_json(folder / cls.config_file_name))
