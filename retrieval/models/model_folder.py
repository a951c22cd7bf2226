"""Model folders of sentence-transformers, PyLate, Stanford's ColBERT and plain Hugging Face, read into one record.

The layouts stand in `quiver.retrieval.models.export`, one module each; here it is found out which of them a folder has.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from quiver.encoder import Encoder, InputError, Tokenizer, load_encoder, optimize_for_inference
from quiver.encoder.checkpoints.folder import local_folder
from quiver.encoder.config import Precision
from quiver.encoder.files import read_json
from quiver.retrieval.models.export.dense import read_dense
from quiver.retrieval.models.export.multi_vector import read_multi_vector
from quiver.retrieval.models.export.pylate import read_pylate
from quiver.retrieval.models.export.stanford import is_stanford, load_stanford_encoder, read_stanford
from quiver.retrieval.models.export.white_space import read_tokenizer
from quiver.retrieval.models.model_settings import ColBERTSettings, Kind, ModelFolder

__all__ = [
    "INFERENCE_DTYPE",
    "ColBERTSettings",
    "Kind",
    "ModelFolder",
    "Parts",
    "default_device",
    "load_for_inference",
    "load_parts",
    "projection_stack",
    "read_model_folder",
    "warn_if_bare",
]

logger = logging.getLogger(__name__)

# By ``model_type``, which PyLate and sentence-transformers 4 and older do not always write.
READERS = {"SentenceTransformer": read_dense, "ColBERT": read_pylate, "MultiVectorEncoder": read_multi_vector}


def read_model_folder(folder: Path) -> ModelFolder:
    """Read the settings of a sentence-transformers, PyLate, Stanford ColBERT or plain Hugging Face folder.

    Raises:
        InputError: A module, a pooling or a similarity is not one of ours, or a file is missing or malformed.
    """
    if not any((folder / name).is_file() for name in ("modules.json", "config.json")):
        raise InputError(f"{folder}: not a model: it has neither modules.json nor config.json")
    path = folder / "config_sentence_transformers.json"
    config = read_json(path) if path.is_file() else {}
    if not (folder / "modules.json").is_file() and is_stanford(folder):
        return read_stanford(folder)
    kind = config.get("model_type") or ("ColBERT" if "query_prefix" in config else "SentenceTransformer")
    if kind not in READERS:
        raise InputError(f"{path}: model_type must be one of {', '.join(READERS)}, got {kind!r}; Quiver runs no other models")
    return READERS[kind](folder, config, path)


@dataclass(frozen=True)
class Parts:
    """A model folder in memory.

    Attributes:
        settings: What stands beside the weights.
        encoder: The weights.
        tokenizer: The vocabulary.
        bare: There is nothing but an encoder and its vocabulary: pooling and similarity are assumed.
    """

    settings: ModelFolder
    encoder: Encoder
    tokenizer: Tokenizer
    bare: bool = False


def load_parts(source: str | Path, *, revision: str | None = None, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Parts:
    """Load a model folder from disk or from the hub.

    Args:
        source: Folder or hub id.
        revision: Branch, tag or commit on the hub.
        dtype: Of the encoder's weights in memory.
        device: Where they go.

    Raises:
        InputError: It is no model, or one that Quiver does not run; one line says why.
    """
    folder = local_folder(source, revision=revision)
    settings = read_model_folder(folder)
    load = load_stanford_encoder if is_stanford(settings.encoder_folder) else load_encoder
    return Parts(
        settings,
        load(settings.encoder_folder, dtype=dtype, device=device),
        read_tokenizer(settings.encoder_folder),
        bare=not (folder / "modules.json").is_file() and settings.kind == "dense",
    )


def warn_if_bare(parts: Parts, source: str | Path) -> None:
    """Say what is assumed of a bare encoder. For whoever takes its settings as they are; a recipe of training has its own."""
    if parts.bare:
        logger.warning("%s: a bare encoder; using mean pooling and cosine similarity, as sentence-transformers does", source)


INFERENCE_DTYPE = torch.float32
"""The dtype of weights in memory, unless a caller names another."""


def default_device() -> str:
    """Where models go unless a caller names a device: ``cuda`` where there is one, else ``cpu``."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def load_for_inference(
    source: str | Path,
    *,
    revision: str | None = None,
    dtype: torch.dtype = INFERENCE_DTYPE,
    device: str | None = None,
    precision: Precision = "float",
) -> Parts:
    """`load_parts`, and on a CPU the encoder's matrices packed for inference (`encoder.optimize_for_inference`).

    Args:
        source: Folder or hub id.
        revision: Branch, tag or commit on the hub.
        dtype: Of the encoder's weights in memory.
        device: Where they go; by default `default_device`.
        precision: ``int8`` quantises the encoder's matrices, on a CPU.

    Raises:
        InputError: As `load_parts`; or int8 is asked for where it does not run.
    """
    parts = load_parts(source, revision=revision, dtype=dtype, device=device or default_device())
    warn_if_bare(parts, source)
    if parts.encoder.device.type == "cpu" or precision != "float":
        optimize_for_inference(parts.encoder, precision=precision)
    return parts


def projection_stack(settings: ModelFolder, width: int, *, where: str) -> nn.Sequential:
    """The folder's Dense modules as one module.

    Args:
        settings: The folder.
        width: Of the vectors that come in, D.
        where: Named in errors.

    Raises:
        InputError: A module does not take the width that the one before gives.
    """
    for place, projection in enumerate(settings.projections, start=1):
        if projection.linear.in_features != width:
            raise InputError(f"{where}: Dense module {place} takes {projection.linear.in_features} features, it is given {width}")
        width = projection.linear.out_features
    return nn.Sequential(*settings.projections)
