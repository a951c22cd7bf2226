"""How the fields of a recipe hang together.

Each rule blames one field and says the remedy; a rule is asked only where all its fields are valid by themselves.
"""

from __future__ import annotations

from quiver.encoder.schema import Rule
from quiver.retrieval.training.sections import STDLIB_DOCSTRINGS, LossSection

LOSSES = {
    "dense": ("mnrl", "cached_mnrl", "margin_mse", "kl"),
    "colbert": ("contrastive", "cached_contrastive", "distillation"),
}
"""Kind of model -> the losses that train it."""

IN_BATCH = ("mnrl", "cached_mnrl", "contrastive", "cached_contrastive")
"""Losses that take the other rows' documents as negatives."""

DISTILLING = ("margin_mse", "kl", "distillation")
"""Losses that need a teacher's scores."""

READ_BY = {
    "scale": ("mnrl", "cached_mnrl"),
    "temperature": ("kl", "contrastive", "cached_contrastive"),
    "mini_batch_size": ("cached_mnrl", "cached_contrastive"),
    "gather_across_devices": IN_BATCH,
    "student_scores": ("distillation",),
    "teacher_scores": DISTILLING,
}
"""Setting of ``loss`` -> the losses that read it; under any other it must keep its default, for it would change nothing."""

_DEFAULTS = {name: field.default for name, field in LossSection.model_fields.items()}

_SHAPE = "model.architecture"


def _only_for_dense(name: str) -> Rule:
    return Rule(
        (f"model.{name}", "kind"), lambda value, kind: kind != "dense" and value not in (None, ""), "only for kind: dense, this is {1}"
    )


def _needed_for_dense(name: str) -> Rule:
    return Rule((f"model.{name}", "kind"), lambda value, kind: kind == "dense" and value is None, "needed, since kind is dense")


def _with_random(name: str) -> tuple[Rule, Rule]:
    fields = (f"model.{name}", "model.init")
    return (
        Rule(fields, lambda value, init: init == "random" and value is None, "needed, since init is random"),
        Rule(fields, lambda value, init: init != "random" and value is not None, "only for init: random; {1!r} has its own"),
    )


def _read_by(setting: str, losses: tuple[str, ...]) -> Rule:
    return Rule(
        (f"loss.{setting}", "loss.name"),
        lambda value, name: name not in losses and value != _DEFAULTS[setting],
        f"{{1}} does not read it (only {', '.join(losses)}); take it out",
    )


ARCHITECTURE = (
    Rule((f"{_SHAPE}.heads", f"{_SHAPE}.hidden_size"), lambda heads, width: width % heads != 0, "must divide hidden_size {1}, got {0}"),
    Rule(
        (f"{_SHAPE}.heads", f"{_SHAPE}.hidden_size"),
        lambda heads, width: width % heads == 0 and width // heads % 2 != 0,
        "RoPE needs an even head width, got hidden_size / heads = {1} / {0}",
    ),
    *_with_random("architecture"),
    *_with_random("tokenizer"),
    Rule(
        ("model.max_length", f"{_SHAPE}.max_positions"),
        lambda length, positions: length is not None and length > positions,
        "must be <= architecture.max_positions {1}, got {0}",
    ),
    *(
        Rule(
            (f"model.colbert.{name}", f"{_SHAPE}.max_positions"),
            lambda length, positions: length > positions,
            "must be <= architecture.max_positions {1}, got {0}",
        )
        for name in ("query_length", "document_length")
    ),
)

MODEL = (
    *(_needed_for_dense(name) for name in ("pooling", "normalize", "max_length")),
    *(_only_for_dense(name) for name in ("pooling", "normalize", "max_length", "query_prompt", "document_prompt")),
    Rule(("model.colbert", "kind"), lambda section, kind: kind == "colbert" and section is None, "needed, since kind is colbert"),
    Rule(("model.colbert", "kind"), lambda section, kind: kind == "dense" and section is not None, "only for kind: colbert, this is dense"),
)

DATA = (
    Rule(("data.train",), lambda train: not train, "must name at least one source"),
    Rule(
        ("data.train",),
        lambda train: STDLIB_DOCSTRINGS in train and len(train) > 1,
        f"{STDLIB_DOCSTRINGS} cannot be mixed with other sources",
    ),
    *(
        Rule((f"data.{name}", "data.format"), lambda value, form: form == "ids" and value is None, "needed, since format is ids")
        for name in ("queries", "documents")
    ),
    *(
        Rule((f"data.{name}", "data.format"), lambda value, form: form != "ids" and value is not None, "only for format: ids, this is {1}")
        for name in ("queries", "documents")
    ),
    Rule(
        ("data.format", "data.score_fields"),
        lambda form, scores: form == "beir" and bool(scores),
        "beir has no teacher scores; mine negatives and score them first (quiver mine, quiver teacher-scores)",
    ),
    Rule(
        ("data.positives", "data.format"),
        lambda positives, form: positives == "each" and form == "beir",
        "beir has a row for each relevant document already; leave it out",
    ),
    Rule(("data.document_fields",), lambda fields: not fields, "must name at least one field"),
    Rule(("data.document_fields",), lambda fields: len(set(fields)) < len(fields), "names a field twice: {0}"),
    Rule(("data.document_fields", "data.query_field"), lambda fields, query: query in fields, "query_field {1!r} is among them"),
    Rule(
        ("data.limit", "training.batch_size"),
        lambda limit, size: limit is not None and limit < size,
        "must be >= training.batch_size {1}, got {0}",
    ),
)

LOSS = (
    Rule(
        ("loss.name", "kind"),
        lambda name, kind: name not in LOSSES[kind],
        "{0} does not train kind: {1}; the losses of dense are "
        + ", ".join(LOSSES["dense"])
        + ", of colbert "
        + ", ".join(LOSSES["colbert"]),
    ),
    Rule(
        ("loss.name", "data.score_fields"),
        lambda name, fields: name in DISTILLING and not fields,
        "{0} needs a teacher's scores: name them in data.score_fields",
    ),
    Rule(
        ("data.score_fields", "loss.name"),
        lambda fields, name: bool(fields) and name not in DISTILLING,
        "{1} reads no teacher's scores: leave it out, or choose " + " or ".join(DISTILLING),
    ),
    Rule(
        ("loss.name", "training.batch_size"),
        lambda name, size: name in IN_BATCH and size < 2,
        "{0} finds its negatives in the batch: training.batch_size must be >= 2",
    ),
    *(_read_by(setting, losses) for setting, losses in READ_BY.items()),
    Rule(
        ("loss.matryoshka_dims", "kind"),
        lambda dims, kind: bool(dims) and kind != "dense",
        "only for kind: dense",
    ),
    Rule(
        ("loss.matryoshka_dims",),
        lambda dims: list(dims) != sorted(set(dims), reverse=True),
        "must fall, as in [384, 256, 128]; got {0}",
    ),
)

TRAINING = (
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
        "full is for training all weights; leave training.lora out",
    ),
    Rule(
        ("training.keep_checkpoints", "training.average_checkpoints"),
        lambda kept, averaged: kept < averaged,
        "must be >= training.average_checkpoints {1}, got {0}",
    ),
    Rule(
        ("training.average_checkpoints", "development.keep_best"),
        lambda averaged, best: averaged > 1 and best,
        "averaging the last checkpoints and development.keep_best exclude each other",
    ),
    *(
        Rule(
            ("training.max_length", name),
            lambda length, limit: length is not None and limit is not None and length > limit,
            f"must be <= {name} {{1}}, got {{0}}",
        )
        for name in ("model.max_length", "model.colbert.document_length")
    ),
    Rule(
        ("training.lora.rank", f"{_SHAPE}.hidden_size"),
        lambda rank, width: rank > width,
        "must be <= architecture.hidden_size {1}, got {0}",
    ),
)

RULES = (*ARCHITECTURE, *MODEL, *DATA, *LOSS, *TRAINING)
"""All of them."""
