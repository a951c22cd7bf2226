"""LoRA adapters in the files of PEFT, beside the weights that they change or alone, and the checkpoint that they make with them.

An adapter is added to its matrices when it is read: W + scale * B A, in float32 or wider, so that what is loaded, hashed, exported or
trained further is a plain model. What PEFT computes in another way (DoRA and other variants) is refused.

Shapes: D and O widths of a matrix's input and output, r the rank.
Source: LoRA, arXiv:2106.09685; rank-stabilized LoRA, arXiv:2312.03732; ``LoraConfig``, ``get_pattern_key``,
``check_target_module_exists`` and ``get_peft_model_state_dict`` of PEFT 0.21; ``maybe_load_adapters`` of transformers 5.3.
"""

from __future__ import annotations

import logging
import math
import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quiver.encoder.checkpoints.folder import ADAPTER_CONFIG, adapter_file, named_base, read_tensors, read_weights, weight_files
from quiver.encoder.checkpoints.format import TensorNames
from quiver.encoder.errors import InputError
from quiver.encoder.files import read_json

logger = logging.getLogger(__name__)

# Settings that do not change the result, or that `_Adapter` reads. Every other setting, known or not, must be switched off.
_READ = frozenset(
    {
        *("base_model_name_or_path", "revision", "peft_type", "peft_version", "task_type", "auto_mapping", "inference_mode"),
        "runtime_config",
        *("r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "lora_dropout", "lora_bias", "bias", "init_lora_weights"),
        *("target_modules", "exclude_modules", "modules_to_save", "layers_to_transform", "layers_pattern", "ensure_weight_tying"),
        "fan_in_fan_out",  # PEFT transposes only the layers of GPT-2; those of these families are nn.Linear
        *("megatron_core", "qalora_group_size", "loftq_config", "eva_config"),  # of no effect without another setting
    }
)
# Ways to start A and B that leave the base as it is; others (PiSSA, OLoRA, CorDA, LoftQ) also change the base, and PEFT repeats that.
_STARTS = (None, True, False, "gaussian", "orthogonal", "eva")
_REMEDY = "merge it into its base with PEFT (merge_and_unload)"
_PREFIX = "base_model.model."
# What an adapter stores of one matrix, behind the name of the module.
_PARTS = {
    ".lora_A.weight": "a",
    ".lora_B.weight": "b",
    ".lora_B.bias": "bias",
    ".lora_embedding_A": "embedding_a",
    ".lora_embedding_B": "embedding_b",
}


def add_adapter(folder: Path, base: Path, state: dict[str, Tensor], family: TensorNames) -> dict[str, Tensor]:
    """Add the LoRA adapter of a folder to the tensors of its base, which may lie in the same folder."""
    adapter = _Adapter.read(folder)
    if base == folder:
        _check_base(folder, adapter.settings, state, family)
    merged = _merge_adapter(state, adapter, family)
    logger.info("%s: added the LoRA adapter of %d matrices to the weights of %s", folder / ADAPTER_CONFIG, len(adapter.updates), base)
    return merged


def _check_base(folder: Path, settings: Mapping[str, Any], state: Mapping[str, Tensor], family: TensorNames) -> None:
    """Refuse weights beside an adapter that are not those of its base, such as weights to which it has been added already."""
    base = named_base(folder, settings)
    if base is None or base.resolve() == folder.resolve() or not any(file.is_file() for file in weight_files(base)):
        return
    ours, theirs = ({family.current_name(key): tensor for key, tensor in each.items()} for each in (state, read_weights(base)))
    changed = sorted(key for key in ours.keys() & theirs.keys() if not _is_same_weight(ours[key], theirs[key]))
    if changed:
        raise InputError(
            f"{folder}: the weights beside the LoRA adapter are not those of its base {base} ({changed[0]} differs), so it may have been "
            f"added to them already; delete {ADAPTER_CONFIG} to use them as they are, or the weights to use the base"
        )


def _is_same_weight(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors are equal, or one is the other in lower precision."""
    return torch.equal(one, other.to(one.dtype)) or torch.equal(one.to(other.dtype), other)


@dataclass(frozen=True)
class _Adapter:
    """An adapter's files."""

    path: Path
    settings: Mapping[str, Any]
    updates: Mapping[str, Mapping[str, Tensor]]  # name of a module in the base to the tensors of its update, by the values of `_PARTS`
    replaced: Mapping[str, Tensor]  # name of a tensor of the base to the tensor in its place (trained biases, modules_to_save)

    @classmethod
    def read(cls, folder: Path) -> _Adapter:
        path = folder / ADAPTER_CONFIG
        settings = read_json(path)
        if settings.get("peft_type") != "LORA":
            raise InputError(f"{path}: peft_type must be LORA, got {settings.get('peft_type')!r}; {_REMEDY}")
        for key, value in settings.items():
            if key not in _READ and value not in (None, False, "", [], {}):
                raise InputError(f"{path}: {key} is not supported, got {value!r}; {_REMEDY}")
        if settings.get("init_lora_weights") not in _STARTS:
            start = settings["init_lora_weights"]
            raise InputError(f"{path}: init_lora_weights {start!r} is not supported, because it changes the base too; {_REMEDY}")
        file = adapter_file(folder)
        if not file.is_file():
            raise InputError(f"{folder}: {file.name} is missing, the weights of the adapter that {ADAPTER_CONFIG} describes")
        updates: dict[str, dict[str, Tensor]] = defaultdict(dict)
        replaced: dict[str, Tensor] = {}
        for key, tensor in read_tensors(file).items():
            name = key.removeprefix(_PREFIX)
            if part := next((part for part in _PARTS if name.endswith(part)), None):
                updates[name.removesuffix(part)][_PARTS[part]] = tensor
            elif ".lora_" in name:
                raise InputError(f"{file}: the tensor {key} is not supported; {_REMEDY}")
            else:
                replaced[name.replace(".base_layer.", ".").replace(".modules_to_save.", ".")] = tensor
        if not updates and not replaced:
            raise InputError(f"{file}: it has no tensors")
        return cls(path, settings, updates, replaced)

    def scale(self, module: str, rank: int) -> float:
        """Scale of B A: alpha / r, or alpha / sqrt(r)."""
        wanted = self._by_pattern("rank_pattern", module, "r")
        if rank != wanted:
            raise InputError(f"{self.path}: the rank of {module} must be {rank}, as in the adapter's weights, got {wanted}")
        alpha = self._by_pattern("alpha_pattern", module, "lora_alpha")
        return alpha / (math.sqrt(rank) if self.settings.get("use_rslora") else rank)

    def check_target(self, module: str) -> None:
        """Refuse an update that PEFT would not read, because target_modules does not name its module."""

        def names(modules: Any) -> bool:  # a list by the end of a name, a text as a regular expression
            if not isinstance(modules, (str, list)):
                raise InputError(f"{self.path}: target_modules and exclude_modules must be a list or a regular expression, got {modules!r}")
            matches = [modules] if isinstance(modules, str) else [rf"(?:.*\.)?{re.escape(str(each))}" for each in modules]
            return any(self._match(each, module) for each in matches)

        targets, excluded = self.settings.get("target_modules"), self.settings.get("exclude_modules")
        if not (targets in (None, "all-linear") or names(targets)) or (excluded and names(excluded)):
            raise InputError(f"{self.path}: the adapter's weights have an update of {module}, which target_modules does not name")

    def _by_pattern(self, patterns: str, module: str, default: str) -> float:
        """Value of the first pattern that the end of a module's name matches, otherwise of the setting for all modules."""
        values = self.settings.get(patterns) or {}
        if not isinstance(values, Mapping):
            raise InputError(f"{self.path}: {patterns} must be an object from pattern to number, got {values!r}")
        found = next((value for pattern, value in values.items() if self._match(rf"(.*\.)?({pattern})", module)), None)
        value = self.settings.get(default, 8) if found is None else found  # PEFT's defaults of r and lora_alpha are 8
        if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
            raise InputError(f"{self.path}: {default if found is None else patterns} must be a number > 0, got {value!r}")
        return value

    def _match(self, pattern: str, module: str) -> bool:
        try:
            return re.fullmatch(pattern, module) is not None
        except re.error as error:
            raise InputError(f"{self.path}: {pattern!r} is not a regular expression ({error})") from error


def _merge_adapter(state: dict[str, Tensor], adapter: _Adapter, family: TensorNames) -> dict[str, Tensor]:
    """Add an adapter to the tensors of its base."""
    keys = {family.current_name(key): key for key in state}

    def found(name: str) -> str | None:
        """The file's key of a tensor; None for one of a head that the file lacks."""
        current = family.current_name(name)
        if current not in keys and not family.heads.match(current) and not family.buffers.search(current):
            raise InputError(f"{adapter.path}: the adapter changes {name}, which its base does not have")
        return keys.get(current)

    result = dict(state)
    for name, tensor in adapter.replaced.items():
        if (key := found(name)) is not None:
            _check_shape(adapter, name, tensor, state[key])
            result[key] = tensor
    for module, parts in adapter.updates.items():
        adapter.check_target(module)
        key = found(f"{module}.weight")
        if key is None:
            continue
        update, scale = _multiply_parts(adapter, module, parts)
        _check_shape(adapter, f"{module}.weight", update, result[key])
        result[key] = _add_scaled(result[key], update, scale)
        if (bias := parts.get("bias")) is not None:
            bias_key = found(f"{module}.bias")
            if bias_key is None:
                raise InputError(f"{adapter.path}: the adapter changes {module}.bias, which its base does not have")
            result[bias_key] = _add_scaled(result[bias_key], bias, scale)
    return result


def _multiply_parts(adapter: _Adapter, module: str, parts: Mapping[str, Tensor]) -> tuple[Tensor, float]:
    """B A of a matrix, (O, D), or of an embedding, (vocabulary, D); and its scale."""
    first, second = ("embedding_a", "embedding_b") if "embedding_a" in parts else ("a", "b")
    if parts.keys() - {"bias"} != {first, second}:
        got = ", ".join(sorted(name.strip(".") for name, part in _PARTS.items() if part in parts))
        raise InputError(f"{adapter.path}: the adapter's weights must have A and B of {module}, got {got}")
    a, b = _widen(parts[first]), _widen(parts[second])
    if a.ndim != 2 or b.ndim != 2 or a.shape[0] != b.shape[1]:
        raise InputError(f"{adapter.path}: A and B of {module} must be (r, D) and (O, r), got {tuple(a.shape)} and {tuple(b.shape)}")
    product = b @ a
    return (product.T if first == "embedding_a" else product), adapter.scale(module, len(a))


def _check_shape(adapter: _Adapter, name: str, given: Tensor, wanted: Tensor) -> None:
    if given.shape != wanted.shape:
        raise InputError(f"{adapter.path}: the adapter has {tuple(given.shape)} for {name}, its base {tuple(wanted.shape)}")


def _add_scaled(tensor: Tensor, update: Tensor, scale: float) -> Tensor:
    return torch.add(_widen(tensor), _widen(update), alpha=scale)


def _widen(tensor: Tensor) -> Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))
