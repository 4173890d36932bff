"""Train on two sites in network namespaces with a slow link: bytes sent, and bits of the result."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.sites import COMMON, EXCHANGES, train_locally, train_over_link
from benchmarks.thin_line import ThinLine, address, missing

reason = missing()
pytestmark = pytest.mark.skipif(bool(reason), reason=reason)

SERVER = """
import socket, sys
server = socket.create_server((sys.argv[1], 7007))
client, _ = server.accept()
while data := client.recv(1 << 20):
    client.sendall(data)
"""


def test_link_has_its_delay_and_counts_bytes() -> None:
    """Client and server are programs of their own, because each needs its network namespace."""
    client = f"""
import socket, time
for _ in range(100):
    try:
        connection = socket.create_connection(({address(0)!r}, 7007))
        break
    except OSError:
        time.sleep(0.05)
connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
start = time.perf_counter()
connection.sendall(b"?")
connection.recv(1)
print(time.perf_counter() - start)
"""
    with ThinLine(delay_seconds=0.02, bits_per_second=100e6) as line:
        server = subprocess.Popen([*line.inside(0), sys.executable, "-c", SERVER, address(0)])
        command = [*line.inside(1), sys.executable, "-c", client]
        process = subprocess.run(command, capture_output=True, text=True, check=True)
        server.wait(10)
        counts = line.counts()
    assert float(process.stdout) >= 0.04
    assert all(100 < count < 10_000 for count in counts)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_diloco_sends_less_and_does_not_depend_on_the_link(tmp_path: Path) -> None:
    small: dict[str, Any] = {**COMMON, "validate": False, "batch": 8}
    tree = train_over_link({**small, "steps": 6}, tmp_path / "tree")
    diloco = {**small, **EXCHANGES["DiLoCo, 8 bits"], "steps": 101}
    remote = train_over_link(diloco, tmp_path / "remote")
    local = train_locally(diloco, 2, tmp_path / "local")
    assert remote["weights_sha256"] == local["weights_sha256"]
    assert tree["line_bytes_per_step"] > 100 * remote["line_bytes_per_step"]
