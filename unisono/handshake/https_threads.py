"""Serve HTTP and HTTPS with a thread for each connection, in which the handshake of TLS waits, too.

A server that does handshakes in its only accepting thread can be stopped by one client that sends nothing.
"""

from __future__ import annotations

import ssl
from http.server import ThreadingHTTPServer
from typing import Any

IDLE_SECONDS = 10.0
"""A connection that sends or reads nothing for longer is closed, so that it does not hold a thread."""


class HttpsThreads(ThreadingHTTPServer):
    """A server with a thread for each connection.

    Attributes:
        tls: The context with the certificate of this host, for https; None: http.
    """

    request_queue_size = 128  # connections that may wait for the server
    tls: ssl.SSLContext | None = None

    def finish_request(self, request: Any, client_address: Any) -> None:
        """Serve a connection, after its handshake."""
        if self.tls is None:
            super().finish_request(request, client_address)
            return
        request.settimeout(IDLE_SECONDS)
        with self.tls.wrap_socket(request, server_side=True) as secured:
            super().finish_request(secured, client_address)

    def handle_error(self, request: object, client_address: object) -> None:
        """Ignore connections that a client has closed, and handshakes that failed."""
