"""Models that sentence-transformers or PyLate runs, behind Quiver's model protocols.

The library encodes with its own prompts, lengths, query expansion and batches; Quiver indexes, searches and scores. sentence-transformers
versions 5 and 6 are supported; version 6 added multi-vector models.

Both libraries accept models that they cannot run correctly: sentence-transformers opens a ColBERT and fails at the first text, and opens a
cross-encoder as a bi-encoder; PyLate opens any encoder and initialises a missing projection at random. The checks in this file refuse such
models.

Shapes: B texts, d vector width, n_i token vectors of text i.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from safetensors import SafetensorError

from quiver.encoder.checkpoints.checkpoint import ADAPTER_CONFIG, local_folder
from quiver.encoder.errors import InputError
from quiver.encoder.files import expand_home
from quiver.encoder.progress import shows_bars
from quiver.retrieval.models.encoding import clean
from quiver.retrieval.models.pretrained import check_is_retriever
from quiver.retrieval.records import DenseEncoding, DenseModel, Dtype, ModelCard, Role, TextTokens, TokenEncoding, TokenModel

logger = logging.getLogger(__name__)

# What the libraries raise for a model that is missing, malformed, of an unknown type, or whose weights do not fit.
_LOAD_ERRORS = (OSError, ValueError, RuntimeError, SafetensorError)

# Names under which encode_query and encode_document look for the prompt of a role.
_PROMPT_NAMES: dict[Role, tuple[str, ...]] = {"query": ("query",), "document": ("document", "passage", "corpus")}

# Settings that describe the file or the process and do not change vectors; the dtype of the weights is hashed with the weights.
_WITHOUT_EFFECT = {"_name_or_path", "architectures", "dtype", "torch_dtype", "transformers_version"}


class SentenceTransformersModel:
    """A `quiver.retrieval.records.DenseModel` that sentence-transformers runs.

    Attributes:
        card: Kind, width, similarity, lengths, prompts and fingerprint of the model.

    Args:
        source: Folder or Hugging Face Hub id.
        device: Device to run on. Default: the library's choice.

    Raises:
        InputError: The library cannot load the model, the model is multi-vector, or its similarity is neither cosine nor dot product.
    """

    def __init__(self, source: str | Path, *, device: str | None = None) -> None:
        from sentence_transformers import SentenceTransformer

        name = str(expand_home(source))
        if _is_late_interaction(name):
            raise InputError(f"{source}: a ColBERT model (one vector per token); load it with --library pylate")
        _check_task(name)
        self._model = _load(SentenceTransformer, "sentence-transformers", name, device)
        similarity = self._model.similarity_fn_name
        if similarity not in ("cosine", "dot"):
            raise InputError(f"{source}: similarity_fn_name must be cosine or dot, got {similarity!r}")
        self._lengths = _max_lengths(self._model, name)
        self.card = _sentence_transformers_card(self._model, str(source), "dense", similarity, self._lengths)

    @property
    def device(self) -> torch.device:
        """Device of the weights."""
        return torch.device(self._model.device)

    def encode_texts(self, texts: Sequence[str], role: Role, *, progress: bool = False) -> DenseEncoding:
        """Encode texts with the library's ``encode_query`` or ``encode_document``."""
        tokens = _count_sentence_transformers(self._model, texts, role, self._lengths[role])
        vectors = _encode(self._model, texts, role, progress) if texts else np.empty((0, self.card.dim))
        return DenseEncoding(np.asarray(vectors, np.float32), tokens)


class MultiVectorModel:
    """A `quiver.retrieval.records.TokenModel` that the MultiVectorEncoder of sentence-transformers 6 runs.

    Attributes:
        card: Kind, width, similarity, lengths, prompts and fingerprint of the model.

    Args:
        source: Folder or Hugging Face Hub id; models saved by PyLate work too.
        device: Device to run on. Default: the library's choice.

    Raises:
        InputError: The installed version has no multi-vector models, or cannot load this one.
    """

    def __init__(self, source: str | Path, *, device: str | None = None) -> None:
        import sentence_transformers

        if not hasattr(sentence_transformers, "MultiVectorEncoder"):
            raise InputError(
                f"{source}: a multi-vector model, which sentence-transformers {sentence_transformers.__version__} does not support; "
                "pip install 'sentence-transformers>=6', or load it with --library pylate"
            )
        name = str(expand_home(source))
        self._model = _load(sentence_transformers.MultiVectorEncoder, "sentence-transformers", name, device)
        self._lengths = _max_lengths(self._model, name)
        # The library's other similarity divides by the number of query tokens, which does not change the order of documents.
        self.card = _sentence_transformers_card(self._model, str(source), "colbert", "maxsim", self._lengths)

    @property
    def device(self) -> torch.device:
        """Device of the weights."""
        return torch.device(self._model.device)

    def encode_texts(self, texts: Sequence[str], role: Role, *, progress: bool = False) -> TokenEncoding:
        """Encode texts with the library's ``encode_query`` or ``encode_document``."""
        tokens = _count_sentence_transformers(self._model, texts, role, self._lengths[role])
        vectors = _encode(self._model, texts, role, progress) if texts else []
        return TokenEncoding([np.asarray(matrix, np.float32) for matrix in vectors], tokens)


class PyLateModel:
    """A `quiver.retrieval.records.TokenModel` that PyLate runs.

    Prefixes, lengths, query expansion, skiplist and the order of batches are PyLate's.

    Attributes:
        card: Kind, width, similarity, lengths, prompts and fingerprint of the model.

    Args:
        source: Folder or Hugging Face Hub id of a model saved by PyLate or by Stanford's ColBERT.
        device: Device to run on. Default: the library's choice.

    Raises:
        InputError: PyLate cannot load the model, or would initialise its projection at random.
    """

    def __init__(self, source: str | Path, *, device: str | None = None) -> None:
        from pylate import models

        name = str(expand_home(source))
        _check_projection(name)
        self._model = model = _load(models.ColBERT, "pylate", name, device)
        # PyLate puts this prompt before queries and documents alike, unless a call names another prompt.
        self._prompt: str = model.prompts.get(model.default_prompt_name) or ""
        self._lengths: dict[Role, int] = {"query": model.query_length, "document": model.document_length}
        self._prefixes: dict[Role, str] = {"query": model.query_prefix, "document": model.document_prefix}
        expansion = [model.do_query_expansion, model.attend_to_expansion_tokens]
        settings = [self._prompt, self._lengths, self._prefixes, expansion, model.skiplist_words]
        # Computed before the first encoding: PyLate writes the length of the last batch into the settings of its first module.
        fingerprint = _fingerprint(model, "pylate", settings)
        self.card = ModelCard(
            source=str(source),
            kind="colbert",
            fingerprint=fingerprint,
            dim=model.encode(["width"], is_query=True, show_progress_bar=False)[0].shape[1],
            similarity="maxsim",
            query_length=self._lengths["query"],
            document_length=self._lengths["document"],
            query_prompt=self._prefixes["query"] + self._prompt,
            document_prompt=self._prefixes["document"] + self._prompt,
            dtype=_dtype(model),
            library="pylate",
        )

    @property
    def device(self) -> torch.device:
        """Device of the weights."""
        return torch.device(self._model.device)

    def encode_texts(self, texts: Sequence[str], role: Role, *, progress: bool = False) -> TokenEncoding:
        """Encode texts with PyLate's ``encode``."""
        lower_case = bool(getattr(self._model[0], "do_lower_case", False))
        inserted = bool(self._prefixes[role])
        tokens = _count_tokens(
            self._model.tokenizer, texts, self._lengths[role], prompt=self._prompt, lower_case=lower_case, inserted=inserted
        )
        # PyLate fails on an empty list.
        vectors = self._model.encode(list(texts), is_query=role == "query", show_progress_bar=progress and shows_bars()) if texts else []
        return TokenEncoding([np.asarray(matrix, np.float32) for matrix in vectors], tokens)


def _sentence_transformers(source: str | Path, device: str | None) -> DenseModel | TokenModel:
    if _is_late_interaction(str(expand_home(source))):
        return MultiVectorModel(source, device=device)
    return SentenceTransformersModel(source, device=device)


def _pylate(source: str | Path, device: str | None) -> TokenModel:
    return PyLateModel(source, device=device)


LIBRARIES: Mapping[str, Callable[[str | Path, str | None], DenseModel | TokenModel]] = {
    "sentence-transformers": _sentence_transformers,
    "pylate": _pylate,
}
"""Functions that open a model with a library, by the library's name on PyPI."""


def load_baseline(library: str, source: str | Path, *, device: str | None = None) -> DenseModel | TokenModel:
    """Open a model with another library, for `quiver.eval.evaluate` to score.

    Args:
        library: A key of `LIBRARIES`.
        source: Folder or Hugging Face Hub id.
        device: Device to run on. Default: the library's choice.

    Raises:
        InputError: The library is unknown or not installed, or it cannot run this model.
    """
    if library not in LIBRARIES:
        raise InputError(f"unknown library {library!r}; choose one of {', '.join(LIBRARIES)}")
    if importlib.util.find_spec(library.replace("-", "_")) is None:
        raise InputError(f"{source}: {library} is not installed; pip install {library}")
    if "@" in str(source):  # these libraries take a revision apart from the id
        source = local_folder(source)
    name = str(expand_home(source))
    if _read_json(name, "modules.json") is None and _read_json(name, "config.json") is None:
        raise InputError(f"{source}: no such model: neither a folder nor a Hugging Face Hub model with a modules.json or config.json")
    return LIBRARIES[library](source, device)


def _load(kind: Any, library: str, name: str, device: str | None) -> Any:
    """Open a model; what the library raises becomes one line."""
    try:
        return kind(name, device=device)
    except _LOAD_ERRORS as error:
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise InputError(f"{name}: {library} cannot load it: {reason}") from error


def _is_late_interaction(source: str) -> bool:
    """Whether a model has one vector per token: saved by PyLate, by sentence-transformers 6, or by Stanford's ColBERT."""
    settings = _read_json(source, "config_sentence_transformers.json")
    saved_by = settings.get("model_type") if isinstance(settings, dict) else None
    return saved_by in ("ColBERT", "MultiVectorEncoder") or _is_stanford_colbert(source)


def _check_task(source: str) -> None:
    """Refuse a cross-encoder, a classifier and a sparse encoder, which sentence-transformers would open with mean pooling."""
    from sentence_transformers.util import load_file_path

    names = ("config.json", "modules.json", "config_sentence_transformers.json", ADAPTER_CONFIG)
    if found := [path for name in names if (path := load_file_path(source, name)) is not None]:
        check_is_retriever(source, Path(found[0]).parent)


def _check_projection(source: str) -> None:
    """Refuse a model whose projection PyLate would initialise at random."""
    modules = _read_json(source, "modules.json")
    if isinstance(modules, list):
        names = [str(module.get("type", "")).rpartition(".")[2] for module in modules if isinstance(module, dict)]
        if len(names) < 2 or set(names[1:]) != {"Dense"}:
            found = ", ".join(names) or "none"
            raise InputError(f"{source}: not a PyLate model: its modules must be a Transformer and Dense layers, found {found}")
    elif not _is_stanford_colbert(source):
        raise InputError(f"{source}: not a ColBERT model: it has no projection, and PyLate would initialise one at random")


def _is_stanford_colbert(source: str) -> bool:
    config = _read_json(source, "config.json")
    return isinstance(config, dict) and "HF_ColBERT" in (config.get("architectures") or [])


def _read_json(source: str, name: str) -> Any:
    """A JSON file of a model folder or Hub model; None if there is no such file."""
    from sentence_transformers.util import load_file_path

    path = load_file_path(source, name)
    if path is None:
        return None
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except ValueError as error:
        raise InputError(f"{path}: not JSON: {error}") from error


def _sentence_transformers_card(model: Any, source: str, kind: Any, similarity: Any, lengths: dict[Role, int]) -> ModelCard:
    prompts = {role: _prompt(model, role) for role in _PROMPT_NAMES}
    settings = [similarity, prompts, lengths, model.truncate_dim if kind == "dense" else None]
    return ModelCard(
        source=source,
        kind=kind,
        fingerprint=_fingerprint(model, "sentence-transformers", settings),
        dim=np.asarray(_encode(model, ["width"], "document", False)[0]).shape[-1],
        similarity=similarity,
        query_length=lengths["query"],
        document_length=lengths["document"],
        query_prompt=prompts["query"],
        document_prompt=prompts["document"],
        dtype=_dtype(model),
        library="sentence-transformers",
    )


def _encode(model: Any, texts: Sequence[str], role: Role, progress: bool) -> Any:
    encode = model.encode_query if role == "query" else model.encode_document
    return encode(list(texts), show_progress_bar=progress and shows_bars(), convert_to_numpy=True)


def _prompt(model: Any, role: Role) -> str:
    named = [model.prompts[name] for name in _PROMPT_NAMES[role] if name in model.prompts]
    prompt = named[0] if named else model.prompts.get(model.default_prompt_name)
    return prompt or ""


def _max_lengths(model: Any, name: str) -> dict[Role, int]:
    """Maximum tokens per text by role; version 6 can set different lengths for queries and documents, version 5 cannot."""
    first = model[0]
    expansion = getattr(first, "query_expansion", None) or {}
    common = model.max_seq_length or getattr(model.tokenizer, "model_max_length", None)
    fixed = expansion["length"] if expansion.get("strategy") == "fixed" else None
    own = {"query": fixed or getattr(first, "query_length", None), "document": getattr(first, "document_length", None)}
    lengths: dict[Role, int] = {}
    for role in _PROMPT_NAMES:
        length = own[role] or common
        # Static embeddings read texts of any length; transformers writes 1e30 for "no limit".
        if not isinstance(length, int) or length > 1_000_000_000:
            raise InputError(f"{name}: its {type(first).__name__} module sets no max_seq_length; save the model with one")
        lengths[role] = length
    return lengths


def _count_sentence_transformers(model: Any, texts: Sequence[str], role: Role, length: int) -> TextTokens:
    # Version 6, which replaced tokenize by preprocess, does not strip texts.
    strip, lower_case = not hasattr(model, "preprocess"), bool(getattr(model[0], "do_lower_case", False))
    return _count_tokens(model.tokenizer, texts, length, prompt=_prompt(model, role), strip=strip, lower_case=lower_case)


def _count_tokens(
    tokenizer: Any,
    texts: Sequence[str],
    max_length: int,
    *,
    prompt: str = "",
    strip: bool = True,
    lower_case: bool = False,
    inserted: int = 0,
) -> TextTokens:
    """Count tokens and truncated texts, which the libraries do not report, by tokenizing once without a limit.

    ``inserted`` is the number of tokens that the library adds after the tokenizer. Query expansion tokens are not counted.
    """
    prompted = clean(texts, prompt=prompt, lower_case=lower_case) if strip else [prompt + text for text in texts]
    # verbose=False: transformers would warn about long texts, and the limit is applied below.
    ids = tokenizer(prompted, truncation=False, padding=False, verbose=False)["input_ids"] if prompted else []
    lengths = np.fromiter(map(len, ids), np.int32, len(ids)) + np.int32(inserted)
    truncated = lengths > max_length
    if truncated.any():
        logger.info("truncated %d of %d texts to %d tokens", truncated.sum(), len(texts), max_length)
    return TextTokens(
        tokens=np.minimum(lengths, np.int32(max_length)),
        truncated=truncated,
        empty=np.fromiter((not text.strip() for text in texts), bool, len(texts)),
    )


def _dtype(model: Any) -> Dtype:
    return cast(Dtype, str(next(model.parameters()).dtype).removeprefix("torch."))


def _fingerprint(model: Any, library: str, settings: object) -> str:
    """A sha256 over weights, modules, tokenizer and settings, so that cached vectors of different models never mix.

    The library's name is included: two libraries give vectors of the same model that differ in the last digits.
    """
    digest = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    described = {
        "library": library,
        "modules": [(name, *_module_settings(module)) for name, module in model.named_modules() if name],
        "tokenizer": _tokenizer_rules(model.tokenizer),
        "settings": settings,
    }
    digest.update(json.dumps(described, sort_keys=True, default=str).encode())
    return digest.hexdigest()


def _module_settings(module: Any) -> tuple[str, object, object]:
    """A module's class, its settings as the library saves them, and its transformers configuration."""
    settings = module.get_config_dict() if hasattr(module, "get_config_dict") else None
    config: Any = getattr(module, "config", None)
    values = config.to_dict() if hasattr(config, "to_dict") else {}
    return type(module).__name__, settings, {key: value for key, value in values.items() if key not in _WITHOUT_EFFECT}


def _tokenizer_rules(tokenizer: Any) -> object:
    """A tokenizer's rules without truncation and padding, which every call sets anew."""
    if not hasattr(tokenizer, "backend_tokenizer"):  # a tokenizer in Python has no single file with its rules
        return type(tokenizer).__name__, tokenizer.get_vocab(), tokenizer.special_tokens_map
    rules: dict[str, object] = json.loads(tokenizer.backend_tokenizer.to_str())
    return {key: value for key, value in rules.items() if key not in ("truncation", "padding")}, tokenizer.truncation_side
