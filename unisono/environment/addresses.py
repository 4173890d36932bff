"""Addresses of a run's store as text: IPv4, IPv6 (in brackets before a port) and host names."""

from __future__ import annotations

import re
import zlib

from unisono.environment.process_variables import variables

PORTS = range(20_000, 32_768)
"""Ports for a job without MASTER_PORT: below those that Linux assigns to programs (ip(7): ip_local_port_range)."""

HOSTED = "hosted://"


def port_of_job(job: str) -> int:
    """Return the port that follows from a job's name, so that all of its processes know it."""
    return PORTS[zlib.crc32(job.encode()) % len(PORTS)]


def unbracketed(host: str) -> str:
    """Return an address without the brackets of IPv6: [fd00::1] -> fd00::1."""
    return host[1:-1] if host.startswith("[") and host.endswith("]") else host


def join_port(host: str, port: int) -> str:
    """Return host:port, with brackets around an IPv6 address: [fd00::1]:29500."""
    host = unbracketed(host)
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def hosted_address(host: str, port: int, job: str) -> str:
    """Return the address of a store that process 0 hosts: hosted://HOST:PORT/JOB."""
    return f"{HOSTED}{join_port(host, port)}/" + re.sub(r"[^\w.-]", "-", job)


def host_of(store: str | None) -> tuple[str, int] | None:
    """Return host and port of a World's store, if it has them: env:// or hosted://. An IPv6 address has no brackets."""
    if store == "env://":
        at = variables(("MASTER_ADDR", "MASTER_PORT"))
        if len(at) < 2 or not at["MASTER_PORT"].isdecimal():
            return None
        return unbracketed(at["MASTER_ADDR"]), int(at["MASTER_PORT"])
    if store is None or not store.startswith(HOSTED):
        return None
    host, _, port = store.removeprefix(HOSTED).rpartition("/")[0].rpartition(":")
    return unbracketed(host), int(port)
