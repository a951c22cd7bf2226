"""Model folders of sentence-transformers, PyLate and plain Hugging Face: read into one record, written back portably.

What is written opens in sentence-transformers 5 and 6 and in PyLate 1.6 alike: old module paths, old pooling keys,
ModernBERT's v4 config keys.

Source: sentence-transformers 5.3 and 6.2 ``modules.json``, PyLate 1.6 ``config_sentence_transformers.json``.
"""

from __future__ import annotations

import json
import logging
import string
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from safetensors.torch import save_file
from torch import nn

from encoder import Encoder, InputError, Tokenizer, save_encoder
from encoder.checkpoint import read_safetensors
from encoder.files import read_json, replacing, write_json
from retrieval.pooling import POOLINGS
from retrieval.projection import IDENTITY, Projection

logger = logging.getLogger(__name__)

Kind = Literal["dense", "colbert"]

# The last part of a module's class path says what it is, in sentence-transformers 2 to 6 and in PyLate alike; the
# native module of retrieval/training stands where a Transformer does.
MODULE_KINDS = {
    "Transformer": "transformer",
    "NativeTransformer": "transformer",
    "Pooling": "pooling",
    "Dense": "dense",
    "Normalize": "normalize",
}


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
    settings = _optional_json(folder / "config_sentence_transformers.json")
    kind: Kind = "colbert" if settings.get("model_type") == "ColBERT" else "dense"
    if not (folder / "modules.json").is_file():
        if not (folder / "config.json").is_file():
            raise InputError(f"{folder}: not a model: it has neither modules.json nor config.json")
        if kind == "dense":
            logger.warning("%s: a bare encoder; using mean pooling and cosine similarity, as sentence-transformers does", folder)
        result = ModelFolder(kind, folder)
    else:
        result = _read_modules(folder, kind)
    if kind == "colbert":
        return replace(result, similarity="maxsim", colbert=_read_colbert(settings, folder))
    prompts = settings.get("prompts") or {}
    return replace(
        result,
        similarity=_similarity(settings.get("similarity_fn_name") or "cosine", folder),
        query_prompt=prompts.get("query") or "",
        document_prompt=prompts.get("document") or "",
    )


def _optional_json(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}


def _read_modules(folder: Path, kind: Kind) -> ModelFolder:
    try:
        modules = json.loads((folder / "modules.json").read_text(encoding="utf-8"))
        entries = [(str(module["type"]), folder / module["path"]) for module in sorted(modules, key=lambda module: module["idx"])]
    except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError) as error:
        raise InputError(f"{folder / 'modules.json'}: not a list of modules: {error}") from error
    result = ModelFolder(kind, folder)
    for place, (path, where) in enumerate(entries):
        module = MODULE_KINDS.get(path.rpartition(".")[2])
        if module is None or (module == "transformer") != (place == 0) or (kind == "colbert" and module == "pooling"):
            raise InputError(
                f"{folder / 'modules.json'}: module {place} is {path}, which Quiver does not run in that place of a {kind} model"
            )
        if module == "transformer":
            bert = _optional_json(where / "sentence_bert_config.json")
            result = replace(
                result, encoder_folder=where, max_length=bert.get("max_seq_length"), lower_case=bool(bert.get("do_lower_case", False))
            )
        elif module == "pooling":
            pooling = read_json(where / "config.json")
            result = replace(result, pooling=_pooling(pooling, where), include_prompt=pooling.get("include_prompt", True))
        elif module == "dense":
            result = replace(result, projections=(*result.projections, _read_projection(where)))
        else:
            result = replace(result, normalize=True)
    return result


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
    if len(modes) != 1 or modes[0] not in POOLINGS:
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
    config = read_json(folder / "config.json")
    try:
        projection = Projection(
            config["in_features"],
            config["out_features"],
            bias=config.get("bias", True),
            activation=config.get("activation_function", IDENTITY),
            residual=config.get("use_residual", False),
        )
    except KeyError as error:
        raise InputError(f"{folder / 'config.json'}: the key {error.args[0]!r} is missing") from error
    try:
        projection.load_state_dict(read_safetensors(folder), strict=True)
    except RuntimeError as error:
        raise InputError(f"{folder}: the tensors do not fit config.json: {' '.join(str(error).split())}") from error
    return projection


def _read_colbert(settings: Mapping[str, Any], folder: Path) -> ColBERTSettings:
    names = {
        "query_prefix": "query_prefix",
        "document_prefix": "document_prefix",
        "query_length": "query_length",
        "document_length": "document_length",
        "do_query_expansion": "query_expansion",
        "attend_to_expansion_tokens": "attend_to_expansion",
    }
    values = {ours: settings[theirs] for theirs, ours in names.items() if settings.get(theirs) is not None}
    if settings.get("skiplist_words") is not None:
        values["skiplist"] = tuple(settings["skiplist_words"])
    colbert = ColBERTSettings(**values)
    for name in ("query_length", "document_length"):
        if not isinstance(getattr(colbert, name), int) or getattr(colbert, name) < 4:
            raise InputError(
                f"{folder / 'config_sentence_transformers.json'}: {name} must be an integer >= 4, got {getattr(colbert, name)!r}"
            )
    return colbert


def write_dense(folder: Path, settings: ModelFolder, encoder: Encoder, tokenizer: Tokenizer, *, max_length: int) -> None:
    """Write a bi-encoder as a sentence-transformers folder.

    Args:
        folder: Made if it is not there.
        settings: Pooling, projections, prompts, similarity.
        encoder: The weights.
        tokenizer: The vocabulary.
        max_length: Tokens a text is cut to.
    """
    modules = [("", "sentence_transformers.models.Transformer"), ("1_Pooling", "sentence_transformers.models.Pooling")]
    modules += [(f"{place}_Dense", "sentence_transformers.models.Dense") for place in range(2, 2 + len(settings.projections))]
    if settings.normalize:
        modules.append((f"{len(modules)}_Normalize", "sentence_transformers.models.Normalize"))
    _write_common(folder, modules, encoder, tokenizer, max_length, lower_case=settings.lower_case)
    pooling: dict[str, Any] = {"word_embedding_dimension": encoder.config.hidden_size}
    names = {"cls": "cls_token", "mean": "mean_tokens", "max": "max_tokens", "lasttoken": "lasttoken"}
    pooling |= {f"pooling_mode_{key}": mode == settings.pooling for mode, key in names.items()}
    pooling |= {"pooling_mode_mean_sqrt_len_tokens": False, "pooling_mode_weightedmean_tokens": False}
    write_json(folder / "1_Pooling" / "config.json", pooling | {"include_prompt": settings.include_prompt})
    for place, projection in enumerate(settings.projections, start=2):
        _write_projection(folder / f"{place}_Dense", projection, pylate=False)
    write_json(
        folder / "config_sentence_transformers.json",
        {
            "__version__": {"sentence_transformers": "5.0.0", "transformers": "4.48.0", "pytorch": "2.6.0"},
            "model_type": "SentenceTransformer",
            "prompts": {"query": settings.query_prompt, "document": settings.document_prompt},
            "default_prompt_name": None,
            "similarity_fn_name": settings.similarity,
        },
    )


def write_colbert(folder: Path, settings: ModelFolder, encoder: Encoder, tokenizer: Tokenizer) -> None:
    """Write a ColBERT model as a PyLate folder, which sentence-transformers 6 reads too.

    Args:
        folder: Made if it is not there.
        settings: Projections and ColBERT settings.
        encoder: The weights.
        tokenizer: The vocabulary, the two prefixes in it.
    """
    colbert = settings.colbert
    modules = [("", "sentence_transformers.models.Transformer")]
    modules += [(f"{place}_Dense", "pylate.models.Dense.Dense") for place in range(1, 1 + len(settings.projections))]
    max_length = max(colbert.query_length, colbert.document_length)
    _write_common(folder, modules, encoder, tokenizer, max_length, lower_case=settings.lower_case)
    for place, projection in enumerate(settings.projections, start=1):
        _write_projection(folder / f"{place}_Dense", projection, pylate=True)
    write_json(
        folder / "config_sentence_transformers.json",
        {
            "__version__": {"sentence_transformers": "5.0.0", "transformers": "4.48.0", "pytorch": "2.6.0"},
            "model_type": "ColBERT",
            "similarity_fn_name": "MaxSim",
            "prompts": {"query": "", "document": ""},
            "default_prompt_name": None,
            "query_prefix": colbert.query_prefix,
            "document_prefix": colbert.document_prefix,
            "query_length": colbert.query_length,
            "document_length": colbert.document_length,
            "do_query_expansion": colbert.query_expansion,
            "attend_to_expansion_tokens": colbert.attend_to_expansion,
            "skiplist_words": list(colbert.skiplist),
        },
    )


def _write_common(
    folder: Path, modules: list[tuple[str, str]], encoder: Encoder, tokenizer: Tokenizer, max_length: int, *, lower_case: bool
) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    save_encoder(encoder, folder)
    tokenizer.save(folder)
    for path, _ in modules[1:]:
        (folder / path).mkdir(exist_ok=True)
    write_json(folder / "sentence_bert_config.json", {"max_seq_length": max_length, "do_lower_case": lower_case})
    entries = [{"idx": place, "name": str(place), "path": path, "type": kind} for place, (path, kind) in enumerate(modules)]
    write_json(folder / "modules.json", entries)


def _write_projection(folder: Path, projection: Projection, *, pylate: bool) -> None:
    config: dict[str, Any] = {
        "in_features": projection.linear.in_features,
        "out_features": projection.linear.out_features,
        "bias": projection.linear.bias is not None,
        "activation_function": projection.activation,
    }
    if pylate:
        config["use_residual"] = projection.use_residual
    elif projection.use_residual:
        raise InputError("sentence-transformers 5 has no residual Dense module: this model cannot be written in its layout")
    write_json(folder / "config.json", config)
    with replacing(folder / "model.safetensors") as temporary:
        save_file({name: tensor.detach().cpu().contiguous() for name, tensor in projection.state_dict().items()}, temporary)


def projection_stack(settings: ModelFolder) -> nn.Sequential:
    """The folder's Dense modules as one module."""
    return nn.Sequential(*settings.projections)
