"""Texts by number: written once to a folder, read back one by one, and known by their content.

What is in memory of a text is its id and some hashes and numbers, about 200 bytes altogether, however long it is. Two texts are *the
same* if they differ in case and white space alone: whoever looks for negatives must not take a copy of the positive for one.

Shapes: P texts of the table, B texts of a call.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from encoder.errors import InputError
from retrieval.indexes import IndexFolder
from retrieval.indexes.texts import Texts
from retrieval.records import Document
from retrieval.text_keys import KEY, Keys, KeyTable, text_keys
from retrieval.training.data.strings import Strings, StringWriter

# Texts whose hashes are looked up together.
_CHUNK = 4096


class TextTable:
    """What `TextTableWriter` wrote.

    Attributes:
        ids: P ids.
        same: For each text the first one that is the same, (P,); a text that is like no other has its own number.
        sha256: Of the ids and texts in their order.
    """

    def __init__(self, writer: TextTableWriter) -> None:
        self.ids: Sequence[str] = writer.ids
        self.sha256 = writer.digest.hexdigest()
        self._index_texts = writer.index_texts
        self._written = Strings(writer.stem)
        identities = np.concatenate([np.empty(0, KEY), *writer.identities])
        self._first = KeyTable()
        self._first.add(identities, np.arange(len(identities)))
        self.same: NDArray[np.int64] = self._first.find(identities)

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


class TextTableWriter:
    """Writes a table; use it in a ``with`` block, and take the ``table`` after its end.

    Args:
        folder: Where the texts go; must exist and hold no table.
        index: Its documents are the first texts of the table. They stay where they are, and are read once for their hashes.

    Raises:
        InputError: The index was built without texts.
    """

    def __init__(self, folder: Path, *, index: IndexFolder | None = None) -> None:
        self.stem = folder / "texts"
        self.ids: list[str] = []
        self.identities: list[Keys] = []
        self.digest = hashlib.sha256()
        self.index_texts = None if index is None else IndexTexts(index)
        self._known = KeyTable()
        self._writer = StringWriter(self.stem)
        if index is not None and self.index_texts is not None:
            stream = zip(index.ids, self.index_texts, strict=True)
            while chunk := list(islice(stream, _CHUNK)):
                self._remember([key for key, _ in chunk], [text for _, text in chunk])

    def __enter__(self) -> TextTableWriter:
        return self

    def __exit__(self, *error: object) -> None:
        self._writer.close()

    def table(self) -> TextTable:
        """The table, once the ``with`` block has ended."""
        return TextTable(self)

    def add(self, documents: Sequence[Document]) -> None:
        """Append documents, each under its own id, whether its text is new or not."""
        for document in documents:
            self._writer.add(document.text.encode("utf-8"))
        self._remember([document.id for document in documents], [document.text for document in documents])

    def number(self, texts: Sequence[str]) -> NDArray[np.int64]:
        """The numbers of B texts, (B,); those that are not in the table are appended, with a hash of the content as their id.

        White space at either end makes no other text.
        """
        keys = _content_keys(texts)
        numbers = self._known.find(keys)
        unknown = np.flatnonzero(numbers < 0)
        _, first, which = np.unique(keys[unknown], return_index=True, return_inverse=True)
        order = np.argsort(first)
        numbers[unknown] = len(self.ids) + np.argsort(order)[which]
        new = unknown[first[order]].tolist()
        self.add([Document(content_id(texts[place]), texts[place]) for place in new])
        return numbers

    def _remember(self, ids: list[str], texts: list[str]) -> None:
        keys = _content_keys(texts)
        self._known.add(keys, np.arange(len(self.ids), len(self.ids) + len(ids)))
        self.identities.append(identity_keys(texts))
        self.ids += ids
        self.digest.update(text_keys(ids).tobytes() + keys.tobytes())


class IndexTexts:
    """The texts of an index as they were encoded, by number.

    Raises:
        InputError: It was built without texts.
    """

    def __init__(self, index: IndexFolder) -> None:
        if not index.manifest.store_text:
            raise InputError(f"{index.path}: built without texts, which training needs; build it with them")
        self._texts = Texts(index.path / index.manifest.generation, len(index))
        self._count = len(index)
        self._use_title = index.manifest.use_title

    def __getitem__(self, number: int) -> str:
        return self._texts[number].content(use_title=self._use_title)

    def __iter__(self) -> Iterator[str]:
        return (self[number] for number in range(self._count))


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
