"""The usage of a device is read through NVML; without a driver the reason is recorded."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

from unisono.monitor.device_usage import DeviceUsage, NvmlDevice, open_device
from unisono.train.diagnostics import usage_recorder
from unisono.train.diagnostics.usage_recorder import UsageRecorder, build_usage


class Timeline:
    def __init__(self) -> None:
        self.events: list[object] = []

    def event(self, values: object) -> None:
        self.events.append(json.loads(json.dumps(values)))


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Put a driver with the names and units of NVML in the place of pynvml. Each read uses 50 J."""
    state, module = SimpleNamespace(energy=1_000_000, uuid=""), ModuleType("pynvml")

    def energy(_: object) -> int:
        state.energy += 50_000
        return int(state.energy)

    functions = {
        "nvmlInit": lambda: None,
        "nvmlDeviceGetHandleByUUID": lambda uuid: setattr(state, "uuid", uuid),
        "nvmlDeviceGetUtilizationRates": lambda _: SimpleNamespace(gpu=87, memory=12),
        "nvmlDeviceGetMemoryInfo": lambda _: SimpleNamespace(total=80 * 2**30, used=3 * 2**30),
        "nvmlDeviceGetPowerUsage": lambda _: 412_500,
        "nvmlDeviceGetTotalEnergyConsumption": energy,
    }
    for name, function in functions.items():
        setattr(module, name, function)
    monkeypatch.setitem(sys.modules, "pynvml", module)
    return state


def test_units_are_percent_bytes_watts_and_joules(driver: SimpleNamespace) -> None:
    device = NvmlDevice("GPU-1")
    assert device.read() == DeviceUsage(87, 3 * 2**30, 412.5, 1100.0)
    assert driver.uuid == "GPU-1"


def test_a_run_records_its_usage(driver: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(usage_recorder, "SECONDS", 0.0)
    timeline = Timeline()
    recorder = UsageRecorder(torch.device("cpu"), timeline, NvmlDevice("GPU-1"))  # type: ignore[arg-type]
    for _ in range(3):
        recorder.after_step(None)  # type: ignore[arg-type]
    assert len(timeline.events) == 3
    assert timeline.events[0]["device"]["watts"] == 412.5  # type: ignore[index]
    found = recorder.result()["device"]
    assert (found["utilization"], found["watts"], found["joules"]) == (87, 412.5, 200.0)


def test_without_a_driver_the_reason_is_recorded(tmp_path: Path) -> None:
    pytest.importorskip("pynvml", reason="needs pip install 'unisono[nvml]'")
    if torch.cuda.is_available():
        pytest.skip("this machine has a driver")
    with pytest.raises(Exception, match="NVML Shared Library Not Found"):
        NvmlDevice("GPU-1")
    why = open_device(torch.device("xpu"))
    assert why == "NVML does not know xpu devices"
    recorder = UsageRecorder(torch.device("cpu"), Timeline(), str(why))  # type: ignore[arg-type]
    recorder.after_step(None)  # type: ignore[arg-type]
    assert recorder.result()["device"]["usage"] == "not measured: NVML does not know xpu devices"


def test_the_cpu_has_no_recorder() -> None:
    assert build_usage(torch.device("cpu"), Timeline()) == []  # type: ignore[arg-type]
