"""Backends of the training benchmark: Quiver's model, and the libraries' own models on the transformers encoder, from equal weights.

All are trained with the loss, gradient clipping, optimizer and schedule of one recipe. They differ in the collator and the model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from quiver.encoder import Encoder, PackedBatch, Tokenizer, init_weights, load_encoder, save_encoder
from quiver.encoder.checkpoints.folder import local_folder
from quiver.encoder.config import DROPOUTS
from quiver.encoder.presets import preset
from quiver.eval.bench.results import OWN
from quiver.retrieval.models.loading import default_device, read_model_folder
from quiver.retrieval.training.dataloader import TEXTS, Collator
from quiver.retrieval.training.model import build_model
from quiver.retrieval.training.recipe import ColBERTSection, DataSection, LossSection, ModelSection, Recipe, TrainingSection

Row: TypeAlias = dict[str, Any]
"""A training row: ``query``, ``document_1``, ..., and ``scores`` if the loss needs a teacher."""

LIBRARIES: Mapping[str, str] = {"dense": "sentence-transformers", "colbert": "pylate"}
"""Kind of model -> library to compare with."""

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
    """

    encoder: Path
    colbert: Path | None = None

    def folder(self, kind: str) -> Path:
        """Folder for a kind of model."""
        return self.encoder if kind == "dense" or self.colbert is None else self.colbert


@dataclass(frozen=True)
class Settings:
    """Settings of the training benchmark.

    Attributes:
        losses: Kind of model to measure (``dense``, ``colbert``) -> name of its loss, as in recipes.
        threads: Threads on a CPU; None for torch's default.
        rounds: Timed steps of each backend.
        seed: Random seed of texts, rows, teacher scores and new weights.
        batch_size: Rows per batch; None for the workload's.
        dropout: Keep the checkpoint's dropout. Its random numbers differ between backends, so losses are not compared.
        baselines: Measure the other libraries as well.
        memory: Measure peak memory as well, in a fresh process per backend and case.
    """

    losses: Mapping[str, str]
    threads: int | None = None
    rounds: int = 5
    seed: int = 42
    batch_size: int | None = None
    dropout: bool = False
    baselines: bool = True
    memory: bool = False


class Backend:
    """A model that is trained one step at a time.

    Args:
        model: The module that is trained.
        loss: Loss of a batch.
        collate: Converts rows to a batch.
        recipe: Recipe with the settings of the optimizer and gradient clipping.
        steps: Steps of the whole run, for the schedule.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Callable[[Mapping[str, Any]], Tensor],
        collate: Callable[[Sequence[Row]], dict[str, Any]],
        recipe: Recipe,
        *,
        steps: int,
    ) -> None:
        from quiver.retrieval.training.state import make_optimizer

        self._model = model.train()
        self._loss = loss
        self._collate = collate
        self._clip = recipe.training.max_grad_norm
        self._optimizer, self._schedule = make_optimizer(recipe.training, model.named_parameters(), steps)

    def step(self, rows: Sequence[Row]) -> float:
        """Train on a batch and return its loss, when the device has finished."""
        device = next(self._model.parameters()).device
        batch = {key: value.to(device) if isinstance(value, Tensor | PackedBatch) else value for key, value in self._collate(rows).items()}
        loss = self._loss(batch)
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(self._model.parameters(), self._clip)
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


def make_recipe(kind: str, workload: Workload, settings: Settings, initial: InitialModel) -> Recipe:
    """Make the recipe that all backends follow: lengths, loss, AdamW with linear decay."""
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
        training=TrainingSection(
            epochs=1,
            batch_size=settings.batch_size or workload.rows,
            learning_rate=2e-5,
            warmup_ratio=0.0,
            weight_decay=0.01,
            max_grad_norm=1.0,
            seed=settings.seed,
            dtype="float32",
            scheduler="linear",
            no_duplicates=False,
            log_every=1,
        ),
        **described,
    )


def load_backend(name: str, recipe: Recipe, initial: InitialModel, *, steps: int) -> Backend:
    """Load a backend.

    Args:
        name: ``quiver``, or the library of the recipe's kind of model.
        recipe: Recipe returned by `make_recipe`.
        initial: Folders with the initial weights.
        steps: Steps of the whole run.
    """
    if name == OWN:
        from quiver.retrieval.training.losses import RetrievalLoss

        model = build_model(recipe, [])
        loss = RetrievalLoss(recipe, model)
        return Backend(loss.model, loss, Collator(model, merge_documents=recipe.loss.name == "distillation"), recipe, steps=steps)
    load = _load_sentence_transformers if recipe.kind == "dense" else _load_pylate
    return load(recipe, initial, steps=steps)


def _load_sentence_transformers(recipe: Recipe, initial: InitialModel, *, steps: int) -> Backend:
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.data_collator import SentenceTransformerDataCollator
    from sentence_transformers.models import Normalize, Pooling, Transformer

    from quiver.retrieval.training.losses import LOSSES

    first = Transformer(str(initial.encoder), max_seq_length=recipe.model.max_length, model_args={"attn_implementation": "sdpa"})
    pooling = Pooling(first.get_word_embedding_dimension(), pooling_mode="mean")
    model = SentenceTransformer(modules=[first, pooling, Normalize()], similarity_fn_name="cosine", device=default_device())
    collator = SentenceTransformerDataCollator(tokenize_fn=model.tokenize)
    return Backend(model, library_loss(LOSSES[recipe.loss.name](model, recipe.loss)), collator, recipe, steps=steps)


def _load_pylate(recipe: Recipe, initial: InitialModel, *, steps: int) -> Backend:
    from pylate.models import ColBERT
    from pylate.utils import ColBERTCollator

    from quiver.retrieval.training.losses import LOSSES

    section = recipe.model.colbert or ColBERTSection()
    model = ColBERT(
        str(initial.folder("colbert")),
        document_length=section.document_length,
        device=default_device(),
        model_kwargs={"attn_implementation": "sdpa"},
    )
    collator = ColBERTCollator(tokenize_fn=model.tokenize)

    def collate(rows: Sequence[Row]) -> dict[str, Any]:
        batch: dict[str, Any] = collator([_with_document_list(row) for row in rows] if recipe.loss.name == "distillation" else rows)
        return batch

    return Backend(model, library_loss(LOSSES[recipe.loss.name](model, recipe.loss)), collate, recipe, steps=steps)


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
    if "colbert" not in settings.losses or not compared:
        return InitialModel(plain)
    from pylate.models import ColBERT

    section = ColBERTSection()
    torch.manual_seed(settings.seed)
    model = ColBERT(
        str(plain),
        embedding_size=section.dim,
        query_length=section.query_length,
        document_length=section.document_length,
        attend_to_expansion_tokens=section.attend_to_expansion,
        device="cpu",
    )
    model.save_pretrained(str(folder / "colbert"), create_model_card=False)
    return InitialModel(plain, folder / "colbert")
