"""A real server of MLflow."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import psutil  # type: ignore[import-untyped]
import pytest

from unisono.environment import inherited

needs_server = pytest.mark.skipif(
    not all(map(find_spec, ("mlflow", "sqlalchemy", "alembic", "graphene", "flask"))),
    reason="a server needs: pip install mlflow-skinny sqlalchemy alembic graphene flask flask-cors",
)


@contextmanager
def mlflow_server(folder: Path) -> Iterator[str]:
    """Run a server with a database in a new folder. Yield its address."""
    folder.mkdir()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    database, artifacts = f"sqlite:///{folder}/server.db", str(folder / "artifacts")
    words = ["--port", str(port), "--backend-store-uri", database, "--artifacts-destination", artifacts]
    quiet = {"MLFLOW_DISABLE_TELEMETRY": "true", "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
    with (folder / "server.log").open("w") as log:
        server = subprocess.Popen(
            [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--workers", "1", *words],
            env=inherited({**quiet, "HOME": str(folder)}),
            cwd=folder,
            stdout=log,
            stderr=log,
        )
    try:
        until = time.monotonic() + 120
        while True:
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5).close()
                break
            except OSError:
                assert server.poll() is None, (folder / "server.log").read_text()
                assert time.monotonic() < until, "the server does not answer"
                time.sleep(0.2)
        yield f"http://127.0.0.1:{port}"
    finally:
        for each in [*psutil.Process(server.pid).children(recursive=True), psutil.Process(server.pid)]:
            each.kill()
        server.wait()
