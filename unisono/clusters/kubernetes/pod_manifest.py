"""The template of a pod: the container, its variables, volumes, resources and place.

https://kubernetes.io/docs/reference/kubernetes-api/workload-resources/pod-v1/
"""

from __future__ import annotations

from typing import Any

from unisono.clusters.kubernetes.pod_plan import MEETING_PORT, SECRET_AT, SECRET_KEY, PodPlan

Fields = dict[str, Any]

RUNS, SHARED_MEMORY, SCRIPTS, SECRET = "runs", "shared-memory", "scripts", "secret"
"""Names of volumes."""


def pod_template(plan: PodPlan, selector: Fields, *, in_job_set: bool) -> Fields:
    """Return the template of the pods.

    Args:
        plan: the pods.
        selector: the labels that Kubernetes gives them, for their affinity.
        in_job_set: whether a JobSet makes the Job. It sets the subdomain itself.
    """
    annotations = {}
    if plan.queue and plan.topology:
        annotations = {"kueue.x-k8s.io/podset-preferred-topology": plan.topology}
    metadata = {"labels": {"app.kubernetes.io/name": plan.name}}
    spec: Fields = {} if in_job_set else {"subdomain": plan.name}
    spec |= {"restartPolicy": "Never", "terminationGracePeriodSeconds": plan.grace_seconds}
    if plan.topology and not plan.queue:
        spec["affinity"] = _together(plan.topology, selector)
    spec |= {"containers": [_container(plan, in_job_set=in_job_set)], "volumes": _volumes(plan)}
    return {"metadata": metadata | ({"annotations": annotations} if annotations else {}), "spec": spec}


def _container(plan: PodPlan, *, in_job_set: bool) -> Fields:
    variables = {
        "WORLD_SIZE": str(plan.pods),
        "MASTER_ADDR": plan.first_pod(in_job_set=in_job_set),
        "MASTER_PORT": str(MEETING_PORT),
    }
    mounts: list[Fields] = [
        {"name": RUNS, "mountPath": str(plan.volume.mounted_at)},
        {"name": SHARED_MEMORY, "mountPath": "/dev/shm"},
    ]
    if plan.scripts:
        mounts.append({"name": SCRIPTS, "mountPath": plan.scripts_at, "readOnly": True})
    if plan.secret:
        mounts.append({"name": SECRET, "mountPath": SECRET_AT, "readOnly": True})
    return {
        "name": "train",
        "image": plan.image,
        "command": [word.replace("$(", "$$(") for word in plan.command],  # Kubernetes expands $(NAME)
        "env": [{"name": name, "value": value} for name, value in variables.items()],
        "ports": [{"name": "meet", "containerPort": MEETING_PORT}],
        "resources": _resources(plan),
        "volumeMounts": mounts,
    }


def _resources(plan: PodPlan) -> Fields:
    """Return requests and limits. Processors have no limit: an idle one may be used by any pod."""
    wanted = plan.resources
    memory = {"memory": wanted.memory} if wanted.memory else {}
    gpus = {wanted.gpu_resource: str(wanted.gpus)} if wanted.gpus else {}
    limits = memory | gpus
    return {"requests": {"cpu": wanted.cpus} | memory | gpus} | ({"limits": limits} if limits else {})


def _volumes(plan: PodPlan) -> list[Fields]:
    """Return the volumes. Without one at /dev/shm, loader workers and NCCL have 64 MB of shared memory."""
    volumes: list[Fields] = [
        {"name": RUNS, "persistentVolumeClaim": {"claimName": plan.volume.claim}},
        {"name": SHARED_MEMORY, "emptyDir": {"medium": "Memory"}},
    ]
    if plan.scripts:
        volumes.append({"name": SCRIPTS, "configMap": {"name": f"{plan.name}-scripts"}})
    if plan.secret:
        items = [{"key": SECRET_KEY, "path": SECRET_KEY}]
        volumes.append({"name": SECRET, "secret": {"secretName": plan.secret, "items": items, "defaultMode": 0o400}})
    return volumes


def _together(topology: str, selector: Fields) -> Fields:
    """Return an affinity that prefers nodes with one value of a label, such as those of one zone or rack."""
    term = {"labelSelector": {"matchLabels": selector}, "topologyKey": topology}
    return {
        "podAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": [{"weight": 100, "podAffinityTerm": term}]}
    }
