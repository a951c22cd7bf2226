"""Indexes of both kinds over real texts, and over documents with simple vectors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from quiver.retrieval.index import BuildOptions, Index, build_index
from quiver.retrieval.models.colbert import ColBERT
from quiver.retrieval.models.loading import ColBERTSettings, ModelFolder, load_parts
from quiver.retrieval.models.pooling import Projection
from quiver.retrieval.records import Document

DOCUMENTS = [
    Document(
        f"d{number}",
        f"word{number % 5} word{number % 7} other{number}",
        "titled" * (number % 2),
        {"part": number, "odd": number % 2 == 1},
    )
    for number in range(23)
]


@pytest.fixture(params=["dense", "colbert"])
def model(request: pytest.FixtureRequest, word_sum: Any, word_by_word: Any) -> Any:
    return word_sum if request.param == "dense" else word_by_word


@pytest.fixture
def index(tmp_path: Path, model: Any) -> Index:
    return build_index(DOCUMENTS, model, tmp_path / "birds", options=BuildOptions(engine="exact"))


@pytest.fixture(scope="session")
def colbert_minilm(minilm: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """ColBERT model of width 64 on the encoder of all-MiniLM-L6-v2, with a random projection."""
    parts = load_parts(minilm)
    torch.manual_seed(11)
    settings = ModelFolder("colbert", minilm, projections=(Projection(384, 64),), similarity="maxsim",
                           colbert=ColBERTSettings(query_prefix="", document_prefix="", document_length=128))  # fmt: skip
    folder = tmp_path_factory.mktemp("colbert") / "model"
    ColBERT.from_parts(parts.encoder, parts.tokenizer, settings).save_pretrained(folder)
    return folder
