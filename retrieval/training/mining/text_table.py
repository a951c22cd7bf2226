"""Texts by number, for mining: written once to a folder, read back one by one, and known by id and by content.

Two texts are *the same* if they differ in case and white space alone: whoever looks for negatives must not take a copy of the positive
for one. Texts and ids are on the disk. What is in memory of a text does not depend on its length: 32 bytes of a table, and about 60 at
the most while it is written and sorted (measured with a million texts: 60 MB, 550 MB for the 9 million passages of MS MARCO).

Shapes: P texts of the table, B texts of a call.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from quiver.encoder.errors import InputError
from quiver.retrieval.data.embedding_store import KEY, Keys, KeyTable, text_keys
from quiver.retrieval.index import Index
from quiver.retrieval.records import Document
from quiver.retrieval.training.data.table import BLOCK, TextColumn, TextWriter, blocks


class TextTable:
    """What `TextTableWriter` wrote.

    Attributes:
        ids: P ids.
        same: For each text the first one that is the same, (P,); a text that is like no other has its own number.
        sha256: Of the ids and texts in their order.
    """

    def __init__(self, stem: Path, identities: Keys, sha256: str, *, index_texts: IndexTexts | None) -> None:
        """What a `TextTableWriter` has written; ``identities`` are (P,) keys that the same texts share."""
        self.ids = TextColumn(stem.with_name("ids.arrow"))
        self.sha256 = sha256
        self._index_texts = index_texts
        self._written = TextColumn(stem)
        self._first = KeyTable()
        self._first.add(identities, np.arange(len(identities)))
        self.same: NDArray[np.int64] = np.empty(len(identities), np.int64)
        for start in range(0, len(identities), BLOCK):  # all at once would take as much memory again
            self.same[start : start + BLOCK] = self._first.find(identities[start : start + BLOCK])

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, number: int) -> str:
        of_index = len(self.ids) - len(self._written)
        if self._index_texts is not None and number < of_index:
            return self._index_texts[number]
        return self._written[number - of_index]

    def __iter__(self) -> Iterator[str]:
        return (self[number] for number in range(len(self)))

    def find_same(self, texts: Sequence[str]) -> NDArray[np.int64]:
        """For each of B texts the first one of the table that is the same, (B,); -1 where there is none."""
        return self._first.find(identity_keys(texts))

    def find_ids(self, ids: Sequence[str]) -> NDArray[np.int64]:
        """The number of the text with each of B ids, (B,); -1 where there is none."""
        asked = KeyTable()
        wanted, which = np.unique(text_keys(ids), return_inverse=True)
        asked.add(wanted, np.arange(len(wanted)))
        numbers = np.full(len(wanted), -1, np.int64)
        first = 0
        for block in blocks(self.ids):
            places = asked.find(text_keys(block))
            known = np.flatnonzero(places >= 0)
            numbers[places[known]] = first + known
            first += len(block)
        return numbers[which]


class TextTableWriter:
    """Writes a table; use it in a ``with`` block, and take the ``table`` after its end.

    Args:
        folder: Where the texts go; must exist and hold no table.
        index: Its documents are the first texts of the table. They stay where they are, and are read once for their hashes.
        by_content: Texts are to be found by their content, which `number` does; it takes 24 bytes a text while they are written.

    Raises:
        InputError: The index was built without texts.
    """

    def __init__(self, folder: Path, *, index: Index | None = None, by_content: bool = True) -> None:
        self._stem = folder / "texts.arrow"
        self._index_texts = None if index is None else IndexTexts(index)
        self._texts, self._ids = TextWriter(self._stem), TextWriter(folder / "ids.arrow")
        self._identities = bytearray()
        self._digest = hashlib.sha256()
        self._known = KeyTable() if by_content else None
        if index is not None and self._index_texts is not None:
            for block in blocks(zip(index.ids, self._index_texts, strict=True)):
                self._remember([key for key, _ in block], [text for _, text in block])

    def __len__(self) -> int:
        return len(self._ids)

    def __enter__(self) -> TextTableWriter:
        return self

    def __exit__(self, *error: object) -> None:
        self._texts.close()
        self._ids.close()

    def table(self) -> TextTable:
        """The table, once the ``with`` block has ended; the writer is of no use after that."""
        self._known = None  # its memory is needed now
        identities = np.frombuffer(self._identities, KEY) if self._identities else np.empty(0, KEY)
        return TextTable(self._stem, identities, self._digest.hexdigest(), index_texts=self._index_texts)

    def add(self, documents: Sequence[Document]) -> None:
        """Append documents, each under its own id, whether its text is new or not."""
        for document in documents:
            self._texts.add(document.text.encode("utf-8"))
        self._remember([document.id for document in documents], [document.text for document in documents])

    def number(self, texts: Sequence[str]) -> NDArray[np.int64]:
        """The numbers of B texts, (B,); those that are not in the table are appended, with a hash of the content as their id.

        White space at either end makes no other text.

        Raises:
            ValueError: The table was not made to be asked ``by_content``.
        """
        if self._known is None:
            raise ValueError("texts are numbered in a table that is written by_content")
        keys = _content_keys(texts)
        numbers = self._known.find(keys)
        unknown = np.flatnonzero(numbers < 0)
        _, first, which = np.unique(keys[unknown], return_index=True, return_inverse=True)
        order = np.argsort(first)
        numbers[unknown] = len(self) + np.argsort(order)[which]
        new = unknown[first[order]].tolist()
        self.add([Document(content_id(texts[place]), texts[place]) for place in new])
        return numbers

    def _remember(self, ids: list[str], texts: list[str]) -> None:
        keys = _content_keys(texts)
        if self._known is not None:
            self._known.add(keys, np.arange(len(self), len(self) + len(ids)))
        self._identities += identity_keys(texts).tobytes()
        for key in ids:
            self._ids.add(key.encode("utf-8"))
        self._digest.update(text_keys(ids).tobytes() + keys.tobytes())


class IndexTexts:
    """The texts of an index as they were encoded, by number.

    Raises:
        InputError: It was built without texts.
    """

    def __init__(self, index: Index) -> None:
        if not index.manifest.policy.store_text:
            raise InputError(f"{index.path}: built without texts, which training needs; build it with them")
        self._documents = index.documents
        self._use_title = index.manifest.policy.use_title

    def __getitem__(self, number: int) -> str:
        return self._documents[number].content(use_title=self._use_title)

    def __iter__(self) -> Iterator[str]:
        return (document.content(use_title=self._use_title) for document in self._documents)


def identity_keys(texts: Sequence[str]) -> Keys:
    """Keys that the same texts share: of the content without case, and with one space for all white space."""
    return text_keys([" ".join(text.split()).casefold() for text in texts])


def content_id(text: str) -> str:
    r"""The id of a text that has none: 16 hexadecimal digits of its sha256, the same wherever the text is found.

    Example:
        >>> content_id("a bird") == content_id(" a bird\n")
        True
    """
    return hashlib.sha256(text.strip().encode("utf-8", "surrogatepass")).hexdigest()[:16]


def _content_keys(texts: Sequence[str]) -> Keys:
    return text_keys([text.strip() for text in texts])
