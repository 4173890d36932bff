"""A real cluster of Ray on this machine: a head without CPUs, and nodes that are raylets of their own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]

UNISONO = (sys.executable, "-P", "-m", "unisono.cli.main")
SMALL: Mapping[str, Any] = {"object_store_memory": 80 * 2**20}


def missing() -> str:
    """Return why there can be no cluster here; "" if there can."""
    return "" if find_spec("ray") else "Ray is not installed (pip install 'unisono[ray]')"


def patiently(begin: Callable[[], Any], attempts: int = 3) -> Any:
    """Call a function that starts a part of the cluster. Ray gives it 30 s, which is little on a busy machine."""
    for left in reversed(range(attempts)):
        try:
            return begin()
        except Exception:
            if not left:
                raise
    raise AssertionError("no attempts")


class RayNodes:
    """A cluster.

    Args:
        work: the folder in which commands are typed.
    """

    def __init__(self, work: Path) -> None:
        from ray.cluster_utils import Cluster

        self.work = work
        head = {"num_cpus": 0, "include_dashboard": False, **SMALL}
        self._cluster = patiently(lambda: Cluster(initialize_head=True, head_node_args=head))
        self.address = str(self._cluster.address)
        self._nodes: list[Any] = []

    def keep_nodes(self, count: int) -> None:
        """Add nodes with two CPUs each until there are this many."""
        while len(self._nodes) < count:
            self._nodes.append(patiently(lambda: self._cluster.add_node(num_cpus=2, **SMALL)))

    def kill_raylet(self, pid: int) -> None:
        """Kill a raylet, and reap it, as the process that started a raylet does elsewhere."""
        node = next(node for node in self._nodes if pid in _pids(node))
        os.kill(pid, signal.SIGKILL)
        next(info for info in _processes(node) if info.process.pid == pid).process.wait()
        self._nodes.remove(node)

    def remove_node(self, pid: int) -> None:
        """Remove the node of a raylet from the cluster."""
        node = next(node for node in self._nodes if pid in _pids(node))
        self._cluster.remove_node(node)
        self._nodes.remove(node)

    def words(self, *words: str) -> list[str]:
        """Return a command of `unisono ray` with the address of this cluster."""
        return [*UNISONO, "ray", *words, "--address", self.address]

    def run(self, *words: str, seconds: float = 240) -> subprocess.CompletedProcess[str]:
        """Run a command of `unisono ray` to its end."""
        return subprocess.run(self.words(*words), cwd=self.work, capture_output=True, text=True, timeout=seconds)

    def logs(self) -> str:
        """Return what Ray has in the logs of workers."""
        folder = Path(self._cluster.head_node.get_session_dir_path(), "logs")
        return "".join(path.read_text(errors="replace") for path in folder.glob("worker-*.out"))

    def close(self) -> None:
        """End the cluster."""
        self._cluster.shutdown()


def _processes(node: Any) -> list[Any]:
    return [info for infos in node.all_processes.values() for info in infos]


def _pids(node: Any) -> list[int]:
    return [info.process.pid for info in _processes(node)]


@contextmanager
def ray_nodes(work: Path, token: Path) -> Iterator[RayNodes]:
    """Yield a cluster. `token`: the file for its token; Ray would write it to the home folder."""
    os.environ["RAY_AUTH_TOKEN_PATH"] = str(token)
    try:
        nodes = RayNodes(work)
        try:
            yield nodes
        finally:
            nodes.close()
    finally:
        del os.environ["RAY_AUTH_TOKEN_PATH"]


def chain_of(run_dir: str, rank: int) -> list[psutil.Process]:
    """Return the process of a rank, its agent, the worker of its actor, and its raylet."""
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            words = process.cmdline()
            of_run = "unisono.launcher.worker_main" in words and f"--run-dir={run_dir}" in words
            if of_run and f'"rank": {rank},' in " ".join(words):
                return [process, *process.parents()[:3]]
    raise AssertionError(f"no process of rank {rank}")


def left_behind(run_dir: str) -> list[list[str]]:
    """Return the commands of the run that are still running, after a moment."""
    deadline = time.monotonic() + 10
    while (found := _commands_of(run_dir)) and time.monotonic() < deadline:
        time.sleep(0.1)
    return found


def _commands_of(run_dir: str) -> list[list[str]]:
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            words = process.cmdline()
            agent = "unisono.clusters.ray.actor_agent" in words and process.status() != psutil.STATUS_ZOMBIE
            if agent or f"--run-dir={run_dir}" in words:
                found.append(words)
    return found


def wait_for(condition: Callable[[], bool], what: str, seconds: float = 120) -> None:
    """Wait until a condition holds."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.1)


def start(words: Sequence[str], work: Path, output: Path) -> subprocess.Popen[bytes]:
    """Start a command, with its output in a file."""
    with output.open("wb") as file:
        return subprocess.Popen(words, cwd=work, stdout=file, stderr=subprocess.STDOUT)
