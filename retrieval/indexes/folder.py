"""An index on disk, opened: its vectors, its manifest, its texts, and the check that the model at hand is the one it was built with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, TypeAlias

from encoder.errors import InputError
from retrieval.indexes.exact_colbert import ExactColBERTIndex
from retrieval.indexes.exact_dense import ExactDenseIndex
from retrieval.indexes.store import Manifest, open_folder
from retrieval.indexes.texts import Texts
from retrieval.records import Hits, ModelCard

ExactIndex: TypeAlias = ExactDenseIndex | ExactColBERTIndex
"""An exact index of either kind."""

_KINDS: dict[str, Callable[[Path], ExactIndex]] = {
    ExactDenseIndex.kind: ExactDenseIndex.open,
    ExactColBERTIndex.kind: ExactColBERTIndex.open,
}


class IndexFolder:
    """What ``open_index`` gives.

    Attributes:
        path: The folder.
        manifest: What the index is and holds.
        index: The vectors; wants (Q, d) queries if it is dense, a list of (n_i, d) if it is ColBERT.
    """

    def __init__(self, path: Path, manifest: Manifest, index: ExactIndex, texts: Texts | None) -> None:
        self.path = path
        self.manifest = manifest
        self.index = index
        self._texts = texts

    @property
    def ids(self) -> Sequence[str]:
        """Document ids in the order they were added."""
        return self.index.ids

    def __len__(self) -> int:
        return len(self.index)

    def search(self, queries: Any, k: int) -> Hits:
        """The k best documents of each query vector; see the index's own ``search``."""
        return self.index.search(queries, k)

    def text_of(self, document: str) -> str:
        """The text of a document as it was encoded, with its title if titles were used.

        Raises:
            InputError: No such document, or the index was built without texts.
        """
        if self._texts is None:
            raise InputError(f"{self.path}: built without texts; build it with them to show documents")
        row = self._rows.get(document)
        if row is None:
            raise InputError(f"{self.path}: no document '{document}' in this index")
        return self._texts[row].content(use_title=self.manifest.use_title)

    def check_model(self, card: ModelCard) -> None:
        """Refuse a model that would put queries elsewhere than the documents are.

        Raises:
            InputError: The fingerprint is not that of the model which built the index; names both.
        """
        built = self.manifest.model
        if card.fingerprint != built.fingerprint:
            raise InputError(
                f"{self.path}: built with {built.source} ({built.fingerprint[:12]}), but the model given is {card.source} "
                f"({card.fingerprint[:12]}); search with the model that built it, or build it again"
            )

    @cached_property
    def _rows(self) -> dict[str, int]:
        return {key: row for row, key in enumerate(self.ids)}


def open_index(path: Path, *, verify: bool = True) -> IndexFolder:
    """Open an index for searching; its vectors and texts stay in their files.

    Args:
        path: The folder ``build_index`` wrote.
        verify: Compare every file with its sha256 first, which reads them once; otherwise sizes alone.

    Raises:
        InputError: Not an index, another format version, an unknown kind, or a damaged file (named).
    """
    manifest, folder = open_folder(path, verify=verify)
    reader = _KINDS.get(manifest.kind)
    if reader is None:
        raise InputError(f"{path}: an index of kind '{manifest.kind}'; this Quiver knows {', '.join(sorted(_KINDS))}")
    index = reader(folder)
    if len(index) != manifest.count:
        raise InputError(f"{path}: {len(index)} documents where the manifest has {manifest.count}; build the index again")
    return IndexFolder(path, manifest, index, Texts(folder, len(index)) if manifest.store_text else None)
