"""LoRA: train a low-rank update of every matrix of the blocks, with the encoder's own weights fixed.

A matrix W becomes W + alpha / r * B A. B starts at zero, so adding LoRA does not change the encoder's outputs. The state dict of such an
encoder looks merged: at any step, what is saved, hashed or exported is a plain model with plain names. `lora_state` returns the low-rank
matrices themselves.

Shapes: N packed tokens, D and O widths of a matrix's input and output, r the rank.
Source: LoRA, arXiv:2106.09685, section 4.1; initial values of A as in the authors' code (microsoft/LoRA, loralib/layers.py); the adapter's
files as PEFT reads them (huggingface/peft, LoraConfig).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from quiver.encoder.adapter import TransformersEncoder
from quiver.encoder.checkpoints.checkpoint import ADAPTER_CONFIG, ADAPTER_WEIGHTS, their_keys
from quiver.encoder.cpu.linear import Linear, PlainMatrix, multiply
from quiver.encoder.errors import InputError
from quiver.encoder.files import replacing, save_tensors, write_json
from quiver.encoder.model import Encoder


class LoRALinear(nn.Module):
    """`quiver.encoder.cpu.linear.Linear` with a low-rank update B A; its own weights are shared, and fixed."""

    def __init__(self, linear: Linear, *, rank: int, alpha: float, dropout: float, generator: torch.Generator) -> None:
        super().__init__()
        self.alpha, self.dropout, self.parts = alpha, dropout, linear.parts
        self.weight, self.bias = linear.weight, linear.bias
        dtype, device = linear.weight.dtype, linear.weight.device
        # In float32 on the CPU first: equal seeds give equal values on every device.
        first = nn.init.kaiming_uniform_(torch.empty(rank, linear.in_features), a=math.sqrt(5), generator=generator)
        self.lora_a = nn.Parameter(first.to(device, dtype))
        self.lora_b = nn.Parameter(torch.zeros(linear.out_features, rank, dtype=dtype, device=device))

    @property
    def rank(self) -> int:
        """The rank, r."""
        return len(self.lora_a)

    @property
    def scale(self) -> float:
        """Scale of the update B A: alpha / r."""
        return self.alpha / self.rank

    def merged(self) -> Tensor:
        """Return W + alpha / r * B A, (O, D), summed in float32 or wider and rounded once; without gradients."""
        wide = torch.promote_types(self.weight.dtype, torch.float32)
        with torch.no_grad(), torch.autocast(self.weight.device.type, enabled=False):
            total = torch.addmm(self.weight.to(wide), self.lora_b.to(wide), self.lora_a.to(wide), alpha=self.scale)
        return total.to(self.weight.dtype)

    def rows(self) -> list[PlainMatrix]:
        """Return the parts of the merged matrix; see `quiver.encoder.cpu.linear.Linear.rows`."""
        return PlainMatrix(self.merged(), None if self.bias is None else self.bias.detach()).split(self.parts)

    def forward(self, x: Tensor) -> Tensor:
        """(N, D) to (N, O)."""
        if not (self.training or torch.is_grad_enabled()):
            return multiply(x, self.merged(), self.bias)  # bit-identical to the encoder after `merge_lora`
        low = F.linear(F.dropout(x, self.dropout, self.training), self.lora_a.to(x.dtype))  # (N, r)
        return torch.addmm(multiply(x, self.weight, self.bias), low, self.lora_b.to(x.dtype).t(), alpha=self.scale)

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        del keep_vars
        destination[f"{prefix}weight"] = self.merged()
        if self.bias is not None:
            destination[f"{prefix}bias"] = self.bias.detach()

    def _load_from_state_dict(self, *arguments: object) -> None:
        # Loading merged weights into W would add the update twice.
        raise ValueError(
            "an encoder with LoRA cannot load a state dict; use load_lora_state for its LoRA matrices, or load the weights before add_lora"
        )


def add_lora(encoder: Encoder | TransformersEncoder, *, rank: int, alpha: float, dropout: float, seed: int) -> None:
    """Add a low-rank update to every matrix of the blocks, in place, and fix all other weights of the encoder.

    The rank r is 1..D; the update is scaled by alpha / r, alpha > 0; in training its input has dropout, 0 <= dropout < 1. Hidden states
    stay bit-identical until B is trained. Equal seeds give equal initial values of A.

    Raises:
        InputError: The encoder runs in transformers, or a setting is out of range.
        ValueError: The encoder is prepacked for inference, or has low-rank updates already.
    """
    if not isinstance(encoder, Encoder):
        raise InputError(f"{encoder.config.model_type} runs in transformers; LoRA needs a native encoder")
    if encoder.prepacked:
        raise ValueError("a prepacked encoder has no gradients; to train, load the checkpoint with load_encoder")
    if lora_matrices(encoder):
        raise ValueError("this encoder already has LoRA matrices; call merge_lora first")
    width = encoder.config.hidden_size
    if not 1 <= rank <= width:
        raise InputError(f"LoRA's rank must be 1..{width}, the encoder's width, got {rank}")
    if not (alpha > 0 and 0 <= dropout < 1):
        raise InputError(f"LoRA's alpha must be > 0 and its dropout >= 0 and < 1, got {alpha} and {dropout}")
    generator = torch.Generator().manual_seed(seed)
    encoder.requires_grad_(False)
    for parent, name, linear in _modules_of_kind(encoder, Linear):
        update = LoRALinear(linear, rank=rank, alpha=alpha, dropout=dropout, generator=generator)
        setattr(parent, name, update.train(linear.training))
    encoder.forget_graphs()


def merge_lora(encoder: Encoder) -> None:
    """Add the updates to their matrices, in place: the encoder is plain again and all its weights can be trained."""
    _require_lora(encoder)
    for parent, name, update in _modules_of_kind(encoder, LoRALinear):
        rows, columns = update.weight.shape
        with torch.random.fork_rng(devices=()):  # its initial values are discarded and must not advance anybody's random state
            plain = Linear(columns, rows, bias=update.bias is not None, dtype=update.weight.dtype, parts=update.parts)
        with torch.no_grad():
            update.weight.copy_(update.merged())
        plain.weight, plain.bias = update.weight, update.bias
        setattr(parent, name, plain.train(update.training))
    encoder.forget_graphs()
    encoder.requires_grad_(True)


def lora_matrices(encoder: Encoder) -> dict[str, LoRALinear]:
    """Return the matrices with an update, by name; empty for a plain encoder."""
    return {name: module for name, module in encoder.named_modules() if isinstance(module, LoRALinear)}


def lora_state(encoder: Encoder) -> dict[str, Tensor]:
    """Return copies of A and B of all matrices on the CPU, for checkpoints: ``layers.0.mlp.up.lora_a`` and so on."""
    return {name: weight.detach().cpu().clone() for name, weight in _low_rank_weights(_require_lora(encoder)).items()}


def load_lora_state(encoder: Encoder, state: Mapping[str, Tensor]) -> None:
    """Load the result of `lora_state`, in place, into an encoder as `add_lora` left it; what does not fit is an InputError."""
    own = _low_rank_weights(_require_lora(encoder))
    if strange := sorted(own.keys() ^ state.keys()):
        raise InputError(
            f"these LoRA matrices belong to another model: the tensor {strange[0]} is {'missing' if strange[0] in own else 'unknown'}"
        )
    for name, weight in own.items():
        if weight.shape != state[name].shape:
            raise InputError(f"{name} has shape {tuple(state[name].shape)}, expected {tuple(weight.shape)}")
    with torch.no_grad():
        for name, weight in own.items():
            weight.copy_(state[name])


def save_adapter(encoder: Encoder, folder: str | Path, *, base_model: str, revision: str | None = None) -> None:
    """Write the updates as an adapter that PEFT loads onto the Hugging Face model the encoder was started from.

    ``base_model`` is the folder or hub id of that model, ``revision`` its branch, tag or commit. The adapter's folder is created if
    missing, and each file is replaced atomically.

    Raises:
        InputError: The family has no Hugging Face model.
        ValueError: The encoder has no LoRA matrices.
    """
    updates = _require_lora(encoder)
    if encoder.config.family == "quiver":
        raise InputError("an adapter needs a Hugging Face architecture, and family quiver has none; save the merged encoder")
    theirs = their_keys(encoder)
    state: dict[str, Tensor] = {}
    for name, update in updates.items():
        place = theirs[f"{name}.weight"]
        whole = update.lora_b.detach().cpu()
        if place.swapped:
            whole = torch.cat(whole.chunk(2)[::-1])
        # Where the family has several matrices for one of ours, all of them share A.
        for key, part in zip(place.keys, whole.chunk(len(place.keys)), strict=True):
            module = f"base_model.model.{key.removesuffix('.weight')}"
            state[f"{module}.lora_A.weight"] = update.lora_a.detach().cpu().clone()
            state[f"{module}.lora_B.weight"] = part.clone(memory_format=torch.contiguous_format)
    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    with replacing(target / ADAPTER_WEIGHTS) as temporary:
        save_tensors(state, temporary)
    update = next(iter(updates.values()))
    config = {
        "peft_type": "LORA",
        "task_type": "FEATURE_EXTRACTION",
        "base_model_name_or_path": base_model,
        "revision": revision,
        "r": update.rank,
        "lora_alpha": update.alpha,
        "lora_dropout": update.dropout,
        # Full names: a last part such as "dense" would match a pooler too.
        "target_modules": [key.removesuffix(".weight") for name in updates for key in theirs[f"{name}.weight"].keys],
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "inference_mode": True,
    }
    write_json(target / ADAPTER_CONFIG, config)


def _modules_of_kind(encoder: Encoder, kind: type[Any]) -> list[tuple[nn.Module, str, Any]]:
    """Return every module of a kind with its parent and its name there, in the order of the encoder."""
    return [(parent, name, child) for parent in encoder.modules() for name, child in parent.named_children() if isinstance(child, kind)]


def _require_lora(encoder: Encoder) -> dict[str, LoRALinear]:
    updates = lora_matrices(encoder)
    if not updates:
        raise ValueError("this encoder has no LoRA matrices; call add_lora first")
    return updates


def _low_rank_weights(updates: Mapping[str, LoRALinear]) -> dict[str, Tensor]:
    return {f"{name}.{which}": getattr(update, which) for name, update in updates.items() for which in ("lora_a", "lora_b")}
