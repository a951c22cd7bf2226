"""One tiny collection in every published layout, and a server that provides it like a web site and the Hub."""

from __future__ import annotations

import gzip
import hashlib
import importlib
import io
import json
import threading
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

Row = Mapping[str, Any]

CORPUS: Sequence[Row] = (
    {"_id": "d1", "title": "Wings", "text": "a bird has two wings"},
    {"_id": "d2", "title": "", "text": "a fish swims"},
    {"_id": "d3", "title": "Stone", "text": "granite is hard"},
)
QUERIES: Sequence[Row] = ({"_id": "q1", "text": "what flies"}, {"_id": "q2", "text": "what is hard"}, {"_id": "q3", "text": "unjudged"})
QRELS: Sequence[Row] = (
    {"query-id": "q1", "corpus-id": "d1", "score": 2},
    {"query-id": "q1", "corpus-id": "d2", "score": 0},
    {"query-id": "q2", "corpus-id": "d3", "score": 1},
)
COMMIT = "c" * 40


def jsonl(rows: Sequence[Row]) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def tsv(rows: Sequence[Row]) -> bytes:
    head = "query-id\tcorpus-id\tscore\n"
    return (head + "".join(f"{row['query-id']}\t{row['corpus-id']}\t{row['score']}\n" for row in rows)).encode()


def trec(rows: Sequence[Row]) -> bytes:
    return "".join(f"{row['query-id']}\tQ0\t{row['corpus-id']}\t{row['score']}\n" for row in rows).encode()


def parquet(rows: Sequence[Row]) -> bytes:
    arrow, table = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    buffer = io.BytesIO()
    columns = arrow.Table.from_pylist(list(rows) or [{"_id": "", "text": ""}])
    table.write_table(columns[: len(rows)], buffer, row_group_size=2)
    return buffer.getvalue()


def card(configs: Mapping[str, Mapping[str, str]]) -> bytes:
    """Dataset card whose front matter lists the files of each config and split."""
    lines = ["---", "license: mit", "configs:"]
    for config, splits in configs.items():
        lines += [f"- config_name: {config}", "  data_files:"]
        lines += [line for split, path in splits.items() for line in (f"  - split: {split}", f"    path: {path}")]
    return "\n".join([*lines, "---", "", "# A data set", ""]).encode()


def renamed(rows: Sequence[Row], names: Mapping[str, str]) -> list[Row]:
    """Rows with a selection of columns, renamed."""
    return [{new: row[old] for old, new in names.items() if old in row} for row in rows]


def zipped(files: Mapping[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return buffer.getvalue()


def beir_folder(name: str, corpus: Sequence[Row] = CORPUS, split: str = "test") -> dict[str, bytes]:
    """Files of an archive of BEIR."""
    return {
        f"{name}/": b"",
        f"{name}/corpus.jsonl": jsonl([{**row, "metadata": {}} for row in corpus]),
        f"{name}/queries.jsonl": jsonl([{**row, "metadata": {}} for row in QUERIES]),
        f"{name}/qrels/{split}.tsv": tsv(QRELS),
    }


def beir_hub(name: str, *, compressed: bool = False) -> dict[str, dict[str, bytes]]:
    """The two repositories of BEIR: now Parquet with a card, formerly compressed JSON lines without one."""
    qrels = {f"BeIR/{name}-qrels": {"README.md": b"---\nlicense: mit\n---\n", "test.tsv": tsv(QRELS), "train.tsv": tsv(QRELS[:1])}}
    if compressed:
        texts = {"corpus.jsonl.gz": gzip.compress(jsonl(CORPUS)), "queries.jsonl.gz": gzip.compress(jsonl(QUERIES)), f"{name}.py": b"raise"}
        return {f"BeIR/{name}": texts, **qrels}
    untitled = [{**row, "title": ""} for row in QUERIES]
    texts = {
        "README.md": card({"corpus": {"corpus": "corpus/corpus-*"}, "queries": {"queries": "queries/queries-*"}}),
        "corpus/corpus-00000-of-00002.parquet": parquet(CORPUS[:2]),
        "corpus/corpus-00001-of-00002.parquet": parquet(CORPUS[2:]),
        "queries/queries-00000-of-00001.parquet": parquet(untitled),
    }
    return {f"BeIR/{name}": texts, **qrels}


def mteb_hub(repository: str, *, lines: bool = False) -> dict[str, dict[str, bytes]]:
    """MTEB's repository of one data set, as JSON lines or Parquet; grades are floats."""
    grades = [{**row, "score": float(row["score"])} for row in QRELS]
    if lines:
        configs = {"default": {"test": "qrels/test.jsonl"}, "corpus": {"corpus": "corpus.jsonl"}, "queries": {"queries": "queries.jsonl"}}
        files = {"corpus.jsonl": jsonl(CORPUS), "queries.jsonl": jsonl(QUERIES), "qrels/test.jsonl": jsonl(grades)}
        return {repository: {"README.md": card(configs), **files}}
    configs = {"corpus": {"test": "corpus/test-*"}, "queries": {"test": "queries/test-*"}, "qrels": {"test": "qrels/test-*"}}
    names = {"_id": "id", "text": "text", "title": "title"}
    return {
        repository: {
            "README.md": card(configs),
            "corpus/test-00000-of-00001.parquet": parquet(renamed(CORPUS, names)),
            "queries/test-00000-of-00001.parquet": parquet(renamed(QUERIES, names)),
            "qrels/test-00000-of-00001.parquet": parquet(grades),
        }
    }


def mteb_many_hub(repository: str, language: str) -> dict[str, dict[str, bytes]]:
    """MTEB's repository of several languages, here two."""
    files: dict[str, bytes] = {}
    configs: dict[str, dict[str, str]] = {}
    for each in (language, "other"):
        corpus = CORPUS if each == language else [{"_id": "x", "title": "", "text": "x"}]
        for part, split, rows in (("corpus", "corpus", corpus), ("queries", "queries", QUERIES), ("qrels", "test", QRELS)):
            configs[f"{each}-{part}"] = {split: f"{each}-{part}/{split}-*"}
            files[f"{each}-{part}/{split}-00000-of-00001.parquet"] = parquet(rows)
    return {repository: {"README.md": card(configs), **files}}


def coir_hub(task: str) -> dict[str, dict[str, bytes]]:
    """The two repositories of CoIR: one with the splits corpus and queries of all partitions, one with the judgements."""

    def texts(rows: Sequence[Row]) -> bytes:
        extra = {"partition": "test", "language": "python", "meta_information": {"url": "u"}}
        return parquet([{**row, "title": row.get("title", ""), **extra} for row in rows])

    names = {"query-id": "query_id", "corpus-id": "corpus_id", "score": "score"}
    qrels = {split: parquet(renamed(rows, names)) for split, rows in (("train", QRELS[:1]), ("valid", QRELS[1:2]), ("test", QRELS))}
    return {
        f"CoIR-Retrieval/{task}-queries-corpus": {
            "README.md": card({"default": {"queries": "data/queries-*", "corpus": "data/corpus-*"}}),
            "data/corpus-00000-of-00001.parquet": texts(CORPUS),
            "data/queries-00000-of-00001.parquet": texts(QUERIES),
        },
        f"CoIR-Retrieval/{task}-qrels": {
            "README.md": card({"default": {split: f"data/{split}-*" for split in qrels}}),
            **{f"data/{split}-00000-of-00001.parquet": content for split, content in qrels.items()},
        },
    }


def mldr_hub(language: str) -> dict[str, dict[str, bytes]]:
    """The repository of MLDR: compressed JSON lines by language, TREC judgements, and a loading script, which must not be run."""
    folder = f"mldr-v1.0-{language}"
    corpus = renamed(CORPUS, {"_id": "docid", "text": "text"})
    queries = [
        {"query_id": row["_id"], "query": row["text"], "positive_passages": [{"docid": "d1", "text": "a"}], "negative_passages": []}
        for row in QUERIES
    ]
    files = {
        "README.md": b"---\nlicense: mit\n---\n# MLDR\n",
        "MLDR.py": b"raise SystemExit('a loading script was run')",
        f"{folder}/corpus.jsonl.gz": gzip.compress(jsonl(corpus)),
        f"{folder}/train.jsonl.gz": gzip.compress(jsonl(queries)),
    }
    for split, rows in (("dev", QRELS[:1]), ("test", QRELS)):
        files[f"{folder}/{split}.jsonl.gz"] = gzip.compress(jsonl(queries))
        files[f"qrels/qrels.{folder}-{split}.tsv"] = trec(rows)
    return {"Shitao/MLDR": files}


def nano_hub(name: str) -> dict[str, dict[str, bytes]]:
    """NanoBEIR's repository: three configs with a split called train; no titles, no grades."""
    pairs = [row for row in renamed(QRELS, {"query-id": "query-id", "corpus-id": "corpus-id"}) if row["corpus-id"] != "d2"]
    tables = {"corpus": renamed(CORPUS, {"_id": "_id", "text": "text"}), "queries": QUERIES, "qrels": pairs}
    return {
        f"zeta-alpha-ai/{name}": {
            "README.md": card({config: {"train": f"{config}/train-*"} for config in tables}),
            **{f"{config}/train-00000-of-00001.parquet": parquet(rows) for config, rows in tables.items()},
        }
    }


@dataclass
class Site:
    """Content of the server, and the requests it received.

    ``cut`` lists after how many bytes it breaks the connection, once per entry; ``requests`` holds path and Range header.
    """

    url: str = ""
    files: dict[str, bytes] = field(default_factory=dict)
    repositories: dict[str, dict[str, bytes]] = field(default_factory=dict)
    cut: list[int] = field(default_factory=list)
    ranges: bool = True
    requests: list[tuple[str, str | None]] = field(default_factory=list)


class SiteServer(ThreadingHTTPServer):
    """HTTP server with the content of a `Site`."""

    site: Site


class SiteHandler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: SiteServer

    def log_message(self, *_: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer(head=True)

    def do_GET(self) -> None:
        self._answer(head=False)

    def _answer(self, *, head: bool) -> None:
        site, path = self.server.site, self.path.partition("?")[0]
        site.requests.append((path, self.headers.get("Range")))
        if path.startswith("/api/datasets/"):
            repository = path.removeprefix("/api/datasets/").partition("/revision/")[0]
            self._send(self._description(repository), head=head)
        elif path.startswith("/datasets/"):
            repository, _, rest = path.removeprefix("/datasets/").partition("/resolve/")
            commit, _, name = rest.partition("/")
            self._send(site.repositories.get(repository, {}).get(name), head=head, commit=commit)
        else:
            self._send(site.files.get(path), head=head)

    def _description(self, repository: str) -> bytes | None:
        files = self.server.site.repositories.get(repository)
        if files is None:
            return None
        siblings = [{"rfilename": name, "size": len(content)} for name, content in files.items()]
        return json.dumps({"id": repository, "sha": COMMIT, "siblings": siblings}).encode()

    def _send(self, content: bytes | None, *, head: bool, commit: str | None = None) -> None:
        if content is None:
            self.send_response(404)
            self.send_header("X-Error-Code", "RepoNotFound")
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        asked = self.headers.get("Range") if self.server.site.ranges else None
        start = int(asked.removeprefix("bytes=").partition("-")[0]) if asked else 0
        if start >= len(content) > 0:
            self.send_error(416)
            return
        self.send_response(206 if asked else 200)
        self.send_header("Content-Length", str(len(content) - start))
        if commit is not None:
            self.send_header("ETag", f'"{hashlib.sha256(content).hexdigest()}"')
            self.send_header("X-Repo-Commit", commit)
        self.end_headers()
        if not head:
            self._write(content[start:], whole=commit is not None)

    def _write(self, content: bytes, *, whole: bool) -> None:
        if self.server.site.cut and not whole:
            content = content[: self.server.site.cut.pop(0)]
            self.close_connection = True
        self.wfile.write(content)


@pytest.fixture
def site(monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    """A local server that stands for the web and the Hub during a test."""
    found = Site()
    server = SiteServer(("127.0.0.1", 0), SiteHandler)
    server.site = found
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    found.url = f"http://127.0.0.1:{server.server_address[1]}"
    monkeypatch.setenv("HF_ENDPOINT", found.url)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    # The client reads this switch at import, and CI sets it.
    monkeypatch.setattr(importlib.import_module("huggingface_hub.constants"), "HF_HUB_OFFLINE", False)
    yield found
    server.shutdown()
    server.server_close()
    thread.join()


def write_hub(folder: Path, repositories: Mapping[str, Mapping[str, bytes]]) -> Path:
    """Write repositories to the folders that a fetch would create."""
    return write(
        folder, {f"{repository.replace('/', '--')}/{name}": files[name] for repository, files in repositories.items() for name in files}
    )


def write(folder: Path, files: Mapping[str, bytes]) -> Path:
    for name, content in files.items():
        if not name.endswith("/"):
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
    return folder


@pytest.fixture
def published() -> SimpleNamespace:
    """Functions that write the published layouts."""
    functions = (
        jsonl, tsv, trec, parquet, card, zipped, write, write_hub,
        beir_folder, beir_hub, mteb_hub, mteb_many_hub, coir_hub, mldr_hub, nano_hub,
    )  # fmt: skip
    return SimpleNamespace(corpus=CORPUS, queries=QUERIES, qrels=QRELS, commit=COMMIT, **{each.__name__: each for each in functions})
