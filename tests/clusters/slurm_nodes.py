"""A real Slurm on several hosts: slurmctld on the host `head`, a slurmd on every other one (tests/network/hosts.py).

    head: munged, slurmctld, commands      a: munged, slurmd      b: munged, slurmd

    with slurm_nodes(tmp_path, "a", "b", "c") as cluster:
        job = cluster.submit("train.sbatch")
        cluster.nodes["b"].kill()              # power off
        cluster.wait_for_end(job)

Jobs in the partition `all` have no time to end when they are preempted, those in `patient` have 60 s. Jobs in `urgent`
preempt both. All hosts see one folder, as from a network file system: it is the working directory of every command.
Each host has its own munged, with a common key, because a socket belongs to one host.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.cli.slurm import SBIN, missing_programs
from tests.network import hosts as network
from tests.network.hosts import Host, hosts
from unisono import environment

PATIENCE_SECONDS = 300.0
"""Enough for a busy machine. Only a hang takes that long."""

CONF = """\
ClusterName=private
SlurmctldHost=head({address})
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket=/run/munge.socket,cred_expire=5
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir=/run/slurmd
SlurmctldPidFile=/run/slurmctld.pid
SlurmdPidFile=/run/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
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
KillWait=5
SlurmdTimeout=10
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SchedulerParameters=sched_interval=2,bf_interval=2
{nodes}
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP PriorityTier=1
PartitionName=patient Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=1 GraceTime=60
PartitionName=urgent Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=2
"""


def missing() -> str:
    """Return the reason why this machine cannot run Slurm on several hosts, or an empty string."""
    return network.missing() or missing_programs()


class SlurmNodes:
    """A running Slurm.

    Args:
        head: the host of the controller, where commands run
        nodes: the hosts that run jobs, by name
        work: the working directory of commands, which all hosts see
        folder: the files of the daemons, which all hosts see
    """

    def __init__(self, head: Host, nodes: Sequence[Host], work: Path, folder: Path) -> None:
        self.head, self.nodes, self.work, self.folder = head, {host.name: host for host in nodes}, work, folder
        (folder / "state").mkdir(parents=True)
        (folder / "key").write_bytes(os.urandom(128))
        (folder / "key").chmod(0o600)
        lines = [f"NodeName={host.name} NodeAddr={host.address} CPUs=4 State=UNKNOWN" for host in nodes]
        text = CONF.format(address=head.address, folder=folder, nodes="\n".join(lines))
        (folder / "slurm.conf").write_text(text)
        path = os.pathsep.join([*environment.variables(["PATH"]).values(), SBIN])
        for host in (head, *nodes):
            host.environment |= {"SLURM_CONF": str(folder / "slurm.conf"), "PATH": path}
            host.environment |= {"PYTHONPATH": str(network.ROOT)}
        self.start(head, "slurmctld")
        for host in nodes:
            self.start(host, "slurmd")
        self.wait_until(lambda: self.idle() == set(self.nodes), "idle nodes")

    def start(self, host: Host, daemon: str) -> None:
        """Start munged and a daemon of Slurm on a host, as when it boots."""
        host.run(["mkdir", "-p", "-m", "755", "/run/slurmd"], check=True)
        host.run(["cp", str(self.folder / "key"), "/run/munge.key"], check=True)
        files = {"socket": "socket", "key-file": "key", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
        munge = ["munged", "--foreground", "--force", *(f"--{flag}=/run/munge.{end}" for flag, end in files.items())]
        for words in (munge, [daemon, "-D"]):
            log = self.folder / f"{words[0]}-{host.name}.out"
            with log.open("a") as out:
                host.start(words, stdin=subprocess.DEVNULL, stdout=out, stderr=out, cwd=self.folder)
            if words is munge:
                ready = ["test", "-S", "/run/munge.socket"]
                self.wait_until(lambda: host.run(ready).returncode == 0, f"munged on {host.name}")  # noqa: B023

    def run(self, *words: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        """Run a command on the head."""
        return self.head.run(words, check=check, cwd=self.work, timeout=PATIENCE_SECONDS)

    def idle(self) -> set[str]:
        """Return the names of the nodes that are idle."""
        return set(self.run("sinfo", "-h", "-N", "-p", "all", "-t", "idle", "-o", "%N", check=False).stdout.split())

    def submit(self, *words: str) -> str:
        """Submit a batch script, with flags before it, and return the number of the job."""
        return self.run("sbatch", "--parsable", *words).stdout.strip()

    def field(self, job: str, name: str) -> str:
        """Return a field of a job, such as JobState or NodeList."""
        shown = self.run("scontrol", "--oneliner", "show", "job", job).stdout
        return shown.partition(f" {name}=")[2].split()[0]

    def expand(self, nodes: str) -> list[str]:
        """Return the names in a list of nodes such as a,b or n[1-3]."""
        return self.run("scontrol", "show", "hostnames", nodes).stdout.split()

    def wait_until(self, condition: Callable[[], bool], what: str) -> None:
        until = time.monotonic() + PATIENCE_SECONDS
        while not condition():
            assert time.monotonic() < until, f"{what}: {self.logs()}"
            time.sleep(0.2)

    def wait_for_end(self, job: str) -> str:
        """Wait for the end of a job, however often it is requeued, and return its last state."""
        ends = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "BOOT_FAIL")
        self.wait_until(lambda: self.field(job, "JobState") in ends, f"the end of job {job}")
        return self.field(job, "JobState")

    def logs(self) -> str:
        """Return the output of jobs, and the end of the controller's log."""
        outs = [f"{path.name}: {path.read_text()}" for path in sorted(self.work.glob("*.out"))]
        daemons = [path for path in (self.folder / "slurmctld.log",) if path.exists()]
        return "\n".join([*outs, *(f"{path.name}: {path.read_text()[-3000:]}" for path in daemons)])


@contextmanager
def slurm_nodes(work: Path, *names: str) -> Iterator[SlurmNodes]:
    """Run Slurm on the hosts a, b, c, ... and on the host head, and end all of its processes afterwards.

    Args:
        work: the working directory, below /tmp
        names: the names of the hosts
    """
    with hosts(len(names), head=True, shared=[work]) as (head, *nodes):
        yield SlurmNodes(head, nodes, work, work / ".slurm")
