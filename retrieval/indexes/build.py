"""From documents and a model to an index, in memory or on disk.

Texts are streamed: one chunk of them is held at a time, however large the corpus. The vectors are held until they are indexed.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from typing import TypeAlias

import faiss
import numpy as np
import torch

from encoder.errors import InputError
from retrieval.corpus import read_documents
from retrieval.indexes.exact_colbert import ExactColBERTIndex
from retrieval.indexes.exact_dense import ExactDenseIndex
from retrieval.indexes.folder import ExactIndex, IndexFolder, open_index
from retrieval.indexes.store import Description, commit, staging
from retrieval.indexes.texts import TextWriter
from retrieval.protocols import DenseModel, TokenModel
from retrieval.records import DenseEncoding, Document, ModelCard, TokenCounts, TokenEncoding
from retrieval.similarity import comparable

logger = logging.getLogger(__name__)

Model: TypeAlias = DenseModel | TokenModel
"""A model of either kind; ``model.card.kind`` says which."""

# Documents encoded in one call: enough for batches of like lengths, few enough to hold.
_CHUNK = 10_000


@dataclass(frozen=True)
class BuiltIndex:
    """An index in memory and what tokenising did to its documents."""

    index: ExactIndex
    counts: TokenCounts


def build_in_memory(model: Model, documents: Iterable[Document], *, use_title: bool = True, progress: bool = False) -> BuiltIndex:
    """Encode documents and index them exactly.

    Args:
        model: Its kind decides which index it is.
        documents: At least one; consumed in chunks.
        use_title: Whether titles are put before the texts.
        progress: Show the model's progress.

    Raises:
        InputError: No documents, an id twice, or a document whose vector is not finite.
    """
    return _build(model, documents, texts=None, use_title=use_title, progress=progress)


def build_index(
    corpus: str | Path | Iterable[Document],
    model: Model,
    out: Path,
    *,
    use_title: bool = True,
    store_text: bool = True,
    overwrite: bool = False,
    progress: bool = False,
) -> IndexFolder:
    """Encode a corpus into a new index folder and open it.

    A corpus on disk is read once from end to end before anything is encoded, so that a bad line does not show up after hours.

    Args:
        corpus: A ``.jsonl[.gz]`` file, a folder with ``corpus.jsonl[.gz]``, or documents.
        model: Its kind decides which index it is.
        out: The folder to write; it appears when the index is complete.
        use_title: Whether titles are put before the texts.
        store_text: Whether the texts are kept in the index, so that hits can be shown.
        overwrite: Replace an index that is at ``out``.
        progress: Show the model's progress.

    Raises:
        InputError: A malformed corpus (file:line), no documents, an id twice, a vector that is not finite, or ``out`` is taken.
    """
    with staging(out, overwrite=overwrite) as place:
        documents = _checked(Path(corpus)) if isinstance(corpus, str | Path) else corpus
        with TextWriter(place.data) if store_text else nullcontext() as texts:
            built = _build(model, documents, texts=texts, use_title=use_title, progress=progress)
        holds = built.index.save(place.data)
        if texts is not None:
            holds |= texts.holds
        description = Description(
            kind=built.index.kind,
            count=len(built.index),
            created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
            versions=_versions(),
            model=_anchored(model.card),
            use_title=use_title,
            separator=" ",
            store_text=store_text,
            tokens=built.counts,
        )
        commit(place, description, holds)
    return open_index(out, verify=False)  # every byte was hashed a moment ago


def _checked(corpus: Path) -> Iterable[Document]:
    logger.info("%s: %d documents", corpus, sum(1 for _ in read_documents(corpus)))
    return read_documents(corpus)


def _build(model: Model, documents: Iterable[Document], *, texts: TextWriter | None, use_title: bool, progress: bool) -> BuiltIndex:
    ids: list[str] = []
    encodings: list[DenseEncoding | TokenEncoding] = []
    stream = iter(documents)
    while chunk := list(islice(stream, _CHUNK)):
        encodings.append(model.encode([document.content(use_title=use_title) for document in chunk], "document", progress=progress))
        for document in chunk:
            ids.append(document.id)
            if texts is not None:
                texts.add(document)
        logger.info("%d documents encoded", len(ids))
    if not ids:
        raise InputError("there are no documents to index")
    index = _index(model.card, ids, encodings)
    if index.dim != model.card.dim:
        raise ValueError(f"{model.card.source} gave vectors of width {index.dim}, its card says {model.card.dim}")
    return BuiltIndex(index, _total([encoding.counts for encoding in encodings]))


def _index(card: ModelCard, ids: Sequence[str], encodings: Sequence[DenseEncoding | TokenEncoding]) -> ExactIndex:
    if card.kind == "dense":
        vectors = np.concatenate([part.vectors for part in encodings if isinstance(part, DenseEncoding)])
        return ExactDenseIndex.from_vectors(ids, comparable(vectors, card))
    tokens = [matrix for part in encodings if isinstance(part, TokenEncoding) for matrix in part.vectors]
    return ExactColBERTIndex.from_vectors(ids, tokens)


def _anchored(card: ModelCard) -> ModelCard:
    """The card with a folder's path made absolute: an index is searched from anywhere."""
    source = Path(card.source)
    return replace(card, source=str(source.resolve())) if card.source and source.is_dir() else card


def _total(counts: Sequence[TokenCounts]) -> TokenCounts:
    return TokenCounts(
        texts=sum(part.texts for part in counts),
        tokens=sum(part.tokens for part in counts),
        truncated=sum(part.truncated for part in counts),
        empty=sum(part.empty for part in counts),
    )


def _versions() -> dict[str, str]:
    return {
        "quiver": version("quiver-retrieval"),
        "torch": str(torch.__version__),
        "faiss": faiss.__version__,
        "numpy": np.__version__,
    }
