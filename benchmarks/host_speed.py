"""Compare samples per second with DistributedDataParallel on hosts with links of 1 Gbit/s.

    python -m benchmarks.host_speed            about fifteen minutes; needs root, iproute2 and two cores
    python -m benchmarks.host_speed --quick    a smoke test

The hosts are network namespaces (tests/network/hosts.py), and `tc` limits what each sends and receives. Each host has a
core of its own, and torchrun starts its processes. The loops alternate step by step (turns.py): ours with
exchange=tree, and DistributedDataParallel as in exchange.py. The scenes:

    1 x 2           one process on each host
    2 x 2           two processes on each host, which share its core
    one slow host   one process on each host; the second host may use a third of its core (a quota of a control group)
    one busy host   one process on each host; on the core of the second host, two other programs compute all the time,
                    so the process there has a third of the core on average, and more after it has waited
    one slow link   four hosts that share two cores, one process on each; the link of the last one has a tenth of the
                    rate. A third loop is ours as if all links were alike ("even")
    wide            two processes on each host: exchange=wide, which adds up the processes of a host first, and the
                    same with the all-reduce of gloo over all processes ("wide, library")

    encrypted       one process on each host; ours with secure.transport=tls over ours ("encrypted"), and ours with
                    backend=tcp, where connections are proved and not encrypted, over ours ("members"). Each loop takes
                    five steps in a row, of which the first does not count: TCP begins with a small window after a
                    pause (RFC 5681, 4.1), and two other loops make a longer pause than a run does

The figure is the time of DistributedDataParallel's step over ours, so our samples per second over its samples per
second. The model is the GPT of exchange.py: 10.7 M parameters, 43 MB of gradient, 16 lines of 128 bytes a step.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.exchange import build
from benchmarks.machine import parser, show
from benchmarks.tasks import TASKS
from benchmarks.turns import Comparison, LoopContext, LoopStep, Turns, measure, ours, run_loops, table
from tests.network.hosts import ROOT, Host, hosts, missing
from unisono.distributed.connections.collective_group import TCP, TLS, register
from unisono.environment import World, inherited
from unisono.handshake.certificates import run_credentials
from unisono.handshake.mutual_proof import RunSecret

CORES = 2
PORT = 29500
LIMIT_SECONDS = 900.0
BUSY = "while True: pass"
READY = "unisono host_speed: "
"""Begins the line with the figures of rank 0."""


@dataclass(frozen=True)
class Scene:
    """What runs on the hosts.

    Args:
        processes: Processes of the run on each host.
        hosts: How many there are.
        others: Programs that compute all the time on the core of the last host.
        cores: The number of cores that the last host may use.
        slow_link: The rate of the last host's link, over that of the others.
        baselines: The loops, as in Comparison. The baseline is ours: a ratio of times is then the ratio of samples per
            second the other way round.
        virtual_ranks: V.
        warm_up: Steps that do not count.
        in_a_row: Steps that a loop takes in a row, as in Comparison.
    """

    processes: int
    hosts: int = 2
    others: int = 0
    cores: float = 1.0
    slow_link: float = 1.0
    baselines: Mapping[str, str] = field(default_factory=lambda: {"DDP": "tree"})
    virtual_ranks: int = 8
    warm_up: int = 3
    in_a_row: int = 1

    @property
    def comparison(self) -> Comparison:
        processes = self.hosts * self.processes
        return Comparison("host_speed", self.baselines, build_loop, processes, self.warm_up, in_a_row=self.in_a_row)


SCENES = {
    "1 x 2": Scene(1),
    "2 x 2": Scene(2),
    "one slow host": Scene(1, cores=1 / 3, warm_up=20),  # by then virtual ranks have moved
    "one busy host": Scene(1, others=2, warm_up=20),
    "one slow link": Scene(1, hosts=4, slow_link=0.1, baselines={"DDP": "tree", "even": "tree"}),
    "encrypted": Scene(1, baselines={"encrypted": "tree", "members": "tree"}, warm_up=5, in_a_row=5),
    "wide": Scene(2, baselines={"wide, library": "wide"}),
}


def build_loop(context: LoopContext, loop: str) -> Iterator[LoopStep]:
    group, settings = context.group, context.settings
    if loop == "even":
        return ours(context, settings, replace(group, links=()), loop)
    if loop in ("encrypted", "members"):
        register(context.world.host)
        register(context.world.host, partial(run_credentials, RunSecret(b"of this benchmark")))
        backend = TLS if loop == "encrypted" else TCP
        return ours(context, settings, replace(group, handle=dist.new_group(backend=backend), backend=backend), loop)
    if loop.startswith("wide"):
        placed = group if loop == "wide" else replace(group, neighbors={}, hosts=())
        return ours(context, replace(settings, exchange="wide"), placed, loop)
    return build(context, loop)


@contextmanager
def others_on(host: Host, core: int, count: int) -> Iterator[None]:
    """Let programs compute on a core of a host. Each is a session of its own: some kernels divide cores by session."""
    with ExitStack() as stack:
        for _ in range(count):
            words = ["taskset", "-c", str(core), sys.executable, "-IS", "-c", BUSY]
            stack.callback(host.start(words, start_new_session=True).kill)
        yield


QUOTA_PERIOD_MS = 10
"""Time in which a control group may use its quota; the kernel's 100 ms would be a tenth of a step."""


@contextmanager
def cpu_quota(cores: float) -> Iterator[list[str]]:
    """Yield words to put before a command, so that it and its children use this number of cores at most."""
    if cores >= 1:
        yield []
        return
    root = Path("/sys/fs/cgroup")
    second = (root / "cgroup.controllers").exists()  # version 2 (docs.kernel.org/admin-guide/cgroup-v2.html)
    if second:
        (root / "cgroup.subtree_control").write_text("+cpu")
    folder = (root if second else root / "cpu") / f"unisono-{uuid.uuid4().hex}"
    period = QUOTA_PERIOD_MS * 1000
    quota = int(cores * period)
    limits = {"cpu.max": f"{quota} {period}"} if second else {"cpu.cfs_period_us": period, "cpu.cfs_quota_us": quota}
    folder.mkdir()
    try:
        for name, limit in limits.items():
            (folder / name).write_text(str(limit))
        yield ["sh", "-c", f'echo 0 > {folder}/cgroup.procs; exec "$@"', "sh"]
    finally:
        while (folder / "cgroup.procs").read_text():  # the last processes of the host end
            time.sleep(0.1)
        folder.rmdir()


def run_on_hosts(scene: str, bits: float, turns: Turns) -> Any:
    """Run the loops on the hosts of a scene, and return what rank 0 has measured."""
    here = SCENES[scene]
    with hosts(here.hosts, shared=[turns.folder], bits_per_second=bits) as every:
        if here.slow_link < 1:
            every[-1].link(bits_per_second=here.slow_link * bits)
        words = [sys.executable, "-m", "torch.distributed.run", "--nnodes", str(len(every))]
        words += ["--master-addr", every[0].name, "--master-port", str(PORT), "--nproc-per-node", str(here.processes)]
        script = ["-m", "benchmarks.host_speed", "--process", json.dumps([scene, *turns[1:]])]
        options: dict[str, Any] = {"env": inherited({"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}), "cwd": ROOT}
        options |= {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        with others_on(every[-1], CORES - 1, here.others), cpu_quota(here.cores) as limited:
            running = []
            for node, host in enumerate(every):
                limit = limited if node == len(every) - 1 else []
                pinned = [*limit, "taskset", "-c", str(node % CORES)]
                running.append(host.start([*pinned, *words, "--node-rank", str(node), *script], **options))
            outputs = [process.communicate(timeout=LIMIT_SECONDS) for process in running]
    lines = [line for out, _ in outputs for line in out.splitlines() if line.startswith(READY)]
    if len(lines) != 1:
        raise RuntimeError("the processes on the hosts failed:\n" + "\n".join(error[-3000:] for _, error in outputs))
    return json.loads(lines[0].removeprefix(READY))


def process(scene: str, *turns: Any) -> None:
    """Be one process of a run. torchrun starts it."""
    torch.set_num_threads(1)
    world = World.current()
    found = run_loops(world, SCENES[scene].comparison, *turns)
    if world.is_main:
        print(READY + json.dumps(found), flush=True)


def main() -> None:
    flags = parser(__doc__)
    flags.add_argument("--rounds", type=int, default=2, help="number of times that new processes are started (2)")
    flags.add_argument("--steps", type=int, default=12, help="steps of each loop in a round (12)")
    flags.add_argument("--scene", choices=list(SCENES), help="only this scene")
    flags.add_argument("--model", choices=list(TASKS), default="GPT", help="the model (GPT)")
    flags.add_argument("--megabits", type=float, default=1000.0, help="rate of a link in Mbit/s (1000)")
    flags.add_argument("--process", help=argparse.SUPPRESS)
    args = flags.parse_args()
    if args.process:
        process(*json.loads(args.process))
        return
    if reason := missing():
        sys.exit(f"This benchmark cannot run here: {reason}.")
    rounds, steps = (1, 2) if args.quick else (args.rounds, args.steps)
    rows: list[dict[str, Any]] = []
    lines: list[str] = []
    for scene in [args.scene] if args.scene else SCENES:
        comparison, ranks = SCENES[scene].comparison, SCENES[scene].virtual_ranks
        found = measure(comparison, args.model, ranks, rounds, steps, partial(run_on_hosts, scene, 1e6 * args.megabits))
        rows.append({"scene": scene} | found)
        lines += [scene, table(comparison, rows[-1:])]
        print("\n".join(lines[-2:]), file=sys.stderr, flush=True)
    show("host_speed", {"rows": rows}, lambda: "\n".join(lines), as_json=args.json)


if __name__ == "__main__":
    main()
