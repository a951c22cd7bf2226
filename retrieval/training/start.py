"""The model that a recipe starts from: a bi-encoder or a ColBERT, with random weights or those of a checkpoint.

A checkpoint may be anything Quiver opens: a bare encoder, a bi-encoder, a ColBERT. What the recipe has a setting for is
replaced; the rest stays as it was: lower case, whether prompts are pooled, the Dense modules.

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
from quiver.retrieval.models.biencoder import BiEncoder
from quiver.retrieval.models.colbert import ColBERT
from quiver.retrieval.models.encoding import Projection
from quiver.retrieval.models.export.sentence_transformers import read_tokenizer
from quiver.retrieval.models.loading import ColBERTSettings, ModelFolder, ModelParts, default_device, load_parts
from quiver.retrieval.training.sections import ArchitectureSection, ColBERTSection, ModelSection, Recipe

logger = logging.getLogger(__name__)

EXTRA = ("sentence_transformers", "transformers", "datasets", "pylate")
"""Modules that training imports and the core does not have."""

SKIPLISTS = {"punctuation": tuple(string.punctuation), "none": ()}
"""``model.colbert.skiplist`` -> the tokens whose document vectors are dropped."""


def require_extra() -> None:
    """Say before anything is read or written that training is not installed.

    Raises:
        InputError: A module of the extra ``train`` cannot be found.
    """
    if missing := [name for name in EXTRA if importlib.util.find_spec(name) is None]:
        raise InputError(f"training needs {missing[0]}: pip install 'quiver-retrieval[train]'")


def build_model(recipe: Recipe, texts: Iterable[str]) -> BiEncoder | ColBERT:
    """The model a recipe starts from, on the device that `quiver.retrieval.models.loading.default_device` names.

    Equal recipes and texts give equal weights.

    Args:
        recipe: Its ``kind``, ``model`` and ``training.seed``.
        texts: What a new vocabulary is learnt from, if the recipe asks for one; read once, and else not at all.

    Raises:
        InputError: The checkpoint it starts from cannot be used, or a setting does not fit it.
    """
    section, seed = recipe.model, recipe.training.seed
    prefixes = _prefixes(section.colbert)
    if section.init == "random":
        parts = _random_parts(section, prefixes, texts, seed=seed)
    else:
        parts = load_parts(section.init, revision=section.revision, device=default_device())
        _add_tokens(parts, prefixes, seed=seed)
    if recipe.kind == "dense":
        return BiEncoder(parts.encoder, parts.tokenizer, _dense_settings(parts.settings, section), source=section.init)
    return ColBERT(parts.encoder, parts.tokenizer, _colbert_settings(parts, section, seed=seed), source=section.init)


def _dense_settings(start: ModelFolder, section: ModelSection) -> ModelFolder:
    if section.pooling is None or section.normalize is None:  # the rules ask for them; this guards recipes made in code
        raise InputError("model.pooling and model.normalize are needed where kind is dense")
    if start.kind == "colbert":
        logger.info("%s is a ColBERT: its encoder is taken, its projection is left out", section.init)
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
    asked, start = section.colbert, parts.settings
    if asked is None:  # as above
        raise InputError("model.colbert is needed where kind is colbert")
    if start.kind == "colbert" and start.projections:
        projections = start.projections
        if (width := projections[-1].linear.out_features) != asked.dim:
            raise InputError(f"model.colbert.dim: must be {width}, the width of the projection that {section.init} has, got {asked.dim}")
        if asked.projection == "orthogonal":
            raise InputError(f"model.colbert.projection: {section.init} has a projection already; orthogonal is how a new one starts")
    else:
        if start.projections:
            logger.info("%s is a bi-encoder: its Dense modules are left out, a new projection takes their place", section.init)
        projections = (_new_projection(parts.encoder.config.hidden_size, asked, seed=seed),)
    return ModelFolder(
        kind="colbert",
        encoder_folder=start.encoder_folder,
        lower_case=start.lower_case,
        projections=projections,
        similarity="maxsim",
        colbert=ColBERTSettings(
            query_prefix=asked.query_prefix,
            document_prefix=asked.document_prefix,
            query_length=asked.query_length,
            document_length=asked.document_length,
            query_expansion=asked.query_expansion,
            # Without expansion there is nothing to attend to; PyLate stores it so.
            attend_to_expansion=asked.attend_to_expansion and asked.query_expansion,
            skiplist=SKIPLISTS[asked.skiplist],
        ),
    )


def _new_projection(width: int, asked: ColBERTSection, *, seed: int) -> Projection:
    """Drawn as `nn.Linear` draws its weights, which is what PyLate starts from, or orthogonal; torch's own generator is left as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        projection = Projection(width, asked.dim)
        if asked.projection == "orthogonal":
            start = nn.init.eye_ if asked.dim == width else nn.init.orthogonal_
            start(projection.linear.weight)
        return projection


def _prefixes(section: ColBERTSection | None) -> list[str]:
    """The tokens that a vocabulary must have: query prefix and document prefix, where there are any."""
    found = [] if section is None else [section.query_prefix, section.document_prefix]
    return list(dict.fromkeys(prefix for prefix in found if prefix))


def _add_tokens(parts: ModelParts, tokens: list[str], *, seed: int) -> None:
    """Give the vocabulary tokens that it lacks, with vectors drawn from the normal distribution of those it has, entry by entry.

    transformers draws them too, around the same mean but all but on it, so that they do not disturb the softmax over an output
    vocabulary (nlp.stanford.edu/~johnhew/vocab-expansion.html). There is none here, and where LoRA leaves the embedding as it
    is, [Q] and [D] would be the same vector for ever.
    """
    tokenizer, encoder = parts.tokenizer, parts.encoder
    known = len(tokenizer)
    new = [tokenizer.add_token(token) for token in tokens if tokenizer.token_id(token) is None]
    resize_vocabulary(encoder, len(tokenizer))
    with torch.no_grad():  # also where the embedding was padded, and has untrained rows for them
        table = encoder.embeddings.tokens.weight
        # On the CPU: equal seeds give equal values whatever the device.
        drawn = torch.randn(len(new), table.shape[1], generator=torch.Generator().manual_seed(seed)).to(table)
        spread, mean = torch.std_mean(table[:known], dim=0, correction=0)
        table[new] = mean + spread * drawn


def resize_vocabulary(encoder: Encoder, rows: int) -> None:
    """Lengthen an encoder's token embedding by the mean of its rows, in place; one that is long enough already is left alone.

    Args:
        encoder: Its configuration changes with it.
        rows: Token ids there are to be, V.
    """
    old: Tensor = encoder.embeddings.tokens.weight
    if rows <= len(old):
        return
    table = nn.Embedding(rows, old.shape[1], device=old.device, dtype=old.dtype)
    with torch.no_grad():
        table.weight.copy_(torch.cat([old, old.mean(dim=0).expand(rows - len(old), -1)]))
    encoder.embeddings.tokens = table
    encoder.config = replace(encoder.config, vocab_size=rows)


def _random_parts(section: ModelSection, prefixes: list[str], texts: Iterable[str], *, seed: int) -> ModelParts:
    shape = section.architecture
    if shape is None or section.tokenizer is None:  # as above
        raise InputError("model.architecture and model.tokenizer are needed where model.init is random")
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
    encoder = init_weights(Encoder(config), seed=seed).eval()  # before it moves: equal seeds give equal weights on every device
    return ModelParts(ModelFolder(kind="dense", encoder_folder=Path()), encoder.to(default_device()), tokenizer)


def _random_vocabulary(section: ModelSection, shape: ArchitectureSection, prefixes: list[str], texts: Iterable[str]) -> Tokenizer:
    """A vocabulary of ``vocab_size`` ids with the prefixes among them, or the one that the recipe names, prefixes added."""
    if section.tokenizer == "train":
        size = shape.vocab_size - len(prefixes)
        tokenizer = Tokenizer.train(texts, vocab_size=size, max_length=shape.max_positions, split=section.vocabulary)
    else:
        tokenizer = read_tokenizer(local_folder(str(section.tokenizer)))
        if len(tokenizer) > shape.vocab_size:
            raise InputError(
                f"model.architecture.vocab_size: must be >= {len(tokenizer)}, the ids of {section.tokenizer}, got {shape.vocab_size}"
            )
    for prefix in prefixes:
        tokenizer.add_token(prefix)
    return tokenizer
