"""Models written as folders of sentence-transformers and PyLate.

What is written opens in sentence-transformers 5 and 6 and in PyLate 1.6 alike: old module paths, old pooling keys,
ModernBERT's v4 config keys.

Source: sentence-transformers 5.3 and 6.2 ``modules.json``, PyLate 1.6 ``config_sentence_transformers.json``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from encoder import Encoder, InputError, Tokenizer, save_encoder
from encoder.files import replacing, write_json
from retrieval.model_folder import ModelFolder
from retrieval.projection import Projection


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
    _write_common(folder, modules, encoder, tokenizer, max_length, lower_case=settings.lower_case)
    pooling: dict[str, Any] = {"word_embedding_dimension": encoder.config.hidden_size}
    names = {"cls": "cls_token", "mean": "mean_tokens", "max": "max_tokens", "lasttoken": "lasttoken"}
    pooling |= {f"pooling_mode_{key}": mode == settings.pooling for mode, key in names.items()}
    pooling |= {"pooling_mode_mean_sqrt_len_tokens": False, "pooling_mode_weightedmean_tokens": False}
    write_json(folder / "1_Pooling" / "config.json", pooling | {"include_prompt": settings.include_prompt})
    for place, projection in enumerate(settings.projections, start=2):
        _write_projection(folder / f"{place}_Dense", projection, pylate=False)
    write_json(
        folder / "config_sentence_transformers.json",
        {
            "__version__": {"sentence_transformers": "5.0.0", "transformers": "4.48.0", "pytorch": "2.6.0"},
            "model_type": "SentenceTransformer",
            "prompts": {"query": settings.query_prompt, "document": settings.document_prompt},
            "default_prompt_name": None,
            "similarity_fn_name": settings.similarity,
        },
    )


def write_colbert(folder: Path, settings: ModelFolder, encoder: Encoder, tokenizer: Tokenizer) -> None:
    """Write a ColBERT model as a PyLate folder, which sentence-transformers 6 reads too.

    Args:
        folder: Made if it is not there.
        settings: Projections and ColBERT settings.
        encoder: The weights.
        tokenizer: The vocabulary, the two prefixes in it.
    """
    colbert = settings.colbert
    modules = [("", "sentence_transformers.models.Transformer")]
    modules += [(f"{place}_Dense", "pylate.models.Dense.Dense") for place in range(1, 1 + len(settings.projections))]
    max_length = max(colbert.query_length, colbert.document_length)
    _write_common(folder, modules, encoder, tokenizer, max_length, lower_case=settings.lower_case)
    for place, projection in enumerate(settings.projections, start=1):
        _write_projection(folder / f"{place}_Dense", projection, pylate=True)
    write_json(
        folder / "config_sentence_transformers.json",
        {
            "__version__": {"sentence_transformers": "5.0.0", "transformers": "4.48.0", "pytorch": "2.6.0"},
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


def _write_common(
    folder: Path, modules: list[tuple[str, str]], encoder: Encoder, tokenizer: Tokenizer, max_length: int, *, lower_case: bool
) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    save_encoder(encoder, folder)
    tokenizer.save(folder)
    for path, _ in modules[1:]:
        (folder / path).mkdir(exist_ok=True)
    write_json(folder / "sentence_bert_config.json", {"max_seq_length": max_length, "do_lower_case": lower_case})
    entries = [{"idx": place, "name": str(place), "path": path, "type": kind} for place, (path, kind) in enumerate(modules)]
    write_json(folder / "modules.json", entries)


def _write_projection(folder: Path, projection: Projection, *, pylate: bool) -> None:
    config: dict[str, Any] = {
        "in_features": projection.linear.in_features,
        "out_features": projection.linear.out_features,
        "bias": projection.linear.bias is not None,
        "activation_function": projection.activation,
    }
    if pylate:
        config["use_residual"] = projection.use_residual
    write_json(folder / "config.json", config)
    with replacing(folder / "model.safetensors") as temporary:
        save_file({name: tensor.detach().cpu().contiguous() for name, tensor in projection.state_dict().items()}, temporary)
