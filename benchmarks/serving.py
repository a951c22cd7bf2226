"""Service: searches and embeddings over HTTP, one request at a time and several at once, beside the same calls in this process.

``quiver serve`` runs in a process of its own with an index of the collection's first documents. Clients are threads with one connection
each. The difference of a request to the call in this process is what HTTP, JSON and batching cost; with several clients, batching wins.
"""

from __future__ import annotations

import http.client
import json
import re
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

import numpy as np

from quiver.encoder.errors import InputError
from quiver.retrieval.data.corpus import load_collection
from quiver.retrieval.index.build import build_index
from quiver.retrieval.models.loading import load_model

import harness
from harness import BACKEND, OWN, RATIO, Column, Results

COLUMNS = (
    BACKEND,
    Column("p50 ms", "p50", ",.2f", spread=True),
    Column("p95", "p95", ",.2f"),
    Column("p99", "p99", ",.2f"),
    Column("requests/s", "requests_per_second", ",.1f"),
    RATIO,
)


class Client:
    def __init__(self, port: int) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)

    def post(self, path: str, body: Any) -> Any:
        self._connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
        answer = self._connection.getresponse()
        content = answer.read()
        if answer.status != 200:
            raise RuntimeError(f"{path}: {answer.status} {content[:200]!r}")
        return json.loads(content)


def start_service(index: Path, log: Path) -> tuple[subprocess.Popen[bytes], int]:
    """Start ``quiver serve`` on a free port and wait until it is ready."""
    with log.open("wb") as output:
        command = [sys.executable, "-c", "from quiver.cli.main import main; main()", "serve", f"bench={index}", "--port", "0"]
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
    for _ in range(600):
        text = log.read_text(encoding="utf-8", errors="replace")
        if found := re.search(r"http://127\.0\.0\.1:(\d+)", text):
            try:
                connection = http.client.HTTPConnection("127.0.0.1", int(found[1]), timeout=10)
                connection.request("GET", "/readyz")
                if connection.getresponse().status == 200:
                    return process, int(found[1])
            except OSError:
                pass
        if process.poll() is not None:
            break
        time.sleep(0.1)
    process.kill()
    raise RuntimeError(f"the service did not start: {log.read_text(encoding='utf-8', errors='replace')[-500:]}")


def run_clients(calls: Sequence[Callable[[str], object]], queries: Sequence[str]) -> tuple[list[float], float]:
    """Every client sends its share of the queries: milliseconds of each request, and seconds of all."""

    def run(position: int) -> list[float]:
        taken = []
        for query in queries[position :: len(calls)]:
            started = perf_counter()
            calls[position](query)
            taken.append(1000 * (perf_counter() - started))
        return taken

    started = perf_counter()
    with ThreadPoolExecutor(len(calls)) as pool:
        parts = list(pool.map(run, range(len(calls))))
    return [each for part in parts for each in part], perf_counter() - started


def bench_requests(
    results: Results, port: int, index: Any, model: Any, queries: Sequence[str], clients: Sequence[int], rounds: int
) -> None:
    """Time searches and embeddings: a case for each, a row per number of clients; the first row is the call in this process."""
    subjects: dict[str, tuple[Callable[[str], object], Callable[[Client], Callable[[str], object]]]] = {
        "search": (
            lambda query: index.search(query, k=10),
            lambda client: lambda query: client.post("/v1/search", {"query": query, "k": 10}),
        ),
        "embeddings": (
            lambda query: model.encode_query([query]),
            lambda client: lambda query: client.post("/v1/embeddings", {"model": "bench", "input": [query]}),
        ),
    }
    for case, (own, request) in subjects.items():
        rows: dict[str, dict[str, Any]] = {}
        ways = {OWN: [own]} | {
            f"service, {count} client{'s' * (count != 1)}": [request(Client(port)) for _ in range(count)] for count in clients
        }
        for calls in ways.values():
            run_clients(calls, queries[: 2 * len(calls)])
        for _, name in harness.interleave(list(ways), rounds):
            milliseconds, seconds = run_clients(ways[name], queries)
            row = rows.setdefault(name, {"backend": name})
            row.setdefault("seconds", []).append(seconds)
            row.setdefault("requests_per_second", []).append(len(queries) / seconds)
            for share in (50, 95, 99):
                row.setdefault(f"p{share}", []).append(float(np.percentile(milliseconds, share)))
        note = "quiver is the call in this process; times relative to it are of all queries."
        results.add(case, f"{case.capitalize()}: {len(queries):,} queries", COLUMNS, harness.with_ratios(list(rows.values())), note)


def main() -> None:
    parser = harness.parser(__doc__, "python benchmarks/serving.py data/scifact --model MODEL --out bench-serving", rounds=3)
    parser.add_argument("data", type=Path, help="BEIR folder.")
    parser.add_argument("--model", "-m", required=True, help="Folder or hub id of a bi-encoder.")
    parser.add_argument("--split", default="test", help="Split of the judgements, for the queries (default: %(default)s).")
    parser.add_argument("--docs", type=int, default=1_000, help="Documents to index (default: %(default)s).")
    parser.add_argument("--queries", type=int, default=200, help="Requests of a round (default: %(default)s).")
    parser.add_argument("--clients", type=int, action="append", help="Clients at once (default: 1, 8 and 32). Repeatable.")
    given = parser.parse_args()
    collection = load_collection(given.data, given.split)
    texts = [query.text for query in collection.queries]
    if not texts:
        raise InputError(f"{given.data}: no queries in split {given.split!r}")
    queries = [texts[number % len(texts)] for number in range(given.queries)]
    settings = {"model": given.model, "docs": given.docs, "queries": given.queries}
    results = Results(f"Service: {given.data.name}", settings, given.out, overwrite=given.overwrite)
    with TemporaryDirectory(prefix="quiver-bench-") as temporary:
        model = load_model(given.model)
        index = build_index(list(islice(collection.documents, given.docs)), model, Path(temporary) / "index")
        process, port = start_service(Path(temporary) / "index", Path(temporary) / "log")
        try:
            bench_requests(results, port, index, model, queries, given.clients or [1, 8, 32], given.rounds)
        finally:
            process.terminate()
            process.wait()


if __name__ == "__main__":
    harness.run_script(main)
