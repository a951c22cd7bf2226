"""``modules.json`` and the folders it names: the stack of modules that sentence-transformers and PyLate build a model of.

What is written opens in sentence-transformers 5 and 6 and in PyLate 1.6 alike: old module paths, ModernBERT's v4 config keys.

Source: what sentence-transformers 5.3 and 6.2 and PyLate 1.6 write.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from quiver.encoder import Encoder, InputError, Tokenizer, save_encoder
from quiver.encoder.checkpoints.folder import read_weights
from quiver.encoder.files import read_json, replacing, save_tensors, write_json
from quiver.retrieval.models.export.fields import required, typed, words
from quiver.retrieval.models.model_settings import ModelFolder
from quiver.retrieval.models.pooling import POOLINGS
from quiver.retrieval.models.projection import IDENTITY, Projection


@dataclass(frozen=True)
class Stack:
    """Which modules make a model, in which order.

    Attributes:
        pattern: Over the letters of `MODULE_KINDS`.
        made_of: The same in words, for errors.
        feature: What Dense and Normalize work on, by sentence-transformers' name.
    """

    pattern: re.Pattern[str]
    made_of: str
    feature: str


DENSE = Stack(
    re.compile("TP(D)*(N)?"),
    "a dense model is made of Transformer, Pooling, any number of Dense, and perhaps Normalize",
    "sentence_embedding",
)
PYLATE = Stack(re.compile("T(D)+"), "a colbert model is made of Transformer and one or more Dense", "token_embeddings")
MULTI_VECTOR = Stack(
    re.compile("T(D)+(N|MN|NM)"),
    "a multi-vector model is made of Transformer, one or more Dense, perhaps MultiVectorMask, and Normalize",
    "token_embeddings",
)


def read_stack(folder: Path, stack: Stack, result: ModelFolder) -> ModelFolder:
    """Read ``modules.json`` and all that it names.

    Args:
        folder: With modules.json.
        stack: What it must name.
        result: What is so where no module says otherwise.

    Returns:
        ``result`` with what the modules say.

    Raises:
        InputError: The modules are others or in another order, a module does what is not run here, or a file is malformed.
    """
    path = folder / "modules.json"
    try:
        modules = json.loads(path.read_text(encoding="utf-8"))
        entries = [(str(module["type"]), folder / module["path"]) for module in sorted(modules, key=lambda module: module["idx"])]
    except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError) as error:
        raise InputError(f"{path}: not a list of modules: {error}") from error
    kinds = [MODULE_KINDS.get(name.rpartition(".")[2], "?") for name, _ in entries]
    if not stack.pattern.fullmatch("".join(kinds)):
        names = ", ".join(name for name, _ in entries) or "none"
        raise InputError(f"{path}: {stack.made_of}, in that order; this one of {names}")
    for kind, (_, where) in zip(kinds, entries, strict=True):
        result = MODULE_READERS[kind](result, where, stack)
    return result


# sentence-transformers reads the first that is there.
TRANSFORMER_SETTINGS = tuple(
    f"sentence_{kind}_config.json" for kind in ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
)


def transformer_settings(folder: Path) -> Path:
    """The file of a Transformer module's settings, whatever it is called; it need not be there."""
    return next((folder / name for name in TRANSFORMER_SETTINGS if (folder / name).is_file()), folder / TRANSFORMER_SETTINGS[0])


def _with_transformer(result: ModelFolder, where: Path, stack: Stack) -> ModelFolder:
    del stack
    path = transformer_settings(where)
    values = read_json(path) if path.is_file() else {}
    # What sentence-transformers 6 may say beyond lengths, and what changes vectors.
    required(values, "transformer_task", ("feature-extraction",), path)
    required(values, "processing_kwargs", ({},), path)
    modalities = typed(values, "modality_config", dict, {}, path)
    for modality, called in modalities.items():
        if modality != "text" or called != {"method": "forward", "method_output_name": "last_hidden_state"}:
            raise InputError(f"{path}: modality_config must be text by the model's last_hidden_state, got {modality!r}: {called!r}")
    max_length = None if values.get("max_seq_length") is None else typed(values, "max_seq_length", int, 0, path)
    return replace(result, encoder_folder=where, max_length=max_length, lower_case=typed(values, "do_lower_case", bool, False, path))


def _with_pooling(result: ModelFolder, where: Path, stack: Stack) -> ModelFolder:
    del stack
    path = where / "config.json"
    pooling = read_json(path)
    return replace(result, pooling=_pooling(pooling, path), include_prompt=typed(pooling, "include_prompt", bool, True, path))


POOLING_KEYS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_lasttoken": "lasttoken",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
}
"""The booleans of sentence-transformers 5, and the modes that sentence-transformers 6 names instead."""


def _pooling(config: Mapping[str, Any], path: Path) -> str:
    modes = [config["pooling_mode"]] if "pooling_mode" in config else [mode for key, mode in POOLING_KEYS.items() if config.get(key)]
    if len(modes) != 1 or not isinstance(modes[0], str) or modes[0] not in POOLINGS:
        raise InputError(f"{path}: the pooling must be one of {', '.join(POOLINGS)}, got {' + '.join(map(str, modes)) or 'none'}")
    return str(modes[0])


def _with_dense(result: ModelFolder, where: Path, stack: Stack) -> ModelFolder:
    return replace(result, projections=(*result.projections, _read_projection(where, stack)))


def _read_projection(folder: Path, stack: Stack) -> Projection:
    path = folder / "config.json"
    config = read_json(path)
    _check_feature(config, path, stack)
    widths = [typed(config, key, int, 0, path) for key in ("in_features", "out_features")]
    if min(widths) < 1:
        raise InputError(f"{path}: in_features and out_features must be >= 1, got {widths[0]} and {widths[1]}")
    projection = Projection(
        *widths,
        bias=typed(config, "bias", bool, True, path),
        activation=typed(config, "activation_function", str, IDENTITY, path),
        residual=typed(config, "use_residual", bool, False, path),
    )
    try:
        projection.load_state_dict(read_weights(folder), strict=True)
    except RuntimeError as error:
        raise InputError(f"{folder}: the tensors do not fit config.json: {' '.join(str(error).split())}") from error
    return projection


def _with_normalize(result: ModelFolder, where: Path, stack: Stack) -> ModelFolder:
    path = where / "config.json"  # sentence-transformers 5 writes none
    if path.is_file():
        _check_feature(read_json(path), path, stack)
    return replace(result, normalize=True)


def _check_feature(config: Mapping[str, Any], path: Path, stack: Stack) -> None:
    """A module that sentence-transformers 6 wrote says what it reads and where its result goes."""
    for key in ("module_input_name", "module_output_name"):
        required(config, key, (stack.feature,), path)


def _with_mask(result: ModelFolder, where: Path, stack: Stack) -> ModelFolder:
    del stack
    path = where / "config.json"
    mask = read_json(path)
    required(mask, "skiplist_tasks", (["document"],), path)
    required(mask, "keep_only_token_ids", ([],), path)
    return replace(result, colbert=replace(result.colbert, skiplist=words(mask, "skiplist_words", (), path)))


# The last part of a module's class path says what it is, in sentence-transformers 2 to 6 and in PyLate alike; the
# native module of retrieval/training stands where a Transformer does.
MODULE_KINDS = {
    "Transformer": "T",
    "NativeTransformer": "T",
    "Pooling": "P",
    "Dense": "D",
    "Normalize": "N",
    "MultiVectorMask": "M",
}
MODULE_READERS: dict[str, Callable[[ModelFolder, Path, Stack], ModelFolder]] = {
    "T": _with_transformer,
    "P": _with_pooling,
    "D": _with_dense,
    "N": _with_normalize,
    "M": _with_mask,
}


def write_encoder(folder: Path, encoder: Encoder, tokenizer: Tokenizer) -> None:
    """Write weights, config.json and tokenizer; the folder is made if it is not there."""
    folder.mkdir(parents=True, exist_ok=True)
    save_encoder(encoder, folder)
    tokenizer.save(folder)


def write_stack(folder: Path, modules: Sequence[tuple[str, str]], transformer: Mapping[str, Any]) -> None:
    """Write ``modules.json``, the Transformer's settings and an empty folder for every module behind it.

    Args:
        folder: With the encoder in it.
        modules: Folder and class path of each, the Transformer first.
        transformer: The content of ``sentence_bert_config.json``.
    """
    for path, _ in modules[1:]:
        (folder / path).mkdir(exist_ok=True)
    write_json(folder / "sentence_bert_config.json", transformer)
    entries = [{"idx": place, "name": str(place), "path": path, "type": kind} for place, (path, kind) in enumerate(modules)]
    write_json(folder / "modules.json", entries)


def write_projection(folder: Path, projection: Projection, more: Mapping[str, object]) -> None:
    """Write one Dense module into its folder.

    Args:
        folder: It exists.
        projection: The weights.
        more: What the layout's config.json has beyond the keys that all have.
    """
    config: dict[str, Any] = {
        "in_features": projection.linear.in_features,
        "out_features": projection.linear.out_features,
        "bias": projection.linear.bias is not None,
        "activation_function": projection.activation,
    }
    write_json(folder / "config.json", {**config, **more})
    with replacing(folder / "model.safetensors") as temporary:
        save_tensors({name: tensor.detach().cpu().contiguous() for name, tensor in projection.state_dict().items()}, temporary)


# The lowest versions that read what is written; a library warns of files from a version above its own.
VERSIONS = {"sentence_transformers": "5.0.0", "transformers": "4.48.0", "pytorch": "2.6.0"}
"""``__version__`` of ``config_sentence_transformers.json``."""
