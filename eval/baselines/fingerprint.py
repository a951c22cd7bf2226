"""The fingerprint of a peer's model: what changes its vectors changes the fingerprint, so that cached vectors never mix.

The library's name is part of it: one folder has different vectors, in the last digits, in every library that runs it.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

import torch
from torch import nn

# What a configuration says of its file and of the process; the type of the weights is hashed with the weights.
_WITHOUT_EFFECT = {"_name_or_path", "architectures", "dtype", "torch_dtype", "transformers_version"}


def peer_fingerprint(model: nn.Sequential, library: str, settings: object) -> str:
    """sha256 over the weights, the modules and their settings, and the tokenizer of a model.

    Args:
        model: A model of sentence-transformers, or of a library that builds on it.
        library: Which library runs it.
        settings: What else changes vectors, such as prompts and lengths; JSON.
    """
    digest = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    described = {
        "library": library,
        "modules": [(name, *_described(module)) for name, module in model.named_modules() if name],
        "tokenizer": _tokenizer_rules(model.tokenizer),
        "settings": settings,
    }
    digest.update(json.dumps(described, sort_keys=True, default=str).encode())
    return digest.hexdigest()


def _described(module: Any) -> tuple[str, object, object]:
    """A module's class, its settings as the library saves them, and its transformers configuration."""
    settings = module.get_config_dict() if hasattr(module, "get_config_dict") else None
    config: Any = getattr(module, "config", None)
    values = config.to_dict() if hasattr(config, "to_dict") else {}
    return type(module).__name__, settings, {key: value for key, value in values.items() if key not in _WITHOUT_EFFECT}


def _tokenizer_rules(tokenizer: Any) -> object:
    """A tokenizer's rules without its truncation and padding, which every call to it sets anew."""
    if not hasattr(tokenizer, "backend_tokenizer"):  # one in Python has no file that says it all
        return type(tokenizer).__name__, tokenizer.get_vocab(), tokenizer.special_tokens_map
    rules: dict[str, object] = json.loads(tokenizer.backend_tokenizer.to_str())
    return {key: value for key, value in rules.items() if key not in ("truncation", "padding")}, tokenizer.truncation_side
