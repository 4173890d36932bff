"""Two sites in two network namespaces, joined by a thin line: what travels, and that nothing else has changed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.sites import COMMON, WAYS, here, on_the_line
from benchmarks.thin_line import ThinLine, address, missing

why = missing()
pytestmark = pytest.mark.skipif(bool(why), reason=why)

ANSWER = """
import socket, sys
server = socket.create_server((sys.argv[1], 7007))
caller, _ = server.accept()
while data := caller.recv(1 << 20):
    caller.sendall(data)
"""


def test_the_line_is_as_slow_as_it_is_said_to_be_and_counts() -> None:
    """From this side: a namespace of its own is needed to be there, so a small program asks."""
    ask = f"""
import socket, time
for _ in range(100):
    try:
        line = socket.create_connection(({address(0)!r}, 7007))
        break
    except OSError:
        time.sleep(0.05)
line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
began = time.perf_counter()
line.sendall(b"?")
line.recv(1)
print(time.perf_counter() - began)
"""
    with ThinLine(delay_seconds=0.02, bits_per_second=100e6) as line:
        there = subprocess.Popen([*line.inside(0), sys.executable, "-c", ANSWER, address(0)])
        said = subprocess.run([*line.inside(1), sys.executable, "-c", ask], capture_output=True, text=True, check=True)
        there.wait(10)
        counts = line.counts()
    assert float(said.stdout) >= 0.04
    assert all(100 < count < 10_000 for count in counts)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_sites_send_a_hundredth_and_have_the_bits_of_sites_without_a_line(tmp_path: Path) -> None:
    small: dict[str, Any] = {**COMMON, "validate": False, "batch": 8}
    tree = on_the_line({**small, "steps": 6}, tmp_path / "tree")
    sites = {**small, **WAYS["DiLoCo, 8 bits"], "steps": 101}
    apart = on_the_line(sites, tmp_path / "apart")
    together = here(sites, 2, tmp_path / "together")
    assert apart["weights_sha256"] == together["weights_sha256"]
    assert tree["line_bytes_per_step"] > 100 * apart["line_bytes_per_step"]
