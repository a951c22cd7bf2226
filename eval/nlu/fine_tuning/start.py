"""Where a fine-tuning starts from: the folder that holds an encoder, and what its tokenizer says of token types."""

from __future__ import annotations

from pathlib import Path

from quiver.encoder.checkpoints.folder import local_folder
from quiver.encoder.tokenizer import Tokenizer
from quiver.retrieval.models.loading import read_model_folder

TYPES = "token_type_ids"
INPUTS = ["input_ids", "attention_mask"]
"""What transformers hands to a model; by default it hands `TYPES` too."""


def encoder_folder(source: str | Path) -> Path:
    """The folder with the weights of a model, fetched from the hub if need be; of a model of sentence-transformers that of its encoder.

    Raises:
        InputError: There is no such folder or model, or its modules are none that Quiver knows.
    """
    folder = local_folder(source)
    return read_model_folder(folder).encoder_folder if (folder / "modules.json").is_file() else folder


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Write a tokenizer beside a model that saw two texts as one: told that there are no token types, here all tokens are of the first."""
    tokenizer.settings["model_input_names"] = list(INPUTS)
    tokenizer.save(folder)
