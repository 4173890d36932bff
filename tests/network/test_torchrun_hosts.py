"""torchrun on several hosts, static and elastic: a host leaves and comes back. The bits are those of one process."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.network import hosts as namespaces
from tests.network.hosts import ROOT, Host, HostProcess
from tests.network.ssh_cluster import result_of, step_is_done, write_script
from unisono.environment import inherited

reason = namespaces.missing()
pytestmark = [pytest.mark.skipif(bool(reason), reason=reason), pytest.mark.slow]

SECONDS = 240.0
ENVIRONMENT = {
    "PYTHONPATH": str(ROOT),
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",  # an agent that comes later would wait for the store of the first one
}


class Machines(NamedTuple):
    """Hosts that share a folder with the script, and the fingerprint of one process."""

    hosts: list[Host]
    folder: Path
    fingerprint: str

    def start(self, number: int, *words: str) -> tuple[HostProcess, Path]:
        """Start torchrun on a host. Return it, and the file with its output."""
        output = self.folder / f"output-{time.monotonic_ns()}"
        command = [sys.executable, "-P", "-m", "torch.distributed.run", *words]
        with output.open("w") as file:
            streams = {"stdout": file, "stderr": subprocess.STDOUT}
            return self.hosts[number].start(command, cwd=self.folder, env=inherited(ENVIRONMENT), **streams), output

    def elastic(self, number: int, run_dir: str, *more: str) -> tuple[HostProcess, Path]:
        """Start an agent of c10d's rendezvous, which host a has, for one to three hosts."""
        point = ["--rdzv-backend", "c10d", "--rdzv-endpoint", "a:29500", "--rdzv-id", run_dir]
        limits = ["--nnodes", "1:3", "--nproc-per-node", "1", "--max-restarts", "9"]
        script = ["script.py", "--run-dir", run_dir, "--autoresume", "--set", "pause=0.6", *more]
        return self.start(number, *limits, *point, *script)

    def wait_for_step(self, run_dir: str, step: int) -> None:
        """Wait until the timeline of rank 0 has this step."""
        until = time.monotonic() + SECONDS
        while not step_is_done(self.folder / run_dir, step):
            assert time.monotonic() < until
            time.sleep(0.1)


@pytest.fixture(scope="module")
def machines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machines]:
    folder = tmp_path_factory.mktemp("shared")
    write_script(folder)
    with namespaces.hosts(3, shared=[folder]) as made:
        words = [sys.executable, "-P", "script.py", "--run-dir", "whole"]
        made[0].run(words, cwd=folder, env=inherited({"PYTHONPATH": str(ROOT)}), check=True, timeout=SECONDS)
        yield Machines(made, folder, result_of(folder / "whole")["weights_sha256"])


def test_two_static_hosts_with_two_processes_each(machines: Machines) -> None:
    fixed = ["--nnodes", "2", "--nproc-per-node", "2", "--master-addr", "a", "--master-port", "29500"]
    started = [machines.start(n, *fixed, "--node-rank", str(n), "script.py", "--run-dir", "static") for n in range(2)]
    for process, output in started:
        assert process.wait(SECONDS) == 0, output.read_text()
    found = result_of(machines.folder / "static")
    assert (found["ranks"], found["weights_sha256"]) == (4, machines.fingerprint)


@pytest.mark.timeout(600)
def test_an_elastic_host_leaves_and_comes_back(machines: Machines) -> None:
    """The host is powered off: no connection ends, and its peers notice its silence within the limit."""
    c = machines.hosts[2]
    started = [machines.elastic(n, "elastic") for n in range(3)]
    machines.wait_for_step("elastic", 4)
    c.kill()
    off = time.monotonic()
    try:
        while "is gone or silent" not in "".join(output.read_text() for _, output in started[:2]):
            assert time.monotonic() - off < 45.0
            time.sleep(0.2)
        machines.wait_for_step("elastic", 8)
    finally:
        c.boot()
    started[2] = machines.elastic(2, "elastic")
    for process, output in started:
        assert process.wait(SECONDS) == 0, output.read_text()
    found = result_of(machines.folder / "elastic")
    assert found["weights_sha256"] == machines.fingerprint
    assert found["resumed_at"] >= 4


@pytest.mark.timeout(600)
def test_processes_of_an_elastic_run_notice_a_pulled_cable(machines: Machines) -> None:
    b = machines.hosts[1]
    started = [machines.elastic(n, "cable") for n in range(2)]
    machines.wait_for_step("cable", 4)
    b.pull()
    try:
        assert started[0][0].wait(SECONDS) == 0, started[0][1].read_text()
        assert "is gone or silent" in started[0][1].read_text()
        assert result_of(machines.folder / "cable")["weights_sha256"] == machines.fingerprint
    finally:
        b.plug()
        started[1][0].kill()
