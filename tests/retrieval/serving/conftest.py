"""Indexes of small models, a service in this process, and services in processes of their own."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, NamedTuple

import pytest
import torch

from quiver.encoder import Encoder, EncoderConfig, Tokenizer, init_weights
from quiver.retrieval.index import BuildOptions, build_index
from quiver.retrieval.models.batches import Projection
from quiver.retrieval.models.biencoder import BiEncoder
from quiver.retrieval.models.colbert import ColBERT
from quiver.retrieval.models.options import ColBERTSettings, ModelFolder
from quiver.retrieval.records import Document
from tests.processes import imported_python

httpx = pytest.importorskip("httpx")
pytest.importorskip("fastapi")
REPOSITORY = Path(__file__).resolve().parents[3]
TOKEN = "a token of enough characters"
WORDS = ["sea", "bird", "wing", "river", "stone", "granite", "deep", "wide", "fly", "swim", "salt", "light", "night", "forest", "snow"]


class Indexes(NamedTuple):
    dense: Path
    colbert: Path
    silent: Path
    """Index of a bi-encoder, built without texts."""


def documents() -> list[Document]:
    """Sixty documents of five words each, with metadata."""
    found = []
    for number in range(60):
        words = [WORDS[(number * step + step) % len(WORDS)] for step in (1, 2, 3, 5, 7)]
        metadata = {"year": 2000 + number % 10, "lang": "en" if number % 2 else "de", "even": number % 2 == 0}
        found.append(Document(f"d/{number}", " ".join(words), f"On {words[0]}", metadata))
    return found


@pytest.fixture(scope="session")
def indexes(tmp_path_factory: pytest.TempPathFactory) -> Indexes:
    folder = tmp_path_factory.mktemp("served")
    texts = documents()
    tokenizer = Tokenizer.train([document.content() for document in texts] * 2, vocab_size=320)
    for prefix in ("[Q] ", "[D] "):
        tokenizer.add_token(prefix)
    config = EncoderConfig.modernbert(
        vocab_size=384, hidden_size=32, num_heads=2, intermediate_size=48, layer_types=["global"], max_positions=64
    )
    torch.manual_seed(5)
    encoder = init_weights(Encoder(config), seed=5)
    BiEncoder.from_parts(encoder, tokenizer, ModelFolder("dense", Path())).save_pretrained(folder / "bi-encoder")
    settings = ModelFolder(
        "colbert",
        Path(),
        projections=(Projection(32, 16),),
        similarity="maxsim",
        colbert=ColBERTSettings(query_length=24, document_length=60),
    )
    ColBERT.from_parts(encoder, tokenizer, settings).save_pretrained(folder / "colbert-model")
    dense, colbert = BiEncoder(folder / "bi-encoder"), ColBERT(folder / "colbert-model")
    build_index(texts, dense, folder / "dense")
    build_index(texts, colbert, folder / "colbert")
    build_index(texts, dense, folder / "silent", options=BuildOptions(store_text=False))
    return Indexes(folder / "dense", folder / "colbert", folder / "silent")


def answer(app: Any, method: str, path: str, **options: Any) -> Any:
    """Send a request to an application in this process, and return the response."""

    async def ask() -> Any:
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://service") as client:
            return await client.request(method, path, **options)

    return asyncio.run(ask())


class Child(NamedTuple):
    """A service in a process of its own."""

    url: str
    process: subprocess.Popen[str]

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    def stop(self) -> int:
        """Ask the service to stop, and return its exit status."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(60)


@contextmanager
def started(command: list[str], *, stderr: IO[str] | None = None) -> Iterator[Child]:
    """Start a process that prints its address in JSON when it listens."""
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    words = [imported_python(), *command]
    process = subprocess.Popen(words, cwd=REPOSITORY, env=environment, stdout=subprocess.PIPE, stderr=stderr, text=True)
    try:
        assert process.stdout is not None
        said = ""
        for line in process.stdout:
            said += line
            if line.startswith("}"):
                break
        assert said.strip(), "the service did not start; see standard error"
        yield Child(json.loads(said)["url"], process)
    finally:
        process.kill()
        process.wait()


@pytest.fixture(scope="session")
def serving() -> Callable[..., Any]:
    """``with serving(index, "--fuse", "bm25") as child``: `quiver serve` on a free port."""

    def start(*arguments: object) -> Any:
        return started(["-m", "quiver.cli.main", "serve", *map(str, arguments), "--port", "0", "--json", "--no-verify"])

    return start


@pytest.fixture(scope="session")
def held_serving() -> Callable[..., Any]:
    """``with held_serving(index, file, **limits) as child``: a service whose model waits until the file exists."""

    def start(index: Path, file: Path, **limits: object) -> Any:
        return started([str(Path(__file__).with_name("held_service.py")), str(index), str(file), json.dumps(limits)])

    return start
