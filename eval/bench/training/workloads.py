"""The rows of the training benchmark: made-up texts of given lengths, or those of a collection.

A made-up text has exactly as many tokens as were drawn for it, by the tokenizer of the model that is trained. Lengths are uniform:
for lengths between the same bounds that padding loses little on. MS MARCO's own passages are mostly short (55.98 words on average,
BEIR, arXiv:2104.08663, Table 1), and padding loses more on them.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from quiver.encoder.errors import InputError
from quiver.encoder.tokenizer import Tokenizer
from quiver.retrieval.data.corpus import load_collection

Row = dict[str, Any]
"""``query``, ``document_1``, ..., and ``scores`` where a teacher is asked for."""

Texts = tuple[str, list[str]]
"""A query and its documents."""

Source = Callable[["TrainingWorkload", Tokenizer, random.Random], Iterator[Texts]]
"""Gives rows without end, or as many as there are."""

ENGLISH = (
    "time year people way day man thing woman life child world school state family student group country problem hand part place case "
    "week company system program question work government number night point home water room mother area money story fact month lot "
    "right study book eye job word business issue side kind head house service friend father power hour game line end member law car "
    "city community name president team minute idea body information back parent face others level office door health person art war "
    "history party result change morning reason research girl guy moment air teacher force education"
)
"""Words of made-up texts."""

FEWEST_WORDS = 50
"""So many of `ENGLISH` must be single tokens for a made-up text to be one of words."""


@dataclass(frozen=True)
class TrainingWorkload:
    """What a batch is made of.

    Attributes:
        name: On the command line and in tables.
        queries: Tokens of a query, the least and the most, special tokens included.
        documents: Likewise of a document.
        max_length: Tokens that a text of a collection is cut to.
        per_row: Documents of a row, the positive among them.
        rows: Rows of a batch.
    """

    name: str
    queries: tuple[int, int]
    documents: tuple[int, int]
    max_length: int
    per_row: int
    rows: int


WORKLOADS: Mapping[str, TrainingWorkload] = {
    # Triplets as in the paper's recipe; a document may be as long as PyLate's default for a ColBERT.
    "msmarco": TrainingWorkload("msmarco", queries=(8, 20), documents=(20, 180), max_length=180, per_row=2, rows=32),
    "long": TrainingWorkload("long", queries=(8, 20), documents=(1_600, 2_048), max_length=2_048, per_row=1, rows=4),
}
"""Name -> workload."""


def synthetic_source(workload: TrainingWorkload, tokenizer: Tokenizer, generator: random.Random) -> Iterator[Texts]:
    """Rows of made-up texts of uniform lengths.

    Raises:
        InputError: The tokenizer knows too few of the words.
    """
    write = _writer(tokenizer, generator)
    while True:
        documents = [write(generator.randint(*workload.documents)) for _ in range(workload.per_row)]
        yield write(generator.randint(*workload.queries)), documents


def _writer(tokenizer: Tokenizer, generator: random.Random) -> Callable[[int], str]:
    """A function that makes a text of so many tokens, at least those of a single word."""
    first, *others = ENGLISH.split()
    alone, *pairs = tokenizer.encode([first, *(f"{first} {word}" for word in others)], max_length=64).ids
    single = [word for word, ids in zip(others, pairs, strict=True) if len(ids) == len(alone) + 1]
    if len(single) < FEWEST_WORDS:
        raise InputError(f"the model's tokenizer has only {len(single)} common English words as single tokens; give texts with --data")

    def write(tokens: int) -> str:
        return " ".join([first, *generator.choices(single, k=max(0, tokens - len(alone)))])

    return write


def texts_of_collection(folder: Path, split: str) -> Source:
    """Rows of a collection's queries with a document each that is relevant, and others drawn from the corpus.

    Texts are as long as they are; the tokenizers cut them.

    Args:
        folder: A BEIR folder.
        split: Which judgements.

    Raises:
        InputError: The folder is none, has no such split, or no query with a relevant document.
    """
    collection = load_collection(folder, split)
    relevant = {query: [document for document, grade in judged.items() if grade > 0] for query, judged in collection.qrels.items()}
    queries = [query for query in collection.queries if relevant[query.id]]
    if not queries:
        raise InputError(f"{folder}: no query of split {split!r} has a relevant document")

    def rows(workload: TrainingWorkload, tokenizer: Tokenizer, generator: random.Random) -> Iterator[Texts]:
        del tokenizer
        contents = {document.id: document.content() for document in collection.documents}
        everything = list(contents)
        for query in generator.sample(queries, len(queries)):
            drawn = generator.sample(everything, min(len(everything), workload.per_row + len(relevant[query.id])))
            others = [document for document in drawn if document not in relevant[query.id]]
            chosen = [generator.choice(relevant[query.id]), *others][: workload.per_row]
            yield query.text, [contents[document] for document in chosen]

    return rows


def batches(
    workload: TrainingWorkload, source: Source, tokenizer: Tokenizer, *, count: int, size: int, scored: bool, seed: int
) -> list[list[Row]]:
    """The batches of a benchmark.

    Args:
        workload: What they are made of.
        source: Where the texts come from.
        tokenizer: The model's.
        count: Batches.
        size: Rows of each.
        scored: With a made-up score of a teacher for every document.
        seed: Equal seeds give equal batches.

    Raises:
        InputError: The source has too few rows, or too few documents for one.
    """
    generator = random.Random(seed)
    found = list(islice(source(workload, tokenizer, generator), count * size))
    if len(found) < count * size:
        raise InputError(
            f"{workload.name}: {count} batches of {size} need {count * size} queries, there are {len(found)}; give fewer rounds"
        )
    rows = []
    for query, documents in found:
        if len(documents) < workload.per_row:
            raise InputError(f"{workload.name}: a row needs {workload.per_row} documents, the corpus has too few")
        row: Row = {"query": query} | {f"document_{place}": text for place, text in enumerate(documents, start=1)}
        rows.append(row | ({"scores": [generator.uniform(-3, 9) for _ in documents]} if scored else {}))
    return [rows[start : start + size] for start in range(0, len(rows), size)]
