"""Pretraining recipes: the meaning, unit and bounds of each setting, and the checks between them.

Source: ModernBERT, arXiv:2412.13663, sections 2.1 and 2.2 and appendix A ("the paper" below), and the training files of its release
(AnswerDotAI/ModernBERT, branch pretraining_documentation at 0e9dbe6; "the release" below).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

from quiver.encoder.config import Tiling
from quiver.encoder.schema import Field, NonBlank, Positive, Rule, SchemaError, SectionRule, TextSchema
from quiver.encoder.training.architecture import ArchitectureSection
from quiver.encoder.training.recipe_file import Overrides, RecipeSchema, TrainingDtype, load_sections


class VocabularySection(TextSchema):
    """A byte-level BPE vocabulary trained on the corpus, laid out as in the paper: merges, five special tokens, unused tokens."""

    size: int = Field(default=50_368, ge=320, multiple_of=64)
    """Number of token ids V; the paper: 50,368, a multiple of 64."""
    unused: int = Field(default=83, ge=0)
    """Number of tokens reserved for later use; the paper: 83."""
    split: Literal["words", "identifiers"] = "words"
    """How text is split before merges are trained, see `quiver.encoder.tokenizer.SPLITTERS`."""
    share: float = Field(default=1.0, gt=0, le=1)
    """Share of the documents of each source to train on; a thousandth of two trillion tokens is enough."""


class ModelSection(ArchitectureSection):
    """The encoder and its vocabulary. ``attention_output_dropout`` is 0.1 by default, as in the release."""

    init: NonBlank
    """``random`` (see ``init_method``), or a folder or Hub id of a checkpoint to start from, whose architecture must be the one given
    here, unless it is enlarged by ``tiling``."""
    revision: NonBlank | None = None
    """Branch, tag or commit of ``init`` on the Hub; run.json has the commit that was read. It counts for the same id as ``tokenizer``."""
    tiling: Tiling | None = None
    """Enlarge the checkpoint to the sizes given here, as the paper's large model (`quiver.encoder.pretraining.tiling`): its weights in the
    centre with ``wraparound`` (the paper's choice) or ``random-edges``, or repeated ``from-edge``; null: it has these sizes."""
    tiling_shared: bool = True
    """Divide the weights among the copies of a column, so that the enlarged model starts near the smaller one; false as published."""
    tokenizer: NonBlank
    """``train`` for a vocabulary trained on the corpus (requires ``init: random``), or a folder or Hub id, also ``ID@REVISION``, with a
    tokenizer.json."""
    vocabulary: VocabularySection = VocabularySection()
    """Settings of the vocabulary, for ``tokenizer: train``."""
    attention_output_dropout: float = Field(default=0.1, ge=0, lt=1)
    """Dropout on the output of attention during pretraining; the release: 0.1, and no other dropout."""
    decoder_bias: Literal["zeros", "frequencies"] = "zeros"
    """Initial bias of the logits if ``init`` is random: zeros, as in the paper, or the logarithm of each token's share of the training
    text, which is the best prediction without context. A run of millions of steps learns it quickly; a short run spends a large part of its
    steps on it."""


class SourceSection(TextSchema):
    """One body of text."""

    name: NonBlank
    """Name of the source in phases and in the record."""
    path: NonBlank
    """A .jsonl, .parquet or .txt file (.jsonl and .txt also as .gz; .json.gz as .jsonl.gz), a BEIR folder, or a folder of such files. Data
    sets of the Hub are not streamed: download them with ``hf download NAME --repo-type dataset --revision COMMIT --local-dir DIR``."""
    fields: tuple[str, ...] = ("title", "text")
    """JSON lines, Parquet, BEIR: fields that make up a document, joined by blank lines; a row may lack some of them."""
    split: NonBlank | None = None
    """BEIR: use only documents that are judged in qrels/SPLIT.tsv and in no other split; null for all documents."""
    lines: bool = False
    """Plain text: each line is a document; by default each file is one."""
    revision: str = ""
    """Version of the text (a commit, a release, a date), for run.json."""
    licence: str = ""
    """Licence of the text, for run.json."""


class DataSection(TextSchema):
    """The corpus: tokenized once, then read from memory-mapped files."""

    sources: tuple[SourceSection, ...]
    """At least one, each with text to train on."""
    held_out: float = Field(default=0.002, ge=0, le=0.5)
    """Share of the documents that are held out from training, for the held-out loss; 0 for none. Copies of a document are on the same
    side."""
    held_out_tokens: int = Field(default=1_000_000, ge=1)
    """Maximum number of held-out tokens per evaluation: a sample over all sources, the same in every phase."""


class MixSection(TextSchema):
    """A source's share in a phase."""

    source: NonBlank
    """Name of a source."""
    times: float = Field(gt=0)
    """Number of times that a pass reads each piece of the source: 3 upsamples it, 0.5 reads a random half in each pass."""


class PhaseSection(TextSchema):
    """A part of the run with its own context, RoPE base, mix and schedule. Weights and optimizer state continue from phase to phase."""

    name: NonBlank
    """Name of the phase in the log and in the record."""
    tokens: Positive
    """Number of tokens to read, special tokens included; the phase ends with the step that reaches it."""
    context: int = Field(ge=8)
    """Longest sequence in tokens, special tokens included; longer documents are split. The paper: 1,024, then 8,192."""
    global_theta: float = Field(gt=0)
    """RoPE base of global layers; the paper: 10,000 at 1,024 tokens, 160,000 at 8,192."""
    learning_rate: float = Field(gt=0)
    """Peak learning rate; the paper: 8e-4 (base), 5e-4 (large), in the later phases 3e-4 and 5e-5."""
    batch_size: Positive
    """Sequences of full context per step, over all processes; the paper: 4,608 (base), 4,928 (large)."""
    micro_batch: Positive
    """Sequences of full context per packed row, the unit that goes through the model at once; a divisor of ``batch_size``."""
    mix: tuple[MixSection, ...] = ()
    """Sources and how often a pass reads each; empty to read all of them once. A phase with the context and mix of the phase before
    continues its pass; otherwise a new pass begins."""
    warmup_tokens: int = Field(default=0, ge=0)
    """Tokens over which the learning rate rises from 0; the paper: 3e9 (base), 2e9 (large)."""
    decay_tokens: int = Field(default=0, ge=0)
    """Tokens at the end of the phase over which the learning rate falls; the paper: the 50e9 of the last phase."""
    decay: Literal["one_minus_sqrt", "linear"] = "one_minus_sqrt"
    """Shape of the decay."""
    final_share: float = Field(default=0.001, ge=0, le=1)
    """Learning rate at the end of the decay, as a share of the peak; the release: 0.001."""
    weight_decay: float = Field(default=1e-5, ge=0, lt=1)
    """Fully decoupled weight decay: the share of a weight subtracted per step at the peak learning rate. The paper: 1e-5 (base), 1e-6
    (large, later)."""
    batch_warmup_tokens: int = Field(default=0, ge=0)
    """Tokens over which the batch grows, with equally many steps at each size; the paper: 50e9 (base), 10e9 (large)."""
    batch_warmup_from: int | None = Field(default=None, ge=1)
    """Sequences per step at the start of the warm-up, a multiple of ``micro_batch``; null for one ``micro_batch``. The paper: 768 (base),
    448 (large)."""


class AveragingSection(TextSchema):
    """Weights that become the model of the run."""

    best: int = Field(default=0, ge=0)
    """Number of checkpoints of the last phase, those with the lowest held-out loss, to average; 0 to use only the last one. The paper's
    base model: 3."""
    with_last: bool = True
    """Average the last checkpoint too, which does not count among the best then; false for the best checkpoints only, the last one among
    them if it is. The paper's large model: false, with ``best: 1``."""
    ema_half_life: float | None = Field(default=None, gt=0)
    """Half-life of an exponential moving average of the weights in steps; the average becomes the model. null for none."""


class TrainingSection(TextSchema):
    """Settings that all phases share."""

    seed: int = Field(ge=0)
    """Random seed of initial weights, order, masks and dropout."""
    mask_probability: float = Field(default=0.3, gt=0, lt=1)
    """Share of the tokens that the model has to predict; the paper: 30 %."""
    z_loss: float = Field(default=0.0, ge=0, lt=1)
    """Factor of the squared logarithm of the softmax's denominator, which is added to the loss so that logits do not drift (PaLM,
    arXiv:2204.02311, section 5: 1e-4); 0 for none. ``loss`` in the log includes it, ``z_loss`` is its value in the step."""
    held_out_mask_probability: float = Field(default=0.15, gt=0, lt=1)
    """The same for the held-out loss; the release: 15 %."""
    beta1: float = Field(default=0.9, ge=0, lt=1)
    """Decay rate of StableAdamW's running mean of gradients."""
    beta2: float = Field(default=0.98, ge=0, lt=1)
    """Decay rate of StableAdamW's running mean of squared gradients."""
    eps: float = Field(default=1e-6, gt=0)
    """Added to the root of the mean of squares."""
    dtype: TrainingDtype = "auto"
    """Dtype of the forward and backward pass (``bfloat16``: autocast); weights, gradients and optimizer state are float32. ``auto``:
    bfloat16 on a GPU of compute capability 8.0 and above, otherwise float32; a resumed run keeps the dtype that it began with."""
    compiled: bool = False
    """Compile the token-wise parts of the model (`quiver.encoder.model.compile_encoder`): faster on a GPU, after a compilation at the start
    of each phase."""
    gradient_checkpointing: bool = False
    """Keep one hidden state per layer and recompute the rest in the backward pass: less memory for about a third more time."""
    sharding: Literal["none", "full"] = "none"
    """Under torchrun. ``none``: every process holds the whole model. ``full``: every process holds a share of weights, gradients, optimizer
    state and moving average (FSDP, arXiv:2304.11277), for models that do not fit on one GPU. The result is the same."""
    packing_buffer: float = Field(default=5.0, ge=1)
    """Size of the packing buffer, as a multiple of the tokens of a step; the release: 5."""
    log_every: int = Field(default=10, ge=1)
    """Steps between log lines."""
    evaluate_every: int | None = Field(default=None, ge=1)
    """Steps between evaluations of the held-out loss; null for the end of each phase only."""
    save_every: int | None = Field(default=None, ge=1)
    """Steps between checkpoints; null for the end of each phase only."""
    keep: Literal["needed", "all"] = "needed"
    """Checkpoints to keep. ``needed``: ``keep_checkpoints``, the last of each phase and the best ones for averaging. ``all``: every one
    that is saved, as in the paper's release."""
    keep_checkpoints: int = Field(default=2, ge=1)
    """Number of newest checkpoints to keep."""
    averaging: AveragingSection = AveragingSection()
    """Weights that become the model of the run."""


class ProbeSection(TextSchema):
    """A short training that starts from the current weights, whose score tells more of the encoder than its loss."""

    recipe: NonBlank
    """Name or path of a recipe for a retriever with a development section, or for GLUE. It is trained from the run's current weights, in a
    folder that is deleted afterwards. The score: its last nDCG@10 on the development collection, or the mean of the tasks' scores."""
    settings: tuple[NonBlank, ...] = ()
    """Changes of that recipe, such as ``training.epochs=0.1`` or ``data.limit=20000``; its lengths must fit into the shortest context."""
    tasks: tuple[NonBlank, ...] = ()
    """Tasks of a GLUE recipe to train, such as ``mnli``, the paper's; empty for all."""
    every: int | None = Field(default=None, ge=1)
    """Steps between probes; null for the end of each phase only."""


class PretrainingRecipe(RecipeSchema):
    """All settings of a pretraining run."""

    kind: Literal["pretraining"]
    """Kind of recipe."""
    model: ModelSection
    """The encoder and its vocabulary."""
    data: DataSection
    """The corpus."""
    phases: tuple[PhaseSection, ...]
    """The phases in order; the context may not become shorter."""
    training: TrainingSection
    """Settings that all phases share."""
    probe: ProbeSection | None = None
    """Score of a short training on another task, logged during the run; null for none. It does not change the weights."""


KINDS = ("pretraining",)  # values of ``kind`` of pretraining recipes

RULES = (
    SectionRule(("model",), lambda model: model.problems("model")),
    Rule(
        ("model.vocabulary.unused", "model.vocabulary.size"),
        lambda unused, size: size - unused < 261,
        "leaves no room in size {1} for 256 bytes and 5 special tokens, got {0}",
    ),
    Rule(
        ("model.tokenizer", "model.init"),
        lambda tokenizer, init: tokenizer == "train" and init != "random",
        "a vocabulary learnt anew is not the one that the weights of {1} know; name theirs",
    ),
    Rule(
        ("model.tiling", "model.init"),
        lambda tiling, init: tiling is not None and init == "random",
        "enlarges the weights of a checkpoint, but init is {1}; name the checkpoint",
    ),
    Rule(
        ("model.revision", "model.init"),
        lambda revision, init: revision is not None and init == "random",
        "is that of a checkpoint on the Hub, but init is {1}; name the checkpoint",
    ),
    Rule(
        ("model.decoder_bias", "model.init"), lambda bias, init: bias != "zeros" and init != "random", "the weights of {1} have their own"
    ),
    Rule(
        ("training.averaging.best", "data.held_out"),
        lambda best, share: best > 0 and share == 0,
        "the best checkpoints are chosen by the held-out loss, but data.held_out is 0",
    ),
    Rule(
        ("training.evaluate_every", "training.averaging.best"),
        lambda every, best: every is None and best > 0,
        "training.averaging.best {1} needs it: without it the last checkpoint alone has a held-out loss",
    ),
    Rule(
        ("training.averaging.with_last", "training.averaging.best"),
        lambda last, best: not last and best == 0,
        "leaves no checkpoint where training.averaging.best is 0",
    ),
    Rule(
        ("training.averaging.best", "training.averaging.ema_half_life"),
        lambda best, half_life: best > 0 and half_life is not None,
        "the mean of checkpoints and the moving average exclude each other",
    ),
)


def load_pretraining_recipe(path: str | Path, overrides: Overrides = ()) -> PretrainingRecipe:
    """Read and check a recipe."""
    recipe = load_sections(path, PretrainingRecipe, RULES, kinds=KINDS, overrides=overrides)
    if problems := list(_problems(recipe)):
        raise SchemaError(str(path), problems)
    return recipe


def _problems(recipe: PretrainingRecipe) -> Iterator[str]:
    """What lists hold that do not fit each other."""
    names = [source.name for source in recipe.data.sources]
    if not names:
        yield "data.sources: must name at least one source"
    yield from (f"data.sources: the name {name!r} stands twice" for name in dict.fromkeys(names) if names.count(name) > 1)
    if not recipe.phases:
        yield "phases: must hold at least one phase"
    for number, phase in enumerate(recipe.phases):
        yield from (f"phases.{number}.{problem}" for problem in _phase_problems(phase, names))
    for number, (before, after) in enumerate(zip(recipe.phases, recipe.phases[1:], strict=False)):
        if after.context < before.context:
            yield (
                f"phases.{number + 1}.context: must be >= {before.context}, the context of phase {number} ({before.name}): a phase may not "
                f"shorten it, for the positions that it learnt would be lost; got {after.context}"
            )


def _phase_problems(phase: PhaseSection, names: Sequence[str]) -> Iterator[str]:
    for index, part in enumerate(phase.mix):
        if part.source not in names:
            yield f"mix.{index}.source: no source {part.source!r}; there are {', '.join(names)}"
    if len({part.source for part in phase.mix}) < len(phase.mix):
        yield "mix: names a source twice"
    if phase.warmup_tokens + phase.decay_tokens > phase.tokens:
        yield f"warmup_tokens: warmup_tokens and decay_tokens must fit into tokens {phase.tokens}"
    if phase.batch_size % phase.micro_batch:
        yield f"micro_batch: must divide batch_size {phase.batch_size}, got {phase.micro_batch}"
    start = phase.batch_warmup_from
    if start is None:
        return
    if start % phase.micro_batch:
        yield f"batch_warmup_from: must be a multiple of micro_batch {phase.micro_batch}, got {start}"
    if start > phase.batch_size:
        yield f"batch_warmup_from: must be <= batch_size {phase.batch_size}, got {start}"
    if not phase.batch_warmup_tokens:
        yield "batch_warmup_from: needs batch_warmup_tokens"
