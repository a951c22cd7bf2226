"""ColBERT models in the layout of sentence-transformers 6: its ``MultiVectorEncoder``.

There a prefix is text before a text; where the tokenizer reads it as one token, that is the token which PyLate and Quiver insert.

Source: what sentence-transformers 6.2 writes and reads.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from quiver.encoder import Encoder, InputError, Tokenizer
from quiver.encoder.checkpoints import config_from_hf
from quiver.encoder.files import read_json, write_json
from quiver.retrieval.models.export.fields import required, typed
from quiver.retrieval.models.export.modules import (
    MULTI_VECTOR,
    read_stack,
    transformer_settings,
    write_encoder,
    write_projection,
    write_stack,
)
from quiver.retrieval.models.export.prefixes import reads_as_token, with_prefixes
from quiver.retrieval.models.export.pylate import check_lengths
from quiver.retrieval.models.export.white_space import ignores_outer_space, read_tokenizer, with_strip
from quiver.retrieval.models.model_settings import ColBERTSettings, ModelFolder

logger = logging.getLogger(__name__)

TRANSFORMER = "sentence_transformers.base.modules.transformer.Transformer"
DENSE = "sentence_transformers.base.modules.dense.Dense"
MASK = "sentence_transformers.multi_vector_encoder.modules.multi_vector_mask.MultiVectorMask"
NORMALIZE = "sentence_transformers.base.modules.normalize.Normalize"
TOKENS = {"module_input_name": "token_embeddings", "module_output_name": "token_embeddings"}
VERSIONS = {"sentence_transformers": "6.0.0", "transformers": "5.0.0", "pytorch": "2.6.0"}


def read_multi_vector(folder: Path, config: Mapping[str, Any], path: Path) -> ModelFolder:
    """Read a folder of sentence-transformers 6's MultiVectorEncoder.

    Args:
        folder: With modules.json.
        config: The parsed ``config_sentence_transformers.json``.
        path: That file, named in errors.

    Raises:
        InputError: The model does what Quiver does not run, or a file is malformed.
    """
    result = read_stack(folder, MULTI_VECTOR, ModelFolder("colbert", folder, similarity="maxsim", colbert=ColBERTSettings(skiplist=())))
    if typed(config, "similarity_fn_name", str, "maxsim", path) != "maxsim":
        required(config, "similarity_fn_name", ("maxsim", "meanmaxsim"), path)
        logger.warning("%s: scores are sums over a query's tokens here, not means: the rankings are the same, the scores are not", path)
    tokenizer = read_tokenizer(result.encoder_folder)
    prompts = typed(config, "prompts", dict, {}, path)
    query_prefix, query_prompt = _prefix(typed(prompts, "query", str, "", path), tokenizer)
    document_prefix, document_prompt = _prefix(typed(prompts, "document", str, "", path), tokenizer)
    colbert = replace(
        _with_lengths(result, tokenizer),
        query_prefix=query_prefix,
        document_prefix=document_prefix,
        # A word that is no token is left out there; here and in PyLate it would stand for [UNK].
        skiplist=tuple(word for word in result.colbert.skiplist if tokenizer.token_id(word) is not None),
    )
    check_lengths(colbert, transformer_settings(result.encoder_folder))
    return replace(result, colbert=colbert, query_prompt=query_prompt, document_prompt=document_prompt)


def _prefix(prompt: str, tokenizer: Tokenizer) -> tuple[str, str]:
    """A prompt as the token it is read as, or else as text: prefix and prompt."""
    for token in (prompt, prompt.rstrip()):
        if token and reads_as_token(tokenizer, prompt, token):
            return token, ""
    return "", prompt


def _with_lengths(result: ModelFolder, tokenizer: Tokenizer) -> ColBERTSettings:
    folder = result.encoder_folder
    path = transformer_settings(folder)
    values = read_json(path) if path.is_file() else {}
    limits = (result.max_length, tokenizer.max_length, config_from_hf(read_json(folder / "config.json")).max_positions)
    longest = min(limit for limit in limits if limit is not None)
    colbert = replace(result.colbert, document_length=typed(values, "document_length", int, longest, path))
    expansion = typed(values, "query_expansion", dict, {}, path)
    if not expansion:
        return replace(colbert, query_expansion=False, query_length=typed(values, "query_length", int, longest, path))
    required(expansion, "strategy", ("fixed", "min"), path)
    token = typed(expansion, "token", str, "", path)
    if token and tokenizer.token_id(token) != tokenizer.special_id("mask"):
        raise InputError(f"{path}: queries must be expanded by the mask token, got {token!r}")
    length = typed(expansion, "length", int, 0, path)
    colbert = replace(colbert, query_length=length, attend_to_expansion=typed(expansion, "attend", bool, False, path))
    if expansion.get("strategy") == "min":
        longest = max(length, typed(values, "query_length", int, longest, path))
        return replace(colbert, query_length=longest, expanded_length=length)
    return colbert


def write_multi_vector(folder: Path, settings: ModelFolder, encoder: Encoder, tokenizer: Tokenizer) -> None:
    """Write a ColBERT model as sentence-transformers 6 does; neither 5 nor PyLate reads that.

    Args:
        folder: Made if it is not there.
        settings: Projections and ColBERT settings.
        encoder: The weights.
        tokenizer: The vocabulary, the two prefixes in it.

    Raises:
        InputError: A prefix before a text is not read as one token, or white space around a text as something, so that vectors would
            differ; nothing is written.
    """
    colbert = settings.colbert
    prefixes = (colbert.query_prefix, colbert.document_prefix)
    tokenizer = with_strip(with_prefixes(tokenizer, prefixes), prefixes=prefixes)
    if not ignores_outer_space(tokenizer):
        raise InputError("sentence-transformers 6 does not strip white space around a text, and this tokenizer cannot be made to")
    dense = [(f"{place}_Dense", DENSE) for place in range(1, 1 + len(settings.projections))]
    mask, normalize = f"{len(dense) + 1}_MultiVectorMask", f"{len(dense) + 2}_Normalize"
    transformer: dict[str, Any] = {
        "transformer_task": "feature-extraction",
        "modality_config": {"text": {"method": "forward", "method_output_name": "last_hidden_state"}},
        "module_output_name": "token_embeddings",
        "max_seq_length": max(colbert.query_length, colbert.document_length),
        "do_lower_case": settings.lower_case,
        "document_length": colbert.document_length,
    }
    if colbert.query_expansion:
        strategy, length = ("min", colbert.expanded_length) if colbert.expanded_length else ("fixed", colbert.query_length)
        transformer["query_expansion"] = {"strategy": strategy, "attend": colbert.attend_to_expansion, "token": None, "length": length}
    if not colbert.query_expansion or colbert.expanded_length:
        transformer["query_length"] = colbert.query_length
    write_encoder(folder, encoder, tokenizer)
    write_stack(folder, [("", TRANSFORMER), *dense, (mask, MASK), (normalize, NORMALIZE)], transformer)
    for (path, _), projection in zip(dense, settings.projections, strict=True):
        write_projection(folder / path, projection, TOKENS | {"use_residual": projection.use_residual})
    skiplist = {"skiplist_words": list(colbert.skiplist), "skiplist_tasks": ["document"], "keep_only_token_ids": None}
    write_json(folder / mask / "config.json", skiplist)
    write_json(folder / normalize / "config.json", TOKENS)
    write_json(
        folder / "config_sentence_transformers.json",
        {
            "__version__": VERSIONS,
            "model_type": "MultiVectorEncoder",
            "prompts": {
                "query": colbert.query_prefix + settings.query_prompt,
                "document": colbert.document_prefix + settings.document_prompt,
            },
            "default_prompt_name": None,
            "similarity_fn_name": "maxsim",
        },
    )
