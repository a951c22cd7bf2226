"""Bi-encoders and ColBERT models in the layouts of sentence-transformers 5 and 6 and of PyLate, and the tokenizer rules that they need.

Bi-encoders are written with old module paths and pooling keys, which sentence-transformers 5 and 6 both read. ColBERT models are written
for PyLate, whose folders 6 reads too, or as ``MultiVectorEncoder``, which only 6 reads: there a prefix is text before a text, which equals
the token that PyLate and Quiver insert if the tokenizer reads it as one token; that is found out by trying.

Quiver and sentence-transformers 5 strip white space around a text, 6 leaves it to the tokenizer: one that keeps it (byte-level ones do) is
exported with a stripping rule, which is removed on loading. The rule is not tokenizers' ``Strip``, which would also apply to the pieces
between special tokens, and would delete the added tokens of ModernBERT's vocabulary that are white space.

Source: what sentence-transformers 5.3 and 6.2 and PyLate 1.6 write and read; tokenizers 0.22 (``AddedVocabulary``).
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, TypeVar

import tokenizers
from pydantic import ConfigDict

from quiver.encoder import Encoder, InputError, Tokenizer, save_encoder
from quiver.encoder.checkpoints import config_from_hf
from quiver.encoder.checkpoints.checkpoint import base_folder, read_weights
from quiver.encoder.files import read_json, replacing, save_tensors, write_json
from quiver.encoder.schema import Field, Positive, Schema, parse_options
from quiver.retrieval.models.batches import IDENTITY, POOLINGS, Projection
from quiver.retrieval.models.options import ColBERTSettings, ModelFolder

logger = logging.getLogger(__name__)

# White space as str.strip() defines it.
_SPACE, _OTHER = r"[\s\x1c-\x1f]", r"[^\s\x1c-\x1f]"
_BLANKS = " {2,}"
OUTER = rf"\A{_SPACE}+(?={_OTHER})|(?<={_OTHER}){_SPACE}+\z|\A(?!{_BLANKS}\z){_SPACE}+\z"
"""Pattern of the stripping rule: outer white space, or a text of white space only, except runs of spaces, which may be added tokens."""

# Texts whose beginnings tokenizers split differently: a word, several with inner white space, an accented capital, a number, punctuation, a
# character that is a word.
_PROBES = ("wings", "two  words   and\n\tmore", "Éire", "7", "(a)", "東")
_AROUND = (" {}", "{} ", "\n{}\r\n", "\t{}\u3000", "  \u00a0{}\x1c")


def ignores_outer_space(tokenizer: Tokenizer) -> bool:
    """Test whether white space around a text leaves the token ids unchanged.

    Example:
        >>> tokenizer = Tokenizer.train(["a bird has wings"], vocab_size=320)
        >>> ignores_outer_space(tokenizer), ignores_outer_space(with_strip(tokenizer))
        (False, True)
    """
    return _strips_alike(tokenizer, tokenizer, _PROBES)


def with_strip(tokenizer: Tokenizer, *, prefixes: Collection[str] = ()) -> Tokenizer:
    """Add a rule that strips white space around texts, for libraries that do not strip them.

    There are two exceptions: texts of two or more spaces only, and texts that contain a special token. Around such a token white space is
    also stripped if the tokenizer normalizes more than Unicode composition; and of a run of spaces before [MASK], which absorbs spaces
    before it, one token may remain. White space after ``prefixes``, tokens that may precede a text, is stripped too.

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
    changed = _rebuild_tokenizer(tokenizer, rules, flags)
    return changed if _strips_alike(changed, tokenizer, probes) else tokenizer


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
    return _rebuild_tokenizer(tokenizer, rules, {token["content"]: False for token in rules["added_tokens"] if token["special"]})


def read_tokenizer(folder: Path) -> Tokenizer:
    """Read the tokenizer of a model folder, or of the base of a LoRA adapter without one; without the rule of `with_strip`."""
    return without_strip(Tokenizer.from_pretrained(folder if (folder / "tokenizer.json").is_file() else base_folder(folder)))


def _rebuild_tokenizer(tokenizer: Tokenizer, rules: dict[str, Any], flags: Mapping[str, bool]) -> Tokenizer:
    """A tokenizer with other rules; ``flags`` says for each token whether it is found after normalization."""
    rules = rules | {"added_tokens": _set_flags(rules["added_tokens"], flags)}
    return Tokenizer(tokenizers.Tokenizer.from_str(json.dumps(rules)), _set_flags(tokenizer.settings, flags))


def _set_flags(value: Any, flags: Mapping[str, bool]) -> Any:
    """JSON with the flags set wherever a token is described; transformers also reads tokenizer_config.json."""
    if isinstance(value, list):
        return [_set_flags(one, flags) for one in value]
    if not isinstance(value, dict):
        return value
    content = value.get("content")
    if isinstance(content, str):
        return value | ({"normalized": flags[content]} if content in flags else {})
    return {key: _set_flags(one, flags) for key, one in value.items()}


def _strips_alike(changed: Tokenizer, original: Tokenizer, probes: Collection[str]) -> bool:
    """Whether ``changed`` gives texts with outer white space the ids that ``original`` gives the stripped texts."""
    spaced = [around.format(probe) for probe in probes for around in _AROUND]
    stripped = [text.strip() for text in spaced]
    return changed.encode(spaced, max_length=256).ids == original.encode(stripped, max_length=256).ids


def reads_as_token(tokenizer: Tokenizer, text: str, token: str) -> bool:
    """Test whether a prompt, put before texts, is tokenized as one token inserted after [CLS].

    Example:
        >>> tokenizer = Tokenizer.train(["a bird has wings"], vocab_size=320)
        >>> _ = tokenizer.add_token("[Q] ")
        >>> reads_as_token(tokenizer, "[Q] ", "[Q] "), reads_as_token(tokenizer, "bird ", "[Q] ")
        (True, False)
    """
    found, texts = tokenizer.token_id(token), (*_PROBES, *(text + probe for probe in _PROBES))
    ids = tokenizer.encode(texts, max_length=64).ids
    alone, together = ids[: len(_PROBES)], ids[len(_PROBES) :]
    return all(both == [*one[:1], found, *one[1:]] for one, both in zip(alone, together, strict=True))


def with_prefixes(tokenizer: Tokenizer, prefixes: Sequence[str]) -> Tokenizer:
    """Make each of a tokenizer's tokens ``prefixes`` one token wherever it occurs; an InputError if that is not possible."""
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


Settings = TypeVar("Settings", bound=Schema)


class FolderSettings(Schema):
    """Base of the JSON files of model folders. Keys that do not affect vectors are not listed and ignored."""

    model_config = ConfigDict(extra="ignore")


def read_settings(kind: type[Settings], values: Mapping[str, Any], path: Path) -> Settings:
    """Check the parsed file ``path``; a setting that is null has its default. An InputError names every setting of a wrong type or value.

    Example:
        >>> read_settings(_Expansion, {"length": 32, "token": None}, Path("sentence_bert_config.json"))
        _Expansion(strategy='fixed', token='', length=32, attend=False)
    """
    return parse_options(kind, _without_nulls(values), source=str(path))


def _without_nulls(value: Any) -> Any:
    return {key: _without_nulls(each) for key, each in value.items() if each is not None} if isinstance(value, Mapping) else value


class _TextModality(Schema):
    method: Literal["forward"]
    method_output_name: Literal["last_hidden_state"]


class _Modalities(Schema):
    text: _TextModality | None = None


class _Expansion(FolderSettings):
    strategy: Literal["fixed", "min"] = "fixed"
    token: str = ""
    length: int = 0
    attend: bool = False


class TransformerSettings(FolderSettings):
    """The settings of a Transformer module; all but the first two are those of sentence-transformers 6."""

    max_seq_length: int | None = None
    do_lower_case: bool = False
    transformer_task: Literal["feature-extraction"] = "feature-extraction"
    processing_kwargs: Annotated[dict[str, Any], Field(max_length=0, default_factory=dict)]
    modality_config: _Modalities = _Modalities()
    query_length: int | None = None
    document_length: int | None = None
    query_expansion: _Expansion | None = None


class _NamedModule(FolderSettings):
    module_input_name: str | None = None
    module_output_name: str | None = None


class _DenseSettings(_NamedModule):
    in_features: Positive
    out_features: Positive
    bias: bool = True
    activation_function: str = IDENTITY
    use_residual: bool = False


class _PoolingSettings(FolderSettings):
    include_prompt: bool = True


class _MaskSettings(FolderSettings):
    skiplist_words: tuple[str, ...] = ()
    skiplist_tasks: tuple[Literal["document"]] = ("document",)
    keep_only_token_ids: Annotated[tuple[int, ...], Field(max_length=0)] = ()


class _PromptSettings(FolderSettings):
    prompts: Annotated[dict[str, str], Field(default_factory=dict)]
    default_prompt_name: str = ""


class _BiEncoderSettings(_PromptSettings):
    similarity_fn_name: Literal["cosine", "dot"] = "cosine"


class _MultiVectorSettings(_PromptSettings):
    similarity_fn_name: Literal["maxsim", "meanmaxsim"] = "maxsim"


class _PyLateSettings(FolderSettings):
    query_prefix: str = ColBERTSettings.query_prefix
    document_prefix: str = ColBERTSettings.document_prefix
    query_length: int = ColBERTSettings.query_length
    document_length: int = ColBERTSettings.document_length
    do_query_expansion: bool = True
    attend_to_expansion_tokens: bool = False
    skiplist_words: tuple[str, ...] = ColBERTSettings.skiplist


@dataclass(frozen=True)
class _ModuleStack:
    """Modules of a kind of model: their pattern over the letters of `MODULE_KINDS`, in words, and the vectors that they change."""

    pattern: re.Pattern[str]
    made_of: str
    feature: str


_BI_ENCODER_STACK = _ModuleStack(
    re.compile("TP(D)*(N)?"),
    "a dense model must have Transformer, Pooling, any number of Dense, and optionally Normalize",
    "sentence_embedding",
)
_PYLATE_STACK = _ModuleStack(re.compile("T(D)+"), "a ColBERT model must have Transformer and one or more Dense", "token_embeddings")
_MULTI_VECTOR_STACK = _ModuleStack(
    re.compile("T(D)+(N|MN|NM)"),
    "a multi-vector model must have Transformer, one or more Dense, optionally MultiVectorMask, and Normalize",
    "token_embeddings",
)

# By the last part of a module's class path, which is the same in sentence-transformers 2 to 6 and PyLate.
MODULE_KINDS = {"Transformer": "T", "Pooling": "P", "Dense": "D", "Normalize": "N", "MultiVectorMask": "M"}

# sentence-transformers reads the first one that exists.
TRANSFORMER_SETTINGS = tuple(
    f"sentence_{kind}_config.json" for kind in ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
)

POOLING_KEYS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_lasttoken": "lasttoken",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
}
"""Boolean settings of sentence-transformers 5 -> pooling modes of sentence-transformers 6."""


def transformer_settings(folder: Path) -> Path:
    """Return the path of a Transformer module's settings, which has one of several names; the file may be missing."""
    return next((folder / name for name in TRANSFORMER_SETTINGS if (folder / name).is_file()), folder / TRANSFORMER_SETTINGS[0])


def _list_modules(folder: Path) -> list[tuple[str, Path]]:
    """Class path and folder of each module that ``modules.json`` lists, in order; none if there is no such file."""
    path = folder / "modules.json"
    try:
        modules = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else []
        return [(str(module["type"]), folder / module["path"]) for module in sorted(modules, key=lambda module: module["idx"])]
    except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError) as error:
        raise InputError(f"{path}: not a list of modules: {error}") from error


def first_module(folder: Path) -> Path:
    """Return the folder of a model's first module, its encoder: that of ``modules.json``, or the model's own folder."""
    entries = _list_modules(folder)
    return entries[0][1] if entries else folder


def _read_modules(folder: Path, stack: _ModuleStack, result: ModelFolder) -> ModelFolder:
    """``result`` with the settings of the modules of a folder; unchanged if it has no ``modules.json``."""
    path, entries = folder / "modules.json", _list_modules(folder)
    kinds = [MODULE_KINDS.get(name.rpartition(".")[2], "?") for name, _ in entries]
    if path.is_file() and not stack.pattern.fullmatch("".join(kinds)):
        names = ", ".join(name for name, _ in entries) or "none"
        raise InputError(f"{path}: {stack.made_of}, in that order; got {names}")
    for kind, (_, where) in zip(kinds, entries, strict=True):
        path = transformer_settings(where) if kind == "T" else where / "config.json"
        # Transformers, and in sentence-transformers 5 Normalize, need no file.
        values = read_json(path) if path.is_file() or kind not in "TN" else {}
        result = _add_module(result, kind, values, path, stack.feature)
    return result


def _add_module(result: ModelFolder, kind: str, values: Mapping[str, Any], path: Path, feature: str) -> ModelFolder:
    """``result`` with one module, whose settings are in the file ``path``."""
    if kind == "T":
        transformer = read_settings(TransformerSettings, values, path)
        return replace(result, encoder_folder=path.parent, max_length=transformer.max_seq_length, lower_case=transformer.do_lower_case)
    if kind == "P":
        modes = [values["pooling_mode"]] if "pooling_mode" in values else [mode for key, mode in POOLING_KEYS.items() if values.get(key)]
        if len(modes) != 1 or modes[0] not in list(POOLINGS):
            raise InputError(f"{path}: pooling must be one of {', '.join(POOLINGS)}, got {' + '.join(map(str, modes)) or 'none'}")
        include = read_settings(_PoolingSettings, values, path).include_prompt
        return replace(result, pooling=str(modes[0]), include_prompt=include)
    if kind == "M":
        return replace(result, colbert=replace(result.colbert, skiplist=read_settings(_MaskSettings, values, path).skiplist_words))
    for key, name in read_settings(_NamedModule, values, path):
        if name not in (None, feature):
            raise InputError(f"{path}: {key} must be {feature!r}, got {name!r}")
    if kind == "N":
        return replace(result, normalize=True)
    dense = read_settings(_DenseSettings, values, path)
    shape = dense.in_features, dense.out_features
    projection = Projection(*shape, bias=dense.bias, activation=dense.activation_function, residual=dense.use_residual)
    try:
        projection.load_state_dict(read_weights(path.parent), strict=True)
    except RuntimeError as error:
        raise InputError(f"{path.parent}: the tensors do not match config.json: {' '.join(str(error).split())}") from error
    return replace(result, projections=(*result.projections, projection))


def read_dense(folder: Path, config: Mapping[str, Any], path: Path) -> ModelFolder:
    """Read a SentenceTransformer folder, or that of a bare encoder. ``path`` is config_sentence_transformers.json, ``config`` its content.

    Raises:
        InputError: A module, pooling or similarity is not supported, or a file is malformed.
    """
    found = read_settings(_BiEncoderSettings, config, path)
    return replace(
        _read_modules(folder, _BI_ENCODER_STACK, ModelFolder("dense", folder)),
        similarity=found.similarity_fn_name,
        query_prompt=found.prompts.get("query", ""),
        document_prompt=found.prompts.get("document", ""),
        prompts={name: text for name, text in found.prompts.items() if name not in ("query", "document")},
        default_prompt_name=found.default_prompt_name or None,
    )


def read_pylate(folder: Path, config: Mapping[str, Any], path: Path) -> ModelFolder:
    """Read a PyLate folder; arguments and errors as `read_dense`."""
    found = read_settings(_PyLateSettings, config, path)
    colbert = ColBERTSettings(
        query_prefix=found.query_prefix,
        document_prefix=found.document_prefix,
        query_length=found.query_length,
        document_length=found.document_length,
        query_expansion=found.do_query_expansion,
        attend_to_expansion=found.attend_to_expansion_tokens,
        skiplist=found.skiplist_words,
    )
    colbert.check_lengths(path)
    return _read_modules(folder, _PYLATE_STACK, ModelFolder("colbert", folder, similarity="maxsim", colbert=colbert))


def read_multi_vector(folder: Path, config: Mapping[str, Any], path: Path) -> ModelFolder:
    """Read a MultiVectorEncoder folder of sentence-transformers 6; arguments and errors as `read_dense`."""
    found = read_settings(_MultiVectorSettings, config, path)
    if found.similarity_fn_name == "meanmaxsim":
        logger.warning("%s: similarity_fn_name is meanmaxsim, but Quiver sums over the query's tokens: rankings agree, scores differ", path)
    result = ModelFolder("colbert", folder, similarity="maxsim", colbert=ColBERTSettings(skiplist=()))
    result = _read_modules(folder, _MULTI_VECTOR_STACK, result)
    inner = result.encoder_folder
    tokenizer, where = read_tokenizer(inner), transformer_settings(inner)
    (query_prefix, query_prompt), (document_prefix, document_prompt) = (
        # A prompt that is tokenized as one token is a prefix.
        next(((token, "") for token in (prompt, prompt.rstrip()) if token and reads_as_token(tokenizer, prompt, token)), ("", prompt))
        for prompt in (found.prompts.get("query", ""), found.prompts.get("document", ""))
    )
    stored = read_json(where) if where.is_file() else {}
    given = read_settings(TransformerSettings, stored, where)
    limits = (result.max_length, tokenizer.max_length, config_from_hf(read_json(base_folder(inner) / "config.json")).max_positions)
    longest = min(limit for limit in limits if limit is not None)
    query_length, expanded_length, expansion = given.query_length or longest, None, given.query_expansion
    if not stored.get("query_expansion"):  # an empty mapping means no expansion, too
        expansion = None
    if expansion is not None:
        if expansion.token and tokenizer.token_id(expansion.token) != tokenizer.special_id("mask"):
            raise InputError(f"{where}: the expansion token must be the mask token, got {expansion.token!r}")
        shorter = expansion.strategy == "min"
        query_length, expanded_length = (max(expansion.length, query_length), expansion.length) if shorter else (expansion.length, None)
    colbert = ColBERTSettings(
        query_prefix=query_prefix,
        document_prefix=document_prefix,
        query_length=query_length,
        document_length=given.document_length or longest,
        query_expansion=expansion is not None,
        attend_to_expansion=expansion is not None and expansion.attend,
        expanded_length=expanded_length,
        # sentence-transformers 6 ignores words that are not tokens; in Quiver and PyLate they would mean [UNK].
        skiplist=tuple(word for word in result.colbert.skiplist if tokenizer.token_id(word) is not None),
    )
    colbert.check_lengths(where)
    return replace(result, colbert=colbert, query_prompt=query_prompt, document_prompt=document_prompt)


def write_encoder(folder: Path, encoder: Encoder, tokenizer: Tokenizer) -> None:
    """Write weights, config.json and tokenizer; the folder is created if missing."""
    folder.mkdir(parents=True, exist_ok=True)
    save_encoder(encoder, folder)
    tokenizer.save(folder)


class _Module(NamedTuple):
    """A module to write: its class path, its settings, and for Dense its weights."""

    path: str
    settings: Mapping[str, Any] | None = None
    projection: Projection | None = None


def _write_modules(
    folder: Path,
    encoder: Encoder,
    tokenizer: Tokenizer,
    modules: Sequence[_Module],
    transformer: Mapping[str, Any],
    config: Mapping[str, Any],
) -> None:
    """Write a folder of modules: the first is the Transformer, whose settings are ``transformer``."""
    write_encoder(folder, encoder, tokenizer)
    entries = []
    for number, (path, settings, projection) in enumerate(modules):
        name = f"{number}_{path.rpartition('.')[2]}" if number else ""
        entries.append({"idx": number, "name": str(number), "path": name, "type": path})
        (folder / name).mkdir(exist_ok=True)
        if projection is not None:
            shape = {"in_features": projection.linear.in_features, "out_features": projection.linear.out_features}
            more = {"bias": projection.linear.bias is not None, "activation_function": projection.activation}
            settings = {**shape, **more, **(settings or {})}
            with replacing(folder / name / "model.safetensors") as temporary:
                save_tensors({key: tensor.detach().cpu().contiguous() for key, tensor in projection.state_dict().items()}, temporary)
        if settings is not None:
            write_json(folder / name / "config.json", settings)
    write_json(folder / TRANSFORMER_SETTINGS[0], transformer)
    write_json(folder / "modules.json", entries)
    write_json(folder / "config_sentence_transformers.json", config)


# Lowest versions that read the files; a library warns about files from a version above its own.
_VERSIONS_5 = {"sentence_transformers": "5.0.0", "transformers": "4.48.0", "pytorch": "2.6.0"}
_VERSIONS_6 = {"sentence_transformers": "6.0.0", "transformers": "5.0.0", "pytorch": "2.6.0"}


def write_dense(folder: Path, settings: ModelFolder, encoder: Encoder, tokenizer: Tokenizer, *, max_length: int) -> None:
    """Write a bi-encoder, whose texts have at most ``max_length`` tokens, as a sentence-transformers folder.

    Raises:
        InputError: The model has a residual Dense module, which the layout lacks; nothing is written.
    """
    if any(projection.use_residual for projection in settings.projections):
        raise InputError("this model has a residual Dense module, which the layout of sentence-transformers 5 does not support")
    pooling = {
        "word_embedding_dimension": encoder.config.hidden_size,
        **{key: mode == settings.pooling for key, mode in POOLING_KEYS.items()},
    }
    where = "sentence_transformers.models"
    modules = [_Module(f"{where}.Transformer"), _Module(f"{where}.Pooling", pooling | {"include_prompt": settings.include_prompt})]
    modules += [_Module(f"{where}.Dense", {}, projection) for projection in settings.projections]
    modules += [_Module(f"{where}.Normalize")] * settings.normalize
    config = {
        "__version__": _VERSIONS_5,
        "model_type": "SentenceTransformer",
        "prompts": {"query": settings.query_prompt, "document": settings.document_prompt, **settings.prompts},
        "default_prompt_name": settings.default_prompt_name,
        "similarity_fn_name": settings.similarity,
    }
    transformer = {"max_seq_length": max_length, "do_lower_case": settings.lower_case}
    _write_modules(folder, encoder, with_strip(tokenizer), modules, transformer, config)


def unsupported_by_pylate(settings: ModelFolder) -> list[str]:
    """List what a ColBERT model uses that only sentence-transformers 6 supports, not PyLate and Stanford ColBERT."""
    prompted = ["it has prompts of several tokens"] if settings.query_prompt or settings.document_prompt else []
    shorter = settings.colbert.expanded_length is not None
    return prompted + ["its queries may be longer than the length to which they are expanded"] * shorter


def write_colbert(folder: Path, settings: ModelFolder, encoder: Encoder, tokenizer: Tokenizer) -> None:
    """Write a ColBERT model as a PyLate folder, which sentence-transformers 6 reads too.

    Raises:
        InputError: The model needs a feature that only sentence-transformers 6 has; nothing is written.
    """
    if problems := unsupported_by_pylate(settings):
        raise InputError(f"PyLate's layout cannot express this model: {'; '.join(problems)}; use --layout sentence-transformers")
    colbert = settings.colbert
    modules = [_Module("sentence_transformers.models.Transformer")]
    modules += [_Module("pylate.models.Dense.Dense", {"use_residual": each.use_residual}, each) for each in settings.projections]
    config = {
        "__version__": _VERSIONS_5,
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
    }
    transformer = {"max_seq_length": max(colbert.query_length, colbert.document_length), "do_lower_case": settings.lower_case}
    tokenizer = with_strip(tokenizer, prefixes=(colbert.query_prefix, colbert.document_prefix))
    _write_modules(folder, encoder, tokenizer, modules, transformer, config)


def write_multi_vector(folder: Path, settings: ModelFolder, encoder: Encoder, tokenizer: Tokenizer) -> None:
    """Write a ColBERT model as a MultiVectorEncoder folder of sentence-transformers 6; version 5 and PyLate cannot read it.

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
    where, names = "sentence_transformers.base.modules", {"module_input_name": "token_embeddings", "module_output_name": "token_embeddings"}
    modules = [_Module(f"{where}.transformer.Transformer")]
    modules += [_Module(f"{where}.dense.Dense", names | {"use_residual": each.use_residual}, each) for each in settings.projections]
    skiplist = {"skiplist_words": list(colbert.skiplist), "skiplist_tasks": ["document"], "keep_only_token_ids": None}
    modules.append(_Module("sentence_transformers.multi_vector_encoder.modules.multi_vector_mask.MultiVectorMask", skiplist))
    modules.append(_Module(f"{where}.normalize.Normalize", names))
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
    config = {
        "__version__": _VERSIONS_6,
        "model_type": "MultiVectorEncoder",
        "prompts": {"query": colbert.query_prefix + settings.query_prompt, "document": colbert.document_prefix + settings.document_prompt},
        "default_prompt_name": None,
        "similarity_fn_name": "maxsim",
    }
    _write_modules(folder, encoder, tokenizer, modules, transformer, config)
