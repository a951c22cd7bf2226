"""BM25 over the documents of an open index: the same documents, deletions and filters as its vectors, searched by their words.

Shapes: Q queries, D documents of a block, k hits.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from quiver.encoder.errors import InputError
from quiver.retrieval.index import Index
from quiver.retrieval.index.documents.metadata import FilterLike
from quiver.retrieval.index.engines import Bitmap
from quiver.retrieval.index.errors import LostTextError
from quiver.retrieval.index.ranking import check_k
from quiver.retrieval.index.segments import OpenSegment
from quiver.retrieval.progress import progress_bar
from quiver.retrieval.records import Hits
from quiver.retrieval.search.bm25.scoring import Best, Scored, score_postings, split_words, total_statistics
from quiver.retrieval.search.bm25.tables import WordTable, word_tables

logger = logging.getLogger(__name__)

# The stored texts, as their segment's manifest entry calls them.
_TEXTS = "documents.jsonl"


class WordScore(NamedTuple):
    """What one word of a query adds to the score of a document; 0 where the document does not have it."""

    word: str
    score: float


@dataclass(frozen=True)
class _Block:
    """Some successive documents of a segment.

    Attributes:
        segment: The segment.
        number: Its number in the index.
        first: Row of the first document.
        table: Their words.
    """

    segment: OpenSegment
    number: int
    first: int
    table: WordTable

    @property
    def rows(self) -> slice:
        """The rows of the segment."""
        return slice(self.first, self.first + len(self.table.postings.lengths))

    @property
    def alive(self) -> Bitmap | None:
        """Which of the documents are not deleted, (D,); None for all of them."""
        return None if self.segment.alive is None else self.segment.alive[self.rows]

    def named(self, documents: NDArray[np.intp]) -> list[str]:
        """The ids of some documents by number."""
        return self.segment.documents.ids.strings.take(documents + self.first)


class WordIndex:
    """The documents of an open index by their words.

    It follows the index that it is made of: that one's committed state, without its deleted documents. Word frequencies are those of the
    living documents, whatever the filter.

    Args:
        index: Built with texts.
        cache: Folder that keeps what is counted, see `quiver.retrieval.search.bm25.tables`; None keeps it in memory.
        verify: Compare the checksums of what was kept before.
        progress: Show a bar over the documents whose words are counted.

    Raises:
        InputError: The index was built without texts, bm25s is not installed, or the folder cannot be written.
    """

    def __init__(self, index: Index, *, cache: Path | None = None, verify: bool = True, progress: bool = False) -> None:
        policy = index.manifest.policy
        if not policy.store_text:
            raise InputError(f"{index.path}: built without texts; BM25 needs them, build it with texts")
        self.index = index
        self._blocks: list[_Block] = []
        for number, (segment, entry) in enumerate(zip(index.segments, index.manifest.segments, strict=True)):
            # What is counted depends on the stored texts, and on whether titles are a part of them.
            checksum = f"{entry.files[_TEXTS].sha256} {policy.use_title} {policy.separator!r}"
            texts = _contents(segment, use_title=policy.use_title, progress=progress)
            first = 0
            for table in word_tables(texts, texts_sha256=checksum, cache=cache, verify=verify):
                self._blocks.append(_Block(segment, number, first, table))
                first += len(table.postings.lengths)

    def __len__(self) -> int:
        return len(self.index)

    def search(self, queries: Sequence[str], k: int, *, filter: FilterLike = None) -> Hits:
        """The k best documents of each query that share a word with it; ties go to the greater id.

        Args:
            queries: Q texts.
            k: Hits a query.
            filter: Which documents may be found; see `quiver.retrieval.index.index.Index.search`.

        Raises:
            InputError: The filter is malformed or names a field that no document has.
            ValueError: k < 1.
        """
        k = check_k(k)
        chosen = self.index.check_filter(filter)
        words = split_words(queries)
        scored = self._scored(words.vocabulary)
        bitmaps = [segment.alive for segment in self.index.segments] if chosen is None else self.index.matching(chosen)
        best = [Best(k) for _ in queries]
        for block, postings in zip(self._blocks, scored, strict=True):
            allowed = bitmaps[block.number]
            for found, query in zip(best, words.texts, strict=True):
                totals = postings.totals(query)
                found.add(totals if allowed is None else np.where(allowed[block.rows], totals, 0), block.named)
        return Hits([found.ids for found in best], [found.scores for found in best])

    def word_scores(self, query: str, document: str) -> list[WordScore]:
        """What each word of a query adds to the score of a document, in the order of the query; they add up to its score.

        Raises:
            InputError: There is no such document.
        """
        place = self.index.locate([document])[0]
        if place is None:
            raise InputError(f"{self.index.path}: no document '{document}' in this index")
        words = split_words([query])
        names = list(words.vocabulary)
        for block, postings in zip(self._blocks, self._scored(words.vocabulary), strict=True):
            if block.number == place.segment and block.rows.start <= place.row < block.rows.stop:
                row = place.row - block.first
                return [WordScore(names[word], float(postings.totals([word])[row])) for word in words.texts[0]]
        return []

    def _scored(self, vocabulary: Mapping[str, int]) -> list[Scored]:
        """The postings of some words in all blocks, scored by the frequencies among the living documents."""
        found = [block.table.select(vocabulary) for block in self._blocks]
        alive = (block.alive for block in self._blocks)
        statistics = total_statistics(zip(found, alive, strict=True), len(vocabulary))
        return [score_postings(postings, statistics) for postings in found]


def _contents(segment: OpenSegment, *, use_title: bool, progress: bool) -> Iterator[str]:
    """The texts of all documents of a segment, deleted ones included, as they were encoded."""
    texts = segment.documents.texts
    if texts is None:
        raise ValueError("this segment was opened without its texts")
    with progress_bar("words", len(segment.documents), enabled=progress) as advance:
        for row in range(len(segment.documents)):
            try:
                yield texts[row].content(use_title=use_title)
            except LostTextError as error:  # a repair has said so; a document without words is never found by them
                logger.warning("%s", error)
                yield ""
            advance(1)
