"""What the parity tests share: encoding SciFact takes minutes, and its vectors are the same for all of them."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def scifact_vectors(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a `quiver.retrieval.data.embedding_store.EmbeddingStore` that lives as long as the tests."""
    return tmp_path_factory.mktemp("scifact-vectors")
