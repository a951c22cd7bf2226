"""What all models have in common: an encoder with its tokenizer and settings, and encoding in batches and in processes.

A kind of model says how it tokenizes (`_inputs`), what it computes of a batch (`_forward`) and what an encoding is made of (`_encoding`);
windows, batches, processes, progress, prompts and cards are the same for all.

Shapes: B texts, d vector width, n_i vectors of text i.
"""

from __future__ import annotations

import hashlib
import json
import platform
import tempfile
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch
from torch import Tensor, nn

from quiver.encoder import Encoder, PackedBatch, Tokenizer
from quiver.encoder.config import DROPOUTS
from quiver.encoder.errors import InputError, first_line
from quiver.encoder.progress import Advance, progress_bar
from quiver.encoder.tokenizer import SPECIAL_TOKENS, TokenizedTexts
from quiver.retrieval.display import html_table
from quiver.retrieval.models.batches import BatchLoop, BatchSize, Copies, ModelInputs, Projection, text_windows
from quiver.retrieval.models.encoding import AnyEncoding, Devices, EncodingJob, Texts, check_texts, clean, join_encodings
from quiver.retrieval.models.folders import check_device, dtype_of, load_for_inference
from quiver.retrieval.models.options import FOLDERS_SETTINGS, ModelFolder, ModelOptions
from quiver.retrieval.records import PLURALS, DenseEncoding, DenseModel, Dtype, Item, ModelCard, Role, TokenEncoding, TokenModel

if TYPE_CHECKING:
    from typing_extensions import Self

    from quiver.retrieval.cluster.executors import LocalProcesses


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
        parts = load_for_inference(model_name_or_path, revision, dtype, None if device is None else str(device), options)
        self._assemble(parts.encoder, parts.tokenizer, parts.settings, str(model_name_or_path), batch_tokens)

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

    @classmethod
    def from_card(cls, card: ModelCard, source: str | Path, *, batch_tokens: int | None = None) -> Self:
        """Load a model with the settings of a card.

        :meta private:
        """
        parts = load_for_inference(source, None, card.dtype, None, options_of_card(card))
        model = cls.from_parts(parts.encoder, parts.tokenizer, parts.settings, source=str(source), batch_tokens=batch_tokens)
        return model.with_card(card)

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

    # Encoding.

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
        """Width of the vectors of a call."""
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
        """Table for notebooks."""
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
    described = {
        "architecture": {name: value for name, value in asdict(encoder.config).items() if name not in WITHOUT_EFFECT},
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
        model = self.model.from_card(self.card, self.card.source, batch_tokens=self.batch_tokens)
        check_fingerprint(model.card, self.card)
        return lambda chunk: model.encode_job(chunk[1], self.job, advance)


def check_fingerprint(card: ModelCard, wanted: ModelCard) -> None:
    """Check that a model that a worker has loaded is the one that it was told to load; an InputError otherwise."""
    if card.fingerprint != wanted.fingerprint:
        raise InputError(
            f"{wanted.source}: the model on {platform.node()} has the fingerprint {card.fingerprint[:12]}, expected "
            f"{wanted.fingerprint[:12]}; all machines need the same model files"
        )
