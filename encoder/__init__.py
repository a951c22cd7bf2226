"""Text in, hidden states out: the native encoder. It knows nothing of retrieval."""

from encoder.checkpoint import load_encoder, save_encoder
from encoder.config import EncoderConfig
from encoder.errors import InputError
from encoder.frozen import freeze
from encoder.init import init_weights
from encoder.model import Encoder
from encoder.packing import PackedBatch, pack, pack_ids, pack_padded
from encoder.tokens import TokenizedTexts, Tokenizer

__all__ = [
    "Encoder",
    "EncoderConfig",
    "InputError",
    "PackedBatch",
    "TokenizedTexts",
    "Tokenizer",
    "freeze",
    "init_weights",
    "load_encoder",
    "pack",
    "pack_ids",
    "pack_padded",
    "save_encoder",
]
