"""The DPR bi-encoder: one vector per text.

Shapes: B texts, N packed tokens, D width of the encoder, d width of a vector.
Source: Dense Passage Retrieval, arXiv:2004.04906; sentence-transformers' conventions for prompts and pooling.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor
from torch.nn import functional as F

from quiver.encoder import Encoder, InputError, PackedBatch, Tokenizer, pack_ids
from quiver.retrieval.models.batches import ModelInputs, pool
from quiver.retrieval.models.encoding import (
    Devices,
    Documents,
    EncodingJob,
    Precision,
    Texts,
    clean,
    contents,
    describe_tokens,
    quantize_embeddings,
)
from quiver.retrieval.models.export.sentence_transformers import write_dense
from quiver.retrieval.models.options import ModelFolder, ModelOptions
from quiver.retrieval.models.pretrained import PretrainedModel, list_texts
from quiver.retrieval.records import DenseEncoding, DenseVectors, Dtype, ModelCard, Role

if TYPE_CHECKING:
    from typing_extensions import Self

    from quiver.retrieval.cluster.executors import LocalProcesses


OutputValue: TypeAlias = Literal["sentence_embedding", "token_embeddings"]
"""What `BiEncoder.encode` returns, by sentence-transformers' names."""


@dataclass
class EvaluatorScores:
    """What sentence-transformers' evaluators store in a model: evaluator -> scores of its last call by name."""

    eval_results_dict: dict[Any, dict[str, Any]] = field(default_factory=dict)

    def set_evaluation_metrics(self, evaluator: Any, metrics: Mapping[str, Any], epoch: int = 0, step: int = 0) -> None:
        """Store the scores of an evaluator, which calls this method; ``epoch`` and ``step`` are ignored."""
        del epoch, step
        self.eval_results_dict[evaluator] = dict(metrics)


class BiEncoder(PretrainedModel[DenseEncoding]):
    """Encoder, pooling, projections and normalization, with prompts and lengths from the checkpoint.

    Names, arguments and results are those of ``SentenceTransformer`` in sentence-transformers 5 and 6. A text's vector does not depend on
    the rest of the batch, to 1e-6 in float32.

    Args:
        model_name_or_path: Folder of sentence-transformers or of a plain Hugging Face encoder, or Hub id.
        device: ``cpu``, ``cuda`` or ``cuda:1``; None for a GPU if available. On a CPU the model is for inference only.
        prompts: Prompts by name; they take precedence over those of the folder unless they are empty.
        default_prompt_name: Name of the prompt that `encode` puts before texts; None for that of the folder.
        similarity_fn_name: ``cosine`` or ``dot``; None for that of the folder.
        truncate_dim: Width to which vectors are cut; None for the whole vectors.
        revision: Branch, tag or commit on the Hub.
        dtype: Dtype of the encoder's weights in memory; None for that of `quiver.retrieval.models.pretrained.default_dtype`.
        batch_tokens: Tokens per batch; None to choose, see `quiver.retrieval.models.batches.BatchSize`.
        max_seq_length: Maximum tokens of a text, special tokens included; None for that of the folder.

    Raises:
        InputError: The folder is no bi-encoder, a ColBERT model, say; the device is not available, a prompt does not exist, or
            ``truncate_dim`` is less than 1.

    Example:
        >>> from quiver import BiEncoder
        >>> model = BiEncoder("sentence-transformers/all-MiniLM-L6-v2")
        >>> vectors = model.encode_document(["Owls have wings.", "Trout have fins."])
        >>> vectors.shape, vectors.dtype
        ((2, 384), dtype('float32'))
        >>> model.similarity(model.encode_query("which animal has wings"), vectors).argmax().item()
        0
    """

    def __init__(  # noqa: PLR0913 - the arguments of sentence-transformers
        self,
        model_name_or_path: str | Path,
        *,
        device: str | torch.device | None = None,
        prompts: Mapping[str, str] | None = None,
        default_prompt_name: str | None = None,
        similarity_fn_name: Literal["cosine", "dot"] | None = None,
        truncate_dim: int | None = None,
        revision: str | None = None,
        dtype: Dtype | torch.dtype | None = None,
        batch_tokens: int | None = None,
        max_seq_length: int | None = None,
    ) -> None:
        given = prompts or {}
        options = ModelOptions(None, max_seq_length, given.get("query"), given.get("document"))
        super().__init__(model_name_or_path, revision=revision, dtype=dtype, device=device, batch_tokens=batch_tokens, options=options)
        self.prompts = {**self.prompts, **{name: text for name, text in (prompts or {}).items() if text or name not in self.prompts}}
        if default_prompt_name is not None:
            self._choose_prompt(None, default_prompt_name)
            self.settings = replace(self.settings, default_prompt_name=default_prompt_name)
        if similarity_fn_name is not None:
            self.similarity_fn_name = similarity_fn_name
        self.truncate_dim = truncate_dim

    def _assemble(self, encoder: Encoder, tokenizer: Tokenizer, settings: ModelFolder, source: str, batch_tokens: int | None) -> None:
        if settings.kind != "dense":
            raise InputError(f"{source or 'this model'}: a ColBERT checkpoint (one vector per token); load it with ColBERT")
        self._truncate_dim: int | None = None
        super()._assemble(encoder, tokenizer, settings, source, batch_tokens)
        limits = (settings.max_length, tokenizer.max_length, encoder.config.max_positions)
        self.max_length = self._check_length(settings.max_length or min(limit for limit in limits if limit is not None))
        if settings.max_length is not None:
            self._check_length(settings.max_length)

    def _check_length(self, length: int) -> int:
        if length < 1:
            raise InputError(f"{self.source}: max_seq_length must be >= 1, got {length}")
        if length > self.encoder.config.max_positions:
            raise InputError(f"{self.source}: max_seq_length {length} exceeds the encoder's {self.encoder.config.max_positions} positions")
        return length

    def _length(self, role: Role) -> int:
        return self.max_length

    def _fingerprinted_settings(self) -> list[object]:
        settings = self.settings
        described: list[object] = [settings.pooling, settings.include_prompt, settings.normalize, settings.lower_case, self.max_length]
        described += [settings.query_prompt, settings.document_prompt, settings.similarity]
        return described + ([self.dim] if self.dim < super().dim else [])

    def with_card(self, card: ModelCard) -> BiEncoder:
        """The model with the settings of a card; see `PretrainedModel`.

        :meta private:
        """
        if card.kind == "dense":
            self.prompts = {**self.prompts, "query": card.query_prompt, "document": card.document_prompt}
            if card.document_length <= self.encoder.config.max_positions:
                self.max_seq_length = card.document_length
            if card.dim < self.dim:
                self.truncate_dim = card.dim
            if card.similarity in ("cosine", "dot"):
                self.similarity_fn_name = card.similarity
        return self

    def _change_settings(self, settings: ModelFolder) -> None:
        """Take other settings; the card is made again when it is asked for."""
        self.settings = settings
        self.__dict__.pop("card", None)

    @property
    def prompts(self) -> Mapping[str, str]:
        """Prompts by name; read-only: assign a new mapping to change them.

        Example:
            >>> from quiver import BiEncoder
            >>> model = BiEncoder("sentence-transformers/all-MiniLM-L6-v2")
            >>> model.prompts = {**model.prompts, "query": "question: "}
            >>> dict(model.prompts)
            {'query': 'question: ', 'document': ''}
        """
        settings = self.settings
        return MappingProxyType({"query": settings.query_prompt, "document": settings.document_prompt, **settings.prompts})

    @prompts.setter
    def prompts(self, prompts: Mapping[str, str]) -> None:
        others = {name: text for name, text in prompts.items() if name not in ("query", "document")}
        self._change_settings(
            replace(self.settings, query_prompt=prompts.get("query", ""), document_prompt=prompts.get("document", ""), prompts=others)
        )

    @property
    def default_prompt_name(self) -> str | None:
        """Name of the prompt that `encode` puts before texts; None for no prompt.

        Example:
            >>> from quiver import BiEncoder
            >>> model = BiEncoder("sentence-transformers/all-MiniLM-L6-v2", prompts={"query": "question: "}, default_prompt_name="query")
            >>> model.default_prompt_name
            'query'
        """
        return self.settings.default_prompt_name

    @property
    def truncate_dim(self) -> int | None:
        """Width to which vectors are cut; None for the whole vectors. It can be set, and can exceed the width.

        Example:
            >>> from quiver import BiEncoder
            >>> model = BiEncoder("sentence-transformers/all-MiniLM-L6-v2")
            >>> model.truncate_dim = 128
            >>> model.encode("a bird").shape
            (128,)
        """
        return self._truncate_dim

    @truncate_dim.setter
    def truncate_dim(self, dim: int | None) -> None:
        if dim is not None and dim < 1:
            raise InputError(f"truncate_dim must be >= 1, got {dim}")
        self._truncate_dim = dim
        self.__dict__.pop("card", None)

    @property
    def dim(self) -> int:
        """Vector width d, after truncation.

        Example:
            >>> from quiver import BiEncoder
            >>> model = BiEncoder("sentence-transformers/all-MiniLM-L6-v2", truncate_dim=128)
            >>> model.dim
            128
        """
        return super().dim if self._truncate_dim is None else min(super().dim, self._truncate_dim)

    @property
    def max_seq_length(self) -> int:
        """Maximum tokens of a text, special tokens included. It can be set, up to the encoder's positions.

        Example:
            >>> from quiver import BiEncoder
            >>> model = BiEncoder("sentence-transformers/all-MiniLM-L6-v2")
            >>> model.max_seq_length = 128
            >>> model.max_seq_length
            128
        """
        return self.max_length

    @max_seq_length.setter
    def max_seq_length(self, length: int) -> None:
        self.max_length = self._check_length(length)
        self.__dict__.pop("card", None)

    def get_max_seq_length(self) -> int:
        """Return the maximum tokens of a text.

        Example:
            >>> from quiver import BiEncoder
            >>> model = BiEncoder("sentence-transformers/all-MiniLM-L6-v2")
            >>> model.get_max_seq_length()
            256
        """
        return self.max_length

    @property
    def similarity_fn_name(self) -> Literal["cosine", "dot"]:
        """Similarity of vectors: ``cosine`` or ``dot``. It can be set.

        Example:
            >>> from quiver import BiEncoder
            >>> model = BiEncoder("sentence-transformers/all-MiniLM-L6-v2")
            >>> model.similarity_fn_name = "dot"
            >>> model.similarity([3.0, 0.0], [2.0, 0.0]).item()
            6.0
        """
        return "dot" if self.settings.similarity == "dot" else "cosine"

    @similarity_fn_name.setter
    def similarity_fn_name(self, name: Literal["cosine", "dot"]) -> None:
        name = getattr(name, "value", name)  # SimilarityFunction of sentence-transformers
        if name not in ("cosine", "dot"):
            raise InputError(f"similarity_fn_name must be cosine or dot, got {name!r}")
        self._change_settings(replace(self.settings, similarity=name))

    @contextmanager
    def truncate_sentence_embeddings(self, truncate_dim: int | None) -> Iterator[None]:
        """Cut vectors to another width inside a ``with`` block; ``truncate_embeddings`` is its name in sentence-transformers 6.

        Example:
            >>> from quiver import BiEncoder
            >>> model = BiEncoder("sentence-transformers/all-MiniLM-L6-v2", device="cpu")
            >>> with model.truncate_sentence_embeddings(8):
            ...     model.encode("a bird").shape
            (8,)
        """
        before, self.truncate_dim = self.truncate_dim, truncate_dim
        try:
            yield
        finally:
            self.truncate_dim = before

    truncate_embeddings = truncate_sentence_embeddings

    @cached_property
    def model_card_data(self) -> EvaluatorScores:
        """Scores that sentence-transformers' evaluators have stored in the model.

        Example:
            >>> from quiver import BiEncoder
            >>> BiEncoder("sentence-transformers/all-MiniLM-L6-v2", device="cpu").model_card_data.eval_results_dict
            {}
        """
        return EvaluatorScores()

    def evaluate(self, evaluator: Callable[..., Any], output_path: str | Path | None = None) -> Any:
        """Run an evaluator of sentence-transformers.

        Args:
            evaluator: The evaluator.
            output_path: Folder of its CSV file, created if missing; None for no file.

        Returns:
            What the evaluator returns, its scores by name.

        Example:
            >>> from quiver import BiEncoder
            >>> model = BiEncoder("sentence-transformers/all-MiniLM-L6-v2", device="cpu")
            >>> model.evaluate(lambda model, output_path: {"width": model.dim})
            {'width': 384}
        """
        if output_path is not None:
            Path(output_path).mkdir(parents=True, exist_ok=True)
        return evaluator(self, None if output_path is None else str(output_path))

    def eval(self) -> Self:
        """Put the encoder into evaluation mode, in which a loaded model is, and return the model; some evaluators call it.

        Example:
            >>> from quiver import BiEncoder
            >>> model = BiEncoder("sentence-transformers/all-MiniLM-L6-v2", device="cpu")
            >>> model.eval() is model
            True
        """
        self.encoder.eval()
        return self

    def encode(  # noqa: PLR0913 - the arguments of sentence-transformers, in its order
        self,
        sentences: Texts,
        prompt_name: str | None = None,
        prompt: str | None = None,
        batch_size: int | None = None,
        show_progress_bar: bool | None = None,
        output_value: OutputValue = "sentence_embedding",
        precision: Precision | None = "float32",
        *,
        convert_to_numpy: bool = True,
        convert_to_tensor: bool = False,
        device: Devices | None = None,
        normalize_embeddings: bool = False,
        truncate_dim: int | None = None,
        pool: LocalProcesses | None = None,
        chunk_size: int | None = None,
    ) -> Any:
        """Encode texts to vectors, as sentence-transformers does. For search use `encode_query` and `encode_document`.

        Args:
            sentences: A text, or B texts; an empty text has a vector too.
            prompt_name: Name of the prompt in ``prompts`` that is put before every text; None for the default prompt, if there is one.
            prompt: Prompt that is put before every text, instead of a named one.
            batch_size: Maximum number of texts per batch; None for no limit. Batches are limited by tokens in any case (``batch_tokens``).
            show_progress_bar: Show a progress bar on standard error.
            output_value: ``sentence_embedding``, or ``token_embeddings``: for each text a tensor (n, D), the hidden states of its n tokens,
                special tokens included.
            precision: ``float32``, as None; ``int8`` and ``uint8`` (each column's range over these texts in 255 steps), ``binary`` and
                ``ubinary`` (one bit per column, eight in a byte), see `quiver.retrieval.models.encoding.quantize_embeddings`.
            convert_to_numpy: Return an array; if false, a list of tensors.
            convert_to_tensor: Return a tensor on the model's device; takes precedence.
            device: Move the model to this device first; several devices encode with one process each, which end with the call.
            normalize_embeddings: Scale vectors to length 1, after truncation.
            truncate_dim: Width to which vectors are cut; None for the model's.
            pool: Processes of `start_multi_process_pool` to encode with.
            chunk_size: Texts that a process takes at a time; None for a tenth of its share, at most 5,000.

        Returns:
            (d,) for a text, (B, d) for a list of texts, in input order; (0,) for an empty list, as in sentence-transformers.

        Raises:
            InputError: There is no such prompt or output value, the device is not available, or a number is less than 1.
            ValueError: An item of ``sentences`` is not a string, or the precision does not exist.

        Example:
            >>> from quiver import BiEncoder
            >>> model = BiEncoder("sentence-transformers/all-MiniLM-L6-v2")
            >>> model.encode("a bird").shape, model.encode(["a bird", "a fish"], truncate_dim=128).shape
            ((384,), (2, 128))
            >>> model.encode(["a bird", "a fish"], precision="ubinary").shape  # 8 dimensions in a byte
            (2, 48)
        """
        chosen = self._choose_prompt(prompt, prompt_name or (self.default_prompt_name if prompt is None else None))
        job = EncodingJob("document", chosen, batch_size, normalize_embeddings, truncate_dim)
        if output_value != "sentence_embedding":
            return self._encode_states(sentences, job, output_value, device)
        found = self._encode_call(sentences, job, device, pool, chunk_size, bool(show_progress_bar))
        return self._convert_vectors(found.vectors, precision, convert_to_numpy, convert_to_tensor, single=isinstance(sentences, str))

    def encode_query(  # noqa: PLR0913 - the arguments of sentence-transformers, in its order
        self,
        sentences: Texts,
        prompt_name: str | None = None,
        prompt: str | None = None,
        batch_size: int | None = None,
        show_progress_bar: bool | None = None,
        output_value: OutputValue = "sentence_embedding",
        precision: Precision | None = "float32",
        *,
        convert_to_numpy: bool = True,
        convert_to_tensor: bool = False,
        device: Devices | None = None,
        normalize_embeddings: bool = False,
        truncate_dim: int | None = None,
        pool: LocalProcesses | None = None,
        chunk_size: int | None = None,
    ) -> Any:
        """Encode queries: as `encode`, with the prompt named ``query``.

        Example:
            >>> from quiver import BiEncoder
            >>> model = BiEncoder("sentence-transformers/all-MiniLM-L6-v2", prompts={"query": "question: "})
            >>> vectors = [model.encode_query("a bird"), model.encode("question: a bird")]
            >>> round(model.similarity(*vectors).item(), 4)
            1.0
        """
        job = EncodingJob("query", self._choose_prompt(prompt, prompt_name or "query"), batch_size, normalize_embeddings, truncate_dim)
        if output_value != "sentence_embedding":
            return self._encode_states(sentences, job, output_value, device)
        found = self._encode_call(sentences, job, device, pool, chunk_size, bool(show_progress_bar))
        return self._convert_vectors(found.vectors, precision, convert_to_numpy, convert_to_tensor, single=isinstance(sentences, str))

    def encode_document(  # noqa: PLR0913 - the arguments of sentence-transformers, in its order
        self,
        sentences: Documents,
        prompt_name: str | None = None,
        prompt: str | None = None,
        batch_size: int | None = None,
        show_progress_bar: bool | None = None,
        output_value: OutputValue = "sentence_embedding",
        precision: Precision | None = "float32",
        *,
        convert_to_numpy: bool = True,
        convert_to_tensor: bool = False,
        device: Devices | None = None,
        normalize_embeddings: bool = False,
        truncate_dim: int | None = None,
        pool: LocalProcesses | None = None,
        chunk_size: int | None = None,
    ) -> Any:
        """Encode documents or their texts: as `encode`, with the prompt named ``document``; a title is put before the text.

        Example:
            >>> from quiver import BiEncoder, Document
            >>> model = BiEncoder("sentence-transformers/all-MiniLM-L6-v2")
            >>> model.encode_document([Document("owl", "It has wings.", "The owl"), "a fish"]).shape
            (2, 384)
        """
        texts = contents(sentences)
        job = EncodingJob(
            "document", self._choose_prompt(prompt, prompt_name or "document"), batch_size, normalize_embeddings, truncate_dim
        )
        if output_value != "sentence_embedding":
            return self._encode_states(texts, job, output_value, device)
        found = self._encode_call(texts, job, device, pool, chunk_size, bool(show_progress_bar))
        return self._convert_vectors(found.vectors, precision, convert_to_numpy, convert_to_tensor, single=isinstance(texts, str))

    def similarity(self, embeddings1: ArrayLike | Tensor, embeddings2: ArrayLike | Tensor) -> Tensor:
        """Similarity of each of A vectors to each of B vectors, (A, B), by the model's similarity.

        Example:
            >>> from quiver import BiEncoder
            >>> model = BiEncoder("sentence-transformers/all-MiniLM-L6-v2")
            >>> model.similarity([[1.0, 0.0], [0.0, 1.0]], [[3.0, 0.0]]).tolist()
            [[1.0], [0.0]]
        """
        first, second = (
            each if each.ndim > 1 else each[None] if len(each) else torch.empty(0, self.dim)
            for each in (_to_tensor(embeddings1), _to_tensor(embeddings2))
        )
        if self.similarity_fn_name == "cosine":
            first, second = F.normalize(first, dim=1), F.normalize(second, dim=1)
        return first @ second.to(first.device).T

    def similarity_pairwise(self, embeddings1: ArrayLike | Tensor, embeddings2: ArrayLike | Tensor) -> Tensor:
        """Similarity of the vectors at the same positions of two lists of B vectors, (B,).

        Example:
            >>> from quiver import BiEncoder
            >>> model = BiEncoder("sentence-transformers/all-MiniLM-L6-v2")
            >>> model.similarity_pairwise([[1.0, 0.0], [0.0, 1.0]], [[3.0, 0.0], [3.0, 0.0]]).tolist()
            [1.0, 0.0]
        """
        first, second = (_to_tensor(each) for each in (embeddings1, embeddings2))
        if self.similarity_fn_name == "cosine":
            first, second = F.normalize(first, dim=-1), F.normalize(second, dim=-1)
        return (first * second.to(first.device)).sum(-1)

    def _choose_prompt(self, prompt: str | None, name: str | None) -> str:
        """The prompt given, or that of a name."""
        if prompt is not None or name is None:
            return prompt or ""
        if name not in self.prompts:
            raise InputError(f"prompt_name must be one of {', '.join(self.prompts)}, got {name!r}")
        return self.prompts[name]

    def _encode_states(self, sentences: Texts, job: EncodingJob, output_value: str, device: Devices | None) -> Any:
        """Hidden states of each text, (n, D) on the model's device, as sentence-transformers returns them."""
        if output_value != "token_embeddings":
            raise InputError(f"output_value must be sentence_embedding or token_embeddings, got {output_value!r}")
        if isinstance(device, str | torch.device):
            self.to(device)
        ids = self._tokenize(list_texts(sentences), job.role, job.prompt, self.max_length).ids
        found, size = list[Tensor](), job.batch_size or 32
        with torch.inference_mode():
            for start in range(0, len(ids), size):
                batch = pack_ids(ids[start : start + size])
                found += batch.unpack(self.encoder(batch).float())
        return found[0] if isinstance(sentences, str) else found

    def _convert_vectors(self, vectors: DenseVectors, precision: Precision | None, as_numpy: bool, as_tensor: bool, *, single: bool) -> Any:
        """Convert vectors to what a call asks for."""
        found = torch.from_numpy(vectors if precision in (None, "float32") else quantize_embeddings(vectors, precision))
        result: Any = found if len(found) else found.flatten()
        result = result.to(self.device) if as_tensor else result.numpy() if as_numpy else list(result)
        return result[0] if single else result

    def _width(self, job: EncodingJob) -> int:
        return self.dim if job.truncate_dim is None else min(super().dim, job.truncate_dim)

    def pool(self, hidden: Tensor, batch: PackedBatch, *, skip: int = 0) -> Tensor:
        """Pool, project and normalize hidden states, without truncation: (N, D) to (B, d).

        :meta private:
        """
        vectors: Tensor = self.projections(pool(hidden, batch, self.settings.pooling, skip=skip))
        return F.normalize(vectors, dim=1) if self.settings.normalize else vectors

    def encode_token_ids(self, ids: Sequence[Sequence[int]]) -> DenseVectors:
        """Encode texts that are tokenized already, as they are: without a prompt, and without adding special tokens.

        Args:
            ids: B lists of ids of the model's tokenizer.

        Returns:
            (B, d) float32, in input order.

        Raises:
            InputError: A text has no tokens or more than ``max_seq_length``, or an id is not in the vocabulary.

        Example:
            >>> from quiver import BiEncoder
            >>> model = BiEncoder("sentence-transformers/all-MiniLM-L6-v2")
            >>> ids = model.tokenize(["Owls have wings."], "document").ids
            >>> model.encode_token_ids(ids).shape
            (1, 384)
        """
        size = self.encoder.config.vocab_size
        for row, text in enumerate(ids):
            if not 1 <= len(text) <= self.max_length:
                raise InputError(f"text {row} has {len(text):,} tokens; a text of this model has 1 to {self.max_length:,}")
            if not all(0 <= each < size for each in text):
                raise InputError(f"text {row} has a token id outside of the vocabulary, 0 to {size - 1}")
        counts = describe_tokens([""] * len(ids), ids, [False] * len(ids))
        inputs = ModelInputs([list(text) for text in ids], counts, np.ones(len(ids), np.int64))
        with closing(self._loop(EncodingJob("document", "")).run([inputs], lambda whole: whole)) as groups:
            ((_, vectors),) = groups
        return vectors.numpy()

    def _inputs(self, texts: Sequence[str], job: EncodingJob) -> ModelInputs:
        tokens = self._tokenize(texts, job.role, job.prompt, self.max_length)
        counts = describe_tokens(texts, tokens.ids, tokens.truncated)
        return ModelInputs(tokens.ids, counts, np.ones(len(tokens.ids), np.int64))

    def _forward(self, job: EncodingJob) -> Callable[[PackedBatch], Tensor]:
        skip, dim, whole = self._count_skipped(job.prompt), self._width(job), super().dim

        def forward(batch: PackedBatch) -> Tensor:
            vectors = self.pool(self.encoder(batch), batch, skip=skip)
            vectors = vectors if dim == whole else vectors[:, :dim]
            return F.normalize(vectors, dim=1) if job.normalize else vectors

        return forward

    def _encoding(self, inputs: ModelInputs, vectors: Tensor, job: EncodingJob) -> DenseEncoding:
        return DenseEncoding(vectors.numpy(), inputs.tokens)

    def skipped_tokens(self, role: Role) -> int:
        """Number of leading tokens that pooling skips: those of the prompt, if the model does not pool it.

        :meta private:
        """
        return self._count_skipped(self._role_prompt(role))

    def _count_skipped(self, prompt: str) -> int:
        return 0 if self.settings.include_prompt or not prompt else self.prompt_tokens(prompt)

    def prompt_tokens(self, prompt: str) -> int:
        """Number of leading tokens of a prompt, with [CLS] and without [SEP].

        :meta private:
        """
        ids = self.tokenizer.encode(clean([prompt], lower_case=self.settings.lower_case), max_length=self.max_length).ids[0]
        return len(ids) - (ids[-1] == self.tokenizer.special_id("sep"))

    def save_pretrained(self, path: str | Path) -> None:
        """Save the model as a folder that opens in Quiver and in sentence-transformers 5 and 6.

        Raises:
            InputError: The model has a residual Dense module, which the layout lacks; nothing is written.

        Example:
            >>> from quiver import BiEncoder
            >>> model = BiEncoder("sentence-transformers/all-MiniLM-L6-v2")
            >>> model.save_pretrained("models/copy")
            >>> BiEncoder("models/copy").card.fingerprint == model.card.fingerprint
            True
        """
        write_dense(Path(path), self.settings, self.encoder, self.tokenizer, max_length=self.max_length)

    def _facts(self) -> list[tuple[str, str]]:
        prompts = [f"{name} {text!r}" for name, text in self.prompts.items() if text]
        facts = [("texts", f"at most {self.max_length} tokens"), ("pooling", self.settings.pooling)]
        return [*facts, ("prompts", ", ".join(prompts))] if prompts else facts


def _to_tensor(vectors: ArrayLike | Tensor) -> Tensor:
    """Vectors as a tensor; a list of tensors is stacked."""
    if isinstance(vectors, Tensor):
        return vectors
    if isinstance(vectors, list) and vectors and isinstance(vectors[0], Tensor):
        return torch.stack(vectors)
    return torch.from_numpy(np.asarray(vectors))
