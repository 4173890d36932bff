"""Pods of a written manifest as processes in hosts of a test, with the part of Kubernetes that starts them.

    job = PodJob(manifests, hosts, image=folder, volume=folder)
    job.start(0)            # with the environment, host name, names of other pods and volume that the manifest gives
    job.terminate(1)        # SIGTERM to process 1 of the container, and SIGKILL after the grace period
    job.on_exit(status)     # "restart", "count", "fail" or "complete": what the Job makes of an exit status

Each container is process 1 of a PID namespace, as in a real pod, so it gets no signal for which it has no handler.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.network.hosts import ROOT, Host, HostProcess, children
from unisono.environment import variables

SECONDS = 180.0


class PodJob:
    """The pods of an Indexed Job, or of the Job in a JobSet, one on each host.

    Args:
        manifests: the objects.
        hosts: one for each index.
        image: a folder that stands for the image: the working directory.
        volume: the folder that the claim stands for.
    """

    def __init__(
        self, manifests: Sequence[Mapping[str, Any]], hosts: Sequence[Host], image: Path, volume: Path
    ) -> None:
        by_kind = {each["kind"]: each for each in manifests}
        job_set = by_kind.get("JobSet")
        if job_set is None:
            self.spec = by_kind["Job"]["spec"]
            self.prefix = by_kind["Job"]["metadata"]["name"]
            self.domain = self.spec["template"]["spec"]["subdomain"]
            service = by_kind["Service"]
            assert (service["metadata"]["name"], service["spec"]["clusterIP"]) == (self.domain, "None")
        else:
            (replicated,) = job_set["spec"]["replicatedJobs"]
            self.spec = replicated["template"]["spec"]
            self.prefix = f"{job_set['metadata']['name']}-{replicated['name']}-0"
            self.domain = job_set["spec"]["network"]["subdomain"]
        assert self.spec["completions"] == self.spec["parallelism"] == len(hosts)
        self.files = by_kind.get("ConfigMap", {}).get("data", {})
        self.pod = self.spec["template"]["spec"]
        (self.container,) = self.pod["containers"]
        self.hosts, self.image, self.volume = list(hosts), image, volume
        self.running: dict[int, HostProcess] = {}
        self.secrets = {"keys": {"secret": "4f1d" * 16}}
        (image / "bin").mkdir(exist_ok=True)
        (image / "bin" / "unisono").write_text(f'#!/bin/sh\nexec {sys.executable} -P -m unisono.cli.main "$@"\n')
        (image / "bin" / "unisono").chmod(0o755)

    def prepare(self, index: int) -> None:
        """Give a host the name of the pod, the names of all pods, and its volumes."""
        host = self.hosts[index]
        names = "".join(
            f"{each.address} {self.prefix}-{n}.{self.domain} {self.prefix}-{n}\n" for n, each in enumerate(self.hosts)
        )
        host.run(["sh", "-c", f"echo {self.prefix}-{index} > /proc/sys/kernel/hostname"], check=True)
        host.run(["sh", "-c", f"printf '%s' '{names}' >> /etc/hosts"], check=True)
        for volume in self.pod["volumes"]:
            (mount,) = [each for each in self.container["volumeMounts"] if each["name"] == volume["name"]]
            at = mount["mountPath"]
            host.run(["mkdir", "-p", at], check=True)
            if "persistentVolumeClaim" in volume:
                host.run(["mount", "-n", "--bind", str(self.volume), at], check=True)
            if "secret" in volume:
                (item,) = volume["secret"]["items"]
                text, mode = self.secrets[volume["secret"]["secretName"]][item["key"]], volume["secret"]["defaultMode"]
                script = f'umask 077; printf "%s" "$1" > {at}/{item["path"]}; chmod {mode:o} {at}/{item["path"]}'
                host.run(["sh", "-c", script, "sh", text], check=True)
            for name, text in self.files.items() if "configMap" in volume else ():
                host.run(["sh", "-c", f'printf "%s" "$1" > {at}/{name}', "sh", text], check=True)

    def start(self, index: int) -> HostProcess:
        """Start the container of a pod."""
        own = {each["name"]: each["value"] for each in self.container["env"]}
        environment = {
            "PATH": f"{self.image / 'bin'}:{variables(['PATH'])['PATH']}",
            "PYTHONPATH": str(ROOT),
            "HOME": "/run",
            **own,
            "JOB_COMPLETION_INDEX": str(index),  # as the controller of Jobs does
        }
        words = [expanded(word, environment) for word in self.container["command"]]
        spaces = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]
        log = self.log(index).open("ab")
        self.running[index] = self.hosts[index].start(
            [*spaces, *words], cwd=self.image, env=environment, stdout=log, stderr=subprocess.STDOUT
        )
        log.close()
        return self.running[index]

    def log(self, index: int) -> Path:
        """Return the file with the output of all containers of an index."""
        return self.image / f"pod-{index}.log"

    def text(self) -> str:
        """Return the output of all pods."""
        return "\n".join(f"--- {path.name}\n{path.read_text()}" for path in sorted(self.image.glob("pod-*.log")))

    def first_process(self, index: int) -> int:
        """Return the process id, outside of the pod, of process 1 of the container."""
        (unshare,) = children(self.running[index].pid)
        (first,) = children(unshare)
        return first

    def signal(self, index: int, number: int) -> None:
        """Send a signal to process 1 of the container."""
        os.kill(self.first_process(index), number)

    def terminate(self, index: int) -> int:
        """End a pod as the kubelet does, and return the exit status of the container."""
        self.signal(index, signal.SIGTERM)
        try:
            return self.running[index].wait(self.pod["terminationGracePeriodSeconds"])
        except subprocess.TimeoutExpired:
            self.signal(index, signal.SIGKILL)
            return self.running[index].wait(SECONDS)

    def wait(self, index: int) -> int:
        """Return the exit status of a container."""
        return self.running[index].wait(SECONDS)

    def on_exit(self, status: int) -> str:
        """Return what the Job does when a container has ended: complete, restart, count or fail."""
        if status == 0:
            return "complete"
        for rule in self.spec["podFailurePolicy"]["rules"]:
            on = rule.get("onExitCodes")
            if on and on["operator"] == "In" and status in on["values"]:
                return {"FailJob": "fail", "Ignore": "restart"}[rule["action"]]
        return "count"

    def wait_for(self, path: Path, text: str) -> None:
        """Wait until a file has this text."""
        until = time.monotonic() + SECONDS
        while not path.exists() or text not in path.read_text():
            assert time.monotonic() < until, self.text()
            time.sleep(0.05)


def expanded(word: str, environment: Mapping[str, str]) -> str:
    """Expand $(NAME) in a word of a command, as Kubernetes does; $$(NAME) stands for $(NAME)."""

    def value(found: re.Match[str]) -> str:
        return found[0][1:] if found[0].startswith("$$") else environment.get(found[1], found[0])

    return re.sub(r"\$?\$\((\w+)\)", value, word)
