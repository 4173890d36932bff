"""Sample accelerators of NVIDIA through NVML: https://docs.nvidia.com/deploy/nvml-api/.

The package nvidia-ml-py (`pip install 'unisono[nvml]'`) calls the driver's library. A read takes some 0.1 ms, that of
the bytes on a link 20 ms, and releases the interpreter lock. The figures are those of the device, with all processes
that use it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from unisono.machine.counter_rates import CounterRates, without_none

THROTTLING = {
    0x4: "power",
    0x8: "slowdown",
    0x20: "thermal",
    0x40: "thermal",
    0x80: "power brake",
}
"""Reasons for a lower clock, by their bits (nvmlClocksEventReasons). Others, such as an idle device, are no fault."""

LANE = {1: 0.25e9, 2: 0.5e9, 3: 0.985e9, 4: 1.969e9, 5: 3.938e9, 6: 7.563e9}
"""Bytes a second in each direction of a lane of PCI Express, by its generation."""


class NvmlDevice:
    """A device of NVIDIA, by its UUID, so that CUDA_VISIBLE_DEVICES does not matter.

    Raises:
        Exception: There is no driver, or it does not know the device: pynvml.NVMLError; ImportError: no nvidia-ml-py.
    """

    def __init__(self, uuid: str) -> None:
        import pynvml  # type: ignore[import-untyped]

        self.uuid = uuid
        self._nvml: Any = pynvml
        pynvml.nvmlInit()
        self._handle = pynvml.nvmlDeviceGetHandleByUUID(uuid)
        self.index = int(pynvml.nvmlDeviceGetIndex(self._handle))

    def _value(self, function: str, *arguments: Any) -> Any:
        """Return what a function of NVML states of the device; None if the device or the driver does not know it."""
        try:
            return getattr(self._nvml, function)(self._handle, *arguments)
        except (AttributeError, self._nvml.NVMLError):
            return None

    def facts(self) -> dict[str, Any]:
        """Return what does not change: index, UUID, name, memory (bytes), limit of the power (watts)."""
        name, memory = self._value("nvmlDeviceGetName"), self._value("nvmlDeviceGetMemoryInfo")
        limit = self._value("nvmlDeviceGetEnforcedPowerLimit")
        return {
            "index": self.index,
            "uuid": self.uuid,
            "name": name.decode() if isinstance(name, bytes) else name,
            "memory": memory and memory.total,
            "watts": limit and limit / 1000,
            "link": self._link(),
        }

    def _link(self) -> float | None:
        """Return the bytes that the link to the host carries in a second, in each direction."""
        generation, lanes = (
            self._value("nvmlDeviceGetMaxPcieLinkGeneration"),
            self._value("nvmlDeviceGetMaxPcieLinkWidth"),
        )
        return LANE[generation] * lanes if generation in LANE and lanes else None

    def sample(self) -> dict[str, Any]:
        """Return the usage now: see sample_file.py."""
        used, memory = self._value("nvmlDeviceGetUtilizationRates"), self._value("nvmlDeviceGetMemoryInfo")
        power = self._value("nvmlDeviceGetPowerUsage")
        clock = self._value("nvmlDeviceGetClockInfo", 1)  # NVML_CLOCK_SM
        reasons = self._value("nvmlDeviceGetCurrentClocksThrottleReasons")
        numbers = without_none(
            {
                "memory": memory and memory.used,
                "celsius": self._value("nvmlDeviceGetTemperature", 0),  # NVML_TEMPERATURE_GPU
                "mhz": clock,
            }
        )
        numbers |= without_none({name: kilo and kilo * 1000 for name, kilo in self._kilobytes().items()})
        numbers |= without_none({"utilization": used and used.gpu / 100, "watts": power and power / 1000}, 2)
        found: dict[str, Any] = {"index": self.index, **numbers}
        if throttled := sorted({name for bit, name in THROTTLING.items() if (reasons or 0) & bit}):
            found["throttled"] = throttled
        return found

    def _kilobytes(self) -> dict[str, int | None]:
        """Return the bytes a second / 1000 on the link to the host, from the device's view received and sent."""
        counters = {"from_host": 1, "to_host": 0}  # NVML_PCIE_UTIL_RX_BYTES, NVML_PCIE_UTIL_TX_BYTES
        return {name: self._value("nvmlDeviceGetPcieThroughput", counter) for name, counter in counters.items()}

    def joules(self) -> float | None:
        """Return the energy since the driver was loaded; None: the device has no counter."""
        millijoules = self._value("nvmlDeviceGetTotalEnergyConsumption")
        return None if millijoules is None else millijoules / 1000


def open_device(uuid: str) -> NvmlDevice | str:
    """Return a device for reading, or why it cannot be read."""
    try:
        return NvmlDevice(uuid)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


class Devices:
    """The accelerators of a run on this host.

    Args:
        wanted: Returns the UUIDs of the devices of all processes that live.
        opened: Is called with each device that is read for the first time.
    """

    def __init__(self, wanted: Callable[[], Iterable[str]], opened: Callable[[NvmlDevice], None]) -> None:
        self._wanted, self._opened = wanted, opened
        self._known: dict[str, NvmlDevice | str] = {}
        self._sums: dict[str, list[float]] = {}
        self._open_new()

    @property
    def problems(self) -> list[str]:
        """Why devices cannot be read."""
        return sorted({each for each in self._known.values() if isinstance(each, str)})

    def _open_new(self) -> list[NvmlDevice]:
        for uuid in self._wanted():
            if uuid not in self._known:
                self._known[uuid] = device = open_device(uuid)
                if isinstance(device, NvmlDevice):
                    self._opened(device)
        return [device for device in self._known.values() if isinstance(device, NvmlDevice)]

    def facts(self) -> dict[str, Any]:
        found = [device.facts() for device in self._open_new()]
        return {"devices": found} if found else {}

    def sample(self, rates: CounterRates) -> dict[str, Any]:
        found = {device.uuid: device.sample() for device in self._open_new()}
        for uuid, values in found.items():
            sums = self._sums.setdefault(uuid, [0.0, 0.0, 0.0])
            sums[:] = sums[0] + 1, sums[1] + values.get("utilization", 0.0), sums[2] + values.get("watts", 0.0)
        return {"devices": list(found.values())} if found else {}

    def means(self) -> dict[str, dict[str, float]]:
        """Return the mean utilization (percent) and power (watts) of all samples, by UUID, and the index."""
        found = {}
        for uuid, (count, utilization, watts) in self._sums.items():
            device = self._known[uuid]
            assert isinstance(device, NvmlDevice)
            means = {"utilization": round(100 * utilization / count, 1), "watts": round(watts / count, 1)}
            found[uuid] = {"index": device.index, **means}
        return found
