"""Read model folders of sentence-transformers, PyLate, Stanford ColBERT and plain Hugging Face, from disk or the Hub.

`quiver.retrieval.models.export` has one module per layout, which reads and writes it. The result is settings, encoder and tokenizer, of
which `quiver.retrieval.models.loading` makes models.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast, get_args

import torch

from quiver.encoder import Encoder, Tokenizer, load_encoder, optimize_for_inference
from quiver.encoder.checkpoints.folder import ADAPTER_CONFIG, base_folder, local_folder
from quiver.encoder.errors import InputError
from quiver.encoder.files import read_json, warn_once
from quiver.retrieval.models.bm25 import NAME
from quiver.retrieval.models.export.sentence_transformers import first_module, read_dense, read_multi_vector, read_pylate, read_tokenizer
from quiver.retrieval.models.export.stanford import load_stanford_encoder, read_stanford
from quiver.retrieval.models.options import FOLDERS_SETTINGS, ModelFolder, ModelOptions, is_onnx_export, is_stanford
from quiver.retrieval.records import Dtype

logger = logging.getLogger(__name__)

_RETRIEVAL = "Represent this sentence for searching relevant passages: "

PROMPTS: Mapping[str, tuple[str, str]] = {
    r"(multilingual-)?e5-(small|base|large)(-v2)?": ("query: ", "passage: "),
    r"multilingual-e5-large-instruct": (
        "Instruct: Given a web search query, retrieve relevant passages that answer the query\nQuery: ",
        "",
    ),
    r"bge-(small|base|large)-en(-v1\.5)?": (_RETRIEVAL, ""),
    r"bge-(small|base|large)-zh(-v1\.5)?": ("为这个句子生成表示以用于检索相关文章：", ""),  # noqa: RUF001
    r"mxbai-embed-(large|xsmall)-v1": (_RETRIEVAL, ""),
    r"snowflake-arctic-embed-(xs|s|m|m-v1\.5|l)": (_RETRIEVAL, ""),
    r"snowflake-arctic-embed-(m|l)-v2\.0": ("query: ", ""),
    r"nomic-embed-text-v1(\.5|-unsupervised)?|modernbert-embed-(base|large)": ("search_query: ", "search_document: "),
}
"""Name of a model (regular expression) -> prompts of queries and documents that its authors publish on its page."""


def warn_if_without_prompts(settings: ModelFolder, source: str | Path, options: ModelOptions) -> None:
    """Log a warning if a model needs prompts, by its name, and neither its folder nor the options have any."""
    name = Path(source).name.lower()
    published = next((prompts for pattern, prompts in PROMPTS.items() if re.fullmatch(pattern, name)), None)
    given = (options.query_prompt, options.document_prompt) != (None, None)
    if given or settings.query_prompt or settings.document_prompt or published is None:
        return
    wanted = " ".join(
        f"--{role}-prompt {json.dumps(prompt, ensure_ascii=False)}"
        for role, prompt in zip(("query", "document"), published, strict=True)
        if prompt
    )
    logger.warning("%s: this model was trained with prompts, and its folder has none; pass %s", source, wanted)


@dataclass(frozen=True)
class ModelParts:
    """A loaded model folder; a ``bare`` one has no settings of a retriever, so pooling and similarity are defaults."""

    settings: ModelFolder
    encoder: Encoder
    tokenizer: Tokenizer
    bare: bool = False


def read_model_folder(folder: Path) -> ModelFolder:
    """Read the settings of a folder; an InputError if something in it is not supported, or a file is missing or malformed."""
    if is_onnx_export(folder):
        raise InputError(f"{folder}: an ONNX export, which only searches indexes; here pass the model that it was exported from")
    if not any((folder / name).is_file() for name in ("modules.json", "config.json", ADAPTER_CONFIG)):
        raise InputError(f"{folder}: not a model folder: it has neither modules.json nor config.json")
    path = folder / "config_sentence_transformers.json"
    config = read_json(path) if path.is_file() else {}
    if not (folder / "modules.json").is_file() and is_stanford(folder):
        return read_stanford(folder)
    # PyLate and sentence-transformers <= 4 do not always write model_type.
    kind = config.get("model_type") or ("ColBERT" if "query_prefix" in config else "SentenceTransformer")
    readers = {"SentenceTransformer": read_dense, "ColBERT": read_pylate, "MultiVectorEncoder": read_multi_vector}
    if kind not in readers:
        raise InputError(f"{path}: model_type must be one of {', '.join(readers)}, got {kind!r}")
    return readers[kind](folder, config, path)


# Classes of transformers for other tasks than vectors, by their names. A masked-LM head is no task of its own: it is left out.
_CLASSIFIER, _OTHER_HEAD = "a cross-encoder or classifier", "a model with the head of another task"
_TASKS = {
    _CLASSIFIER: re.compile(r"ForSequenceClassification"),
    "a text generation model": re.compile(r"ForCausalLM|ForConditionalGeneration|ForSeq2Seq|LMHeadModel|DoubleHeadsModel"),
    _OTHER_HEAD: re.compile(r"For(\w*Classification|QuestionAnswering|MultipleChoice|NextSentencePrediction|\w*Regression|Reward\w*)"),
}
_ADAPTER_TASKS = {"SEQ_CLS": _CLASSIFIER, "TOKEN_CLS": _OTHER_HEAD, "QUESTION_ANS": _OTHER_HEAD}
_ADAPTER_TASKS |= dict.fromkeys(("CAUSAL_LM", "SEQ_2_SEQ_LM"), "a text generation model")
_CROSS_ENCODER, _SPARSE = "a cross-encoder of sentence-transformers", "a sparse encoder of sentence-transformers"
_SCORES_PAIRS = (
    "which scores pairs of texts, to re-rank, and has no vectors; it can be a teacher (quiver teacher-scores), but re-ranking with it"
    " is not supported yet"
)
_ADVICE = {_SPARSE: "which is not supported", _CLASSIFIER: _SCORES_PAIRS, _CROSS_ENCODER: _SCORES_PAIRS}


def other_task(folder: Path) -> str | None:
    """Say what a model folder is if it is not made for vectors: a cross-encoder, a classifier, a sparse encoder; None for a retriever.

    A folder with ``modules.json`` is what its modules say, whatever head its encoder was saved with. Without it, the class in config.json
    decides; a class that is not known, and that of a masked language model, may be a retriever.
    """
    modules, settings = folder / "modules.json", folder / "config_sentence_transformers.json"
    written = str(read_json(settings).get("model_type")) if settings.is_file() else ""
    types = modules.read_text(encoding="utf-8", errors="replace") if modules.is_file() else ""
    for name, kind, package in ((_CROSS_ENCODER, "CrossEncoder", ".cross_encoder."), (_SPARSE, "SparseEncoder", ".sparse_encoder.")):
        if written == kind or package in types:
            return name
    return None if modules.is_file() else _task_of_class(folder)


def _task_of_class(folder: Path) -> str | None:
    """`other_task` of a folder without ``modules.json``."""
    adapter, path = folder / ADAPTER_CONFIG, base_folder(folder) / "config.json"
    adapted = _ADAPTER_TASKS.get(str(read_json(adapter).get("task_type"))) if adapter.is_file() else None
    config = read_json(path) if path.is_file() else {}
    # Keys of sentence-transformers 4 and 5, and of earlier versions.
    if adapted is not None or {"sentence_transformers", "sbert_ce_default_activation_function"} & config.keys():
        return adapted or _CROSS_ENCODER
    names = [str(name) for name in config.get("architectures") or []]
    found = [next((task for task, pattern in _TASKS.items() if pattern.search(name)), None) for name in names]
    return found[0] if found and None not in found else None  # some name the bare encoder beside a class with a head


def is_cross_encoder(folder: Path) -> bool:
    """Test whether a model folder scores pairs of texts: a cross-encoder of sentence-transformers, or a sequence classifier."""
    return other_task(folder) in (_CROSS_ENCODER, _CLASSIFIER)


def check_is_retriever(source: str | Path, folder: Path) -> None:
    """Check that the model in a folder, named ``source``, is not made for another task; an InputError says for which one it is."""
    if (task := other_task(folder)) is not None:
        advice = _ADVICE.get(task, "which has no vectors")
        raise InputError(f"{source}: {task}, {advice}; pass a bi-encoder, a ColBERT model or an encoder without a head")


def load_parts(
    source: str | Path,
    *,
    revision: str | None = None,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    to_train: bool = False,
) -> ModelParts:
    """Load settings, encoder and tokenizer of a model folder from disk or from the Hub; an InputError if it is not a supported model.

    Lengths that a folder sets beyond the encoder's positions become the number of positions, with a warning. With ``to_train``, the encoder
    of a model for another task, such as a cross-encoder, is the start of training a retriever, also with a warning.
    """
    folder = local_folder(source, revision=revision)
    task = other_task(folder) if to_train else None
    if task is None:
        check_is_retriever(source, folder)
        settings = read_model_folder(folder)
    else:
        logger.warning("%s: %s; training starts from its encoder, without its head", source, task)
        settings = ModelFolder("dense", first_module(folder))
    load = load_stanford_encoder if is_stanford(settings.encoder_folder) else load_encoder
    encoder = load(settings.encoder_folder, dtype=dtype, device=device)
    return ModelParts(
        _within_positions(settings, encoder.config.max_positions, source),
        encoder,
        read_tokenizer(settings.encoder_folder),
        bare=task is not None or (not (folder / "modules.json").is_file() and settings.kind == "dense"),
    )


def _within_positions(settings: ModelFolder, positions: int, source: str | Path) -> ModelFolder:
    """Limit a folder's lengths to the encoder's positions.

    RoBERTa's folders often say 514, the rows of its position table: two of them are no positions.
    """
    colbert, lengths = settings.colbert, ("query_length", "document_length", "expanded_length")
    given: dict[str, int | None] = {"max_seq_length": settings.max_length}
    if settings.kind == "colbert":
        given |= {name: getattr(colbert, name) for name in lengths}
    too_long = {name: length for name, length in given.items() if length is not None and length > positions}
    if not too_long:
        return settings
    named = ", ".join(f"{name} {length}" for name, length in too_long.items())
    warn_once(f"{source}: limited {named} to the encoder's {positions} positions")
    max_length = positions if "max_seq_length" in too_long else settings.max_length
    limited: dict[str, Any] = {name: positions for name in lengths if name in too_long}
    return replace(settings, max_length=max_length, colbert=replace(colbert, **limited))


def warn_if_bare(parts: ModelParts, source: str | Path) -> None:
    """Log a warning with the assumed pooling and similarity if the folder is that of a bare encoder."""
    if parts.bare:
        logger.warning("%s: a bare encoder; using mean pooling and cosine similarity, as sentence-transformers does", source)


def default_device() -> str:
    """Default device of a model: ``cuda`` if available, otherwise ``cpu``."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def default_dtype(device: str) -> Dtype:
    """Default dtype of a model for inference: float32 on a CPU, bfloat16 on a GPU, float16 below compute capability 8.0."""
    if torch.device(device).type != "cuda":
        return "float32"
    return "bfloat16" if torch.cuda.get_device_capability(device) >= (8, 0) else "float16"


def check_device(device: str) -> str:
    """Return ``device``: ``cpu``, ``cuda`` or ``cuda:1``; an InputError for another kind, or one that this machine does not have."""
    kind, _, number = device.partition(":")
    if kind not in ("cpu", "cuda") or (number and not number.isdecimal()) or (kind == "cpu" and number):
        raise InputError(f"device must be cpu, cuda or cuda:NUMBER, got {device!r}")
    count = torch.cuda.device_count() if kind == "cuda" else 1
    if int(number or 0) >= count:
        raise InputError(f"device {device} is not available: PyTorch finds {count or 'no'} GPU{'s' * (count != 1)} here")
    return device


def check_is_model(source: str | Path) -> None:
    """Check that a source is not the name of BM25; an InputError if it is."""
    if str(source) == NAME:
        raise InputError(f"{NAME} finds words and has no vectors; pass a model here, or ./{NAME} for a folder of that name")


def load_for_inference(
    source: str | Path,
    revision: str | None,
    dtype: Dtype | torch.dtype | None,
    device: str | None,
    options: ModelOptions = FOLDERS_SETTINGS,
) -> ModelParts:
    """Load a model folder, warn of a bare encoder and, on a CPU, prepack its weights."""
    check_is_model(source)
    wanted = None if dtype is None else _dtype_name(dtype)
    # int8 runs on CPUs only, so a machine with a GPU takes its CPU for it.
    device = check_device(device or ("cpu" if wanted == "int8" else default_device()))
    name = wanted or default_dtype(device)
    if name == "int8" and device != "cpu":
        raise InputError(f"dtype int8 is for CPUs, and the device is {device}; use bfloat16 there, or device cpu")
    weights = torch.float32 if name == "int8" else getattr(torch, name)
    parts = load_parts(source, revision=revision, dtype=weights, device=device)
    warn_if_bare(parts, source)
    warn_if_without_prompts(parts.settings, source, options)
    parts = replace(parts, settings=options.applied(parts.settings))
    if device == "cpu":
        optimize_for_inference(parts.encoder, precision="int8" if name == "int8" else "float")
    return parts


def dtype_of(encoder: Encoder) -> Dtype:
    """Return the name of the dtype of an encoder's weights; an InputError if models do not run in it."""
    return "int8" if encoder.prepacked == "int8" else _dtype_name(encoder.embeddings.tokens.weight.dtype)


def _dtype_name(dtype: str | torch.dtype) -> Dtype:
    name = str(dtype).removeprefix("torch.")
    if name not in get_args(Dtype):
        raise InputError(f"dtype must be one of {', '.join(get_args(Dtype))}, got {name!r}")
    return cast(Dtype, name)
