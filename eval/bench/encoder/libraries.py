"""Who encodes token ids: Quiver, variants of it, and transformers with the same weights.

Each gets the same documents in the same batches. What a caller would prepare beforehand (tensors on the host, padded or packed)
is prepared outside of the clock; what a library derives from it in its forward is inside.

Shapes: B documents, N their tokens, S the longest of them, D model width.
"""

from __future__ import annotations

import copy
import importlib
import importlib.util
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from quiver.encoder import Encoder, EncoderConfig, init_weights, load_encoder, optimize_for_inference, pack_ids
from quiver.encoder.checkpoints import config_to_hf
from quiver.encoder.checkpoints.checkpoint import to_hf_state
from quiver.encoder.checkpoints.folder import local_folder
from quiver.encoder.checkpoints.key_maps import KEY_MAPS
from quiver.encoder.config import Precision
from quiver.encoder.errors import InputError
from quiver.encoder.gpu.compile import compile_encoder
from quiver.encoder.presets import preset
from quiver.eval.bench.encoder.results import Settings
from quiver.retrieval.models.model_folder import read_model_folder
from quiver.retrieval.versions import installed_version

Documents = Sequence[Sequence[int]]

DTYPES: Mapping[str, torch.dtype] = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
"""Name -> dtype of the weights."""

# The first transformers whose from_config takes dtype, which keeps RoPE's frequencies in float32 where .to(bfloat16) would not.
TRANSFORMERS = (4, 56)


@dataclass(frozen=True)
class Batch:
    """A batch as one library wants it.

    Attributes:
        forward: The work that is timed: host tensors to the library's own output.
        real: That output without padding, (N, D) in the documents' order.
    """

    forward: Callable[[], Tensor]
    real: Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Loaded:
    """A library with a model in memory.

    Attributes:
        module: The model, for train, eval and gradients.
        embedding: The weights of its token embedding, (V, D).
        prepare: Documents to a batch.
    """

    module: nn.Module
    embedding: Tensor
    prepare: Callable[[Documents], Batch]


@dataclass(frozen=True)
class Library:
    """A way to run an encoder.

    Attributes:
        load: Make it from our encoder, with the same weights on the same device in the same dtype.
        obstacle: Why it cannot run this architecture under these settings, None if it can.
    """

    load: Callable[[Encoder], Loaded]
    unsupported_reason: Callable[[EncoderConfig, Settings], str | None]


def open_encoder(model: str, settings: Settings) -> Encoder:
    """Load a checkpoint, or make a preset's encoder with random weights.

    Args:
        model: A preset's name, or a folder or hub id.
        settings: Give dtype, device and seed.

    Raises:
        InputError: It is neither, or cannot be read.
    """
    dtype = DTYPES[settings.dtype]
    # A hub id has a slash, a preset has none; a folder that is there comes before a preset of the same name.
    if "/" in model or Path(model).is_dir():
        folder = read_model_folder(local_folder(model)).encoder_folder
        return load_encoder(folder, dtype=dtype, device=settings.device)
    encoder = init_weights(Encoder(preset(model)), seed=settings.seed)
    return encoder.to(device=settings.device, dtype=dtype).eval()


def _load_quiver(encoder: Encoder) -> Loaded:
    def prepare(documents: Documents) -> Batch:
        packed = pack_ids(documents)
        # A fresh memo each time: masks and groups that a forward derives from the layout belong to its time.
        return Batch(forward=lambda: encoder(replace(packed, memo={})), real=lambda states: states)

    return Loaded(encoder, encoder.embeddings.tokens.weight, prepare)


def _load_transformers(encoder: Encoder, attention: str) -> Loaded:
    library = importlib.import_module("transformers")
    settings = config_to_hf(encoder.config)
    config = library.AutoConfig.for_model(settings.pop("model_type"), **settings)
    weights = encoder.embeddings.tokens.weight
    model = library.AutoModel.from_config(config, attn_implementation=attention, dtype=weights.dtype)
    missing, unexpected = model.load_state_dict(to_hf_state(encoder), strict=False)
    if unexpected or [name for name in missing if not name.startswith("pooler.")]:
        raise RuntimeError(f"transformers' {type(model).__name__} wants other weights: missing {missing}, unexpected {unexpected}")
    model = model.to(weights.device).eval()
    # Not the encoder in the closure: it would stay in memory beside the model that was made from it.
    padding = encoder.config.pad_token_id
    return Loaded(model, model.get_input_embeddings().weight, lambda documents: _padded(model, documents, padding))


def _padded(model: Any, documents: Documents, padding: int) -> Batch:
    rows = [torch.tensor(document) for document in documents]
    ids = nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=padding)  # (B, S)
    mask = nn.utils.rnn.pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
    device = model.device
    place = mask.flatten().nonzero()[:, 0].to(device)

    def forward() -> Tensor:
        states: Tensor = model(input_ids=ids.to(device), attention_mask=mask.to(device)).last_hidden_state
        return states  # (B, S, D)

    return Batch(forward, real=lambda states: states.flatten(0, 1)[place])


def _transformers_obstacle(config: EncoderConfig, settings: Settings) -> str | None:
    del settings
    version = installed_version("transformers")
    if version is None:
        return "not installed (pip install 'quiver-retrieval[train]')"
    if tuple(int(part) for part in version.split(".")[:2]) < TRANSFORMERS:
        return f"transformers {version} is too old, {'.'.join(map(str, TRANSFORMERS))} is the first that will do"
    if config.family not in KEY_MAPS:
        return f"a {config.family} encoder has no checkpoint layout of transformers'"
    if config.positions == "alibi":  # its config.json says bert, and means code of its own
        return f"transformers has no ALiBi, which a {config.family} encoder needs"
    try:
        kind = config_to_hf(config)["model_type"]
    except InputError as error:
        return str(error)
    if kind not in importlib.import_module("transformers").CONFIG_MAPPING:
        return f"transformers {version} has no {kind}"
    return None


def _flash_obstacle(config: EncoderConfig, settings: Settings) -> str | None:
    if settings.device != "cuda":
        return "needs CUDA"
    if settings.dtype == "float32":
        return "needs bfloat16 or float16"
    if importlib.util.find_spec("flash_attn") is None:
        return "flash-attn is not installed (pip install 'quiver-retrieval[flash]')"
    return _transformers_obstacle(config, settings)


def _load_frozen(encoder: Encoder, precision: Precision) -> Loaded:
    # A copy: every other library takes its weights from the encoder itself.
    return _load_quiver(optimize_for_inference(copy.deepcopy(encoder), precision=precision))


def _frozen_obstacle(config: EncoderConfig, settings: Settings) -> str | None:
    del config
    if settings.train:
        return "a frozen encoder has no gradients"
    return None if settings.device == "cpu" else "needs a CPU"


def _load_compiled(encoder: Encoder) -> Loaded:
    return _load_quiver(compile_encoder(copy.deepcopy(encoder)))


VARIANTS: Mapping[str, Library] = {
    "quiver": Library(_load_quiver, lambda config, settings: None),
    "quiver-frozen": Library(lambda encoder: _load_frozen(encoder, "float"), _frozen_obstacle),
    "quiver-int8": Library(lambda encoder: _load_frozen(encoder, "int8"), _frozen_obstacle),
    "quiver-compiled": Library(_load_compiled, lambda config, settings: None),
}
"""Our own encoder and ways to run it; the first is what all others are compared with."""

PEERS: Mapping[str, Library] = {
    "transformers-sdpa": Library(lambda encoder: _load_transformers(encoder, "sdpa"), _transformers_obstacle),
    "transformers-flash": Library(lambda encoder: _load_transformers(encoder, "flash_attention_2"), _flash_obstacle),
}
"""Other libraries that run the same weights on padded batches."""

LIBRARIES: Mapping[str, Library] = {**VARIANTS, **PEERS}
"""All of them."""
