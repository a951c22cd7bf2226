"""The service as a process: slow and greedy clients, a full queue, SIGTERM, and a new generation under load."""

from __future__ import annotations

import asyncio
import json
import select
import shutil
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import uvicorn

from quiver.encoder.errors import InputError
from quiver.retrieval.index import add_documents, build_index, delete_documents, open_index
from quiver.retrieval.models.loading import load_model
from quiver.retrieval.records import Document
from quiver.retrieval.serving.server import Connections, TimeoutProtocol
from tests.retrieval.serving.conftest import Child, Indexes, httpx, started

Serving = Callable[..., Any]
HEADER = b"POST /v1/search HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


@pytest.fixture(scope="module")
def index(indexes: Indexes, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An index that tests may change."""
    folder = tmp_path_factory.mktemp("changing") / "index"
    shutil.copytree(indexes.dense, folder)
    # Long texts too: an answer of megabytes is more than what two systems keep of a connection that nobody reads.
    long = [Document(f"long{number}", "quartz " * 500, "", {"long": True}) for number in range(60)]
    add_documents(folder, long, load_model(open_index(folder).manifest.model.source))
    return folder


@pytest.fixture(scope="module")
def child(index: Path, serving: Serving) -> Iterator[Child]:
    with serving(
        index, "--fuse", "bm25", "--client-timeout", 1, "--max-body", "64KB", "--poll", 0.1, "--timeout", 120, "--max-hits", 10_000
    ) as started:
        yield started


def read_all(connection: socket.socket) -> bytes:
    """Read until the other side closes the connection, within a minute."""
    connection.settimeout(60)
    found = b""
    with suppress(ConnectionResetError):
        while part := connection.recv(1 << 16):
            found += part
    return found


def wait_until(true: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not true():
        assert time.monotonic() < end
        time.sleep(0.02)


def query(child: Child, text: str = "bird", **options: Any) -> Any:
    return httpx.post(f"{child.url}/v1/search", json={"query": text, **options}, timeout=60)


def test_the_command_serves(child: Child) -> None:
    assert query(child, "granite snow", k=3).json()["retriever"] == "index+bm25"
    assert query(child, "granite snow", retriever="bm25").status_code == 200


SECOND = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\nGET /heal"


@pytest.mark.parametrize(
    "sent", [b"", b"POST /api/sea", HEADER, SECOND], ids=["nothing", "half a line", "half a header", "half a second one"]
)
def test_a_client_that_never_finishes_its_header_is_disconnected(child: Child, sent: bytes) -> None:
    begun = time.monotonic()
    with socket.create_connection(("127.0.0.1", child.port)) as connection:
        connection.sendall(sent)
        assert read_all(connection)[:17] == (b"HTTP/1.1 200 OK\r\n" if sent == SECOND else b"")
    assert time.monotonic() - begun < 30
    assert query(child).status_code == 200


def test_a_client_that_sends_its_header_byte_by_byte_is_disconnected(child: Child) -> None:
    with socket.create_connection(("127.0.0.1", child.port)) as connection:
        sent = 0
        with suppress(BrokenPipeError, ConnectionResetError):
            while sent < 600:
                connection.sendall(HEADER[sent % len(HEADER) :][:1])
                sent += 1
                time.sleep(0.05)
    assert 5 < sent < 600


def test_a_body_that_is_never_sent_is_refused(child: Child) -> None:
    with socket.create_connection(("127.0.0.1", child.port)) as connection:
        connection.sendall(HEADER + b'Content-Length: 100\r\n\r\n{"query": ')
        answer = read_all(connection)
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert b'"code": "too_slow"' in answer
    assert query(child).status_code == 200


@pytest.mark.parametrize("chunked", [False, True])
def test_a_large_body_is_refused(child: Child, chunked: bool) -> None:
    body = b'{"query": "' + b"a" * (4 << 20) + b'"}'
    content = (body[first : first + 65536] for first in range(0, len(body), 65536)) if chunked else body
    answer = httpx.post(f"{child.url}/v1/search", content=content, headers={"content-type": "application/json"}, timeout=60)
    assert answer.status_code == 413
    assert answer.json()["error"]["code"] == "too_large"
    assert answer.headers["connection"] == "close"


def test_an_endless_body_is_cut_off(child: Child) -> None:
    with socket.create_connection(("127.0.0.1", child.port)) as connection:
        connection.settimeout(60)
        connection.sendall(HEADER + b"Transfer-Encoding: chunked\r\n\r\n")
        sent = 0
        with suppress(BrokenPipeError, ConnectionResetError):
            while sent < 400 << 20:
                connection.sendall(b"10000\r\n" + b"a" * 65536 + b"\r\n")
                sent += 65536
    assert sent < 400 << 20
    assert query(child).status_code == 200


def asked_as(child: Child, host: str | None, *, path: str = "/healthz", version: str = "1.1") -> tuple[int, str]:
    """Return status and body of the response to a request with a Host header."""
    header = "" if host is None else f"Host: {host}\r\n"
    with socket.create_connection(("127.0.0.1", child.port)) as connection:
        connection.sendall(f"GET {path} HTTP/{version}\r\n{header}Connection: close\r\n\r\n".encode())
        head, _, body = read_all(connection).partition(b"\r\n\r\n")
    return int(head.split()[1]), body.decode()


OTHERS = [
    "evil.example",
    "evil.example:8080",
    "localhost.evil.example",
    "127.0.0.1.evil.example",
    "127.0.0.1@evil.example",
    "evil.localhost",
    "a b",
]


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST", "localhost.", "127.0.0.1", "[::1]", "[0:0:0:0:0:0:0:1]"])
def test_a_service_on_a_loopback_address_answers_to_its_own_names(child: Child, host: str) -> None:
    assert asked_as(child, host)[0] == 200
    assert asked_as(child, f"{host}:{child.port}")[0] == 200
    assert asked_as(child, f"{host}:80", path="/v1/info")[0] == 200  # a port may be forwarded


@pytest.mark.parametrize("host", [*OTHERS, "10.0.0.7", "[2001:db8::1]:8080", ""])
def test_a_service_on_a_loopback_address_refuses_other_hosts(child: Child, host: str) -> None:
    """Requests as a web page sends them whose name was made to resolve to this machine (DNS rebinding)."""
    for path in ("/", "/v1/info", "/healthz", "/metrics", "/openapi.json"):
        status, body = asked_as(child, host, path=path)
        assert (status, json.loads(body)["error"]["code"]) == (421, "wrong_host")
    assert "--allow-host" in body or not host or "@" in host or " " in host
    answer = httpx.post(f"{child.url}/v1/search", json={"query": "sea"}, headers={"Host": host}, timeout=60)
    assert answer.status_code == 421


def test_a_request_without_host_header_is_accepted(child: Child) -> None:
    assert asked_as(child, None, version="1.0")[0] == 200
    assert asked_as(child, None)[0] == 400


def test_further_hosts_are_allowed_by_name(indexes: Indexes, serving: Serving) -> None:
    options = ("--allow-host", "Search.example.com", "--allow-host", "*.inner.example")
    with serving(indexes.dense, *options) as child:
        for host in ("search.example.com:443", "a.inner.example", "a.b.inner.example", "localhost"):
            assert asked_as(child, host)[0] == 200
        for host in ("example.com", "inner.example", "search.example.com.evil.example", "evilinner.example"):
            assert asked_as(child, host)[0] == 421


@pytest.mark.parametrize(
    "sent", ["\x16\x03\x01 hello", "GET /v1/search?q=größe HTTP/1.1\r\nhost: localhost", "GET /v1/search?q=a b HTTP/1.1"]
)
def test_what_is_not_http_is_refused(child: Child, sent: str) -> None:
    with socket.create_connection(("127.0.0.1", child.port)) as connection:
        connection.sendall(f"{sent}\r\n\r\n".encode())
        head, _, body = read_all(connection).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 ")
    assert json.loads(body)["error"]["code"] == "malformed_http"
    assert "--data-urlencode" in json.loads(body)["error"]["message"]
    assert query(child).status_code == 200


def test_a_new_generation_under_load_fails_no_request(child: Child, index: Path) -> None:
    model = load_model(open_index(index).manifest.model.source)
    stop = time.monotonic() + 120
    done: list[bool] = []

    def ask(word: str) -> list[tuple[int, int, int]]:
        seen = []
        with httpx.Client(timeout=60) as client:
            while not done and time.monotonic() < stop:
                body = {"query": word, "k": 3, "retriever": "bm25" if len(seen) % 3 else None}
                answer = client.post(f"{child.url}/v1/search", json=body)
                content = answer.json()
                seen.append((answer.status_code, content.get("generation", -1), len(content.get("hits", ()))))
        return seen

    with ThreadPoolExecutor(3) as threads:
        asking = [threads.submit(ask, word) for word in ("sea", "bird", "stone")]
        try:
            for change in range(4):
                generation = add_documents(index, [Document(f"new{change}", "sea bird stone obsidian")], model).manifest.generation
                if change % 2:
                    generation = delete_documents(index, [f"new{change - 1}"]).manifest.generation
                while query(child).json()["generation"] < generation:
                    assert time.monotonic() < stop
                    time.sleep(0.02)
        finally:
            done.append(True)
        seen = [each.result() for each in asking]
    assert {status for each in seen for status, _, _ in each} == {200}
    assert {hits for each in seen for _, _, hits in each} == {3}
    for each in seen:
        generations = [generation for _, generation, _ in each]
        assert generations == sorted(generations)
        assert len(set(generations)) >= 3
    found = query(child, "obsidian", retriever="bm25").json()["hits"]
    assert {hit["id"] for hit in found} == {"new1", "new3"}


def test_a_full_queue_refuses_and_sigterm_loses_no_request(indexes: Indexes, held_serving: Serving, tmp_path: Path) -> None:
    go = tmp_path / "go"
    with held_serving(indexes.dense, go, queue=3, seconds=120) as child:
        with ThreadPoolExecutor(12) as threads, httpx.Client(base_url=child.url, timeout=120) as client:
            asking = [threads.submit(client.post, "/v1/search", json={"query": "bird"})]
            wait_until(lambda: 'quiver_batch_queries_count{retriever="held"} 1.0' in client.get("/metrics").text)  # it is being answered
            asking += [threads.submit(client.post, "/v1/search", json={"query": "bird"}) for _ in range(9)]
            wait_until(lambda: sum(each.done() for each in asking) == 6)  # three wait
            for each in asking:
                if each.done():
                    assert each.result().status_code == 429
                    assert each.result().headers["retry-after"] == "1"
                    assert each.result().json()["error"]["code"] == "too_busy"
            waiting = [each for each in asking if not each.done()]
            stopping = threads.submit(child.stop)
            wait_until(lambda: client.get("/readyz").status_code == 503)
            assert client.get("/healthz").headers["connection"] == "close"
            go.touch()
            assert [each.result().status_code for each in waiting] == [200] * 4
            assert stopping.result() == 0
        with pytest.raises(httpx.ConnectError):
            query(child)


def test_a_search_beyond_the_time_limit_is_given_up(indexes: Indexes, held_serving: Serving, tmp_path: Path) -> None:
    with held_serving(indexes.dense, tmp_path / "never", seconds=0.3) as child:
        answer = query(child)
        assert (answer.status_code, answer.json()["error"]["code"]) == (504, "timeout")
        assert httpx.get(f"{child.url}/healthz").status_code == 200


CROWDED = """
import resource, sys
from pathlib import Path
from quiver.retrieval.serving.schemas import Limits
from quiver.retrieval.serving.server import Address, free_files, run_service
from quiver.retrieval.serving.service import open_service
from tests.retrieval.serving.held_service import say

service = open_service({"words": Path(sys.argv[1])}, limits=Limits(read_seconds=2.0))
_, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (1024, hard))
resource.setrlimit(resource.RLIMIT_NOFILE, (1024 - free_files() + 300, hard))  # files for 300 connections, all in all
run_service(service, Address(port=0, drain_delay=0, drain_seconds=1), started=say)
"""


def test_connections_without_end_are_refused_with_one_line_in_the_log(tmp_path: Path) -> None:
    """Idle connections that take all that there are, and requests beyond them; the process may open files for 300."""
    folder = build_index([Document("a", "sea bird")], "bm25", tmp_path / "words").path
    with (tmp_path / "log").open("w+") as log, started(["-c", CROWDED, str(folder)], stderr=log) as child:
        idle = [socket.create_connection(("127.0.0.1", child.port)) for _ in range(450)]
        try:
            # Those that are far too many are answered at once, without a request.
            answered = [each for each in idle if select.select([each], [], [], 0)[0]] or idle[-1:]
            head, _, body = read_all(answered[-1]).partition(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 503 ")
            assert b"\r\nretry-after: 1" in head.lower()
            assert json.loads(body)["error"]["code"] == "too_many_connections"
        finally:
            for each in idle:
                each.close()
        wait_until(lambda: query(child).status_code == 200)
        # One that is a few too many is answered when its request has come.
        few = [socket.create_connection(("127.0.0.1", child.port)) for _ in range(165)]
        try:
            refused = query(child)
            assert (refused.status_code, refused.headers["retry-after"], refused.headers["connection"]) == (503, "1", "close")
        finally:
            for each in few:
                each.close()
        wait_until(lambda: query(child).status_code == 200)
        assert child.stop() == 0
        log.seek(0)
        lines = [line for line in log.read().splitlines() if "shutting down" not in line]
    assert len(lines) == 1, lines
    assert "connections are open; requests beyond" in lines[0]


def test_a_process_without_files_for_connections_is_refused() -> None:
    allowed = Connections(1000, 10_000)
    assert (allowed.most, allowed.limit) == (1000, 1250)
    for files in (160, 300, 700, 1024):
        allowed = Connections(1000, files)
        assert 0 < allowed.most < allowed.limit < files
    with pytest.raises(InputError, match="ulimit -n"):
        Connections(1000, 100)


def test_a_client_that_reads_nothing_loses_its_connection_in_time() -> None:
    """The answer stays in memory as long as the connection: only the write timer ends it, long before a keep-alive time could."""

    async def answer(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"a" * (64 << 20)})

    async def talk() -> tuple[float, int]:
        config = uvicorn.Config(answer, lifespan="off", log_config=None, timeout_keep_alive=60)
        config.load()
        state, loop = uvicorn.server.ServerState(), asyncio.get_running_loop()
        protocol = type("Protocol", (TimeoutProtocol,), {"timeout_seconds": 0.3, "allowed": Connections(10, 1000)})
        server = await loop.create_server(lambda: protocol(config, state, {}), "127.0.0.1", 0)
        reader = socket.socket()
        reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        reader.connect(server.sockets[0].getsockname())
        reader.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
        begun = loop.time()
        while not state.connections or loop.time() < begun + 0.1:
            await asyncio.sleep(0.01)
        while state.connections and loop.time() < begun + 20:
            await asyncio.sleep(0.01)
        taken = loop.time() - begun
        reader.close()
        server.close()
        return taken, len(state.connections)

    taken, left = asyncio.run(talk())
    assert (left, taken < 20) == (0, True)
