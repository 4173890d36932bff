"""The pods of a run, and what each of them needs: plain values, from which the manifests follow."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import PurePosixPath

MEETING_PORT = 29500
"""Port of pod 0 at which the others find it. The pods have addresses of their own, so it is always free."""

SECRET_KEY, SECRET_AT = "secret", "/run/unisono-secret"
"""Key of the run's secret in a Secret of the cluster, and the folder where pods see it as a file."""

REPLICATED_JOB = "node"
"""Name of the only replicated job of a JobSet."""


@dataclass(frozen=True, kw_only=True)
class PodResources:
    """Resources that each pod requests.

    Attributes:
        cpus: processors, as Kubernetes writes them: 4, 500m.
        memory: 16Gi; also the limit. "": none.
        gpus: number of accelerators.
        gpu_resource: the name under which the cluster offers accelerators.
    """

    cpus: str
    memory: str = ""
    gpus: int = 0
    gpu_resource: str = "nvidia.com/gpu"


@dataclass(frozen=True, kw_only=True)
class RunVolume:
    """The volume with the run directory, which all pods see.

    Attributes:
        claim: the PersistentVolumeClaim.
        mounted_at: its folder in the pods.
        size: of a claim that the manifest makes: 100Gi; "": the claim exists.
        storage_class: of that claim; "": the default of the cluster.
    """

    claim: str
    mounted_at: PurePosixPath
    size: str = ""
    storage_class: str = ""


@dataclass(frozen=True, kw_only=True)
class PodPlan:
    """The pods of a run.

    Attributes:
        name: of the run, and of all objects.
        image: of the container.
        command: what each pod runs.
        pods: their number.
        volume: has the run directory.
        resources: of each pod.
        namespace: "": the one of the user's context.
        grace_seconds: time between SIGTERM and SIGKILL.
        retries: failures of a pod after which the run fails. Evictions do not count.
        queue: Kueue's local queue; "": none.
        topology: label of nodes with which pods are placed together, such as topology.kubernetes.io/zone; "": none.
        secret: a Secret of the cluster that has the secret of the run; "": none.
        scripts: files by name, which a ConfigMap holds.
        scripts_at: the folder of these files in the pods.
    """

    name: str
    image: str
    command: tuple[str, ...]
    pods: int
    volume: RunVolume
    resources: PodResources
    namespace: str = ""
    grace_seconds: int = 120
    retries: int = 6
    queue: str = ""
    topology: str = ""
    secret: str = ""
    scripts: dict[str, str] = field(default_factory=dict)
    scripts_at: str = "/run/scripts"

    def first_pod(self, *, in_job_set: bool) -> str:
        """Return the name of pod 0, which the headless service resolves."""
        job = f"{self.name}-{REPLICATED_JOB}-0" if in_job_set else self.name
        return f"{job}-0.{self.name}"
