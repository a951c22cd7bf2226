"""More absolute positions for a trained encoder: the rows of its table are interpolated, everything else stays.

With a factor k, the row of position p becomes that of k p, and the new rows lie evenly on the lines between old ones. Behind the last old
row, where equation 4 of the paper asks for a row that does not exist, the last step goes on. Texts of a given length then lie on the first
k-th of the table, so a short fine-tuning is advisable, the more the shorter the texts are: docs/decisions.md has measurements.

Shapes: P rows of the old table, D model width, k the factor.
Source: Jeong et al., A methodology for overcoming the problem of position embedding length limitation in pre-training models, HCLT
2023, section 3 (equations 2 to 6).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quiver.encoder.checkpoints import config_from_hf, config_to_hf
from quiver.encoder.checkpoints.checkpoint import FORMATS, base_folder, read_state, write_checkpoint
from quiver.encoder.config import EncoderConfig
from quiver.encoder.errors import InputError
from quiver.encoder.files import read_json, write_json
from quiver.encoder.model import Encoder, Uninitialized

TABLE = "embeddings.positions"


def interpolate_positions(table: Tensor, factor: int, *, offset: int = 0) -> Tensor:
    """A position table for texts that are ``factor`` k >= 1 times as long: (P, D) floating-point rows to (offset + k (P - offset), D).

    The leading ``offset`` rows stand for no position and are kept as they are (RoBERTa: 2). Rows at multiples of k are the old ones, bit
    for bit. A ValueError if the factor is below 1, or there are fewer than two positions.

    Example:
        >>> interpolate_positions(torch.tensor([[0.0], [2.0], [6.0]]), 2).flatten().tolist()
        [0.0, 1.0, 2.0, 4.0, 6.0, 8.0]
    """
    if factor < 1:
        raise ValueError(f"factor must be >= 1, got {factor}")
    rows = table[offset:]
    if len(rows) < 2:
        raise ValueError(f"a table of {len(table)} rows has fewer than two positions after an offset of {offset}")
    exact = rows.to(torch.promote_types(table.dtype, torch.float32))
    steps = exact.diff(dim=0)
    steps = torch.cat([steps, steps[-1:]])  # (P - offset, D)
    shares = torch.arange(factor, dtype=exact.dtype, device=exact.device) / factor
    longer = exact[:, None] + shares[:, None] * steps[:, None]  # (P - offset, k, D)
    longer[:, 0] = exact
    return torch.cat([table[:offset], longer.flatten(0, 1).to(table.dtype)])


REMEDIES = {
    "rope": "rotary positions; raise the base (rope_theta) or set a scaling instead",
    "alibi": "ALiBi slopes, which have no last position; raise max_positions instead",
}


def require_absolute(config: EncoderConfig) -> None:
    """Raise where there is no position table."""
    if config.positions != "absolute":
        raise InputError(f"this {config.family} encoder has no table of position embeddings to extend; it has {REMEDIES[config.positions]}")


def extended_config(config: EncoderConfig, factor: int) -> EncoderConfig:
    """The architecture with ``factor`` times as many positions."""
    if factor < 1:
        raise InputError(f"the factor must be >= 1, got {factor}")
    require_absolute(config)
    return replace(config, max_positions=config.max_positions * factor)


def extend_positions(encoder: Encoder, factor: int) -> Encoder:
    """A copy of an encoder with ``factor`` times as many positions, on the same device, in the same mode and dtype.

    An InputError as `extended_config`, or if the weights are packed for inference.
    """
    config = extended_config(encoder.config, factor)
    if encoder.prepacked:
        raise InputError("the encoder is prepacked for inference; load the checkpoint with load_encoder and extend that")
    state = dict(encoder.state_dict())
    key = f"{TABLE}.weight"
    state[key] = interpolate_positions(state[key], factor, offset=config.position_offset)
    with Uninitialized():
        longer = Encoder(config).to(device=encoder.device, dtype=state[key].dtype)
    longer.load_state_dict(state)
    return longer.train(encoder.training)


def extend_checkpoint(source: Path, out: Path, factor: int) -> EncoderConfig:
    """Write a checkpoint's weights and config.json with ``factor`` times as many positions; heads and other tensors stay unchanged.

    A LoRA adapter is added to the weights, and its files are deleted from ``out``, which is not ``source``. If ``out`` has a
    tokenizer_config.json, its ``model_max_length`` becomes the new limit. Returns the new architecture.
    """
    hf = read_json(base_folder(source) / "config.json")
    config = _config(hf, source)
    longer = extended_config(config, factor)
    state = read_state(source, FORMATS[config.family].tensors)
    key = table_key(state, config, where=str(source))
    state[key] = interpolate_positions(state[key], factor, offset=config.position_offset)
    old, new = config_to_hf(config), config_to_hf(longer)
    changed = {name: value for name, value in new.items() if value != old[name]}
    # Files of transformers before 4.31 also hold the position ids 0, 1, 2, ...; they have the old length, and loaders create them again.
    buffers = FORMATS[config.family].tensors.buffers
    # Tensors of a .bin file may share memory, as tied matrices do; safetensors requires separate ones.
    copies = {name: tensor.clone(memory_format=torch.contiguous_format) for name, tensor in state.items() if not buffers.search(name)}
    write_checkpoint(out, copies, hf | changed)
    tokenizer = out / "tokenizer_config.json"
    if tokenizer.is_file():
        write_json(tokenizer, read_json(tokenizer) | {"model_max_length": longer.max_positions})
    return longer


def read_positions(folder: Path) -> Tensor:
    """The position embeddings of a checkpoint, without the reserved first rows, (P, D) in float32."""
    config = _config(read_json(base_folder(folder) / "config.json"), folder)
    state = read_state(folder, FORMATS[config.family].tensors)
    return state[table_key(state, config, where=str(folder))][config.position_offset :].float()


def _config(hf: dict[str, Any], folder: Path) -> EncoderConfig:
    """The architecture of a checkpoint that has position embeddings."""
    try:
        # A checkpoint of Quiver's own family keeps the settings of its head under a separate key.
        config = config_from_hf({key: value for key, value in hf.items() if key != "head"})
        require_absolute(config)
    except InputError as error:
        raise InputError(f"{folder}: {error}") from error
    return config


def table_key(state: Mapping[str, Tensor], config: EncoderConfig, *, where: str) -> str:
    """The name of the position table in a checkpoint."""
    family = FORMATS[config.family].tensors
    theirs = (family.theirs(TABLE, "", gated=config.mlp == "gated") or ("",))[0]
    found = [key for key in state if family.current_name(key) == f"{theirs}.weight"]
    if len(found) != 1:
        raise InputError(f"{where}: the file has {len(found)} tensors {theirs}.weight, expected one")
    shape, wanted = tuple(state[found[0]].shape), (config.max_positions + config.position_offset, config.hidden_size)
    if shape != wanted:
        raise InputError(f"{where}: {found[0]} has shape {shape}, config.json requires {wanted}")
    return found[0]
