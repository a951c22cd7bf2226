"""Text in, hidden states out: the native encoder. It knows nothing of retrieval."""

from encoder.adapter import TransformersEncoder, load_adapter
from encoder.checkpoint import load_encoder, save_encoder
from encoder.compiling import compile_encoder
from encoder.config import EncoderConfig, RopeScaling
from encoder.cuda_graphs import GraphedEncoder
from encoder.errors import InputError
from encoder.frozen import freeze
from encoder.head_checkpoint import load_classifier, load_masked_lm, load_span_qa, save_classifier, save_masked_lm, save_span_qa
from encoder.head_transform import TransformConfig
from encoder.heads import MaskedLM, MaskedLMLoss, SequenceClassifier, SpanLogits, SpanQA, init_head
from encoder.init import init_weights
from encoder.lora import add_lora, load_lora_state, lora_state, merge_lora, save_adapter
from encoder.model import Encoder
from encoder.packing import PackedBatch, pack, pack_ids, pack_padded
from encoder.position_extension import extend_positions
from encoder.presets import PRESETS, preset
from encoder.spans import Span, best_spans
from encoder.tiling import enlarge, enlarge_masked_lm
from encoder.tokens import TokenizedTexts, Tokenizer

__all__ = [
    "PRESETS",
    "Encoder",
    "EncoderConfig",
    "GraphedEncoder",
    "InputError",
    "MaskedLM",
    "MaskedLMLoss",
    "PackedBatch",
    "RopeScaling",
    "SequenceClassifier",
    "Span",
    "SpanLogits",
    "SpanQA",
    "TokenizedTexts",
    "Tokenizer",
    "TransformConfig",
    "TransformersEncoder",
    "add_lora",
    "best_spans",
    "compile_encoder",
    "enlarge",
    "enlarge_masked_lm",
    "extend_positions",
    "freeze",
    "init_head",
    "init_weights",
    "load_adapter",
    "load_classifier",
    "load_encoder",
    "load_lora_state",
    "load_masked_lm",
    "load_span_qa",
    "lora_state",
    "merge_lora",
    "pack",
    "pack_ids",
    "pack_padded",
    "preset",
    "save_adapter",
    "save_classifier",
    "save_encoder",
    "save_masked_lm",
    "save_span_qa",
]
