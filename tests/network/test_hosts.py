"""Hosts for tests are real: each has its own network, processes and files, and faults of cables and power are real."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.network.hosts import PATIENCE_SECONDS, ROOT, Host, HostProcess, faketime_library, hosts, missing
from unisono.environment import inherited

reason = missing()
pytestmark = pytest.mark.skipif(bool(reason), reason=reason)

needs_faketime = pytest.mark.skipif(faketime_library() is None, reason="Debian's package faketime is missing")

SILENCE_SECONDS = 0.3
"""How long a test listens for what must not come."""

PORT = 7000
TALKER = """
import select, socket, sys, time
port = int(sys.argv[1])
server = socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
letters = socket.socket(socket.AF_INET6, socket.SOCK_DGRAM)
letters.bind(("", port))
call = None
def listen(name):                       # a server for one call
    global call
    print("listening", flush=True)
    call = server.accept()[0]
def connect(name):
    global call
    call = socket.create_connection((name, port))
    call.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
def say(size):
    call.sendall(bytes(int(size)))
def hear(size, seconds):                # "": nothing came in this time; "end": the connection has ended
    heard = 0
    while heard < int(size):
        if not select.select([call], [], [], float(seconds))[0]:
            return ""
        data = call.recv(1 << 20)
        if not data:
            return "end"
        heard += len(data)
    return "heard"
def post(name, port, text, count):
    address = socket.getaddrinfo(name, port, socket.AF_INET6, type=socket.SOCK_DGRAM, flags=socket.AI_V4MAPPED)[0][4]
    for _ in range(int(count)):
        letters.sendto(text.encode(), address)
def read():                             # the next letter
    return letters.recv(100).decode()
def count(text):                        # the letters up to one with this text
    counted = 0
    while letters.recv(100).decode() != text:
        counted += 1
    return str(counted)
print("ready", flush=True)
for line in sys.stdin:
    verb, *words = line.split()
    try:
        print(globals()[verb](*words) or "", flush=True)
    except OSError as error:
        print(type(error).__name__, flush=True)
"""
"""Do what the lines of standard input say, and answer each with a line."""


class Talker:
    """A program in a host that talks to others of its kind over TCP and UDP."""

    def __init__(self, host: Host, port: int = PORT) -> None:
        command = [sys.executable, "-c", TALKER, str(port)]
        self.process = host.start(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self.answer() == "ready"

    def begin(self, *words: object) -> None:
        assert self.process.stdin is not None
        print(*words, file=self.process.stdin, flush=True)

    def answer(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def do(self, *words: object) -> str:
        self.begin(*words)
        return self.answer()

    def call(self, other: Talker, name: str) -> None:
        """Open a TCP connection to another program."""
        assert other.do("listen", "-") == "listening"
        assert self.do("connect", name) == ""
        assert other.answer() == ""


@pytest.fixture
def pair() -> Iterator[list[Host]]:
    with hosts(2) as both:
        yield both


def text_of(host: Host, *words: str) -> str:
    return host.run(words, check=True).stdout.strip()


# -- what a host has of its own


def test_a_host_shares_only_what_it_is_given(tmp_path: Path) -> None:
    (tmp_path / "given").mkdir()
    (tmp_path / "kept").write_text("")
    with hosts(2, shared=[tmp_path / "given"]) as (a, b):
        assert [text_of(host, "uname", "-n") for host in (a, b)] == ["a", "b"]
        boots = {text_of(host, "cat", "/proc/sys/kernel/random/boot_id") for host in (a, b)}
        assert len(boots | {Path("/proc/sys/kernel/random/boot_id").read_text().strip()}) == 3
        assert len(text_of(a, "ps", "-A", "-o", "pid=").split()) == 2  # its first process, and ps
        assert text_of(a, "ls", "/sys/class/net").split() == ["eth0", "lo"]
        for folder in ("/dev/shm", "/tmp", "/run"):
            file = Path(folder, f"of-a-{os.getpid()}")
            a.run(["touch", str(file)], check=True)
            assert b.run(["test", "-e", str(file)]).returncode == 1
            assert not file.exists()
        assert a.run(["test", "-e", str(tmp_path / "kept")]).returncode == 1
        a.run(["touch", str(tmp_path / "given" / "file")], check=True)
        assert text_of(b, "ls", str(tmp_path / "given")) == "file"


def test_programs_end_with_their_own_status_and_get_signals(pair: list[Host]) -> None:
    a, _ = pair
    assert a.run(["sh", "-c", "exit 7"]).returncode == 7
    assert a.run(["sh", "-c", "kill -ABRT $$"]).returncode == -signal.SIGABRT
    done = a.run(["sh", "-c", "pwd; echo err >&2"], cwd="/dev")
    assert (done.stdout, done.stderr) == ("/dev\n", "err\n")
    for words, status in (("trap 'exit 3' TERM", 3), (":", -signal.SIGTERM)):
        program = a.start(
            ["sh", "-c", f"{words}; echo ready; read line"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert program.stdout is not None
        program.stdout.readline()
        program.terminate()
        assert program.wait(PATIENCE_SECONDS) == status
    with pytest.raises(subprocess.TimeoutExpired):
        a.run(["sleep", "1000"], timeout=0.1)
    assert "sleep" not in text_of(a, "ps", "-A")


def test_hosts_talk_by_name_and_address_but_not_over_loopback(pair: list[Host]) -> None:
    first, second = map(Talker, pair)
    b = pair[1]
    for name in ("b", b.address, b.address6):
        first.call(second, name)
        first.do("say", 10_000)
        assert second.do("hear", 10_000, PATIENCE_SECONDS) == "heard"
    Talker(b, port=7001)
    local = [sys.executable, "-c", "import socket; socket.create_connection(('localhost', 7001))"]
    assert "ConnectionRefusedError" in pair[0].run(local).stderr
    b.run(local, check=True)
    second.process.kill()
    second.process.wait(PATIENCE_SECONDS)
    assert first.do("connect", "b") == "ConnectionRefusedError"


# -- faults of the network


@pytest.mark.parametrize("way", ["netem", "wire"])
def test_a_cable_has_its_delay_rate_and_loss(pair: list[Host], way: str) -> None:
    a, b = pair
    if way == "netem" and not a.network.has_netem:
        pytest.skip("this kernel has no tc netem")
    a.network.has_netem = way == "netem"
    first, second = map(Talker, pair)
    first.call(second, "b")

    def seconds(size: int) -> float:
        start = time.monotonic()
        first.begin("say", size)
        assert second.do("hear", size, PATIENCE_SECONDS) == "heard"
        first.answer()
        return time.monotonic() - start

    assert min(seconds(1) for _ in range(5)) < 0.05
    a.link(delay_seconds=0.05)
    assert seconds(1) >= 0.05
    a.link(delay_seconds=0.05, bits_per_second=20e6)
    assert seconds(1_000_000) >= 0.4
    a.link(loss=1.0)
    first.do("say", 1)
    assert second.do("hear", 1, SILENCE_SECONDS) == ""
    a.link(loss=0.3)
    assert second.do("hear", 1, PATIENCE_SECONDS) == "heard"
    reader = Talker(b, port=7001)
    reader.begin("count", "end")
    first.do("post", "b", 7001, "lossy", 400)
    seconds(1)  # behind them
    a.link()
    first.do("post", "b", 7001, "end", 1)
    assert 200 < int(reader.answer()) < 350
    assert min(seconds(1) for _ in range(5)) < 0.05


def test_a_cable_with_a_rate_alone_limits_both_ways(pair: list[Host]) -> None:
    first, second = map(Talker, pair)
    first.call(second, "b")
    pair[0].link(bits_per_second=20e6)
    for sender, receiver in ((first, second), (second, first)):
        start = time.monotonic()
        sender.begin("say", 1_000_000)
        assert receiver.do("hear", 1_000_000, PATIENCE_SECONDS) == "heard"
        assert time.monotonic() - start >= 0.3
        sender.answer()


def test_a_pulled_cable_is_silent_and_a_connection_survives_it(pair: list[Host]) -> None:
    a, _ = pair
    first, second = map(Talker, pair)
    first.call(second, "b")
    a.pull()
    assert text_of(a, "cat", "/sys/class/net/eth0/carrier") == "0"
    first.do("say", 1)
    assert second.do("hear", 1, SILENCE_SECONDS) == ""
    a.plug()
    assert text_of(a, "cat", "/sys/class/net/eth0/carrier") == "1"
    assert second.do("hear", 1, PATIENCE_SECONDS) == "heard"


@pytest.mark.parametrize("family", ["IPv4", "IPv6"])
def test_packets_of_one_direction_are_dropped(family: str) -> None:
    with hosts(3) as (a, b, c):
        first, second, third = map(Talker, (a, b, c))
        to_a, to_b, to_c = (host.address if family == "IPv4" else host.address6 for host in (a, b, c))
        a.drop(b)
        first.do("post", to_b, PORT, "dropped", 1)
        second.do("post", to_a, PORT, "other", 1)
        assert first.do("read") == "other"
        first.do("post", to_c, PORT, "third", 1)
        assert third.do("read") == "third"
        a.heal(b)
        first.do("post", to_b, PORT, "healed", 1)
        assert second.do("read") == "healed"
        a.drop(b, one_way=False)
        first.do("post", to_b, PORT, "dropped", 1)
        second.do("post", to_a, PORT, "dropped", 1)
        a.heal(b, one_way=False)
        first.do("post", to_b, PORT, "end", 1)
        second.do("post", to_a, PORT, "end", 1)
        assert first.do("read") == second.do("read") == "end"


# -- power, disk, clock


def test_power_off_is_silent_and_ends_every_process(pair: list[Host]) -> None:
    a, b = pair
    first, second = Talker(a), Talker(b)
    first.call(second, "b")
    child = b.start(["sh", "-c", "sleep 1000 & echo ready; wait"], stdout=subprocess.PIPE)
    assert child.stdout is not None
    child.stdout.readline()
    b.run(["touch", "/tmp/file"], check=True)
    processes = [os.pidfd_open(int(pid)) for pid in processes_of(b)]
    assert len(processes) == 4  # the first process, the talker, sh, sleep
    b.kill()
    assert all(has_ended(process) for process in processes)
    assert second.process.returncode == child.returncode == -signal.SIGKILL
    assert first.do("hear", 1, SILENCE_SECONDS) == ""  # neither FIN nor RST
    b.boot()
    assert b.run(["test", "-e", "/tmp/file"]).returncode == 1
    again = Talker(b)
    first.call(again, "b")
    assert first.do("say", 1) == ""
    assert again.do("hear", 1, PATIENCE_SECONDS) == "heard"


def processes_of(host: Host) -> list[str]:
    """Return the process ids, outside, of all processes of a host."""
    space = os.readlink(f"/proc/{host.pid}/ns/pid")
    return [path.name for path in Path("/proc").glob("[0-9]*") if _link(path / "ns" / "pid") == space]


def _link(path: Path) -> str:
    try:
        return os.readlink(path)
    except OSError:
        return ""  # the process has ended


def has_ended(process: int) -> bool:
    """Wait for the end of a process and close its pidfd."""
    ended = bool(select.select([process], [], [], PATIENCE_SECONDS)[0])
    os.close(process)
    return ended


def test_a_disk_is_full(pair: list[Host]) -> None:
    a, b = pair
    a.fill("/tmp/disk", 1 << 20)
    write = ["dd", "if=/dev/zero", "of=/tmp/disk/file", "bs=64K", "count=20"]
    full = a.run(write)
    assert full.returncode == 1
    assert "No space left on device" in full.stderr
    b.run(["mkdir", "/tmp/disk"], check=True)
    assert b.run(write).returncode == 0


CLOCKS = "import time; print(time.time(), time.monotonic())"


@needs_faketime
def test_a_clock_is_wrong(pair: list[Host]) -> None:
    pair[0].clock(-3600)
    command = [sys.executable, "-c", CLOCKS]
    (day, monotonic), (true_day, true_monotonic) = (map(float, text_of(host, *command).split()) for host in pair)
    assert 3500 < true_day - day < 3700
    assert abs(true_monotonic - monotonic) < 100


# -- what is left


HOLD = """
import signal, time
from tests.network.hosts import hosts
signal.signal(signal.SIGINT, signal.default_int_handler)  # a program in the background of a shell ignores it
with hosts(2) as (a, b):
    a.network.join()
    a.link(delay_seconds=0.01)
    a.start(["sleep", "1000"])
    print(a.network.own_interface, a.network.switch.process.pid, a.pid, b.pid, flush=True)
    time.sleep(1000)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_killed_test_leaves_nothing(number: signal.Signals) -> None:
    command = [sys.executable, "-c", HOLD]
    test = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, cwd=ROOT, env=with_code()
    )
    assert test.stdout is not None
    with test.stdout:
        interface, *pids = test.stdout.readline().split()
        assert interface in os.listdir("/sys/class/net")
        processes = [os.pidfd_open(int(pid)) for pid in pids]
        test.send_signal(number)
        test.wait(PATIENCE_SECONDS)
        assert all(has_ended(process) for process in processes)
        assert test.stdout.read() == ""  # `sleep` had it, too
    patience = time.monotonic() + PATIENCE_SECONDS
    while interface in os.listdir("/sys/class/net"):  # the kernel removes a namespace later
        assert time.monotonic() < patience
        time.sleep(0.01)


def with_code() -> dict[str, str]:
    return inherited({"PYTHONPATH": str(ROOT)})


# -- torchrun


TRAIN = """
import torch, unisono

def main(run):
    x = torch.randn(64, 8, generator=torch.Generator().manual_seed(1))
    model = run.place(lambda: torch.nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters())
    run.track(model=model, optimizer=optimizer)
    for step in run.steps(torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))):
        for inputs, targets in step:
            step.backward(((model(inputs) - targets) ** 2).sum(), weight=len(inputs))
        step.update(optimizer)

unisono.main(main, unisono.Settings)
"""


HOST_FILES = ["host-a.jsonl", "host-b.jsonl"]
"""Measurements of machines: the ranks have recognized that they are on two."""


@pytest.mark.slow
def test_torchrun_over_two_hosts_has_the_bits_of_one_process(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAIN)
    words = ["train.py", "--set", "steps=4", "--set", "batch=16", "--run-dir"]
    options: dict[str, Any] = {"cwd": tmp_path, "env": with_code(), "stderr": subprocess.PIPE}
    rendezvous = ["--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", "a:29500", "--rdzv-id", "test"]
    launcher = [sys.executable, "-m", "torch.distributed.run", *rendezvous, "--nproc-per-node", "1"]
    with hosts(2, shared=[tmp_path]) as both:
        running = [host.start([*launcher, *words, "two"], **options) for host in both]
        running.append(HostProcess([sys.executable, *words, "one"], text=True, **options))
        errors = [process.communicate(timeout=2 * PATIENCE_SECONDS)[1] for process in running]
        assert [process.returncode for process in running] == [0, 0, 0], errors
    one, two = (json.loads((tmp_path / name / "result.json").read_text()) for name in ("one", "two"))
    assert two["weights_sha256"] == one["weights_sha256"]
    assert two["ranks"] == 2
    assert sorted(path.name for path in (tmp_path / "two" / "timeline").glob("host-*.jsonl")) == HOST_FILES
