"""A pretraining recipe from its file: every problem at once, with its dotted path."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from quiver.encoder.pretraining.sections import PhaseSection, PretrainingRecipe
from quiver.encoder.schema import Rule, SchemaError
from quiver.encoder.training.recipe_file import load_sections

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
