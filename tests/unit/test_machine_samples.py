"""Samples of a host, from trees of files like /proc and /sys whose counters a test moves."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from unisono.machine import run_processes, sampling_thread
from unisono.machine.control_group import ControlGroup
from unisono.machine.counter_rates import CounterRates
from unisono.machine.host_load import Memory, Pressure, Processors
from unisono.machine.host_traffic import Disks, Networks
from unisono.machine.kernel_files import KernelFiles
from unisono.machine.run_processes import PAGE, TICK, RunProcesses, register
from unisono.machine.sample_file import MOST_SECONDS, SampleFile, read_samples, samples_path
from unisono.machine.sampler import SampledRun, Sampler, Source
from unisono.machine.sampling_thread import SamplingThread
from unisono.machine.tcp_traffic import read_tcp_traffic


class Machine:
    """A folder with proc/ and sys/, whose files a test writes."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.files = KernelFiles(root)
        self.rates = CounterRates()
        self.now = 0.0

    def write(self, name: str, text: str) -> None:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def sample(self, source: Source, seconds: float = 2.0) -> dict[str, Any]:
        """Return a sample that is taken some seconds after the last one."""
        self.now += seconds
        self.rates.begin(self.now)
        return source.sample(self.rates)

    def processors(self, *, busy: int, idle: int, iowait: int = 0, steal: int = 0) -> None:
        self.write("proc/stat", f"cpu  {busy} 0 0 {idle} {iowait} 0 0 {steal} 0 0\ncpu0 1 2 3 4 5 6 7 8 9 10\n")

    def process(self, pid: int, *, ticks: int = 0, resident: int = 0, begun: int = 77, state: str = "R") -> None:
        fields = [state, *["0"] * 21]
        fields[11], fields[17], fields[19], fields[21] = str(ticks), "5", str(begun), str(resident // PAGE)
        self.write(f"proc/{pid}/stat", f"{pid} (a name) with) {' '.join(fields)} 0 0\n")


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path / "root")


def test_shares_of_the_processors(machine: Machine) -> None:
    processors = Processors(machine.files, {0, 1})
    machine.processors(busy=100, idle=1000)
    machine.write("proc/loadavg", "1.00 2.00 3.00 9/321 4711\n")
    assert machine.sample(processors)["cores"]["runnable"] == 8
    machine.processors(busy=150, idle=1030, iowait=10, steal=10)
    found = machine.sample(processors)
    assert found["cpu"] == 0.6
    assert found["cores"] == {"iowait": 0.1, "steal": 0.1, "runnable": 8}


def test_frequency_heat_and_throttling_of_processors(machine: Machine) -> None:
    cpu = "sys/devices/system/cpu"
    for core in range(4):
        machine.write(f"{cpu}/cpu{core}/topology/physical_package_id", f"{core // 2}\n")
        machine.write(f"{cpu}/cpu{core}/cpufreq/scaling_cur_freq", f"{2_000_000 + core * 100_000}\n")
        machine.write(f"{cpu}/cpu{core}/thermal_throttle/package_throttle_total_time_ms", f"{core // 2 * 500}\n")
    for zone, kind in enumerate(("acpitz", "x86_pkg_temp")):
        machine.write(f"sys/class/thermal/thermal_zone{zone}/type", kind + "\n")
        machine.write(f"sys/class/thermal/thermal_zone{zone}/temp", f"{60_000 + zone * 31_500}\n")
    processors = Processors(machine.files, {0, 1, 2, 3})
    assert machine.sample(processors)["cores"] == {"mhz": 2150, "celsius": 91.5}
    machine.write(f"{cpu}/cpu2/thermal_throttle/package_throttle_total_time_ms", "1500\n")
    assert machine.sample(processors)["cores"]["throttled"] == 0.5


def test_swapping_is_in_bytes_per_second(machine: Machine) -> None:
    memory = Memory(machine.files)
    machine.write(
        "proc/meminfo", "MemTotal:  8000 kB\nMemAvailable:  500 kB\nSwapTotal:  4000 kB\nSwapFree:  1000 kB\n"
    )
    machine.write("proc/vmstat", "pswpin 100\npswpout 200\n")
    assert memory.facts() == {"memory": {"total": 8000 * 1024, "swap": 4000 * 1024}}
    assert machine.sample(memory) == {"memory": {"available": 500 * 1024, "swap": 3000 * 1024}}
    machine.write("proc/vmstat", "pswpin 110\npswpout 260\n")
    found = machine.sample(memory)["memory"]
    assert (found["swap_in"], found["swap_out"]) == (5 * PAGE, 30 * PAGE)


def test_pressure_is_a_share_of_the_time(machine: Machine) -> None:
    pressure = Pressure(machine.files)
    for total in (1_000_000, 2_500_000):
        machine.write("proc/pressure/io", f"some avg10=1.00 avg60=1.00 avg300=1.00 total={total}\nfull total=7\n")
        found = machine.sample(pressure)
    assert found == {"pressure": {"io": 0.75}}


def test_disks_and_their_traffic(machine: Machine, tmp_path: Path) -> None:
    device = os.stat(tmp_path).st_dev
    numbers = f"{os.major(device)} {os.minor(device)}"
    for name in ("sda", "sdb", "dm-0"):
        machine.write(f"sys/block/{name}/size", "1\n")

    def disks(read: int, written: int, busy: int) -> None:
        row = f"0 0 {read} 0 0 0 {written} 0 0 {busy} 0"
        lines = [f"8 0 sda {row}", f"{numbers} sda1 {row}", "8 16 sdb 0 0 0 0 0 0 0 0 0 0 0", f"253 0 dm-0 {row}"]
        machine.write("proc/diskstats", "".join(f"  {line}\n" for line in lines))

    disks(100, 200, 0)
    source = Disks(machine.files, tmp_path)
    assert source.facts() == {"run_disk": "sda1"}
    assert machine.sample(source) == {}
    disks(120, 300, 500)
    used = {"read": 5120, "written": 25600, "busy": 0.25}
    assert machine.sample(source) == {"disk": {"sda": used, "sda1": used}}  # an idle disk is absent
    disks(120, 300, 500)
    assert machine.sample(source) == {"disk": {"sda1": {"read": 0, "written": 0, "busy": 0.0}}}


def test_networks_and_their_totals(machine: Machine) -> None:
    def networks(received: int, sent: int, words: int) -> None:
        head = "Inter-|   Receive\n face |bytes\n"
        machine.write("proc/net/dev", f"{head}    lo: 0 0 0 0 0 0 0 0 0 0\n  eth0:{received} 1 0 0 0 0 0 0 {sent} 1\n")
        for name in ("xmit", "rcv"):
            machine.write(f"sys/class/infiniband/mlx5_0/ports/1/counters/port_{name}_data", f"{words}\n")

    networks(1000, 2000, 10)
    source = Networks(machine.files)
    assert machine.sample(source) == {}
    networks(1400, 2200, 60)
    expected = {"eth0": {"sent": 100, "received": 200}, "mlx5_0/1": {"sent": 100, "received": 100}}
    assert machine.sample(source) == {"network": expected}
    networks(1500, 2300, 60)
    machine.sample(source)
    assert source.totals == {"lo": [0, 0], "eth0": [300, 500], "mlx5_0/1": [200, 200]}


@pytest.mark.parametrize("inside", [True, False], ids=["path", "namespace"])
def test_a_quota_that_throttles(machine: Machine, inside: bool) -> None:
    """The strictest limit counts. A container may see a path that does not exist inside."""
    group = "sys/fs/cgroup/jobs/7" if inside else "sys/fs/cgroup"
    machine.write("proc/self/cgroup", "0::/jobs/7\n" if inside else "0::/docker/123\n")
    machine.write(f"{group}/cpu.max", "150000 100000\n")
    machine.write(f"{group}/memory.max", "max\n")
    if inside:
        machine.write("sys/fs/cgroup/jobs/cpu.max", "max 100000\n")
        machine.write("sys/fs/cgroup/jobs/memory.max", "4000000\n")
    group_of_memory = "sys/fs/cgroup/jobs"
    machine.write(f"{group_of_memory}/memory.current", "3900000\n")
    machine.write(f"{group_of_memory}/memory.stat", "anon 1\ninactive_file 100000\n")
    machine.write(f"{group_of_memory}/memory.events", "low 0\noom_kill 1\n")
    machine.write(f"{group}/cpu.stat", "usage_usec 5\nnr_periods 100\nnr_throttled 10\nthrottled_usec 1000000\n")
    source = ControlGroup(machine.files)
    assert source.facts() == {"cgroup": {"cpus": 1.5, **({"memory": 4_000_000} if inside else {})}}
    machine.sample(source)
    machine.write(f"{group}/cpu.stat", "nr_periods 120\nnr_throttled 25\nthrottled_usec 2500000\n")
    machine.write(f"{group_of_memory}/memory.events", "low 0\noom_kill 3\n")
    memory = {"memory": 3_800_000, "oom_kills": 2} if inside else {}
    assert machine.sample(source) == {"cgroup": {"throttled": 0.75, "throttled_periods": 0.75, **memory}}


def test_limits_of_the_first_version_of_control_groups(machine: Machine) -> None:
    machine.write("proc/self/cgroup", "9:name=systemd:/\n4:memory:/slurm/job_3\n1:cpu,cpuacct:/slurm\n0::/\n")
    cpu, memory = "sys/fs/cgroup/cpu/slurm", "sys/fs/cgroup/memory/slurm/job_3"
    machine.write(f"{cpu}/cpu.cfs_quota_us", "200000\n")
    machine.write(f"{cpu}/cpu.cfs_period_us", "100000\n")
    machine.write(f"{cpu}/cpu.stat", "nr_periods 10\nnr_throttled 0\nthrottled_time 0\n")
    machine.write(f"{memory}/memory.limit_in_bytes", "8000\n")
    machine.write("sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n")
    machine.write(f"{memory}/memory.usage_in_bytes", "7000\n")
    machine.write(f"{memory}/memory.stat", "inactive_file 5\ntotal_inactive_file 1000\n")
    source = ControlGroup(machine.files)
    assert source.facts() == {"cgroup": {"cpus": 2, "memory": 8000}}
    machine.sample(source)
    machine.write(f"{cpu}/cpu.stat", "nr_periods 20\nnr_throttled 5\nthrottled_time 400000000\n")
    assert machine.sample(source) == {"cgroup": {"throttled": 0.2, "throttled_periods": 0.5, "memory": 6000}}


def test_processes_of_the_run_and_their_workers(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = tmp_path / "host-a.ranks"
    lines = [{"rank": 0, "pid": 10, "begun": 77, "device": ""}, {"rank": 1, "pid": 20, "begun": 77, "device": ""}]
    ranks.write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"rank": 2, "pi')
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    source = RunProcesses(machine.files, ranks)
    machine.process(10, ticks=0, resident=100 * PAGE)
    machine.process(20, begun=99)  # another process with the id of one that has died
    machine.process(11, resident=7 * PAGE)
    machine.write("proc/10/task/10/children", "11 12 ")
    machine.write("proc/10/schedstat", "1 1000000000 5\n")
    assert set(machine.sample(source)["processes"]) == {"0"}
    machine.process(10, ticks=3 * TICK, resident=90 * PAGE)
    machine.process(11, ticks=TICK, resident=7 * PAGE)
    machine.write("proc/10/schedstat", "1 1500000000 5\n")
    machine.write("proc/10/status", "Name:\tx\nVmHWM:\t     400 kB\nVmSwap:\t       8 kB\nCpus_allowed_list:\t0\n")
    machine.write("proc/10/io", "rchar: 5\nread_bytes: 4096\nwrite_bytes: 0\n")
    machine.sample(source)
    machine.write("proc/10/io", "rchar: 5\nread_bytes: 8192\nwrite_bytes: 0\n")
    machine.process(10, ticks=6 * TICK, resident=90 * PAGE)
    machine.process(11, ticks=2 * TICK, resident=7 * PAGE)
    assert machine.sample(source)["processes"] == {
        "0": {
            "cpu": 1.5,
            "delayed": 0.0,
            "resident": 90 * PAGE,
            "threads": 5,
            "peak": 400 * 1024,
            "swap": 8 * 1024,
            "read": 2048,
            "allowed": "0",
            "workers": {"count": 1, "cpu": 0.5, "resident": 7 * PAGE},
        }
    }
    machine.process(10, state="Z")
    assert machine.sample(source)["processes"] == {}
    machine.process(30)
    with ranks.open("a") as file:
        file.write('\n{"rank": 1, "pid": 30, "begun": 77, "device": "GPU-1"}\n')
    assert set(machine.sample(source)["processes"]) == {"1"}  # a replacement
    assert source.devices == ["GPU-1"]


def test_cores_in_a_list() -> None:
    assert [run_processes.cores_in(text) for text in ("", "0", "0-3,8", "1,3,5-6")] == [0, 1, 5, 4]


def test_an_empty_tree_is_no_error(tmp_path: Path) -> None:
    notes: list[str] = []
    sampler = Sampler(sampled(tmp_path, root=tmp_path / "nothing"), notes.append)
    sampler.begin()
    sampler.sample()
    sampler.end(over=False)
    start, sample = read_samples(samples_path(tmp_path, "a"))
    assert set(start["start"]) >= {"host", "cores", "ranks", "threads"}
    assert set(sample) == {"t", "cores", "processes"}
    assert notes == []


def sampled(folder: Path, **changes: Any) -> SampledRun:
    values: dict[str, Any] = {"run_dir": folder, "host": "a", "rank": 0, "ranks": 2, "threads": 4, "every": 0.05}
    return SampledRun(**{**values, **changes})


def test_a_source_that_fails_is_named_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> Any:
        raise ValueError("no such column")

    monkeypatch.setattr(Disks, "sample", fail)
    notes: list[str] = []
    sampler = Sampler(sampled(tmp_path), notes.append)
    sampler.begin()
    for _ in range(3):
        time.sleep(0.05)  # several ticks of the processors
        sampler.sample()
    sampler.end(over=False)
    assert notes == ["The samples of this host lack its disks: ValueError: no such column."]
    assert "cpu" in list(read_samples(samples_path(tmp_path, "a")))[-1]


def test_this_machine(tmp_path: Path) -> None:
    """The real /proc shows a process that computes, its memory, and the bytes that it writes."""
    run = sampled(tmp_path, rank=3)
    thread = SamplingThread(run, pytest.fail)
    thread.start(first=True)
    held, end = bytearray(os.urandom(64 << 20)), time.monotonic() + 0.6
    while time.monotonic() < end:
        sum(range(1000))
    thread.close()
    start, *samples, end_line = read_samples(run.samples)
    assert end_line["end"] == {"rank": 3}
    assert 0 < start["start"]["cores"] <= (os.cpu_count() or 1)
    assert start["start"]["memory"]["total"] > len(held)
    mine = [sample["processes"]["3"] for sample in samples]
    assert len(mine) >= 3
    assert max(each["cpu"] for each in mine) > 0.2
    assert max(each["resident"] for each in mine) > len(held)
    assert all(0 <= sample["cpu"] <= 1 for sample in samples)


def test_the_next_process_samples_after_a_death(tmp_path: Path) -> None:
    """Both threads are in one process here: the lock belongs to an open file. A kill is in tests/cli."""
    first, second = (
        SamplingThread(sampled(tmp_path, rank=0), pytest.fail),
        SamplingThread(sampled(tmp_path, rank=1), print),
    )
    first.start(first=True)
    second.start(first=False)
    time.sleep(1.2)
    assert second.sampler is None
    first.close(over=False)
    time.sleep(0.3)
    second.close(over=False)
    ranks = [line["start"]["rank"] for line in read_samples(first.run.samples) if "start" in line]
    assert ranks == [0, 1]
    assert set(list(read_samples(first.run.samples))[-1]["processes"]) == {"0", "1"}


def test_no_process_continues_after_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling_thread, "HEAD_START", 0.0)
    first, second = (SamplingThread(sampled(tmp_path, rank=rank), pytest.fail) for rank in (0, 1))
    for thread in (first, second):
        thread.start(first=thread is first)
        time.sleep(0.3)
    first.close()
    time.sleep(0.3)
    assert second.sampler is None
    second.close()
    assert list(read_samples(first.run.samples))[-1]["end"] == {"rank": 0}
    resumed = SamplingThread(sampled(tmp_path, rank=0), pytest.fail)
    resumed.start(first=True)
    time.sleep(0.3)
    resumed.close()
    assert [line["start"]["rank"] for line in read_samples(first.run.samples) if "start" in line] == [0, 0]


def test_a_folder_that_cannot_be_written_is_noted(tmp_path: Path) -> None:
    (tmp_path / "timeline").write_text("a file")
    notes: list[str] = []
    thread = SamplingThread(sampled(tmp_path), notes.append)
    thread.start(first=True)
    thread.close()
    (note,) = notes
    assert note.startswith("This host is not sampled: ")


def test_a_line_that_was_cut_off_is_skipped(tmp_path: Path) -> None:
    path = samples_path(tmp_path, "a/b")
    assert path.name == "host-a_b.jsonl"
    path.parent.mkdir()
    path.write_text('{"t": 1, "cpu": 0.5}\n{"t": 2, "cp')
    file = SampleFile(path)
    file.write({"t": 3, "cpu": 0.25})
    file.close()
    assert [sample["t"] for sample in read_samples(path)] == [1, 3]
    assert [sample["t"] for sample in read_samples(path, last_bytes=12)] == []
    assert [sample["t"] for sample in read_samples(path, last_bytes=19)] == [3]


@pytest.mark.parametrize("length", [400, 800, 3000])
def test_two_weeks_stay_below_50_megabytes(length: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lines are counted and not written. Half of the time belongs to a resumed run, which appends."""
    file = SampleFile(tmp_path / "host-a.jsonl")
    size = now = 0.0
    longest = 0.0
    while now < MOST_SECONDS:
        size += length
        monkeypatch.setattr(file, "_size", size)
        monkeypatch.setattr(file, "_length", length)
        longest = file.interval(2.0)
        now += longest
    assert 20e6 < size < 50e6
    assert longest < 180
    file.close()


def test_a_process_registers_with_its_start(tmp_path: Path) -> None:
    files = KernelFiles()
    register(tmp_path / "x" / "host-a.ranks", files, 5, "GPU-9")
    stat = run_processes.read_stat(files, os.getpid())
    assert stat is not None
    entry = json.loads((tmp_path / "x" / "host-a.ranks").read_text())
    assert entry == {"rank": 5, "pid": os.getpid(), "begun": stat.begun, "device": "GPU-9"}


def test_bytes_of_tcp_connections() -> None:
    import socket

    before = read_tcp_traffic()
    assert before is not None
    with socket.create_server(("127.0.0.1", 0)) as door, socket.create_connection(door.getsockname()) as one:
        other, _ = door.accept()
        with other:
            one.sendall(b"x" * 100_000)
            received = 0
            while received < 100_000:
                received += len(other.recv(1 << 16))
            time.sleep(0.1)  # for the acknowledgement
            after = read_tcp_traffic()
            assert after is not None
            assert one.getblocking()
    assert 100_000 <= after.sent - before.sent < 101_000
    assert after.received - before.received == 100_000
