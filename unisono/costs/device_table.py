"""Devices that a run may rent: figures of data sheets, and a file of one's own.

[[device]]
name = "a10"              # a known name has memory, rates and link
count = 4
price = 0.9               # an hour of one device, in any currency

[[device]]
name = "our old servers"
count = 2
memory = "16GB"
speed = 0.5               # relative to one process here; or: flops = 30e12, of the data type of the run
link = "1GB"              # bytes per second that a device sends to the others
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}

UTILIZATION = 0.4
"""The part of a peak rate that trainings reach. The Llama 3 Herd of Models (arXiv 2407.21783, table 4): 38 to 43 %."""


@dataclass(frozen=True)
class Device:
    """A kind of device, and how many there are on one host.

    Attributes:
        name: Its name.
        count: The number of them.
        memory: Bytes of memory of one.
        flops: Dense floating-point operations per second at float32, without TF32.
        half_flops: The same at bf16 and fp16.
        bandwidth: Bytes per second of its memory.
        link: Bytes per second that it sends to others.
        speed: Its speed relative to a process of this machine; 0: its time follows from its rate.
        utilization: The part of its rate that a training reaches.
        price: An hour of one device; None: not known.
    """

    name: str
    count: int = 1
    memory: int = 0
    flops: float = 0.0
    half_flops: float = 0.0
    bandwidth: float = 0.0
    link: float = 0.0
    speed: float = 0.0
    utilization: float = UTILIZATION
    price: float | None = None

    def rate(self, precision: str) -> float:
        """Return the operations per second that a training reaches with a setting of precision."""
        return self.utilization * (self.flops if precision == "fp32" else self.half_flops)


# Data sheets of NVIDIA: GB and TB are decimal there, rates of tensor cores are halved where given with sparsity, and
# links are halved, because both directions are counted. SXM modules with NVLink; PCIe Gen4 x16 otherwise.
KNOWN: Mapping[str, Device] = {
    each.name: each
    for each in (
        Device("a10", 1, 24 * 10**9, 31.2e12, 125e12, 600e9, 32e9),  # A10 data sheet, March 2021
        Device("l4", 1, 24 * 10**9, 30.3e12, 121e12, 300e9, 32e9),  # L4 data sheet, March 2023
        Device("l40s", 1, 48 * 10**9, 91.6e12, 362e12, 864e9, 32e9),  # L40S data sheet, January 2024
        Device("a100", 1, 80 * 10**9, 19.5e12, 312e12, 2039e9, 300e9),  # A100 80GB SXM, data sheet of June 2021
        Device("h100", 1, 80 * 10**9, 67e12, 989e12, 3350e9, 450e9),  # H100 SXM data sheet, April 2023
        Device("h200", 1, 141 * 10**9, 67e12, 989e12, 4800e9, 450e9),  # H200 SXM data sheet, November 2023
    )
}

SIZES = ("memory", "bandwidth", "link")
KEYS = tuple(each.name for each in fields(Device))
HERE = "this"
"""The name of this machine, where times are measured."""


class DeviceFileError(Exception):
    """A file of devices cannot be used. `args`: what is wrong, the facts, and the line to write."""


def bytes_in(text: str) -> int:
    """Return the bytes that a size stands for: 24GB, 512 MB or 1000000; 1 GB is 10^9 bytes; 0: it is none."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?)b?\s*", text.lower())
    return round(float(match[1]) * UNITS[match[2]]) if match else 0


def read_devices(text: str) -> list[Device]:
    """Return the devices of a file's text.

    Raises:
        DeviceFileError: It is no TOML, or has a key or a value that no device has.
    """
    try:
        content = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise DeviceFileError("It is no TOML.", f"{error}.", '[[device]] and name = "a10"') from None
    rows = content.get("device")
    if not isinstance(rows, list) or not rows or content.keys() != {"device"}:
        facts = f"It has {', '.join(sorted(content)) or 'nothing'} at its top."
        raise DeviceFileError("A file of devices has tables [[device]].", facts, '[[device]] and name = "a10"')
    found = [_device(row) for row in rows]
    names = [each.name for each in found]
    for name in names:
        if names.count(name) > 1:
            raise DeviceFileError(f"Two devices are called {name}.", "Prices are by name.", f'name = "{name}-2"')
    return found


def _device(row: Mapping[str, Any]) -> Device:
    name = row.get("name")
    if not isinstance(name, str) or not name or name == HERE:
        facts = f"The first key of a device is its name; {HERE} is this machine."
        raise DeviceFileError(f"A device has no name: {dict(row)}", facts, 'name = "a10"')
    for key, value in row.items():
        if key not in KEYS:
            raise DeviceFileError(f"{name} has an unknown key {key}.", f"The keys are {', '.join(KEYS)}.", "memory = ")
        right = isinstance(value, int | float) and not isinstance(value, bool) and value > 0
        right &= key != "count" or isinstance(value, int)
        if key != "name" and not right and not (key in SIZES and isinstance(value, str) and bytes_in(value)):
            facts = "It is a whole number above 0." if key == "count" else "It is a number above 0."
            facts = 'It is a number of bytes above 0, as text with a unit: "24GB".' if key in SIZES else facts
            raise DeviceFileError(f"{name} has an invalid value for {key}: {value}", facts, f"{key} = {EXAMPLES[key]}")
    values: dict[str, Any] = {
        key: bytes_in(value) if key in SIZES and isinstance(value, str) else value for key, value in row.items()
    }
    if "flops" in values:
        values.setdefault("half_flops", values["flops"])
    device = replace(KNOWN.get(name, Device(name)), **values)
    if not device.memory:
        facts = f"Without it nothing is known to fit. Known names are {', '.join(KNOWN)}."
        raise DeviceFileError(f"{name} has no memory.", facts, 'memory = "24GB"')
    return device


EXAMPLES = {
    "count": "4",
    "memory": '"24GB"',
    "flops": "30e12",
    "half_flops": "120e12",
    "bandwidth": '"600GB"',
    "link": '"32GB"',
    "speed": "2.0",
    "utilization": "0.4",
    "price": "0.9",
}
