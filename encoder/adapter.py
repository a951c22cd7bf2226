"""Any other Hugging Face encoder behind the interface of `quiver.encoder.model.Encoder`: a baseline, not a fast path.

DeBERTaV3, ELECTRA, MPNet and others run in transformers, padded. The output is that of a native encoder: one hidden state per token,
independent of the rest of the batch.

Shapes: B sequences, N packed tokens, S the longest sequence, D width of a hidden state.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from quiver.encoder.checkpoints.checkpoint import local_folder
from quiver.encoder.errors import InputError, first_line
from quiver.encoder.packing import PackedBatch

# Keys of a transformers config that do not describe the architecture.
ABOUT = frozenset({"_name_or_path", "architectures", "dtype", "torch_dtype", "transformers_version"})


@dataclass(frozen=True)
class AdapterConfig:
    """What Quiver needs from an encoder's configuration."""

    model_type: str
    vocab_size: int
    hidden_size: int
    max_positions: int
    settings: str  # the whole transformers configuration as JSON with sorted keys: equal strings mean equal architectures


class TransformersEncoder(nn.Module):
    """A transformers encoder that takes packed batches, made of a ``PreTrainedModel`` without a head, which is not a decoder."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        settings: Any = model.config
        kind = settings.model_type
        if getattr(settings, "is_decoder", False) or getattr(settings, "is_encoder_decoder", False):
            raise InputError(f"{kind}: is_decoder and is_encoder_decoder must be false: only encoders are supported")
        positions = getattr(settings, "max_position_embeddings", None)
        if not isinstance(positions, int) or positions < 1:
            raise InputError(f"{kind}: max_position_embeddings must be a positive integer, got {positions!r}")
        described = {key: value for key, value in settings.to_dict().items() if key not in ABOUT}
        # RoBERTa and its relatives leave rows unused at the start of the position embedding.
        table = getattr(getattr(model, "embeddings", None), "position_embeddings", None)
        padding = getattr(table, "padding_idx", None)
        self.model = model
        self.pad_token_id = getattr(settings, "pad_token_id", None) or 0
        self.config = AdapterConfig(
            model_type=kind,
            vocab_size=settings.vocab_size,
            hidden_size=settings.hidden_size,
            max_positions=positions - (0 if padding is None else padding + 1),
            settings=json.dumps(described, sort_keys=True, default=str),
        )

    @property
    def device(self) -> torch.device:
        """Device of the weights."""
        return next(self.parameters()).device

    @property
    def num_parameters(self) -> int:
        """Number of weights."""
        return sum(weight.numel() for weight in self.parameters())

    def forward(self, batch: PackedBatch) -> Tensor:
        """Encode a batch of N tokens without key lengths: the last layer's hidden states, (N, D), in the order of ``batch.ids``."""
        if batch.max_seqlen > self.config.max_positions:
            raise InputError(
                f"a sequence has {batch.max_seqlen} tokens, more than the encoder's {self.config.max_positions} positions; truncate it"
            )
        if batch.key_lengths is not None:
            raise InputError(
                f"{self.config.model_type}: unattended query expansion requires a native encoder, this one runs in transformers"
            )
        batch = batch.to(self.device)
        lengths = batch.cu_seqlens.diff()
        mask = torch.arange(batch.max_seqlen, device=self.device) < lengths[:, None]  # (B, S)
        ids = batch.ids.new_full(mask.shape, self.pad_token_id).masked_scatter(mask, batch.ids)
        states: Tensor = self.model(input_ids=ids, attention_mask=mask.long()).last_hidden_state
        return states[mask]


def load_adapter(
    source: str | Path, *, revision: str | None = None, dtype: torch.dtype = torch.float32, device: str = "cpu"
) -> TransformersEncoder:
    """Load any encoder that transformers supports, in evaluation mode, with weights of a dtype on a device.

    ``source`` is a folder with config.json and safetensors, or a model id on the Hub, where ``revision`` is a branch, tag or commit.

    Raises:
        InputError: transformers is not installed or does not support the architecture, or a file or a tensor is missing.
    """
    try:
        from transformers import AutoModel  # imported late: the core runs without it
    except ImportError as error:
        raise InputError("this encoder runs in transformers, which is not installed: pip install 'quiver-retrieval[train]'") from error
    folder = local_folder(source, revision=revision)
    try:
        # Neither remote code nor pickles are executed.
        model, info = AutoModel.from_pretrained(folder, trust_remote_code=False, use_safetensors=True, output_loading_info=True)
    except (OSError, ValueError, KeyError) as error:
        raise InputError(f"{folder}: transformers cannot load it: {first_line(error)}") from error
    # A pooler's weights change no hidden state; any other missing tensor would be random.
    if missing := sorted(key for key in info["missing_keys"] if not key.startswith("pooler.")):
        raise InputError(f"{folder}: the checkpoint lacks the tensors {', '.join(missing[:3])}{' ...' if len(missing) > 3 else ''}")
    return TransformersEncoder(model).to(device=device, dtype=dtype).eval()
