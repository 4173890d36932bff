"""Hosts on which every engine starts runs: ssh, torchrun, Slurm, pods as Kubernetes makes them, and Ray.

    head: commands, slurmctld      a, b, c, d: sshd, slurmd, torchrun or a pod

    with engine_hosts(tmp_path) as cluster:
        cluster.train("slurm", hosts=2, processes=3, run_dir="six")
        cluster.result("six")

Ray has a cluster of its own with as many nodes, which are raylets on this machine.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import yaml

from tests.cli.test_training import SCRIPT
from tests.clusters import ray_nodes, slurm_nodes
from tests.clusters.ray_nodes import RayNodes
from tests.clusters.slurm_nodes import SlurmNodes
from tests.network import ssh_hosts
from tests.network.hosts import ROOT, Host, hosts
from tests.network.pods import PodJob
from tests.network.ssh_hosts import SshHosts
from unisono.environment import inherited

NAMES = ("a", "b", "c", "d")
SECONDS = 200.0
VIRTUAL_RANKS = ("--set", "virtual_ranks=16")
"""Enough for three processes on each of four hosts."""
UNISONO = (sys.executable, "-P", "-m", "unisono.cli.main")


def missing() -> str:
    """Return the reason why this machine cannot have these engines, or an empty string."""
    return slurm_nodes.missing() or ssh_hosts.missing()


class EngineHosts:
    """Four hosts and a head, which share a folder.

    Args:
        head: where commands are typed.
        nodes: the hosts that train.
        folder: the shared folder, with train.py.
        stack: ends what is started.
    """

    def __init__(self, head: Host, nodes: list[Host], folder: Path, stack: ExitStack) -> None:
        self.head, self.nodes, self.folder, self._stack = head, nodes, folder, stack
        self._ray_nodes: RayNodes | None = None
        (folder / "train.py").write_text(
            "import time\nimport unisono\nsay = lambda text: print(text, flush=True)\n" + SCRIPT
        )
        self.slurm = SlurmNodes(head, nodes, folder, folder / ".slurm")
        ssh = SshHosts(nodes, folder / "ssh")
        wrapper = folder / "bin" / "ssh"
        wrapper.parent.mkdir()
        wrapper.write_text(f'#!/bin/sh\nexec /usr/bin/ssh -F {ssh.config} "$@"\n')
        wrapper.chmod(0o755)
        for host in (head, *nodes):  # Slurm's path is set already
            host.environment["PATH"] = f"{wrapper.parent}:{host.environment['PATH']}"
        self._environment = inherited({"PYTHONPATH": str(ROOT)})
        self.engines: dict[str, Callable[..., None]] = {
            "ssh": self._ssh,
            "torchrun": self._torchrun,
            "slurm": self._slurm,
            "kubernetes": self._kubernetes,
            "ray": self._ray,
        }

    def train(self, engine: str, *words: str, hosts: int, processes: int, run_dir: str) -> None:
        """Train to the end, with so many processes on each of the first hosts.

        Args:
            engine: its name.
            words: more words of the command.
            hosts: the number of hosts.
            processes: the number of processes on each.
            run_dir: the run directory, in the shared folder.
        """
        self.engines[engine](self.nodes[:hosts], processes, run_dir, *VIRTUAL_RANKS, *words)

    def alone(self, run_dir: str, *words: str) -> None:
        """Train with one process."""
        command = [sys.executable, "train.py", "--run-dir", run_dir, *VIRTUAL_RANKS, *words]
        self._finish([self._start(self.nodes[0], command)])

    def result(self, run_dir: str) -> dict[str, Any]:
        """Return result.json of a run."""
        found: dict[str, Any] = json.loads((self.folder / run_dir / "result.json").read_text())
        return found

    # -- engines

    def _ssh(self, nodes: Sequence[Host], processes: int, run_dir: str, *words: str) -> None:
        listed = ",".join(f"{host.name}:{processes}" for host in nodes)
        command = [*UNISONO, "run", "train.py", "--hosts", listed, "--run-dir", run_dir, *words]
        self._finish([self._start(self.head, command)])

    def _torchrun(self, nodes: Sequence[Host], processes: int, run_dir: str, *words: str) -> None:
        meet = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"{nodes[0].name}:29500", "--rdzv-id", run_dir]
        size = ["--nnodes", str(len(nodes)), "--nproc-per-node", str(processes)]
        command = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            *meet,
            *size,
            "train.py",
            "--run-dir",
            run_dir,
            *words,
        ]
        self._finish([self._start(host, command) for host in nodes])

    def _slurm(self, nodes: Sequence[Host], processes: int, run_dir: str, *words: str) -> None:
        size = ["--nodes", str(len(nodes)), "--ranks-per-node", str(processes)]
        given = ["--run-dir", run_dir, "--write", f"{run_dir}.sbatch", "--submit", "--json", *words]
        shown = json.loads(self.slurm.run(*UNISONO, "slurm", "train.py", *size, *given).stdout.splitlines()[-1])
        assert self.slurm.wait_for_end(str(shown["job"])) == "COMPLETED", self.slurm.logs()

    def _kubernetes(self, nodes: Sequence[Host], processes: int, run_dir: str, *words: str) -> None:
        size = ["--ranks", str(len(nodes) * processes), "--ranks-per-pod", str(processes)]
        given = ["--image", "test", "--claim", "runs", "--name", run_dir, "--run-dir", f"/run/volume/{run_dir}", *words]
        command = [*UNISONO, "kubernetes", "train.py", *size, *given]
        written = subprocess.run(
            command, cwd=self.folder, env=self._environment, capture_output=True, text=True, timeout=SECONDS
        )
        assert written.returncode == 0, written.stderr
        job = PodJob(list(yaml.safe_load_all(written.stdout)), nodes, image=self.folder, volume=self.folder)
        for index in range(len(nodes)):
            job.log(index).unlink(missing_ok=True)
            job.prepare(index)
            job.start(index)
        try:
            assert [job.wait(index) for index in range(len(nodes))] == [0] * len(nodes), job.text()
        finally:
            for host in nodes:  # the pods had names of their own
                host.run(["sh", "-c", f"echo {host.name} > /proc/sys/kernel/hostname"], check=True)

    def _ray(self, nodes: Sequence[Host], processes: int, run_dir: str, *words: str) -> None:
        if self._ray_nodes is None:
            cluster = ray_nodes.ray_nodes(self.folder, self.folder / ".token")
            self._ray_nodes = self._stack.enter_context(cluster)
        self._ray_nodes.keep_nodes(len(nodes))
        share = {1: "2", 2: "1", 3: "0.66"}[processes]  # of the two CPUs of a node
        size = ["--ranks", str(len(nodes) * processes), "--cpus-per-rank", share]
        done = self._ray_nodes.run("train.py", *size, "--run-dir", run_dir, *words, seconds=SECONDS)
        assert done.returncode == 0, done.stdout + done.stderr

    # -- processes

    def _start(self, host: Host, command: Sequence[str]) -> Any:
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        return host.start(command, cwd=self.folder, env=self._environment, **pipes)

    def _finish(self, running: Sequence[Any]) -> None:
        outputs = [process.communicate(timeout=SECONDS)[0] for process in running]
        assert [process.returncode for process in running] == [0] * len(running), outputs


@contextmanager
def engine_hosts(folder: Path) -> Iterator[EngineHosts]:
    """Start the hosts, and end all of their processes afterwards.

    Args:
        folder: a folder below /tmp, which all hosts see
    """
    with hosts(len(NAMES), head=True, shared=[folder]) as (head, *nodes), ExitStack() as stack:
        yield EngineHosts(head, nodes, folder, stack)
