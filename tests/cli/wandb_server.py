"""A W&B server on loopback with the calls that `wandb sync` makes. It keeps the lines of the history of each run."""

from __future__ import annotations

import gzip
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class WandBServer(ThreadingHTTPServer):
    """The server. `runs`: the lines by their number, by the id of the run."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.runs: dict[str, dict[int, dict[str, Any]]] = {}

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def answer(self, query: str, values: dict[str, Any]) -> dict[str, Any]:
        """Answer a query in GraphQL."""
        name = values.get("name") or ""
        project = {"id": "p", "name": "unisono", "entity": {"id": "e", "name": "me"}}
        if "RunResumeStatus" in query:
            return {"model": {**project, "bucket": self._bucket(name) if name in self.runs else None}}
        if "upsertBucket" in query:
            self.runs.setdefault(name, {})
            bucket = {**self._bucket(name), "description": "", "sweepName": "", "project": project}
            return {"upsertBucket": {"bucket": bucket, "inserted": True}}
        return {"serverInfo": {"features": []}} if "serverInfo" in query else {}

    def _bucket(self, name: str) -> dict[str, Any]:
        lines = self.runs[name]
        tail = json.dumps([json.dumps(lines[max(lines)])] if lines else [])
        counts = {"historyLineCount": len(lines), "logLineCount": 0, "eventsLineCount": 0}
        empty = {"summaryMetrics": "{}", "config": "{}", "wandbConfig": "{}", "eventsTail": "[]"}
        return (
            {"id": "b", "name": name, "displayName": name, "tags": [], "notes": "", "historyTail": tail}
            | counts
            | empty
        )


class Handler(BaseHTTPRequestHandler):
    """A request to the server."""

    server: WandBServer

    def do_GET(self) -> None:
        self._send({})

    def do_PUT(self) -> None:
        self._body()
        self._send({})

    def do_POST(self) -> None:
        body = json.loads(self._body() or b"{}")
        if self.path.endswith("/file_stream"):
            history = body.get("files", {}).get("wandb-history.jsonl", {"offset": 0, "content": []})
            lines = {number: json.loads(line) for number, line in enumerate(history["content"], history["offset"])}
            self.server.runs[self.path.split("/")[-2]].update(lines)
            self._send({})
            return
        answer = self.server.answer(body.get("query", ""), body.get("variables") or {})
        self._send({"data": answer} if answer else {"errors": [{"message": "this server has no such call"}]})

    def _body(self) -> bytes:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        return gzip.decompress(body) if self.headers.get("Content-Encoding") == "gzip" else body

    def _send(self, content: Any) -> None:
        data = json.dumps(content).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        """Print nothing."""


@contextmanager
def wandb_server() -> Iterator[WandBServer]:
    """Run a server within a block."""
    with WandBServer() as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
