"""The process that serves the metrics of a run to Prometheus, at http://ADDRESS:PORT/metrics.

    python -m unisono.metrics.exporter RUN ADDRESS PORT FACTS [CA CERT KEY]

With the three files, the page is at https://, and only for clients with a certificate of the authorities in CA.

The main process of a run starts it (train/recording/metrics_export.py): one for the run, which reads the timelines of
all ranks about once a second. It ends when its standard input ends.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import ssl
import sys
import threading
import time
from pathlib import Path
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import make_wsgi_app

from unisono.handshake.https_threads import IDLE_SECONDS, HttpsThreads
from unisono.metrics.prometheus_page import build_registry
from unisono.metrics.run_numbers import RunNumbers, TimelineFolder
from unisono.trackers.growing_file import input_ended

POLL_SECONDS = 1.0
"""Time between two looks at the timelines."""

PATIENCE = 3.0
"""Seconds to wait for the port: the exporter of a main process that has died is about to end."""


class MetricsServer(HttpsThreads, WSGIServer):
    """The server of the page. prometheus_client's own one waits for handshakes in its only accepting thread.

    Args:
        address: The address of an interface of this machine.
        port: The port; 0: any free one.
        tls: The context with the certificate of this host, for https; None: http.

    Raises:
        OSError: The port is in use, or the address is not of this host.
    """

    def __init__(self, address: str, port: int, tls: ssl.SSLContext | None = None) -> None:
        self.tls = tls
        kind = socket.SOCK_STREAM
        self.address_family, *_, place = socket.getaddrinfo(address, port, type=kind, flags=socket.AI_PASSIVE)[0]
        super().__init__((str(place[0]), int(place[1])), _Handler)


class _Handler(WSGIRequestHandler):
    timeout = IDLE_SECONDS

    def log_message(self, *args: object) -> None:
        """Log nothing."""


def serve(
    numbers: RunNumbers, facts: dict[str, str], lock: threading.Lock, address: str, port: int, *files: str
) -> MetricsServer:
    """Serve the page from a thread. Port 0: any that is free. `files`: CA, CERT and KEY, or none.

    Raises:
        OSError: The port is in use, or the address is not of this host.
    """
    tls = None
    if files:
        ca, cert, key = files
        tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=ca)
        tls.verify_mode = ssl.CERT_REQUIRED
        tls.load_cert_chain(cert, key)
    until = time.monotonic() + PATIENCE
    while True:
        try:
            server = MetricsServer(address, port, tls)
            break
        except OSError:
            if time.monotonic() > until or input_ended(0.1):
                raise
    server.set_app(make_wsgi_app(build_registry(numbers, facts, lock)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server


def main() -> None:
    """Serve the metrics of a run, as the module's docstring says."""
    run_dir, address, port, facts = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), json.loads(sys.argv[4])
    os.nice(10)  # training has precedence
    numbers, lock = RunNumbers(), threading.Lock()
    timelines = TimelineFolder(run_dir / "timeline", numbers)
    timelines.read()  # before the first answer, or else a counter would seem to jump
    try:
        serve(numbers, facts, lock, address, port, *sys.argv[5:])
    except OSError as error:
        with contextlib.suppress(OSError):
            print(
                f"Cannot serve metrics at {address}:{port}: {error.strerror or error}. Training continues without "
                f"them. For another port: --set metrics.port={port % 65535 + 1}",
                flush=True,
            )
        return
    while not input_ended(POLL_SECONDS):
        with lock:
            timelines.read()


if __name__ == "__main__":
    main()
