"""The recipe of a training run: what is trained, on what, and how; YAML in, every problem at once.

This module knows the fields and how they hang together. It opens no data and no model: what a hub or a folder holds is
found out by whoever loads it.

Source of the default habits: the ModernBERT release's examples/train_st.py (AnswerDotAI/ModernBERT at 8c57a0f).
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from encoder.errors import InputError
from retrieval.training.schema import Rule, build
from retrieval.training.strict_yaml import parse_yaml

STDLIB_DOCSTRINGS = "docstrings:stdlib"
"""Value of ``data.train`` for pairs mined from the running interpreter's standard library."""


class RecipeError(InputError):
    """A recipe cannot be used.

    Attributes:
        problems: All of them, each ``dotted.path: what is wrong`` or ``line N: what is wrong``.
    """

    def __init__(self, source: str, problems: Sequence[str]) -> None:
        self.problems = list(problems)
        if len(self.problems) == 1:
            super().__init__(f"{source}: {self.problems[0]}")
        else:
            super().__init__("\n  ".join([f"{source}: {len(self.problems)} problems", *self.problems]))


@dataclass(frozen=True)
class ArchitectureSection:
    """The shape of an encoder that starts from random weights."""

    family: Literal["modernbert"]
    """Which switches of the encoder are set (arXiv:2412.13663, section 2.1)."""
    hidden_size: int = field(metadata={"at_least": 2})
    """Width D of the hidden states; a multiple of twice ``heads``."""
    layers: int = field(metadata={"at_least": 1})
    """Number of blocks."""
    heads: int = field(metadata={"at_least": 1})
    """Attention heads H."""
    intermediate_size: int = field(metadata={"at_least": 1})
    """Width of the gated MLP between its two projections."""
    vocab_size: int = field(metadata={"at_least": 261})
    """Token ids V: 256 bytes, five special tokens, and merges; a multiple of 64 keeps the embedding aligned."""
    max_positions: int = field(metadata={"at_least": 3})
    """Longest sequence in tokens, special tokens included; ModernBERT: 8,192."""
    global_every: int = field(metadata={"at_least": 1})
    """Every how many layers one is global, from the first on; ModernBERT: 3. The last is too if it divides layers - 1."""
    window: int = field(metadata={"at_least": 2, "multiple_of": 2})
    """Tokens that a local layer sees, half of them on either side; ModernBERT: 128."""
    global_theta: float = field(metadata={"above": 0})
    """RoPE base of global layers; ModernBERT: 160,000 at 8,192 tokens, 10,000 before its context extension."""
    local_theta: float = field(metadata={"above": 0})
    """RoPE base of local layers; ModernBERT: 10,000."""


@dataclass(frozen=True)
class ModelSection:
    """The encoder and how a text becomes a vector."""

    init: str = field(metadata={"not_blank": True})
    """``random``, or a folder or hub id whose weights the run starts from."""
    pooling: Literal["mean", "cls"]
    """Which hidden states make the vector: the mean over all tokens, or the first."""
    normalize: bool
    """Vectors of length 1, and cosine as the similarity; else the dot product."""
    max_length: int = field(metadata={"at_least": 3})
    """Tokens a text is cut to, prompt and special tokens included; one length for both sides, as checkpoints store one."""
    query_prompt: str = ""
    """Text before every query, in training and ever after; written into the checkpoint."""
    document_prompt: str = ""
    """Text before every document, in training and ever after; written into the checkpoint."""
    tokenizer: str | None = field(default=None, metadata={"not_blank": True})
    """``train`` for a vocabulary learnt from the training texts, or a folder or hub id; given if and only if init is random."""
    vocabulary: Literal["words", "identifiers"] = "words"
    """How a new vocabulary cuts text: as ModernBERT's does, or for code: lower case, camelCase and snake_case taken apart."""
    architecture: ArchitectureSection | None = None
    """The encoder's shape; given if and only if init is random."""


@dataclass(frozen=True)
class DataSection:
    """The training rows."""

    train: str = field(metadata={"not_blank": True})
    """A .jsonl or .jsonl.gz file, relative to the working directory, or ``docstrings:stdlib``."""
    query_field: str = field(default="query", metadata={"not_blank": True})
    """Key of the query in a row."""
    positive_field: str = field(default="positive", metadata={"not_blank": True})
    """Key of the relevant text in a row."""
    negative_field: str | None = field(default=None, metadata={"not_blank": True})
    """Key of a hard negative in a row, or null for in-batch negatives alone."""
    limit: int | None = field(default=None, metadata={"at_least": 1})
    """Rows that are used, from the first; null for all."""
    revision: str = ""
    """Which version of the data this is (a commit, a release, a date), for the record of the run."""


@dataclass(frozen=True)
class LossSection:
    """What is minimised."""

    name: Literal["mnrl"]
    """Multiple negatives ranking: cross-entropy of the positive against all other documents of the batch (arXiv:1705.00652)."""
    scale: float = field(default=20.0, metadata={"above": 0})
    """Factor on the similarities before the softmax, 1 / temperature; sentence-transformers: 20."""


@dataclass(frozen=True)
class TrainingSection:
    """How it is minimised: AdamW."""

    epochs: float = field(metadata={"above": 0})
    """Passes over the rows."""
    batch_size: int = field(metadata={"at_least": 2})
    """Rows per update and device; a query is told from batch_size - 1 other rows' positives."""
    learning_rate: float = field(metadata={"above": 0, "at_most": 1})
    """Peak of the schedule."""
    warmup_ratio: float = field(metadata={"at_least": 0, "at_most": 1})
    """Share of all updates over which the learning rate rises from zero."""
    weight_decay: float = field(metadata={"at_least": 0, "at_most": 1})
    """Decoupled decay per unit of learning rate."""
    max_grad_norm: float = field(metadata={"above": 0})
    """L2 norm that the gradient is clipped to."""
    seed: int = field(metadata={"at_least": 0, "at_most": 2**32 - 1})
    """Seed of the weights, the order of the rows and dropout."""
    precision: Literal["fp32", "bf16"]
    """Type of the forward and backward pass; weights and optimiser state stay float32."""
    scheduler: Literal["linear", "cosine", "constant"]
    """Course of the learning rate after the warm-up: falling to zero, or level."""
    no_duplicates: bool
    """No text twice in a batch, where it would count as a negative of itself."""
    log_every: int = field(metadata={"at_least": 1})
    """Updates between two logged losses."""
    max_steps: int | None = field(default=None, metadata={"at_least": 1})
    """Updates after which the run ends, whatever ``epochs`` says; null for no such end."""


@dataclass(frozen=True)
class Recipe:
    """One training run, fully determined but for the machine."""

    name: str = field(metadata={"not_blank": True})
    """Short name of the run."""
    description: str = field(metadata={"not_blank": True})
    """What it trains and what for."""
    kind: Literal["dense"]
    """Which trainer follows it: ``dense``, one vector a text."""
    source: str = field(metadata={"not_blank": True})
    """Paper or script that the settings come from."""
    cost: str = field(metadata={"not_blank": True})
    """Time and machine of a whole run."""
    expected: str = field(metadata={"not_blank": True})
    """Score that a whole run reaches, with its tolerance."""
    model: ModelSection
    """The encoder and how a text becomes a vector."""
    data: DataSection
    """The training rows."""
    loss: LossSection
    """What is minimised."""
    training: TrainingSection
    """How it is minimised."""


_SHAPE = "model.architecture"

RULES = (
    Rule((f"{_SHAPE}.heads", f"{_SHAPE}.hidden_size"), lambda heads, width: width % heads != 0, "must divide hidden_size {1}, got {0}"),
    Rule(
        (f"{_SHAPE}.heads", f"{_SHAPE}.hidden_size"),
        lambda heads, width: width % heads == 0 and width // heads % 2 != 0,
        "RoPE needs an even head width, got hidden_size / heads = {1} / {0}",
    ),
    Rule((_SHAPE, "model.init"), lambda shape, init: init == "random" and shape is None, "needed, since init is random"),
    Rule((_SHAPE, "model.init"), lambda shape, init: init != "random" and shape is not None, "only for init: random; {1!r} has its own"),
    Rule(("model.tokenizer", "model.init"), lambda name, init: init == "random" and name is None, "needed, since init is random"),
    Rule(
        ("model.tokenizer", "model.init"),
        lambda name, init: init != "random" and name is not None,
        "only for init: random; {1!r} has its own",
    ),
    Rule(
        ("model.max_length", f"{_SHAPE}.max_positions"),
        lambda length, positions: length > positions,
        "must be <= architecture.max_positions {1}, got {0}",
    ),
    Rule(
        ("data.train",),
        lambda train: train != STDLIB_DOCSTRINGS and not train.endswith((".jsonl", ".jsonl.gz")),
        f"must be a .jsonl or .jsonl.gz file or {STDLIB_DOCSTRINGS}, got {{0!r}}",
    ),
    Rule(("data.positive_field", "data.query_field"), lambda positive, query: positive == query, "is query_field too: {0!r}"),
    Rule(
        ("data.negative_field", "data.query_field", "data.positive_field"),
        lambda negative, query, positive: negative in (query, positive),
        "is query_field or positive_field too: {0!r}",
    ),
    Rule(
        ("data.limit", "training.batch_size"),
        lambda limit, size: limit is not None and limit < size,
        "must be >= training.batch_size {1}, got {0}",
    ),
)
"""How the fields hang together."""


def load_recipe(path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read and check a recipe.

    Args:
        path: A YAML file, or the name of a shipped recipe.
        overrides: ``training.batch_size=64`` and the like, applied in order before anything is checked. ``key=`` and
            ``key=null`` unset; a value in quotes is text, quotes taken off.

    Raises:
        RecipeError: The file is not YAML, or a setting is unknown, missing, of the wrong type, out of its range, repeated,
            or at odds with another; names all of them.
        InputError: There is no such recipe, or it cannot be read.
    """
    file = find_recipe(path)
    try:
        text = file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise InputError(f"{file}: not UTF-8 ({error.reason} at byte {error.start}); convert the file") from error
    except OSError as error:
        raise InputError(f"{file}: cannot be read ({error.strerror})") from error
    try:
        document, problems = parse_yaml(text)
    except InputError as error:
        raise RecipeError(str(file), [str(error)]) from error
    for override in overrides:
        problems.extend(_override(document, override))
    recipe, found = build(Recipe, document, RULES)
    if recipe is None or problems:
        raise RecipeError(str(file), problems + found)
    return recipe


def to_dict(recipe: Recipe) -> dict[str, Any]:
    """The recipe with every default spelt out, as JSON has it; written as YAML or JSON it loads as the same recipe."""
    return dataclasses.asdict(recipe)


def shipped_recipes() -> list[str]:
    """Names of the recipes that come with Quiver, sorted."""
    return sorted(path.stem for path in _shipped_folder().glob("*.yaml"))


def find_recipe(name_or_path: str | Path) -> Path:
    """The file of a recipe.

    Args:
        name_or_path: What ends in .yaml, .yml or .json, or has a folder in it, is a path; anything else is the name of a
            shipped recipe.

    Raises:
        InputError: There is no such file, or no such name (lists the names).
    """
    path = Path(name_or_path)
    if path.suffix in {".yaml", ".yml", ".json"} or len(path.parts) > 1:
        if not path.is_file():
            raise InputError(f"{path}: there is no such file")
        return path
    names = shipped_recipes()
    if str(name_or_path) not in names:
        close = difflib.get_close_matches(str(name_or_path), names, n=1)
        hint = f"did you mean {close[0]!r}? " if close else ""
        raise InputError(f"no shipped recipe {str(name_or_path)!r}; {hint}shipped: {', '.join(names)}; or give the path of a .yaml file")
    return _shipped_folder() / f"{name_or_path}.yaml"


def _shipped_folder() -> Path:
    # Beside the packages in a checkout as in site-packages. Not importlib.resources: torchtune installs a top-level
    # ``recipes`` too, and which of the two an import finds is anyone's guess.
    return Path(__file__).resolve().parents[2] / "recipes"


def _override(document: object, override: str) -> list[str]:
    """Apply ``dotted.path=value`` to a parsed recipe; the problem, if any, in a list."""
    key, equals, text = override.partition("=")
    *parents, name = key.strip().split(".")
    if not equals or not all([*parents, name]):
        return [f"override {override!r}: must read section.setting=value"]
    target = document
    for number, parent in enumerate(parents):
        if not isinstance(target, dict) or not isinstance(target.get(parent, {}), dict | None):
            return [f"override {override!r}: {'.'.join(parents[: number + 1])} is not a section"]
        target[parent] = target = target.get(parent) or {}
    if not isinstance(target, dict):
        return [f"override {override!r}: the recipe has no settings"]
    try:
        target[name] = _scalar(text)
    except InputError as error:
        return [f"override {override!r}: {error}"]
    return []


def _scalar(text: str) -> object:
    """An override's value: null, or text; not parsed any further, for ``search_query: `` would be a mapping."""
    if text in ("", "~", "null"):
        return None
    return parse_yaml(text)[0] if text[0] in "\"'" else text
