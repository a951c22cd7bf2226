"""Load model folders of sentence-transformers, PyLate, Stanford ColBERT and plain Hugging Face, from disk or the Hub.

`quiver.retrieval.models.export` has one module per layout, which reads and writes it. The readers return `ModelFolder`, so they are
imported inside the functions that call them.
"""

from __future__ import annotations

import copy
import difflib
import json
import logging
import platform
import re
import string
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast, get_args

import torch
from torch import nn

from quiver.encoder import Encoder, Tokenizer, load_encoder, optimize_for_inference
from quiver.encoder.checkpoints.folder import ADAPTER_CONFIG, local_folder
from quiver.encoder.checkpoints.peft import base_folder
from quiver.encoder.errors import InputError, first_line
from quiver.encoder.files import read_json, warn_once
from quiver.encoder.progress import Advance, progress_bar
from quiver.retrieval.display import html_table
from quiver.retrieval.models.batches import BatchSize
from quiver.retrieval.models.bm25 import BM25, NAME
from quiver.retrieval.models.encoding import Devices, EncodingJob, Texts, check_texts
from quiver.retrieval.models.onnx_model import OnnxModel, is_onnx_export
from quiver.retrieval.models.options import FOLDERS_SETTINGS, ModelOptions
from quiver.retrieval.models.pooling import Projection
from quiver.retrieval.records import PLURALS, DenseModel, Dtype, ModelCard, TokenModel

if TYPE_CHECKING:
    from typing_extensions import Self

    from quiver.retrieval.cluster.executors import LocalProcesses
    from quiver.retrieval.models.biencoder import BiEncoder
    from quiver.retrieval.models.colbert import ColBERT

logger = logging.getLogger(__name__)

Kind = Literal["dense", "colbert"]

STANFORD_ARCHITECTURE = "HF_ColBERT"
"""``architectures`` of a config.json that Stanford's ColBERT has written."""


@dataclass(frozen=True)
class ColBERTSettings:
    """How a ColBERT model tokenizes queries and documents. The defaults are PyLate's.

    Attributes:
        query_prefix: Token inserted after [CLS] of a query; empty for none.
        document_prefix: Token inserted after [CLS] of a document; empty for none.
        query_length: Maximum tokens of a query, prefix and special tokens included; with expansion, the length of every query.
        document_length: Maximum tokens of a document, prefix and special tokens included.
        query_expansion: Pad queries with [MASK] tokens that have vectors and are scored.
        attend_to_expansion: Let the other tokens attend to the expansion tokens.
        expanded_length: Length to which queries are expanded if it is less than ``query_length``; None for ``query_length``.
        skiplist: Tokens whose document vectors are dropped.
    """

    query_prefix: str = "[Q] "
    document_prefix: str = "[D] "
    query_length: int = 32
    document_length: int = 180
    query_expansion: bool = True
    attend_to_expansion: bool = False
    expanded_length: int | None = None
    skiplist: tuple[str, ...] = tuple(string.punctuation)

    def check_lengths(self, path: Path) -> None:
        """Check that both lengths leave room for [CLS], a prefix, a token and [SEP].

        Args:
            path: Settings file, for the error.

        Raises:
            InputError: A length is less than 4.
        """
        if min(self.query_length, self.document_length) < 4:
            raise InputError(f"{path}: query_length and document_length must be >= 4, got {self.query_length} and {self.document_length}")


@dataclass(frozen=True)
class ModelFolder:
    """Settings of a model folder: everything but the weights and the tokenizer.

    Attributes:
        kind: ``dense`` or ``colbert``.
        encoder_folder: Folder of config.json, the encoder's weights and the tokenizer.
        max_length: Maximum tokens of a text; None if the folder sets no limit.
        lower_case: Lower-case texts before tokenizing.
        pooling: A key of `quiver.retrieval.models.pooling.POOLINGS`.
        include_prompt: Pool the prompt's tokens too.
        projections: Dense modules in order.
        normalize: Scale vectors to length 1 at the end.
        query_prompt: Text put before every query; for ColBERT after the prefix token.
        document_prompt: Text put before every document.
        similarity: ``cosine`` or ``dot`` (dense), ``maxsim`` (ColBERT).
        colbert: Settings of ColBERT models; ignored for dense models.
        prompts: Prompts with other names than ``query`` and ``document`` (dense).
        default_prompt_name: Name of the prompt of texts that are neither queries nor documents; None for no prompt (dense).
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
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt_name: str | None = None


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


def published_prompts(source: str | Path) -> tuple[str, str] | None:
    """The prompts that the authors of a model publish, by the name of its folder or its hub id; None if none are known.

    Example:
        >>> published_prompts("intfloat/e5-base-v2")
        ('query: ', 'passage: ')
    """
    name = Path(source).name.lower()
    return next((prompts for pattern, prompts in PROMPTS.items() if re.fullmatch(pattern, name)), None)


def warn_if_without_prompts(settings: ModelFolder, source: str | Path, options: ModelOptions) -> None:
    """Log a warning if a model needs prompts and neither its folder nor the options have any."""
    given = (options.query_prompt, options.document_prompt) != (None, None)
    if given or settings.query_prompt or settings.document_prompt or (published := published_prompts(source)) is None:
        return
    wanted = " ".join(
        f"--{role}-prompt {json.dumps(prompt, ensure_ascii=False)}"
        for role, prompt in zip(("query", "document"), published, strict=True)
        if prompt
    )
    logger.warning("%s: this model was trained with prompts, and its folder has none; pass %s", source, wanted)


@dataclass(frozen=True)
class ModelParts:
    """A loaded model folder.

    Attributes:
        settings: Settings of the folder.
        encoder: The encoder with its weights.
        tokenizer: The tokenizer.
        bare: The folder holds no settings of a retriever, so pooling and similarity are defaults.
    """

    settings: ModelFolder
    encoder: Encoder
    tokenizer: Tokenizer
    bare: bool = False


def is_stanford(folder: Path) -> bool:
    """Test whether config.json names Stanford's class."""
    path = folder / "config.json"
    return path.is_file() and read_json(path).get("architectures") == [STANFORD_ARCHITECTURE]


def read_model_folder(folder: Path) -> ModelFolder:
    """Read the settings of a sentence-transformers, PyLate, Stanford ColBERT or plain Hugging Face folder.

    Raises:
        InputError: A module, pooling or similarity is not supported, or a file is missing or malformed.
    """
    from quiver.retrieval.models.export.pylate import read_pylate
    from quiver.retrieval.models.export.sentence_transformers import read_dense, read_multi_vector
    from quiver.retrieval.models.export.stanford import read_stanford

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
_TASKS = {
    "a cross-encoder or classifier": re.compile(r"ForSequenceClassification"),
    "a text generation model": re.compile(r"ForCausalLM|ForConditionalGeneration|ForSeq2Seq|LMHeadModel|DoubleHeadsModel"),
    "a model with the head of another task": re.compile(
        r"For(\w*Classification|QuestionAnswering|MultipleChoice|NextSentencePrediction|\w*Regression|Reward\w*)"
    ),
}
_ADAPTER_TASKS = {"SEQ_CLS": "a cross-encoder or classifier", "CAUSAL_LM": "a text generation model"}
_ADAPTER_TASKS |= {"SEQ_2_SEQ_LM": "a text generation model", **dict.fromkeys(("TOKEN_CLS", "QUESTION_ANS"), list(_TASKS)[-1])}
_CROSS_ENCODER, _SPARSE = "a cross-encoder of sentence-transformers", "a sparse encoder of sentence-transformers"
_ADVICE = {
    _SPARSE: "which is not supported",
    **dict.fromkeys(
        ("a cross-encoder or classifier", _CROSS_ENCODER),
        "which scores pairs of texts, to re-rank, and has no vectors; it can be a teacher (quiver teacher-scores), but re-ranking with it"
        " is not supported yet",
    ),
}


def other_task(folder: Path) -> str | None:
    """Say what a model folder is if it is not made for vectors: a cross-encoder, a classifier, a sparse encoder; None for a retriever.

    A folder with ``modules.json`` is what its modules say, whatever head its encoder was saved with. Without it, the class in config.json
    decides; a class that is not known, and that of a masked language model, may be a retriever.
    """
    modules, settings = folder / "modules.json", folder / "config_sentence_transformers.json"
    written = str(read_json(settings).get("model_type")) if settings.is_file() else ""
    types = modules.read_text(encoding="utf-8", errors="replace") if modules.is_file() else ""
    if written == "CrossEncoder" or ".cross_encoder." in types:
        return _CROSS_ENCODER
    if written == "SparseEncoder" or ".sparse_encoder." in types:
        return _SPARSE
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
    return other_task(folder) in (_CROSS_ENCODER, "a cross-encoder or classifier")


def check_is_retriever(source: str | Path, folder: Path) -> None:
    """Check that a model is not made for another task.

    Args:
        source: Folder or Hub id, for the error.
        folder: The local folder.

    Raises:
        InputError: It is; says what it is.
    """
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
    """Load settings, encoder and tokenizer of a model folder from disk or from the Hub.

    Lengths that a folder sets beyond the encoder's positions become the number of positions, with a warning.

    Args:
        source: Folder or Hub id.
        revision: Branch, tag or commit on the Hub.
        dtype: Dtype of the encoder's weights in memory.
        device: Device of the weights.
        to_train: Take the encoder of a model for another task too, such as a cross-encoder, as the start of training a retriever; with a
            warning.

    Raises:
        InputError: The folder is not a model, or a model that Quiver does not support.
    """
    from quiver.retrieval.models.export.sentence_transformers import first_module, read_tokenizer
    from quiver.retrieval.models.export.stanford import load_stanford_encoder

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
    """Log a warning with the assumed pooling and similarity if the folder is a bare encoder."""
    if parts.bare:
        logger.warning("%s: a bare encoder; using mean pooling and cosine similarity, as sentence-transformers does", source)


def default_device() -> str:
    """Default device of a model: ``cuda`` if available, otherwise ``cpu``."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def default_dtype(device: str) -> Dtype:
    """Default dtype of a model for inference on a device.

    On a GPU it is bfloat16, which flash attention needs; GPUs below compute capability 8.0 have neither of the two and use float16. On a
    CPU it is float32.

    Example:
        >>> default_dtype("cpu")
        'float32'
    """
    if torch.device(device).type != "cuda":
        return "float32"
    return "bfloat16" if torch.cuda.get_device_capability(device) >= (8, 0) else "float16"


def check_device(device: str) -> str:
    """Return a device on which models can run here.

    Args:
        device: ``cpu``, ``cuda`` or ``cuda:1``.

    Raises:
        InputError: It is no device of these kinds, or this machine does not have it.

    Example:
        >>> check_device("cpu")
        'cpu'
    """
    kind, _, number = device.partition(":")
    if kind not in ("cpu", "cuda") or (number and not number.isdecimal()) or (kind == "cpu" and number):
        raise InputError(f"device must be cpu, cuda or cuda:NUMBER, got {device!r}")
    count = torch.cuda.device_count() if kind == "cuda" else 1
    if int(number or 0) >= count:
        raise InputError(f"device {device} is not available: PyTorch finds {count or 'no'} GPU{'s' * (count != 1)} here")
    return device


def check_is_model(source: str | Path) -> None:
    """Check that a source is not the name of BM25.

    Raises:
        InputError: It is.
    """
    if str(source) == NAME:
        raise InputError(f"{NAME} finds words and has no vectors; pass a model here, or ./{NAME} for a folder of that name")


def _load_for_inference(
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


def with_dtype(model: BiEncoder | ColBERT, dtype: Dtype) -> BiEncoder | ColBERT:
    """Return a model in another dtype, as `load_model` would load it on a CPU; the given one is not changed.

    Args:
        model: A model in float32, not prepacked.
        dtype: Dtype of the copy.
    """
    if dtype == "float32":
        return model
    encoder = copy.deepcopy(model.encoder).to("cpu", torch.float32 if dtype == "int8" else getattr(torch, dtype))
    if dtype == "int8":
        optimize_for_inference(encoder, precision="int8")
    return type(model).from_parts(encoder, model.tokenizer, model.settings, source=model.source)


def dtype_of(encoder: Encoder) -> Dtype:
    """Return the name of the dtype of an encoder's weights.

    Raises:
        InputError: Models do not run in it.
    """
    return "int8" if encoder.prepacked == "int8" else _dtype_name(encoder.embeddings.tokens.weight.dtype)


def _dtype_name(dtype: str | torch.dtype) -> Dtype:
    name = str(dtype).removeprefix("torch.")
    if name not in get_args(Dtype):
        raise InputError(f"dtype must be one of {', '.join(get_args(Dtype))}, got {name!r}")
    return cast(Dtype, name)


class PretrainedModel(ABC):
    """Base class of `BiEncoder` and `ColBERT`: an encoder, its tokenizer, settings and projections.

    Args:
        model_name_or_path: Folder or Hub id.
        revision: Branch, tag or commit on the Hub.
        dtype: Dtype of the encoder's weights in memory; None for that of `default_dtype`. Vectors are float32 in every case.
        device: ``cpu``, ``cuda`` or ``cuda:1``; None for a GPU if available. On a CPU the model is for inference only.
        batch_tokens: Tokens per batch; None for 4,096 on a CPU, and by free memory on a GPU, up to 65,536.

    Raises:
        InputError: The folder is not a supported model of this class, or the device is not available.
    """

    def __init__(
        self,
        model_name_or_path: str | Path,
        *,
        revision: str | None = None,
        dtype: Dtype | torch.dtype | None = None,
        device: str | torch.device | None = None,
        batch_tokens: int | None = None,
        options: ModelOptions = FOLDERS_SETTINGS,
    ) -> None:
        parts = _load_for_inference(model_name_or_path, revision, dtype, None if device is None else str(device), options)
        self._assemble(parts.encoder, parts.tokenizer, parts.settings, str(model_name_or_path), batch_tokens)

    @classmethod
    def from_parts(
        cls, encoder: Encoder, tokenizer: Tokenizer, settings: ModelFolder, *, source: str = "", batch_tokens: int | None = None
    ) -> Self:
        """Make a model of an encoder, its tokenizer and settings.

        Args:
            encoder: The native encoder.
            tokenizer: The encoder's tokenizer.
            settings: Settings of the model folder.
            source: Folder or Hub id, for manifests and reports.
            batch_tokens: Tokens per batch; None to choose, see `quiver.retrieval.models.batches.BatchSize`.

        Raises:
            InputError: The settings are those of the other class, the parts do not fit each other, or ``batch_tokens`` is less than 1.

        :meta private:
        """
        model = cls.__new__(cls)
        model._assemble(encoder, tokenizer, settings, source, batch_tokens)
        return model

    def _assemble(self, encoder: Encoder, tokenizer: Tokenizer, settings: ModelFolder, source: str, batch_tokens: int | None) -> None:
        """Check the parts and set the attributes; both ways to make a model end here."""
        name = source or "this model"
        if batch_tokens is not None and batch_tokens < 1:
            raise InputError(f"batch_tokens must be >= 1, got {batch_tokens}")
        if len(tokenizer) > encoder.config.vocab_size:
            raise InputError(
                f"{name}: the tokenizer has {len(tokenizer)} tokens, but the encoder's vocabulary only {encoder.config.vocab_size}"
            )
        self.encoder = encoder
        self.tokenizer = tokenizer
        self.settings = settings
        self.source = source
        self.batch_tokens = batch_tokens
        self._batch_size: BatchSize | None = None
        self.projections: nn.Sequential = projection_stack(settings, encoder.config.hidden_size, where=name).to(encoder.device)

    @property
    @abstractmethod
    def card(self) -> ModelCard:
        """Facts about the model for indexes and reports."""

    @property
    def dim(self) -> int:
        """Vector width d.

        Example:
            >>> from quiver import ColBERT
            >>> model = ColBERT("lightonai/GTE-ModernColBERT-v1")
            >>> model.dim
            128
        """
        if self.settings.projections:
            return self.settings.projections[-1].linear.out_features
        return self.encoder.config.hidden_size

    def get_sentence_embedding_dimension(self) -> int:
        """Return the vector width d; sentence-transformers' name up to version 5.

        Example:
            >>> from quiver import BiEncoder
            >>> model = BiEncoder("sentence-transformers/all-MiniLM-L6-v2")
            >>> model.get_sentence_embedding_dimension()
            384
        """
        return self.dim

    def get_embedding_dimension(self) -> int:
        """Return the vector width d; sentence-transformers' name from version 6 on.

        Example:
            >>> from quiver import BiEncoder
            >>> model = BiEncoder("sentence-transformers/all-MiniLM-L6-v2")
            >>> model.get_embedding_dimension()
            384
        """
        return self.dim

    @property
    def device(self) -> torch.device:
        """Device of the weights.

        Example:
            >>> from quiver import BiEncoder
            >>> model = BiEncoder("sentence-transformers/all-MiniLM-L6-v2", device="cpu")
            >>> model.device
            device(type='cpu')
        """
        return self.encoder.device

    def to(self, device: str | torch.device) -> Self:
        """Move the model to another device, in the same dtype.

        Raises:
            InputError: The device is not available, or the weights are packed for a CPU, as those of a model that was opened on one are.

        Example:
            >>> from quiver import BiEncoder
            >>> model = BiEncoder("sentence-transformers/all-MiniLM-L6-v2", device="cpu")
            >>> model.to("cpu") is model
            True
        """
        wanted = torch.device(check_device(str(device)))
        here = self.encoder.device
        if wanted.type == here.type and (wanted.index or 0) == (here.index or 0):
            return self
        if self.encoder.prepacked:
            name = f"{type(self).__name__}({self.source or '...'!r}, device={str(device)!r})"
            raise InputError(f"the weights of this model are packed for the CPU; open it with {name}")
        self.encoder.to(wanted)
        self.projections.to(wanted)
        return self

    @property
    def batch_size(self) -> BatchSize:
        """Tokens per batch on the device where the encoder is; chosen at the first use, and less after memory ran out there.

        :meta private:
        """
        if self._batch_size is None or self._batch_size.device != self.encoder.device:
            self._batch_size = BatchSize.choose(self.encoder, self.dim, self.batch_tokens)
        return self._batch_size

    def start_multi_process_pool(self, target_devices: Sequence[str] | None = None) -> LocalProcesses:
        """Name the processes of ``encode(pool=...)``: one per device.

        The processes start with each call of `encode` and end with it, so a pool is worth its start-up (seconds) for long lists only. They
        load the model from its folder or the Hub.

        Args:
            target_devices: Device of each process; None for all GPUs, or four processes without a GPU.

        Raises:
            InputError: A device is not available.

        Example:
            >>> from quiver import BiEncoder
            >>> model = BiEncoder("sentence-transformers/all-MiniLM-L6-v2")
            >>> pool = model.start_multi_process_pool(["cpu", "cpu"])
            >>> pool.workers
            2
        """
        from quiver.retrieval.cluster.executors import LocalProcesses

        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        devices = [f"cuda:{number}" for number in range(count)] or ["cpu"] * 4
        return LocalProcesses([check_device(device) for device in (devices if target_devices is None else target_devices)])

    def stop_multi_process_pool(self, pool: LocalProcesses) -> None:
        """Do nothing: the processes ended with the calls of `encode`. It is there for code written for sentence-transformers.

        Example:
            >>> from quiver import BiEncoder
            >>> model = BiEncoder("sentence-transformers/all-MiniLM-L6-v2")
            >>> model.stop_multi_process_pool(model.start_multi_process_pool(["cpu"]))
        """
        del pool

    def _vectors(
        self,
        sentences: Texts,
        job: EncodingJob,
        devices: Devices | None,
        pool: LocalProcesses | None,
        chunk_size: int | None,
        progress: bool,
    ) -> Any:
        """Encode the texts of a public call in this process or in others: (B, d), or B arrays of (n_i, d)."""
        if chunk_size is not None and chunk_size < 1:
            raise InputError(f"chunk_size must be >= 1, got {chunk_size}")
        if not hasattr(sentences, "__iter__"):
            raise InputError(f"a text or a list of texts is encoded, got {sentences!r}")
        texts = [sentences] if isinstance(sentences, str) else list(sentences)
        check_texts(texts)
        if isinstance(devices, str | torch.device):
            self.to(devices)
        elif devices is not None and pool is None:
            pool = self.start_multi_process_pool([str(each) for each in devices])
        with progress_bar(PLURALS[job.role], len(texts), enabled=progress) as advance:
            if pool is None:
                return self._encode(texts, job, advance)
            size = chunk_size or max(1, min(-(-len(texts) // pool.workers // 10), 5000))
            chunks = [(start, texts[start : start + size]) for start in range(0, len(texts), size)]
            vectors = self._empty(len(texts), job)
            task = EncodingTask(WorkerModel.of(self), job, pool.threads(torch.get_num_threads()))
            with closing(pool.run(task, chunks, advance=advance)) as done:
                for (start, chunk), found in done:
                    vectors[start : start + len(chunk)] = found
        return vectors

    @abstractmethod
    def _encode(self, texts: Sequence[str], job: EncodingJob, advance: Advance) -> Any:
        """Encode texts in this process: (B, d) float32, or B arrays of (n_i, d)."""

    @abstractmethod
    def _empty(self, count: int, job: EncodingJob) -> Any:
        """Room for the vectors of some texts: an array, or a list."""

    @abstractmethod
    def save_pretrained(self, path: str | Path) -> None:
        """Save the model as a folder."""

    def push_to_hub(
        self,
        repo_id: str,
        *,
        token: str | None = None,
        private: bool | None = None,
        commit_message: str | None = None,
        exist_ok: bool = False,
        revision: str | None = None,
        create_pr: bool = False,
    ) -> str:
        """Upload the folder that `save_pretrained` writes to a repository on the Hugging Face Hub.

        Args:
            repo_id: Repository, ``owner/name``; created if it does not exist.
            token: Token with write access; None for the one that ``hf auth login`` stored.
            private: Make a new repository private; None for the owner's default.
            commit_message: Message of the commit; None for ``Add NAME model``.
            exist_ok: Write into a repository that exists; otherwise that is an error.
            revision: Branch, created if missing; None for the main branch.
            create_pr: Open a pull request instead of committing to the branch.

        Returns:
            Address of the commit, or of the pull request's commit.

        Raises:
            InputError: The Hub refuses the upload (the message says why).

        Example:
            >>> from quiver import BiEncoder
            >>> model = BiEncoder("sentence-transformers/all-MiniLM-L6-v2")
            >>> model.push_to_hub("owner/name")  # doctest: +SKIP
        """
        from huggingface_hub import HfApi
        from huggingface_hub.errors import HfHubHTTPError, HFValidationError

        api = HfApi(token=token)
        try:
            name = api.create_repo(repo_id, private=private, exist_ok=exist_ok or create_pr).repo_id
            if revision is not None:
                api.create_branch(name, branch=revision, exist_ok=True)
            with tempfile.TemporaryDirectory() as folder:
                self.save_pretrained(Path(folder) / "model")
                commit = api.upload_folder(
                    repo_id=name,
                    folder_path=Path(folder) / "model",
                    commit_message=commit_message or f"Add {type(self).__name__} model",
                    revision=revision,
                    create_pr=create_pr,
                )
        except (HfHubHTTPError, HFValidationError) as error:
            raise InputError(f"{repo_id}: {first_line(error)}") from error
        return str(commit.commit_url)

    def _described(self) -> list[tuple[str, str]]:
        """Facts for people: name and value."""
        return [("model", self.source or "(made of parts)"), ("vectors", f"{self.dim} dimensions, {self.settings.similarity}")]

    def __repr__(self) -> str:
        facts = [*self._described(), ("weights", f"{dtype_of(self.encoder)} on {self.device}")]
        return f"{type(self).__name__}({'; '.join(f'{name}: {value}' for name, value in facts)})"

    def _repr_html_(self) -> str:
        """Table for notebooks."""
        facts = [*self._described(), ("weights", f"{dtype_of(self.encoder)} on {self.device}")]
        return html_table((type(self).__name__, ""), facts)


def load_model(
    source: str | Path,
    *,
    revision: str | None = None,
    dtype: Dtype | torch.dtype | None = None,
    device: str | None = None,
    batch_tokens: int | None = None,
    options: ModelOptions = FOLDERS_SETTINGS,
) -> BiEncoder | ColBERT:
    """Load a bi-encoder or a ColBERT model from a folder or the Hub; the checkpoint decides which.

    The arguments are those of `PretrainedModel`; ``options`` replace settings of the folder.

    Raises:
        InputError: The folder is not a supported model.
    """
    from quiver.retrieval.models.biencoder import BiEncoder

    if difflib.get_close_matches(str(source).lower(), [NAME]) and not Path(source).exists():
        raise InputError(f"{source}: no such model; did you mean {NAME}?")
    model = build_model(_load_for_inference(source, revision, dtype, device, options), source, batch_tokens=batch_tokens)
    if isinstance(model, BiEncoder):
        if options.truncate_dim is not None and options.truncate_dim > model.dim:
            raise InputError(f"{source}: its vectors have {model.dim} dimensions, fewer than truncate_dim (--truncate-dim)")
        model.truncate_dim = options.truncate_dim
    return model


def load_described_model(
    card: ModelCard, source: str | Path, *, device: str | None = None, batch_tokens: int | None = None
) -> BiEncoder | ColBERT:
    """Load a model with the dtype, prompts, lengths and vector width of a card.

    Args:
        card: Card of the model, as an index stores it.
        source: Folder or Hub id.
        device: As in `load_model`.
        batch_tokens: As in `load_model`.

    Raises:
        InputError: The folder is not a supported model.
    """
    loaded = load_model(source, dtype=card.dtype, device=device, batch_tokens=batch_tokens, options=_card_prompts(card))
    return _with_card(loaded, card)


def _card_prompts(card: ModelCard) -> ModelOptions:
    """The prompts of a bi-encoder as options, so that no warning asks for others; those of ColBERT contain its prefixes."""
    return ModelOptions(query_prompt=card.query_prompt, document_prompt=card.document_prompt) if card.kind == "dense" else FOLDERS_SETTINGS


def _with_card(model: BiEncoder | ColBERT, card: ModelCard) -> BiEncoder | ColBERT:
    """Give a model the settings that its owner changed when or after loading it, as its card has them."""
    from quiver.retrieval.models.biencoder import BiEncoder
    from quiver.retrieval.models.colbert import ColBERT

    in_reach = max(card.query_length, card.document_length) <= model.encoder.config.max_positions
    if isinstance(model, ColBERT) and card.kind == "colbert" and in_reach:
        colbert = model.settings.colbert
        query, document = card.query_prompt.removeprefix(colbert.query_prefix), card.document_prompt.removeprefix(colbert.document_prefix)
        settings = ModelOptions(card.query_length, card.document_length, query, document).applied(model.settings)
        if settings != model.settings:
            parts = model.encoder, model.tokenizer, settings
            return ColBERT.from_parts(*parts, source=model.source, batch_tokens=model.batch_tokens)

    if isinstance(model, BiEncoder) and card.kind == "dense":
        prompts = {"query": card.query_prompt, "document": card.document_prompt}
        model.prompts = {**model.prompts, **prompts}
        if in_reach:
            model.max_seq_length = card.document_length
        if card.dim < model.dim:
            model.truncate_dim = card.dim
        if card.similarity in ("cosine", "dot"):
            model.similarity_fn_name = card.similarity
    return model


def build_model(parts: ModelParts, source: str | Path, *, batch_tokens: int | None = None) -> BiEncoder | ColBERT:
    """Make a bi-encoder or a ColBERT model of loaded parts."""
    from quiver.retrieval.models.biencoder import BiEncoder
    from quiver.retrieval.models.colbert import ColBERT

    model: type[BiEncoder] | type[ColBERT] = ColBERT if parts.settings.kind == "colbert" else BiEncoder
    return model.from_parts(parts.encoder, parts.tokenizer, parts.settings, source=str(source), batch_tokens=batch_tokens)


def with_absolute_source(card: ModelCard) -> ModelCard:
    """Return the card with a local folder's path made absolute, so that other processes can load the model; links keep their names."""
    source = Path(card.source)
    if not card.source or card.kind == "bm25" or not source.is_dir():
        return card
    return replace(card, source=str(source.resolve() if ".." in source.parts else source.absolute()))


@dataclass(frozen=True)
class WorkerModel:
    """How another process, possibly on another machine, loads the same model; its device is the worker's own.

    Attributes:
        card: Card of the model.
        batch_tokens: Tokens per batch; None to choose by the worker's device.
    """

    card: ModelCard
    batch_tokens: int | None = None

    @classmethod
    def of(cls, model: DenseModel | TokenModel | PretrainedModel) -> WorkerModel:
        """Describe a loaded model."""
        batch_tokens = model.batch_tokens if isinstance(model, PretrainedModel) else None
        return cls(with_absolute_source(model.card), batch_tokens)

    def load(self) -> BiEncoder | ColBERT | OnnxModel | BM25:
        """Load the model.

        Raises:
            InputError: The model cannot be loaded there, or has another fingerprint.
        """
        card = self.card
        if card.kind == "bm25":
            return BM25()
        if card.library != "quiver":
            raise InputError(f"{card.source}: workers cannot run {card.library} models; use --library quiver, or encode without workers")
        if is_onnx_export(card.source):
            model: BiEncoder | ColBERT | OnnxModel = OnnxModel(card.source, batch_tokens=self.batch_tokens)
        else:
            model = load_described_model(card, card.source, batch_tokens=self.batch_tokens)
        if model.card.fingerprint != card.fingerprint:
            raise InputError(
                f"{card.source}: the model on {platform.node()} has the fingerprint {model.card.fingerprint[:12]}, expected "
                f"{card.fingerprint[:12]}; all machines need the same model files"
            )
        return model


@dataclass(frozen=True)
class EncodingTask:
    """Encodes chunks of texts in a worker; an item is the number of its first text, and the texts."""

    model: WorkerModel
    job: EncodingJob
    threads: int

    def open(self, advance: Advance) -> Callable[[tuple[int, list[str]]], Any]:
        """See `quiver.retrieval.records.WorkerTask`."""
        torch.set_num_threads(self.threads)
        model = self.model.load()
        if not isinstance(model, PretrainedModel):
            raise InputError(f"{model.card.source}: not a model that encodes texts")
        return lambda chunk: model._encode(chunk[1], self.job, advance)


def projection_stack(settings: ModelFolder, width: int, *, where: str) -> nn.Sequential:
    """Chain the folder's Dense modules.

    Args:
        settings: Settings of the folder.
        width: Input width, D.
        where: Model name for the error.

    Raises:
        InputError: The widths of two successive modules differ.
    """
    for number, projection in enumerate(settings.projections, start=1):
        if projection.linear.in_features != width:
            raise InputError(f"{where}: Dense module {number} expects {projection.linear.in_features} features, its input has {width}")
        width = projection.linear.out_features
    return nn.Sequential(*settings.projections)
