"""X."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

from quiver.encoder.schema import Field, NonBlank, Rule, SchemaError, TextSchema
from quiver.encoder.training.recipe_file import load_sections


class VocabularySection(TextSchema):
    """A byte-level BPE vocabulary learnt from the corpus, with the paper's template: merges, five special tokens, unused tokens."""

    size: int = Field(default=50_368, ge=320, multiple_of=64)
    """Token ids V in all; the paper: 50,368, a multiple of 64."""
    unused: int = Field(default=83, ge=0)
    """Tokens kept free for later uses; the paper: 83."""
    split: Literal["words", "identifiers"] = "words"
    """How text is cut before merges are learnt, see `quiver.encoder.tokenizer.SPLITTERS`."""
    share: float = Field(default=1.0, gt=0, le=1)
    """Share of the documents that it is learnt from, of all sources alike; a thousandth of two trillion tokens is plenty."""


class ModelSection(TextSchema):
    """The encoder and its vocabulary."""

    init: NonBlank
    """``random`` (Megatron init), or a folder or hub id whose weights the run starts from; its shape must be that given here."""
    tokenizer: NonBlank
    """``train`` for a vocabulary learnt from the corpus, where ``init`` is random; or a folder or hub id with a tokenizer.json."""
    layers: int = Field(ge=1)
    """Number of blocks; the paper: 22 (base), 28 (large)."""
    hidden_size: int = Field(ge=2)
    """Width D; the paper: 768, 1,024."""
    heads: int = Field(ge=1)
    """Attention heads H; the paper: 12, 16, each 64 wide."""
    intermediate_size: int = Field(ge=1)
    """Width of the gated MLP between its two projections; the paper: 1,152, 2,624."""
    vocabulary: VocabularySection = VocabularySection()
    """For ``tokenizer: train``."""
    global_every: int = Field(default=3, ge=1)
    """Every how many layers one is global, from the first on."""
    window: int = Field(default=128, ge=2, multiple_of=2)
    """Tokens that a local layer sees, half of them on either side."""
    local_theta: float = Field(default=10_000.0, gt=0)
    """RoPE base of local layers, in all phases."""
    dropout: float = Field(default=0.1, ge=0, lt=1)
    """On what attention adds to the residual, while it is pretrained; the release: 0.1, and no other dropout."""
    init_std: float = Field(default=0.02, gt=0)
    """Standard deviation of random weights before Megatron's division; the paper: 0.02 at widths of 768 and 1,024. Products of a narrow
    model are as large as those of a wide one where it grows with ``hidden_size ** -0.5``."""
    decoder_bias: Literal["zeros", "frequencies"] = "zeros"
    """What the bias of the logits starts from, where ``init`` is random: zeros, as in the paper; or the logarithm of each token's share
    of the training text, which is what a model without context would learn. A run of millions of updates learns it in no time; a
    short one spends a good part of its updates on it, while the tied embedding drifts."""


class SourceSection(TextSchema):
    """One body of text."""

    name: NonBlank
    """What phases and the record call it."""
    path: NonBlank
    """A .jsonl, .parquet or .txt file (the first and the last also .gz), a BEIR folder, or a folder of such files. Nothing is streamed from
    the hub: ``hf download NAME --repo-type dataset --local-dir DIR`` fetches its Parquet files."""
    fields: tuple[str, ...] = ("title", "text")
    """JSON lines, Parquet, BEIR: what a document is made of, joined by blank lines; a field that a row lacks is left out."""
    split: NonBlank | None = None
    """BEIR: only documents judged in qrels/SPLIT.tsv and in no other split; null for all documents."""
    lines: bool = False
    """Plain text: a line is a document; else a file is one."""


class DataSection(TextSchema):
    """The corpus: tokenised once, then read from memory-mapped files."""

    sources: tuple[SourceSection, ...]
    """At least one, each with text to train on."""
    held_out: float = Field(default=0.002, ge=0, le=0.5)
    """Share of the documents that is never trained on and gives the live held-out loss; 0 for none. A copy goes where its twin goes."""
    held_out_tokens: int = Field(default=1_000_000, ge=1)
    """Tokens of them that an evaluation reads, at most: the same ones in every phase, a sample over all sources."""


class MixSection(TextSchema):
    """A source's share in a phase."""

    source: NonBlank
    """Name of a source."""
    times: float = Field(gt=0)
    """How often a pass holds each of its pieces: 3 upsamples it, 0.5 takes a half, drawn anew in each pass."""


class PhaseSection(TextSchema):
    """A stretch of the run with its own context, RoPE base, mix and schedule. Weights and optimiser go on from phase to phase."""

    name: NonBlank
    """What the log and the record call it."""
    tokens: int = Field(ge=1)
    """Tokens it reads, special tokens included; it ends with the update that reaches them."""
    context: int = Field(ge=8)
    """Longest sequence in tokens, special tokens included; longer documents are split. The paper: 1,024, then 8,192."""
    global_theta: float = Field(gt=0)
    """RoPE base of global layers; the paper: 10,000 at 1,024 tokens, 160,000 at 8,192."""
    learning_rate: float = Field(gt=0)
    """Peak; the paper: 8e-4 (base), 5e-4 (large), in the later phases 3e-4 and 5e-5."""
    batch_size: int = Field(ge=1)
    """Sequences of full context in an update, over all processes; the paper: 4,608 (base), 4,928 (large)."""
    micro_batch: int = Field(ge=1)
    """Sequences of full context in one packed row, which is what goes through the model at once; divides ``batch_size``."""
    mix: tuple[MixSection, ...] = ()
    """Sources and how often each is read in a pass; empty for all of them once. A phase of the same context and mix as the one before goes
    on with its pass; any other begins one of its own."""
    warmup_tokens: int = Field(default=0, ge=0)
    """Over which the learning rate rises from 0; the paper: 3e9 (base), 2e9 (large)."""
    decay_tokens: int = Field(default=0, ge=0)
    """At the phase's end, over which it falls; the paper: the 50e9 of the last phase."""
    decay: Literal["one_minus_sqrt", "linear"] = "one_minus_sqrt"
    """How it falls."""
    final_share: float = Field(default=0.001, ge=0, le=1)
    """Share of the peak that it falls to; the release: 0.001."""
    weight_decay: float = Field(default=1e-5, ge=0, lt=1)
    """Fully decoupled: what an update takes off the weights at the peak learning rate. The paper: 1e-5 (base), 1e-6 (large, later)."""
    batch_warmup_tokens: int = Field(default=0, ge=0)
    """Over which the batch grows, with as many updates at each size; the paper: 50e9 (base), 10e9 (large)."""
    batch_warmup_from: int | None = Field(default=None, ge=1)
    """Sequences of the first updates; a multiple of ``micro_batch``. The paper: 768 (base), 448 (large). null: one ``micro_batch``."""


class AveragingSection(TextSchema):
    """Which weights make the model of the run."""

    best: int = Field(default=0, ge=0)
    """So many checkpoints of the last phase with the lowest held-out loss, averaged with the last; 0 for the last alone. The paper's
    base model: 3."""
    with_last: bool = True
    """The last checkpoint is averaged too; false for the best alone, as in the paper's large model, which is its best one."""
    ema_half_life: float | None = Field(default=None, gt=0)
    """Updates after which a weight counts half in an exponential moving average, which then makes the model; null for none."""


class TrainingSection(TextSchema):
    """What all phases share."""

    seed: int = Field(ge=0)
    """Of initial weights, order, masks and dropout."""
    mask_probability: float = Field(default=0.3, gt=0, lt=1)
    """Share of the tokens whose word is asked for; the paper: 30%."""
    held_out_mask_probability: float = Field(default=0.15, gt=0, lt=1)
    """The same in the held-out loss; the release: 15%."""
    beta1: float = Field(default=0.9, ge=0, lt=1)
    """StableAdamW's share of the old mean of gradients."""
    beta2: float = Field(default=0.98, ge=0, lt=1)
    """StableAdamW's share of the old mean of squares."""
    eps: float = Field(default=1e-6, gt=0)
    """Added to the root of the mean of squares."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """bf16: autocast on CUDA, weights stay in float32."""
    compiled: bool = False
    """Compile the token-wise parts of the model (`encoder.gpu.compiling`): faster on a GPU, after a while at the start of each phase."""
    gradient_checkpointing: bool = False
    """Keep one hidden state a block and compute the rest again in the backward pass: less memory for about a third more time."""
    packing_buffer: float = Field(default=5.0, ge=1)
    """Sequences that wait to be packed, in multiples of an update's tokens; the release: 5."""
    log_every: int = Field(default=10, ge=1)
    """Updates from one line of the log to the next."""
    evaluate_every: int | None = Field(default=None, ge=1)
    """Updates from one held-out loss to the next; null for the end of each phase alone."""
    save_every: int | None = Field(default=None, ge=1)
    """Updates from one checkpoint to the next; null for the end of each phase alone."""
    keep_checkpoints: int = Field(default=2, ge=1)
    """The newest that stay, beside the last of each phase and the best ones that averaging needs."""
    averaging: AveragingSection = AveragingSection()
    """Which weights make the model of the run."""


class PretrainingRecipe(TextSchema):
    """All that decides a pretraining run."""

    name: NonBlank
    """The file's, without its suffix."""
    kind: Literal["pretraining"]
    """Tells it from recipes of retrievers."""
    description: NonBlank
    """What is pretrained on what."""
    source: NonBlank
    """Where the settings come from."""
    cost: NonBlank
    """Time and hardware."""
    expected: NonBlank
    """What comes out."""
    model: ModelSection
    """The encoder and its vocabulary."""
    data: DataSection
    """The corpus."""
    phases: tuple[PhaseSection, ...]
    """One after the other; a later one may not have a shorter context."""
    training: TrainingSection
    """What all phases share."""


KINDS = ("pretraining",)
"""Values of ``kind`` that make a recipe one of these."""

RULES = (
    Rule(
        ("model.heads", "model.hidden_size"), lambda heads, width: width % (2 * heads) != 0, "twice it must divide hidden_size {1}, got {0}"
    ),
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
        ("model.decoder_bias", "model.init"),
        lambda bias, init: bias != "zeros" and init != "random",
        "the weights of {1} have their own",
    ),
    Rule(
        ("training.averaging.best", "data.held_out"),
        lambda best, share: best > 0 and share == 0,
        "the best are told by data.held_out, which is 0",
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


def load_pretraining_recipe(path: str | Path, overrides: Sequence[str] = ()) -> PretrainingRecipe:
    """Read and check a recipe.

    Args:
        path: A YAML file, or the name of a shipped recipe.
        overrides: ``training.seed=2``, ``phases.0.tokens=1e6`` and the like, see `quiver.encoder.training.recipe_file.load_sections`.

    Raises:
        SchemaError: The recipe cannot be used; names everything that is wrong with it.
        InputError: There is no such recipe, or it cannot be read.
    """
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
    for place, part in enumerate(phase.mix):
        if part.source not in names:
            yield f"mix.{place}.source: no source {part.source!r}; there are {', '.join(names)}"
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
