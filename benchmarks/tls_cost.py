"""Processor time of encryption, for data that crosses hosts: relays, Python's ssl module, and AES alone.

    python -m benchmarks.tls_cost [--megabytes 128] [--turns 3] [--only plain,ssl] [--stunnel PATH] [--haproxy PATH]

Two processes send each other that much at the same time, over loopback. A line is one way:

    plain      sockets, blocks of 4 MiB
    ssl        the same sockets under Python's ssl module: TLS 1.3, both ends with a certificate
    stunnel    plain sockets to a stunnel at each end, TLS 1.3 between the two
    haproxy    the same with haproxy
    gloo       torch.distributed.isend and recv of float32 tensors, plain
    tcp        the same with the back end of our own, as between hosts, plain
    tls        the same, encrypted

Seconds of processor time of all processes per gigabyte that is sent count, because the machine may be shared. Beside
them stands the throughput of both directions together by the clock, and AES-256-GCM alone on one core (openssl speed).
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import re
import shutil
import socket
import ssl
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

import psutil  # type: ignore[import-untyped]

Costs = tuple[float, float]
"""Seconds of processor time, and seconds by the clock."""

BLOCK = 4 << 20
START_SECONDS = 60.0


def free_ports(count: int) -> list[int]:
    """Return ports of loopback that are free."""
    with ExitStack() as stack:
        found = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [each.getsockname()[1] for each in found]


def make_certificate(folder: Path) -> None:
    """Write cert.pem, key.pem and both.pem, signed by themselves."""
    words = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2"]
    names = ["-subj", "/CN=bench", "-keyout", str(folder / "key.pem"), "-out", str(folder / "cert.pem")]
    subprocess.run([*words, *names], check=True, capture_output=True)
    (folder / "both.pem").write_text((folder / "cert.pem").read_text() + (folder / "key.pem").read_text())


def context_of(folder: Path, purpose: int) -> ssl.SSLContext:
    """Return a context that demands the certificate of the other end."""
    context = ssl.SSLContext(purpose)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_cert_chain(folder / "cert.pem", folder / "key.pem")
    context.load_verify_locations(folder / "cert.pem")
    return context


# -- the two processes


def send(connection: socket.socket, size: int) -> None:
    block = memoryview(bytearray(BLOCK))
    for start in range(0, size, BLOCK):
        connection.sendall(block[: min(BLOCK, size - start)])


def receive(connection: socket.socket, size: int) -> None:
    block = memoryview(bytearray(BLOCK))
    while size:
        count = connection.recv_into(block[: min(BLOCK, size)])
        assert count
        size -= count


def swap(out: socket.socket, back: socket.socket, size: int) -> None:
    """Send on one connection while the other one receives. Two, because one TLS connection is not for two threads."""
    sender = threading.Thread(target=send, args=(out, size))
    sender.start()
    receive(back, size)
    sender.join()


def trade(
    rank: int, ports: Sequence[int], size: int, folder: Path | None, results: multiprocessing.Queue[Costs]
) -> None:
    """Be one of the two: rank 0 listens at the last port, rank 1 connects to the first. Report the processor time."""
    with ExitStack() as stack:
        if rank == 0:
            server = stack.enter_context(socket.create_server(("127.0.0.1", ports[-1])))
            ends = [server.accept()[0] for _ in range(2)]
        else:
            ends = [_connect(ports[0]) for _ in range(2)]
        if folder is not None:
            context = context_of(folder, ssl.PROTOCOL_TLS_CLIENT if rank else ssl.PROTOCOL_TLS_SERVER)
            ends = [context.wrap_socket(end, server_side=rank == 0) for end in ends]
        for end in ends:
            stack.enter_context(end)
        if rank == 0:
            ends.sort(key=lambda end: end.recv(1))  # a relay may change the order
        else:
            for end, mark in zip(ends, (b"1", b"0"), strict=True):
                end.sendall(mark)
        out, back = ends
        swap(out, back, 1 << 20)
        before, began = time.process_time(), time.monotonic()
        swap(out, back, size)
        results.put((time.process_time() - before, time.monotonic() - began))


def _connect(port: int) -> socket.socket:
    until = time.monotonic() + START_SECONDS
    while True:
        try:
            return socket.create_connection(("127.0.0.1", port))
        except ConnectionRefusedError:
            if time.monotonic() > until:
                raise
            time.sleep(0.05)


def trade_in_group(backend: str, rank: int, port: int, size: int, results: multiprocessing.Queue[Costs]) -> None:
    """Do the same with a back end of torch."""
    import torch
    import torch.distributed as dist

    from unisono.distributed.connections import door
    from unisono.distributed.connections.collective_group import register
    from unisono.handshake.certificates import run_credentials
    from unisono.handshake.mutual_proof import RunSecret

    torch.set_num_threads(1)
    if backend != "gloo":
        door.PeerAddress.is_here = lambda self: False  # type: ignore[method-assign]  # each counts as a host
        credentials = partial(run_credentials, RunSecret(b"of this benchmark"))
        register(f"host-{rank}", credentials if backend == "tls" else None)
    dist.init_process_group(backend, init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    mine, theirs = torch.zeros(size // 4), torch.zeros(size // 4)
    for _ in range(2):
        before, began = time.process_time(), time.monotonic()
        sent = dist.isend(mine, 1 - rank)
        dist.recv(theirs, 1 - rank)
        assert sent is not None
        sent.wait()
        took = time.process_time() - before, time.monotonic() - began
    results.put(took)
    dist.destroy_process_group()


# -- relays


@contextmanager
def relays(commands: Sequence[Sequence[str]], ports: Sequence[int]) -> Iterator[list[psutil.Process]]:
    """Run relays while the block runs, which listen at these ports."""
    started = [subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) for words in commands]
    try:
        for port in ports:
            _wait_until_listening(port)
        yield [psutil.Process(each.pid) for each in started]
    finally:
        for each in started:
            each.terminate()
            each.wait()


def _wait_until_listening(port: int) -> None:
    until = time.monotonic() + START_SECONDS
    while not any(c.status == "LISTEN" and c.laddr.port == port for c in psutil.net_connections("tcp")):
        assert time.monotonic() < until, f"no relay listens at port {port}"
        time.sleep(0.2)


def stunnel_commands(path: str, folder: Path, ports: Sequence[int]) -> list[list[str]]:
    """Return the commands of two relays: ports 0 -> 1 encrypts, 1 -> 2 decrypts."""
    found = []
    for side, (here, there) in {"client": ports[:2], "server": ports[1:]}.items():
        lines = [
            "foreground = yes",
            "pid =",
            f"[{side}]",
            f"client = {'yes' if side == 'client' else 'no'}",
            f"accept = 127.0.0.1:{here}",
            f"connect = 127.0.0.1:{there}",
            f"cert = {folder}/cert.pem",
            f"key = {folder}/key.pem",
            f"CAfile = {folder}/cert.pem",
            "verifyPeer = yes",
            "sslVersionMin = TLSv1.3",
        ]
        (folder / f"stunnel-{side}.conf").write_text("\n".join([*lines, ""]))
        found.append([path, str(folder / f"stunnel-{side}.conf")])
    return found


def haproxy_commands(path: str, folder: Path, ports: Sequence[int]) -> list[list[str]]:
    """Return the commands of two relays: ports 0 -> 1 encrypts, 1 -> 2 decrypts."""
    tls = f"ssl crt {folder}/both.pem ca-file {folder}/cert.pem verify required"
    common = "global\n nbthread 1\ndefaults\n mode tcp\n timeout connect 10s\n timeout client 1m\n timeout server 1m\n"
    client = f"listen c\n bind 127.0.0.1:{ports[0]}\n server s 127.0.0.1:{ports[1]} {tls} ssl-min-ver TLSv1.3\n"
    server = f"listen s\n bind 127.0.0.1:{ports[1]} {tls} ssl-min-ver TLSv1.3\n server p 127.0.0.1:{ports[2]}\n"
    found = []
    for side, text in {"client": client, "server": server}.items():
        (folder / f"haproxy-{side}.cfg").write_text(common + text)
        found.append([path, "-f", str(folder / f"haproxy-{side}.cfg"), "-db"])
    return found


# -- measurements


def run_pair(target: Callable[..., None], *arguments: object) -> Costs:
    """Run both processes. Return their processor time, and the time of the slower one."""
    context = multiprocessing.get_context("fork")  # this process has no torch
    results = context.Queue()
    pair = [context.Process(target=target, args=(rank, *arguments, results)) for rank in range(2)]
    for process in pair:
        process.start()
    one, other = results.get(timeout=600), results.get(timeout=600)
    for process in pair:
        process.join()
    return one[0] + other[0], max(one[1], other[1])


def measure(way: str, size: int, folder: Path, paths: dict[str, str]) -> Costs:
    """Return seconds of processor time of all processes, and seconds by the clock, for both directions together."""
    if way in ("gloo", "tcp", "tls"):
        return run_pair(partial(trade_in_group, way), free_ports(1)[0], size)
    ports = free_ports(3)
    if way in ("plain", "ssl"):
        return run_pair(trade, ports[:1], size, folder if way == "ssl" else None)
    commands = {"stunnel": stunnel_commands, "haproxy": haproxy_commands}[way](paths[way], folder, ports)
    with relays(commands, ports[:2]) as running:
        own, took = run_pair(trade, ports, size, None)
        times = [each.cpu_times() for each in running]
    return own + sum(each.user + each.system for each in times), took


def aes_gigabytes_per_second() -> float:
    """Return the speed of AES-256-GCM on one core, in blocks of 16 KiB, by processor time."""
    words = ["openssl", "speed", "-seconds", "3", "-bytes", "16384", "-evp", "aes-256-gcm"]
    found = re.search(r"AES-256-GCM\s+([\d.]+)k", subprocess.run(words, capture_output=True, text=True).stdout)
    return float(found[1]) / 1e6 if found is not None else math.nan  # on a machine that is too busy


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--megabytes", type=int, default=128)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--only", default="plain,ssl,stunnel,haproxy,gloo,tcp,tls")
    parser.add_argument("--stunnel", default=shutil.which("stunnel4") or shutil.which("stunnel") or "")
    parser.add_argument("--haproxy", default=shutil.which("haproxy") or "")
    wanted = parser.parse_args()
    paths = {"stunnel": wanted.stunnel, "haproxy": wanted.haproxy}
    size = wanted.megabytes << 20
    ways = [way for way in wanted.only.split(",") if paths.get(way, way)]
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    speeds: dict[str, list[float]] = {way: [] for way in ways}
    gigabytes = 2 * size / 1e9
    print(f"{ssl.OPENSSL_VERSION}; AES-256-GCM {aes_gigabytes_per_second():.2f} GB/s on one core", flush=True)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_certificate(folder)
        for _ in range(wanted.turns):
            for way in ways:
                processor, clock = measure(way, size, folder, paths)
                seconds[way].append(processor / gigabytes)
                speeds[way].append(gigabytes / clock)
                print(f"  {way} {seconds[way][-1]:.2f}", file=sys.stderr, flush=True)
    first = statistics.median(seconds[ways[0]])
    print(f"{'way':10} {'seconds of processor time per GB':>34} {f'relative to {ways[0]}':>18} {'GB/s':>6}")
    for way in ways:
        middle = statistics.median(seconds[way])
        spread = f"{min(seconds[way]):.2f} to {max(seconds[way]):.2f}"
        speed = statistics.median(speeds[way])
        print(f"{way:10} {f'{middle:.2f} ({spread})':>34} {middle / first:>18.1f} {speed:>6.2f}")


if __name__ == "__main__":
    main()
