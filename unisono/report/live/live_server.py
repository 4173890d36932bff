"""Serve the live page over HTTP: a page, and data that it asks for once a second.

    GET  /?token=T[&run=NAME...]              the page
    GET  /data?token=T[&run=NAME...]&since=V  its data if they are newer than version V, else 204
    POST /stop?token=S                        save and end the run

Protection: the server listens on the loopback interface unless another address is given. Each request needs a token
(else 401), and names this machine in its header Host (else 403), so that no other web site can ask by a host name of
its own (https://en.wikipedia.org/wiki/DNS_rebinding). A token has a role: T may look, and S may also stop the run. With
T, /stop is answered with 403. Tokens are compared in constant time, each time with both.
"""

from __future__ import annotations

import gzip
import hmac
import ipaddress
import secrets
import socket
import ssl
import time
from collections.abc import Callable
from contextlib import suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Literal
from urllib.parse import parse_qs, urlencode, urlsplit

from unisono.handshake.https_threads import IDLE_SECONDS, HttpsThreads
from unisono.report.live.live_data import LiveData
from unisono.report.report_page import page_around

PART_BYTES = 1 << 16
"""Bytes that a browser must read within this time, so that a slow one gets its answer."""


REFUSAL_SECONDS = 60.0
"""Seconds in which refusals of one address for one reason are noted once."""

MOST_REFUSALS = 1000
"""Addresses that are remembered for this."""

Role = Literal["look", "stop"]

Stop = Callable[[str], str]
"""Stop the run, for the address that asked. Return why that is not possible; "" if it worked."""

Note = Callable[[str, str, str], None]
"""Note an event: "refusal" or "stop", the address of the client, and the reason."""


def cannot_stop(address: str) -> str:
    """Refuse a stop."""
    return "This page cannot stop the run. Next: unisono watch RUN --stop"


def not_noted(event: str, address: str, reason: str) -> None:
    """Note nothing."""


class Tokens:
    """The tokens of a server, one for each role.

    Args:
        may_stop: Whether there is one with which the run can be stopped.
    """

    def __init__(self, *, may_stop: bool) -> None:
        self.look = secrets.token_urlsafe(18)
        self.stop = secrets.token_urlsafe(18) if may_stop else ""

    def role_of(self, given: str) -> Role | None:
        """Return the role of a token; None: it is none of ours. The time depends on no token."""
        looks = hmac.compare_digest(given.encode(), self.look.encode())
        stops = hmac.compare_digest(given.encode(), self.stop.encode())
        if stops and self.stop:
            return "stop"
        return "look" if looks else None


class Refusals:
    """The refusals of a server, of which each address causes one note a minute for each reason.

    Args:
        note: Notes one.
        now: Returns seconds of a monotonic clock.
    """

    def __init__(self, note: Note, now: Callable[[], float] = time.monotonic) -> None:
        self._note, self._now = note, now
        self._noted: dict[tuple[str, str], float] = {}

    def __call__(self, address: str, reason: str) -> None:
        """Note a refusal, unless the same one was noted a moment ago."""
        now = self._now()
        before = self._noted.get((address, reason))
        if before is not None and now - before < REFUSAL_SECONDS:
            return
        if len(self._noted) >= MOST_REFUSALS:
            self._noted.clear()
        self._noted[address, reason] = now
        self._note("refusal", address, reason)


class LiveServer(HttpsThreads):
    """The server of a run directory, or of a folder of them.

    Args:
        path: The run directory, or the folder.
        address: The address of an interface of this machine.
        port: The port; 0: any free one.
        stop: Stops the run, for requests with the token for it; by default there is no such token.
        note: Notes refusals and stops.
        tls: The context with the certificate of this host, for https; None: http.

    Raises:
        OSError: The address or the port cannot be used.
    """

    allow_reuse_address = True

    def __init__(
        self,
        path: Path,
        address: str = "127.0.0.1",
        port: int = 0,
        *,
        stop: Stop = cannot_stop,
        note: Note = not_noted,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self.tls = tls
        self.stop, self.note, self.refused = stop, note, Refusals(note)
        self.tokens = Tokens(may_stop=stop is not cannot_stop)
        self.data = LiveData(path, f"?{urlencode({'token': self.tokens.look})}")
        self.names = {"localhost", address.lower(), socket.gethostname().lower(), socket.getfqdn().lower()}
        if ":" in address:
            self.address_family = socket.AF_INET6
        super().__init__((address, port), _Handler)

    @property
    def url(self) -> str:
        """The address of the page, with the token that may look."""
        return self._url(self.tokens.look)

    @property
    def stop_url(self) -> str:
        """The address of the page, with the token that may stop the run; "" if there is none."""
        return self._url(self.tokens.stop) if self.tokens.stop else ""

    def _url(self, token: str) -> str:
        host = str(self.server_address[0])
        shown = {"0.0.0.0": socket.gethostname(), "::": socket.gethostname()}.get(host, host)
        scheme = "http" if self.tls is None else "https"
        return f"{scheme}://{f'[{shown}]' if ':' in shown else shown}:{self.server_port}/?{urlencode({'token': token})}"

    def server_bind(self) -> None:
        """Bind without looking up the host's name, which may take seconds."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])

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
        place, query, role = self._admitted()
        if role is None:
            return
        if place not in ("/", "/data"):
            self._end(HTTPStatus.NOT_FOUND)
        else:
            self._answer(place, query.get("run", []), query.get("since", [""])[-1], role)

    def do_POST(self) -> None:
        self.close_connection = True
        with suppress(ValueError):  # of the length
            length = int(self.headers.get("Content-Length", "0"))
            self.rfile.read(max(0, min(length, PART_BYTES)))  # or the kernel may discard the answer at the close
        place, _, role = self._admitted()
        if role is None:
            return
        if place != "/stop":
            self._end(HTTPStatus.NOT_FOUND)
        elif role != "stop":
            self.server.refused(self.client_address[0], "a stop with a token that may only look")
            self._end(HTTPStatus.FORBIDDEN, b"This address may look, and not stop the run.\n")
        elif why := self.server.stop(self.client_address[0]):
            self._end(HTTPStatus.CONFLICT, f"{why}\n".encode())
        else:
            self.server.note("stop", self.client_address[0], "the live page")
            self._end(HTTPStatus.OK, b"The run finishes its step, saves and ends.\n")

    def _admitted(self) -> tuple[str, dict[str, list[str]], Role | None]:
        """Return the path and the query of a request, and the role of its token. Answer those that have none."""
        try:
            place = urlsplit(self.path)
            query = parse_qs(place.query)
            allowed = self.server.names_this_machine(self.headers.get("Host", ""))
        except ValueError:
            self._end(HTTPStatus.BAD_REQUEST)
            return "", {}, None
        role = self.server.tokens.role_of(query.get("token", [""])[-1])
        if not allowed:
            self.server.refused(self.client_address[0], "a host name that is not of this machine")
            self._end(HTTPStatus.FORBIDDEN, b"This server does not answer to that host name.\n")
            role = None
        elif role is None:
            self.server.refused(self.client_address[0], "no valid token")
            self._end(HTTPStatus.UNAUTHORIZED, b"The address has no valid token. It is printed by: unisono watch\n")
        return place.path, query, role

    def _answer(self, path: str, names: list[str], since: str, role: Role) -> None:
        view = self.server.data.view(names)
        if view is None:
            self._end(HTTPStatus.NOT_FOUND, b"There is no such run.\n")
            return
        answer = view.answer()
        if path == "/":
            page = page_around(answer.title, answer.text, live=True, stops=role == "stop")
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
