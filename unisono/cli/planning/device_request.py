"""The flags --devices and --price of `unisono plan`: which devices are compared, and what an hour of each costs."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from unisono.cli.request.run_options import WHERE
from unisono.config import CommandLine, nearest_name
from unisono.costs.device_table import HERE, KNOWN, Device, DeviceFileError, read_devices
from unisono.errors import SettingsError


@Parameter(name="*", negative=())
@dataclass(frozen=True, kw_only=True)
class DeviceRequest:
    """The devices to compare.

    Parameters
    ----------
    devices
        Compare these: this (machine), h200:8 (the number is that on a host), or a TOML file; several with commas. Times
        on devices that are not here are estimates.
    price
        What an hour of one device costs, as in h200=3.5,a10=0.9,this=0.2. Adds the cost of the run.
    """

    devices: Annotated[str, Parameter(metavar="NAME:COUNT|FILE", show_default=False, group=WHERE)] = ""
    price: Annotated[str, Parameter(metavar="NAME=HOUR", show_default=False, group=WHERE)] = ""

    @property
    def words(self) -> list[str]:
        """The flags as they are typed."""
        found = ["--devices", self.devices] if self.devices else []
        return found + (["--price", self.price] if self.price else [])

    def found(self, line: CommandLine) -> list[Device]:
        """Return the devices with their prices; []: this machine alone, without a price.

        Raises:
            SettingsError: A device is not known, a file cannot be used, or a price has no device.
        """
        if not self.devices and not self.price:
            return []
        devices: list[Device] = []
        for word in filter(None, (word.strip() for word in (self.devices or HERE).split(","))):
            devices += _devices(word, line)
        names = [each.name for each in devices]
        for name in names:
            if names.count(name) > 1:
                facts = "Each kind of device is compared once."
                raise SettingsError(f"--devices has {name} twice.", facts, str(line.flag("--devices", name)))
        if not devices:
            raise SettingsError("--devices is empty.", _known(), str(line.flag("--devices", "h200:8")))
        prices = dict(_prices(self.price, names, line))
        return [replace(each, price=prices.get(each.name, each.price)) for each in devices]


def _known() -> str:
    return f"Known devices are {', '.join(KNOWN)}, and {HERE}; a file (.toml) may have others."


def _devices(word: str, line: CommandLine) -> list[Device]:
    """Return the devices that a word of --devices names."""
    if word.endswith(".toml") or "/" in word:
        return _devices_of_file(word, line)
    name, colon, count = (part.strip() for part in word.partition(":"))
    if name == HERE and not colon:
        return [Device(HERE)]
    if colon and not (count.isdecimal() and int(count) >= 1):
        facts = "The number of devices on a host is a whole number above 0."
        raise SettingsError(f"Invalid value for --devices: {word}", facts, str(line.flag("--devices", f"{name}:8")))
    if name == HERE:
        facts = "The number of processes here is that of --ranks."
        do = line.flag("--devices", HERE).flag("--ranks", count)
        raise SettingsError(f"Invalid value for --devices: {word}", facts, str(do))
    if name not in KNOWN:
        near = nearest_name(name, [*KNOWN, HERE])
        do = line.flag("--devices", f"{near}{colon}{count}" if near and near != HERE else near or "devices.toml")
        raise SettingsError(f"There is no device {name or word}.", _known(), str(do))
    return [replace(KNOWN[name], count=int(count) if count else 1)]


def _devices_of_file(word: str, line: CommandLine) -> list[Device]:
    try:
        return read_devices(Path(word).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "It is no text in UTF-8."
        raise SettingsError(
            f"Cannot read {word}.", f"{reason.rstrip('.')}.", str(line.flag("--devices", "h200:8"))
        ) from None
    except DeviceFileError as error:
        wrong, facts, do = error.args
        raise SettingsError(f"{word}: {wrong}", facts, f"{do} (in {word})") from None


def _prices(text: str, names: list[str], line: CommandLine) -> Iterator[tuple[str, float]]:
    """Yield names and prices."""
    for word in filter(None, (word.strip() for word in text.split(","))):
        name, _, value = (part.strip() for part in word.partition("="))
        if not re.fullmatch(r"\d+(\.\d*)?|\.\d+", value):
            facts = "It is NAME=NUMBER: what an hour of one device costs. Several are separated by commas."
            do = line.flag("--price", f"{name if name in names else names[0]}=3.5")
            raise SettingsError(f"Invalid value for --price: {word}", facts, str(do))
        if name not in names:
            facts = f"--devices has {', '.join(names)}."
            if name in KNOWN:
                do = line.flag("--devices", ",".join([*names, f"{name}:1"]))
            else:
                do = line.flag("--price", f"{nearest_name(name, names) or names[0]}={value}")
            raise SettingsError(f"--price names a device that is not compared: {name}", facts, str(do))
        yield name, float(value)
