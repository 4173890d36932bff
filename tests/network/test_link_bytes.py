"""Bytes of gradients that cross the link of a host do not depend on the number of its processes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.network.hosts import hosts, missing
from tests.network.test_hosts import with_code

pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(missing()), reason=missing())]

WIDTH, DEPTH, WARM, STEPS = 1024, 16, 3, 13
GRADIENT = 4 * DEPTH * (WIDTH * WIDTH + WIDTH)
"""Bytes of a gradient: 67 MB, in four buckets."""

TRAIN = f"""
import json, os, socket
from pathlib import Path
import torch, unisono

def sent():
    lines = Path("/proc/self/net/dev").read_text().splitlines()[2:]
    counts = {{name.strip(): int(numbers.split()[8]) for name, _, numbers in (line.partition(":") for line in lines)}}
    return sum(count for name, count in counts.items() if name != "lo")

def main(run):
    model = run.place(lambda: torch.nn.Sequential(*[torch.nn.Linear({WIDTH}, {WIDTH}) for _ in range({DEPTH})]))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    run.track(model=model, optimizer=optimizer)
    x = torch.randn(64, {WIDTH}, generator=torch.Generator().manual_seed(1))
    for step in run.steps(torch.utils.data.TensorDataset(x, x.roll(1, 1))):
        if step.number == {WARM}:
            began = sent()
        for inputs, targets in step:
            step.backward((model(inputs) - targets).square().mean(1).sum(), weight=len(inputs))
        step.update(optimizer)
    counts = {{"host": socket.gethostname(), "bytes": (sent() - began) / ({STEPS} - {WARM})}}
    Path(f"sent-{{run.size}}-{{run.rank}}.json").write_text(json.dumps(counts))

unisono.main(main, unisono.Settings)
"""


def bytes_sent(tmp_path: Path, count: int, processes: int, slow_bits: float = 0.0) -> dict[str, float]:
    """Train on hosts, and check the weights. Return the bytes that each host has sent in a step.

    Args:
        tmp_path: The folder of the runs.
        count: Hosts.
        processes: Processes on each.
        slow_bits: The rate of the last host's link; the others have ten times as much. 0: no link has a limit.
    """
    (tmp_path / "train.py").write_text(TRAIN)
    settings = [f"steps={STEPS}", "batch=16", "virtual_ranks=8", "threads=1"]
    words = ["train.py", *[word for value in settings for word in ("--set", value)], "--run-dir"]
    options: dict[str, Any] = {"cwd": tmp_path, "env": with_code(), "stderr": subprocess.PIPE}
    rendezvous = ["--nnodes", str(count), "--rdzv-backend", "c10d", "--rdzv-endpoint", "a:29500", "--rdzv-id", "test"]
    launcher = [sys.executable, "-m", "torch.distributed.run", *rendezvous, "--nproc-per-node", str(processes)]
    with hosts(count, shared=[tmp_path], bits_per_second=10 * slow_bits) as every:
        if slow_bits:
            every[-1].link(bits_per_second=slow_bits)
        running = [host.start([*launcher, *words, "several"], **options) for host in every]
        errors = [process.communicate(timeout=400)[1] for process in running]
        assert [process.returncode for process in running] == [0] * count, errors
    subprocess.run([sys.executable, *words, "one"], check=True, timeout=300, **options)
    one, several = (json.loads((tmp_path / name / "result.json").read_text()) for name in ("one", "several"))
    assert several["weights_sha256"] == one["weights_sha256"]
    files = [json.loads(path.read_text()) for path in tmp_path.glob(f"sent-{count * processes}-*.json")]
    sent = {each["host"]: each["bytes"] for each in files}
    assert len(sent) == count
    return sent


@pytest.mark.parametrize(("count", "processes"), [(2, 1), (2, 4), (4, 2)])
def test_a_host_sends_what_one_process_would_send(tmp_path: Path, count: int, processes: int) -> None:
    sent = bytes_sent(tmp_path, count, processes)
    bound = 2 * GRADIENT * (count - 1) / count
    mean = sum(sent.values()) / count
    print(f"\n{count} x {processes}: {mean / 1e6:.1f} MB a host and step, {mean / bound:.3f} of the bound")
    assert 0.98 * bound <= mean <= 1.05 * bound


@pytest.mark.timeout(600)
def test_a_slow_link_carries_one_gradient_in_place_of_one_and_a_half(tmp_path: Path) -> None:
    """The host sends its partial sums only, and owns no part of the gradient."""
    sent = bytes_sent(tmp_path, 4, 1, slow_bits=2e8)
    print("\nthe link of d at 0.1:", {name: round(count / GRADIENT, 3) for name, count in sent.items()}, "gradients")
    assert 0.98 * GRADIENT <= sent["d"] <= 1.05 * GRADIENT
    assert all(1.6 * GRADIENT <= count <= 1.75 * GRADIENT for name, count in sent.items() if name != "d")
