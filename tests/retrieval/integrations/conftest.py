"""Indexes of both kinds over documents with simple vectors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from quiver.retrieval.index import BuildOptions, IndexReader, build_index
from quiver.retrieval.records import Document

DOCUMENTS = [
    Document(
        f"d{number}", f"word{number % 5} word{number % 7} other{number}", "titled" * (number % 2), {"part": number, "odd": number % 2 == 1}
    )
    for number in range(23)
]


@pytest.fixture(params=["dense", "colbert"])
def model(request: pytest.FixtureRequest, word_sum: Any, word_by_word: Any) -> Any:
    return word_sum if request.param == "dense" else word_by_word


@pytest.fixture
def index(tmp_path: Path, model: Any) -> IndexReader:
    return build_index(DOCUMENTS, model, tmp_path / "birds", options=BuildOptions(engine="exact"))
