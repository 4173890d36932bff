"""The manifests of a run: an Indexed Job with a headless Service, or a JobSet, which makes both.

https://kubernetes.io/docs/concepts/workloads/controllers/job/ and https://jobset.sigs.k8s.io

    a pod is evicted, or its node dies    Kubernetes starts a pod with the same index; it is no failure
    a pod fails                           the same, up to `retries` times for each index
    status 2, a wrong request             the Job fails at once: it would fail again
    pod 0 succeeds                        the Job has succeeded; pod 0 has the launcher of all processes
"""

from __future__ import annotations

from typing import Any, NamedTuple

from unisono.clusters.kubernetes.pod_manifest import Fields, pod_template
from unisono.clusters.kubernetes.pod_plan import MEETING_PORT, REPLICATED_JOB, PodPlan
from unisono.environment import STOPPED_STATUS

WRONG_REQUEST = 2
"""Exit status of a wrong request."""

JOB_SET_RESTARTS = 3
"""How often a JobSet restarts all pods after the Job in it has failed."""


class Manifest(NamedTuple):
    """An object for Kubernetes, with a comment about it."""

    comment: str
    fields: Fields


def manifests(plan: PodPlan, *, in_job_set: bool) -> list[Manifest]:
    """Return the manifests of a run, in the order in which they are to be applied."""
    selector = {"jobset.sigs.k8s.io/jobset-name" if in_job_set else "batch.kubernetes.io/job-name": plan.name}
    found = []
    if plan.scripts:
        files = _object(plan, "v1", "ConfigMap", name=f"{plan.name}-scripts") | {"data": plan.scripts}
        found.append(Manifest("The script.", files))
    if plan.volume.size:
        found.append(Manifest("The run directory. All pods mount it.", _claim(plan)))
    if plan.pods > 1 and not in_job_set:
        about = f"Pods find each other by name: {plan.first_pod(in_job_set=False)}."
        found.append(Manifest(about, _service(plan, selector)))
    if plan.pods > 1:
        budget = _object(plan, "policy/v1", "PodDisruptionBudget")
        budget["spec"] = {"minAvailable": plan.pods - 1, "selector": {"matchLabels": selector}}
        found.append(Manifest("A drain of nodes evicts one pod at a time.", budget))
    job = _job_spec(plan, selector, in_job_set=in_job_set)
    if in_job_set:
        found.append(
            Manifest("One Job, whose pods have names. It starts again as a whole if it fails.", _job_set(plan, job))
        )
    else:
        found.append(
            Manifest(
                f"One pod for each index from 0 to {plan.pods - 1}.",
                _queued(plan, _object(plan, "batch/v1", "Job")) | {"spec": job},
            )
        )
    return found


def _object(plan: PodPlan, version: str, kind: str, *, name: str = "") -> Fields:
    metadata: Fields = {"name": name or plan.name}
    if plan.namespace:
        metadata["namespace"] = plan.namespace
    metadata["labels"] = {"app.kubernetes.io/name": plan.name}
    return {"apiVersion": version, "kind": kind, "metadata": metadata}


def _queued(plan: PodPlan, fields: Fields) -> Fields:
    """Add the label of Kueue's local queue."""
    if plan.queue:
        fields["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] = plan.queue
    return fields


def _claim(plan: PodPlan) -> Fields:
    volume = plan.volume
    spec: Fields = {"accessModes": ["ReadWriteMany" if plan.pods > 1 else "ReadWriteOnce"]}
    if volume.storage_class:
        spec["storageClassName"] = volume.storage_class
    spec["resources"] = {"requests": {"storage": volume.size}}
    return _object(plan, "v1", "PersistentVolumeClaim", name=volume.claim) | {"spec": spec}


def _service(plan: PodPlan, selector: Fields) -> Fields:
    """Return a headless service: no address of its own, and a name for each pod before it is ready."""
    ports = [{"name": "meet", "port": MEETING_PORT}]
    spec = {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": selector, "ports": ports}
    return _object(plan, "v1", "Service") | {"spec": spec}


def _job_spec(plan: PodPlan, selector: Fields, *, in_job_set: bool) -> Fields:
    stopped = {"containerName": "train", "operator": "In", "values": [STOPPED_STATUS]}
    refused = {"containerName": "train", "operator": "In", "values": [WRONG_REQUEST]}
    rules: list[dict[str, Any]] = [
        {"action": "FailJob", "onExitCodes": refused},
        {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
        {"action": "Ignore", "onExitCodes": stopped},
    ]
    return {
        "completionMode": "Indexed",
        "completions": plan.pods,
        "parallelism": plan.pods,
        "backoffLimitPerIndex": plan.retries,
        "maxFailedIndexes": 0,
        "podReplacementPolicy": "Failed",
        "podFailurePolicy": {"rules": rules},
        "successPolicy": {"rules": [{"succeededIndexes": "0"}]},
        "template": pod_template(plan, selector, in_job_set=in_job_set),
    }


def _job_set(plan: PodPlan, job: Fields) -> Fields:
    refused = {"name": "wrong-request", "action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}
    spec = {
        "network": {"enableDNSHostnames": True, "subdomain": plan.name, "publishNotReadyAddresses": True},
        "failurePolicy": {"maxRestarts": JOB_SET_RESTARTS, "rules": [refused]},
        "replicatedJobs": [{"name": REPLICATED_JOB, "replicas": 1, "template": {"spec": job}}],
    }
    return _queued(plan, _object(plan, "jobset.x-k8s.io/v1alpha2", "JobSet")) | {"spec": spec}
