"""How each family names an encoder's tensors in its published checkpoints.

Source: the state dicts of ``ModernBertForMaskedLM``, ``BertForMaskedLM`` and ``RobertaForMaskedLM`` (transformers 5.3); of
FlexBERT under Composer (AnswerDotAI/ModernBERT); of ``BertForMaskedLM`` (mosaicml/examples, benchmarks/bert); of
``NomicBertForPreTraining`` (nomic-ai/contrastors); of ``NewForMaskedLM`` (Alibaba-NLP/new-impl).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from quiver.encoder.config import Family


@dataclass(frozen=True)
class KeyMap:
    """One family's names.

    Attributes:
        prefix: What stands before every key where a head is saved too.
        names: Our module names (``{}`` is the layer) to theirs; several of theirs are stacked in that order. Empty where
            they are ours.
        heads: Pattern of keys that belong to heads and poolers, not to the encoder.
        buffers: Pattern of keys that hold no weights (old files store position ids).
        other_prefixes: What else may stand there.
        plain_names: The names that differ where the MLP has no gate.
        swapped: Modules whose two halves of rows are the other way round in their files.
        renames: Patterns of older or other names, and what they are replaced by.
    """

    prefix: str
    names: Mapping[str, tuple[str, ...]]
    heads: re.Pattern[str]
    buffers: re.Pattern[str] = re.compile(r"(?!)")  # none
    other_prefixes: tuple[str, ...] = ()
    plain_names: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    swapped: frozenset[str] = frozenset()
    renames: tuple[tuple[re.Pattern[str], str], ...] = ()

    def current_name(self, key: str) -> str:
        """A file's key without its prefix, as the family's files have it today."""
        found = (prefix for prefix in (self.prefix, *self.other_prefixes) if key.startswith(prefix))
        key = key.removeprefix(max(found, key=len, default=""))
        for pattern, replacement in self.renames:
            key = pattern.sub(replacement, key)
        return key

    def theirs(self, module: str, layer: str, *, gated: bool) -> tuple[str, ...] | None:
        """Their names of one of our modules, None if they have no such module.

        Args:
            module: Our name, ``{}`` for the layer.
            layer: Number of the layer; empty outside the layers.
            gated: Whether the MLP has a gate.
        """
        if not self.names:
            return (module.format(layer),)
        names = self.names.get(module) if gated else self.plain_names.get(module, self.names.get(module))
        return None if names is None else tuple(name.format(layer) for name in names)


BERT_EMBEDDINGS = {
    "embeddings.tokens": ("embeddings.word_embeddings",),
    "embeddings.positions": ("embeddings.position_embeddings",),
    "embeddings.token_types": ("embeddings.token_type_embeddings",),
    "embeddings.norm": ("embeddings.LayerNorm",),
}
BERT_ATTENTION_OUTPUT = {
    "layers.{}.attention.out": ("encoder.layer.{}.attention.output.dense",),
    "layers.{}.attention_norm": ("encoder.layer.{}.attention.output.LayerNorm",),
}
BERT_NAMES = {
    **BERT_EMBEDDINGS,
    "layers.{}.attention.qkv": tuple(f"encoder.layer.{{}}.attention.self.{name}" for name in ("query", "key", "value")),
    **BERT_ATTENTION_OUTPUT,
    "layers.{}.mlp.up": ("encoder.layer.{}.intermediate.dense",),
    "layers.{}.mlp.down": ("encoder.layer.{}.output.dense",),
    "layers.{}.mlp_norm": ("encoder.layer.{}.output.LayerNorm",),
}
# The names of BERT's TensorFlow release; transformers 5 writes them again when it saves such a model.
TENSORFLOW_NAMES = ((re.compile(r"LayerNorm\.gamma$"), "LayerNorm.weight"), (re.compile(r"LayerNorm\.beta$"), "LayerNorm.bias"))
BERT_HEADS = re.compile(r"(cls|pooler|classifier|qa_outputs)\.")
BERT_BUFFERS = re.compile(r"embeddings\.(position_ids|token_type_ids)$")

KEY_MAPS: dict[Family, KeyMap] = {
    "modernbert": KeyMap(
        prefix="model.",
        names={
            "embeddings.tokens": ("embeddings.tok_embeddings",),
            "embeddings.norm": ("embeddings.norm",),
            "layers.{}.attention_norm": ("layers.{}.attn_norm",),
            "layers.{}.attention.qkv": ("layers.{}.attn.Wqkv",),
            "layers.{}.attention.out": ("layers.{}.attn.Wo",),
            "layers.{}.mlp_norm": ("layers.{}.mlp_norm",),
            "layers.{}.mlp.up": ("layers.{}.mlp.Wi",),
            "layers.{}.mlp.down": ("layers.{}.mlp.Wo",),
            "final_norm": ("final_norm",),
        },
        heads=re.compile(r"(head|decoder|classifier)\."),
        buffers=re.compile(r"rotary_emb\."),
        other_prefixes=("bert.", "model.bert."),  # as Composer saved it in pretraining
        renames=((re.compile(r"^encoder\.layers\."), "layers."),),
    ),
    "bert": KeyMap(prefix="bert.", names=BERT_NAMES, heads=BERT_HEADS, buffers=BERT_BUFFERS, renames=TENSORFLOW_NAMES),
    "roberta": KeyMap(
        prefix="roberta.",
        names=BERT_NAMES,
        heads=re.compile(r"(lm_head|pooler|classifier|qa_outputs)\."),
        buffers=BERT_BUFFERS,
        renames=TENSORFLOW_NAMES,
    ),
    "mosaicbert": KeyMap(
        prefix="bert.",
        names={
            **BERT_EMBEDDINGS,
            "layers.{}.attention.qkv": ("encoder.layer.{}.attention.self.Wqkv",),
            **BERT_ATTENTION_OUTPUT,
            "layers.{}.mlp.up": ("encoder.layer.{}.mlp.gated_layers",),
            "layers.{}.mlp.down": ("encoder.layer.{}.mlp.wo",),
            "layers.{}.mlp_norm": ("encoder.layer.{}.mlp.layernorm",),
        },
        heads=BERT_HEADS,
        buffers=BERT_BUFFERS,
        renames=TENSORFLOW_NAMES,
    ),
    "nomicbert": KeyMap(
        prefix="bert.",
        names={
            "embeddings.tokens": ("embeddings.word_embeddings",),
            "embeddings.token_types": ("embeddings.token_type_embeddings",),
            "embeddings.norm": ("emb_ln",),
            "layers.{}.attention.qkv": ("encoder.layers.{}.attn.Wqkv",),
            "layers.{}.attention.out": ("encoder.layers.{}.attn.out_proj",),
            "layers.{}.attention_norm": ("encoder.layers.{}.norm1",),
            "layers.{}.mlp.up": ("encoder.layers.{}.mlp.fc12", "encoder.layers.{}.mlp.fc11"),  # the activated one is fc12
            "layers.{}.mlp.down": ("encoder.layers.{}.mlp.fc2",),
            "layers.{}.mlp_norm": ("encoder.layers.{}.norm2",),
        },
        heads=re.compile(r"(cls|pooler|classifier)\."),
        plain_names={"layers.{}.mlp.up": ("encoder.layers.{}.mlp.fc1",)},
    ),
    "gte": KeyMap(
        prefix="new.",
        names={
            **BERT_EMBEDDINGS,
            "layers.{}.attention.qkv": ("encoder.layer.{}.attention.qkv_proj",),
            "layers.{}.attention.out": ("encoder.layer.{}.attention.o_proj",),
            "layers.{}.attention_norm": ("encoder.layer.{}.attn_ln",),
            "layers.{}.mlp.up": ("encoder.layer.{}.mlp.up_gate_proj",),
            "layers.{}.mlp.down": ("encoder.layer.{}.mlp.down_proj",),
            "layers.{}.mlp_norm": ("encoder.layer.{}.mlp_ln",),
        },
        heads=re.compile(r"(lm_head|pooler|classifier|qa_outputs)\."),
        buffers=BERT_BUFFERS,
        swapped=frozenset({"layers.{}.mlp.up"}),  # up first, then the gate, and it is the gate that is activated
    ),
    "quiver": KeyMap(prefix="encoder.", names={}, heads=re.compile(r"(head|decoder|classifier|qa_outputs)\.")),
}
