"""Hosts for tests: Linux namespaces that a bridge joins, so that nothing works by accident of sharing a machine.

    with hosts(2, shared=[tmp_path]) as (a, b):
        server = b.start(["python", "server.py", b.address])
        a.run(["python", "client.py", "b"])      # every host knows the names of all
        b.pull()                                  # its cable; plug() connects it again
        b.kill()                                  # power off; boot() starts it again

    a: eth0 --- veth --- port --+
                              bridge (a network namespace of its own)
    b: eth0 --- veth --- port --+

A host has its own network, loopback, processes, host name, boot id, shared memory, System V memory, /tmp and /run. It
has the other files of this machine, so Python and its packages are there. Of the folders below /tmp it has those in
`shared`, as from a network file system, and those with this code and its Python.

All namespaces belong to processes that end when this process ends, however it ends, and the kernel removes namespaces
with their last process. So nothing can be left behind, and no name can be taken already.

Needs Linux, root, iproute2 and util-linux; `missing()` returns what is missing.
"""

from __future__ import annotations

import functools
import os
import secrets
import shlex
import shutil
import signal
import string
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from tests.network import wire

ROOT = Path(__file__).resolve().parents[2]
TOOLS = ("ip", "tc", "unshare", "nsenter", "mount", "env", "sh")
INTERFACE = "eth0"
NOWHERE = "02:00:00:00:00:ff"
"""A MAC address that no interface has."""
PATIENCE_SECONDS = 60.0
"""Enough for a busy machine. Only a hang takes that long."""

PRIVATE = ("/tmp", "/run", "/dev/shm")

BOOT = """
set -e
trap '' CHLD                                    # the kernel reaps processes whose parents have ended
for private in $PRIVATE; do                     # an empty folder, with those that stay visible
    mount -n -t tmpfs -o mode=1777 tmpfs /mnt
    for kept in $KEPT; do
        case $kept in "$private"/*)
            inside="/mnt${kept#"$private"}"
            mkdir -p "$inside"
            mount -n --rbind "$kept" "$inside";;
        esac
    done
    mount -n --move /mnt "$private"
done
mkdir -p $TEMPORARY
mount -n -t sysfs sysfs /mnt                    # /sys/class/net has the interfaces of this host
mount -n --rbind /sys/fs/cgroup /mnt/fs/cgroup
mount -n --move /mnt /sys
printf '%s' "$TABLE" > /run/hosts
mount -n --bind /run/hosts /etc/hosts
echo $BOOT_ID > /run/boot_id
mount -n --bind /run/boot_id /proc/sys/kernel/random/boot_id
echo $NAME > /proc/sys/kernel/hostname
echo 0 > /proc/sys/net/ipv6/conf/default/accept_dad
ip link set lo up
echo ready
exec cat
"""
"""Becomes the first process of a host. It ends with its standard input, a pipe from this process."""

SWITCH = """
set -e
echo 1 > /proc/sys/net/ipv6/conf/default/disable_ipv6
ip link add bridge type bridge mcast_snooping 0
ip link set bridge up
echo ready
exec cat
"""


@functools.cache
def missing() -> str:
    """Return the reason why this machine cannot have hosts, or "" if it can."""
    if sys.platform != "linux" or os.geteuid():
        return "hosts for tests need Linux and root"
    if absent := [name for name in TOOLS if shutil.which(name) is None]:
        return f"{', '.join(absent)} cannot be found"
    if not Path("/proc/sys/net/ipv6").exists():
        return "hosts for tests need IPv6"
    words = ["unshare", "--net", "--uts", "--ipc", "--pid", "--fork", "--mount-proc", "sh", "-ec"]
    script = "mount -n -t tmpfs tmpfs /mnt; ip link add bridge type bridge; ip link add near type veth peer name far"
    done = subprocess.run([*words, script], capture_output=True, text=True)
    return f"namespaces cannot be made: {' '.join(done.stderr.split())}" if done.returncode else ""


def faketime_library() -> Path | None:
    """Return the library that gives programs another clock (Debian's package faketime), or None."""
    return next(Path("/usr/lib").glob("*/faketime/libfaketimeMT.so.1"), None)


def mac_address(number: int) -> str:
    """Return the MAC address of the host with this number, from 1."""
    return f"02:00:00:00:00:{number:02x}"


class Keeper:
    """A process that keeps namespaces or an interface busy. It ends with its standard input."""

    def __init__(self, words: Sequence[str], environment: Mapping[str, str] | None = None) -> None:
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        self.process = subprocess.Popen(words, text=True, env={**os.environ, **(environment or {})}, **pipes)
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if line != "ready\n":
            output = line + self.process.communicate()[0]
            raise RuntimeError(f"A host for tests cannot be made: {output.strip()}")

    def end(self) -> None:
        """Kill the process, or its child if it waits for one, with the namespaces that it keeps."""
        for pid in children(self.process.pid) or [self.process.pid]:
            os.kill(pid, signal.SIGKILL)
        self.process.communicate(timeout=PATIENCE_SECONDS)


def children(pid: int) -> list[int]:
    """Return the process ids of the children of a process with one thread."""
    try:
        return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except FileNotFoundError:
        return []


class HostProcess(subprocess.Popen[str]):
    """A program in a host. Signals reach the program itself; `pid` is that of nsenter, its parent outside."""

    def send_signal(self, sig: int) -> None:
        """Send a signal to the program; before it has started, to nsenter."""
        inside = children(self.pid) if self.poll() is None else []
        for child in inside:
            os.kill(child, sig)
        if not inside or sig == signal.SIGCONT:  # nsenter stops with its child
            super().send_signal(sig)

    def close(self) -> None:
        """Wait for the end of the process and close its pipes."""
        self.wait(PATIENCE_SECONDS)
        for pipe in (self.stdin, self.stdout, self.stderr):
            if pipe is not None:
                pipe.close()


class Network:
    """A bridge in a network namespace of its own, and the addresses of those that it joins."""

    def __init__(self, names: Sequence[str]) -> None:
        self.switch = Keeper(["unshare", "--net", "sh", "-c", SWITCH])
        taken = subprocess.run(["ip", "-o", "-4", "address"], capture_output=True, text=True, check=True).stdout
        free = [f"198.{18 + n // 256}.{n % 256}" for n in range(512)]  # RFC 2544: for tests of networks
        self.prefix = secrets.choice([prefix for prefix in free if f" {prefix}." not in taken])
        self.prefix6 = f"fd{secrets.token_hex(1)}:{secrets.token_hex(2)}:{secrets.token_hex(2)}:"  # RFC 4193
        self.names = list(names)
        self.own_interface = f"test{secrets.token_hex(4)}"
        self.has_netem = not self.inside("tc", "qdisc", "add", "dev", "lo", "root", "netem", check=False)

    def inside(self, *words: str, pid: int | None = None, check: bool = True) -> int:
        """Run a program in the network namespace of the switch or of a process, and return its exit status."""
        target = ["nsenter", "--target", str(pid or self.switch.process.pid), "--net", "--"]
        done = subprocess.run([*target, *words], capture_output=True, text=True)
        assert not check or done.returncode == 0, f"{shlex.join(words)}: {done.stderr.strip()}"
        return done.returncode

    def addresses(self, number: int) -> tuple[str, str]:
        """Return the IPv4 and the IPv6 address with this number, from 1."""
        return f"{self.prefix}.{number}", f"{self.prefix6}:{number:x}"

    def table(self) -> str:
        """Return /etc/hosts of every host."""
        lines = ["127.0.0.1 localhost", "::1 localhost"]
        for number, name in enumerate(self.names, 1):
            lines += [f"{address} {name}" for address in self.addresses(number)]
        return "\n".join(lines) + "\n"

    def connect(self, port: str, interface: str, pid: int, number: int) -> None:
        """Join the network namespace of a process with the bridge: its interface gets the addresses."""
        address, address6 = self.addresses(number)
        peer = ["peer", "name", interface, "address", mac_address(number), "netns", str(pid)]
        self.inside("ip", "link", "add", port, "type", "veth", *peer)
        self.inside("ip", "link", "set", port, "master", "bridge", "up")
        self.inside("ip", "address", "add", f"{address}/24", "dev", interface, pid=pid)
        self.inside("ip", "address", "add", f"{address6}/64", "dev", interface, "nodad", pid=pid)
        self.inside("ip", "link", "set", interface, "up", pid=pid)

    def join(self) -> str:
        """Join the network namespace of this process, too, and return its IPv4 address there."""
        number = len(self.names) + 1
        self.connect("own", self.own_interface, os.getpid(), number)
        return self.addresses(number)[0]

    def end(self) -> None:
        """Remove the bridge; the interfaces that it joins go with it."""
        self.inside("ip", "link", "del", "own", check=False)
        self.switch.end()


class Host:
    """One host of a network. `address` is its IPv4 address, `address6` its IPv6 address."""

    def __init__(self, network: Network, number: int, shared: Sequence[Path | str]) -> None:
        self.network, self.number = network, number
        self.name = network.names[number - 1]
        self.address, self.address6 = network.addresses(number)
        self.environment: dict[str, str] = {}
        self._port = f"port{number}"
        self._shared = [str(Path(folder).resolve()) for folder in (ROOT, sys.prefix, sys.base_prefix, *shared)]
        self._processes: list[HostProcess] = []
        self._wire: Keeper | None = None
        self._drops: set[int] = set()  # the numbers of hosts that packets do not reach
        self.boot()

    # -- power

    def boot(self) -> None:
        """Start the host, with an empty /tmp, no process and a new boot id."""
        temporary = tempfile.gettempdir()
        private = [*PRIVATE, *([] if f"{temporary}/".startswith(tuple(f"{p}/" for p in PRIVATE)) else [temporary])]
        environment = {
            "NAME": self.name,
            "TABLE": self.network.table(),
            "BOOT_ID": str(uuid.uuid4()),
            "TEMPORARY": temporary,
            "PRIVATE": " ".join(private),
            "KEPT": " ".join(sorted(set(self._shared))),
        }
        spaces = ["--net", "--mount", "--uts", "--ipc", "--pid", "--fork", "--kill-child", "--mount-proc"]
        self._keeper = Keeper(["unshare", *spaces, "sh", "-c", BOOT], environment)
        (self.pid,) = children(self._keeper.process.pid)
        self.is_on = True
        self.network.connect(self._port, INTERFACE, self.pid, self.number)

    def kill(self) -> None:
        """Power off: the host falls silent, and all its processes are killed. Others get no FIN and no RST of it."""
        if not self.is_on:
            return
        self.is_on = False
        self.network.inside("ip", "link", "set", self._port, "down", check=False)  # gone if the host died by itself
        self._keeper.end()
        for process in self._processes:
            process.close()
        self._processes.clear()
        self._cut_wire()
        self.network.inside("ip", "link", "del", self._port, check=False)  # the kernel may have been quicker

    # -- programs

    def command(self, words: Sequence[str], cwd: Path | str = ROOT) -> list[str]:
        """Return the words that run a program in this host, for `subprocess` or a script."""
        spaces = ["--net", "--mount", "--uts", "--ipc", "--pid"]
        variables = [f"{name}={value}" for name, value in self.environment.items()]
        return ["nsenter", "--target", str(self.pid), *spaces, "--", "env", "-C", str(cwd), *variables, *words]

    def start(self, words: Sequence[str], *, cwd: Path | str = ROOT, **popen: Any) -> HostProcess:
        """Start a program in this host, with the arguments of subprocess.Popen."""
        process = HostProcess(self.command(words, cwd), **{"text": True, **popen})
        self._processes.append(process)
        return process

    def run(
        self, words: Sequence[str], *, check: bool = False, timeout: float = PATIENCE_SECONDS, **popen: Any
    ) -> subprocess.CompletedProcess[str]:
        """Run a program in this host to its end, and return its output as text and its exit status."""
        process = self.start(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **popen)
        try:
            out, err = process.communicate(timeout=timeout)
        except BaseException:
            process.kill()
            raise
        assert not check or process.returncode == 0, f"{shlex.join(words)} in {self.name}: {err}"
        return subprocess.CompletedProcess(list(words), process.returncode, out, err)

    # -- the cable

    def pull(self) -> None:
        """Pull the cable: the host has no carrier, and frames in both directions are lost."""
        self.network.inside("ip", "link", "set", self._port, "down")

    def plug(self) -> None:
        """Connect the cable again."""
        self.network.inside("ip", "link", "set", self._port, "up")

    def drop(self, other: Host, *, one_way: bool = True) -> None:
        """Lose all packets from this host to another one, silently; with one_way=False, in both directions.

        The packets leave for a MAC address that no interface has, so the network loses them. Each host still finds the
        MAC address of the other, as with a wrong rule of a firewall.
        """
        self._drops.add(other.number)
        self._resolve(other)
        other._resolve(self)
        if not one_way:
            other.drop(self)

    def heal(self, other: Host, *, one_way: bool = True) -> None:
        """End a `drop`."""
        self._drops.discard(other.number)
        self._resolve(other)
        other._resolve(self)
        if not one_way:
            other.heal(self)

    def link(self, *, delay_seconds: float = 0.0, bits_per_second: float = 0.0, loss: float = 0.0) -> None:
        """Give the cable a delay and a loss (a fraction of packets), for what the host sends, and a rate for both ways.

        Each call replaces what the last call gave; 0 stands for none. `tc netem` does it where the kernel has it, else
        a program (tests/network/wire.py).
        """
        self._cut_wire()
        self.network.inside("tc", "qdisc", "del", "dev", INTERFACE, "root", pid=self.pid, check=False)
        self.network.inside("tc", "qdisc", "del", "dev", self._port, "root", check=False)
        if (delay_seconds or loss) and not self.network.has_netem:
            self._lay_wire(str(delay_seconds), str(bits_per_second), str(loss))
            return
        qdisc = ["tc", "qdisc", "add", "dev"]
        rate = ["rate", f"{bits_per_second:.0f}bit"]
        bucket = ["tbf", *rate, "burst", f"{max(16384, bits_per_second / 8 / 100):.0f}", "latency", "250ms"]
        if bits_per_second:
            self.network.inside(*qdisc, self._port, "root", *bucket)
        if delay_seconds or loss:
            words = ["netem", "limit", "100000", "delay", f"{delay_seconds * 1e6:.0f}us", "loss", f"{100 * loss}%"]
            self.network.inside(*qdisc, INTERFACE, "root", *words, *(rate if bits_per_second else []), pid=self.pid)
        elif bits_per_second:
            self.network.inside(*qdisc, INTERFACE, "root", *bucket, pid=self.pid)

    # -- disk and clock

    def fill(self, folder: Path | str, size: int) -> None:
        """Mount an empty disk of `size` bytes over a folder of this host, so that writing more than that fails."""
        self.run(["mkdir", "-p", str(folder)], check=True)
        self.run(["mount", "-n", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)], check=True)

    def clock(self, offset_seconds: float) -> None:
        """Set the clock of programs that this host starts from now on; CLOCK_MONOTONIC stays.

        Linux has no namespace for the time of day, so a library (`faketime_library`) changes what programs read.
        """
        library = faketime_library()
        assert library is not None, "Debian's package faketime is missing"
        self.environment |= {"LD_PRELOAD": str(library), "FAKETIME": f"{offset_seconds:+f}"}
        self.environment |= {"FAKETIME_DONT_FAKE_MONOTONIC": "1", "DONT_FAKE_MONOTONIC": "1"}

    def _resolve(self, other: Host) -> None:
        """Fix the MAC address of another host if packets of one direction are dropped, else leave it to ARP."""
        mac = NOWHERE if other.number in self._drops else mac_address(other.number)
        fixed = other.number in self._drops or self.number in other._drops
        change, words = ("replace", ["lladdr", mac, "nud", "permanent"]) if fixed else ("del", [])
        for address in (other.address, other.address6, f"fe80::ff:fe00:{other.number:x}"):
            entry = [address, "dev", INTERFACE, *words]
            self.network.inside("ip", "neighbor", change, *entry, pid=self.pid, check=fixed)

    def _lay_wire(self, *words: str) -> None:
        """Put a program between the port and the bridge."""
        near, far = f"near{self.number}", f"far{self.number}"
        inside = self.network.inside
        # A frame of one packet each, so that a loss and a rate act on packets.
        inside("ip", "link", "set", INTERFACE, "gso_max_segs", "1", pid=self.pid)
        inside("ip", "link", "set", self._port, "nomaster")
        inside("ip", "link", "add", near, "type", "veth", "peer", "name", far)
        inside("ip", "link", "set", near, "gso_max_segs", "1")
        inside("ip", "link", "set", near, "up")
        inside("ip", "link", "set", far, "master", "bridge", "up")
        target = ["nsenter", "--target", str(self.network.switch.process.pid), "--net", "--"]
        self._wire = Keeper([*target, sys.executable, "-IS", wire.__file__, self._port, near, *words])

    def _cut_wire(self) -> None:
        if self._wire is not None:
            self._wire.end()
            self._wire = None
            self.network.inside("ip", "link", "del", f"near{self.number}")
            if self.is_on:
                self.network.inside("ip", "link", "set", self._port, "master", "bridge")
                self.network.inside("ip", "link", "set", INTERFACE, "gso_max_segs", "65535", pid=self.pid)


@contextmanager
def hosts(
    count: int,
    *,
    head: bool = False,
    shared: Sequence[Path | str] = (),
    delay_seconds: float = 0.0,
    bits_per_second: float = 0.0,
    loss: float = 0.0,
) -> Iterator[list[Host]]:
    """Make hosts a, b, c, ... (and before them the host `head`), and remove them at the end.

    Args:
        count: hosts without `head`, at most 26
        shared: folders below /tmp that all hosts have
        delay_seconds, bits_per_second, loss: of every cable, as `Host.link` takes them
    """
    with ExitStack() as stack:
        network = Network([*(["head"] if head else []), *string.ascii_lowercase[:count]])
        stack.callback(network.end)
        made: list[Host] = []
        for number in range(1, len(network.names) + 1):
            host = Host(network, number, shared)
            stack.callback(host.kill)
            made.append(host)
            if delay_seconds or bits_per_second or loss:
                host.link(delay_seconds=delay_seconds, bits_per_second=bits_per_second, loss=loss)
        yield made
