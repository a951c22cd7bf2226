"""Limits on open files: 256 on macOS, 1,024 on most Linux systems. Every test has such a limit."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from quiver.encoder.errors import InputError
from quiver.retrieval.index import (
    BuildOptions,
    DamagedIndexError,
    add_documents,
    build_index,
    check_index,
    compact_index,
    delete_documents,
    open_index,
)
from quiver.retrieval.index.pieces import PieceSizes
from quiver.retrieval.records import Document

resource = pytest.importorskip("resource")
if not Path("/proc/self/fd").is_dir():
    pytest.skip("needs /proc", allow_module_level=True)


@pytest.fixture(autouse=True)
def few_files() -> Iterator[None]:
    """This process may open a hundred more files than it has open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 100, hard))  # noqa: PTH208
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def documents(count: int, prefix: str = "d") -> list[Document]:
    return [Document(f"{prefix}{number}", f"{number:x}") for number in range(count)]


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["pq-dense", "ivf-tokens"])
def test_a_build_of_many_pieces_needs_few_open_files(engine: str, word_model: Callable[[str], Any], tmp_path: Path) -> None:
    options = BuildOptions(engine=engine, calibrate=False, pieces=PieceSizes(chunk_documents=16, documents=16))
    index = build_index(documents(4000), word_model(engine), tmp_path / "index", options=options)  # in 250 pieces
    assert (len(index), index.ids[3999], len(index.manifest.segments)) == (4000, "d3999", 1)


@pytest.mark.parametrize("engine", ["exact-dense", "exact-tokens"])
def test_an_index_of_many_segments_is_opened_changed_and_compacted_with_few_open_files(
    engine: str, word_model: Callable[[str], Any], tmp_path: Path
) -> None:
    path, model = tmp_path / "index", word_model(engine)
    index = build_index(documents(6000), model, path, options=BuildOptions(engine=engine, memory=1 << 18))
    assert len(index.manifest.segments) > 10  # a dozen files each
    query = model.encode_texts(["7f"], "query").vectors
    wanted = index.search(query, 1)
    add_documents(path, documents(3, "new"), model)
    delete_documents(path, ["new0", "new1", "new2"])
    index = compact_index(path)
    assert (len(index), len(index.manifest.segments), index.search(query, 1).ids) == (6000, 1, wanted.ids)
    assert not check_index(path).problems


def test_too_many_open_files_are_no_damage(word_sum: Any, tmp_path: Path) -> None:
    build_index(documents(200), word_sum, tmp_path / "index")
    outcomes = []
    for left in range(4):
        for action in (open_index, check_index):
            held: list[Any] = []
            with suppress(OSError):
                while True:
                    held.append(open(os.devnull))  # noqa: PTH123, SIM115
            for file in held[:left]:
                file.close()
            try:
                action(tmp_path / "index")
                outcomes.append("opened")
            except InputError as error:
                outcomes.append("refused")
                assert "ulimit -n" in str(error)  # noqa: PT017
                assert not isinstance(error, DamagedIndexError)  # noqa: PT017
            finally:
                for file in held:
                    file.close()
    assert outcomes.count("opened") >= 2  # one file at a time is enough
    assert outcomes.count("refused") >= 2
