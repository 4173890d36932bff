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
import sys
import threading
import time
from pathlib import Path
from typing import Any
from wsgiref.simple_server import WSGIServer

from prometheus_client import start_http_server

from unisono.metrics.prometheus_page import build_registry
from unisono.metrics.run_numbers import RunNumbers, TimelineFolder
from unisono.trackers.growing_file import input_ended

POLL_SECONDS = 1.0
"""Time between two looks at the timelines."""

PATIENCE = 3.0
"""Seconds to wait for the port: the exporter of a main process that has died is about to end."""


def serve(
    numbers: RunNumbers, facts: dict[str, str], lock: threading.Lock, address: str, port: int, *files: str
) -> WSGIServer:
    """Serve the page from a thread. Port 0: any that is free. `files`: CA, CERT and KEY, or none.

    Raises:
        OSError: The port is in use, or the address is not of this host.
    """
    registry = build_registry(numbers, facts, lock)
    secured: dict[str, Any] = {}
    if files:
        ca, cert, key = files
        secured = {"client_cafile": ca, "certfile": cert, "keyfile": key, "client_auth_required": True}
    until = time.monotonic() + PATIENCE
    while True:
        try:
            return start_http_server(port, address, registry, **secured)[0]
        except OSError:
            if time.monotonic() > until or input_ended(0.1):
                raise


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
