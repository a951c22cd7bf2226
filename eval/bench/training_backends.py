"""Backends of the training benchmark: Quiver's model, and the libraries' own models on the transformers encoder, from equal weights.

A masked language model (kind ``mlm``) is trained on the documents of the rows; the others on queries and documents.

All are trained with the loss, gradient clipping, optimizer and schedule of one recipe. They differ in the collator and the model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from quiver.encoder import Encoder, PackedBatch, Tokenizer, init_weights, load_encoder, pack_ids, save_encoder
from quiver.encoder.checkpoints.folder import local_folder
from quiver.encoder.checkpoints.head_checkpoint import load_head, save_head
from quiver.encoder.config import DROPOUTS
from quiver.encoder.heads import IGNORE_INDEX, MaskedLM, init_head
from quiver.encoder.presets import preset
from quiver.encoder.pretraining.stream import Masker
from quiver.encoder.training.autocast import autocast
from quiver.encoder.training.recipe_file import TrainingDtype
from quiver.eval.bench.results import OWN
from quiver.retrieval.models.loading import ColBERTSettings, default_device, read_model_folder
from quiver.retrieval.training.dataloader import TEXTS, Collator
from quiver.retrieval.training.model import DIM, build_model
from quiver.retrieval.training.recipe import LOSSES_BY_KIND, ColBERTSection, DataSection, LossSection, ModelSection, Recipe, TrainingSection

Row: TypeAlias = dict[str, Any]
"""A training row: ``query``, ``document_1``, ..., and ``scores`` if the loss needs a teacher."""

LIBRARIES: Mapping[str, str] = {"dense": "sentence-transformers", "colbert": "pylate", "mlm": "transformers"}
"""Kind of model -> library to compare with."""

LOSSES: Mapping[str, tuple[str, ...]] = {**LOSSES_BY_KIND, "mlm": ("masked_lm",)}
"""Kind of model -> the losses that train it."""

MASKED = 0.3
"""Share of the tokens that a masked language model predicts: ModernBERT, arXiv:2412.13663, section 2.2.2."""

SCORED = ("margin_mse", "kl", "distillation")
"""Losses that need teacher scores."""

PRESET_VOCABULARY = 1_024
"""Size of the vocabulary that is trained for a preset, which has no tokenizer; the embedding keeps its size."""

ENGLISH = (
    "time year people way day man thing woman life child world school state family student group country problem hand part place case "
    "week company system program question work government number night point home water room mother area money story fact month lot "
    "right study book eye job word business issue side kind head house service friend father power hour game line end member law car "
    "city community name president team minute idea body information back parent face others level office door health person art war "
    "history party result change morning reason research girl guy moment air teacher force education"
)
"""Words of synthetic texts."""


@dataclass(frozen=True)
class Workload:
    """Batches of a case.

    Attributes:
        name: Name on the command line and in tables.
        queries: Shortest and longest query in tokens, special tokens included.
        documents: Shortest and longest document in tokens, special tokens included.
        max_length: Maximum tokens per text; texts of a collection are truncated to it.
        per_row: Documents per row, the positive included.
        rows: Rows per batch.
    """

    name: str
    queries: tuple[int, int]
    documents: tuple[int, int]
    max_length: int
    per_row: int
    rows: int


@dataclass(frozen=True)
class InitialModel:
    """Folders that all backends load their weights from.

    Attributes:
        encoder: Folder of the encoder and tokenizer, in transformers' format.
        colbert: Folder of a PyLate model with this encoder; None if not needed.
        mlm: Folder of a masked language model with this encoder; None if not needed.
    """

    encoder: Path
    colbert: Path | None = None
    mlm: Path | None = None

    def folder(self, kind: str) -> Path:
        """Folder for a kind of model."""
        return {"colbert": self.colbert, "mlm": self.mlm}.get(kind) or self.encoder


@dataclass(frozen=True)
class Settings:
    """Settings of the training benchmark.

    Attributes:
        losses: Kind of model to measure (``dense``, ``colbert``, ``mlm``) -> name of its loss, as in recipes; see `LOSSES`.
        threads: Threads on a CPU; None for torch's default.
        rounds: Timed steps of each backend.
        seconds: Time for all rounds of a case, after which no further round begins; None for no limit.
        dtype: ``float32``, or ``bfloat16`` for autocast to it.
        seed: Random seed of texts, rows, teacher scores and new weights.
        batch_size: Rows per batch; None for the workload's.
        dropout: Keep the checkpoint's dropout. Its random numbers differ between backends, so losses are not compared.
        baselines: Measure the other libraries as well.
        memory: Measure peak memory as well, in a fresh process per backend and case.
    """

    losses: Mapping[str, str]
    threads: int | None = None
    rounds: int = 5
    seconds: float | None = None
    dtype: Literal["float32", "bfloat16"] = "float32"
    seed: int = 42
    batch_size: int | None = None
    dropout: bool = False
    baselines: bool = True
    memory: bool = False


def _in_dtype(forward: Callable[..., Any], dtype: TrainingDtype, device: torch.device) -> Callable[..., Any]:
    """Return a forward method that runs in the dtype of training and gives float32 results, as the libraries' own trainers have it.

    The loss itself is computed in float32. A cached loss calls the model again in its backward pass, which then has the same dtype.
    """

    def widened(value: Any) -> Any:
        return value.float() if isinstance(value, Tensor) and value.is_floating_point() else value

    def forward_in_dtype(*args: Any, **settings: Any) -> Any:
        with autocast(dtype, device):
            output = forward(*args, **settings)
        return output if dtype == "float32" else tree_map(widened, output)

    return forward_in_dtype


class Backend:
    """A model that is trained one step at a time.

    Args:
        model: The module that is trained.
        loss: Loss of a batch.
        collate: Converts rows to a batch.
        training: Settings of the optimizer, gradient clipping and dtype.
        steps: Steps of the whole run, for the schedule.
        on_host: Tensors of a batch that stay on the host.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Callable[[Mapping[str, Any]], Tensor],
        collate: Callable[[Sequence[Row]], dict[str, Any]],
        training: TrainingSection,
        *,
        steps: int,
        on_host: tuple[str, ...] = (),
    ) -> None:
        from quiver.retrieval.training.state import make_optimizer

        self._model = model.train()
        device = next(model.parameters()).device
        model.forward = _in_dtype(model.forward, training.dtype, device)
        self._loss = loss
        self._collate = collate
        self._training = training
        self._on_host = on_host
        self._optimizer, self._schedule = make_optimizer(training, model.named_parameters(), steps)

    def step(self, rows: Sequence[Row]) -> float:
        """Train on a batch and return its loss, when the device has finished."""
        device = next(self._model.parameters()).device
        batch = {
            key: value.to(device) if isinstance(value, Tensor | PackedBatch) and key not in self._on_host else value
            for key, value in self._collate(rows).items()
        }
        loss = self._loss(batch)
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(self._model.parameters(), self._training.max_grad_norm)
        self._optimizer.step()
        self._schedule.step()
        self._optimizer.zero_grad()
        return float(loss.detach())

    def lengths(self, rows: Sequence[Row]) -> list[int]:
        """Tokens of each text of a batch, without padding."""
        batch = self._collate(rows)
        if isinstance(packed := batch.get(TEXTS), PackedBatch):
            return list(packed.key_lengths or packed.lengths)
        return [length for column in columns_of(batch) for length in column["attention_mask"].sum(dim=1).tolist()]

    def masked_tokens(self, rows: Sequence[Row]) -> int:
        """Number of tokens of a batch that a masked language model predicts."""
        return int((self._collate(rows)["labels"] != IGNORE_INDEX).sum())

    def padded_tokens(self, rows: Sequence[Row]) -> int:
        """Number of tokens in the padded batch of a library, padding included."""
        return sum(column["input_ids"].numel() for column in columns_of(self._collate(rows)))


def library_loss(loss: nn.Module) -> Callable[[Mapping[str, Any]], Tensor]:
    """Return a loss of sentence-transformers or PyLate as a function of a batch of the library's collator."""

    def compute(batch: Mapping[str, Any]) -> Tensor:
        value: Tensor = loss(columns_of(batch), batch.get("label"))
        return value

    return compute


def columns_of(batch: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Split a collator's batch into the features of each column, in the form that sentence-transformers' trainer passes to the loss.

    Example:
        >>> columns_of({"query_input_ids": 1, "query_attention_mask": 2, "document_1_input_ids": 3, "label": 4})
        [{'input_ids': 1, 'attention_mask': 2}, {'input_ids': 3}]
    """
    prefixes = [name.removesuffix("input_ids") for name in batch if name.endswith("_input_ids")]
    return [{name.removeprefix(prefix): value for name, value in batch.items() if name.startswith(prefix)} for prefix in prefixes]


def make_training(workload: Workload, settings: Settings) -> TrainingSection:
    """Make the settings that all backends follow: batch size, dtype, AdamW with linear decay."""
    return TrainingSection(
        epochs=1,
        batch_size=settings.batch_size or workload.rows,
        learning_rate=2e-5,
        warmup_ratio=0.0,
        weight_decay=0.01,
        max_grad_norm=1.0,
        seed=settings.seed,
        dtype=settings.dtype,
        scheduler="linear",
        no_duplicates=False,
        log_every=1,
    )


def make_recipe(kind: str, workload: Workload, settings: Settings, initial: InitialModel) -> Recipe:
    """Make the recipe of a retriever that all backends follow: lengths, loss and `make_training`."""
    dense = kind == "dense"
    described: dict[str, Any] = dict.fromkeys(("name", "description", "source", "cost", "expected"), "quiver bench training")
    return Recipe(
        kind="dense" if dense else "colbert",
        model=ModelSection(
            init=str(initial.folder(kind)),
            pooling="mean" if dense else None,
            normalize=True if dense else None,
            max_length=workload.max_length if dense else None,
            colbert=None if dense else ColBERTSection(document_length=workload.max_length),
        ),
        data=DataSection(train=(workload.name,)),
        loss=LossSection(name=settings.losses[kind]),  # type: ignore[arg-type]  # checked by bench_training
        training=make_training(workload, settings),
        **described,
    )


def load_backend(name: str, kind: str, workload: Workload, settings: Settings, initial: InitialModel) -> Backend:
    """Load a backend for ``settings.rounds`` steps and one before them.

    Args:
        name: ``quiver``, or the library of the kind of model.
        kind: Kind of model.
        workload: Lengths of the texts.
        settings: Settings of the benchmark.
        initial: Folders with the initial weights.
    """
    steps = settings.rounds + 1
    if kind == "mlm":
        load = _load_masked_lm if name == OWN else _load_transformers
        return load(initial, workload, settings, steps=steps)
    return _load_retriever(name, make_recipe(kind, workload, settings, initial), initial, steps=steps)


class _MaskedTexts:
    """Tokenizes the documents of rows and masks their tokens, the same ones for every backend."""

    def __init__(self, initial: InitialModel, workload: Workload, settings: Settings) -> None:
        self._tokenizer = Tokenizer.from_pretrained(initial.encoder)
        self._longest = workload.max_length
        self._masker = Masker(self._tokenizer, probability=MASKED, seed=settings.seed)

    def __call__(self, rows: Sequence[Row]) -> tuple[list[Tensor], list[Tensor]]:
        """Return masked ids and labels of every document."""
        texts = [text for row in rows for name, text in row.items() if name.startswith("document_")]
        ids = self._tokenizer.encode(texts, max_length=self._longest).ids
        masked = [self._masker(np.array(each), serial) for serial, each in enumerate(ids)]
        return [torch.from_numpy(each) for each, _ in masked], [torch.from_numpy(labels) for _, labels in masked]


def _load_masked_lm(initial: InitialModel, workload: Workload, settings: Settings, *, steps: int) -> Backend:
    masked = _MaskedTexts(initial, workload, settings)
    model = load_head(MaskedLM, initial.folder("mlm"), device=default_device())

    def collate(rows: Sequence[Row]) -> dict[str, Any]:
        ids, labels = masked(rows)
        return {TEXTS: pack_ids([each.tolist() for each in ids]), "labels": torch.cat(labels)}

    def loss(batch: Mapping[str, Any]) -> Tensor:
        return model(batch[TEXTS], batch["labels"]).loss  # type: ignore[no-any-return]

    return Backend(model, loss, collate, make_training(workload, settings), steps=steps, on_host=("labels",))


def _load_transformers(initial: InitialModel, workload: Workload, settings: Settings, *, steps: int) -> Backend:
    from transformers import AutoModelForMaskedLM

    masked = _MaskedTexts(initial, workload, settings)
    model = AutoModelForMaskedLM.from_pretrained(str(initial.folder("mlm")), attn_implementation="sdpa").to(default_device())
    padding = model.config.pad_token_id

    def collate(rows: Sequence[Row]) -> dict[str, Any]:
        def padded(tensors: list[Tensor], value: int) -> Tensor:
            return nn.utils.rnn.pad_sequence(tensors, batch_first=True, padding_value=value)

        ids, labels = masked(rows)
        columns = {
            "input_ids": padded(ids, padding),
            "attention_mask": padded([torch.ones_like(each) for each in ids], 0),
            "labels": padded(labels, IGNORE_INDEX),
        }
        return {f"document_{name}": values for name, values in columns.items()}

    def loss(batch: Mapping[str, Any]) -> Tensor:
        [column] = columns_of(batch)
        return model(**column).loss  # type: ignore[no-any-return]

    return Backend(model, loss, collate, make_training(workload, settings), steps=steps)


def _load_retriever(name: str, recipe: Recipe, initial: InitialModel, *, steps: int) -> Backend:
    if name == OWN:
        from quiver.retrieval.training.losses import RetrievalLoss

        model = build_model(recipe, [])
        loss = RetrievalLoss(recipe, model)
        collate = Collator(model, merge_documents=recipe.loss.name == "distillation")
        return Backend(loss.model, loss, collate, recipe.training, steps=steps)
    load = _load_sentence_transformers if recipe.kind == "dense" else _load_pylate
    return load(recipe, initial, steps=steps)


def _load_sentence_transformers(recipe: Recipe, initial: InitialModel, *, steps: int) -> Backend:
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.data_collator import SentenceTransformerDataCollator
    from sentence_transformers.models import Normalize, Pooling, Transformer

    from quiver.retrieval.training.losses import LOSSES as LIBRARY_LOSSES

    first = Transformer(str(initial.encoder), max_seq_length=recipe.model.max_length, model_args={"attn_implementation": "sdpa"})
    pooling = Pooling(first.get_word_embedding_dimension(), pooling_mode="mean")
    model = SentenceTransformer(modules=[first, pooling, Normalize()], similarity_fn_name="cosine", device=default_device())
    # Version 6 calls tokenizing preprocessing.
    name = "preprocess" if hasattr(model, "preprocess") else "tokenize"
    collator = SentenceTransformerDataCollator(**{f"{name}_fn": getattr(model, name)})
    return Backend(model, library_loss(LIBRARY_LOSSES[recipe.loss.name](model, recipe.loss)), collator, recipe.training, steps=steps)


def _load_pylate(recipe: Recipe, initial: InitialModel, *, steps: int) -> Backend:
    from pylate.models import ColBERT
    from pylate.utils import ColBERTCollator

    from quiver.retrieval.training.losses import LOSSES as LIBRARY_LOSSES

    section = recipe.model.colbert
    model = ColBERT(
        str(initial.folder("colbert")),
        document_length=None if section is None else section.document_length,
        device=default_device(),
        model_kwargs={"attn_implementation": "sdpa"},
    )
    collator = ColBERTCollator(tokenize_fn=model.tokenize)

    def collate(rows: Sequence[Row]) -> dict[str, Any]:
        batch: dict[str, Any] = collator([_with_document_list(row) for row in rows] if recipe.loss.name == "distillation" else rows)
        return batch

    return Backend(model, library_loss(LIBRARY_LOSSES[recipe.loss.name](model, recipe.loss)), collate, recipe.training, steps=steps)


def _with_document_list(row: Row) -> Row:
    """Convert a row to the form that PyLate's distillation loss expects."""
    documents = [text for name, text in row.items() if name.startswith("document_")]
    return {"query": row["query"], "documents": documents, "scores": row["scores"]}


def open_model(model: str, *, seed: int) -> tuple[Encoder, Tokenizer]:
    """Load an encoder and its tokenizer, or create those of a preset: random weights, and a small vocabulary for synthetic texts.

    Args:
        model: Name of a preset, folder or Hugging Face Hub id.
        seed: Random seed of new weights.

    Raises:
        InputError: ``model`` is none of these, or cannot be read.
    """
    # Hub ids contain a slash, presets do not.
    if "/" in model or Path(model).is_dir():
        folder = read_model_folder(local_folder(model)).encoder_folder
        return load_encoder(folder), Tokenizer.from_pretrained(folder)
    config = preset(model)
    tokenizer = Tokenizer.train([ENGLISH] * 2, vocab_size=min(PRESET_VOCABULARY, config.vocab_size), max_length=config.max_positions)
    ids: dict[str, Any] = {f"{name}_token_id": tokenizer.special_id(name) for name in ("cls", "sep")}
    if config.position_offset == 0:  # RoBERTa counts positions from its padding token
        ids["pad_token_id"] = tokenizer.special_id("pad")
    return init_weights(Encoder(replace(config, **ids)), seed=seed), tokenizer


def write_initial_model(folder: Path, encoder: Encoder, tokenizer: Tokenizer, settings: Settings, *, compared: bool) -> InitialModel:
    """Write the folders that all backends load their weights from.

    Args:
        folder: An empty folder.
        encoder: Encoder to write; its dropout is set to 0 unless ``settings.dropout`` is true.
        tokenizer: Tokenizer of the encoder.
        settings: Settings with the kinds of model, dropout and seed.
        compared: Whether there are baselines. If so, a ColBERT starts from a projection initialised by PyLate.
    """
    if not settings.dropout:
        none: dict[str, Any] = dict.fromkeys(DROPOUTS, 0.0)
        encoder.config = replace(encoder.config, **none)
    plain = folder / "encoder"
    save_encoder(encoder, plain)
    tokenizer.save(plain)
    mlm = folder / "mlm" if "mlm" in settings.losses else None
    if mlm is not None:
        model = MaskedLM(encoder)
        init_head(model, seed=settings.seed)
        save_head(model, mlm)
    if "colbert" not in settings.losses or not compared:
        return InitialModel(plain, mlm=mlm)
    from pylate.models import ColBERT

    settled = ColBERTSettings()
    torch.manual_seed(settings.seed)
    colbert = ColBERT(
        str(plain),
        embedding_size=DIM,
        query_length=settled.query_length,
        document_length=settled.document_length,
        attend_to_expansion_tokens=settled.attend_to_expansion,
        device="cpu",
    )
    colbert.save_pretrained(str(folder / "colbert"), create_model_card=False)
    return InitialModel(plain, folder / "colbert", mlm)
