"""Bi-encoders in sentence-transformers' layout.

What is written opens in sentence-transformers 5 and 6: old module paths and pooling keys.

Between the two white space around a text changed its meaning, and that at a prompt's end; see `quiver.retrieval.models.export.white_space`.

Source: what sentence-transformers 5.3 and 6.2 write and read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from quiver.encoder import Encoder, InputError, Tokenizer
from quiver.encoder.files import write_json
from quiver.retrieval.models.export.fields import typed
from quiver.retrieval.models.export.modules import (
    DENSE,
    POOLING_KEYS,
    VERSIONS,
    read_stack,
    write_encoder,
    write_projection,
    write_stack,
)
from quiver.retrieval.models.export.white_space import with_strip
from quiver.retrieval.models.model_settings import ModelFolder


def read_dense(folder: Path, config: Mapping[str, Any], path: Path) -> ModelFolder:
    """Read a SentenceTransformer folder, or take a bare encoder's for one.

    Args:
        folder: With modules.json, or with an encoder alone.
        config: The parsed ``config_sentence_transformers.json``; empty where there is none.
        path: That file, named in errors.

    Raises:
        InputError: A module, a pooling or a similarity is not one of ours, or a file is malformed.
    """
    result = ModelFolder("dense", folder)
    if (folder / "modules.json").is_file():
        result = read_stack(folder, DENSE, result)
    prompts = typed(config, "prompts", dict, {}, path)
    return replace(
        result,
        similarity=_similarity(typed(config, "similarity_fn_name", str, "cosine", path), path),
        query_prompt=typed(prompts, "query", str, "", path),
        document_prompt=typed(prompts, "document", str, "", path),
    )


def _similarity(name: str, path: Path) -> Literal["cosine", "dot"]:
    if name == "cosine":
        return "cosine"
    if name == "dot":
        return "dot"
    raise InputError(f"{path}: similarity_fn_name must be cosine or dot, got {name!r}")


def write_dense(folder: Path, settings: ModelFolder, encoder: Encoder, tokenizer: Tokenizer, *, max_length: int) -> None:
    """Write a bi-encoder as a sentence-transformers folder.

    Args:
        folder: Made if it is not there.
        settings: Pooling, projections, prompts, similarity.
        encoder: The weights.
        tokenizer: The vocabulary.
        max_length: Tokens a text is cut to.

    Raises:
        InputError: The model has a residual Dense module, which the layout does not know; nothing is written.
    """
    if any(projection.use_residual for projection in settings.projections):
        raise InputError("sentence-transformers 5 has no residual Dense module: this model cannot be written in its layout")
    modules = [("", "sentence_transformers.models.Transformer"), ("1_Pooling", "sentence_transformers.models.Pooling")]
    modules += [(f"{place}_Dense", "sentence_transformers.models.Dense") for place in range(2, 2 + len(settings.projections))]
    if settings.normalize:
        modules.append((f"{len(modules)}_Normalize", "sentence_transformers.models.Normalize"))
    write_encoder(folder, encoder, with_strip(tokenizer))
    write_stack(folder, modules, {"max_seq_length": max_length, "do_lower_case": settings.lower_case})
    pooling: dict[str, Any] = {"word_embedding_dimension": encoder.config.hidden_size}
    pooling |= {key: mode == settings.pooling for key, mode in POOLING_KEYS.items()}
    write_json(folder / "1_Pooling" / "config.json", pooling | {"include_prompt": settings.include_prompt})
    for place, projection in enumerate(settings.projections, start=2):
        write_projection(folder / f"{place}_Dense", projection, {})
    write_json(
        folder / "config_sentence_transformers.json",
        {
            "__version__": VERSIONS,
            "model_type": "SentenceTransformer",
            "prompts": {"query": settings.query_prompt, "document": settings.document_prompt},
            "default_prompt_name": None,
            "similarity_fn_name": settings.similarity,
        },
    )
