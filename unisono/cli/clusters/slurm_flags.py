"""The flags of `unisono slurm` that become options of sbatch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated

from cyclopts import Group, Parameter

from unisono.cli.request.suggestions import WHOLE
from unisono.clusters.slurm.job_request import JobRequest

JOB = Group("Job", sort_key=3)


@Parameter(name="*", negative=())
@dataclass(frozen=True, kw_only=True)
class JobFlags:
    """The flags.

    Parameters
    ----------
    nodes
        Number of nodes.
    ranks_per_node
        Number of ranks on each node. By default one for each GPU of --gpus-per-node, or one.
    time
        Time limit, as sbatch takes it: 12:00:00, 2-00. By default that of the partition.
    signal
        Seconds before the time limit at which the ranks finish the step, save and end; 0: never.
    no_requeue
        Do not queue the job again after the failure of a node, a preemption or the time limit.
    array
        Indices of an array of jobs, each a run of its own: 0-7, or 0-15%4 for four at once. In settings, in the run
        directory and after --, %a is the index: --set seed=%a.
    gpus_per_node
        GPUs on each node: 8, or a100:8.
    cpus_per_task
        Processors of each rank.
    partition
        The partition.
    account
        The account that the job is charged to.
    sbatch
        Any other option of sbatch: --sbatch mem=64G --sbatch exclusive. Repeatable.
    """

    nodes: Annotated[int, WHOLE, Parameter(metavar="N", group=JOB)] = 1
    ranks_per_node: Annotated[int | None, WHOLE, Parameter(metavar="N", show_default=False, group=JOB)] = None
    time: Annotated[str, Parameter(metavar="LIMIT", show_default=False, group=JOB)] = ""
    signal: Annotated[int, WHOLE, Parameter(metavar="SECONDS", group=JOB)] = 120
    no_requeue: Annotated[bool, Parameter(show_default=False, group=JOB)] = False
    array: Annotated[str, Parameter(metavar="INDICES", show_default=False, group=JOB)] = ""
    gpus_per_node: Annotated[str, Parameter(metavar="GPUS", show_default=False, group=JOB)] = ""
    cpus_per_task: Annotated[int | None, WHOLE, Parameter(metavar="N", show_default=False, group=JOB)] = None
    partition: Annotated[str, Parameter(metavar="NAME", show_default=False, group=JOB)] = ""
    account: Annotated[str, Parameter(metavar="NAME", show_default=False, group=JOB)] = ""
    sbatch: Annotated[tuple[str, ...], Parameter(metavar="KEY=VALUE", show_default=False, group=JOB)] = ()

    def words(self) -> Iterator[str]:
        """Yield the flags that are not the default."""
        for name, value, default in (
            ("--nodes", self.nodes, 1),
            ("--ranks-per-node", self.ranks_per_node, None),
            ("--time", self.time, ""),
            ("--signal", self.signal, 120),
            ("--array", self.array, ""),
            ("--gpus-per-node", self.gpus_per_node, ""),
            ("--cpus-per-task", self.cpus_per_task, None),
            ("--partition", self.partition, ""),
            ("--account", self.account, ""),
        ):
            if value != default:
                yield from (name, str(value))
        if self.no_requeue:
            yield "--no-requeue"
        for option in self.sbatch:
            yield from ("--sbatch", option)

    def job(self, name: str) -> JobRequest:
        """Return what the job requests."""
        gpus = self.gpus_per_node.rpartition(":")[2]
        ranks = self.ranks_per_node
        return JobRequest(
            name=name,
            nodes=self.nodes,
            ranks_per_node=ranks if ranks is not None else int(gpus) if gpus.isdecimal() else 1,
            time=self.time,
            partition=self.partition,
            account=self.account,
            gpus_per_node=self.gpus_per_node,
            cpus_per_task=self.cpus_per_task,
            array=self.array,
            lead_seconds=self.signal,
            requeue=not self.no_requeue,
            others=self.sbatch,
        )
