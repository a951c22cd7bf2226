"""Load and save encoders: config.json and weights in the layouts of Hugging Face, both ways.

Loading is strict: every tensor of the encoder must be present with its shape, and every tensor of the file must belong to the encoder or to
a head; the latter are named in the log. Saving writes what the family's own code writes and loses nothing: the written config.json is read
again, and if the architectures differ the error names the field.

A new family is a module with its `CheckpointFormat`, and its lines in `FORMATS` and `MODEL_TYPES` here.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quiver.encoder.checkpoints.bert import BERT, GTE, MOSAICBERT, NOMICBERT, ROBERTA, is_mosaicbert
from quiver.encoder.checkpoints.folder import ADAPTER_CONFIG, ADAPTER_PICKLED, ADAPTER_WEIGHTS, base_folder, local_folder, read_weights
from quiver.encoder.checkpoints.format import CheckpointFormat, ConfigReader, ConfigStyle, Task, TensorNames
from quiver.encoder.checkpoints.modernbert import MODERNBERT
from quiver.encoder.checkpoints.peft import add_adapter
from quiver.encoder.checkpoints.quiver import QUIVER
from quiver.encoder.config import EncoderConfig, Family
from quiver.encoder.errors import InputError
from quiver.encoder.files import read_json, replacing, save_tensors, write_json
from quiver.encoder.model import Encoder, Uninitialized

logger = logging.getLogger(__name__)


FORMATS: dict[Family, CheckpointFormat] = {each.family: each for each in (MODERNBERT, BERT, ROBERTA, MOSAICBERT, NOMICBERT, GTE, QUIVER)}
MODEL_TYPES: dict[str, CheckpointFormat] = {
    "modernbert": MODERNBERT,
    "bert": BERT,
    "roberta": ROBERTA,
    "xlm-roberta": ROBERTA,
    "camembert": ROBERTA,
    "nomic_bert": NOMICBERT,
    "new": GTE,
    "gte": GTE,
    "quiver": QUIVER,
}
"""``model_type`` of config.json -> format; a MosaicBERT's file says bert."""


def families_with_head(task: Task) -> list[Family]:
    """Return the families whose checkpoints can hold a head of this task."""
    return [family for family, checkpoint_format in FORMATS.items() if task in checkpoint_format.heads]


def config_from_hf(hf: Mapping[str, Any]) -> EncoderConfig:
    """Convert a parsed config.json to an `EncoderConfig`; an InputError names a key that is not supported."""
    family = hf.get("model_type")
    if not isinstance(family, str) or family not in MODEL_TYPES:
        raise InputError(f"config.json: model_type must be one of {', '.join(sorted(MODEL_TYPES))}, got {family!r}")
    keys, found = ConfigReader(hf), MODEL_TYPES[family]
    return (MOSAICBERT if found is BERT and is_mosaicbert(keys) else found).to_config(keys)


def config_to_hf(config: EncoderConfig, *, style: ConfigStyle = "v4") -> dict[str, Any]:
    """Convert an `EncoderConfig` to its family's config.json; an InputError names the field that its format cannot express."""
    written = FORMATS[config.family].to_hf(config, style)
    remedy = "use family quiver"
    try:
        again = config_from_hf(written)
    except InputError as error:
        raise InputError(f"a {config.family} config.json cannot hold this architecture ({error}); {remedy}") from error
    wanted, kept = _with_effect(config), _with_effect(again)
    if "cls_token_id" not in written:  # these families leave such ids to the tokenizer
        kept |= {key: wanted[key] for key in ("cls_token_id", "sep_token_id")}
    if lost := [name for name in wanted if name not in kept or wanted[name] != kept[name]]:
        raise InputError(f"a {config.family} config.json cannot hold {', '.join(f'{name} {wanted[name]!r}' for name in lost)}; {remedy}")
    return written


def _with_effect(config: EncoderConfig) -> dict[str, Any]:
    """Return the fields of an architecture that have an effect, given its other fields."""
    values = asdict(config)
    for kind in {"global", "local"} - (set(config.layer_types) if config.positions == "rope" else set()):
        del values[f"{kind}_theta"], values[f"{kind}_scaling"]
    if config.positions != "rope":
        del values["rotary_fraction"]
    if "local" not in config.layer_types:
        del values["window"]
    return values


@dataclass(frozen=True)
class TheirTensor:
    """Tensors of a family's file that correspond to one of ours."""

    keys: tuple[str, ...]  # the family's keys without prefix; several are stacked in that order
    swapped: bool  # whether the two halves of its rows are swapped there


def their_keys(encoder: Encoder) -> dict[str, TheirTensor]:
    """Map our tensor names to the family's, without prefix."""
    config = encoder.config
    family = FORMATS[config.family].tensors
    keys = {}
    for ours in encoder.state_dict():
        module, _, parameter = ours.rpartition(".")
        layer = re.search(r"\d+", module)
        name = re.sub(r"\d+", "{}", module)
        theirs = family.theirs(name, layer[0] if layer else "", gated=config.mlp == "gated")
        if theirs is None:
            raise InputError(f"a {config.family} checkpoint cannot store {ours}; choose family quiver")
        keys[ours] = TheirTensor(tuple(f"{key}.{parameter}" for key in theirs), name in family.swapped)
    return keys


def load_encoder(source: str | Path, *, revision: str | None = None, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Encoder:
    """Load an encoder from a folder or the Hugging Face Hub, in evaluation mode. A LoRA adapter in the folder is added to the weights.

    Args:
        source: A folder with config.json and weights (`quiver.encoder.checkpoints.folder`), or with a LoRA adapter that names its base
            (`quiver.encoder.checkpoints.peft`), or a model id on the Hub.
        revision: Branch, tag or commit on the Hub.
        dtype: Dtype of the weights in memory.
        device: Device of the weights.

    Raises:
        InputError: A file is missing or corrupt, the architecture is not supported, or the tensors do not match it.
    """
    folder = local_folder(source, revision=revision)
    base = base_folder(folder)
    try:
        config = config_from_hf(read_json(base / "config.json"))
    except InputError as error:
        if str(error).startswith(str(base)):
            raise
        raise InputError(f"{base}: {error}") from error
    with Uninitialized():
        encoder = Encoder(config)
    # Assigned: the stacked tensors are copies already, and copying them once more takes a third of a second for 90 MB.
    state = read_state(folder, FORMATS[config.family].tensors)
    encoder.load_state_dict(from_hf_state(encoder, state, where=str(folder)), strict=True, assign=True)
    return encoder.to(device=device, dtype=dtype).eval()


def read_state(folder: Path, family: TensorNames) -> dict[str, Tensor]:
    """Read all tensors of a checkpoint to the CPU, with its LoRA adapter added if it has one."""
    base = base_folder(folder)
    state = read_weights(base)
    return add_adapter(folder, base, state, family) if (folder / ADAPTER_CONFIG).is_file() else state


def from_hf_state(encoder: Encoder, state: Mapping[str, Tensor], *, where: str) -> dict[str, Tensor]:
    """Rename and stack the tensors of a Hugging Face state dict."""
    family = FORMATS[encoder.config.family].tensors
    stripped = {family.current_name(key): tensor for key, tensor in state.items()}
    if len(stripped) < len(state):
        raise InputError(f"{where}: two tensors have the same name after their prefixes are removed")
    wanted = their_keys(encoder)
    known = {key for theirs in wanted.values() for key in theirs.keys}
    heads = sorted(key for key in stripped if family.heads.match(key))
    unknown = sorted(key for key in stripped.keys() - known - set(heads) if not family.buffers.search(key))
    missing = sorted(known - stripped.keys())
    if unknown or missing:
        complaint = "; ".join(filter(None, (_few("missing", missing), _few("unknown", unknown))))
        raise InputError(f"{where}: the tensors do not fit config.json ({encoder.config.family}): {complaint}")
    if heads:
        logger.info("%s: ignored %d tensors of heads: %s", where, len(heads), ", ".join(heads))
    shapes = {name: tensor.shape for name, tensor in encoder.state_dict().items()}
    return {name: _ours(theirs, stripped, shapes[name], where) for name, theirs in wanted.items()}


def _ours(theirs: TheirTensor, state: Mapping[str, Tensor], shape: torch.Size, where: str) -> Tensor:
    """Stack one of our tensors from theirs."""
    parts = [state[key] for key in theirs.keys]
    required = (shape[0] // len(parts), *shape[1:])
    for key, part in zip(theirs.keys, parts, strict=True):
        if tuple(part.shape) != required:
            raise InputError(f"{where}: {key} has shape {tuple(part.shape)}, config.json requires {required}")
        if not part.is_floating_point():
            raise InputError(f"{where}: {key} holds {part.dtype}, not floating-point numbers; quantized checkpoints are not supported")
    stacked = torch.cat(parts)
    return _halves_swapped(stacked) if theirs.swapped else stacked


def _halves_swapped(tensor: Tensor) -> Tensor:
    return torch.cat(tensor.chunk(2)[::-1])


def _few(label: str, keys: list[str]) -> str:
    more = f" and {len(keys) - 3} more" if len(keys) > 3 else ""
    return f"{label} {', '.join(keys[:3])}{more}" if keys else ""


def to_hf_state(encoder: Encoder, *, prefix: bool = False) -> dict[str, Tensor]:
    """Return an encoder's tensors under the family's names."""
    if encoder.prepacked == "int8":
        raise InputError("an encoder quantized to int8 cannot be saved; save it before optimize_for_inference")
    start = FORMATS[encoder.config.family].tensors.prefix if prefix else ""
    wanted = their_keys(encoder)
    state = {}
    for name, tensor in encoder.state_dict().items():
        theirs = wanted[name]
        whole = tensor.detach().cpu()
        parts = (_halves_swapped(whole) if theirs.swapped else whole).chunk(len(theirs.keys))
        for key, part in zip(theirs.keys, parts, strict=True):
            state[start + key] = part.clone(memory_format=torch.contiguous_format)
    return state


def save_encoder(encoder: Encoder, folder: str | Path, *, style: ConfigStyle = "v4", prefix: bool = False) -> None:
    """Write config.json and model.safetensors as the family's own code writes them.

    Args:
        encoder: The encoder.
        folder: Created if necessary; each file is replaced as a whole.
        style: Generation of ModernBERT's config keys; transformers 4 and 5 both read v4.
        prefix: Put the family's prefix before every key.

    Raises:
        InputError: The family's format cannot express the architecture; the message names the field, and nothing is written.
    """
    config, state = config_to_hf(encoder.config, style=style), to_hf_state(encoder, prefix=prefix)
    write_checkpoint(Path(folder), state, config | {"torch_dtype": str(encoder.embeddings.tokens.weight.dtype).removeprefix("torch.")})


def write_checkpoint(folder: Path, state: Mapping[str, Tensor], hf: Mapping[str, Any]) -> None:
    """Write tensors and config.json, each file whole or not at all."""
    folder.mkdir(parents=True, exist_ok=True)
    with replacing(folder / "model.safetensors") as temporary:
        save_tensors(state, temporary)
    # Shards and the adapter of an earlier checkpoint are no part of this one.
    for name in ("model.safetensors.index.json", ADAPTER_CONFIG, ADAPTER_WEIGHTS, ADAPTER_PICKLED):
        (folder / name).unlink(missing_ok=True)
    for shard in folder.glob("model-*-of-*.safetensors"):
        shard.unlink()
    write_json(folder / "config.json", hf)
