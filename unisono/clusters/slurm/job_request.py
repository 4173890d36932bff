"""What a run requests from Slurm, and what is wrong with the request."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from unisono.clusters.slurm.time_limit import seconds_of
from unisono.config import CommandLine
from unisono.errors import Problem

ARRAY = re.compile(r"\d+(?:-\d+(?::[1-9]\d*)?)?(?:,\d+(?:-\d+(?::[1-9]\d*)?)?)*(?:%[1-9]\d*)?")
OPTION = re.compile(r"(?P<name>[a-z][a-z0-9-]*)(?:=(?P<value>[^\n\r]*))?")

OWN_FLAGS = {
    "nodes": "--nodes",
    "ntasks": "--nodes and --ranks-per-node",
    "ntasks-per-node": "--ranks-per-node",
    "time": "--time",
    "partition": "--partition",
    "account": "--account",
    "gpus-per-node": "--gpus-per-node",
    "cpus-per-task": "--cpus-per-task",
    "array": "--array",
    "signal": "--signal",
    "requeue": "no flag: it is the default",
    "no-requeue": "--no-requeue",
    "open-mode": "no flag: a requeued job appends to its output",
    "no-kill": "no flag: the job is requeued when a node fails",
}
"""Options of sbatch that the file contains anyway, and what sets each of them."""


@dataclass(frozen=True, kw_only=True)
class JobRequest:
    """The resources of a job.

    Attributes:
        name: of the job.
        nodes: number of nodes.
        ranks_per_node: number of ranks on each node; one task is one rank.
        time: the time limit, as sbatch takes it; "" for that of the partition.
        partition, account: as sbatch takes them; "" for the default.
        gpus_per_node: [TYPE:]NUMBER; "" for none.
        cpus_per_task: processors of each rank; None for the default.
        array: indices of an array of jobs, as sbatch takes them; "" for a single job.
        lead_seconds: seconds before the time limit at which the ranks are stopped; 0 for never.
        requeue: whether the job is queued again after a failure of a node, a preemption or the time limit.
        others: other options of sbatch, each as NAME or NAME=VALUE.
    """

    name: str
    nodes: int = 1
    ranks_per_node: int = 1
    time: str = ""
    partition: str = ""
    account: str = ""
    gpus_per_node: str = ""
    cpus_per_task: int | None = None
    array: str = ""
    lead_seconds: int = 120
    requeue: bool = True
    others: Sequence[str] = ()

    @property
    def ranks(self) -> int:
        """The number of ranks of the run."""
        return self.nodes * self.ranks_per_node

    @property
    def first_index(self) -> str:
        """The first index of the array; "" for a single job."""
        found = re.match(r"\d+", self.array)
        return found[0] if found else ""

    def other_options(self) -> dict[str, str]:
        """Return the other options of sbatch; the value of a flag is ""."""
        found = (option.removeprefix("--").partition("=") for option in self.others)
        return {name: value for name, _, value in found}

    def problems(self, line: CommandLine) -> list[Problem]:
        """Return what is wrong with the request. `line` is the typed command, for messages."""
        problems = [
            _out_of_range(flag, value, least, fact, line)
            for flag, value, least, fact in (
                ("--nodes", self.nodes, 1, "A job needs at least one node."),
                ("--ranks-per-node", self.ranks_per_node, 1, "Each node needs at least one rank."),
                ("--cpus-per-task", self.cpus_per_task, 1, "Each rank needs at least one processor."),
                ("--signal", self.lead_seconds, 0, "It is a number of seconds before the time limit; 0: no signal."),
            )
            if value is not None and value < least
        ]
        problems += self._problems_of_time(line)
        problems += [
            Problem(f"Invalid value for {flag}: {value}", fact, str(line.flag(flag, do)))
            for flag, value, form, fact, do in (
                ("--array", self.array, ARRAY, "It lists indices: 0-7, 1,3,5 or 0-15%4 (four at once).", "0-7"),
                ("--gpus-per-node", self.gpus_per_node, r"(?:[\w.-]+:)?[1-9]\d*", "It is NUMBER or TYPE:NUMBER.", "4"),
                ("--partition", self.partition, r"[\w.,-]+", "It is the name of a partition (see `sinfo`).", "NAME"),
                ("--account", self.account, r"[\w.@+-]+", "It is the name of an account.", "NAME"),
            )
            if value and not re.fullmatch(form, value)
        ]
        return problems + self._problems_of_others(line)

    def _problems_of_time(self, line: CommandLine) -> list[Problem]:
        if not self.time:
            return []
        limit = seconds_of(self.time)
        if limit is None:
            fact = "sbatch takes MINUTES, HOURS:MINUTES:SECONDS, DAYS-HOURS and similar forms."
            return [Problem(f"Invalid value for --time: {self.time}", fact, str(line.flag("--time", "12:00:00")))]
        if self.lead_seconds >= limit:
            error = f"--signal {self.lead_seconds} is not shorter than --time {self.time}."
            fact = f"Slurm would stop the ranks {self.lead_seconds} s before a limit of {limit:.0f} s."
            return [Problem(error, fact, str(line.flag("--signal", str(int(limit) // 4))))]
        return []

    def _problems_of_others(self, line: CommandLine) -> list[Problem]:
        problems = []
        for option in self.others:
            found = OPTION.fullmatch(option.removeprefix("--"))
            if found is None:
                fact = "It is the long name of an option of sbatch, with its value: --sbatch mem=64G"
                problems.append(Problem(f"Invalid value for --sbatch: {option}", fact, str(line.without("--sbatch"))))
            elif found["name"] in OWN_FLAGS:
                fact = f"What sets it is {OWN_FLAGS[found['name']]}."
                do = str(line.without("--sbatch", option))
                problems.append(Problem(f"--sbatch cannot set {found['name']}.", fact, f"{do} (without it)"))
        return problems


def _out_of_range(flag: str, value: int, least: int, fact: str, line: CommandLine) -> Problem:
    return Problem(f"{flag} {value} is out of range.", fact, str(line.flag(flag, str(max(1, least)))))
