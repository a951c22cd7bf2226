"""ColBERT models in PyLate's layout, which sentence-transformers 6 reads too.

Source: what PyLate 1.6 writes and reads; how sentence-transformers 6.2 reads it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quiver.encoder import Encoder, InputError, Tokenizer
from quiver.encoder.files import write_json
from quiver.retrieval.models.export.sentence_transformers import (
    PYLATE_STACK,
    VERSIONS_5,
    read_stack,
    typed,
    with_strip,
    words,
    write_encoder,
    write_projection,
    write_stack,
)
from quiver.retrieval.models.options import ColBERTSettings, ModelFolder


def read_pylate(folder: Path, config: Mapping[str, Any], path: Path) -> ModelFolder:
    """Read a PyLate folder; arguments and errors as `quiver.retrieval.models.export.sentence_transformers.read_dense`."""
    result = ModelFolder("colbert", folder, similarity="maxsim", colbert=_read_colbert(config, path))
    return read_stack(folder, PYLATE_STACK, result) if (folder / "modules.json").is_file() else result


def _read_colbert(config: Mapping[str, Any], path: Path) -> ColBERTSettings:
    standard = ColBERTSettings()
    colbert = ColBERTSettings(
        query_prefix=typed(config, "query_prefix", str, standard.query_prefix, path),
        document_prefix=typed(config, "document_prefix", str, standard.document_prefix, path),
        query_length=typed(config, "query_length", int, standard.query_length, path),
        document_length=typed(config, "document_length", int, standard.document_length, path),
        query_expansion=typed(config, "do_query_expansion", bool, standard.query_expansion, path),
        attend_to_expansion=typed(config, "attend_to_expansion_tokens", bool, standard.attend_to_expansion, path),
        skiplist=words(config, "skiplist_words", standard.skiplist, path),
    )
    colbert.check_lengths(path)
    return colbert


def unsupported_by_pylate(settings: ModelFolder) -> list[str]:
    """List what a ColBERT model uses that only sentence-transformers 6 supports, not PyLate and Stanford ColBERT."""
    prompted = ["it has prompts of several tokens"] if settings.query_prompt or settings.document_prompt else []
    return prompted + ["its queries may be longer than the length to which they are expanded"] * (
        settings.colbert.expanded_length is not None
    )


def write_colbert(folder: Path, settings: ModelFolder, encoder: Encoder, tokenizer: Tokenizer) -> None:
    """Write a ColBERT model as a PyLate folder, which sentence-transformers 6 reads too.

    Arguments as `quiver.retrieval.models.export.sentence_transformers.write_multi_vector`.

    Raises:
        InputError: The model needs a feature that only sentence-transformers 6 has; nothing is written.
    """
    if problems := unsupported_by_pylate(settings):
        raise InputError(f"PyLate's layout cannot express this model: {'; '.join(problems)}; use --layout sentence-transformers")
    colbert = settings.colbert
    modules = [("", "sentence_transformers.models.Transformer")]
    modules += [(f"{number}_Dense", "pylate.models.Dense.Dense") for number in range(1, 1 + len(settings.projections))]
    max_length = max(colbert.query_length, colbert.document_length)
    write_encoder(folder, encoder, with_strip(tokenizer, prefixes=(colbert.query_prefix, colbert.document_prefix)))
    write_stack(folder, modules, {"max_seq_length": max_length, "do_lower_case": settings.lower_case})
    for number, projection in enumerate(settings.projections, start=1):
        write_projection(folder / f"{number}_Dense", projection, {"use_residual": projection.use_residual})
    write_json(
        folder / "config_sentence_transformers.json",
        {
            "__version__": VERSIONS_5,
            "model_type": "ColBERT",
            "similarity_fn_name": "MaxSim",
            "prompts": {"query": "", "document": ""},
            "default_prompt_name": None,
            "query_prefix": colbert.query_prefix,
            "document_prefix": colbert.document_prefix,
            "query_length": colbert.query_length,
            "document_length": colbert.document_length,
            "do_query_expansion": colbert.query_expansion,
            "attend_to_expansion_tokens": colbert.attend_to_expansion,
            "skiplist_words": list(colbert.skiplist),
        },
    )
