"""Switching to a new generation: the old one is closed, and a damaged one is not used."""

from __future__ import annotations

import asyncio
import shutil
import weakref
from pathlib import Path

import pytest

from quiver.retrieval.index import add_documents
from quiver.retrieval.records import Document
from quiver.retrieval.serving.service import Combinations, Service, open_service
from tests.retrieval.serving.conftest import Indexes


@pytest.fixture
def service(indexes: Indexes, tmp_path: Path) -> Service:
    shutil.copytree(indexes.colbert, tmp_path / "index")
    return open_service({"index": tmp_path / "index"}, combined=Combinations(words=True))


def add(service: Service, key: str) -> None:
    (served,) = service.indexes
    add_documents(served.folder, [Document(key, "obsidian")], served.current.model)


def test_the_old_generation_is_released(service: Service) -> None:
    (served,) = service.indexes
    old = weakref.ref(served.current.index)
    segments = [weakref.ref(segment) for segment in served.current.index.segments]
    add(service, "new")
    held = served.current  # as a request does that has begun
    assert asyncio.run(served.refresh()).number == 2
    assert old() is held.index
    del held
    assert old() is None
    assert [segment() for segment in segments] == [None]
    assert len(served.current.index) == 61
    assert b'quiver_reloads_total{outcome="done",retriever="bm25"} 1.0' in service.metrics.text()


def test_a_damaged_generation_is_not_served(service: Service, caplog: pytest.LogCaptureFixture) -> None:
    (served,) = service.indexes
    add(service, "new")
    newest = served.folder / "manifests" / "m-000000000002.json"
    content = newest.read_bytes()
    newest.write_bytes(content[:-20])

    async def watch() -> None:
        watching = asyncio.create_task(served.watch(0.02))
        await asyncio.sleep(0.5)
        assert served.current.number == 1
        assert caplog.text.count("generation 1 stays in use") == 1
        newest.write_bytes(content)
        while served.current.number == 1:
            await asyncio.sleep(0.02)
        watching.cancel()

    asyncio.run(asyncio.wait_for(watch(), 120))
    assert b'quiver_reloads_total{outcome="failed",retriever="index"} 1.0' in service.metrics.text()
