"""unisono kubernetes: write the manifests of a run."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Annotated

from cyclopts import Parameter

from unisono.cli.clusters.pod_flags import PODS, RUNS, PodFlags, label_of
from unisono.cli.commands.run_command import numbers
from unisono.cli.request.request_checks import check_settings
from unisono.cli.request.run_options import WHERE, RunRequest
from unisono.cli.request.target import recipes, script_of
from unisono.clusters.kubernetes.job_manifests import manifests
from unisono.clusters.kubernetes.pod_plan import SECRET_AT, SECRET_KEY, PodPlan
from unisono.config import CommandLine
from unisono.errors import Problem, SettingsError

LARGEST_SCRIPT = 1_000_000
"""Bytes of a script in a ConfigMap, which holds up to 1 MiB."""


def kubernetes(
    target: str,
    /,
    *,
    pods: PodFlags,
    ranks: Annotated[str, Parameter(name=["--ranks", "-n"], metavar="N", group=WHERE)] = "1",
    job_set: Annotated[bool, Parameter(negative="--indexed-job", show_default=False, group=PODS)] = False,
    script_from_config_map: Annotated[bool, Parameter(negative=(), show_default=False, group=PODS)] = False,
    output: Annotated[Path | None, Parameter(metavar="FILE", group=PODS)] = None,
    request: RunRequest = RunRequest(),  # noqa: B008  (frozen)
) -> int:
    """Write Kubernetes manifests of a run, for `kubectl apply -f -`.

    Nothing is sent to a cluster. Arguments after `--` are passed to the script.

    Parameters
    ----------
    target
        The name of a recipe, or the path of a script in the image.
    ranks
        Number of processes in all pods. The result is the same for any number. MIN:MAX as for `unisono run`.
    job_set
        Write a JobSet, which the cluster must have installed, instead of an Indexed Job.
    script_from_config_map
        Send the script along, in a ConfigMap: for a single file that the image does not have.
    output
        The file to write. By default standard output.
    """
    words = _words(pods, ranks, job_set=job_set, sends=script_from_config_map)
    line = request.line("unisono", "kubernetes", target, *words)
    count = numbers(ranks, 0, line).usual
    name = pods.name or label_of(Path(target).stem)
    run_dir = PurePosixPath(request.run_dir or RUNS / name)
    several = not pods.secret_name and count > pods.in_each
    problems = _problems_of_target(target, count, request, line, sends=script_from_config_map, without_secret=several)
    problems += pods.problems(name, count, line)
    if not run_dir.is_absolute() or run_dir.parent == PurePosixPath("/"):
        fact = "It is a folder in the pods, and the volume is mounted at the folder above it."
        problems.append(
            Problem(f"Invalid value for --run-dir: {run_dir}", fact, str(line.flag("--run-dir", f"/runs/{name}")))
        )
    if problems:
        raise SettingsError.of(problems)
    inside = replace(request, run_dir=Path(run_dir), autoresume=True, json=False)
    plan = PodPlan(
        name=name,
        image=pods.image,
        command=(),
        pods=count // pods.in_each,
        volume=pods.volume(name, run_dir),
        resources=pods.resources(),
        namespace=pods.namespace,
        grace_seconds=pods.grace,
        retries=pods.retries,
        queue=pods.queue,
        topology=pods.topology,
        secret=pods.secret_name,
        scripts={Path(target).name: Path(target).read_text(encoding="utf-8")} if script_from_config_map else {},
    )
    path = f"{plan.scripts_at}/{Path(target).name}" if script_from_config_map else target
    flags = ["--ranks", ranks] if ranks != "1" else []
    flags += ["--ranks-per-device", str(pods.ranks_per_device)] if pods.ranks_per_device > 1 else []
    flags += ["--secret-file", f"{SECRET_AT}/{SECRET_KEY}"] if pods.secret_name else []
    command = inside.line("unisono", "run", path, *flags)
    _write(replace(plan, command=command.words), output, line, in_job_set=job_set)
    return 0


def _write(plan: PodPlan, output: Path | None, line: CommandLine, *, in_job_set: bool) -> None:
    """Write the manifests to a file, or to standard output. Raises SettingsError."""
    try:
        from unisono.clusters.kubernetes.yaml_text import yaml_of
    except ModuleNotFoundError:
        do = "pip install 'unisono[kubernetes]'"
        raise SettingsError("Manifests are written with PyYAML.", "It is not installed here.", do) from None

    text = f"# {line}\n{yaml_of(manifests(plan, in_job_set=in_job_set))}"
    if output is None:
        sys.stdout.write(text)
        return
    try:
        output.write_text(text, encoding="utf-8")
    except OSError as error:
        do = f"{line} > FILE, or another writable path"
        raise SettingsError(f"Cannot write {output}.", f"{error.strerror}.", do) from None
    print(f"Written to {output}. Next: kubectl apply -f {output}")


def _problems_of_target(
    target: str, ranks: int, request: RunRequest, line: CommandLine, *, sends: bool, without_secret: bool
) -> list[Problem]:
    """Return what is wrong with the target and the settings. A script in the image need not exist here.

    Args:
        target: the name of a recipe, or the path of a script.
        ranks: the number of processes.
        request: the flags of a run.
        line: the typed command, for messages.
        sends: whether the manifest contains the script.
        without_secret: whether several pods have no Secret of the cluster.
    """
    problems = []
    script = recipes().get(target, Path(target))
    if sends and target in recipes():
        fact = "Recipes are part of Unisono, so the image has them."
        return [
            Problem("--script-from-config-map is for a script.", fact, str(line.without("--script-from-config-map")))
        ]
    if sends or not target.endswith(".py"):
        try:
            script = script_of(target, line)
        except SettingsError as error:
            return list(error.problems)
    if sends and script.stat().st_size > LARGEST_SCRIPT:
        fact = f"{script} has {script.stat().st_size:,} bytes, and a ConfigMap holds 1 MiB."
        do = f"{line.without('--script-from-config-map')} (with the script in the image)"
        problems.append(Problem("The script is too large for a ConfigMap.", fact, do))
    if request.resume:
        fact = "Pods start again by themselves, so the manifest has --autoresume, which resumes."
        problems.append(Problem("--resume is not needed.", fact, str(line.without("--resume"))))
    if request.settings_file is not None and not request.settings_file.is_file():
        return problems  # a file in the image
    settings, found = check_settings(script, ranks, request, line, report=None)
    secure = None if settings is None else settings.secure
    if without_secret and secure is not None and secure.transport == "tls" and not (secure.ca or secure.secret_file):
        fact = "The pods have neither a common secret nor certificates, so each would refuse the others."
        make = "kubectl create secret generic NAME --from-literal=secret=$(openssl rand -hex 32)"
        do = f"{line.flag('--secret-name', 'NAME')}, after: {make}"
        found.append(Problem("secure.transport=tls needs a secret that all pods have.", fact, do))
    return problems + found


def _words(pods: PodFlags, ranks: str, *, job_set: bool, sends: bool) -> list[str]:
    """Return the flags that are not the default."""
    given = {
        "--ranks": ranks if ranks != "1" else "",
        "--image": pods.image,
        "--name": pods.name,
        "--namespace": pods.namespace,
        "--ranks-per-pod": pods.ranks_per_pod,
        "--gpus-per-pod": pods.gpus_per_pod,
        "--gpu-resource": pods.gpu_resource if pods.gpu_resource != "nvidia.com/gpu" else "",
        "--cpus": pods.cpus,
        "--memory": pods.memory,
        "--claim": pods.claim,
        "--volume-size": pods.volume_size,
        "--storage-class": pods.storage_class,
        "--queue": pods.queue,
        "--topology": pods.topology,
        "--secret-name": pods.secret_name,
        "--grace": pods.grace if pods.grace != PodFlags.grace else "",
        "--retries": pods.retries if pods.retries != PodFlags.retries else "",
    }
    words = [word for flag, value in given.items() if value not in ("", 0) for word in (flag, str(value))]
    words += ["--retries", "0"] if pods.retries == 0 else []
    return words + ["--job-set"] * job_set + ["--script-from-config-map"] * sends
