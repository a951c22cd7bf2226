"""Where a result comes from."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from quiver.eval.results import DataChecksum
from quiver.retrieval.data.corpus import Collection
from quiver.retrieval.records import Document, Query


def data_sha256(collection: Collection) -> str:
    checksum = DataChecksum()
    for document in collection.documents:
        checksum.add_document(document)
    return checksum.hexdigest(collection.queries, collection.qrels)


DATA = Collection(
    "c",
    "test",
    [Document(f"d{place}", f"text {place}", "title" * (place % 2)) for place in range(20)],
    [Query(f"q{place}", f"query {place}") for place in range(5)],
    {f"q{place}": {f"d{place}": 1, f"d{place + 1}": 2} for place in range(5)},
    0,
)


def test_the_checksum_does_not_see_the_order() -> None:
    """The rows of a collection are in one order in its archive and in another on the hub."""
    documents, queries = list(DATA.documents), list(DATA.queries)
    random.Random(1).shuffle(documents)
    qrels = {query: dict(reversed(grades.items())) for query, grades in reversed(DATA.qrels.items())}
    shuffled = Collection("other", "test", documents, queries[::-1], qrels, 0)
    assert documents != DATA.documents
    assert data_sha256(shuffled) == data_sha256(DATA)


@pytest.mark.parametrize(
    "other",
    [
        replace(DATA, documents=[*DATA.documents, Document("d0", "text 0")]),  # a row that comes twice is not the row once
        replace(DATA, documents=[*DATA.documents, Document("d0", "text 0"), Document("d0", "text 0")]),
        replace(DATA, documents=[Document("d0", "", "text 0"), *list(DATA.documents)[1:]]),  # a text is no title
        replace(DATA, documents=[Document("d0", "text 1", "title"), Document("d1", "text 0"), *list(DATA.documents)[2:]]),
        replace(DATA, queries=DATA.queries[1:]),
        replace(DATA, documents=[], queries=[Query(*document[:2]) for document in DATA.documents]),
        replace(DATA, qrels={**DATA.qrels, "q0": {"d0": 2, "d1": 1}}),
        replace(DATA, qrels={**DATA.qrels, "q0": DATA.qrels["q1"], "q1": DATA.qrels["q0"]}),
    ],
    ids=["twice", "thrice", "title", "texts changed places", "query", "documents as queries", "grades", "judgements changed places"],
)
def test_the_checksum_sees_every_other_change(other: Collection) -> None:
    assert data_sha256(other) != data_sha256(DATA)
