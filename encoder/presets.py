"""Architectures of published models by name, without weights.

Figures are those of the published config.json files, or of the named paper or repository where none was available. Dropouts of a preset are
those of its config.json, for fine-tuning.

Source: ModernBERT, arXiv:2412.13663, Table 4; Ettin, arXiv:2507.11412, and the configs of JHU-CLSP/ettin-encoder-vs-decoder; granite-
embedding-r2, arXiv:2508.21085; mmBERT, arXiv:2509.06888, and the configs of JHU-CLSP/mmBERT; BERT, arXiv:1810.04805; RoBERTa,
arXiv:1907.11692; MiniLM, arXiv:2002.10957; MosaicBERT, arXiv:2312.17482, and mosaicml/examples; NomicBERT, arXiv:2402.01613, and nomic-
ai/contrastors; GTE, arXiv:2407.19669, and the model cards of gte-en-mlm-base and -large.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from types import MappingProxyType

from quiver.encoder.config import EncoderConfig, global_every
from quiver.encoder.errors import InputError

# The tokenizer of ModernBERT, Ettin, gte-modernbert and granite-embedding-english-r2: 50,280 pieces and special tokens, with the embedding
# padded to a multiple of 64.
OLMO_VOCABULARY = {"vocab_size": 50_368, "pad_token_id": 50_283, "cls_token_id": 50_281, "sep_token_id": 50_282}
# Gemma 2's tokenizer as mmBERT uses it: <bos> starts a text, <eos> ends it.
GEMMA_VOCABULARY = {"vocab_size": 256_000, "pad_token_id": 0, "cls_token_id": 2, "sep_token_id": 1}
BERT_VOCABULARY = 30_522
PADDED_BERT_VOCABULARY = 30_528


def _modernbert(
    layers: int,
    width: int,
    intermediate: int,
    heads: int,
    *,
    global_theta: float = 160_000.0,
    local_theta: float = 10_000.0,
    max_positions: int = 8192,
    vocabulary: Mapping[str, int] = MappingProxyType(OLMO_VOCABULARY),
) -> EncoderConfig:
    return EncoderConfig.modernbert(
        hidden_size=width,
        num_heads=heads,
        intermediate_size=intermediate,
        layer_types=global_every(layers, 3),
        max_positions=max_positions,
        global_theta=global_theta,
        local_theta=local_theta,
        **vocabulary,
    )


_ettin = partial(_modernbert, local_theta=160_000.0, max_positions=7999)
_granite = partial(_modernbert, global_theta=80_000.0)
_mmbert = partial(_modernbert, local_theta=160_000.0, vocabulary=MappingProxyType(GEMMA_VOCABULARY))


def _bert(layers: int, width: int, heads: int) -> EncoderConfig:
    return EncoderConfig.bert(
        vocab_size=BERT_VOCABULARY, hidden_size=width, num_heads=heads, intermediate_size=4 * width, layers=layers, dropout=0.1
    )


def _roberta(layers: int, width: int, heads: int) -> EncoderConfig:
    bert = _bert(layers, width, heads)
    return replace(bert, family="roberta", vocab_size=50_265, norm_eps=1e-5, type_vocab_size=1, position_offset=2, pad_token_id=1)


def _mosaicbert(layers: int, width: int, heads: int) -> EncoderConfig:
    return replace(
        _bert(layers, width, heads),
        family="mosaicbert",
        vocab_size=PADDED_BERT_VOCABULARY,
        mlp="gated",
        positions="alibi",
        mlp_input_bias=False,
        attention_dropout=0.0,
        mlp_inner_dropout=0.1,
        mlp_output_dropout=0.0,
    )


def _nomicbert() -> EncoderConfig:
    return replace(
        _bert(12, 768, 12),
        family="nomicbert",
        vocab_size=PADDED_BERT_VOCABULARY,
        max_positions=2048,
        mlp="gated",
        positions="rope",
        activation="silu",
        global_theta=1000.0,
        qkv_bias=False,
        attention_output_bias=False,
        mlp_input_bias=False,
        mlp_output_bias=False,
        attention_dropout=0.0,
    )


def _gte(layers: int, width: int, heads: int, *, theta: float, type_vocab_size: int) -> EncoderConfig:
    return replace(
        _bert(layers, width, heads),
        family="gte",
        vocab_size=PADDED_BERT_VOCABULARY,
        max_positions=8192,
        mlp="gated",
        positions="rope",
        global_theta=theta,
        mlp_input_bias=False,
        type_vocab_size=type_vocab_size,
        attention_dropout=0.0,
        mlp_inner_dropout=0.1,
    )


PRESETS: Mapping[str, Callable[[], EncoderConfig]] = MappingProxyType(
    {
        # layers, width, MLP width, heads
        "modernbert-base": partial(_modernbert, 22, 768, 1152, 12),
        "modernbert-large": partial(_modernbert, 28, 1024, 2624, 16),
        "ettin-17m": partial(_ettin, 7, 256, 384, 4),
        "ettin-32m": partial(_ettin, 10, 384, 576, 6),
        "ettin-68m": partial(_ettin, 19, 512, 768, 8),
        "ettin-150m": partial(_ettin, 22, 768, 1152, 12),
        "ettin-400m": partial(_ettin, 28, 1024, 2624, 16),
        "ettin-1b": partial(_ettin, 28, 1792, 3840, 28),
        "gte-modernbert-base": partial(_modernbert, 22, 768, 1152, 12),
        "granite-embedding-english-r2": partial(_granite, 22, 768, 1152, 12),
        "granite-embedding-small-english-r2": partial(_granite, 12, 384, 1536, 12),
        "mmbert-small": partial(_mmbert, 22, 384, 1152, 6),
        "mmbert-base": partial(_mmbert, 22, 768, 1152, 12),
        # layers, width, heads
        "bert-base": partial(_bert, 12, 768, 12),
        "bert-large": partial(_bert, 24, 1024, 16),
        "minilm-l6": partial(_bert, 6, 384, 12),
        "roberta-base": partial(_roberta, 12, 768, 12),
        "roberta-large": partial(_roberta, 24, 1024, 16),
        "mosaicbert-base": partial(_mosaicbert, 12, 768, 12),
        "mosaicbert-large": partial(_mosaicbert, 24, 1024, 16),
        "nomicbert": _nomicbert,
        # The numbers of token types are those of gte-base-en-v1.5 and gte-large-en-v1.5, which continue these models.
        "gte-en-mlm-base": partial(_gte, 12, 768, 12, theta=500_000.0, type_vocab_size=0),
        "gte-en-mlm-large": partial(_gte, 24, 1024, 16, theta=160_000.0, type_vocab_size=2),
    }
)


def preset(name: str) -> EncoderConfig:
    """Return the architecture of a published model, by a key of `PRESETS`; for another name an InputError lists them.

    Example:
        >>> from quiver.encoder import preset
        >>> preset("modernbert-base").num_layers
        22
    """
    if name not in PRESETS:
        raise InputError(f"unknown preset {name!r}; choose one of {', '.join(PRESETS)}")
    return PRESETS[name]()
