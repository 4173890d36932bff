"""The server of the live page: what it answers, to which requests, and how often it reads the files."""

from __future__ import annotations

import gzip
import http.client
import json
import shutil
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from benchmarks.report_size import write_run
from tests.authority import Authority
from unisono.handshake.certificates import server_context
from unisono.monitor.timeline import Timeline
from unisono.report.live.live_data import LiveView
from unisono.report.live.live_server import MOST_REFUSALS, LiveServer, Refusals
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


# -- roles


@pytest.fixture
def stoppable(runs: Path) -> Iterator[tuple[Client, list[str], list[tuple[str, str, str]]]]:
    """Return a client of a server that can stop its run, the stops, and what is noted."""
    stops: list[str] = []
    notes: list[tuple[str, str, str]] = []

    def stop(address: str) -> str:
        stops.append(address)
        return "" if len(stops) == 1 else "No process is writing to this run."

    with LiveServer(runs / "one", stop=stop, note=lambda *note: notes.append(note)) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield Client(server), stops, notes
        server.shutdown()
        thread.join()


def post(client: Client, path: str, **headers: str) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", client.server.server_port, timeout=30)
    try:
        connection.request("POST", path, body=b"x" * 100, headers=headers)
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def test_only_the_token_for_it_stops_the_run(stoppable: tuple[Client, list[str], list[tuple[str, str, str]]]) -> None:
    client, stops, notes = stoppable
    look, stop = client.server.tokens.look, client.server.tokens.stop
    assert look != stop
    assert post(client, "/stop")[0] == 401
    assert post(client, "/stop?token=")[0] == 401
    assert post(client, f"/stop?token={stop}x")[0] == 401
    assert post(client, f"/stop?token={look}") == (403, b"This address may look, and not stop the run.\n")
    assert post(client, f"/stop?token={stop}", Host="evil.example")[0] == 403
    assert post(client, f"/data?token={stop}")[0] == 404
    assert client.get(f"/stop?token={stop}")[0] == 404, "a link or an image of another site can only GET"
    assert stops == []
    assert post(client, f"/stop?token={stop}")[0] == 200
    assert stops == ["127.0.0.1"]
    assert post(client, f"/stop?token={stop}") == (409, b"No process is writing to this run.\n")
    reasons = [reason for event, _, reason in notes if event == "refusal"]
    assert reasons == [
        "no valid token",
        "a stop with a token that may only look",
        "a host name that is not of this machine",
    ]
    assert ("stop", "127.0.0.1", "the live page") in notes


def test_only_the_page_for_it_has_a_button(stoppable: tuple[Client, list[str], list[tuple[str, str, str]]]) -> None:
    client, _, _ = stoppable
    for url, has in ((client.server.url, False), (client.server.stop_url, True)):
        status, page, _ = client.get(f"/?{urlsplit(url).query}")
        assert status == 200
        assert (b'data-stops="stops"' in page) == has
        assert client.get(f"/data?{urlsplit(url).query}")[0] == 200
        assert client.server.tokens.stop.encode() not in page


def test_without_permission_there_is_no_token_that_stops(client: Client) -> None:
    assert client.server.stop_url == ""
    assert post(client, "/stop?token=")[0] == 401
    assert post(client, f"/stop?{client.query}")[0] == 403


def test_refusals_are_noted_once_a_minute_for_each_address() -> None:
    noted: list[tuple[str, str, str]] = []
    clock = [0.0]
    refused = Refusals(lambda *note: noted.append(note), lambda: clock[0])
    for clock[0] in (0.0, 1.0, 59.0):
        refused("192.0.2.1", "no valid token")
        refused("192.0.2.2", "no valid token")
    assert len(noted) == 2
    clock[0] = 61.0
    refused("192.0.2.1", "no valid token")
    assert len(noted) == 3
    for number in range(5000):
        refused(f"2001:db8::{number:x}", "no valid token")
    assert len(refused._noted) <= MOST_REFUSALS


def test_the_page_at_https(runs: Path, tmp_path: Path) -> None:
    """A connection that stays silent within the handshake delays no other one."""
    authority = Authority(tmp_path)
    files = authority.issue(["localhost", "127.0.0.1"])
    with LiveServer(runs, tls=server_context(str(files.cert), str(files.key))) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            assert server.url.startswith("https://127.0.0.1:")
            with socket.create_connection(("127.0.0.1", server.server_port), timeout=30):
                trusts = ssl.create_default_context(cafile=authority.ca)
                connection = http.client.HTTPSConnection("127.0.0.1", server.server_port, timeout=30, context=trusts)
                connection.request("GET", f"/?{urlsplit(server.url).query}")
                answer = connection.getresponse()
                assert (answer.status, b"<!doctype html>" in answer.read()[:200].lower()) == (200, True)
                connection.close()
            other = ssl.create_default_context()
            stranger = http.client.HTTPSConnection("127.0.0.1", server.server_port, timeout=30, context=other)
            with pytest.raises(ssl.SSLCertVerificationError):
                stranger.request("GET", "/")
            stranger.close()
        finally:
            server.shutdown()
            thread.join()
