"""Bi-encoders and ColBERT models in the layouts of sentence-transformers 5 and 6, and the tokenizer rules that they need.

A model folder has ``modules.json``, which lists its modules in order, and a folder per module. Bi-encoders are written with old module
paths and pooling keys, which sentence-transformers 5 and 6 both read. ColBERT models are written as ``MultiVectorEncoder``, which only 6
reads: there a prefix is text before a text; if the tokenizer reads it as one token, it equals the token that PyLate and Quiver insert.

White space: Quiver and sentence-transformers 5 strip white space around a text, sentence-transformers 6 leaves it to the tokenizer. A
tokenizer that keeps it (byte-level ones do) is exported with a stripping rule, which is removed on loading. The rule is not tokenizers'
``Strip``: that would also apply to the pieces between special tokens, and would delete the added tokens of ModernBERT's vocabulary that are
white space.

Prefixes: PyLate and Stanford ColBERT insert the id of a marker; sentence-transformers 6 writes the marker before the text and tokenizes
both. Whether both give the same ids is found out by trying.

Source: what sentence-transformers 5.3 and 6.2 and PyLate 1.6 write and read; tokenizers 0.22 (``AddedVocabulary``).
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

import tokenizers

from quiver.encoder import Encoder, InputError, Tokenizer, save_encoder
from quiver.encoder.checkpoints import config_from_hf
from quiver.encoder.checkpoints.folder import read_weights
from quiver.encoder.checkpoints.peft import base_folder
from quiver.encoder.files import read_json, replacing, save_tensors, write_json
from quiver.retrieval.models.options import ColBERTSettings, ModelFolder
from quiver.retrieval.models.pooling import IDENTITY, POOLINGS, Projection

logger = logging.getLogger(__name__)

# White space as str.strip() defines it.
_SPACE, _OTHER = r"[\s\x1c-\x1f]", r"[^\s\x1c-\x1f]"
_BLANKS = " {2,}"
OUTER = rf"\A{_SPACE}+(?={_OTHER})|(?<={_OTHER}){_SPACE}+\z|\A(?!{_BLANKS}\z){_SPACE}+\z"
"""Pattern of the stripping rule: outer white space, or a text of white space only, except runs of spaces, which may be added tokens."""

_PROBES = ("wings", "two  words   and\n\tmore", "Éire", "7", "(a)", "東")
_AROUND = (" {}", "{} ", "\n{}\r\n", "\t{}\u3000", "  \u00a0{}\x1c")


def ignores_outer_space(tokenizer: Tokenizer) -> bool:
    """Test whether white space around a text leaves the token ids unchanged.

    Example:
        >>> tokenizer = Tokenizer.train(["a bird has wings"], vocab_size=320)
        >>> ignores_outer_space(tokenizer), ignores_outer_space(with_strip(tokenizer))
        (False, True)
    """
    return _agree(tokenizer, tokenizer, _PROBES)


def with_strip(tokenizer: Tokenizer, *, prefixes: Collection[str] = ()) -> Tokenizer:
    """Add a rule that strips white space around texts, for libraries that do not strip them.

    There are two exceptions: texts of two or more spaces only, and texts that contain a special token. Around such a token white space is
    also stripped if the tokenizer normalizes more than Unicode composition; and of a run of spaces before [MASK], which absorbs spaces
    before it, one token may remain.

    Args:
        tokenizer: Tokenizer; not modified.
        prefixes: Tokens that may precede a text; white space after them is stripped too.

    Returns:
        A tokenizer with the rule; ``tokenizer`` itself if the rule is not needed or cannot be added (see `ignores_outer_space`).
    """
    rules = json.loads(tokenizer.to_json())
    inner, added = rules["normalizer"], rules["added_tokens"]
    if ignores_outer_space(tokenizer) or any(token["special"] and token["normalized"] for token in added):
        return tokenizer
    # A special token that is found before normalization cuts a text into pieces, and each piece would be stripped. Unicode composition
    # neither changes nor creates special tokens, so they can be found after it.
    composes = inner is None or inner["type"] == "NFC"
    flags = {token["content"]: True for token in added if token["special"] and composes and token["content"] not in prefixes}
    seen = [token["content"] for token in added if token["normalized"] or token["content"] in flags]
    probes = [*_PROBES, *(f"a{content}b {content} c" for content in seen)]
    if any(content.isspace() and not re.fullmatch(_BLANKS, content) for content in seen):  # the rule would delete that token
        return tokenizer
    stripping = {"type": "Replace", "pattern": {"Regex": OUTER}, "content": ""}
    rules["normalizer"] = {"type": "Sequence", "normalizers": [stripping, *([inner] if inner else [])]}
    changed = _rebuilt(tokenizer, rules, flags)
    return changed if _agree(changed, tokenizer, probes) else tokenizer


def without_strip(tokenizer: Tokenizer) -> Tokenizer:
    """Remove the rule that `with_strip` adds; other tokenizers are returned unchanged."""
    if json.dumps(OUTER) not in tokenizer.normalizer:
        return tokenizer
    rules = json.loads(tokenizer.to_json())
    normalizer = rules["normalizer"] or {}
    first, *rest = normalizer.get("normalizers") or [{}]
    if first.get("type") != "Replace" or first["pattern"].get("Regex") != OUTER:
        return tokenizer
    rules["normalizer"] = rest[0] if rest else None
    return _rebuilt(tokenizer, rules, {token["content"]: False for token in rules["added_tokens"] if token["special"]})


def read_tokenizer(folder: Path) -> Tokenizer:
    """Read the tokenizer of a model folder, without the rule of `with_strip`; that of its base if the folder is a LoRA adapter without one.

    Raises:
        InputError: ``tokenizer.json`` is missing or cannot be read.
    """
    return without_strip(Tokenizer.from_pretrained(folder if (folder / "tokenizer.json").is_file() else base_folder(folder)))


def _rebuilt(tokenizer: Tokenizer, rules: dict[str, Any], flags: Mapping[str, bool]) -> Tokenizer:
    """A tokenizer with other rules; ``flags`` says for each token whether it is found after normalization."""
    rules = rules | {"added_tokens": _flagged(rules["added_tokens"], flags)}
    return Tokenizer(tokenizers.Tokenizer.from_str(json.dumps(rules)), _flagged(tokenizer.settings, flags))


def _flagged(value: Any, flags: Mapping[str, bool]) -> Any:
    """JSON with the flags set wherever a token is described; transformers also reads tokenizer_config.json."""
    if isinstance(value, list):
        return [_flagged(one, flags) for one in value]
    if not isinstance(value, dict):
        return value
    content = value.get("content")
    if isinstance(content, str):
        return value | ({"normalized": flags[content]} if content in flags else {})
    return {key: _flagged(one, flags) for key, one in value.items()}


def _agree(changed: Tokenizer, original: Tokenizer, probes: Collection[str]) -> bool:
    """Whether ``changed`` gives texts with outer white space the ids that ``original`` gives the stripped texts."""
    spaced = [around.format(probe) for probe in probes for around in _AROUND]
    stripped = [text.strip() for text in spaced]
    return changed.encode(spaced, max_length=256).ids == original.encode(stripped, max_length=256).ids


# Beginnings that tokenizers split differently: a word, an accented capital, a number, punctuation, a character that is a word.
PROBES = ("wings", "Éire", "7", "(a)", "東")


def reads_as_token(tokenizer: Tokenizer, text: str, token: str) -> bool:
    """Test whether a prompt is tokenized as one token inserted after [CLS].

    Args:
        tokenizer: Tokenizer.
        text: Prompt put before texts.
        token: Expected token.

    Example:
        >>> tokenizer = Tokenizer.train(["a bird has wings"], vocab_size=320)
        >>> _ = tokenizer.add_token("[Q] ")
        >>> reads_as_token(tokenizer, "[Q] ", "[Q] "), reads_as_token(tokenizer, "bird ", "[Q] ")
        (True, False)
    """
    found = tokenizer.token_id(token)
    alone, together = _ids(tokenizer, PROBES), _ids(tokenizer, [text + probe for probe in PROBES])
    return all(both == [*one[:1], found, *one[1:]] for one, both in zip(alone, together, strict=True))


def with_prefixes(tokenizer: Tokenizer, prefixes: Sequence[str]) -> Tokenizer:
    """Make each prefix one token wherever it occurs.

    Args:
        tokenizer: Tokenizer that has the prefixes as tokens; not modified.
        prefixes: Prefixes; empty ones are ignored.

    Raises:
        InputError: A prefix cannot be made one token.
    """
    wanted = [prefix for prefix in prefixes if prefix and not reads_as_token(tokenizer, prefix, prefix)]
    if not wanted:
        return tokenizer
    rules = json.loads(tokenizer.to_json())
    kept = [token for token in rules["added_tokens"] if token["content"] not in wanted]
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    added = [{"id": tokenizer.token_id(prefix), "content": prefix, **flags} for prefix in wanted]
    rules["added_tokens"] = sorted(kept + added, key=lambda token: token["id"])
    result = Tokenizer(tokenizers.Tokenizer.from_str(json.dumps(rules)), tokenizer.settings)
    for prefix in wanted:
        if not reads_as_token(result, prefix, prefix):
            raise InputError(f"this tokenizer splits the prefix {prefix!r} into several tokens, and cannot be changed to keep it whole")
    return result


def _ids(tokenizer: Tokenizer, texts: Sequence[str]) -> list[list[int]]:
    return tokenizer.encode(texts, max_length=64).ids


Value = TypeVar("Value")


def typed(values: Mapping[str, Any], key: str, kind: type[Value], default: Value, path: Path) -> Value:
    """Read a setting of one type; a missing or null setting gives the default.

    Args:
        values: The parsed file.
        key: Key of the setting.
        kind: Expected type, exactly: True is not an int.
        default: Value if the file has none.
        path: The file, for errors.

    Raises:
        InputError: The setting has another type.

    Example:
        >>> typed({"max_seq_length": 256}, "max_seq_length", int, 512, Path("sentence_bert_config.json"))
        256
    """
    value = values.get(key)
    if value is None:
        return default
    if type(value) is not kind:  # isinstance would accept True as an int
        raise InputError(f"{path}: {key} must be of type {kind.__name__}, got {value!r}")
    return value


def words(values: Mapping[str, Any], key: str, default: tuple[str, ...], path: Path) -> tuple[str, ...]:
    """Read a setting that is a list of strings; a missing or null setting gives the default.

    Raises:
        InputError: The setting is not a list of strings.
    """
    found = typed(values, key, list, list(default), path)
    if not all(isinstance(word, str) for word in found):
        raise InputError(f"{path}: {key} must be a list of strings, got {found!r}")
    return tuple(found)


def required(values: Mapping[str, Any], key: str, allowed: tuple[object, ...], path: Path) -> None:
    """Check a setting of which Quiver supports only some values; a missing or null setting means the first of them.

    Raises:
        InputError: The setting has another value.
    """
    value = values.get(key)
    if value is not None and value not in allowed:
        raise InputError(f"{path}: {key} must be {' or '.join(repr(one) for one in allowed)}, got {value!r}")


@dataclass(frozen=True)
class ModuleStack:
    """Modules of a kind of model, in order.

    Attributes:
        pattern: Pattern over the letters of `MODULE_KINDS`.
        made_of: The pattern in words, for errors.
        feature: sentence-transformers' name of the vectors that Dense and Normalize change.
    """

    pattern: re.Pattern[str]
    made_of: str
    feature: str


BI_ENCODER_STACK = ModuleStack(
    re.compile("TP(D)*(N)?"),
    "a dense model must have Transformer, Pooling, any number of Dense, and optionally Normalize",
    "sentence_embedding",
)
PYLATE_STACK = ModuleStack(re.compile("T(D)+"), "a ColBERT model must have Transformer and one or more Dense", "token_embeddings")
MULTI_VECTOR_STACK = ModuleStack(
    re.compile("T(D)+(N|MN|NM)"),
    "a multi-vector model must have Transformer, one or more Dense, optionally MultiVectorMask, and Normalize",
    "token_embeddings",
)


def read_stack(folder: Path, stack: ModuleStack, result: ModelFolder) -> ModelFolder:
    """Read ``modules.json`` and the modules that it lists.

    Args:
        folder: Folder with ``modules.json``.
        stack: Expected modules.
        result: Default settings.

    Returns:
        ``result`` with the settings of the modules.

    Raises:
        InputError: The modules or their order differ from ``stack``, a module has unsupported settings, or a file is malformed.
    """
    path, entries = folder / "modules.json", _entries(folder)
    kinds = [MODULE_KINDS.get(name.rpartition(".")[2], "?") for name, _ in entries]
    if not stack.pattern.fullmatch("".join(kinds)):
        names = ", ".join(name for name, _ in entries) or "none"
        raise InputError(f"{path}: {stack.made_of}, in that order; got {names}")
    for kind, (_, where) in zip(kinds, entries, strict=True):
        result = MODULE_READERS[kind](result, where, stack)
    return result


def _entries(folder: Path) -> list[tuple[str, Path]]:
    """Class path and folder of each module that ``modules.json`` lists, in order."""
    path = folder / "modules.json"
    try:
        modules = json.loads(path.read_text(encoding="utf-8"))
        return [(str(module["type"]), folder / module["path"]) for module in sorted(modules, key=lambda module: module["idx"])]
    except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError) as error:
        raise InputError(f"{path}: not a list of modules: {error}") from error


def first_module(folder: Path) -> Path:
    """Return the folder of a model's first module, its encoder: that of ``modules.json``, or the model's own folder.

    Raises:
        InputError: ``modules.json`` is malformed.
    """
    entries = _entries(folder) if (folder / "modules.json").is_file() else []
    return entries[0][1] if entries else folder


# sentence-transformers reads the first one that exists.
TRANSFORMER_SETTINGS = tuple(
    f"sentence_{kind}_config.json" for kind in ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
)


def transformer_settings(folder: Path) -> Path:
    """Return the path of a Transformer module's settings, which has one of several names; the file may be missing."""
    return next((folder / name for name in TRANSFORMER_SETTINGS if (folder / name).is_file()), folder / TRANSFORMER_SETTINGS[0])


def _with_transformer(result: ModelFolder, where: Path, stack: ModuleStack) -> ModelFolder:
    del stack
    path = transformer_settings(where)
    values = read_json(path) if path.is_file() else {}
    # Settings of sentence-transformers 6 that affect vectors.
    required(values, "transformer_task", ("feature-extraction",), path)
    required(values, "processing_kwargs", ({},), path)
    modalities = typed(values, "modality_config", dict, {}, path)
    for modality, called in modalities.items():
        if modality != "text" or called != {"method": "forward", "method_output_name": "last_hidden_state"}:
            raise InputError(f"{path}: modality_config must map text to the model's last_hidden_state, got {modality!r}: {called!r}")
    max_length = None if values.get("max_seq_length") is None else typed(values, "max_seq_length", int, 0, path)
    return replace(result, encoder_folder=where, max_length=max_length, lower_case=typed(values, "do_lower_case", bool, False, path))


def _with_pooling(result: ModelFolder, where: Path, stack: ModuleStack) -> ModelFolder:
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
"""Boolean settings of sentence-transformers 5 -> pooling modes of sentence-transformers 6."""


def _pooling(config: Mapping[str, Any], path: Path) -> str:
    modes = [config["pooling_mode"]] if "pooling_mode" in config else [mode for key, mode in POOLING_KEYS.items() if config.get(key)]
    if len(modes) != 1 or not isinstance(modes[0], str) or modes[0] not in POOLINGS:
        raise InputError(f"{path}: pooling must be one of {', '.join(POOLINGS)}, got {' + '.join(map(str, modes)) or 'none'}")
    return str(modes[0])


def _with_dense(result: ModelFolder, where: Path, stack: ModuleStack) -> ModelFolder:
    return replace(result, projections=(*result.projections, _read_projection(where, stack)))


def _read_projection(folder: Path, stack: ModuleStack) -> Projection:
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
        raise InputError(f"{folder}: the tensors do not match config.json: {' '.join(str(error).split())}") from error
    return projection


def _with_normalize(result: ModelFolder, where: Path, stack: ModuleStack) -> ModelFolder:
    path = where / "config.json"  # sentence-transformers 5 writes none
    if path.is_file():
        _check_feature(read_json(path), path, stack)
    return replace(result, normalize=True)


def _check_feature(config: Mapping[str, Any], path: Path, stack: ModuleStack) -> None:
    """Check the input and output names that sentence-transformers 6 writes."""
    for key in ("module_input_name", "module_output_name"):
        required(config, key, (stack.feature,), path)


def _with_mask(result: ModelFolder, where: Path, stack: ModuleStack) -> ModelFolder:
    del stack
    path = where / "config.json"
    mask = read_json(path)
    required(mask, "skiplist_tasks", (["document"],), path)
    required(mask, "keep_only_token_ids", ([],), path)
    return replace(result, colbert=replace(result.colbert, skiplist=words(mask, "skiplist_words", (), path)))


# By the last part of a module's class path, which is the same in sentence-transformers 2 to 6 and PyLate.
MODULE_KINDS = {
    "Transformer": "T",
    "Pooling": "P",
    "Dense": "D",
    "Normalize": "N",
    "MultiVectorMask": "M",
}
MODULE_READERS: dict[str, Callable[[ModelFolder, Path, ModuleStack], ModelFolder]] = {
    "T": _with_transformer,
    "P": _with_pooling,
    "D": _with_dense,
    "N": _with_normalize,
    "M": _with_mask,
}


def write_encoder(folder: Path, encoder: Encoder, tokenizer: Tokenizer) -> None:
    """Write weights, config.json and tokenizer; the folder is created if missing."""
    folder.mkdir(parents=True, exist_ok=True)
    save_encoder(encoder, folder)
    tokenizer.save(folder)


def write_stack(folder: Path, modules: Sequence[tuple[str, str]], transformer: Mapping[str, Any]) -> None:
    """Write ``modules.json``, the Transformer's settings and an empty folder for every other module.

    Args:
        folder: Folder with the encoder.
        modules: Folder and class path of each module, the Transformer first.
        transformer: Content of ``sentence_bert_config.json``.
    """
    for path, _ in modules[1:]:
        (folder / path).mkdir(exist_ok=True)
    write_json(folder / "sentence_bert_config.json", transformer)
    entries = [{"idx": position, "name": str(position), "path": path, "type": kind} for position, (path, kind) in enumerate(modules)]
    write_json(folder / "modules.json", entries)


def write_projection(folder: Path, projection: Projection, more: Mapping[str, object]) -> None:
    """Write one Dense module into its folder.

    Args:
        folder: Existing folder.
        projection: The module.
        more: Further keys of the layout's config.json.
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


# Lowest versions that read the files; a library warns about files from a version above its own.
VERSIONS_5 = {"sentence_transformers": "5.0.0", "transformers": "4.48.0", "pytorch": "2.6.0"}
"""``__version__`` of ``config_sentence_transformers.json``."""


def read_dense(folder: Path, config: Mapping[str, Any], path: Path) -> ModelFolder:
    """Read a SentenceTransformer folder, or the folder of a bare encoder.

    Args:
        folder: Folder with ``modules.json``, or with an encoder only.
        config: The parsed ``config_sentence_transformers.json``; empty if there is none.
        path: That file, for errors.

    Raises:
        InputError: A module, pooling or similarity is not supported, or a file is malformed.
    """
    result = ModelFolder("dense", folder)
    if (folder / "modules.json").is_file():
        result = read_stack(folder, BI_ENCODER_STACK, result)
    prompts = typed(config, "prompts", dict, {}, path)
    return replace(
        result,
        similarity=_similarity(typed(config, "similarity_fn_name", str, "cosine", path), path),
        query_prompt=typed(prompts, "query", str, "", path),
        document_prompt=typed(prompts, "document", str, "", path),
        prompts={name: typed(prompts, name, str, "", path) for name in prompts if name not in ("query", "document")},
        default_prompt_name=typed(config, "default_prompt_name", str, "", path) or None,
    )


def _similarity(name: str, path: Path) -> Literal["cosine", "dot"]:
    if name == "cosine":
        return "cosine"
    if name == "dot":
        return "dot"
    raise InputError(f"{path}: similarity_fn_name must be cosine or dot, got {name!r}")


def write_dense(folder: Path, settings: ModelFolder, encoder: Encoder, tokenizer: Tokenizer, *, max_length: int) -> None:
    """Write a bi-encoder as a sentence-transformers folder.

    Args:
        folder: Folder; created if missing.
        settings: Pooling, projections, prompts and similarity.
        encoder: The encoder.
        tokenizer: The tokenizer.
        max_length: Maximum tokens of a text.

    Raises:
        InputError: The model has a residual Dense module, which the layout lacks; nothing is written.
    """
    if any(projection.use_residual for projection in settings.projections):
        raise InputError("this model has a residual Dense module, which the layout of sentence-transformers 5 does not support")
    modules = [("", "sentence_transformers.models.Transformer"), ("1_Pooling", "sentence_transformers.models.Pooling")]
    modules += [(f"{number}_Dense", "sentence_transformers.models.Dense") for number in range(2, 2 + len(settings.projections))]
    if settings.normalize:
        modules.append((f"{len(modules)}_Normalize", "sentence_transformers.models.Normalize"))
    write_encoder(folder, encoder, with_strip(tokenizer))
    write_stack(folder, modules, {"max_seq_length": max_length, "do_lower_case": settings.lower_case})
    pooling: dict[str, Any] = {"word_embedding_dimension": encoder.config.hidden_size}
    pooling |= {key: mode == settings.pooling for key, mode in POOLING_KEYS.items()}
    write_json(folder / "1_Pooling" / "config.json", pooling | {"include_prompt": settings.include_prompt})
    for number, projection in enumerate(settings.projections, start=2):
        write_projection(folder / f"{number}_Dense", projection, {})
    write_json(
        folder / "config_sentence_transformers.json",
        {
            "__version__": VERSIONS_5,
            "model_type": "SentenceTransformer",
            "prompts": {"query": settings.query_prompt, "document": settings.document_prompt, **settings.prompts},
            "default_prompt_name": settings.default_prompt_name,
            "similarity_fn_name": settings.similarity,
        },
    )


MULTI_VECTOR_TRANSFORMER = "sentence_transformers.base.modules.transformer.Transformer"
MULTI_VECTOR_DENSE = "sentence_transformers.base.modules.dense.Dense"
MULTI_VECTOR_MASK = "sentence_transformers.multi_vector_encoder.modules.multi_vector_mask.MultiVectorMask"
MULTI_VECTOR_NORMALIZE = "sentence_transformers.base.modules.normalize.Normalize"
TOKEN_EMBEDDINGS_IO = {"module_input_name": "token_embeddings", "module_output_name": "token_embeddings"}
VERSIONS_6 = {"sentence_transformers": "6.0.0", "transformers": "5.0.0", "pytorch": "2.6.0"}


def read_multi_vector(folder: Path, config: Mapping[str, Any], path: Path) -> ModelFolder:
    """Read a MultiVectorEncoder folder of sentence-transformers 6; arguments and errors as `read_dense`."""
    result = read_stack(
        folder, MULTI_VECTOR_STACK, ModelFolder("colbert", folder, similarity="maxsim", colbert=ColBERTSettings(skiplist=()))
    )
    if typed(config, "similarity_fn_name", str, "maxsim", path) != "maxsim":
        required(config, "similarity_fn_name", ("maxsim", "meanmaxsim"), path)
        logger.warning("%s: similarity_fn_name is meanmaxsim, but Quiver sums over the query's tokens: rankings agree, scores differ", path)
    tokenizer = read_tokenizer(result.encoder_folder)
    prompts = typed(config, "prompts", dict, {}, path)
    query_prefix, query_prompt = _prefix(typed(prompts, "query", str, "", path), tokenizer)
    document_prefix, document_prompt = _prefix(typed(prompts, "document", str, "", path), tokenizer)
    colbert = replace(
        _with_lengths(result, tokenizer),
        query_prefix=query_prefix,
        document_prefix=document_prefix,
        # sentence-transformers 6 ignores words that are not tokens; in Quiver and PyLate they would mean [UNK].
        skiplist=tuple(word for word in result.colbert.skiplist if tokenizer.token_id(word) is not None),
    )
    colbert.check_lengths(transformer_settings(result.encoder_folder))
    return replace(result, colbert=colbert, query_prompt=query_prompt, document_prompt=document_prompt)


def _prefix(prompt: str, tokenizer: Tokenizer) -> tuple[str, str]:
    """Prefix and prompt: a prompt that is tokenized as one token is a prefix."""
    for token in (prompt, prompt.rstrip()):
        if token and reads_as_token(tokenizer, prompt, token):
            return token, ""
    return "", prompt


def _with_lengths(result: ModelFolder, tokenizer: Tokenizer) -> ColBERTSettings:
    folder = result.encoder_folder
    path = transformer_settings(folder)
    values = read_json(path) if path.is_file() else {}
    limits = (result.max_length, tokenizer.max_length, config_from_hf(read_json(base_folder(folder) / "config.json")).max_positions)
    longest = min(limit for limit in limits if limit is not None)
    colbert = replace(result.colbert, document_length=typed(values, "document_length", int, longest, path))
    expansion = typed(values, "query_expansion", dict, {}, path)
    if not expansion:
        return replace(colbert, query_expansion=False, query_length=typed(values, "query_length", int, longest, path))
    required(expansion, "strategy", ("fixed", "min"), path)
    token = typed(expansion, "token", str, "", path)
    if token and tokenizer.token_id(token) != tokenizer.special_id("mask"):
        raise InputError(f"{path}: the expansion token must be the mask token, got {token!r}")
    length = typed(expansion, "length", int, 0, path)
    colbert = replace(colbert, query_length=length, attend_to_expansion=typed(expansion, "attend", bool, False, path))
    if expansion.get("strategy") == "min":
        longest = max(length, typed(values, "query_length", int, longest, path))
        return replace(colbert, query_length=longest, expanded_length=length)
    return colbert


def write_multi_vector(folder: Path, settings: ModelFolder, encoder: Encoder, tokenizer: Tokenizer) -> None:
    """Write a ColBERT model as a MultiVectorEncoder folder of sentence-transformers 6; version 5 and PyLate cannot read it.

    Args:
        folder: Folder; created if missing.
        settings: Projections and ColBERT settings.
        encoder: The encoder.
        tokenizer: The tokenizer, which has the two prefixes as tokens.

    Raises:
        InputError: The tokenizer cannot read a prefix as one token, or cannot ignore outer white space, so that vectors would differ;
            nothing is written.
    """
    colbert = settings.colbert
    prefixes = (colbert.query_prefix, colbert.document_prefix)
    tokenizer = with_strip(with_prefixes(tokenizer, prefixes), prefixes=prefixes)
    if not ignores_outer_space(tokenizer):
        raise InputError(
            "sentence-transformers 6 does not strip white space around texts, and no stripping rule can be added to this tokenizer"
        )
    dense = [(f"{position}_Dense", MULTI_VECTOR_DENSE) for position in range(1, 1 + len(settings.projections))]
    mask, normalize = f"{len(dense) + 1}_MultiVectorMask", f"{len(dense) + 2}_Normalize"
    transformer: dict[str, Any] = {
        "transformer_task": "feature-extraction",
        "modality_config": {"text": {"method": "forward", "method_output_name": "last_hidden_state"}},
        "module_output_name": "token_embeddings",
        "max_seq_length": max(colbert.query_length, colbert.document_length),
        "do_lower_case": settings.lower_case,
        "document_length": colbert.document_length,
    }
    if colbert.query_expansion:
        strategy, length = ("min", colbert.expanded_length) if colbert.expanded_length else ("fixed", colbert.query_length)
        transformer["query_expansion"] = {"strategy": strategy, "attend": colbert.attend_to_expansion, "token": None, "length": length}
    if not colbert.query_expansion or colbert.expanded_length:
        transformer["query_length"] = colbert.query_length
    write_encoder(folder, encoder, tokenizer)
    write_stack(
        folder, [("", MULTI_VECTOR_TRANSFORMER), *dense, (mask, MULTI_VECTOR_MASK), (normalize, MULTI_VECTOR_NORMALIZE)], transformer
    )
    for (path, _), projection in zip(dense, settings.projections, strict=True):
        write_projection(folder / path, projection, TOKEN_EMBEDDINGS_IO | {"use_residual": projection.use_residual})
    skiplist = {"skiplist_words": list(colbert.skiplist), "skiplist_tasks": ["document"], "keep_only_token_ids": None}
    write_json(folder / mask / "config.json", skiplist)
    write_json(folder / normalize / "config.json", TOKEN_EMBEDDINGS_IO)
    write_json(
        folder / "config_sentence_transformers.json",
        {
            "__version__": VERSIONS_6,
            "model_type": "MultiVectorEncoder",
            "prompts": {
                "query": colbert.query_prefix + settings.query_prompt,
                "document": colbert.document_prefix + settings.document_prompt,
            },
            "default_prompt_name": None,
            "similarity_fn_name": "maxsim",
        },
    )
