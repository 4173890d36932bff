"""The flags of `unisono kubernetes` about pods, and what is wrong with them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Annotated

from cyclopts import Group, Parameter

from unisono.cli.request.suggestions import WHOLE
from unisono.clusters.kubernetes.pod_plan import PodResources, RunVolume
from unisono.config import CommandLine, plural
from unisono.errors import Problem

PODS = Group("Pods", sort_key=3)
QUANTITY = re.compile(r"\d+(\.\d+)?(m|[kMGTPE]i?)?")
"""https://kubernetes.io/docs/reference/kubernetes-api/common-definitions/quantity/"""
LABEL = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
"""The name of a service, and so of a run: RFC 1035."""
LONGEST_NAME = 40
"""Leaves room for the suffixes of jobs and pods in a host name of 63 characters."""
RUNS = PurePosixPath("/runs")


@Parameter(name="*", negative=())
@dataclass(frozen=True, kw_only=True)
class PodFlags:
    """The flags.

    Parameters
    ----------
    image
        Image of the container, with Python, torch, Unisono and the script.
    name
        Name of the run and of its objects. By default the name of the script.
    namespace
        By default the one of your kubectl context.
    ranks_per_pod
        Number of processes in each pod. By default one for each GPU of the pod, or one.
    gpus_per_pod
        Number of accelerators of each pod.
    gpu_resource
        The name under which the cluster offers accelerators.
    cpus
        Processors that each pod requests (8, 500m). By default one for each process.
    memory
        Memory that each pod requests, which is also its limit (64Gi).
    claim
        PersistentVolumeClaim for the run directory. All pods must be able to mount it.
    volume_size
        Make this claim, of this size (100Gi), with access mode ReadWriteMany.
    storage_class
        Storage class of a claim that is made.
    queue
        Local queue of Kueue, which starts all pods or none.
    topology
        Label of nodes: pods are preferably placed where it has one value (topology.kubernetes.io/zone).
    secret_name
        Secret of the cluster with the key `secret`, from which pods prove to each other that they belong to the run.
    grace
        Seconds between SIGTERM and SIGKILL: time for a step and a checkpoint.
    retries
        Failures of a pod after which the run fails. Evictions do not count.
    """

    image: Annotated[str, Parameter(metavar="IMAGE", group=PODS)]
    name: Annotated[str, Parameter(metavar="NAME", show_default=False, group=PODS)] = ""
    namespace: Annotated[str, Parameter(metavar="NAME", show_default=False, group=PODS)] = ""
    ranks_per_pod: Annotated[int, WHOLE, Parameter(metavar="N", show_default=False, group=PODS)] = 0
    gpus_per_pod: Annotated[int, WHOLE, Parameter(metavar="N", show_default=False, group=PODS)] = 0
    gpu_resource: Annotated[str, Parameter(metavar="NAME", group=PODS)] = "nvidia.com/gpu"
    cpus: Annotated[str, Parameter(metavar="N", show_default=False, group=PODS)] = ""
    memory: Annotated[str, Parameter(metavar="SIZE", show_default=False, group=PODS)] = ""
    claim: Annotated[str, Parameter(metavar="NAME", show_default=False, group=PODS)] = ""
    volume_size: Annotated[str, Parameter(metavar="SIZE", show_default=False, group=PODS)] = ""
    storage_class: Annotated[str, Parameter(metavar="NAME", show_default=False, group=PODS)] = ""
    queue: Annotated[str, Parameter(metavar="NAME", show_default=False, group=PODS)] = ""
    topology: Annotated[str, Parameter(metavar="LABEL", show_default=False, group=PODS)] = ""
    secret_name: Annotated[str, Parameter(metavar="NAME", show_default=False, group=PODS)] = ""
    grace: Annotated[int, WHOLE, Parameter(metavar="SECONDS", group=PODS)] = 120
    retries: Annotated[int, WHOLE, Parameter(metavar="N", group=PODS)] = 6

    @property
    def in_each(self) -> int:
        """The number of processes in each pod."""
        return self.ranks_per_pod or self.gpus_per_pod or 1

    @property
    def ranks_per_device(self) -> int:
        """The number of processes that share an accelerator."""
        return max(1, self.in_each // self.gpus_per_pod) if self.gpus_per_pod else 1

    def resources(self) -> PodResources:
        """Return what each pod requests."""
        return PodResources(
            cpus=self.cpus or str(self.in_each),
            memory=self.memory,
            gpus=self.gpus_per_pod,
            gpu_resource=self.gpu_resource,
        )

    def volume(self, name: str, run_dir: PurePosixPath) -> RunVolume:
        """Return the volume of the run directory of a run."""
        return RunVolume(
            claim=self.claim or f"{name}-runs",
            mounted_at=run_dir.parent,
            size=self.volume_size,
            storage_class=self.storage_class,
        )

    def problems(self, name: str, ranks: int, line: CommandLine) -> list[Problem]:
        """Return everything that is wrong with the flags.

        Args:
            name: of the run.
            ranks: the number of processes.
            line: the typed command, for messages.
        """
        return [
            *self._problems_of_numbers(ranks, line),
            *self._problems_of_quantities(line),
            *self._problems_of_names(name, line),
            *self._problems_of_volume(line),
        ]

    def _problems_of_numbers(self, ranks: int, line: CommandLine) -> list[Problem]:
        found = []
        for flag, value, least in (
            ("--ranks-per-pod", self.ranks_per_pod, 0),
            ("--gpus-per-pod", self.gpus_per_pod, 0),
            ("--grace", self.grace, 1),
            ("--retries", self.retries, 0),
        ):
            if value < least:
                do = str(line.without(flag))
                found.append(Problem(f"{flag} {value} is out of range.", f"The least is {least}.", do))
        if ranks < 1:
            fact, do = "A run needs at least one process.", str(line.flag("--ranks", "1"))
            found.append(Problem(f"--ranks {ranks} is out of range.", fact, do))
        if found:
            return found
        each, gpus = self.in_each, self.gpus_per_pod
        if gpus and each % gpus:
            fact = f"{plural(each, 'process', 'processes')} cannot share {plural(gpus, 'GPU', 'GPUs')} evenly."
            do = str(line.flag("--ranks-per-pod", str(gpus)))
            found.append(Problem(f"--ranks-per-pod {each} does not match --gpus-per-pod {gpus}.", fact, do))
        if ranks % each:
            fact = f"Each pod has {plural(each, 'process', 'processes')}."
            do = str(line.flag("--ranks", str((ranks // each + 1) * each)))
            found.append(Problem(f"--ranks {ranks} does not fill its pods.", fact, do))
        if self.secret_name and ranks <= each:
            fact = "A single pod accepts no connections of others."
            found.append(Problem("--secret-name is for several pods.", fact, str(line.without("--secret-name"))))
        return found

    def _problems_of_quantities(self, line: CommandLine) -> list[Problem]:
        found = []
        for flag, value, example in (
            ("--cpus", self.cpus, "8"),
            ("--memory", self.memory, "64Gi"),
            ("--volume-size", self.volume_size, "100Gi"),
        ):
            if value and not QUANTITY.fullmatch(value):
                fact = "Kubernetes writes quantities as 8, 500m, 64Gi or 2Ti."
                found.append(Problem(f"Invalid value for {flag}: {value}", fact, str(line.flag(flag, example))))
        return found

    def _problems_of_names(self, name: str, line: CommandLine) -> list[Problem]:
        found = []
        names = [("--name", name), ("--claim", self.claim), ("--namespace", self.namespace), ("--queue", self.queue)]
        names += [("--secret-name", self.secret_name)]
        for flag, value in names:
            longest = LONGEST_NAME if flag == "--name" else 63
            if value and not (LABEL.fullmatch(value) and len(value) <= longest):
                fact = f"Names have up to {longest} small letters, digits and dashes, and begin with a letter."
                do = str(line.flag(flag, label_of(value)[:longest].strip("-")))
                found.append(Problem(f"Invalid value for {flag}: {value}", fact, do))
        if not self.image.strip():
            found.append(Problem("--image is empty.", "A pod needs an image.", str(line.flag("--image", "IMAGE"))))
        return found

    def _problems_of_volume(self, line: CommandLine) -> list[Problem]:
        if self.storage_class and not self.volume_size:
            fact = "A storage class belongs to a claim that is made."
            return [Problem("--storage-class needs --volume-size.", fact, str(line.flag("--volume-size", "100Gi")))]
        if self.claim or self.volume_size:
            return []
        fact = "Checkpoints and logs of all pods are written to a volume that outlives them."
        do = f"{line.flag('--claim', 'NAME')}, or --volume-size 100Gi to make one"
        return [Problem("The run directory has no volume.", fact, do)]


def label_of(text: str) -> str:
    """Return the nearest name that Kubernetes accepts: My_Train -> my-train."""
    name = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")
    return name if name[:1].isalpha() else f"run-{name}".strip("-")
