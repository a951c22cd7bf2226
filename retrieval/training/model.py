"""The model that a run starts from: a bi-encoder or a ColBERT, with random weights or those of a checkpoint.

A checkpoint may be anything that Quiver opens. A retriever keeps its settings, except those that the recipe sets (null sets nothing, and a
name in ``model.only_if_bare`` sets it for a bare encoder only). This module imports nothing of the extra ``train``.

Source: the starting points of the ModernBERT release's train_st.py and train_pylate.py (AnswerDotAI/ModernBERT at 8c57a0f).
"""

from __future__ import annotations

import importlib.util
import logging
import string
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Literal, TypeAlias, TypeVar

import torch
from torch import Tensor, nn

from quiver.encoder import Encoder, InputError, Tokenizer, init_weights
from quiver.encoder.checkpoints.checkpoint import local_folder, pin_source
from quiver.encoder.model import Uninitialized
from quiver.retrieval.models.batches import Projection
from quiver.retrieval.models.biencoder import BiEncoder
from quiver.retrieval.models.colbert import ColBERT
from quiver.retrieval.models.export.sentence_transformers import read_tokenizer, unsupported_by_pylate
from quiver.retrieval.models.options import ColBERTSettings, ModelFolder
from quiver.retrieval.models.pretrained import ModelParts, default_device, load_parts
from quiver.retrieval.training.recipe import RANDOM, ColBERTSection, ModelSection, Recipe

logger = logging.getLogger(__name__)

Value = TypeVar("Value")
Similarity: TypeAlias = Literal["cosine", "dot", "maxsim"]

DIM = 128  # width of the token vectors of a ColBERT model with a new projection: PyLate's default

_TRAIN = ("sentence_transformers", "transformers", "datasets")
LIBRARIES = {"dense": ("train", _TRAIN), "colbert": ("colbert", (*_TRAIN, "pylate"))}
"""Kind of retriever -> the extra that training it needs, and the modules that it imports. PyLate limits torch's version, so it is apart."""

SKIPLISTS = {"punctuation": tuple(string.punctuation), "none": ()}
"""Value of ``model.colbert.skiplist`` -> tokens whose document vectors are dropped."""


def missing_library(kind: str) -> str | None:
    """The first library that training a kind of model lacks, and how to install it; None if nothing is missing."""
    extra, modules = LIBRARIES.get(kind, ("", ()))
    missing = next((name for name in modules if importlib.util.find_spec(name) is None), None)
    return None if missing is None else f"{missing}: pip install 'quiver-retrieval[{extra}]'"


def require_extra(kind: str) -> None:
    """Check that the extra is installed that training a kind of model needs."""
    if reason := missing_library(kind):
        raise InputError(f"training needs {reason}")


def build_model(recipe: Recipe, texts: Iterable[str], *, device: str | None = None) -> BiEncoder | ColBERT:
    """Make the model that a run starts from; equal recipes and texts give equal weights."""
    section, seed, device = recipe.model, recipe.training.seed, device or default_device()
    if section.init == RANDOM:
        choice = _Choice(section, own=False)
        colbert = _colbert_settings(ColBERTSettings(), choice) if recipe.kind == "colbert" else None
        parts = _random_parts(section, _prefixes(colbert), texts, seed=seed, device=device)
    else:
        parts = load_parts(pin_source(section.init, section.revision), device=device, to_train=True)
        choice = _Choice(section, own=not parts.bare and parts.settings.kind == recipe.kind)
        colbert = (
            _colbert_settings(parts.settings.colbert if choice.own else ColBERTSettings(), choice) if recipe.kind == "colbert" else None
        )
        add_tokens(parts, _prefixes(colbert), seed=seed)
    start = parts.settings
    if not choice.own:  # of a bare encoder, or of a checkpoint of the other kind, whose settings have no meaning for this one
        if start.projections or start.query_prompt or start.document_prompt:
            kind = "a ColBERT model" if start.kind == "colbert" else "a bi-encoder"
            logger.warning("%s is %s: only its encoder is used, without its Dense modules and prompts", section.init, kind)
        start = ModelFolder(kind=recipe.kind, encoder_folder=start.encoder_folder, lower_case=start.lower_case)
    if colbert is None:
        settings = _dense_settings(start, choice)
        choice.log()
        return BiEncoder.from_parts(parts.encoder, parts.tokenizer, settings, source=section.init)
    projections = _projections(start, choice, width=parts.encoder.config.hidden_size, seed=seed)
    settings = replace(start, projections=projections, similarity="maxsim", colbert=colbert)
    if problems := unsupported_by_pylate(settings):  # checkpoints are written in that layout
        raise InputError(f"{section.init}: {'; '.join(problems)}; models with that cannot be trained, remove it from the model's folder")
    choice.log()
    return ColBERT.from_parts(parts.encoder, parts.tokenizer, settings, source=section.init)


class _Choice:
    """Chooses each setting between a recipe and the checkpoint that it starts from."""

    def __init__(self, section: ModelSection, *, own: bool) -> None:
        self.section, self.own = section, own
        self._differing: list[tuple[str, object, object]] = []
        self._changed: list[tuple[str, object, object]] = []

    def of(self, name: str, wanted: Value | None, known: Value) -> Value:
        """Return the recipe's value of a setting, or the checkpoint's (or the default) if the recipe has none that counts."""
        if wanted is None or wanted == known:
            return known
        if not self.own:
            return wanted
        if name in self.section.only_if_bare:
            self._differing.append((name, known, wanted))
            return known
        self._changed.append((name, known, wanted))
        return wanted

    def log(self) -> None:
        if self._differing:
            kept = "; ".join(f"{name} {_shown(known)}, not the recipe's {_shown(wanted)}" for name, known, wanted in self._differing)
            logger.warning("%s keeps its own settings: %s; model.%s=... changes one", self.section.init, kept, self._differing[0][0])
        if self._changed:
            changed = "; ".join(f"{name} from {_shown(known)} to {_shown(wanted)}" for name, known, wanted in self._changed)
            text = "the recipe changes settings of %s: %s; null keeps one, as in model.%s=null"
            logger.warning(text, self.section.init, changed, self._changed[0][0])


def _shown(value: object) -> str:
    if value is None:
        return "null"
    for name, tokens in SKIPLISTS.items():
        if value == tokens:
            return repr(name)
    return f"{value[0]} ({value[1]})".lower() if isinstance(value, tuple) and len(value) == 2 else repr(value)


def _dense_settings(start: ModelFolder, choice: _Choice) -> ModelFolder:
    section = choice.section
    known = (start.normalize, start.similarity)
    by_recipe: dict[bool | None, tuple[bool, Similarity]] = {True: (True, "cosine"), False: (False, "dot")}
    normalize, similarity = choice.of("normalize", by_recipe.get(section.normalize), known)
    return replace(
        start,
        max_length=choice.of("max_length", section.max_length, start.max_length),
        pooling=choice.of("pooling", section.pooling, start.pooling),
        normalize=normalize,
        similarity=similarity,
        query_prompt=choice.of("query_prompt", section.query_prompt, start.query_prompt),
        document_prompt=choice.of("document_prompt", section.document_prompt, start.document_prompt),
    )


def _colbert_settings(start: ColBERTSettings, choice: _Choice) -> ColBERTSettings:
    options = choice.section.colbert or ColBERTSection()
    names = ("query_prefix", "document_prefix", "query_length", "document_length", "query_expansion", "attend_to_expansion")
    values = {name: choice.of(f"colbert.{name}", getattr(options, name), getattr(start, name)) for name in names}
    skiplist = None if options.skiplist is None else SKIPLISTS[options.skiplist]
    found = replace(start, **values, skiplist=choice.of("colbert.skiplist", skiplist, start.skiplist))
    return replace(
        found,
        # Without expansion there are no such tokens; PyLate stores false then.
        attend_to_expansion=found.attend_to_expansion and found.query_expansion,
        expanded_length=start.expanded_length if found.query_length == start.query_length else None,
    )


def _projections(start: ModelFolder, choice: _Choice, *, width: int, seed: int) -> tuple[Projection, ...]:
    """The checkpoint's projections, or a new one."""
    options, section = choice.section.colbert or ColBERTSection(), choice.section
    if not start.projections:
        dim = options.dim or DIM
        with torch.random.fork_rng(devices=[]):  # torch's generator is not advanced
            torch.manual_seed(seed)
            projection = Projection(width, dim)  # drawn like `nn.Linear`, as in PyLate
            if options.projection == "orthogonal":
                start_weight = nn.init.eye_ if dim == width else nn.init.orthogonal_
                start_weight(projection.linear.weight)
        return (projection,)
    given = {name for name in ("dim", "projection") if f"colbert.{name}" not in section.only_if_bare}
    if "dim" in given and options.dim not in (None, width := start.projections[-1].linear.out_features):
        raise InputError(f"model.colbert.dim: must be {width}, the width of the projection of {section.init}, got {options.dim}")
    if "projection" in given and options.projection == "orthogonal":
        raise InputError(f"model.colbert.projection: orthogonal initializes a new projection, but {section.init} has one; use random")
    return start.projections


def _prefixes(settings: ColBERTSettings | None) -> list[str]:
    """Prefixes that the vocabulary must contain; empty ones are left out."""
    found = [] if settings is None else [settings.query_prefix, settings.document_prefix]
    return list(dict.fromkeys(prefix for prefix in found if prefix))


def add_tokens(parts: ModelParts, tokens: list[str], *, seed: int) -> None:
    """Add missing tokens, with embeddings drawn entry by entry from a normal distribution with the mean and deviation of the known ones.

    transformers draws new embeddings close to the mean, to keep the softmax over an output vocabulary unchanged
    (nlp.stanford.edu/~johnhew/vocab-expansion.html). A retriever has no such softmax, and with LoRA, which does not train the embedding,
    [Q] and [D] would stay all but equal.
    """
    tokenizer, encoder = parts.tokenizer, parts.encoder
    known = len(tokenizer)
    new = [tokenizer.add_token(token) for token in tokens if tokenizer.token_id(token) is None]
    with torch.no_grad():  # also if the embedding was padded and has untrained rows for them
        table: Tensor = encoder.embeddings.tokens.weight
        if len(table) < len(tokenizer):  # never shortened; rows beside those of the new tokens are the mean
            longer = nn.Embedding(len(tokenizer), table.shape[1], device=table.device, dtype=table.dtype)
            longer.weight.copy_(torch.cat([table, table.mean(dim=0).expand(len(tokenizer) - len(table), -1)]))
            encoder.embeddings.tokens, table = longer, longer.weight
            encoder.config = replace(encoder.config, vocab_size=len(tokenizer))
        # Drawn on the CPU, so that equal seeds give equal values on every device.
        drawn = torch.randn(len(new), table.shape[1], generator=torch.Generator().manual_seed(seed)).to(table)
        spread, mean = torch.std_mean(table[:known], dim=0, correction=0)
        table[new] = mean + spread * drawn


def _random_parts(section: ModelSection, prefixes: list[str], texts: Iterable[str], *, seed: int, device: str) -> ModelParts:
    shape = section.architecture
    if shape is None or section.tokenizer is None:  # for recipes made in code
        raise InputError("model.architecture and model.tokenizer are required for model.init: random")
    if section.tokenizer == "train":
        size = shape.vocab_size - len(prefixes)
        tokenizer = Tokenizer.train(texts, vocab_size=size, max_length=shape.max_positions, split=section.vocabulary)
    else:
        tokenizer = read_tokenizer(local_folder(section.tokenizer))
        if len(tokenizer) > shape.vocab_size:
            needed = f"must be >= {len(tokenizer)}, the size of {section.tokenizer}, got {shape.vocab_size}"
            raise InputError(f"model.architecture.vocab_size: {needed}")
    for prefix in prefixes:
        tokenizer.add_token(prefix)
    config = shape.config(
        vocab_size=max(shape.vocab_size, len(tokenizer)),
        max_positions=shape.max_positions,
        global_theta=shape.global_theta,
        token_ids={f"{role}_token_id": token for role in ("pad", "cls", "sep") if (token := tokenizer.special_id(role)) is not None},
    )
    with Uninitialized():
        encoder = Encoder(config)
    init_weights(encoder, seed=seed, method=shape.init_method).eval()  # on the CPU, so that equal seeds give equal weights on every device
    return ModelParts(ModelFolder(kind="dense", encoder_folder=Path()), encoder.to(device), tokenizer)
