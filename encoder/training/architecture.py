"""The architecture of an encoder as keys of recipes, the same for pretraining and for retrievers that start from random weights.

Every switch of `quiver.encoder.config.EncoderConfig` is a key of that name, explained there; the defaults are ModernBERT's.

Source: ModernBERT, arXiv:2412.13663, sections 2.1 and appendix D; FlexBERT's configuration (AnswerDotAI/ModernBERT at 8c57a0f).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any, Literal

from quiver.encoder.checkpoints.checkpoint import config_to_hf
from quiver.encoder.config import (
    Activation,
    ConfigError,
    EncoderConfig,
    Family,
    InitMethod,
    LayerType,
    NormPosition,
    RopeKind,
    RopeScaling,
    global_every,
)
from quiver.encoder.errors import InputError
from quiver.encoder.schema import Count, Field, Positive, TextSchema

RECIPE_NAMES = {"num_heads": "heads", "initializer_range": "init_std"}
"""Fields of `EncoderConfig` that have another name in recipes."""


class ScalingSection(TextSchema):
    """`quiver.encoder.config.RopeScaling`."""

    kind: RopeKind
    factor: float
    original_positions: int
    beta_fast: float = RopeScaling.beta_fast
    beta_slow: float = RopeScaling.beta_slow
    attention_factor: float | None = None


class ArchitectureSection(TextSchema):
    """Architecture of an encoder: sizes, and every switch of `quiver.encoder.config.EncoderConfig`; the defaults are ModernBERT's."""

    family: Literal["auto", "modernbert", "bert", "roberta", "mosaicbert", "nomicbert", "gte", "quiver"] = "auto"
    """Family whose layout checkpoints have. ``auto``: modernbert if that can express the architecture, otherwise quiver."""
    layers: Positive
    """Number of blocks L; ModernBERT: 22 (base), 28 (large)."""
    hidden_size: int = Field(ge=2)
    """Width D of the hidden states; ModernBERT: 768, 1,024."""
    heads: Positive
    """Number of attention heads H; ModernBERT: 12, 16, each of width 64."""
    intermediate_size: Positive
    """Width of the MLP between its two projections; ModernBERT: 1,152, 2,624."""
    global_every: Positive = 3
    """Period of global layers, beginning with the first; 1 makes all layers global."""
    layer_types: tuple[LayerType, ...] = ()
    """``global`` or ``local`` for each layer; empty for those of ``global_every``."""
    window: int = Field(default=128, ge=2, multiple_of=2)
    local_theta: float = Field(default=10_000.0, gt=0)
    global_scaling: ScalingSection | None = None
    local_scaling: ScalingSection | None = None
    positions: Literal["rope", "absolute", "alibi"] = "rope"
    rotary_fraction: float = Field(default=1.0, gt=0, le=1)
    position_offset: Count = 0
    type_vocab_size: Count = 0
    norm_position: NormPosition = "pre"
    norm: Literal["layernorm", "rmsnorm"] = "layernorm"
    norm_eps: float = Field(default=1e-5, gt=0)
    norm_bias: bool = False
    embedding_norm: bool = True
    first_attention_norm: bool | None = None
    """Whether a norm precedes the first attention (post-norm: follows it); null: if there is no embedding norm, or norms follow."""
    final_norm: bool | None = None
    """Whether a norm follows the last block; null: unless that ends with a norm."""
    mlp: Literal["gated", "plain"] = "gated"
    activation: Activation = "gelu"
    qkv_bias: bool = False
    attention_output_bias: bool = False
    mlp_input_bias: bool = False
    mlp_output_bias: bool = False
    initial_layers: Count = 0
    initial_norm_position: NormPosition | None = None
    initial_mlp: Literal["gated", "plain"] | None = None
    initial_rotary: bool | None = None
    embedding_dropout: float = Field(default=0.0, ge=0, lt=1)
    attention_dropout: float = Field(default=0.0, ge=0, lt=1)
    attention_output_dropout: float = Field(default=0.0, ge=0, lt=1)
    mlp_inner_dropout: float = Field(default=0.0, ge=0, lt=1)
    mlp_output_dropout: float = Field(default=0.0, ge=0, lt=1)
    init_method: InitMethod = "full_megatron"
    """How random weights are drawn, see `quiver.encoder.config.INIT_METHODS`."""
    init_std: float = Field(default=0.02, gt=0)
    """Standard deviation of random weights, before ``init_method`` scales it; ModernBERT: 0.02 at widths of 768 and 1,024. Scale it with
    ``hidden_size ** -0.5`` to keep the size of the products in narrower models."""

    def config(
        self, *, vocab_size: int, max_positions: int, global_theta: float, token_ids: Mapping[str, int] | None = None
    ) -> EncoderConfig:
        """Make the configuration; ``token_ids`` are its fields for special tokens, such as ``pad_token_id``.

        A ConfigError holds all contradictions between settings.
        """
        given = type(self).model_fields
        values: dict[str, Any] = {each.name: getattr(self, each.name) for each in fields(EncoderConfig) if each.name in given}
        for name in ("global_scaling", "local_scaling"):
            values[name] = None if values[name] is None else RopeScaling(**values[name].model_dump())
        first = last = self.norm_position
        if self.initial_layers and self.initial_norm_position is not None:
            first, last = self.initial_norm_position, last if self.initial_layers < self.layers else self.initial_norm_position
        if self.first_attention_norm is None:
            values["first_attention_norm"] = first == "post" or not self.embedding_norm
        if self.final_norm is None:
            values["final_norm"] = last != "post"
        wrong = []
        if len(self.layer_types) not in (0, self.layers):
            wrong.append(("layer_types", f"must name {self.layers} layers, got {len(self.layer_types)}"))
        if wrong or not self.layer_types:
            values["layer_types"] = global_every(self.layers, self.global_every)
        values |= token_ids or {}
        values |= {"family": "quiver", "num_heads": self.heads, "initializer_range": self.init_std, "global_theta": global_theta}
        values |= {"vocab_size": vocab_size, "max_positions": max_positions}
        try:
            config = EncoderConfig(**values)
        except ConfigError as error:
            wrong += error.problems
        if wrong:
            raise ConfigError(wrong)
        return self._with_family(config)

    def _with_family(self, config: EncoderConfig) -> EncoderConfig:
        """A copy with the family, which has to be able to hold the architecture; models are saved without dropout."""
        family: Family = "modernbert" if self.family == "auto" else self.family
        try:
            config_to_hf(replace(config, family=family).without_dropout())
        except InputError as error:
            if self.family == "auto":
                return config
            raise ConfigError([("family", str(error))]) from error
        return replace(config, family=family)

    def problems(self, path: str) -> list[str]:
        """Contradictions between settings, each with its dotted path below ``path``."""
        try:
            self.config(vocab_size=1024, max_positions=512, global_theta=10_000.0)
        except ConfigError as error:
            return [f"{path}.{RECIPE_NAMES.get(field, field)}: {text}" for field, text in error.problems]
        return []
