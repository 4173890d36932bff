"""A head and hosts with ssh servers, on which a test types `unisono run --hosts`."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from tests.cli.test_training import SCRIPT
from tests.network.hosts import ROOT, Host, HostProcess
from tests.network.ssh_hosts import SshHosts
from tests.network.test_hosts import processes_of
from unisono.environment import inherited, variables

SECONDS = 120.0


def write_script(folder: Path) -> None:
    """Write the script of tests/cli/test_training.py, as script.py."""
    (folder / "script.py").write_text(
        "import time\nimport unisono\nsay = lambda text: print(text, flush=True)\n" + SCRIPT
    )


def result_of(run_dir: Path) -> dict[str, Any]:
    """Return the content of result.json."""
    found: dict[str, Any] = json.loads((run_dir / "result.json").read_text())
    return found


def step_is_done(run_dir: Path, step: int) -> bool:
    """Return whether the timeline of rank 0 has this step."""
    timeline = run_dir / "timeline" / "rank-0.jsonl"
    return timeline.exists() and f'"step":{step},' in timeline.read_text()


class Cluster:
    """A head and three hosts with ssh servers, which share a folder.

    Attributes:
        head: where `unisono run` is typed.
        others: the hosts, by name.
        folder: the shared folder.
        python_path: the folders of PYTHONPATH.
    """

    def __init__(self, head: Host, others: list[Host], folder: Path) -> None:
        self.head, self.folder = head, folder
        self.python_path = [ROOT]
        self.others = {host.name: host for host in others}
        self.ssh = SshHosts(others, folder / "ssh")
        wrapper = folder / "bin" / "ssh"
        wrapper.parent.mkdir()
        wrapper.write_text(f'#!/bin/sh\nexec /usr/bin/ssh -F {self.ssh.config} "$@"\n')
        wrapper.chmod(0o755)
        write_script(folder)

    def start(self, *words: str, script: str = "script.py", host: Host | None = None) -> HostProcess:
        """Start `unisono run` in the head."""
        path = f"{self.folder / 'bin'}:{variables(['PATH'])['PATH']}"
        return (host or self.head).start(
            [sys.executable, "-P", "-m", "unisono.cli.main", "run", script, *words],
            cwd=self.folder,
            env=inherited({"PATH": path, "PYTHONPATH": ":".join(map(str, self.python_path))}),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )

    def run(self, *words: str, **more: Any) -> tuple[int, str]:
        """Run it to its end. Return its exit status and what it prints on standard error."""
        process = self.start(*words, **more)
        _, err = process.communicate(timeout=SECONDS)
        return process.returncode, err

    def result(self, name: str) -> dict[str, Any]:
        return result_of(self.folder / name)

    def wait_for_step(self, name: str, step: int) -> None:
        """Wait until the timeline of rank 0 has this step."""
        until = time.monotonic() + SECONDS
        while not step_is_done(self.folder / name, step):
            assert time.monotonic() < until
            time.sleep(0.05)


def left(cluster: Cluster) -> list[str]:
    """Return the command lines of processes of Unisono on all hosts that run."""
    found = []
    for host in (cluster.head, *cluster.others.values()):
        if not Path(f"/proc/{host.pid}").exists():
            continue
        for pid in processes_of(host):
            with contextlib.suppress(OSError):
                found.append(Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode())
    return [line for line in found if "unisono." in line]


def wait_until_nothing_is_left(cluster: Cluster, seconds: float) -> None:
    until = time.monotonic() + seconds
    while found := left(cluster):
        assert time.monotonic() < until, found
        time.sleep(0.1)
