"""Model folders of sentence-transformers, PyLate and plain Hugging Face, read into one record.

Source: sentence-transformers 5.3 and 6.2 ``modules.json``, PyLate 1.6 ``config_sentence_transformers.json``.
"""

from __future__ import annotations

import json
import logging
import re
import string
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from torch import nn

from encoder import Encoder, InputError, Tokenizer, freeze, load_encoder
from encoder.checkpoint import read_safetensors
from encoder.config import Precision
from encoder.files import read_json
from encoder.hub import local_folder
from retrieval.pooling import POOLINGS
from retrieval.projection import IDENTITY, Projection

logger = logging.getLogger(__name__)

Kind = Literal["dense", "colbert"]

# The last part of a module's class path says what it is, in sentence-transformers 2 to 6 and in PyLate alike; the
# native module of retrieval/training stands where a Transformer does.
MODULE_KINDS = {
    "Transformer": "T",
    "NativeTransformer": "T",
    "Pooling": "P",
    "Dense": "D",
    "Normalize": "N",
}


STACKS: dict[Kind, re.Pattern[str]] = {
    "dense": re.compile("TP(D)*(N)?"),
    "colbert": re.compile("T(D)+"),
}
STACK_NAMES: dict[Kind, str] = {
    "dense": "Transformer, Pooling, any number of Dense, and perhaps Normalize",
    "colbert": "Transformer and one or more Dense",
}

Value = TypeVar("Value")


@dataclass(frozen=True)
class ColBERTSettings:
    """How a multi-vector model reads queries and documents; PyLate's defaults.

    Attributes:
        query_prefix: Token put behind [CLS] of a query; empty for none.
        document_prefix: The same for documents.
        query_length: Tokens of a query, prefix and special tokens included; with expansion every query has that many.
        document_length: Tokens a document is cut to, prefix and special tokens included.
        query_expansion: Fill queries up with [MASK] tokens, whose vectors count.
        attend_to_expansion: The other tokens see the expansion tokens.
        skiplist: Tokens whose document vectors are dropped.
    """

    query_prefix: str = "[Q] "
    document_prefix: str = "[D] "
    query_length: int = 32
    document_length: int = 180
    query_expansion: bool = True
    attend_to_expansion: bool = False
    skiplist: tuple[str, ...] = tuple(string.punctuation)


@dataclass(frozen=True)
class ModelFolder:
    """What a model folder says beside its weights.

    Attributes:
        kind: ``dense`` or ``colbert``.
        encoder_folder: Where config.json, the weights and the tokenizer lie.
        max_length: Tokens a text is cut to; None where the folder does not say.
        lower_case: Texts are lower-cased before tokenising.
        pooling: A key of `retrieval.pooling.POOLINGS`.
        include_prompt: Prompt tokens are pooled too.
        projections: Dense modules in order.
        normalize: The last module scales vectors to length 1.
        query_prompt: Text put before every query.
        document_prompt: Text put before every document.
        similarity: ``cosine`` or ``dot`` (dense), ``maxsim`` (ColBERT).
        colbert: Only for ColBERT models.
    """

    kind: Kind
    encoder_folder: Path
    max_length: int | None = None
    lower_case: bool = False
    pooling: str = "mean"
    include_prompt: bool = True
    projections: tuple[Projection, ...] = ()
    normalize: bool = False
    query_prompt: str = ""
    document_prompt: str = ""
    similarity: Literal["cosine", "dot", "maxsim"] = "cosine"
    colbert: ColBERTSettings = field(default_factory=ColBERTSettings)


def read_model_folder(folder: Path) -> ModelFolder:
    """Read the settings of a sentence-transformers, PyLate or plain Hugging Face folder.

    Raises:
        InputError: A module, a pooling or a similarity is not one of ours, or a file is missing or malformed.
    """
    path = folder / "config_sentence_transformers.json"
    settings = read_json(path) if path.is_file() else {}
    kind: Kind = "colbert" if settings.get("model_type") == "ColBERT" else "dense"
    if (folder / "modules.json").is_file():
        result = _read_modules(folder, kind)
    elif (folder / "config.json").is_file():
        result = ModelFolder(kind, folder)
    else:
        raise InputError(f"{folder}: not a model: it has neither modules.json nor config.json")
    if kind == "colbert":
        return replace(result, similarity="maxsim", colbert=_read_colbert(settings, path))
    prompts = _typed(settings, "prompts", dict, {}, path)
    return replace(
        result,
        similarity=_similarity(_typed(settings, "similarity_fn_name", str, "cosine", path), folder),
        query_prompt=_typed(prompts, "query", str, "", path),
        document_prompt=_typed(prompts, "document", str, "", path),
    )


@dataclass(frozen=True)
class Parts:
    """A model folder in memory.

    Attributes:
        settings: What stands beside the weights.
        encoder: The weights.
        tokenizer: The vocabulary.
    """

    settings: ModelFolder
    encoder: Encoder
    tokenizer: Tokenizer


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
    parts = Parts(
        settings,
        load_encoder(settings.encoder_folder, dtype=dtype, device=device),
        Tokenizer.from_pretrained(settings.encoder_folder),
    )
    if not (folder / "modules.json").is_file() and settings.kind == "dense":
        logger.warning("%s: a bare encoder; using mean pooling and cosine similarity, as sentence-transformers does", folder)
    return parts


def load_for_inference(
    source: str | Path,
    *,
    revision: str | None = None,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    precision: Precision = "float",
) -> Parts:
    """`load_parts`, and on a CPU the encoder's matrices packed for inference (`encoder.freeze`).

    Raises:
        InputError: As `load_parts`; or int8 is asked for where it does not run.
    """
    parts = load_parts(source, revision=revision, dtype=dtype, device=device)
    if parts.encoder.device.type == "cpu" or precision != "float":
        freeze(parts.encoder, precision=precision)
    return parts


def _typed(values: Mapping[str, Any], key: str, kind: type[Value], default: Value, path: Path) -> Value:
    """A setting of one type; absent and null give the default."""
    value = values.get(key)
    if value is None:
        return default
    if type(value) is not kind:  # not isinstance: True is an int to Python
        raise InputError(f"{path}: {key} must be of type {kind.__name__}, got {value!r}")
    return value


# sentence-transformers reads the first that is there.
TRANSFORMER_SETTINGS = tuple(
    f"sentence_{kind}_config.json" for kind in ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
)


def _read_modules(folder: Path, kind: Kind) -> ModelFolder:
    path = folder / "modules.json"
    try:
        modules = json.loads(path.read_text(encoding="utf-8"))
        entries = [(str(module["type"]), folder / module["path"]) for module in sorted(modules, key=lambda module: module["idx"])]
    except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError) as error:
        raise InputError(f"{path}: not a list of modules: {error}") from error
    kinds = [MODULE_KINDS.get(name.rpartition(".")[2], "?") for name, _ in entries]
    if not STACKS[kind].fullmatch("".join(kinds)):
        names = ", ".join(name for name, _ in entries) or "none"
        raise InputError(f"{path}: a {kind} model is made of {STACK_NAMES[kind]}, in that order; this one of {names}")
    result = ModelFolder(kind, folder)
    for module, (_, where) in zip(kinds, entries, strict=True):
        result = MODULE_READERS[module](result, where)
    return result


def _with_transformer(result: ModelFolder, where: Path) -> ModelFolder:
    path = next((where / name for name in TRANSFORMER_SETTINGS if (where / name).is_file()), where / TRANSFORMER_SETTINGS[0])
    bert = read_json(path) if path.is_file() else {}
    max_length = None if bert.get("max_seq_length") is None else _typed(bert, "max_seq_length", int, 0, path)
    return replace(result, encoder_folder=where, max_length=max_length, lower_case=_typed(bert, "do_lower_case", bool, False, path))


def _with_pooling(result: ModelFolder, where: Path) -> ModelFolder:
    pooling = read_json(where / "config.json")
    include = _typed(pooling, "include_prompt", bool, True, where / "config.json")
    return replace(result, pooling=_pooling(pooling, where), include_prompt=include)


def _with_dense(result: ModelFolder, where: Path) -> ModelFolder:
    return replace(result, projections=(*result.projections, _read_projection(where)))


def _with_normalize(result: ModelFolder, where: Path) -> ModelFolder:
    del where  # it has no files
    return replace(result, normalize=True)


def _pooling(config: Mapping[str, Any], folder: Path) -> str:
    """The pooling mode from the new key or from the old booleans."""
    old = {
        "pooling_mode_cls_token": "cls",
        "pooling_mode_mean_tokens": "mean",
        "pooling_mode_max_tokens": "max",
        "pooling_mode_lasttoken": "lasttoken",
        "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
        "pooling_mode_weightedmean_tokens": "weightedmean",
    }
    modes = [config["pooling_mode"]] if "pooling_mode" in config else [mode for key, mode in old.items() if config.get(key)]
    if len(modes) != 1 or not isinstance(modes[0], str) or modes[0] not in POOLINGS:
        raise InputError(
            f"{folder / 'config.json'}: the pooling must be one of {', '.join(POOLINGS)}, got {' + '.join(map(str, modes)) or 'none'}"
        )
    return str(modes[0])


def _similarity(name: str, folder: Path) -> Literal["cosine", "dot"]:
    if name == "cosine":
        return "cosine"
    if name == "dot":
        return "dot"
    raise InputError(f"{folder / 'config_sentence_transformers.json'}: similarity_fn_name must be cosine or dot, got {name!r}")


def _read_projection(folder: Path) -> Projection:
    path = folder / "config.json"
    config = read_json(path)
    widths = [_typed(config, key, int, 0, path) for key in ("in_features", "out_features")]
    if min(widths) < 1:
        raise InputError(f"{path}: in_features and out_features must be >= 1, got {widths[0]} and {widths[1]}")
    projection = Projection(
        *widths,
        bias=_typed(config, "bias", bool, True, path),
        activation=_typed(config, "activation_function", str, IDENTITY, path),
        residual=_typed(config, "use_residual", bool, False, path),
    )
    try:
        projection.load_state_dict(read_safetensors(folder), strict=True)
    except RuntimeError as error:
        raise InputError(f"{folder}: the tensors do not fit config.json: {' '.join(str(error).split())}") from error
    return projection


def _read_colbert(settings: Mapping[str, Any], path: Path) -> ColBERTSettings:
    standard = ColBERTSettings()
    skiplist = _typed(settings, "skiplist_words", list, list(standard.skiplist), path)
    if not all(isinstance(word, str) for word in skiplist):
        raise InputError(f"{path}: skiplist_words must be a list of strings, got {skiplist!r}")
    colbert = ColBERTSettings(
        query_prefix=_typed(settings, "query_prefix", str, standard.query_prefix, path),
        document_prefix=_typed(settings, "document_prefix", str, standard.document_prefix, path),
        query_length=_typed(settings, "query_length", int, standard.query_length, path),
        document_length=_typed(settings, "document_length", int, standard.document_length, path),
        query_expansion=_typed(settings, "do_query_expansion", bool, standard.query_expansion, path),
        attend_to_expansion=_typed(settings, "attend_to_expansion_tokens", bool, standard.attend_to_expansion, path),
        skiplist=tuple(skiplist),
    )
    if min(colbert.query_length, colbert.document_length) < 4:
        raise InputError(f"{path}: query_length and document_length must be >= 4, got {colbert.query_length} and {colbert.document_length}")
    return colbert


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


MODULE_READERS: dict[str, Callable[[ModelFolder, Path], ModelFolder]] = {
    "T": _with_transformer,
    "P": _with_pooling,
    "D": _with_dense,
    "N": _with_normalize,
}
