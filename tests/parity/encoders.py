"""Random models of transformers, as it saves them: what the parity tests of encoders, heads, adapters and retrievers start from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from quiver.encoder import Tokenizer

SIZES = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "max_position_embeddings": 512,
}
ROBERTA = {"max_position_embeddings": 514, "type_vocab_size": 1, "pad_token_id": 1, "layer_norm_eps": 1e-5}
FAMILIES: dict[str, dict[str, Any]] = {
    "modernbert": {"pad_token_id": 0, "cls_token_id": 1, "sep_token_id": 2, "bos_token_id": 1, "eos_token_id": 2},
    "bert": {},
    **dict.fromkeys(("roberta", "xlm-roberta", "camembert"), ROBERTA),
}


def random_model(family: str, folder: Path, *, task: str = "", seed: int = 7, **settings: object) -> Any:
    """A model with a head for a task, such as ``MaskedLM``, or without one."""
    import transformers

    torch.manual_seed(seed)
    config = transformers.AutoConfig.for_model(family, attn_implementation="sdpa", **{**SIZES, **FAMILIES[family], **settings})
    model = getattr(transformers, f"AutoModel{'For' * bool(task)}{task}").from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # the library's initial weights are too small to show a mistake
            parameter.add_(torch.randn_like(parameter) * 0.05)
    model.save_pretrained(folder)
    return model


def special_ids(tokenizer: Tokenizer) -> dict[str, int | None]:
    """The special tokens of a tokenizer as settings of a ModernBERT."""
    names = {"pad_token_id": "pad", "cls_token_id": "cls", "bos_token_id": "cls", "sep_token_id": "sep", "eos_token_id": "sep"}
    return {key: tokenizer.special_id(name) for key, name in names.items()}
