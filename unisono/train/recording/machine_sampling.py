"""Sample the hosts of a run, and state its energy, its traffic and the usage of its accelerator in result.json."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from unisono.config.schema import MachineSettings
from unisono.machine.kernel_files import KernelFiles
from unisono.machine.sampler import SampledRun, Sampler
from unisono.machine.sampling_thread import SamplingThread
from unisono.machine.tcp_traffic import read_tcp_traffic
from unisono.train.collective import PEER_ERRORS
from unisono.train.extensions import Extension

if TYPE_CHECKING:
    import torch

    from unisono.train.context import RunContext

JOULES_PER_KWH = 3.6e6

Report = Mapping[str, Any]
"""What a process knows at the end.

host     the name of its host
machine  a name that no other machine has: containers of one machine read the same counters
of       the number of processes of the run
tcp      bytes sent and received over its TCP connections; None: not counted
sampled  the sums of its samples, if it samples the host
"""


class MachineSampling(Extension):
    """Sample this host, if no other process does.

    Args:
        context: The context of the run.
        thread: Samples the host; None: nothing is sampled.
    """

    def __init__(self, context: RunContext, thread: SamplingThread | None) -> None:
        self._context, self._thread = context, thread
        self._began = time.perf_counter()
        self._seconds = 0.0
        if thread is not None:
            world = context.world
            thread.start(first=world.local_rank == 0 and not world.joins)

    def close(self) -> None:
        self._seconds = self._seconds or time.perf_counter() - self._began
        if self._thread is not None:
            progress = self._context.progress
            self._thread.close(over=progress.is_over or bool(progress.agreed.get("leave")))

    def result(self) -> Mapping[str, Any]:
        context = self._context
        reports = self._reports()
        samples = context.progress.samples_here
        energy = energy_entry(reports, context.settings.machine, self._seconds, samples)
        return {"energy": energy, **traffic_entries(reports), **self._device(reports)}

    def _reports(self) -> list[Report]:
        """Return the reports of all processes, or of this one where the processes do not meet."""
        context = self._context
        mine = self._report()
        if context.group.size == 1 or not context.loop.is_uniform:
            return [mine]
        try:
            return context.collective.run("the usage of machines", lambda: context.group.all_gather_object(mine))
        except PEER_ERRORS:  # a process has died after the last step
            return [mine]

    def _report(self) -> Report:
        world, traffic = self._context.world, read_tcp_traffic()
        machine = KernelFiles().text("proc/sys/kernel/random/boot_id", keep=False).strip() or world.host
        found = {"host": world.host, "machine": machine, "of": world.size, "tcp": traffic and list(traffic)}
        sampler = None if self._thread is None else self._thread.sampler
        return {**found, "sampled": _sampled(sampler)} if sampler is not None else found

    def _device(self, reports: Sequence[Report]) -> Mapping[str, Any]:
        """Return the usage of this process's accelerator."""
        device = self._context.device
        if device.type == "cpu":
            return {}
        module: Any = _memory_module(device)
        found: dict[str, Any] = {"peak_memory": module.max_memory_allocated(device)} if module else {}
        known = {uuid: each for report in _sampled_hosts(reports) for uuid, each in report["devices"].items()}
        if (uuid := uuid_of(device)) in known:
            usage = known[uuid]
            found |= {name: usage[name] for name in ("utilization", "watts", "joules") if name in usage}
        else:
            problems = sorted({each for report in _sampled_hosts(reports) for each in report["problems"]})
            reason = "; ".join(problems) or f"NVML does not know {device.type} devices"
            found["usage"] = f"not measured: {reason if self._thread is not None else 'machine.every=0'}"
        return {"device": found}


def _sampled(sampler: Sampler) -> dict[str, Any]:
    """Return the sums of a sampler."""
    joules = {name: counter.joules for name, counter in sampler.energy.counters.items()}
    devices: dict[str, dict[str, Any]] = sampler.devices.means()
    for usage in devices.values():
        name = f"nvml:{usage['index']}"
        usage |= {"joules": round(joules[name], 1)} if name in joules else {}
    return {
        "joules": joules,
        "missing": sampler.energy.missing,
        "devices": devices,
        "problems": sampler.devices.problems,
        "network": [sum(each) for each in zip(*sampler.networks.totals.values(), strict=True)],
    }


def _sampled_hosts(reports: Sequence[Report]) -> list[Report]:
    """Return the sums of each machine: of its process that has counted the most."""
    found: dict[str, dict[str, Any]] = {}
    for report in reports:
        if "sampled" in report:
            known, new = found.get(report["machine"]), {"host": report["host"], **report["sampled"]}
            if known is None or sum(new["joules"].values()) > sum(known["joules"].values()):
                found[report["machine"]] = new
    return list(found.values())


def energy_entry(
    reports: Sequence[Report], settings: MachineSettings, seconds: float, samples: int
) -> dict[str, Any] | str:
    """Return the energy of all hosts of a run, or why it is not known.

    Args:
        reports: Of all processes.
        settings: The settings, with the power that the user estimates.
        seconds: Seconds of the run.
        samples: Training samples of the run, over all processes.
    """
    hosts = _sampled_hosts(reports)
    machines = {report["machine"] for report in reports}
    several = len(machines) > 1
    counted = {
        f"{host['host']} {name}" if several else name: joules
        for host in hosts
        for name, joules in host["joules"].items()
    }
    missing = [f"{host['host']}: {each}" if several else each for host in hosts for each in host["missing"]]
    if counted:
        source, joules = ", ".join(counted), sum(counted.values())
    elif settings.watts:
        source, joules = "estimated from machine.watts", settings.watts * seconds * len(machines)
    elif settings.every == 0:
        return "not measured: machine.every=0"
    else:
        return f"not measured: {'; '.join(missing) or 'no counter'}"
    found = {"joules": round(joules, 1), "kwh": float(f"{joules / JOULES_PER_KWH:.4g}")}
    found |= {"joules_per_sample": float(f"{joules / samples:.4g}")} if samples else {}
    return {**found, "source": source, **({"not_measured": missing} if counted and missing else {})}


def traffic_entries(reports: Sequence[Report]) -> dict[str, Any]:
    """Return the bytes that a run has sent and received: of its processes, or else of the hosts' networks."""
    if reports[0]["of"] == 1:
        return {}
    by_process = [report["tcp"] for report in reports]
    if len(reports) == reports[0]["of"] and None not in by_process:
        counted, source = by_process, "TCP connections of all processes"
    else:
        hosts = [host for host in _sampled_hosts(reports) if host["network"]]
        counted, source = [host["network"] for host in hosts], "networks of " + ", ".join(h["host"] for h in hosts)
    if not counted:
        return {}
    sent, received = (round(sum(each)) for each in zip(*counted, strict=True))
    return {"bytes_sent": sent, "bytes_received": received, "bytes_source": source}


def _memory_module(device: torch.device) -> Any:
    """Return torch's module for a device if it counts memory, else None."""
    import torch

    module: Any = torch.get_device_module(device)
    return module if hasattr(module, "max_memory_allocated") else None


def uuid_of(device: torch.device) -> str:
    """Return the UUID of a device as NVML writes it; "" for one that NVML does not know."""
    import torch

    if device.type != "cuda":
        return ""
    uuid = str(getattr(torch.cuda.get_device_properties(device), "uuid", ""))
    return uuid if not uuid or uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}"


def build_machine_sampling(context: RunContext) -> list[MachineSampling]:
    """Return the extension. A run that a command observes, and a dry run, are not sampled."""
    world, settings = context.world, context.settings
    if world.dry or context.inspection is not None:
        return []
    if not settings.machine.every:
        return [MachineSampling(context, None)]
    run = SampledRun(
        run_dir=context.run_dir,
        host=world.host,
        rank=context.group.rank if world.number is None else world.number,
        ranks=world.local_size,
        threads=settings.threads,
        every=settings.machine.every,
        device=uuid_of(context.device),
    )
    return [MachineSampling(context, SamplingThread(run, context.monitor.note))]
