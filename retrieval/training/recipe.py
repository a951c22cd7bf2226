"""The recipe of a training run: its settings, the rules between them, and reading it from YAML.

A recipe determines a run except for the machine. Every problem of a recipe is reported at once. Nothing here opens data or a model: what
a source or a checkpoint holds is checked when it is loaded.

Source of most defaults: the ModernBERT release's examples/train_st.py and train_pylate.py (AnswerDotAI/ModernBERT at 8c57a0f).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from quiver.encoder.schema import Field, NonBlank, Positive, Rule, SectionRule, TextSchema
from quiver.encoder.training.architecture import ArchitectureSection
from quiver.encoder.training.recipe_file import Overrides, RecipeSchema, TrainingDtype, load_sections

RANDOM = "random"  # value of ``model.init`` for random weights
COLBERT_LENGTHS = {"query_length": 32, "document_length": 180}  # lengths of a ColBERT model -> default in tokens

DENSE_SETTINGS = ("pooling", "normalize", "max_length", "query_prompt", "document_prompt")
"""Settings of ``model`` that a bi-encoder's checkpoint may have too."""

STDLIB_DOCSTRINGS = "docstrings:stdlib"  # value of ``data.train`` for docstring and code pairs of the running Python's standard library


class RandomEncoderSection(ArchitectureSection):
    """Architecture of an encoder that starts from random weights."""

    vocab_size: int = Field(ge=261)
    """Size V of the vocabulary: 256 bytes, five special tokens, and merges. A multiple of 64 keeps the embedding aligned."""
    max_positions: int = Field(ge=3)
    """Longest sequence in tokens, special tokens included; ModernBERT: 8,192."""
    global_theta: float = Field(gt=0)
    """RoPE base of global layers; ModernBERT: 160,000 at 8,192 tokens, 10,000 before its context extension."""


class ColBERTSection(TextSchema):
    """Settings of a ColBERT model. Null: that of the starting checkpoint if it is a ColBERT model, otherwise the default, PyLate's."""

    dim: int | None = Field(default=None, ge=1)
    """Width d of a token vector, by default 128; a checkpoint's projection has its own."""
    projection: Literal["random", "orthogonal"] | None = None
    """Initialization of a new projection. ``random``, the default: as in PyLate. ``orthogonal``: the identity if ``dim`` is the width of
    the hidden states, otherwise orthonormal rows or columns."""
    query_prefix: str | None = None
    """Token after [CLS] of a query, added to the vocabulary if new, by default ``[Q] ``; empty for none."""
    document_prefix: str | None = None
    """Token after [CLS] of a document, added to the vocabulary if new, by default ``[D] ``; empty for none."""
    query_length: int | None = Field(default=None, ge=4)
    """Maximum length of a query in tokens, prefix and special tokens included, by default 32; with expansion the length of every query."""
    document_length: int | None = Field(default=None, ge=4)
    """Maximum length of a document in tokens, prefix and special tokens included, by default 180; stored in the checkpoint."""
    query_expansion: bool | None = None
    """Pad queries with [MASK] tokens whose vectors are scored, by default true."""
    attend_to_expansion: bool | None = None
    """Let the other tokens attend to expansion tokens, by default false."""
    skiplist: Literal["punctuation", "none"] | None = None
    """Tokens whose document vectors are dropped: ASCII punctuation, the default, or none (for code)."""


class ModelSection(TextSchema):
    """Encoder, tokenizer, and how texts become vectors.

    Pooling, normalization, lengths and prompts that are null are those of the starting checkpoint; of a bare encoder or random weights
    mean pooling, cosine similarity, the encoder's length and no prompts.
    """

    init: NonBlank
    """Starting weights: ``random``, a folder, or an id on the Hugging Face Hub."""
    revision: NonBlank | None = None
    """Branch, tag or commit of ``init`` on the Hub; run.json has the commit that was read."""
    pooling: Literal["mean", "cls"] | None = None
    """Pooling of hidden states: the mean over all tokens, or the first token; null for the checkpoint's. Only for ``kind: dense``."""
    normalize: bool | None = None
    """Normalize vectors and compare them by cosine, not by dot product; null for what the checkpoint does. Only for ``kind: dense``."""
    max_length: int | None = Field(default=None, ge=3)
    """Maximum length of queries and documents in tokens, prompt and special tokens included (checkpoints store one length); null for the
    checkpoint's. Only for ``kind: dense``."""
    query_prompt: str | None = None
    """Text before every query, in training and in use; stored in the checkpoint. Null for the checkpoint's, ``""`` for none. Only for
    ``kind: dense``."""
    document_prompt: str | None = None
    """Text before every document, likewise."""
    colbert: ColBERTSection | None = None
    """Settings of a ColBERT model. Only for ``kind: colbert``."""
    only_if_bare: tuple[NonBlank, ...] = ()
    """Names of settings of this section, such as ``pooling`` or ``colbert.query_length``, that a checkpoint's own settings replace: they
    apply to a bare encoder only. A changed ``model.init`` puts all settings here that are not given with it."""
    tokenizer: NonBlank | None = None
    """``train`` to learn a vocabulary from the training texts; or a folder or Hub id. Required for ``init: random``; only allowed there."""
    vocabulary: Literal["words", "identifiers"] = "words"
    """How a new vocabulary splits text: as ModernBERT's, or for code (``identifiers``): lower case, camelCase and snake_case split."""
    architecture: RandomEncoderSection | None = None
    """Architecture of the encoder. Required for ``init: random``, and only allowed there."""


class DataSection(TextSchema):
    """Sources of the training rows, and the fields that are read.

    A source is a .jsonl, .csv or .tsv file, each also with .gz, or a .parquet file; a folder with such files;
    ``hub://OWNER/NAME[@REVISION]/CONFIG:SPLIT`` for a data set on the Hugging Face Hub; or
    ``hub://OWNER/NAME[@REVISION]/path/to/file.jsonl.gz`` for a file on it. Paths are relative to the working directory. The columns of CSV
    and TSV are fields. A field is a key of a row, or a dotted path into lists and mappings, in which ``*`` stands for every item:
    ``negative_passages.*.text``.
    """

    train: tuple[NonBlank, ...]
    """Sources of the rows, read in this order; or ``docstrings:stdlib``. For ``format: beir``: BEIR folders."""
    format: Literal["texts", "ids", "beir"] = "texts"
    """Content of a row. ``texts``: the texts. ``ids``: ids of texts in ``queries`` and ``documents``. ``beir``: one row is made for each
    relevant document in the judgements of a BEIR folder."""
    split: NonBlank = "train"
    """Split of the judgements of a BEIR folder."""
    query_field: NonBlank = "query"
    """Field of the query's text or id."""
    document_fields: tuple[NonBlank, ...] = ("positive",)
    """Fields of the documents' texts or ids, concatenated in this order: the first document is the positive, the others are hard negatives.
    A field may hold one document or a list (also a list stored as a string: ``"[7, 8]"``)."""
    positives: Literal["first", "each"] = "first"
    """``first``: the first document is the only positive; if there are several document fields, the first one must hold one document.
    ``each``: one row for each document of the first field, with the negatives of the other fields (FlagEmbedding's ``pos`` and ``neg``).
    Several positives of a query should not be in one batch: see ``training.no_duplicates``."""
    score_fields: tuple[NonBlank, ...] = ()
    """Fields of the teacher scores, concatenated in this order: one number per document. Required by distillation losses."""
    documents_per_row: int | None = Field(default=None, ge=1)
    """Documents per row, positive included; null: as many as the longest row has. Negatives that are blank or equal to another document of
    the row are removed, and counted in run.json."""
    negatives: Literal["first", "random"] = "first"
    """Hard negatives of a row that has more than needed: the first, or others in every epoch (drawn by seed, epoch and row)."""
    short_rows: Literal["error", "skip", "repeat", "fewer"] | None = None
    """Treatment of a row with fewer documents than ``documents_per_row``. ``fewer``: train with those that it has. ``repeat``: draw some of
    its negatives again, others in every epoch; a row without negatives is skipped. ``skip``: leave it out. ``error``: refuse it. Null:
    ``fewer``; ``error`` with teacher scores, whose losses need rows of equal length. run.json counts the rows. A row without a query or a
    positive is refused, or with ``skip`` left out."""
    label_field: NonBlank | None = None
    """Field that says whether the documents of a row are relevant: a number, true or false. A row whose value is 0 or less is left out, and
    counted in run.json. If the field holds a list, one value per document, the documents above 0 are the positives and the others hard
    negatives. Pairs with a label, score or similarity other than 1 are refused unless it is named here or in ``ignore_fields``."""
    ignore_fields: tuple[NonBlank, ...] = ()
    """Fields such as ``score`` that say nothing about whether a document is relevant."""
    queries: tuple[NonBlank, ...] | None = None
    """Sources of the query texts by id. Required for ``format: ids``, and only allowed there. If ``train`` has several sources: one source
    for all of them, or one for each, in the same order; then an id names a text of the own source only."""
    documents: tuple[NonBlank, ...] | None = None
    """Sources of the document texts by id, likewise."""
    query_id_field: NonBlank = "query_id"
    """Field of the id in ``queries``."""
    document_id_field: NonBlank = "document_id"
    """Field of the id in ``documents``."""
    text_field: NonBlank = "text"
    """Field of the text in ``queries`` and ``documents``."""
    shuffle: bool = False
    """Shuffle the rows by ``training.seed`` before ``limit`` is applied; files are often sorted by source."""
    limit: int | None = Field(default=None, ge=1)
    """Maximum number of rows; null for all."""
    revision: str = ""
    """Version of the data (a commit, a release, a date) for run.json."""
    licence: str = ""
    """Licence of the data, for run.json."""

    @property
    def short(self) -> Literal["error", "skip", "repeat", "fewer"]:
        """Treatment of short rows, with null resolved; data has teacher scores if and only if the loss needs them."""
        return self.short_rows or ("error" if self.score_fields else "fewer")


class LossSection(TextSchema):
    """The loss: one of sentence-transformers for ``kind: dense``, one of PyLate for ``kind: colbert``."""

    name: Literal["mnrl", "cached_mnrl", "margin_mse", "kl", "contrastive", "cached_contrastive", "distillation"]
    """Dense: ``mnrl``, cross-entropy of the positive against all other documents of the batch (arXiv:1705.00652); ``cached_mnrl``, the
    same with less memory (GradCache, arXiv:2101.06983); ``margin_mse`` (arXiv:2010.02666) and ``kl``, from teacher scores. ColBERT:
    ``contrastive`` and ``cached_contrastive``, likewise; ``distillation``, KL divergence from teacher scores."""
    scale: float = Field(default=20.0, gt=0)
    """mnrl, cached_mnrl: factor of the similarities before the softmax, 1 / temperature; sentence-transformers: 20."""
    temperature: float = Field(default=1.0, gt=0)
    """contrastive, cached_contrastive: divisor of the scores; PyLate: 1. kl: divisor of the student's and the teacher's scores."""
    mini_batch_size: int = Field(default=32, ge=1)
    """cached_mnrl, cached_contrastive: texts encoded at a time; the result does not depend on it."""
    gather_across_devices: bool = False
    """mnrl, cached_mnrl, contrastive, cached_contrastive: use the documents of all processes as negatives."""
    student_scores: Literal["minmax", "as_they_are"] = "minmax"
    """distillation: ``minmax`` scales the student's scores of each query to 0..1 before the softmax (PyLate's ``normalize_scores``)."""
    teacher_scores: Literal["minmax", "as_they_are"] = "as_they_are"
    """distillation, kl, margin_mse: ``minmax`` scales the teacher's scores likewise (JaColBERTv2.5 scales both)."""
    matryoshka_dims: tuple[Annotated[int, Field(ge=1)], ...] = ()
    """Dense: vector widths to train (Matryoshka, arXiv:2205.13147), descending from the width of the vectors; empty for none."""


class LoRASection(TextSchema):
    """Low-rank matrices that are trained instead of the encoder's weights (arXiv:2106.09685), and merged at the end of the run.

    They replace the matrices of the blocks. The token embedding is not trained, not even its rows of new prefixes; projections after the
    encoder are trained in full.
    """

    rank: Positive
    """Rank r of the matrices; at most the width of the encoder."""
    alpha: float = Field(gt=0)
    """Scale of the low-rank update: the product of the matrices is multiplied by alpha / rank."""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """Dropout rate on the input of the low-rank matrices."""


class TrainingSection(TextSchema):
    """Optimizer, schedule, batches and checkpoints."""

    epochs: float = Field(gt=0)
    """Passes over the rows, counted in full batches. With ``no_duplicates`` a pass may have fewer batches, and the rest is taken from the
    next pass; run.json has the number of passes done."""
    batch_size: Positive
    """Rows per batch and process; with in-batch negatives, the documents of the other rows are negatives of a query."""
    learning_rate: float = Field(gt=0, le=1)
    """Peak learning rate."""
    warmup_ratio: float = Field(ge=0, le=1)
    """Share of the steps in which the learning rate rises from zero."""
    weight_decay: float = Field(ge=0, le=1)
    """Decoupled weight decay of AdamW."""
    max_grad_norm: float = Field(gt=0)
    """L2 norm to which the gradient is clipped."""
    seed: int = Field(ge=0, le=2**32 - 1)
    """Random seed of new weights, the order of the rows and dropout."""
    scheduler: Literal["linear", "cosine", "constant"]
    """Learning rate after the warm-up: falling to zero, linearly or as a cosine, or constant."""
    no_duplicates: bool
    """Allow no text twice in a batch, where it would be a negative of itself."""
    log_every: Positive
    """Steps per log line."""
    dtype: TrainingDtype = "auto"
    """Dtype of the forward and backward pass (``bfloat16``: autocast); weights, gradients and optimizer state are float32. ``auto``:
    bfloat16 on a GPU of compute capability 8.0 and above, otherwise float32; a resumed run keeps the dtype that it began with."""
    max_steps: int | None = Field(default=None, ge=1)
    """Maximum number of steps, whatever ``epochs`` says; null for no limit."""
    accumulation: int = Field(default=1, ge=1)
    """Batches per step; the loss of a step is their mean. It adds no in-batch negatives: for those raise batch_size, with a cached loss."""
    optimizer: Literal["adamw", "schedule_free_adamw"] = "adamw"
    """AdamW, or schedule-free AdamW (arXiv:2405.15682), which requires ``scheduler: constant``."""
    max_length: int | None = Field(default=None, ge=3)
    """Length to which texts are truncated in training only, in tokens; the checkpoint keeps its own, longer limit."""
    gradient_checkpointing: bool = False
    """Recompute layers in the backward pass: slower, with memory for the activations of one layer instead of all."""
    save_every: int | None = Field(default=None, ge=1)
    """Steps between checkpoints; null for one at the end of each epoch."""
    keep_checkpoints: int = Field(default=2, ge=1)
    """Number of newest checkpoints to keep. The best one is also kept with ``development.keep_best``, and one saved for a signal until the
    next is saved."""
    average_checkpoints: int = Field(default=1, ge=1)
    """Number of last checkpoints whose weights are averaged to the model of the run; 1 for the final weights only."""
    sharding: Literal["none", "full"] = "none"
    """Under torchrun. ``none``: every process holds the whole model. ``full``: every process holds a share of weights, gradients and
    optimizer state (FSDP, arXiv:2304.11277), for models that do not fit on one GPU. The result is the same."""
    lora: LoRASection | None = None
    """Train low-rank matrices instead of the encoder's weights; null for all weights."""


SCORE = "ndcg@10"  # measure of a run on its development collections, and its key in the log
PART_SCORE = f"{SCORE} "  # beginning of the key of one of several collections, before its name


class DevelopmentSection(TextSchema):
    """Collections on which the model is evaluated during training: nDCG@10 by exact search, in run.json and in the report."""

    data: tuple[NonBlank, ...]
    """BEIR folders, or names of published collections. The score of several is the mean over them; the log has that of each, too."""
    split: NonBlank = "dev"
    """Split of the judgements, of all collections."""
    every: int | None = Field(default=None, ge=1)
    """Steps between evaluations; null for one at the end of each epoch. The last step is always evaluated."""
    keep_best: bool = False
    """Use the checkpoint with the best score as the model of the run, not the last one."""


class Recipe(RecipeSchema):
    """A training run, determined except for the machine."""

    kind: Literal["dense", "colbert"]
    """``dense``: one vector per text. ``colbert``: one vector per token."""
    model: ModelSection
    """Encoder, tokenizer, and how texts become vectors."""
    data: DataSection
    """Training rows."""
    loss: LossSection
    """The loss."""
    training: TrainingSection
    """Optimizer, schedule, batches and checkpoints."""
    development: DevelopmentSection | None = None
    """Evaluation during training; null for none."""

    def adapted(self, before: Recipe, given: Collection[str]) -> Recipe:
        """Leave out what is no longer true; with another ``model.init``, keep settings of the old one for bare encoders only."""
        found = super().adapted(before, given)
        section = found.model
        if "model.only_if_bare" in given:
            return found
        names: Iterable[str] = section.only_if_bare
        if section.init not in (before.model.init, RANDOM):
            kept = dict(_start_settings(before.model))
            names = [name for name, value in _start_settings(section) if name in kept and kept[name] == value]
        # A setting that was given counts for every checkpoint.
        named = tuple(name for name in names if f"model.{name}" not in given)
        return TextSchema.replace(found, model=section.replace(only_if_bare=named))


def _start_settings(section: ModelSection) -> Iterator[tuple[str, object]]:
    """Settings of a section that a checkpoint may have too, as far as they are not null."""
    for name in DENSE_SETTINGS:
        if (value := getattr(section, name)) is not None:
            yield name, value
    for name in ColBERTSection.model_fields:
        if (value := getattr(section.colbert, name, None)) is not None:
            yield f"colbert.{name}", value


LOSSES_BY_KIND = {"dense": ("mnrl", "cached_mnrl", "margin_mse", "kl"), "colbert": ("contrastive", "cached_contrastive", "distillation")}
"""Kind of model -> the losses that train it."""

IN_BATCH = ("mnrl", "cached_mnrl", "contrastive", "cached_contrastive")  # losses with in-batch negatives
DISTILLATION = ("margin_mse", "kl", "distillation")  # losses that need teacher scores

LOSSES_BY_SETTING = {
    "scale": ("mnrl", "cached_mnrl"),
    "temperature": ("kl", "contrastive", "cached_contrastive"),
    "mini_batch_size": ("cached_mnrl", "cached_contrastive"),
    "gather_across_devices": IN_BATCH,
    "student_scores": ("distillation",),
    "teacher_scores": DISTILLATION,
}
"""Setting of ``loss`` -> losses that use it. With any other loss it has no effect and must keep its default."""

_SHAPE = "model.architecture"


def _at_most(field: str, limit: str, shown: str = "") -> Rule:
    """A setting is at most another one, if both are set."""
    text = f"must be <= {shown or limit} {{1}}, got {{0}}"
    return Rule((field, limit), lambda value, most: value is not None and most is not None and value > most, text)


def _required_only_for(field: str, key: str, wanted: str, remedy: str = "") -> tuple[Rule, Rule]:
    """A setting is given if and only if another one has a value."""
    name = key.rpartition(".")[2]
    remedy = remedy or f"only for {name}: {wanted}, but {name} is {{1}}"
    return (
        Rule((field, key), lambda value, given: given == wanted and value is None, f"required for {name}: {wanted}"),
        Rule((field, key), lambda value, given: given != wanted and value is not None, remedy),
    )


def _only_for_kind(field: str, wanted: str) -> Rule:
    return Rule(
        (field, "kind"), lambda value, kind: kind != wanted and value not in (None, "", ()), f"only for kind: {wanted}, but kind is {{1}}"
    )


ARCHITECTURE: tuple[Rule | SectionRule, ...] = (
    SectionRule((_SHAPE,), lambda shape: [] if shape is None else shape.problems(_SHAPE)),
    *(
        rule
        for name in ("architecture", "tokenizer")
        for rule in _required_only_for(
            f"model.{name}",
            "model.init",
            RANDOM,
            f"only for init: random; {{1!r}} brings its own: add model.{name}=null, or take a recipe of a trained model (docstrings-dense)",
        )
    ),
    *(
        _at_most(f"model.{name}", f"{_SHAPE}.max_positions", "architecture.max_positions")
        for name in ("max_length", *(f"colbert.{name}" for name in COLBERT_LENGTHS))
    ),
    *(
        Rule(
            (f"model.colbert.{name}", f"{_SHAPE}.max_positions"),
            lambda length, positions, default=default: length is None and default > positions,
            f"must be <= architecture.max_positions {{1}}, got {default}",
        )
        for name, default in COLBERT_LENGTHS.items()
    ),
)

MODEL = (
    *(_only_for_kind(f"model.{name}", "dense") for name in DENSE_SETTINGS),
    _only_for_kind("model.colbert", "colbert"),
    Rule(
        ("model.only_if_bare",),
        lambda names: not set(names) <= {*DENSE_SETTINGS, *(f"colbert.{name}" for name in ColBERTSection.model_fields)},
        "must name settings such as pooling or colbert.query_length, got {0}",
    ),
)

DATA = (
    Rule(("data.train",), lambda train: not train, "must name at least one source"),
    Rule(
        ("data.train",),
        lambda train: STDLIB_DOCSTRINGS in train and len(train) > 1,
        f"{STDLIB_DOCSTRINGS} cannot be mixed with other sources",
    ),
    *(rule for name in ("queries", "documents") for rule in _required_only_for(f"data.{name}", "data.format", "ids")),
    *(
        Rule(
            (f"data.{name}", "data.train"),
            lambda texts, train: texts is not None and (not texts or (len(train) > 1 and len(texts) not in (1, len(train)))),
            "must be one source, or one for each source of data.train, in the same order",
        )
        for name in ("queries", "documents")
    ),
    Rule(
        ("data.format", "data.score_fields"),
        lambda form, scores: form == "beir" and bool(scores),
        "beir folders have no teacher scores; run quiver mine and quiver teacher-scores first, and train on their rows",
    ),
    Rule(
        ("data.positives", "data.format"),
        lambda positives, form: positives == "each" and form == "beir",
        "format: beir already makes one row per relevant document; remove it",
    ),
    Rule(
        ("data.short_rows", "data.score_fields"),
        lambda short, scores: short == "fewer" and bool(scores),
        "fewer needs a loss with in-batch negatives; with data.score_fields use repeat, skip or error",
    ),
    Rule(
        ("data.label_field", "data.score_fields"),
        lambda label, scores: label is not None and bool(scores),
        "the losses of data.score_fields learn from the scores alone; remove one of the two",
    ),
    Rule(
        ("data.label_field", "data.format"),
        lambda label, form: label is not None and form == "beir",
        "the judgements of a BEIR folder have grades already; remove it",
    ),
    Rule(("data.document_fields",), lambda fields: not fields, "must name at least one field"),
    Rule(("data.document_fields",), lambda fields: len(set(fields)) < len(fields), "names a field twice: {0}"),
    Rule(("data.document_fields", "data.query_field"), lambda fields, query: query in fields, "must not contain query_field {1!r}"),
    Rule(
        ("data.limit", "training.batch_size"),
        lambda limit, size: limit is not None and limit < size,
        "must be >= training.batch_size {1}, got {0}",
    ),
)

LOSS = (
    Rule(
        ("loss.name", "kind"),
        lambda name, kind: name not in LOSSES_BY_KIND[kind],
        "{0} cannot train kind: {1}; the losses of dense are "
        + ", ".join(LOSSES_BY_KIND["dense"])
        + ", of colbert "
        + ", ".join(LOSSES_BY_KIND["colbert"]),
    ),
    Rule(
        ("loss.name", "data.score_fields"),
        lambda name, fields: name in DISTILLATION and not fields,
        "{0} needs teacher scores: name their fields in data.score_fields",
    ),
    Rule(
        ("data.score_fields", "loss.name"),
        lambda fields, name: bool(fields) and name not in DISTILLATION,
        "{1} does not use teacher scores: remove it, or choose " + " or ".join(DISTILLATION),
    ),
    Rule(
        ("loss.name", "training.batch_size"),
        lambda name, size: name in IN_BATCH and size < 2,
        "{0} takes its negatives from the batch: training.batch_size must be >= 2",
    ),
    *(
        Rule(
            (f"loss.{setting}", "loss.name"),
            lambda value, name, losses=losses, default=LossSection.model_fields[setting].default: name not in losses and value != default,
            f"{{1}} does not use it (only {', '.join(losses)} do); remove it",
        )
        for setting, losses in LOSSES_BY_SETTING.items()
    ),
    _only_for_kind("loss.matryoshka_dims", "dense"),
    Rule(
        ("loss.matryoshka_dims",),
        lambda dims: list(dims) != sorted(set(dims), reverse=True),
        "must be descending, such as [384, 256, 128]; got {0}",
    ),
)

TRAINING = (
    Rule(("development.data",), lambda data: not data, "must name at least one collection; development=null trains without one"),
    Rule(
        ("training.optimizer", "training.scheduler"),
        lambda optimizer, scheduler: optimizer == "schedule_free_adamw" and scheduler != "constant",
        "schedule_free_adamw has its own schedule: training.scheduler must be constant, got {1}",
    ),
    Rule(
        ("training.sharding", "training.optimizer"),
        lambda sharding, optimizer: sharding == "full" and optimizer == "schedule_free_adamw",
        "full needs training.optimizer: adamw",
    ),
    Rule(
        ("training.sharding", "training.lora.rank"),
        lambda sharding, rank: sharding == "full" and rank is not None,
        "full cannot be combined with training.lora; remove one of them",
    ),
    Rule(
        ("training.keep_checkpoints", "training.average_checkpoints"),
        lambda kept, averaged: kept < averaged,
        "must be >= training.average_checkpoints {1}, got {0}",
    ),
    Rule(
        ("training.average_checkpoints", "development.keep_best"),
        lambda averaged, best: averaged > 1 and best,
        "cannot be combined with development.keep_best; remove one of them",
    ),
    _at_most("training.max_length", "model.max_length"),
    _at_most("training.max_length", "model.colbert.document_length"),
    _at_most("training.lora.rank", f"{_SHAPE}.hidden_size", "architecture.hidden_size"),
)

RULES: tuple[Rule | SectionRule, ...] = (*ARCHITECTURE, *MODEL, *DATA, *LOSS, *TRAINING)
"""All rules. Each names the field that is wrong and a remedy, and is checked only if its fields are valid by themselves."""


def load_recipe(recipe: str | Path | Mapping[str, Any] | Recipe, overrides: Overrides = ()) -> Recipe:
    """Read and check a recipe."""
    return load_sections(recipe, Recipe, RULES, kinds=tuple(LOSSES_BY_KIND), overrides=overrides)
