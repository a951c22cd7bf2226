"""A cache of the Hugging Face Hub with the models that examples name: all-MiniLM-L6-v2 itself, and stand-ins for larger ones."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quiver.encoder import Encoder, EncoderConfig, Tokenizer, init_weights, save_encoder
from quiver.retrieval.models.batches import Projection
from quiver.retrieval.models.colbert import ColBERT
from quiver.retrieval.models.options import ColBERTSettings, ModelFolder

TINY: dict[str, Any] = {
    "hidden_size": 32,
    "num_heads": 2,
    "intermediate_size": 48,
    "layer_types": ["global", "local"],
    "max_positions": 512,
}


def fill_hub(root: Path, minilm: Path) -> Path:
    """Make the cache in a new folder ``root``, and return its folder of models (``HF_HUB_CACHE``)."""
    _save_tiny_colbert(root / "colbert")
    save_encoder(init_weights(Encoder(EncoderConfig.modernbert(vocab_size=50_368, **TINY)), seed=1), root / "encoder")
    models: Mapping[str, Path] = {
        "sentence-transformers/all-MiniLM-L6-v2": minilm,
        "lightonai/GTE-ModernColBERT-v1": root / "colbert",
        "answerdotai/ModernBERT-base": root / "encoder",
    }
    for name, folder in models.items():
        checkpoint = root / "hub" / f"models--{name.replace('/', '--')}"
        (checkpoint / "refs").mkdir(parents=True)
        (checkpoint / "refs" / "main").write_text("0" * 40)
        (checkpoint / "snapshots").mkdir()
        for commit in {"0" * 40, _pinned_commits().get(name, "0" * 40)}:
            (checkpoint / "snapshots" / commit).symlink_to(folder)
    return root / "hub"


def _pinned_commits() -> dict[str, str]:
    """The commits of models in the shipped recipes, by Hub id."""
    texts = (path.read_text() for path in (Path(__file__).parents[1] / "recipes").glob("*.yaml"))
    return dict(found for text in texts for found in re.findall(r"init: (\S+?),?\s+(?:model\.)?revision: (\w+)", text))


def _save_tiny_colbert(folder: Path) -> None:
    """Save a ColBERT with random weights and the width and lengths of GTE-ModernColBERT-v1."""
    tokenizer = Tokenizer.train(["owls have wings", "trout have fins", "def read(path): return open(path)"] * 2, vocab_size=320)
    for prefix in ("[Q] ", "[D] "):
        tokenizer.add_token(prefix)
    encoder = init_weights(Encoder(EncoderConfig.modernbert(vocab_size=330, **TINY)), seed=1)
    settings = ModelFolder("colbert", folder, projections=(Projection(32, 128),), colbert=ColBERTSettings(document_length=300))
    ColBERT.from_parts(encoder, tokenizer, settings).save_pretrained(folder)
