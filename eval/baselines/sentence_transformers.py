"""Models of sentence-transformers behind our protocols: the library encodes, our harness indexes, searches and scores.

Prompts, roles, lengths and the order of batches are the library's own. Versions 5 and 6 are known; multi-vector models came with 6.

Shapes: B texts, d vector width, n_i token vectors of text i.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from quiver.encoder.errors import InputError
from quiver.encoder.files import expand_home
from quiver.eval.baselines.checkpoint import LOAD_ERRORS, cannot_load, is_late_interaction
from quiver.eval.baselines.fingerprint import peer_fingerprint
from quiver.eval.baselines.token_counts import count_tokens
from quiver.retrieval.records import DenseEncoding, ModelCard, Role, TextTokens, TokenEncoding

LIBRARY: Final = "sentence-transformers"

# Names of the prompt for a role, as encode_query and encode_document look for it.
_PROMPT_NAMES: dict[Role, tuple[str, ...]] = {"query": ("query",), "document": ("document", "passage", "corpus")}


class SentenceTransformersModel:
    """A `quiver.retrieval.protocols.DenseModel` that sentence-transformers runs.

    Args:
        source: Folder or hub id.
        device: Where it runs; by default where the library puts it.

    Raises:
        InputError: The library cannot load it, it is a multi-vector model, or its similarity is neither cosine nor dot product.
    """

    def __init__(self, source: str | Path, *, device: str | None = None) -> None:
        from sentence_transformers import SentenceTransformer

        name = str(expand_home(source))
        if is_late_interaction(name):
            raise InputError(f"{source}: a ColBERT model (one vector a token); load it with the library pylate")
        self._model = _load(SentenceTransformer, name, device)
        similarity = self._model.similarity_fn_name
        if similarity not in ("cosine", "dot"):
            raise InputError(f"{source}: similarity_fn_name must be cosine or dot, got {similarity!r}")
        self._lengths = _lengths(self._model, name)
        self._card = _card(self._model, str(source), "dense", similarity, self._lengths)

    @property
    def card(self) -> ModelCard:
        """What an index or a report has to know of this model."""
        return self._card

    def encode(self, texts: Sequence[str], role: Role, *, progress: bool = False) -> DenseEncoding:
        """Texts to (B, d) float32 in input order, by the library's ``encode_query`` or ``encode_document``.

        Args:
            texts: B texts.
            role: Which prompt applies.
            progress: Show the library's bar.
        """
        tokens = _count(self._model, texts, role, self._lengths[role])
        vectors = _encode(self._model, texts, role, progress) if texts else np.empty((0, self._card.dim))
        return DenseEncoding(np.asarray(vectors, np.float32), tokens)


class MultiVectorModel:
    """A `quiver.retrieval.protocols.TokenModel` that the MultiVectorEncoder of sentence-transformers 6 runs.

    Args:
        source: Folder or hub id, also of a model that PyLate saved.
        device: Where it runs; by default where the library puts it.

    Raises:
        InputError: The installed version has no such models, or it cannot load this one.
    """

    def __init__(self, source: str | Path, *, device: str | None = None) -> None:
        import sentence_transformers

        if not hasattr(sentence_transformers, "MultiVectorEncoder"):
            raise InputError(
                f"{source}: a multi-vector model, and sentence-transformers {sentence_transformers.__version__} has none; "
                "pip install 'sentence-transformers>=6', or load it with the library pylate"
            )
        name = str(expand_home(source))
        self._model = _load(sentence_transformers.MultiVectorEncoder, name, device)
        self._lengths = _lengths(self._model, name)
        # The library's other similarity divides by the tokens of the query, which orders documents the same.
        self._card = _card(self._model, str(source), "colbert", "maxsim", self._lengths)

    @property
    def card(self) -> ModelCard:
        """What an index or a report has to know of this model."""
        return self._card

    def encode(self, texts: Sequence[str], role: Role, *, progress: bool = False) -> TokenEncoding:
        """Texts to B arrays of (n_i, d) float32 in input order, by the library's ``encode_query`` or ``encode_document``.

        Args:
            texts: B texts.
            role: Which prompt, length, expansion and mask apply.
            progress: Show the library's bar.
        """
        tokens = _count(self._model, texts, role, self._lengths[role])
        vectors = _encode(self._model, texts, role, progress) if texts else []
        return TokenEncoding([np.asarray(matrix, np.float32) for matrix in vectors], tokens)


def _load(kind: Any, name: str, device: str | None) -> Any:
    try:
        return kind(name, device=device)
    except LOAD_ERRORS as error:
        raise cannot_load(name, LIBRARY, error) from error


def _card(model: Any, source: str, kind: Any, similarity: Any, lengths: dict[Role, int]) -> ModelCard:
    prompts = {role: _prompt(model, role) for role in _PROMPT_NAMES}
    settings = [similarity, prompts, lengths, model.truncate_dim if kind == "dense" else None]
    return ModelCard(
        source=source,
        kind=kind,
        fingerprint=peer_fingerprint(model, LIBRARY, settings),
        dim=np.asarray(_encode(model, ["width"], "document", False)[0]).shape[-1],
        similarity=similarity,
        query_length=lengths["query"],
        document_length=lengths["document"],
        query_prompt=prompts["query"],
        document_prompt=prompts["document"],
        library=LIBRARY,
    )


def _encode(model: Any, texts: Sequence[str], role: Role, progress: bool) -> Any:
    encode = model.encode_query if role == "query" else model.encode_document
    return encode(list(texts), show_progress_bar=progress, convert_to_numpy=True)


def _count(model: Any, texts: Sequence[str], role: Role, length: int) -> TextTokens:
    # Version 6, where preprocess took the place of tokenize, leaves texts as they are.
    strip, lower_case = not hasattr(model, "preprocess"), bool(getattr(model[0], "do_lower_case", False))
    return count_tokens(model.tokenizer, texts, length, prompt=_prompt(model, role), strip=strip, lower_case=lower_case)


def _prompt(model: Any, role: Role) -> str:
    named = [model.prompts[name] for name in _PROMPT_NAMES[role] if name in model.prompts]
    prompt = named[0] if named else model.prompts.get(model.default_prompt_name)
    return prompt or ""


def _lengths(model: Any, name: str) -> dict[Role, int]:
    """Tokens a text is cut to by its role: version 6 may tell queries from documents, 5 does not."""
    first = model[0]
    expansion = getattr(first, "query_expansion", None) or {}
    common = model.max_seq_length or getattr(model.tokenizer, "model_max_length", None)
    fixed = expansion["length"] if expansion.get("strategy") == "fixed" else None
    own = {"query": fixed or getattr(first, "query_length", None), "document": getattr(first, "document_length", None)}
    lengths: dict[Role, int] = {}
    for role in _PROMPT_NAMES:
        length = own[role] or common
        # Static embeddings read texts of any length; transformers writes 1e30 for "no limit".
        if not isinstance(length, int) or length > 1_000_000_000:
            raise InputError(f"{name}: its {type(first).__name__} module sets no max_seq_length; save the model with one")
        lengths[role] = length
    return lengths
