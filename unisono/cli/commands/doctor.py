"""unisono doctor: check that this machine is ready to train, and say how to repair it.

Checks that may crash run in a process of their own, because a broken library may end the process that imports it.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json as json_
import platform
import shutil
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import psutil  # type: ignore[import-untyped]
from cyclopts import Parameter

import unisono
from unisono.cli.request.host_flags import HostFlags
from unisono.cli.request.run_options import WHERE, RunRequest
from unisono.cli.request.suggestions import WHOLE
from unisono.cli.survey.survey_command import doctor_hosts, doctor_job
from unisono.config.wording import size
from unisono.environment import World, host_of, join_port, terminal_columns, variables
from unisono.environment.routes import outer_interfaces, route_to
from unisono.errors import SettingsError, WorldError
from unisono.launcher import local_launch
from unisono.machine.host_load import usable_cores

NEEDED = ("torch", "numpy", "cyclopts", "rich", "psutil", "cloudpickle", "safetensors", "fsspec", "braceexpand")
"""The dependencies of pyproject.toml."""
SIBLINGS = ("torchvision", "torchaudio")
"""Packages that are not needed, but whose broken installation breaks the import of other libraries."""
SHM_BYTES = 256 * 2**20
DISK_BYTES = 2 * 2**30

TORCH_QUERY = """
import json, torch, torch.distributed as dist
b = torch.backends
devices = []
if torch.accelerator.is_available():
    kind = torch.accelerator.current_accelerator().type
    module = getattr(torch, kind)
    for i in range(torch.accelerator.device_count()):
        p = module.get_device_properties(i) if hasattr(module, "get_device_properties") else None
        devices.append([f"{kind}:{i}", getattr(p, "name", kind), getattr(p, "total_memory", 0)])
x = torch.randn(64, 64, requires_grad=True)
(x @ x).sum().backward()
names = ["gloo", "nccl", "mpi", "ucc", "xccl"]
print(json.dumps({
    "version": torch.__version__, "cuda": torch.version.cuda, "hip": torch.version.hip,
    "instructions": b.cpu.get_cpu_capability(), "threads": torch.get_num_threads(),
    "back ends": [n for n, has in {
        "mkl": b.mkl.is_available(), "mkldnn": b.mkldnn.is_available(), "openmp": b.openmp.is_available(),
        "cuda": b.cuda.is_built(), "cudnn": b.cudnn.is_available(), "mps": b.mps.is_built(),
    }.items() if has],
    "exchange": [n for n in names if dist.is_available() and getattr(dist, f"is_{n}_available", lambda: False)()],
    "devices": devices,
}))
"""


class Finding(NamedTuple):
    """The result of one check.

    Args:
        level: ok, note or broken.
        what: what was checked.
        facts: what was found.
        remedy: what to type to repair it.
    """

    level: Literal["ok", "note", "broken"]
    what: str
    facts: str
    remedy: str = ""


def doctor(
    *,
    rehearse: Annotated[str | None, Parameter(metavar="TARGET")] = None,
    ranks: Annotated[int, WHOLE, Parameter(name=["--ranks", "-n"], metavar="N", group=WHERE)] = 2,
    script: Annotated[Path | None, Parameter(metavar="SCRIPT", group=WHERE)] = None,
    several: HostFlags = HostFlags(),  # noqa: B008  (frozen)
    request: RunRequest = RunRequest(),  # noqa: B008  (frozen)
) -> int:
    """Check that this machine, or several hosts, are ready to train, and say what to type if they are not.

    Two processes are started and exchange data. With --hosts, and in a job of torchrun, srun or mpirun, the hosts and
    the links between them are examined. Exit status 1: something is broken; 2: a host cannot be examined.

    Parameters
    ----------
    rehearse
        Inject failures into runs of this recipe or script instead, and report which failures the runs survive.
    ranks
        Number of processes of a rehearsal.
    script
        With several hosts: a script that must be the same file on all of them.
    """
    if rehearse is not None:
        from unisono.cli.commands import rehearse as rehearsal

        return rehearsal.rehearse(rehearse, ranks, request)
    json = request.json
    if request != RunRequest(json=json, run_dir=request.run_dir) or ranks != 2:
        do = "unisono doctor, or with a script: unisono doctor --rehearse text"
        raise SettingsError("These flags need --rehearse.", "Without it, no script is run.", do)
    if several.words:
        return doctor_hosts(several, script, request.run_dir, json=json)
    world = _world_of_job()
    if world is not None:
        return doctor_job(world, script, request.run_dir, examine_for_job, json=json)
    if script is not None or request.run_dir is not None:
        do = "unisono doctor --hosts a,b --script train.py"
        raise SettingsError("--script and --run-dir need several hosts.", "Each host is compared with this one.", do)
    findings = []
    for finding in examine():
        findings.append(finding)
        if not json:
            print_finding(finding)
    broken = [finding for finding in findings if finding.level == "broken"]
    if json:
        print(json_.dumps({"broken": len(broken), "findings": [finding._asdict() for finding in findings]}))
    else:
        devices = [f for f in findings if f.what == "device" and ":" in f.facts.partition(" ")[0]]
        more = " --cpu-ranks 1" if len(devices) == 1 else ""  # the second process has none
        ready = f"Ready. Next: unisono run text --ranks 2{more}\nWith a training script: unisono convert train.py"
        print(f"{len(broken)} broken." if broken else ready)
    return 1 if broken else 0


def _world_of_job() -> World | None:
    """Return the place of this process among several that an engine has started; None for a single one."""
    try:
        world = World.current()
    except WorldError:  # a finding of `network`
        return None
    return world if world.foreign and world.size > 1 else None


def print_finding(finding: Finding) -> None:
    """Print a finding, and what to do below it, with colors on a terminal."""
    from rich.console import Console
    from rich.text import Text

    style = {"ok": "green", "note": "yellow", "broken": "bold red"}[finding.level]
    console = Console(soft_wrap=True, highlight=False)
    columns = terminal_columns()
    room = max(columns - INDENT, 20) if columns else sys.maxsize
    first, *more = textwrap.wrap(finding.facts, room, break_long_words=False, break_on_hyphens=False) or [""]
    console.print(Text.assemble((f"{finding.level:7}", style), f"{finding.what:14} {first}"))
    for line in more:
        console.print(Text(" " * INDENT + line))
    if finding.remedy:
        remedy = f"Next: {finding.remedy}"  # on one line, because it is copied
        console.print(Text(" " * (INDENT + 1 if len(remedy) + INDENT < (columns or sys.maxsize) else 2) + remedy))


INDENT = 22
"""Columns before the facts of a finding."""


def examine() -> Iterator[Finding]:
    """Run all checks, the most important ones first, and the slow one last."""
    yield from _machine()
    yield from _versions()
    torch, finding = _check_torch()
    yield finding
    if torch is not None:
        yield from _about_torch(torch)
    for name in SIBLINGS:
        yield from _sibling(name)
    yield from _room()
    if torch is not None:
        yield _collective()


def examine_for_job() -> Iterator[Finding]:
    """Run the checks of a host that the group of a job, whose processes import torch and exchange data, does not do."""
    yield from _machine()
    yield from _versions()


def _machine() -> Iterator[Finding]:
    cores = len(usable_cores())
    memory = psutil.virtual_memory()
    true = f"{platform.system()} {platform.release()}, {_processor()}, {cores} available cores, "
    true += f"{size(memory.total)} memory ({size(memory.available)} free)"
    yield Finding("ok", "machine", true)
    set_here = variables(["OMP_NUM_THREADS", "MKL_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "GLOO_SOCKET_IFNAME"])
    if set_here:
        yield Finding("note", "environment", ", ".join(f"{k}={v}" for k, v in set_here.items()))
    name = local_launch.loopback_name()
    if name is None:
        do = "ip link set lo up"
        yield Finding("broken", "loopback", "no network interface has 127.0.0.1, so processes cannot connect", do)
    yield from network()


def network() -> Iterator[Finding]:
    """Check what processes on several hosts need: an interface, and where the launcher lets them meet."""
    found = ", ".join(map(str, outer_interfaces())) or "no interface besides loopback"
    yield Finding("ok", "network", found)
    try:
        world = World.current()
    except WorldError as error:
        (problem,) = error.problems
        yield Finding("broken", "launcher", f"{problem.error} {problem.facts}", problem.remedy)
        return
    place = host_of(world.store)
    if place is None:
        return
    true = f"{world.launcher}: process {world.rank} of {world.size}, which meet at {join_port(*place)}"
    route = route_to(place[0])
    if route is None:
        do = "export MASTER_ADDR=ADDRESS (of the host of process 0, in a network that all hosts share)"
        yield Finding("broken", "launcher", f"{true}: no route leads there from here", do)
    else:
        yield Finding("ok", "launcher", f"{true}, by {route}")


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _versions() -> Iterator[Finding]:
    yield Finding("ok", "python", f"{platform.python_version()} ({sys.executable}), unisono {unisono.__version__}")
    found, missing = [], []
    for name in NEEDED:
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            missing.append(name)
    yield Finding("ok", "libraries", ", ".join(found))
    if missing:
        do = f"{sys.executable} -m pip install {' '.join(missing)}"
        yield Finding("broken", "libraries", f"not installed: {', '.join(missing)}", do)


def _check_torch() -> tuple[dict[str, Any] | None, Finding]:
    answer, error = run_isolated(TORCH_QUERY)
    if answer is None:
        do = f"{sys.executable} -m pip install --force-reinstall torch"
        return None, Finding("broken", "torch", f"does not work: {error}", do)
    about: dict[str, Any] = json_.loads(answer)
    build = f"CUDA {about['cuda']}" if about["cuda"] else f"ROCm {about['hip']}" if about["hip"] else "CPU only"
    true = f"{about['version']} ({build}); back ends {', '.join(about['back ends'])}; "
    true += f"process groups: {', '.join(about['exchange']) or 'none'}"
    if "gloo" not in about["exchange"]:
        do = f"{sys.executable} -m pip install --force-reinstall torch"
        return about, Finding("broken", "torch", f"{true}: processes on CPU need gloo", do)
    return about, Finding("ok", "torch", true)


def _about_torch(torch: dict[str, Any]) -> Iterator[Finding]:
    true = f"{torch['instructions']}; a run uses 1 thread per process; --set threads=N changes it "
    yield Finding("ok", "instructions", true + f"(torch's default is {torch['threads']})")
    for device, name, memory in torch["devices"]:
        yield Finding("ok", "device", f"{device} {name}" + (f", {size(memory)}" if memory else ""))
    if not torch["devices"]:
        if not Path("/proc/driver/nvidia/version").exists():
            yield Finding("ok", "device", "cpu")
        elif torch["cuda"]:
            do = "nvidia-smi (it shows the driver's version; a newer driver, or a torch for an older CUDA, is needed)"
            yield Finding("broken", "device", f"a GPU, but torch for CUDA {torch['cuda']} cannot use it", do)
        else:
            do = f"{sys.executable} -m pip install --force-reinstall torch (PyPI's build for Linux has CUDA)"
            yield Finding("note", "device", "cpu; there is a GPU, but this torch is built without CUDA", do)


def _sibling(name: str) -> Iterator[Finding]:
    """Check a package that is built for one version of torch."""
    if importlib.util.find_spec(name) is None:
        return
    answer, error = run_isolated(f"import {name}; print({name}.__version__)")
    if answer is None:
        do = f"{sys.executable} -m pip uninstall {name} (Unisono does not need it), or install its build for this torch"
        yield Finding("broken", name, f"is installed, but cannot be imported: {error}", do)
    else:
        yield Finding("ok", name, answer)


def _room() -> Iterator[Finding]:
    for what, path, least, do in (
        ("disk", Path.cwd(), DISK_BYTES, "free space, or: unisono run text --run-dir /path/on/another/disk"),
        ("temporary", Path(tempfile.gettempdir()), 2**20, "free space: df -h " + tempfile.gettempdir()),
        ("shared memory", Path("/dev/shm"), SHM_BYTES, "docker run --shm-size=1g ...; or --set loader.workers=0"),
    ):
        if not path.exists():
            yield Finding("note", what, f"there is no {path}", do)
            continue
        free = shutil.disk_usage(path).free
        enough = free >= least
        yield Finding("ok" if enough else "note", what, f"{size(free)} free in {path}", "" if enough else do)


def _collective() -> Finding:
    """Let two processes exchange data, with the launcher of a run."""
    with tempfile.TemporaryDirectory(prefix="unisono-doctor-") as folder:
        result = Path(folder) / "result.json"
        script = Path(__file__).parents[1] / "benchmark" / "probe.py"
        logs = Path(folder) / "log"
        outcome = local_launch.run(script, [str(result)], ranks=2, logs=logs, screen=None, verbose=False)
        if outcome.failure is not None:
            record = outcome.failure.record
            true = record.message if record else str(outcome.failure)
            do = "check that a firewall allows 127.0.0.1, then: unisono doctor"
            return Finding("broken", "exchange", f"two processes could not exchange data: {true}", do)
        if not result.exists():
            return Finding("note", "exchange", "stopped before the measurement", "unisono doctor")
        measured = json_.loads(result.read_text())
    true = f"all_reduce between two processes: {measured['latency_seconds'] * 1e6:.0f} us for 4 bytes, "
    true += f"{measured['bytes_per_second'] / 1e9:.2f} GB/s for 16 MB; "
    true += "shared memory works" if measured["neighbors"] else "no shared memory: gradients are sent as messages"
    if not measured["sum_is_right"]:
        do = f"{sys.executable} -m pip install --force-reinstall torch"
        return Finding("broken", "exchange", "the sum of 1 and 1 over two processes was not 2", do)
    return Finding("ok", "exchange", true)


def run_isolated(code: str) -> tuple[str | None, str]:
    """Run code in a new Python process, and return the last line that it prints; None and the error if it fails."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, stdin=subprocess.DEVNULL
        )
    except subprocess.TimeoutExpired:
        return None, "it did not answer within 120 seconds"
    if done.returncode < 0:
        return None, f"it crashed (signal {-done.returncode})"
    if done.returncode:
        return None, (done.stderr.strip().splitlines() or ["no message"])[-1]
    return done.stdout.strip().splitlines()[-1], ""
