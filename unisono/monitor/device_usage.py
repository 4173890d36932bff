"""Read how much of an NVIDIA device is used, through NVML: https://docs.nvidia.com/deploy/nvml-api/.

The package nvidia-ml-py (`pip install 'unisono[nvml]'`) calls the driver's library. A read takes some 0.1 ms. The
figures are those of the device, with all processes that use it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch


class DeviceUsage(NamedTuple):
    """The usage of a device.

    utilization  percent of the last second or less in which a kernel ran
    memory       bytes in use
    watts        power
    joules       energy since the driver was loaded
    """

    utilization: int
    memory: int
    watts: float
    joules: float


class NvmlDevice:
    """A device of NVIDIA, by its UUID, so that CUDA_VISIBLE_DEVICES does not matter.

    Raises:
        Exception: There is no driver, or it does not know the device: pynvml.NVMLError; ImportError: no nvidia-ml-py.
    """

    def __init__(self, uuid: str) -> None:
        import pynvml  # type: ignore[import-untyped]

        self._nvml: Any = pynvml
        pynvml.nvmlInit()
        self._handle = pynvml.nvmlDeviceGetHandleByUUID(uuid)
        self.read()

    def read(self) -> DeviceUsage:
        """Return the usage now."""
        nvml, handle = self._nvml, self._handle
        return DeviceUsage(
            nvml.nvmlDeviceGetUtilizationRates(handle).gpu,
            nvml.nvmlDeviceGetMemoryInfo(handle).used,
            nvml.nvmlDeviceGetPowerUsage(handle) / 1000,
            nvml.nvmlDeviceGetTotalEnergyConsumption(handle) / 1000,
        )


def open_device(device: torch.device) -> NvmlDevice | str:
    """Return a CUDA device for reading, or why it cannot be read."""
    if device.type != "cuda":
        return f"NVML does not know {device.type} devices"
    uuid = str(torch.cuda.get_device_properties(device).uuid)
    try:
        return NvmlDevice(uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}")
    except Exception as error:
        return f"{type(error).__name__}: {error}"
