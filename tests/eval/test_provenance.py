"""Where a result comes from."""

from __future__ import annotations

import hashlib
import json
import random
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from importlib.metadata import version

import pytest
import torch

from quiver.eval.results import DataChecksum, provenance
from quiver.retrieval.data.corpus import Collection
from quiver.retrieval.records import Document, Query


def data_sha256(collection: Collection) -> str:
    checksum = DataChecksum()
    for document in collection.documents:
        checksum.add_document(document)
    return checksum.hexdigest(collection.queries, collection.qrels)


def test_provenance_describes_this_process() -> None:
    origin = provenance("quiver evaluate")
    assert origin.command == "quiver evaluate"
    assert origin.versions["quiver"] == version("quiver-retrieval")
    assert origin.versions["numpy"] == version("numpy")
    assert origin.threads == torch.get_num_threads()
    assert datetime.now(timezone.utc) - datetime.fromisoformat(origin.date) < timedelta(minutes=1)


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


def test_the_checksum_by_hand_and_in_one_walk() -> None:
    """Written down here once more, because results that are compared have to have it from the same rule."""

    def total(rows: list[str]) -> str:
        return f"{sum(int(hashlib.sha256(row.encode()).hexdigest(), 16) for row in rows) % 2**256:064x}"

    documents = [f'["{each.id}", "{each.text}", "{each.title}"]' for each in DATA.documents]
    queries = [f'["{each.id}", "{each.text}"]' for each in DATA.queries]
    judgements = [f'["{query}", "{document}", {grade}]' for query, grades in DATA.qrels.items() for document, grade in grades.items()]
    sums = [[len(rows), total(rows)] for rows in (documents, queries, judgements)]
    checksum = DataChecksum()
    for document in DATA.documents:
        checksum.add_document(document)
    found = checksum.hexdigest(DATA.queries, DATA.qrels)
    assert found == hashlib.sha256(json.dumps(sums).encode()).hexdigest() == data_sha256(DATA)
    assert checksum.hexdigest(DATA.queries, DATA.qrels) == found  # asking changes nothing
