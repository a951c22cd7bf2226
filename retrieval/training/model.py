"""The model that a run starts from: a bi-encoder or a ColBERT, with random weights or those of a checkpoint.

A checkpoint may be anything that Quiver opens: a bare encoder, a bi-encoder, a ColBERT. Of a model for another task, such as a
cross-encoder, the encoder is taken. The settings of the recipe replace those of the checkpoint; the others are kept (lower case, whether
prompts are pooled, Dense modules).

This module imports nothing of the extra ``train``.

Source: the starting points of the ModernBERT release's train_st.py and train_pylate.py (AnswerDotAI/ModernBERT at 8c57a0f).
"""

from __future__ import annotations

import importlib.util
import logging
import string
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

from quiver.encoder import Encoder, EncoderConfig, InputError, Tokenizer, init_weights
from quiver.encoder.checkpoints.folder import local_folder
from quiver.encoder.config import global_every
from quiver.encoder.model import Uninitialized
from quiver.retrieval.models.biencoder import BiEncoder
from quiver.retrieval.models.colbert import ColBERT
from quiver.retrieval.models.export.sentence_transformers import read_tokenizer
from quiver.retrieval.models.loading import ColBERTSettings, ModelFolder, ModelParts, default_device, load_parts
from quiver.retrieval.models.pooling import Projection
from quiver.retrieval.training.recipe import ArchitectureSection, ColBERTSection, ModelSection, Recipe

logger = logging.getLogger(__name__)

_TRAIN = ("sentence_transformers", "transformers", "datasets")
LIBRARIES = {"dense": ("train", _TRAIN), "colbert": ("colbert", (*_TRAIN, "pylate"))}
"""Kind of retriever -> the extra that training it needs, and the modules that it imports. PyLate limits torch's version, so it is apart."""

SKIPLISTS = {"punctuation": tuple(string.punctuation), "none": ()}
"""Value of ``model.colbert.skiplist`` -> tokens whose document vectors are dropped."""


def missing_library(kind: str) -> str | None:
    """The first library that training a kind of model lacks, and how to install it; None if nothing is missing.

    The losses of retrievers come from these libraries; a masked language model needs none of them.
    """
    extra, modules = LIBRARIES.get(kind, ("", ()))
    missing = next((name for name in modules if importlib.util.find_spec(name) is None), None)
    return None if missing is None else f"{missing}: pip install 'quiver-retrieval[{extra}]'"


def require_extra(kind: str) -> None:
    """Check that the extra is installed that training a kind of model needs.

    Raises:
        InputError: A module of the extra is missing.
    """
    if reason := missing_library(kind):
        raise InputError(f"training needs {reason}")


def build_model(recipe: Recipe, texts: Iterable[str], *, device: str | None = None) -> BiEncoder | ColBERT:
    """Make the model that a run starts from.

    Equal recipes and texts give equal weights.

    Args:
        recipe: Recipe with ``kind``, ``model`` and ``training.seed``.
        texts: Texts to train a new vocabulary on; read once if the recipe asks for one, otherwise not read.
        device: Device of the model; None for that of `quiver.retrieval.models.loading.default_device`.

    Raises:
        InputError: The starting checkpoint cannot be used, or a setting does not fit it.
    """
    section, seed = recipe.model, recipe.training.seed
    prefixes, device = _prefixes(section.colbert), device or default_device()
    if section.init == "random":
        parts = _random_parts(section, prefixes, texts, seed=seed, device=device)
    else:
        parts = load_parts(section.init, revision=section.revision, device=device, to_train=True)
        add_tokens(parts, prefixes, seed=seed)
    if recipe.kind == "dense":
        return BiEncoder.from_parts(parts.encoder, parts.tokenizer, _dense_settings(parts.settings, section), source=section.init)
    return ColBERT.from_parts(parts.encoder, parts.tokenizer, _colbert_settings(parts, section, seed=seed), source=section.init)


def _dense_settings(start: ModelFolder, section: ModelSection) -> ModelFolder:
    if section.pooling is None or section.normalize is None:  # for recipes made in code, which the rules of recipe files do not check
        raise InputError("model.pooling and model.normalize are required for kind: dense")
    if start.kind == "colbert":
        logger.info("%s is a ColBERT model: its encoder is used without its projection", section.init)
        start = replace(start, kind="dense", projections=(), colbert=ColBERTSettings())
    return replace(
        start,
        max_length=section.max_length,
        pooling=section.pooling,
        normalize=section.normalize,
        similarity="cosine" if section.normalize else "dot",
        query_prompt=section.query_prompt,
        document_prompt=section.document_prompt,
    )


def _colbert_settings(parts: ModelParts, section: ModelSection, *, seed: int) -> ModelFolder:
    options, start = section.colbert, parts.settings
    if options is None:  # for recipes made in code
        raise InputError("model.colbert is required for kind: colbert")
    if start.kind == "colbert" and start.projections:
        projections = start.projections
        if (width := projections[-1].linear.out_features) != options.dim:
            raise InputError(f"model.colbert.dim: must be {width}, the width of the projection of {section.init}, got {options.dim}")
        if options.projection == "orthogonal":
            raise InputError(f"model.colbert.projection: orthogonal initializes a new projection, but {section.init} has one; use random")
    else:
        if start.projections:
            logger.info("%s is a bi-encoder: its Dense modules are replaced by a new projection", section.init)
        projections = (_new_projection(parts.encoder.config.hidden_size, options, seed=seed),)
    return ModelFolder(
        kind="colbert",
        encoder_folder=start.encoder_folder,
        lower_case=start.lower_case,
        projections=projections,
        similarity="maxsim",
        colbert=ColBERTSettings(
            query_prefix=options.query_prefix,
            document_prefix=options.document_prefix,
            query_length=options.query_length,
            document_length=options.document_length,
            query_expansion=options.query_expansion,
            # Without expansion there are no such tokens; PyLate stores false then.
            attend_to_expansion=options.attend_to_expansion and options.query_expansion,
            skiplist=SKIPLISTS[options.skiplist],
        ),
    )


def _new_projection(width: int, options: ColBERTSection, *, seed: int) -> Projection:
    """A new projection, drawn like `nn.Linear` as in PyLate, or orthogonal. torch's generator is not advanced."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        projection = Projection(width, options.dim)
        if options.projection == "orthogonal":
            start = nn.init.eye_ if options.dim == width else nn.init.orthogonal_
            start(projection.linear.weight)
        return projection


def _prefixes(section: ColBERTSection | None) -> list[str]:
    """Prefixes that the vocabulary must contain; empty ones are left out."""
    found = [] if section is None else [section.query_prefix, section.document_prefix]
    return list(dict.fromkeys(prefix for prefix in found if prefix))


def add_tokens(parts: ModelParts, tokens: list[str], *, seed: int) -> None:
    """Add missing tokens, with embeddings drawn entry by entry from a normal distribution with the mean and deviation of the known ones.

    transformers draws new embeddings close to the mean, to keep the softmax over an output vocabulary unchanged
    (nlp.stanford.edu/~johnhew/vocab-expansion.html). A retriever has no such softmax, and with LoRA, which does not train the embedding,
    [Q] and [D] would stay all but equal.

    Args:
        parts: Tokenizer and encoder, changed in place.
        tokens: Tokens; those in the vocabulary are left as they are.
        seed: Random seed of the new embeddings.
    """
    tokenizer, encoder = parts.tokenizer, parts.encoder
    known = len(tokenizer)
    new = [tokenizer.add_token(token) for token in tokens if tokenizer.token_id(token) is None]
    resize_vocabulary(encoder, len(tokenizer))
    with torch.no_grad():  # also if the embedding was padded and has untrained rows for them
        table = encoder.embeddings.tokens.weight
        # Drawn on the CPU, so that equal seeds give equal values on every device.
        drawn = torch.randn(len(new), table.shape[1], generator=torch.Generator().manual_seed(seed)).to(table)
        spread, mean = torch.std_mean(table[:known], dim=0, correction=0)
        table[new] = mean + spread * drawn


def resize_vocabulary(encoder: Encoder, rows: int) -> None:
    """Extend the token embedding of an encoder in place; new rows are the mean of the others. It is never shortened.

    Args:
        encoder: Encoder; its configuration is changed too.
        rows: Size V of the vocabulary.
    """
    old: Tensor = encoder.embeddings.tokens.weight
    if rows <= len(old):
        return
    table = nn.Embedding(rows, old.shape[1], device=old.device, dtype=old.dtype)
    with torch.no_grad():
        table.weight.copy_(torch.cat([old, old.mean(dim=0).expand(rows - len(old), -1)]))
    encoder.embeddings.tokens = table
    encoder.config = replace(encoder.config, vocab_size=rows)


def _random_parts(section: ModelSection, prefixes: list[str], texts: Iterable[str], *, seed: int, device: str) -> ModelParts:
    shape = section.architecture
    if shape is None or section.tokenizer is None:  # for recipes made in code
        raise InputError("model.architecture and model.tokenizer are required for model.init: random")
    tokenizer = _random_vocabulary(section, shape, prefixes, texts)
    config = EncoderConfig.modernbert(
        vocab_size=max(shape.vocab_size, len(tokenizer)),
        hidden_size=shape.hidden_size,
        num_heads=shape.heads,
        intermediate_size=shape.intermediate_size,
        layer_types=global_every(shape.layers, shape.global_every),
        max_positions=shape.max_positions,
        window=shape.window,
        global_theta=shape.global_theta,
        local_theta=shape.local_theta,
        pad_token_id=tokenizer.special_id("pad") or 0,
        cls_token_id=tokenizer.special_id("cls"),
        sep_token_id=tokenizer.special_id("sep"),
    )
    with Uninitialized():
        encoder = Encoder(config)
    init_weights(encoder, seed=seed).eval()  # on the CPU, so that equal seeds give equal weights on every device
    return ModelParts(ModelFolder(kind="dense", encoder_folder=Path()), encoder.to(device), tokenizer)


def _random_vocabulary(section: ModelSection, shape: ArchitectureSection, prefixes: list[str], texts: Iterable[str]) -> Tokenizer:
    """A new vocabulary of ``vocab_size`` ids with the prefixes, or the named one with the prefixes added."""
    if section.tokenizer == "train":
        size = shape.vocab_size - len(prefixes)
        tokenizer = Tokenizer.train(texts, vocab_size=size, max_length=shape.max_positions, split=section.vocabulary)
    else:
        tokenizer = read_tokenizer(local_folder(str(section.tokenizer)))
        if len(tokenizer) > shape.vocab_size:
            raise InputError(
                f"model.architecture.vocab_size: must be >= {len(tokenizer)}, the size of {section.tokenizer}, got {shape.vocab_size}"
            )
    for prefix in prefixes:
        tokenizer.add_token(prefix)
    return tokenizer
