"""Serve the live page over HTTP: a page, and data that it asks for once a second.

    GET /?token=T[&run=NAME...]              the page
    GET /data?token=T[&run=NAME...]&since=V  its data if they are newer than version V, else 204

Protection: the server listens on the loopback interface unless another address is given. Each request needs the token
of the server (else 401), and names this machine in its header Host (else 403), so that no other web site can ask by a
host name of its own (https://en.wikipedia.org/wiki/DNS_rebinding).
"""

from __future__ import annotations

import gzip
import hmac
import ipaddress
import secrets
import socket
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlencode, urlsplit

from unisono.report.live.live_data import LiveData
from unisono.report.report_page import page_around

IDLE_SECONDS = 10.0
"""A connection that sends or reads nothing for longer is closed, so that it does not hold a thread."""

PART_BYTES = 1 << 16
"""Bytes that a browser must read within this time, so that a slow one gets its answer."""


class LiveServer(ThreadingHTTPServer):
    """The server of a run directory, or of a folder of them.

    Args:
        path: The run directory, or the folder.
        address: The address of an interface of this machine.
        port: The port; 0: any free one.

    Raises:
        OSError: The address or the port cannot be used.
    """

    daemon_threads = True
    request_queue_size = 128  # connections that may wait for the server
    allow_reuse_address = True

    def __init__(self, path: Path, address: str = "127.0.0.1", port: int = 0) -> None:
        self.token = secrets.token_urlsafe(18)
        self.data = LiveData(path, f"?{urlencode({'token': self.token})}")
        self.names = {"localhost", address.lower(), socket.gethostname().lower(), socket.getfqdn().lower()}
        if ":" in address:
            self.address_family = socket.AF_INET6
        super().__init__((address, port), _Handler)

    @property
    def url(self) -> str:
        """The address of the page, with the token."""
        host = str(self.server_address[0])
        shown = {"0.0.0.0": socket.gethostname(), "::": socket.gethostname()}.get(host, host)
        return (
            f"http://{f'[{shown}]' if ':' in shown else shown}:{self.server_port}/?{urlencode({'token': self.token})}"
        )

    def server_bind(self) -> None:
        """Bind without looking up the host's name, which may take seconds."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])

    def handle_error(self, request: object, client_address: object) -> None:
        """Ignore connections that a browser has closed."""

    def names_this_machine(self, host: str) -> bool:
        """Return whether the header Host is an IP address or a name of this machine, with any port (of a tunnel)."""
        name = urlsplit(f"//{host}").hostname or ""
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return name in self.names
        return True


class _Handler(BaseHTTPRequestHandler):
    server: LiveServer
    protocol_version = "HTTP/1.1"
    server_version, sys_version = "unisono", ""
    timeout = IDLE_SECONDS

    def do_GET(self) -> None:
        try:
            place = urlsplit(self.path)
            query = parse_qs(place.query)
            allowed = self.server.names_this_machine(self.headers.get("Host", ""))
        except ValueError:
            self._end(HTTPStatus.BAD_REQUEST)
            return
        given = query.get("token", [""])[-1]
        if not allowed:
            self._end(HTTPStatus.FORBIDDEN, b"This server does not answer to that host name.\n")
        elif not hmac.compare_digest(given.encode(), self.server.token.encode()):
            self._end(HTTPStatus.UNAUTHORIZED, b"The address has no valid token. It is printed by: unisono watch\n")
        elif place.path not in ("/", "/data"):
            self._end(HTTPStatus.NOT_FOUND)
        else:
            self._answer(place.path, query.get("run", []), query.get("since", [""])[-1])

    def _answer(self, path: str, names: list[str], since: str) -> None:
        view = self.server.data.view(names)
        if view is None:
            self._end(HTTPStatus.NOT_FOUND, b"There is no such run.\n")
            return
        answer = view.answer()
        if path == "/":
            page = page_around(answer.title, answer.text, live=True)
            self._end(HTTPStatus.OK, page.encode(errors="replace"), "text/html; charset=utf-8")
        elif since == answer.version:
            self._end(HTTPStatus.NO_CONTENT)
        else:
            self._end(HTTPStatus.OK, answer.text.encode(), "application/json", answer.packed)

    def _end(self, status: HTTPStatus, body: bytes = b"", kind: str = "text/plain", packed: bytes = b"") -> None:
        """Send an answer, compressed if the browser takes that; `packed` is the compressed body, if it is known."""
        is_packed = len(body) > 1000 and "gzip" in self.headers.get("Accept-Encoding", "")
        content = (packed or gzip.compress(body, 3)) if is_packed else body
        self.send_response(status)
        if status is not HTTPStatus.NO_CONTENT:
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(content)))
        if is_packed:
            self.send_header("Content-Encoding", "gzip")
        for name, value in (
            ("Cache-Control", "no-store"),
            ("Content-Security-Policy", "frame-ancestors 'none'"),
            ("Referrer-Policy", "no-referrer"),
            ("X-Content-Type-Options", "nosniff"),
        ):
            self.send_header(name, value)
        self.end_headers()
        for start in range(0, len(content), PART_BYTES):
            self.wfile.write(content[start : start + PART_BYTES])

    def log_message(self, format: str, *arguments: object) -> None:  # noqa: A002  (as the base class names it)
        """Print nothing for a request."""
