"""The fields of a recipe: what each means, its unit, its bounds and where its usual value comes from.

This module holds the fields alone; how they hang together stands in `quiver.retrieval.training.rules`, reading in `recipe`.

Source of the default habits: the ModernBERT release's examples/train_st.py and train_pylate.py
(AnswerDotAI/ModernBERT at 8c57a0f).
"""

from __future__ import annotations

from typing import Annotated, Literal

from quiver.encoder.schema import Field, NonBlank, TextSchema

STDLIB_DOCSTRINGS = "docstrings:stdlib"
"""Value of ``data.train`` for pairs mined from the running interpreter's standard library."""


class ArchitectureSection(TextSchema):
    """The shape of an encoder that starts from random weights."""

    family: Literal["modernbert"]
    """Which switches of the encoder are set (arXiv:2412.13663, section 2.1)."""
    hidden_size: int = Field(ge=2)
    """Width D of the hidden states; a multiple of twice ``heads``."""
    layers: int = Field(ge=1)
    """Number of blocks."""
    heads: int = Field(ge=1)
    """Attention heads H."""
    intermediate_size: int = Field(ge=1)
    """Width of the gated MLP between its two projections."""
    vocab_size: int = Field(ge=261)
    """Token ids V: 256 bytes, five special tokens, and merges; a multiple of 64 keeps the embedding aligned."""
    max_positions: int = Field(ge=3)
    """Longest sequence in tokens, special tokens included; ModernBERT: 8,192."""
    global_every: int = Field(ge=1)
    """Every how many layers one is global, from the first on; ModernBERT: 3. The last is too if it divides layers - 1."""
    window: int = Field(ge=2, multiple_of=2)
    """Tokens that a local layer sees, half of them on either side; ModernBERT: 128."""
    global_theta: float = Field(gt=0)
    """RoPE base of global layers; ModernBERT: 160,000 at 8,192 tokens, 10,000 before its context extension."""
    local_theta: float = Field(gt=0)
    """RoPE base of local layers; ModernBERT: 10,000."""


class ColBERTSection(TextSchema):
    """How a ColBERT model reads texts. PyLate's defaults; a setting that the starting checkpoint has too is replaced."""

    dim: int = Field(default=128, ge=1)
    """Width d of a token's vector; must be the checkpoint's own if it has a projection already."""
    projection: Literal["random", "orthogonal"] = "random"
    """How a new projection starts: drawn entry by entry, as PyLate's does; or orthogonal: the identity where ``dim`` is the
    width of the hidden states, which then compare as they did, and else what a random rotation has of ``dim`` rows or columns."""
    query_prefix: str = "[Q] "
    """Token put behind [CLS] of a query, added to the vocabulary if it is new; empty for none."""
    document_prefix: str = "[D] "
    """The same for documents."""
    query_length: int = Field(default=32, ge=4)
    """Tokens of a query, prefix and special tokens included; with expansion every query has that many."""
    document_length: int = Field(default=180, ge=4)
    """Tokens a document is cut to, prefix and special tokens included; written into the checkpoint."""
    query_expansion: bool = True
    """Fill queries up with [MASK] tokens, whose vectors count."""
    attend_to_expansion: bool = False
    """The other tokens see the expansion tokens."""
    skiplist: Literal["punctuation", "none"] = "punctuation"
    """Tokens whose document vectors are dropped: ASCII punctuation, or none (for code)."""


class ModelSection(TextSchema):
    """The encoder and how a text becomes a vector, or vectors."""

    init: NonBlank
    """``random``, or a folder or hub id whose weights the run starts from."""
    revision: NonBlank | None = None
    """Branch, tag or commit of ``init`` on the hub."""
    pooling: Literal["mean", "cls"] | None = None
    """Which hidden states make the vector: the mean over all tokens, or the first. For ``kind: dense``, and there required."""
    normalize: bool | None = None
    """Vectors of length 1, and cosine as the similarity; else the dot product. For ``kind: dense``, and there required."""
    max_length: int | None = Field(default=None, ge=3)
    """Tokens a text is cut to, prompt and special tokens included; one length for both sides, as checkpoints store one.
    For ``kind: dense``, and there required."""
    query_prompt: str = ""
    """Text before every query, in training and ever after; written into the checkpoint. For ``kind: dense``."""
    document_prompt: str = ""
    """Text before every document, in training and ever after; written into the checkpoint. For ``kind: dense``."""
    colbert: ColBERTSection | None = None
    """Prefixes, lengths and vector width; given if and only if ``kind`` is colbert."""
    tokenizer: NonBlank | None = None
    """``train`` for a vocabulary learnt from the training texts, or a folder or hub id; given if and only if init is random."""
    vocabulary: Literal["words", "identifiers"] = "words"
    """How a new vocabulary cuts text: as ModernBERT's does, or for code: lower case, camelCase and snake_case taken apart."""
    architecture: ArchitectureSection | None = None
    """The encoder's shape; given if and only if init is random."""


class DataSection(TextSchema):
    """The training rows: where they lie and which of their fields are what.

    A source is one of: a .jsonl, .jsonl.gz or .parquet file; a folder with such files; ``hub://OWNER/NAME[@REVISION]/CONFIG/SPLIT``
    for a data set of the hub, or ``hub://OWNER/NAME[@REVISION]/path/to/file.jsonl.gz`` for one file of it. Paths are relative to
    the working directory. Fields are keys of a row; a dotted path goes into lists and mappings, and ``*`` stands for every item:
    ``negative_passages.*.text``.
    """

    train: tuple[NonBlank, ...]
    """Sources of the rows, read one after the other; or ``docstrings:stdlib``. For ``format: beir`` BEIR folders."""
    format: Literal["texts", "ids", "beir"] = "texts"
    """What a row holds: the texts themselves; ids of texts that lie in ``queries`` and ``documents``; or, for a BEIR folder, its
    judgements: one row for every document judged relevant."""
    split: NonBlank = "train"
    """Which qrels of a BEIR folder are trained on."""
    query_field: NonBlank = "query"
    """Field of the query: its text, or its id."""
    document_fields: tuple[NonBlank, ...] = ("positive",)
    """Fields of the documents, texts or ids, put together in this order: the first document is the positive, all others are its
    hard negatives. A field may hold one document or a list (also one stored as a string: ``"[7, 8]"``)."""
    positives: Literal["first", "each"] = "first"
    """Of which documents a row is made: of the first one, and where there are several document fields, the first of them may hold no
    more than that; or of each that the first field holds, with the negatives of the other fields (FlagEmbedding's ``pos`` and
    ``neg``). Several positives of a query should not meet in a batch: see ``training.no_duplicates``."""
    score_fields: tuple[NonBlank, ...] = ()
    """Fields of the teacher's scores, put together in this order: one number for each document; needed by the distilling losses."""
    documents_per_row: int | None = Field(default=None, ge=1)
    """Documents that a row trains on, positive included; null for as many as the first row has. A row with fewer is an error. A
    negative that is blank, or the same as the positive or another negative, does not count: it is left out and counted in run.json."""
    negatives: Literal["first", "random"] = "first"
    """Which hard negatives are taken where a row has more: the first, or others in every epoch (drawn by seed, epoch and row)."""
    short_rows: Literal["error", "skip"] = "error"
    """What happens to a row with fewer documents than ``documents_per_row``; skipped rows are counted in run.json."""
    queries: NonBlank | None = None
    """Source of the query texts by id; for ``format: ids``, and there required."""
    documents: NonBlank | None = None
    """Source of the document texts by id; for ``format: ids``, and there required."""
    query_id_field: NonBlank = "query_id"
    """Field of the id in ``queries``."""
    document_id_field: NonBlank = "document_id"
    """Field of the id in ``documents``."""
    text_field: NonBlank = "text"
    """Field of the text in ``queries`` and ``documents``."""
    shuffle: bool = False
    """Take the rows in an order drawn by ``training.seed`` before ``limit`` counts them; files are often sorted by source."""
    limit: int | None = Field(default=None, ge=1)
    """Rows that are used; null for all."""
    revision: str = ""
    """Which version of the data this is (a commit, a release, a date), for the record of the run."""


class LossSection(TextSchema):
    """What is minimised. Losses of sentence-transformers for ``kind: dense``, of PyLate for ``kind: colbert``."""

    name: Literal["mnrl", "cached_mnrl", "margin_mse", "kl", "contrastive", "cached_contrastive", "distillation"]
    """Dense: ``mnrl``, cross-entropy of the positive against all other documents of the batch (arXiv:1705.00652); ``cached_mnrl``,
    the same in little memory (GradCache, arXiv:2101.06983); ``margin_mse`` (arXiv:2010.02666) and ``kl`` from teacher scores.
    ColBERT: ``contrastive``, ``cached_contrastive`` likewise; ``distillation``, KL divergence from teacher scores."""
    scale: float = Field(default=20.0, gt=0)
    """mnrl, cached_mnrl: factor on the similarities before the softmax, 1 / temperature; sentence-transformers: 20."""
    temperature: float = Field(default=1.0, gt=0)
    """contrastive, cached_contrastive: the scores are divided by it; PyLate: 1. kl: student's and teacher's scores are."""
    mini_batch_size: int = Field(default=32, ge=1)
    """cached_mnrl, cached_contrastive: texts that are in memory at once; the result does not depend on it."""
    gather_across_devices: bool = False
    """mnrl, cached_mnrl, contrastive, cached_contrastive: documents of all processes are negatives, not only the own ones."""
    student_scores: Literal["minmax", "as_they_are"] = "minmax"
    """distillation: the student's scores of one query are brought to 0..1 before the softmax (PyLate's ``normalize_scores``)."""
    teacher_scores: Literal["minmax", "as_they_are"] = "as_they_are"
    """distillation, kl, margin_mse: the same for the teacher's, where the data set has not done it (JaColBERTv2.5 has both)."""
    matryoshka_dims: tuple[Annotated[int, Field(ge=1)], ...] = ()
    """Dense: widths at which the first entries of a vector alone must do as well (arXiv:2205.13147), D the first; empty for none."""


class LoRASection(TextSchema):
    """Low-rank matrices trained in place of the encoder's own (arXiv:2106.09685); they are merged when the run ends.

    Only the matrices of the blocks are trained so: the token embedding stays as it is, the rows of new prefixes too, and
    projections behind the encoder are trained whole.
    """

    rank: int = Field(ge=1)
    """r, columns of the matrix that goes down and rows of the one that goes up; no more than the encoder's width."""
    alpha: float = Field(gt=0)
    """The product is scaled by alpha / rank."""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """Share of the inputs of the low-rank path set to zero in training."""


class TrainingSection(TextSchema):
    """How it is minimised."""

    epochs: float = Field(gt=0)
    """Passes over the rows, counted as full batches: so many are trained on. With ``no_duplicates`` a pass has fewer where rows do not
    fit any more, and the rest come from the next one; run.json has the passes that were done."""
    batch_size: int = Field(ge=1)
    """Rows per forward pass and process; with in-batch negatives a query is told from batch_size - 1 other rows' documents."""
    learning_rate: float = Field(gt=0, le=1)
    """Peak of the schedule."""
    warmup_ratio: float = Field(ge=0, le=1)
    """Share of all updates over which the learning rate rises from zero."""
    weight_decay: float = Field(ge=0, le=1)
    """Decoupled decay per unit of learning rate."""
    max_grad_norm: float = Field(gt=0)
    """L2 norm that the gradient is clipped to."""
    seed: int = Field(ge=0, le=2**32 - 1)
    """Seed of the weights, the order of the rows and dropout."""
    precision: Literal["fp32", "bf16"]
    """Type of the forward and backward pass; weights and optimiser state stay float32."""
    scheduler: Literal["linear", "cosine", "constant"]
    """Course of the learning rate after the warm-up: falling to zero, or level."""
    no_duplicates: bool
    """No text twice in a batch, where it would count as a negative of itself."""
    log_every: int = Field(ge=1)
    """Updates between two logged losses."""
    max_steps: int | None = Field(default=None, ge=1)
    """Updates after which the run ends, whatever ``epochs`` says; null for no such end."""
    accumulation: int = Field(default=1, ge=1)
    """Batches whose gradients are summed for one update. It adds no negatives: for those raise batch_size, with a cached loss."""
    optimizer: Literal["adamw", "schedule_free_adamw"] = "adamw"
    """AdamW, or its schedule-free form (arXiv:2405.15682), which wants ``scheduler: constant``."""
    max_length: int | None = Field(default=None, ge=3)
    """Tokens that texts are cut to in training alone; the checkpoint keeps its own, longer limit."""
    gradient_checkpointing: bool = False
    """Layers are computed again in the backward pass: slower, and memory for one layer's activations instead of all."""
    save_every: int | None = Field(default=None, ge=1)
    """Updates between two checkpoints to resume from; null for one at the end of each epoch."""
    keep_checkpoints: int = Field(default=2, ge=1)
    """Checkpoints that are kept: the newest of those that ``save_every`` asks for. Beside them the best one is kept, with
    ``development.keep_best``, and until the next is saved the one that a signal has left."""
    average_checkpoints: int = Field(default=1, ge=1)
    """The run's model is the mean of this many last checkpoints, the final weights among them; 1 for the final weights alone."""
    sharding: Literal["none", "full"] = "none"
    """Under torchrun: every process has the whole model; or only its share of weights, gradients and optimiser state (FSDP,
    arXiv:2304.11277), which lets models train that one GPU cannot hold. What is computed is the same."""
    lora: LoRASection | None = None
    """Train low-rank matrices instead of the encoder's weights; null for all weights."""


class DevelopmentSection(TextSchema):
    """A benchmark that the model is scored on while it trains: nDCG@10 by exact search, in run.json and in the report."""

    data: NonBlank
    """A BEIR folder, or the name of a published collection."""
    split: NonBlank = "dev"
    """Its split."""
    every: int | None = Field(default=None, ge=1)
    """Updates between two scores; null for one at the end of each epoch. The last step is always scored."""
    keep_best: bool = False
    """The run's model is the checkpoint with the best score, not the last one."""


class Recipe(TextSchema):
    """One training run, fully determined but for the machine."""

    name: NonBlank
    """Short name of the run."""
    description: NonBlank
    """What it trains and what for."""
    kind: Literal["dense", "colbert"]
    """Which trainer follows it: ``dense``, one vector a text; ``colbert``, one vector a token."""
    source: NonBlank
    """Paper or script that the settings come from."""
    cost: NonBlank
    """Time and machine of a whole run."""
    expected: NonBlank
    """Score that a whole run reaches, with its tolerance."""
    model: ModelSection
    """The encoder and how a text becomes a vector, or vectors."""
    data: DataSection
    """The training rows."""
    loss: LossSection
    """What is minimised."""
    training: TrainingSection
    """How it is minimised."""
    development: DevelopmentSection | None = None
    """A benchmark to watch; null for none."""
