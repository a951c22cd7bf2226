"""A model folder with more absolute positions: weights, tokenizer and length limits, all else copied as it is.

Any folder that Quiver opens but Stanford's: sentence-transformers' and PyLate's models, and bare encoders, with a head or without.

Source: `quiver.encoder.pretraining.position_extension`; where sentence-transformers 5.3 and 6.2 and PyLate 1.6 keep their limits.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path

from quiver.encoder import InputError
from quiver.encoder.checkpoints.folder import local_folder
from quiver.encoder.files import read_json, write_json
from quiver.encoder.pretraining.position_extension import extend_checkpoint
from quiver.retrieval.models.export.modules import transformer_settings
from quiver.retrieval.models.export.stanford import is_stanford
from quiver.retrieval.models.export.target import replacing_folder
from quiver.retrieval.models.model_folder import read_model_folder
from quiver.retrieval.models.model_settings import ModelFolder

# The old weights, in whatever form, and what is made of them; git's history would bring them along too.
WEIGHTS = ("*.safetensors", "*.safetensors.index.json", "*.bin", "*.bin.index.json", "*.h5", "*.msgpack", "*.onnx", "*.ot", "*.tflite")
OTHER_FORMS = ("onnx", "openvino", ".git", ".cache")

SETTINGS = "config_sentence_transformers.json"


@dataclass(frozen=True)
class Lengthened:
    """What was written.

    Attributes:
        folder: Where.
        positions: Of a text, before and after.
        max_length: Tokens that texts (of a ColBERT model: documents) are cut to, before and after; None where no limit was set.
    """

    folder: Path
    positions: tuple[int, int]
    max_length: tuple[int | None, int]


def lengthen_model(
    source: str | Path, out: Path, *, factor: int, max_length: int | None = None, revision: str | None = None, overwrite: bool = False
) -> Lengthened:
    """Write a model with ``factor`` times as many positions, whole or not at all.

    Args:
        source: Folder or hub id.
        out: Folder to write.
        factor: k >= 1.
        max_length: Tokens that texts are cut to from now on; all positions by default. Queries of ColBERT models stay as they are.
        revision: Branch, tag or commit on the hub.
        overwrite: Replace a model that is there.

    Raises:
        InputError: It is no model with absolute positions, or one in Stanford's layout; ``max_length`` is beyond its positions; or
            ``out`` cannot be written. Nothing is left there.
    """
    folder = local_folder(source, revision=revision)
    settings = read_model_folder(folder)
    if is_stanford(folder):
        raise InputError(f"{source}: a folder of Stanford's ColBERT; write it anew with quiver export --layout pylate, and extend that")
    _check_target(out, folder, overwrite=overwrite)
    inner = settings.encoder_folder.relative_to(folder)
    try:
        with replacing_folder(out) as stage:
            shutil.copytree(folder, stage, dirs_exist_ok=True, ignore=_left_out(settings.encoder_folder))
            config = extend_checkpoint(settings.encoder_folder, stage / inner, factor)
            wanted = config.max_positions if max_length is None else max_length
            if not 3 <= wanted <= config.max_positions:
                raise InputError(f"{source}: max_length must be 3 to {config.max_positions}, its new number of positions, got {wanted}")
            _write_limits(stage, stage / inner, wanted)
            kept = _limit(read_model_folder(stage))
    except OSError as error:
        raise InputError(f"{out}: cannot be written ({error.strerror})") from error
    return Lengthened(out, (config.max_positions // factor, config.max_positions), (_limit(settings), kept or config.max_positions))


def _limit(settings: ModelFolder) -> int | None:
    return settings.colbert.document_length if settings.kind == "colbert" else settings.max_length


def _check_target(out: Path, source: Path, *, overwrite: bool) -> None:
    """As `quiver.retrieval.models.export.target.check_target`, for a folder whose files are not those of an export."""
    if out.exists() and not out.is_dir():
        raise InputError(f"{out}: a file; --out names a folder")
    if source.resolve().is_relative_to(out.resolve()) or out.resolve().is_relative_to(source.resolve()):
        raise InputError(f"{out}: is, holds or lies in the model to be extended; choose another --out")
    if not out.exists() or not any(out.iterdir()):
        return
    if not overwrite:
        raise InputError(f"{out}: not empty; choose another --out, or --overwrite")
    if not (out / "config.json").is_file() and not (out / "modules.json").is_file():
        raise InputError(f"{out}: holds something other than a model, which is not replaced; choose another --out")


def _left_out(encoder: Path) -> Callable[[str, list[str]], Collection[str]]:
    """What `shutil.copytree` leaves out: all forms of the encoder's weights. Those of the modules behind it are copied."""
    weights = shutil.ignore_patterns(*WEIGHTS)

    def names_left_out(folder: str, names: list[str]) -> Collection[str]:
        left = {name for name in names if name in OTHER_FORMS}
        return left | weights(folder, names) if Path(folder) == encoder else left

    return names_left_out


def _write_limits(folder: Path, encoder: Path, wanted: int) -> None:
    """Put the new limit wherever the layouts have one already; a folder that says none is limited by its number of positions alone."""
    for path, keys in ((transformer_settings(encoder), ("max_seq_length", "document_length")), (folder / SETTINGS, ("document_length",))):
        values = read_json(path) if path.is_file() else {}
        changed = {key: wanted for key in keys if values.get(key) is not None}
        if changed:
            write_json(path, values | changed)
