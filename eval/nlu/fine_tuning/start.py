"""Start of a fine-tuning: find the folder of the encoder, and save its tokenizer without token types."""

from __future__ import annotations

from pathlib import Path

from quiver.encoder.checkpoints.folder import local_folder
from quiver.encoder.tokenizer import Tokenizer
from quiver.retrieval.models.loading import read_model_folder

TYPES = "token_type_ids"
INPUTS = ["input_ids", "attention_mask"]
"""Inputs that transformers passes to the model; by default it passes `TYPES` too."""


def encoder_folder(source: str | Path) -> Path:
    """Folder with the encoder's weights, downloaded from the Hugging Face Hub if necessary.

    Of a sentence-transformers model, it is the folder of its encoder.

    Raises:
        InputError: The folder or model does not exist, or Quiver does not support its modules.
    """
    folder = local_folder(source)
    return read_model_folder(folder).encoder_folder if (folder / "modules.json").is_file() else folder


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Save the tokenizer of a model that was fine-tuned without token types, with settings that tell transformers not to pass any."""
    tokenizer.settings["model_input_names"] = list(INPUTS)
    tokenizer.save(folder)
