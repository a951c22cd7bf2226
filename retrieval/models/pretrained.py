"""What bi-encoders and ColBERT models have in common: an encoder with its tokenizer and settings, encoding in batches and in processes."""

from __future__ import annotations

import platform
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from quiver.encoder import Encoder, PackedBatch, Tokenizer
from quiver.encoder.errors import InputError, first_line
from quiver.encoder.progress import Advance, progress_bar
from quiver.retrieval.display import html_table
from quiver.retrieval.models.batches import BatchLoop, BatchSize, ModelInputs, copies_for
from quiver.retrieval.models.encoding import Devices, EncodingJob, Texts, check_texts
from quiver.retrieval.models.folders import check_device, dtype_of, load_for_inference
from quiver.retrieval.models.options import FOLDERS_SETTINGS, ModelFolder, ModelOptions
from quiver.retrieval.records import PLURALS, Dtype, ModelCard, Role

if TYPE_CHECKING:
    from typing_extensions import Self

    from quiver.retrieval.cluster.executors import LocalProcesses


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
        parts = load_for_inference(model_name_or_path, revision, dtype, None if device is None else str(device), options)
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
            card, threads = with_absolute_source(self.card), pool.threads(torch.get_num_threads())
            task = EncodingTask(type(self), card, self.batch_tokens, job, threads)
            with closing(pool.run(task, chunks, advance=advance)) as done:
                for (start, chunk), found in done:
                    vectors[start : start + len(chunk)] = found
        return vectors

    def encode_chunks(
        self, chunks: Iterable[Sequence[str]], role: Role, *, advance: Advance = lambda texts: None
    ) -> Generator[Any, None, None]:
        """Yield the encoding of each chunk of texts, as ``encode_texts`` returns it; a GPU does not wait between chunks.

        Args:
            chunks: Chunks of some hundreds of texts; on a GPU the next two are read while one is encoded.
            role: Queries or documents.
            advance: Called with the number of texts encoded since the last call, after each batch.

        :meta private:
        """
        job = self._job(role)
        with closing(self._loop(job, advance).run(chunks, lambda texts: self._inputs(texts, job))) as groups:
            for inputs, vectors in groups:
                yield self._encoding(inputs, vectors)

    def _loop(self, job: EncodingJob, advance: Advance = lambda texts: None) -> BatchLoop[Any]:
        return BatchLoop(
            self._forward(job),
            dim=self._width(job.truncate_dim),
            size=self.batch_size,
            copies=copies_for(self.encoder.device),
            role=job.role,
            most=job.batch_size,
            advance=advance,
        )

    def _role_prompt(self, role: Role) -> str:
        return self.settings.query_prompt if role == "query" else self.settings.document_prompt

    def _width(self, truncate_dim: int | None) -> int:
        """Width of vectors that are cut as a call wants it."""
        del truncate_dim
        return self.dim

    @abstractmethod
    def _job(self, role: Role) -> EncodingJob:
        """How texts of a role are encoded for an index."""

    @abstractmethod
    def _forward(self, job: EncodingJob) -> Callable[[PackedBatch], Tensor]:
        """The function from a batch to its vectors."""

    @abstractmethod
    def _inputs(self, texts: Sequence[str], job: EncodingJob) -> ModelInputs:
        """Tokenize texts."""

    @abstractmethod
    def _encoding(self, inputs: ModelInputs, vectors: Tensor) -> Any:
        """The encoding of a chunk."""

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

    model: type[PretrainedModel]
    card: ModelCard
    batch_tokens: int | None
    job: EncodingJob
    threads: int

    def open(self, advance: Advance) -> Callable[[tuple[int, list[str]]], Any]:
        """See `quiver.retrieval.records.WorkerTask`."""
        torch.set_num_threads(self.threads)
        model = self.model.from_card(self.card, self.card.source, batch_tokens=self.batch_tokens)
        check_fingerprint(model.card, self.card)
        return lambda chunk: model._encode(chunk[1], self.job, advance)


def check_fingerprint(card: ModelCard, wanted: ModelCard) -> None:
    """Check that a model that a worker has loaded is the one that it was told to load.

    Raises:
        InputError: It has another fingerprint.
    """
    if card.fingerprint != wanted.fingerprint:
        raise InputError(
            f"{wanted.source}: the model on {platform.node()} has the fingerprint {card.fingerprint[:12]}, expected "
            f"{wanted.fingerprint[:12]}; all machines need the same model files"
        )


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
