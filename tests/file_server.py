"""Serve the files of a folder over HTTP with ranges, as object stores do, in a process of its own.

with serve(folder) as server:
    Stream.tar(f"{server.url}/a.tar")
    server.kill()
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from tests.house.sources import ROOT


class Files(BaseHTTPRequestHandler):
    """GET and HEAD of files, whole or in part. `seen` is a file to which each request is appended."""

    folder = Path()
    seen = Path()
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self.answer(send=False)

    def do_GET(self) -> None:
        self.answer(send=True)

    def answer(self, *, send: bool) -> None:
        path = self.folder / self.path.lstrip("/")
        if not path.is_file():
            self.send_error(HTTPStatus.NOT_FOUND)
            return
        content = path.read_bytes()
        begin, end, status = 0, len(content), HTTPStatus.OK
        if (asked := self.headers.get("Range")) is not None:
            first, _, last = asked.removeprefix("bytes=").partition("-")
            begin, end, status = (
                int(first),
                min(int(last or len(content)) + 1, len(content)),
                HTTPStatus.PARTIAL_CONTENT,
            )
        if send:
            with open(self.seen, "a", encoding="utf-8") as file:
                file.write(f"{path.name} {begin} {end}\n")
        self.send_response(status)
        self.send_header("Content-Length", str(end - begin))
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("ETag", f'"{path.stat().st_mtime_ns}"')
        if status == HTTPStatus.PARTIAL_CONTENT:
            self.send_header("Content-Range", f"bytes {begin}-{end - 1}/{len(content)}")
        self.end_headers()
        if send:
            self.wfile.write(content[begin:end])

    def log_message(self, *_: object) -> None:
        """Print nothing."""


class Server:
    """A server in another process."""

    def __init__(self, folder: Path, seen: Path) -> None:
        self.seen = seen
        words = [sys.executable, "-m", "tests.file_server", str(folder), str(seen)]
        self.process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True, cwd=ROOT)
        assert self.process.stdout is not None
        self.url = f"http://127.0.0.1:{int(self.process.stdout.readline())}"

    def downloads(self, name: str) -> int:
        """Return the bytes of a file that were asked for."""
        lines = self.seen.read_text().splitlines() if self.seen.exists() else []
        asked = [line.split() for line in lines if line.startswith(f"{name} ")]
        return sum(int(end) - int(begin) for _, begin, end in asked)

    def kill(self) -> None:
        """End the server at once."""
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()


@contextmanager
def serve(folder: Path, seen: Path) -> Iterator[Server]:
    """Serve a folder; requests are appended to the file `seen`."""
    server = Server(folder, seen)
    try:
        yield server
    finally:
        server.kill()


if __name__ == "__main__":
    Files.folder, Files.seen = Path(sys.argv[1]), Path(sys.argv[2])
    listening = ThreadingHTTPServer(("127.0.0.1", 0), Files)
    print(listening.server_port, flush=True)
    listening.serve_forever()
