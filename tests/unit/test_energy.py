"""Energy of trees of files like /sys/class/powercap, of a driver with NVML's names, and of several hosts."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from unisono.config import MachineSettings
from unisono.machine.counter_rates import CounterRates
from unisono.machine.energy_counters import EnergyMeter
from unisono.machine.kernel_files import KernelFiles
from unisono.machine.nvml_devices import Devices, NvmlDevice, open_device
from unisono.machine.run_processes import register
from unisono.machine.sample_file import read_samples
from unisono.machine.sampler import SampledRun
from unisono.machine.sampling_thread import SamplingThread
from unisono.train.recording.machine_sampling import energy_entry, traffic_entries, uuid_of

RANGE = 262_143_328_850
"""max_energy_range_uj of many Intel processors."""


def domain(root: Path, name: str, label: str, microjoules: int) -> Path:
    folder = root / "sys/class/powercap" / name
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "name").write_text(label + "\n")
    (folder / "max_energy_range_uj").write_text(f"{RANGE}\n")
    (folder / "energy_uj").write_text(f"{microjoules}\n")
    return folder / "energy_uj"


def test_packages_and_memory_count_once(tmp_path: Path) -> None:
    domain(tmp_path, "intel-rapl:0", "package-0", 5_000_000)
    domain(tmp_path, "intel-rapl:0:0", "core", 1)
    domain(tmp_path, "intel-rapl:0:1", "dram", 1_000_000)
    domain(tmp_path, "intel-rapl:1", "package-1", 0)
    domain(tmp_path, "intel-rapl:2", "psys", 0)
    domain(tmp_path, "intel-rapl-mmio:0", "package-0", 0)
    (tmp_path / "sys/class/powercap/intel-rapl").mkdir()
    meter = EnergyMeter(KernelFiles(tmp_path))
    assert set(meter.counters) == {"rapl:package-0", "rapl:package-1", "rapl:dram-0"}
    assert meter.missing == []
    domain(tmp_path, "intel-rapl:0", "package-0", 25_000_000)
    domain(tmp_path, "intel-rapl:0:1", "dram", 4_000_000)
    meter.update()
    assert {name: counter.joules for name, counter in meter.counters.items()} == {
        "rapl:package-0": 20.0,
        "rapl:package-1": 0.0,
        "rapl:dram-0": 3.0,
    }


def test_a_counter_begins_anew(tmp_path: Path) -> None:
    domain(tmp_path, "intel-rapl:0", "package-0", RANGE - 2_000_000)
    meter, rates = EnergyMeter(KernelFiles(tmp_path)), CounterRates()
    rates.begin(0.0)
    meter.sample(rates)
    for turn, microjoules in enumerate((6_000_000, RANGE - 1_000_000, 7_000_000)):
        domain(tmp_path, "intel-rapl:0", "package-0", microjoules)
        rates.begin(4.0 * (turn + 1))
        found = meter.sample(rates)["energy"]["rapl:package-0"]
        assert found["watts"] == pytest.approx((2.0, (RANGE / 1e6 - 7) / 4, 2.0)[turn], abs=0.1)
        assert found["counter"] == round(microjoules / 1e6, 3)
    assert meter.counters["rapl:package-0"].joules == pytest.approx(8 + RANGE / 1e6 - 7 + 8)


def test_no_permission_is_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = domain(tmp_path, "intel-rapl:0", "package-0", 1)
    path.chmod(0)
    if os.access(path, os.R_OK):  # root reads every file
        really = Path.read_text

        def read_text(self: Path, *words: Any, **more: Any) -> str:
            if self == path:
                raise PermissionError(13, "Permission denied", str(self))
            return really(self, *words, **more)

        monkeypatch.setattr(Path, "read_text", read_text)
    meter = EnergyMeter(KernelFiles(tmp_path))
    assert meter.counters == {}
    assert meter.missing == [f"no permission to read {path}"]
    report = {"host": "a", "machine": "a", "of": 1, "sampled": {"joules": {}, "missing": meter.missing}}
    assert energy_entry([report], MachineSettings(), 5.0, 10) == f"not measured: no permission to read {path}"


def sampled(host: str, joules: dict[str, float], missing: tuple[str, ...] = ()) -> dict[str, Any]:
    return {"host": host, "machine": host, "of": 2, "sampled": {"joules": joules, "missing": list(missing)}}


def test_the_energy_of_hosts_is_added() -> None:
    one = sampled("a", {"rapl:package-0": 1_800_000.0, "nvml:0": 900_000.0})
    other = sampled("b", {"rapl:package-0": 900_000.0}, ("nvml:0 has no counter",))
    assert energy_entry(
        [one, {"host": "a", "machine": "a", "of": 3}, other], MachineSettings(watts=9.0), 60.0, 1000
    ) == {
        "joules": 3_600_000.0,
        "kwh": 1.0,
        "joules_per_sample": 3600.0,
        "source": "a rapl:package-0, a nvml:0, b rapl:package-0",
        "not_measured": ["b: nvml:0 has no counter"],
    }
    assert energy_entry([one], MachineSettings(), 60.0, 0) == {
        "joules": 2_700_000.0,
        "kwh": 0.75,
        "source": "rapl:package-0, nvml:0",
    }


def test_containers_of_one_machine_count_once() -> None:
    """So does a process that continued after another one."""
    reports = [sampled(host, {"rapl:package-0": joules}) for host, joules in (("a", 70.0), ("b", 71.0), ("c", 69.0))]
    shared = [{**report, "machine": "x"} for report in reports]
    off = MachineSettings(every=0, watts=10.0)
    assert energy_entry(shared, off, 60.0, 0) == {"joules": 71.0, "kwh": 1.972e-05, "source": "rapl:package-0"}
    assert energy_entry([{"host": h, "machine": "x", "of": 2} for h in "ab"], off, 60.0, 0) == {
        "joules": 600.0,
        "kwh": 0.0001667,
        "source": "estimated from machine.watts",
    }


def test_energy_without_counters() -> None:
    none = sampled("a", {})
    assert energy_entry([none], MachineSettings(), 60.0, 100) == "not measured: no counter"
    assert (
        energy_entry([{"host": "a", "machine": "a", "of": 1}], MachineSettings(every=0), 60.0, 100)
        == "not measured: machine.every=0"
    )
    estimate = energy_entry([none, sampled("b", {})], MachineSettings(watts=350.0), 60.0, 100)
    expected = {"joules": 42_000.0, "kwh": 0.01167, "joules_per_sample": 420.0}
    assert estimate == {**expected, "source": "estimated from machine.watts"}


def test_bytes_of_processes_or_of_networks() -> None:
    def report(host: str, tcp: list[int] | None, network: list[float]) -> dict[str, Any]:
        return {"host": host, "machine": host, "of": 2, "tcp": tcp, "sampled": {"network": network, "joules": {}}}

    both = [report("a", [10, 20], [1.0, 2.0]), report("b", [5, 6], [3.0, 4.0])]
    source = "TCP connections of all processes"
    assert traffic_entries(both) == {"bytes_sent": 15, "bytes_received": 26, "bytes_source": source}
    both[1]["tcp"] = None
    assert traffic_entries(both) == {"bytes_sent": 4, "bytes_received": 6, "bytes_source": "networks of a, b"}
    alone = {"bytes_sent": 1, "bytes_received": 2, "bytes_source": "networks of a"}
    assert traffic_entries(both[:1]) == alone  # the processes do not meet at the end
    assert traffic_entries([{**both[0], "of": 1}]) == {}
    assert traffic_entries([report("a", None, [])]) == {}


# -- accelerators


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Put a driver with the names and units of NVML in the place of pynvml. Each read of the energy uses 50 J."""
    state, module = SimpleNamespace(energy=1_000_000, uuid="", throttled=0x1, lacks=set[str]()), ModuleType("pynvml")

    class NVMLError(Exception):
        pass

    def energy(_: object) -> int:
        state.energy += 50_000
        return int(state.energy)

    def handle(uuid: str) -> str:
        if not uuid.startswith("GPU-"):
            raise NVMLError("Not Found")
        return uuid

    functions = {
        "nvmlInit": lambda: None,
        "nvmlDeviceGetHandleByUUID": handle,
        "nvmlDeviceGetIndex": lambda handle: int(handle[-1]),
        "nvmlDeviceGetName": lambda _: "H100",
        "nvmlDeviceGetUtilizationRates": lambda _: SimpleNamespace(gpu=87, memory=12),
        "nvmlDeviceGetMemoryInfo": lambda _: SimpleNamespace(total=80 * 2**30, used=3 * 2**30),
        "nvmlDeviceGetPowerUsage": lambda _: 412_500,
        "nvmlDeviceGetEnforcedPowerLimit": lambda _: 700_000,
        "nvmlDeviceGetTemperature": lambda _, sensor: {0: 71}[sensor],
        "nvmlDeviceGetClockInfo": lambda _, clock: {1: 1980}[clock],
        "nvmlDeviceGetCurrentClocksThrottleReasons": lambda _: state.throttled,
        "nvmlDeviceGetTotalEnergyConsumption": energy,
        "nvmlDeviceGetMaxPcieLinkGeneration": lambda _: 5,
        "nvmlDeviceGetMaxPcieLinkWidth": lambda _: 16,
        "nvmlDeviceGetPcieThroughput": lambda _, counter: {0: 2_000, 1: 900_000}[counter],
    }

    def checked(name: str) -> Any:
        def call(*arguments: Any) -> Any:
            if name in state.lacks:
                raise NVMLError("Not Supported")
            return functions[name](*arguments)  # type: ignore[operator]

        return call

    for name in functions:
        setattr(module, name, checked(name))
    module.NVMLError = NVMLError  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "pynvml", module)
    return state


def test_usage_of_a_device(driver: SimpleNamespace) -> None:
    device = NvmlDevice("GPU-1")
    facts = {"index": 1, "uuid": "GPU-1", "name": "H100", "memory": 80 * 2**30, "watts": 700.0, "link": 63.008e9}
    assert device.facts() == facts
    usage = {"index": 1, "memory": 3 * 2**30, "celsius": 71, "mhz": 1980, "utilization": 0.87, "watts": 412.5}
    usage |= {"from_host": 900_000_000, "to_host": 2_000_000}
    assert device.sample() == usage  # idle is no reason to worry
    driver.throttled = 0x20 | 0x40 | 0x4
    assert device.sample() == {**usage, "throttled": ["power", "thermal"]}
    driver.lacks |= {"nvmlDeviceGetTotalEnergyConsumption", "nvmlDeviceGetClockInfo"}
    assert "mhz" not in device.sample()
    assert device.joules() is None
    assert open_device("0") == "NVMLError: Not Found"


def test_devices_of_processes_that_start_later(driver: SimpleNamespace, tmp_path: Path) -> None:
    wanted = ["GPU-0"]
    meter = EnergyMeter(KernelFiles(tmp_path))
    devices = Devices(lambda: wanted, meter.add_device)
    rates = CounterRates()
    rates.begin(0.0)
    devices.sample(rates)
    wanted += ["GPU-3", "weird"]
    driver.lacks.add("nvmlDeviceGetTotalEnergyConsumption")
    rates.begin(1.0)
    assert [each["index"] for each in devices.sample(rates)["devices"]] == [0, 3]
    assert devices.problems == ["NVMLError: Not Found"]
    assert (set(meter.counters), meter.missing) == ({"nvml:0"}, ["nvml:3 has no counter"])
    assert devices.means() == {
        "GPU-0": {"index": 0, "utilization": 87.0, "watts": 412.5},
        "GPU-3": {"index": 3, "utilization": 87.0, "watts": 412.5},
    }


def test_a_thread_samples_devices_and_energy(driver: SimpleNamespace, tmp_path: Path) -> None:
    """A process that samples next continues the energy of the first one."""

    def run(rank: int, device: str) -> SampledRun:
        values: dict[str, Any] = {"host": "a", "ranks": 2, "threads": 1, "every": 0.05}
        return SampledRun(run_dir=tmp_path, rank=rank, device=device, **values)

    first, second = (SamplingThread(run(rank, f"GPU-{rank}"), pytest.fail) for rank in (0, 1))
    register(second.run.processes, KernelFiles(), 1, "GPU-1")
    for thread in (first, second):
        thread.start(first=True)
        while thread.sampler is None or len(list(read_samples(thread.run.samples))) < 4:
            pass
        thread.close(over=thread is second)
    starts = [line["start"] for line in read_samples(first.run.samples) if "start" in line]
    samples = [line for line in read_samples(first.run.samples) if "processes" in line]
    assert [device["uuid"] for device in starts[0]["devices"]] == ["GPU-0", "GPU-1"]
    assert {each["watts"] for each in samples[0]["devices"]} == {412.5}
    joules = [sample["energy"]["nvml:0"]["joules"] for sample in samples]
    assert joules == sorted(joules)
    assert joules[-1] >= 50 * len(joules)
    assert second.sampler is not None
    assert second.sampler.energy.counters["nvml:0"].joules >= joules[-1]


def test_without_a_driver_the_reason_is_recorded() -> None:
    pytest.importorskip("pynvml", reason="needs pip install 'unisono[nvml]'")
    if torch.cuda.is_available():
        pytest.skip("this machine has a driver")
    assert str(open_device("GPU-1")).endswith("NVML Shared Library Not Found")
    assert uuid_of(torch.device("cpu")) == ""
