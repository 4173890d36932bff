"""Inject random faults into runs over three hosts, and check that each ends exactly or names its cause.

    python -m benchmarks.host_faults                writes docs/measured/host-faults.md (50 faults: about half an hour)
    python -m benchmarks.host_faults --count 5      five faults, and no page
    python -m benchmarks.host_faults --only cable   one kind

Each fault has a run of its own: four processes on the hosts a, b and c (network namespaces with an SSH server each),
started on a fourth one. The table counts the runs that end with the fingerprint of an undisturbed run, those that end
with a message that names the cause, and others. The exit status is 1 if there is another one: other bits, a hang of
more than LIMIT_SECONDS, an unclear message, or a process that is left. Needs root, iproute2, sshd, and faketime for
the clock.
"""

from __future__ import annotations

import json
import os
import random
import re
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from benchmarks.kills import SCRIPT
from benchmarks.machine import line, parser
from tests.network import hosts as namespaces
from tests.network import ssh_hosts
from tests.network.hosts import Host
from tests.network.ssh_cluster import Cluster, left, result_of, step_is_done
from tests.network.test_hosts import processes_of

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "measured" / "host-faults.md"
COUNT = 50
LIMIT_SECONDS = 150.0
"""Time limit of a run: 20 steps of 0.4 s and more, the start, and 10 s of silence. A delay of 0.2 s takes longest."""
START_SECONDS = 300.0
"""Time limit until the step before the fault, which a busy machine may need."""
LEFT_SECONDS = 20.0
SITE = """
import os, select, time
if "FAKETIME" in os.environ:  # the library shifts the monotonic time until which time.sleep sleeps, too
    time.sleep = lambda seconds: select.select([], [], [], seconds) and None
"""
PLACES = "a:1,b:1,c:2"
SETTINGS = ("steps=20", "pause=0.2")


class Scene:
    """What a fault may change.

    Args:
        cluster: the hosts.
        name: the run's folder.
        rng: random choices.
    """

    def __init__(self, cluster: Cluster, name: str, rng: random.Random) -> None:
        self.cluster, self.name, self.rng = cluster, name, rng
        self.host = cluster.others[rng.choice("abc")]

    def other(self) -> Host:
        """Return another host than `host`."""
        return self.rng.choice([each for each in self.cluster.others.values() if each is not self.host])


Fault = Callable[[Scene], Iterator[str]]
"""A fault yields once, with its description, when it has begun, and then ends it."""


def killed_process(scene: Scene) -> Iterator[str]:
    """Kill a process of the run."""
    lines = {pid: Path(f"/proc/{pid}/cmdline").read_bytes() for pid in processes_of(scene.host)}
    pid = scene.rng.choice([pid for pid, words in lines.items() if b"worker_main" in words])
    os.kill(int(pid), signal.SIGKILL)
    yield f"a process on {scene.host.name}"


def host_off(scene: Scene) -> Iterator[str]:
    """Power a host off."""
    scene.host.kill()
    yield scene.host.name
    scene.host.boot()
    scene.cluster.ssh.start(scene.host.name)


def cable(scene: Scene) -> Iterator[str]:
    """Pull the cable of a host."""
    scene.host.pull()
    yield scene.host.name
    scene.host.plug()


def half_open(scene: Scene) -> Iterator[str]:
    """Drop all packets from one host to another one."""
    other = scene.other()
    scene.host.drop(other)
    yield f"from {scene.host.name} to {other.name}"
    scene.host.heal(other)


def head_half_open(scene: Scene) -> Iterator[str]:
    """Drop all packets between a host and that of the launcher, in one direction."""
    here, there = scene.rng.sample([scene.host, scene.cluster.head], 2)
    here.drop(there)
    yield f"from {here.name} to {there.name}"
    here.heal(there)


def loss(scene: Scene) -> Iterator[str]:
    """Lose one packet of a hundred, on all cables."""
    for host in scene.cluster.others.values():
        host.link(loss=0.01)
    yield "all hosts"
    for host in scene.cluster.others.values():
        host.link()


def delay(scene: Scene) -> Iterator[str]:
    """Delay what a host sends."""
    scene.host.link(delay_seconds=0.2)
    yield scene.host.name
    scene.host.link()


def clock(scene: Scene) -> Iterator[str]:
    """Set the clock of a host an hour forward or back, before the run."""
    offset = scene.rng.choice([-3600, 3600])
    scene.host.clock(offset)
    _restart_server(scene)
    yield f"{scene.host.name}, {offset:+d} s"
    scene.host.environment.clear()
    _restart_server(scene)


def full_temporary(scene: Scene) -> Iterator[str]:
    """Give a host a folder for temporary files without space, before the run."""
    scene.host.fill("/tmp/full", 4096)
    scene.host.run(["dd", "if=/dev/zero", "of=/tmp/full/file", "bs=4096", "count=1"])
    scene.host.environment["TMPDIR"] = "/tmp/full"
    _restart_server(scene)
    yield scene.host.name
    scene.host.environment.clear()
    _restart_server(scene)


def full_run_dir(scene: Scene) -> Iterator[str]:
    """Fill the disk with the run directory."""
    filler = scene.cluster.folder / "filler"
    with filler.open("wb") as file:
        try:
            while True:
                file.write(bytes(1 << 16))
                file.flush()
        except OSError:
            pass
    yield "the shared disk"
    filler.unlink()


def _restart_server(scene: Scene) -> None:
    scene.cluster.ssh.stop(scene.host.name)
    scene.cluster.ssh.start(scene.host.name)


class Kind(NamedTuple):
    """A kind of fault.

    Attributes:
        text: its name in the table.
        fault: see Fault.
        cause: what a message must have that ends a run after it; "": the run must not end.
        early: whether it begins before the run.
        silent: whether a host falls silent, so that the time to the next step is measured.
    """

    text: str
    fault: Fault
    cause: str = ""
    early: bool = False
    silent: bool = False


KINDS = {
    "process": Kind("A process is killed", killed_process),
    "power": Kind("A host is powered off", host_off, silent=True),
    "cable": Kind("A cable is pulled", cable, silent=True),
    "half": Kind("Packets of one direction between two hosts are dropped", half_open, silent=True),
    "head": Kind("Packets of one direction between a host and the launcher are dropped", head_half_open),
    "loss": Kind("1 % of packets are lost, everywhere", loss),
    "delay": Kind("A host sends 200 ms late", delay),
    "clock": Kind("The clock of a host is an hour off", clock, early=True),
    "temporary": Kind(
        "The folder for temporary files is full", full_temporary, "No (space left|usable temp)", early=True
    ),
    "disk": Kind("The disk of the run directory is full", full_run_dir, "No space left on device"),
}


class Outcome(NamedTuple):
    """The end of a run.

    Attributes:
        kind: its kind of fault.
        where: what the fault hit.
        ending: "exact", "named", or what is wrong.
        seconds: from the fault to the next finished step; None: not measured.
        text: what the run printed.
    """

    kind: str
    where: str
    ending: str
    seconds: float | None
    text: str


def inject(cluster: Cluster, name: str, kind: str, rng: random.Random, fingerprint: str) -> Outcome:
    """Start a run, inject a fault of a kind, and wait for the end of the run."""
    scene, found = Scene(cluster, name, rng), KINDS[kind]
    fault, after = found.fault(scene), rng.randint(2, 12)
    where = next(fault) if found.early else ""
    words = [word for setting in SETTINGS for word in ("--set", setting)]
    process, began = cluster.start("--hosts", PLACES, "--run-dir", name, *words, script="faults.py"), time.monotonic()
    try:
        while not found.early and process.poll() is None and not step_is_done(cluster.folder / name, after):
            if time.monotonic() - began > START_SECONDS:
                process.kill()
                return Outcome(kind, where, "did not start", None, process.communicate()[1])
            time.sleep(0.05)
        at = time.time()
        where = where or next(fault)
        try:
            _, err = process.communicate(timeout=LIMIT_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            return Outcome(kind, where, "hang", None, process.communicate()[1])
    finally:
        if where:  # it has begun
            next(fault, None)
    ending = _ending(cluster.folder / name, process.returncode, err, found, fingerprint)
    until = time.monotonic() + LEFT_SECONDS
    while left(cluster):
        if time.monotonic() > until:
            ending = f"processes are left: {left(cluster)}"
            break
        time.sleep(0.2)
    seconds = next_step_after(cluster.folder / name, at) if found.silent and ending == "exact" else None
    return Outcome(kind, where, ending, seconds, err)


def _ending(run_dir: Path, status: int, err: str, kind: Kind, fingerprint: str) -> str:
    if status == 0:
        return "exact" if result_of(run_dir)["weights_sha256"] == fingerprint else "other bits"
    return "named" if kind.cause and re.search(kind.cause, err) else f"status {status}"


def next_step_after(run_dir: Path, at: float) -> float | None:
    """Return the seconds from `at` to the end of the longest pause between two steps that ends later."""
    ends: dict[int, float] = {}
    for path in (run_dir / "timeline").glob("rank-*.jsonl"):
        for text in path.read_text().splitlines():
            entry = json.loads(text)
            if "step" in entry and "us" in entry:
                ends[entry["step"]] = min(entry["t"], ends.get(entry["step"], entry["t"]))
    pauses = [(after - before, after - at) for before, after in pairwise(sorted(ends.values())) if after > at]
    return max(pauses)[1] if pauses else None


@contextmanager
def cluster_of_three() -> Iterator[Cluster]:
    """Make the hosts, with a small shared disk."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="faults-", ignore_cleanup_errors=True)))
        subprocess.run(["mount", "-n", "-t", "tmpfs", "-o", "size=64m", "tmpfs", str(folder)], check=True)
        stack.callback(subprocess.run, ["umount", "-l", str(folder)], check=False)
        head, *others = stack.enter_context(namespaces.hosts(3, head=True, shared=[folder]))
        (folder / "faults.py").write_text(SCRIPT)
        (folder / "site").mkdir()
        (folder / "site" / "sitecustomize.py").write_text(SITE)
        cluster = Cluster(head, others, folder)
        cluster.python_path.append(folder / "site")
        yield cluster


def undisturbed(cluster: Cluster) -> str:
    """Return the fingerprint of one process."""
    words = [word for setting in ("steps=20", "pause=0") for word in ("--set", setting)]
    status, err = cluster.run("--run-dir", "whole", *words, script="faults.py")
    assert status == 0, err
    return str(result_of(cluster.folder / "whole")["weights_sha256"])


def table(outcomes: Sequence[Outcome]) -> str:
    """Return the table of outcomes."""
    rows = ["| Fault | Runs | Same bits | Message | Other | Next step: median (largest) |", "|---|---|---|---|---|---|"]
    for name, kind in KINDS.items():
        mine = [outcome for outcome in outcomes if outcome.kind == name]
        endings = [outcome.ending for outcome in mine]
        seconds = [outcome.seconds for outcome in mine if outcome.seconds is not None]
        time_ = f"{statistics.median(seconds):.1f} s ({max(seconds):.1f} s)" if seconds else ""
        exact, named = endings.count("exact"), endings.count("named")
        if mine:
            rows.append(f"| {kind.text} | {len(mine)} | {exact} | {named} | {len(mine) - exact - named} | {time_} |")
    return "\n".join(rows)


HEAD = """# Faults of hosts

{count} random faults, each in a run of its own: four processes on three hosts, started on a fourth one with
`unisono run --hosts a:1,b:1,c:2`. The hosts are network namespaces with a real SSH server each. A fault begins after a
random step, those of clocks and temporary files before the run. `make faults` repeats this and writes this page.

- **Same bits**: the run ends with the fingerprint of one undisturbed process.
- **Message**: the run ends, and its message names the cause.
- **Other**: other bits, an unclear message, a process that is left, or a hang of more than {limit:g} s.
- **Next step**: seconds from the fault to the next finished step. A silent host counts as lost after 10 s.

"""


def main() -> None:
    """Inject the faults, print the table, and write the page."""
    flags = parser(__doc__)
    flags.add_argument("--count", type=int, default=COUNT, help="the number of faults")
    flags.add_argument("--seed", type=int, default=1, help="of the random choices")
    flags.add_argument("--only", choices=KINDS, help="one kind of fault")
    flags.add_argument("--page", type=Path, default=None, help=f"where the page goes ({PAGE.relative_to(ROOT)})")
    args = flags.parse_args()
    if reason := namespaces.missing() or ssh_hosts.missing():
        sys.exit(f"These faults cannot be injected here: {reason}.")
    names = [args.only] if args.only else [*KINDS]
    if namespaces.faketime_library() is None and "clock" in names:
        print("The clock is left out: Debian's package faketime is missing.", file=sys.stderr)
        names.remove("clock")
    rng = random.Random(args.seed)
    kinds = [names[number % len(names)] for number in range(2 if args.quick else args.count)]
    rng.shuffle(kinds)
    outcomes = []
    with cluster_of_three() as cluster:
        fingerprint = undisturbed(cluster)
        for number, kind in enumerate(kinds):
            outcome = inject(cluster, f"fault-{number}", kind, rng, fingerprint)
            outcomes.append(outcome)
            took = f", next step after {outcome.seconds:.1f} s" if outcome.seconds is not None else ""
            print(f"{number + 1:3} {kind} ({outcome.where}): {outcome.ending}{took}", file=sys.stderr, flush=True)
            if outcome.ending not in ("exact", "named"):
                print(outcome.text, file=sys.stderr, flush=True)
    print(json.dumps([outcome._asdict() for outcome in outcomes]) if args.json else table(outcomes))
    page = args.page or (PAGE if len(outcomes) >= COUNT else None)
    if page is not None:
        command = shlex.join(["python", "-m", "benchmarks.host_faults", *sys.argv[1:]])
        foot = f"\n\nMeasured with `{command}`, {line()}.\n"
        page.write_text(
            HEAD.format(count=len(outcomes), limit=LIMIT_SECONDS) + table(outcomes) + foot, encoding="utf-8"
        )
    sys.exit(any(outcome.ending not in ("exact", "named") for outcome in outcomes))


if __name__ == "__main__":
    main()
