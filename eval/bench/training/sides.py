"""Who trains: Quiver's student, and the libraries' own models on the Hugging Face encoder, from the same weights.

Both are updated alike: the loss of the recipe, clipped gradients, the recipe's optimiser and schedule. What differs is what is
measured: the collator and the model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from quiver.encoder import Encoder, Tokenizer, init_weights, load_encoder, save_encoder
from quiver.encoder.checkpoints.folder import local_folder
from quiver.encoder.config import DROPOUTS
from quiver.encoder.presets import preset
from quiver.eval.bench.encoder.results import OWN
from quiver.eval.bench.training.results import TrainingSettings
from quiver.eval.bench.training.workloads import ENGLISH, Row, TrainingWorkload
from quiver.retrieval.models.model_folder import default_device, read_model_folder
from quiver.retrieval.training.sections import ColBERTSection, DataSection, LossSection, ModelSection, Recipe, TrainingSection
from quiver.retrieval.training.start import build_model

LIBRARIES: Mapping[str, str] = {"dense": "sentence-transformers", "colbert": "pylate"}
"""Kind of model -> the library that trains it."""

SCORED = ("margin_mse", "kl", "distillation")
"""Losses that need a teacher's scores."""

PRESET_VOCABULARY = 1_024
"""Token ids that are learnt for a preset, which has no tokenizer; its embedding keeps its size."""


@dataclass(frozen=True)
class Start:
    """Where both sides begin.

    Attributes:
        encoder: Folder of the encoder and its tokenizer, as transformers reads it.
        colbert: Folder of a PyLate model around it; None where none is asked for.
    """

    encoder: Path
    colbert: Path | None = None

    def of(self, kind: str) -> Path:
        """The folder for a kind of model."""
        return self.encoder if kind == "dense" or self.colbert is None else self.colbert


class Side:
    """One library with its model, a step at a time.

    Args:
        model: As the library has it.
        loss: Around it.
        collate: Rows to the tensors that the loss reads.
        recipe: Its optimiser and clipping.
        steps: Of the whole run, for the schedule.
    """

    def __init__(
        self, model: nn.Module, loss: nn.Module, collate: Callable[[Sequence[Row]], dict[str, Any]], recipe: Recipe, *, steps: int
    ) -> None:
        from quiver.retrieval.training.loop.optimizers import make_optimizer

        self._model = model.train()
        self._loss = loss
        self._collate = collate
        self._clip = recipe.training.max_grad_norm
        self._optimizer, self._schedule = make_optimizer(recipe.training, model.named_parameters(), steps)

    def step(self, rows: Sequence[Row]) -> float:
        """Train on a batch; its loss. It returns when the device has finished."""
        device = next(self._model.parameters()).device
        batch = {key: value.to(device) if isinstance(value, Tensor) else value for key, value in self._collate(rows).items()}
        loss: Tensor = self._loss(columns_of(batch), batch.get("label"))
        loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        nn.utils.clip_grad_norm_(self._model.parameters(), self._clip)
        self._optimizer.step()
        self._schedule.step()
        self._optimizer.zero_grad()
        return float(loss.detach())

    def columns(self, rows: Sequence[Row]) -> list[dict[str, Any]]:
        """The features of each column of a batch, as the loss reads them."""
        return columns_of(self._collate(rows))

    def places(self, rows: Sequence[Row]) -> int:
        """Places of a batch, padding included."""
        return sum(column["input_ids"].numel() for column in self.columns(rows))


def columns_of(batch: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A collator's batch as the features of each column, as sentence-transformers' trainer hands them to the loss.

    Example:
        >>> columns_of({"query_input_ids": 1, "query_attention_mask": 2, "document_1_input_ids": 3, "label": 4})
        [{'input_ids': 1, 'attention_mask': 2}, {'input_ids': 3}]
    """
    prefixes = [name.removesuffix("input_ids") for name in batch if name.endswith("_input_ids")]
    return [{name.removeprefix(prefix): value for name, value in batch.items() if name.startswith(prefix)} for prefix in prefixes]


def make_recipe(kind: str, workload: TrainingWorkload, settings: TrainingSettings, start: Start) -> Recipe:
    """The recipe that both sides follow: text policy, loss, AdamW with linear decay."""
    dense = kind == "dense"
    described: dict[str, Any] = dict.fromkeys(("name", "description", "source", "cost", "expected"), "quiver bench train")
    return Recipe(
        kind="dense" if dense else "colbert",
        model=ModelSection(
            init=str(start.of(kind)),
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
            precision="fp32",
            scheduler="linear",
            no_duplicates=False,
            log_every=1,
        ),
        **described,
    )


def make_side(name: str, recipe: Recipe, start: Start, *, steps: int) -> Side:
    """Load a side.

    Args:
        name: ``quiver``, or the library of the recipe's kind.
        recipe: What `make_recipe` gave.
        start: Where it begins.
        steps: Of the whole run.
    """
    if name == OWN:
        from quiver.retrieval.training.student.build import build_student

        student = build_student(recipe, build_model(recipe, []))
        return Side(student.library, student.loss, student.collator, recipe, steps=steps)
    make = _sentence_transformers if recipe.kind == "dense" else _pylate
    return make(recipe, start, steps=steps)


def _sentence_transformers(recipe: Recipe, start: Start, *, steps: int) -> Side:
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.data_collator import SentenceTransformerDataCollator
    from sentence_transformers.models import Normalize, Pooling, Transformer

    from quiver.retrieval.training.student.losses import LOSSES

    first = Transformer(str(start.encoder), max_seq_length=recipe.model.max_length, model_args={"attn_implementation": "sdpa"})
    pooling = Pooling(first.get_word_embedding_dimension(), pooling_mode="mean")
    model = SentenceTransformer(modules=[first, pooling, Normalize()], similarity_fn_name="cosine", device=default_device())
    return Side(
        model,
        LOSSES[recipe.loss.name](model, recipe.loss),
        SentenceTransformerDataCollator(tokenize_fn=model.tokenize),
        recipe,
        steps=steps,
    )


def _pylate(recipe: Recipe, start: Start, *, steps: int) -> Side:
    from pylate.models import ColBERT
    from pylate.utils import ColBERTCollator

    from quiver.retrieval.training.student.losses import LOSSES

    section = recipe.model.colbert or ColBERTSection()
    model = ColBERT(
        str(start.of("colbert")),
        document_length=section.document_length,
        device=default_device(),
        model_kwargs={"attn_implementation": "sdpa"},
    )
    collator = ColBERTCollator(tokenize_fn=model.tokenize)

    def collate(rows: Sequence[Row]) -> dict[str, Any]:
        batch: dict[str, Any] = collator([_documents_as_list(row) for row in rows] if recipe.loss.name == "distillation" else rows)
        return batch

    return Side(model, LOSSES[recipe.loss.name](model, recipe.loss), collate, recipe, steps=steps)


def _documents_as_list(row: Row) -> Row:
    """A row as PyLate's distillation reads it."""
    documents = [text for name, text in row.items() if name.startswith("document_")]
    return {"query": row["query"], "documents": documents, "scores": row["scores"]}


def open_start(model: str, *, seed: int) -> tuple[Encoder, Tokenizer]:
    """An encoder and its tokenizer: those of a checkpoint, or a preset's with random weights and a vocabulary for made-up texts.

    Args:
        model: A preset's name, or a folder or hub id.
        seed: Of the random weights.

    Raises:
        InputError: It is neither, or cannot be read.
    """
    # As in eval.efficiency.libraries: a hub id has a slash, a preset has none.
    if "/" in model or Path(model).is_dir():
        folder = read_model_folder(local_folder(model)).encoder_folder
        return load_encoder(folder), Tokenizer.from_pretrained(folder)
    config = preset(model)
    tokenizer = Tokenizer.train([ENGLISH] * 2, vocab_size=min(PRESET_VOCABULARY, config.vocab_size), max_length=config.max_positions)
    ids: dict[str, Any] = {f"{name}_token_id": tokenizer.special_id(name) for name in ("cls", "sep")}
    if config.position_offset == 0:  # RoBERTa counts positions from its padding token on
        ids["pad_token_id"] = tokenizer.special_id("pad")
    return init_weights(Encoder(replace(config, **ids)), seed=seed), tokenizer


def write_start(folder: Path, encoder: Encoder, tokenizer: Tokenizer, settings: TrainingSettings, *, compared: bool) -> Start:
    """Write the folders that all sides are loaded from.

    Args:
        folder: An empty one.
        encoder: Its configuration is changed where there is to be no dropout.
        tokenizer: Its vocabulary.
        settings: Kinds, dropout, seed.
        compared: There is another side: a ColBERT starts from the projection that PyLate draws.
    """
    if not settings.dropout:
        none: dict[str, Any] = dict.fromkeys(DROPOUTS, 0.0)
        encoder.config = replace(encoder.config, **none)
    plain = folder / "encoder"
    save_encoder(encoder, plain)
    tokenizer.save(plain)
    if "colbert" not in settings.losses or not compared:
        return Start(plain)
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
    return Start(plain, folder / "colbert")
