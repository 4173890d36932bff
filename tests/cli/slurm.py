"""A private Slurm for tests: one host, daemons in the foreground, all its files in one temporary folder.

    munged (authentication, with a private key) <--- slurmctld (the queue) <---> slurmd (this host, with 8 CPUs)

It does not touch a Slurm of the system: its ports are free ones, and SLURM_CONF selects it for every command.
"""

from __future__ import annotations

import contextlib
import getpass
import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psutil  # type: ignore[import-untyped]

from tests.cli.command import ROOT
from unisono import environment

NEEDED = ("munged", "slurmctld", "slurmd", "srun", "sbatch", "scontrol", "squeue", "scancel", "sinfo")
SBIN = "/usr/sbin:/sbin"  # Debian's folder for daemons, which need not be on the path
PATIENCE_SECONDS = 120.0

CONF = """\
ClusterName=private
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={queue}
FirstJobId={queue}
SlurmdPort={node}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SwitchType=switch/none
MailProg=/bin/true
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
ReturnToService=2
JobRequeue=1
KillWait=10
NodeName={host} NodeAddr=127.0.0.1 CPUs=8 State=UNKNOWN
PartitionName=all Nodes={host} Default=YES MaxTime=INFINITE State=UP OverSubscribe=FORCE:4
"""


def missing_programs() -> str:
    """Return the reason why Slurm cannot run on this machine, or an empty string."""
    path = os.pathsep.join([*environment.variables(["PATH"]).values(), SBIN])
    lacking = [name for name in NEEDED if shutil.which(name, path=path) is None]
    return f"Slurm is not here ({', '.join(lacking)}): Debian's slurm-wlm and munge have it" if lacking else ""


@dataclass
class Slurm:
    """A running Slurm."""

    folder: Path  # files of the daemons
    work: Path  # the working directory of commands
    daemons: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def environment(self) -> dict[str, str]:
        path = os.pathsep.join([*environment.variables(["PATH"]).values(), SBIN])
        return environment.inherited(
            {"SLURM_CONF": str(self.folder / "slurm.conf"), "PYTHONPATH": str(ROOT), "PATH": path}
        )

    def run(self, *words: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        ended = subprocess.run(
            words, cwd=self.work, env=self.environment(), capture_output=True, text=True, timeout=PATIENCE_SECONDS
        )
        assert not check or ended.returncode == 0, f"{words}: {ended.stdout}{ended.stderr}"
        return ended

    def submit(self, script: str, *words: str) -> str:
        """Submit a batch script and return the number of the job; its output is in job-NUMBER.out."""
        file = self.work / "job.sh"
        file.write_text(f"#!/bin/bash\n{script}\n")
        more = ["--open-mode=append", "--output=job-%j.out"]
        return self.run("sbatch", "--parsable", *more, *words, file.name).stdout.strip()

    def state(self, job: str) -> str:
        """Return the state of a job: PENDING, RUNNING, COMPLETED, ..."""
        return self.run("scontrol", "--oneliner", "show", "job", job).stdout.partition("JobState=")[2].split()[0]

    def wait_for(self, job: str, *states: str) -> str:
        until = time.monotonic() + PATIENCE_SECONDS
        while (state := self.state(job)) not in states:
            assert time.monotonic() < until, f"job {job} is {state}: {self.output(job)}"
            time.sleep(0.2)
        return state

    def wait_for_end(self, job: str) -> str:
        """Wait for the end of a job and return its last state."""
        return self.wait_for(job, "COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")

    def output(self, job: str) -> str:
        file = self.work / f"job-{job}.out"
        return file.read_text() if file.exists() else ""

    def processes(self) -> list[psutil.Process]:
        """Return all running processes of this Slurm: those whose SLURM_CONF is its configuration."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.environ().get("SLURM_CONF") == str(self.folder / "slurm.conf"):
                    found.append(process)
        return found

    def task(self, job: str, rank: int) -> psutil.Process:
        """Return the process of a task, found by the variables that Slurm sets for it."""
        for process in self.processes():
            with contextlib.suppress(psutil.Error):
                about = process.environ()
                mine = about.get("SLURM_JOB_ID") == job and about.get("SLURM_STEP_NUM_TASKS") is not None
                if mine and about.get("SLURM_PROCID") == str(rank) and process.name().startswith("python"):
                    return process
        raise AssertionError(f"job {job} has no task {rank}: {self.output(job)}")


@contextmanager
def slurm(work: Path) -> Iterator[Slurm]:
    """Run a private Slurm inside the block, and end all of its processes and jobs afterwards."""
    # the path of a socket must be short
    with tempfile.TemporaryDirectory(prefix="slurm-") as place, ExitStack() as running:
        folder, host = Path(place), socket.gethostname().partition(".")[0]
        for name in ("state", "spool"):
            (folder / name).mkdir()
        queue, node = free_ports(2)
        user = getpass.getuser()
        (folder / "slurm.conf").write_text(CONF.format(folder=folder, host=host, queue=queue, node=node, user=user))
        (folder / "key").write_bytes(os.urandom(128))
        (folder / "key").chmod(0o600)
        cluster = Slurm(folder, work)
        running.callback(shut_down, cluster)
        names = {"socket": "munge.socket", "key-file": "key", "pid-file": "munge.pid", "log-file": "munge.log"}
        names |= {"seed-file": "munge.seed"}
        daemon(
            cluster,
            ["munged", "--foreground", "--force", *(f"--{flag}={folder}/{name}" for flag, name in names.items())],
        )
        wait_until((folder / "munge.socket").exists, cluster)
        daemon(cluster, ["slurmctld", "-D"])
        daemon(cluster, ["slurmd", "-D"])
        wait_until(lambda: "idle" in cluster.run("sinfo", "-h", "-o", "%T", check=False).stdout, cluster)
        yield cluster


def daemon(cluster: Slurm, words: Sequence[str]) -> None:
    out = open(cluster.folder / f"{words[0]}.out", "w")  # noqa: SIM115  (the daemon inherits it)
    with out:
        running = subprocess.Popen(
            words, stdin=subprocess.DEVNULL, stdout=out, stderr=out, env=cluster.environment(), cwd=cluster.folder
        )
    cluster.daemons.append(running)


def shut_down(cluster: Slurm) -> None:
    """Kill the jobs first, because each has a daemon of its own (slurmstepd), then all remaining processes."""
    cluster.run("scancel", "--signal=KILL", "--state=RUNNING", check=False)
    for process in reversed(cluster.processes()):
        with contextlib.suppress(psutil.Error):
            process.kill()
    for running in cluster.daemons:
        running.wait()
    until = time.monotonic() + 10
    while cluster.processes() and time.monotonic() < until:
        time.sleep(0.05)
    assert not cluster.processes()


def free_ports(count: int) -> list[int]:
    with ExitStack() as kept:
        servers = [kept.enter_context(socket.create_server(("", 0))) for _ in range(count)]
        return [int(server.getsockname()[1]) for server in servers]


def wait_until(condition: Callable[[], bool], cluster: Slurm) -> None:
    until = time.monotonic() + 30
    while not condition():
        logs = [
            f"{path.name}: {path.read_text()[-2000:]}"
            for path in (*cluster.folder.glob("*.log"), *cluster.folder.glob("*.out"))
        ]
        assert time.monotonic() < until, "\n".join(logs)
        time.sleep(0.1)
