"""The server of the live page: what it answers, to which requests, and how often it reads the files."""

from __future__ import annotations

import gzip
import http.client
import json
import shutil
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from benchmarks.report_size import write_run
from unisono.monitor.timeline import Timeline
from unisono.report.live.live_data import LiveView
from unisono.report.live.live_server import LiveServer
from unisono.report.live.run_list import RunList


class Client:
    """A browser of the page, without a page."""

    def __init__(self, server: LiveServer) -> None:
        self.server = server
        self.query = urlsplit(server.url).query

    def get(self, path: str, **headers: str) -> tuple[int, bytes, dict[str, str]]:
        connection = http.client.HTTPConnection("127.0.0.1", self.server.server_port, timeout=30)
        try:
            connection.request("GET", path, headers=headers)
            answer = connection.getresponse()
            return answer.status, answer.read(), dict(answer.getheaders())
        finally:
            connection.close()

    def data(self, more: str = "") -> Any:
        status, body, _ = self.get(f"/data?{self.query}{more}")
        return json.loads(body) if status == 200 else status


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    for name, steps in (("one", 60), ("two", 40)):
        write_run(tmp_path / "runs" / name, ranks=2, steps=steps)
    return tmp_path / "runs"


@pytest.fixture
def client(runs: Path) -> Iterator[Client]:
    with LiveServer(runs) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield Client(server)
        server.shutdown()
        thread.join()


def test_only_requests_with_the_token_and_a_host_of_this_machine_are_answered(client: Client) -> None:
    path = f"/?{client.query}"
    assert client.get(path)[0] == 200
    assert client.get("/")[0] == 401
    assert client.get("/?token=")[0] == 401
    assert client.get(f"{path}x")[0] == 401
    assert client.get("/?token=%C3%A4")[0] == 401
    assert client.get(path, Host="evil.example")[0] == 403
    assert client.get(path, Host="evil.example:80")[0] == 403
    assert client.get(path, Host="[::1")[0] == 400
    assert client.get(path, Host="localhost:4711")[0] == 200, "a tunnel has another port"
    assert client.get(f"/report?{client.query}")[0] == 404
    assert client.get(f"/../../etc/passwd?{client.query}")[0] == 404
    for name in ("..", ".", "", "one/../../runs/one", "nothing", "%2e%2e"):
        assert client.get(f"/data?{client.query}&run={name}")[0] in ((404,) if name else (200,)), name


def test_the_page_is_served_compressed_and_to_this_site_alone(client: Client) -> None:
    status, packed, headers = client.get(f"/?{client.query}&run=one", **{"Accept-Encoding": "gzip"})
    assert (status, headers["Content-Encoding"]) == (200, "gzip")
    page = gzip.decompress(packed).decode()
    assert "connect-src 'self'" in page
    assert 'data-live="live"' in page
    assert headers["Referrer-Policy"] == "no-referrer"
    assert headers["Cache-Control"] == "no-store"


def test_data_are_sent_once(client: Client) -> None:
    first = client.data("&run=one")
    assert (first["kind"], len(first["content"]["steps"])) == ("run", 60)
    assert client.data(f"&run=one&since={first['version']}") == 204
    assert client.data("&run=one&since=of-another-server")["version"] == first["version"]
    both = client.data("&run=one&run=two")
    assert (both["kind"], both["back"]) == ("compare", f"?{client.query}")


def test_the_list_of_runs(client: Client, runs: Path) -> None:
    listed = {run["name"]: run for run in client.data()["content"]["runs"]}
    assert set(listed) == {"one", "two"}
    assert (listed["one"]["steps"], listed["one"]["total"], listed["one"]["state"]) == (60, 60, "finished")


def test_a_damaged_run_is_in_the_list(runs: Path) -> None:
    for path in (runs / "two").rglob("*"):
        if path.is_file():
            path.write_bytes(b"\xff{")
    (runs / "three" / "timeline").mkdir(parents=True)
    (runs / "file").write_text("")
    found = RunList(runs)
    found.read()
    assert {run["name"]: run["steps"] for run in found.content()["runs"]} == {"one": 60, "two": 0, "three": 0}


def test_a_run_that_is_removed_does_not_end_the_server(client: Client, runs: Path) -> None:
    assert client.data("&run=one")["kind"] == "run"
    shutil.rmtree(runs / "one")
    assert client.get(f"/data?{client.query}&run=one")[0] == 404
    assert client.get(f"/?{client.query}")[0] == 200


def test_many_viewers_cost_one_look_a_second(tmp_path: Path) -> None:
    time, reads, made = 0.0, [0], [0]

    def read() -> int:
        reads[0] += 1
        return reads[0] // 3

    def make(most: int) -> tuple[str, str, Any]:
        nonlocal time
        made[0] += 1
        time += 0.2  # that is slow, so the next look is later
        return "title", "run", {"made": made[0]}

    view = LiveView(read, make, now=lambda: time)
    versions = {view.answer().version for _ in range(50)}
    assert (reads, made, len(versions)) == ([1], [1], 1)
    time += 1.1
    view.answer()
    assert reads == [1]
    time += 3.0
    view.answer()
    assert (reads, made) == ([2], [1]), "the files have not changed"
    time += 4.1
    assert view.answer().version not in versions
    assert (reads, made) == ([3], [2])


def test_a_growing_run_has_news(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("unisono.report.live.live_data.LEAST_SECONDS", 0.0)
    monkeypatch.setattr("unisono.report.live.live_data.SHARE", 1e9)
    line = Timeline(tmp_path / "run" / "timeline" / "rank-0.jsonl")
    with LiveServer(tmp_path / "run") as server:
        view = server.data.view(())
        assert view is not None
        versions = []
        for step in range(3):
            line.step(step, {"forward": 0.1}, 1.0)
            line.flush()
            answer = view.answer()
            versions.append(answer.version)
            assert len(json.loads(answer.text)["content"]["steps"]) == step + 1
        assert len(set(versions)) == 3
    line.close()


def test_many_connections_may_wait(runs: Path) -> None:
    with LiveServer(runs) as server:  # which accepts none yet
        waiting = [socket.create_connection(("127.0.0.1", server.server_port), timeout=5) for _ in range(100)]
        for connection in waiting:
            connection.close()


def test_a_connection_that_never_sends_or_never_reads_is_closed(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    handler: Any = client.server.RequestHandlerClass
    assert handler.timeout <= 10
    monkeypatch.setattr(handler, "timeout", 0.2)
    before = threading.active_count()
    request = f"GET /?{client.query} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode()
    silent = [socket.create_connection(("127.0.0.1", client.server.server_port), timeout=20) for _ in range(20)]
    for i, connection in enumerate(silent):
        connection.sendall(request * 300 if i % 2 else request[:20])  # 300 pages do not fit in the buffers
    until = time.monotonic() + 20
    while threading.active_count() <= before:
        time.sleep(0.01)
    while threading.active_count() > before:
        assert time.monotonic() < until, "threads wait for silent connections"
        time.sleep(0.05)
    assert silent[0].recv(1) == b"", "the server has closed it"
    for connection in silent:
        connection.close()
    assert client.get(f"/?{client.query}")[0] == 200
