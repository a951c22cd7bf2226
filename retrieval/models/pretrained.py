"""What all models have in common: the folder that they are loaded from, an encoder with tokenizer and settings, and encoding.

Folders of sentence-transformers, PyLate, Stanford ColBERT and plain Hugging Face are read, from disk or the Hub; one module per layout in
`quiver.retrieval.models.export` reads and writes it.

A kind of model says how it tokenizes (`_inputs`), what it computes of a batch (`_forward`) and what an encoding is made of (`_encoding`);
windows, batches, processes, progress, prompts and cards are the same for all.

Shapes: B texts, d vector width, n_i vectors of text i.
"""

from __future__ import annotations

import hashlib
import json
import logging
import platform
import re
import tempfile
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast, get_args

import torch
from torch import Tensor, nn

from quiver.encoder import Encoder, PackedBatch, Tokenizer, load_encoder, optimize_for_inference
from quiver.encoder.checkpoints.checkpoint import ADAPTER_CONFIG, base_folder, local_folder, pin_source
from quiver.encoder.config import DROPOUTS, INITIAL
from quiver.encoder.errors import InputError, first_line
from quiver.encoder.files import read_json, warn_once
from quiver.encoder.progress import Advance, progress_bar
from quiver.encoder.tokenizer import SPECIAL_TOKENS, TokenizedTexts
from quiver.retrieval.display import html_table
from quiver.retrieval.models.batches import BatchLoop, BatchSize, Copies, ModelInputs, Projection, text_windows
from quiver.retrieval.models.bm25 import NAME
from quiver.retrieval.models.encoding import AnyEncoding, Devices, EncodingJob, Texts, check_texts, clean, join_encodings
from quiver.retrieval.models.export.sentence_transformers import first_module, read_dense, read_multi_vector, read_pylate, read_tokenizer
from quiver.retrieval.models.export.stanford import load_stanford_encoder, read_stanford
from quiver.retrieval.models.options import FOLDERS_SETTINGS, ModelFolder, ModelOptions, is_onnx_export, is_stanford
from quiver.retrieval.records import PLURALS, DenseEncoding, DenseModel, Dtype, Item, ModelCard, Role, TokenEncoding, TokenModel

if TYPE_CHECKING:
    from typing_extensions import Self

    from quiver.retrieval.cluster.executors import LocalProcesses

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


def load_parts(source: str | Path, *, dtype: torch.dtype = torch.float32, device: str = "cpu", to_train: bool = False) -> ModelParts:
    """Load settings, encoder and tokenizer of a model folder from disk or from the Hub; an InputError if it is not a supported model.

    Lengths that a folder sets beyond the encoder's positions become the number of positions, with a warning. With ``to_train``, the encoder
    of a model for another task, such as a cross-encoder, is the start of training a retriever, also with a warning.
    """
    folder = local_folder(source)
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
    """Limit a folder's lengths to the encoder's positions; RoBERTa's say 514, the rows of its table, of which two are no positions."""
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
    source: str | Path, dtype: Dtype | torch.dtype | None, device: str | None, options: ModelOptions = FOLDERS_SETTINGS
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
    parts = load_parts(source, dtype=weights, device=device)
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


Encoding = TypeVar("Encoding", DenseEncoding, TokenEncoding)


class PretrainedModel(ABC, Generic[Encoding]):
    """Base class of the models: an encoder, its tokenizer, settings and projections. The arguments are those of `BiEncoder`."""

    def __init__(
        self,
        model_name_or_path: str | Path,
        *,
        revision: str | None,
        dtype: Dtype | torch.dtype | None,
        device: str | torch.device | None,
        batch_tokens: int | None,
        options: ModelOptions,
    ) -> None:
        source = pin_source(model_name_or_path, revision)
        parts = load_for_inference(source, dtype, None if device is None else str(device), options)
        self._assemble(parts.encoder, parts.tokenizer, parts.settings, source, batch_tokens)

    @classmethod
    def from_parts(
        cls, encoder: Encoder, tokenizer: Tokenizer, settings: ModelFolder, *, source: str = "", batch_tokens: int | None = None
    ) -> Self:
        """Make a model of the native encoder, its tokenizer and settings; an InputError if they do not fit each other or the class.

        ``source`` is the folder or Hub id, for manifests and reports.

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
        width = encoder.config.hidden_size
        for number, projection in enumerate(settings.projections, start=1):
            if projection.linear.in_features != width:
                raise InputError(f"{name}: Dense module {number} expects {projection.linear.in_features} features, its input has {width}")
            width = projection.linear.out_features
        self.projections: nn.Sequential = nn.Sequential(*settings.projections).to(encoder.device)
        self._prefix_ids: dict[Role, int | None] = {"query": None, "document": None}

    @abstractmethod
    def with_card(self, card: ModelCard) -> Self:
        """The model with the settings that its owner changed when or after loading it, as its card has them.

        :meta private:
        """

    @cached_property
    def card(self) -> ModelCard:
        """Facts about the model for indexes and reports.

        Example:
            >>> from quiver import BiEncoder
            >>> model = BiEncoder("sentence-transformers/all-MiniLM-L6-v2")
            >>> model.card.kind, model.card.dim, model.card.similarity, model.card.document_length
            ('dense', 384, 'cosine', 256)
        """
        colbert = self.settings.colbert if self.settings.kind == "colbert" else None
        return ModelCard(
            source=self.source,
            kind=self.settings.kind,
            fingerprint=fingerprint(self.encoder, self.projections, self.tokenizer, self._fingerprinted_settings()),
            dim=self.dim,
            similarity="maxsim" if colbert else self.settings.similarity,
            query_length=self._length("query"),
            document_length=self._length("document"),
            query_prompt=(colbert.query_prefix if colbert else "") + self.settings.query_prompt,
            document_prompt=(colbert.document_prefix if colbert else "") + self.settings.document_prompt,
            dtype=dtype_of(self.encoder),
        )

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
        """Return the vector width d; ``get_embedding_dimension`` is its name in sentence-transformers 6.

        Example:
            >>> from quiver import BiEncoder
            >>> model = BiEncoder("sentence-transformers/all-MiniLM-L6-v2")
            >>> model.get_sentence_embedding_dimension()
            384
        """
        return self.dim

    get_embedding_dimension = get_sentence_embedding_dimension

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

    def encode_texts(self, texts: Sequence[str], role: Role, *, progress: bool = False) -> Encoding:
        """Encode texts, with token counts: to vectors (B, d) float32, or for ColBERT to B arrays of (n_i, d), in input order.

        The role decides the prompt and, for ColBERT, prefix, length, expansion and skiplist. An empty text has vectors too.

        :meta private:
        """
        with progress_bar(PLURALS[role], len(texts), enabled=progress) as advance:
            return self.encode_job(texts, self._job(role), advance)

    def encode_chunks(
        self, chunks: Iterable[Sequence[str]], role: Role, *, advance: Advance = lambda texts: None
    ) -> Generator[Encoding, None, None]:
        """Yield the encoding of each chunk of some hundreds of texts, as `encode_texts` returns it.

        A GPU does not wait between chunks: the next two are read while one is encoded. ``advance`` is called after each batch.

        :meta private:
        """
        job = self._job(role)
        with closing(self._loop(job, advance).run(chunks, lambda texts: self._inputs(texts, job))) as groups:
            for inputs, vectors in groups:
                yield join_encodings([self._encoding(inputs, vectors, job)])

    def encode_job(self, texts: Sequence[str], job: EncodingJob, advance: Advance) -> Encoding:
        """Encode texts in this process.

        :meta private:
        """
        check_texts(texts)
        windows = text_windows(texts, self.batch_size, max_length=self._length(job.role))
        loop = self._loop(job, advance)
        with closing(loop.run(windows, lambda window: self._inputs(texts[window], job), threaded=len(windows) > 1)) as groups:
            return join_encodings([self._encoding(inputs, vectors, job) for inputs, vectors in groups])

    def _encode_call(
        self,
        sentences: Texts,
        job: EncodingJob,
        devices: Devices | None,
        pool: LocalProcesses | None,
        chunk_size: int | None,
        progress: bool,
    ) -> Encoding:
        """Encode the texts of a public call in this process or in others."""
        if chunk_size is not None and chunk_size < 1:
            raise InputError(f"chunk_size must be >= 1, got {chunk_size}")
        texts = list_texts(sentences)
        if isinstance(devices, str | torch.device):
            self.to(devices)
        elif devices is not None and pool is None:
            pool = self.start_multi_process_pool([str(each) for each in devices])
        with progress_bar(PLURALS[job.role], len(texts), enabled=progress) as advance:
            if pool is None or not texts:
                return self.encode_job(texts, job, advance)
            size = chunk_size or max(1, min(-(-len(texts) // pool.workers // 10), 5000))
            chunks = [(start, texts[start : start + size]) for start in range(0, len(texts), size)]
            card, threads = with_absolute_source(self.card), pool.threads(torch.get_num_threads())
            task = EncodingTask(type(self), card, self.batch_tokens, job, threads)
            with closing(pool.run(task, chunks, advance=advance)) as done:
                found: dict[int, Encoding] = {start: encoding for (start, _), encoding in done}
        return join_encodings([found[start] for start, _ in chunks])

    def tokenize(self, texts: Sequence[str], role: Role, *, max_length: int | None = None) -> TokenizedTexts:
        """Clean and tokenize texts with the prompt and prefix of their role, without query expansion.

        Args:
            texts: B texts.
            role: Queries or documents; decides prompt and, for ColBERT, prefix and length.
            max_length: Tokens to which texts are truncated, if fewer than the model's limit.

        Example:
            >>> from quiver import BiEncoder
            >>> model = BiEncoder("sentence-transformers/all-MiniLM-L6-v2")
            >>> [len(ids) for ids in model.tokenize(["Owls have wings.", "fins"], "query").ids]
            [6, 3]
        """
        length = self._length(role)
        return self._tokenize(texts, role, self._role_prompt(role), min(length, max_length or length))

    def _tokenize(self, texts: Sequence[str], role: Role, prompt: str, length: int) -> TokenizedTexts:
        prefix = self._prefix_ids[role]
        cleaned = clean(texts, prompt=prompt, lower_case=self.settings.lower_case)
        tokens = self.tokenizer.encode(cleaned, max_length=length - (prefix is not None))
        if prefix is not None:
            for ids in tokens.ids:
                ids.insert(1, prefix)  # behind [CLS]
        return tokens

    def _loop(self, job: EncodingJob, advance: Advance = lambda texts: None) -> BatchLoop:
        return BatchLoop(
            self._forward(job),
            dim=self._width(job),
            size=self.batch_size,
            copies=Copies(self.encoder.device),
            role=job.role,
            most=job.batch_size,
            advance=advance,
        )

    def _job(self, role: Role) -> EncodingJob:
        """How texts of a role are encoded for an index."""
        return EncodingJob(role, self._role_prompt(role), normalize=self.settings.kind == "colbert")

    def _role_prompt(self, role: Role) -> str:
        return self.settings.query_prompt if role == "query" else self.settings.document_prompt

    def _width(self, job: EncodingJob) -> int:
        del job
        return self.dim

    @abstractmethod
    def _length(self, role: Role) -> int:
        """Maximum tokens of a text of a role, special tokens included."""

    @abstractmethod
    def _fingerprinted_settings(self) -> list[object]:
        """JSON values of the settings that affect vectors. Fingerprints are stored in indexes: optional ones are left out if not set."""

    @abstractmethod
    def _inputs(self, texts: Sequence[str], job: EncodingJob) -> ModelInputs:
        """Tokenize texts."""

    @abstractmethod
    def _forward(self, job: EncodingJob) -> Callable[[PackedBatch], Tensor]:
        """The function from a batch to its vectors."""

    @abstractmethod
    def _encoding(self, inputs: ModelInputs, vectors: Tensor, job: EncodingJob) -> Encoding:
        """The encoding of texts, of their vectors on the host, (T, d)."""

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

    def _facts(self) -> list[tuple[str, str]]:
        """Facts about the kind of model for people: name and value."""
        return []

    def _all_facts(self) -> list[tuple[str, str]]:
        vectors = f"{self.dim} dimensions, {self.settings.similarity}"
        weights = f"{dtype_of(self.encoder)} on {self.device}"
        return [("model", self.source or "(made of parts)"), ("vectors", vectors), *self._facts(), ("weights", weights)]

    def __repr__(self) -> str:
        return f"{type(self).__name__}({'; '.join(f'{name}: {value}' for name, value in self._all_facts())})"

    def _repr_html_(self) -> str:
        return html_table((type(self).__name__, ""), self._all_facts())


def list_texts(sentences: Texts) -> list[str]:
    """The texts of a public call; an InputError or ValueError for anything else."""
    if not hasattr(sentences, "__iter__"):
        raise InputError(f"a text or a list of texts is encoded, got {sentences!r}")
    texts = [sentences] if isinstance(sentences, str) else list(sentences)
    check_texts(texts)
    return texts


def encode_here(
    model: DenseModel | TokenModel,
    chunks: Iterable[Item],
    texts: Callable[[Item], Sequence[str]],
    role: Role,
    *,
    advance: Advance = lambda texts: None,
) -> Generator[tuple[Item, AnyEncoding], None, None]:
    """Encode chunks of any type in this process and yield each with its vectors; a model of Quiver on a GPU does not wait between chunks.

    Args:
        model: The model.
        chunks: Consumed as needed.
        texts: The texts of a chunk.
        role: Queries or documents; decides the prompt.
        advance: Called with the number of texts encoded since the last call: after each batch of a model of Quiver, otherwise each chunk.
    """
    if not isinstance(model, PretrainedModel):
        for chunk in chunks:
            encoding = model.encode_texts(given := list(texts(chunk)), role)
            advance(len(given))
            yield chunk, encoding
        return
    taken = deque[Item]()

    def take_texts() -> Iterator[Sequence[str]]:
        for chunk in chunks:
            taken.append(chunk)
            yield texts(chunk)

    with closing(model.encode_chunks(take_texts(), role, advance=advance)) as encodings:
        for encoding in encodings:
            yield taken.popleft(), encoding


# Configuration fields that do not affect vectors.
WITHOUT_EFFECT = frozenset({"family", "initializer_range", "pad_token_id", "cls_token_id", "sep_token_id", *DROPOUTS})


def fingerprint(encoder: Encoder, projections: nn.Sequential, tokenizer: Tokenizer, settings: object) -> str:
    """Hash weights, architecture, tokenizer and the JSON values of other settings with sha256: equal fingerprints mean equal vectors."""
    digest = hashlib.sha256()
    for module in (encoder, projections):
        for name, tensor in module.state_dict().items():
            digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
            digest.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().data)
    digest.update(tokenizer.to_json().encode())
    # Fingerprints are stored in indexes: settings of initial layers count only where there are such layers.
    ignored = WITHOUT_EFFECT if encoder.config.initial_layers else WITHOUT_EFFECT | {"initial_layers", *INITIAL}
    described = {
        "architecture": {name: value for name, value in asdict(encoder.config).items() if name not in ignored},
        "projections": [(module.activation, module.use_residual) for module in projections if isinstance(module, Projection)],
        "special": [tokenizer.special_id(name) for name in SPECIAL_TOKENS],
        "truncation": tokenizer.truncation_side,
        "settings": settings,
    }
    digest.update(json.dumps(described, sort_keys=True).encode())
    return digest.hexdigest()


def options_of_card(card: ModelCard) -> ModelOptions:
    """The prompts of a bi-encoder as options, so that no warning asks for others; those of ColBERT contain its prefixes."""
    return ModelOptions(query_prompt=card.query_prompt, document_prompt=card.document_prompt) if card.kind == "dense" else FOLDERS_SETTINGS


def with_absolute_source(card: ModelCard) -> ModelCard:
    """Return the card with a local folder's path made absolute, so that other processes can load the model; links keep their names."""
    source = Path(card.source)
    if not card.source or card.kind == "bm25" or not source.is_dir():
        return card
    return replace(card, source=str(source.resolve() if ".." in source.parts else source.absolute()))


@dataclass(frozen=True)
class EncodingTask:
    """Encodes chunks of texts in a worker; an item is the number of its first text, and the texts."""

    model: type[PretrainedModel[Any]]
    card: ModelCard
    batch_tokens: int | None
    job: EncodingJob
    threads: int

    def open(self, advance: Advance) -> Callable[[tuple[int, list[str]]], Any]:
        """See `quiver.retrieval.records.WorkerTask`."""
        torch.set_num_threads(self.threads)
        card = self.card
        parts = load_for_inference(card.source, card.dtype, None, options_of_card(card))
        made = self.model.from_parts(parts.encoder, parts.tokenizer, parts.settings, source=card.source, batch_tokens=self.batch_tokens)
        model = made.with_card(card)
        check_fingerprint(model.card, card)
        return lambda chunk: model.encode_job(chunk[1], self.job, advance)


def check_fingerprint(card: ModelCard, wanted: ModelCard) -> None:
    """Check that a model that a worker has loaded is the one that it was told to load; an InputError otherwise."""
    if card.fingerprint != wanted.fingerprint:
        raise InputError(
            f"{wanted.source}: the model on {platform.node()} has the fingerprint {card.fingerprint[:12]}, expected "
            f"{wanted.fingerprint[:12]}; all machines need the same model files"
        )
