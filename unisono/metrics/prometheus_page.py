"""The metrics page of a run, in the format of Prometheus: https://prometheus.io/docs/instrumenting/exposition_formats/.

docs/guide/monitoring/metrics.md lists the names. grafana.json in this folder is a dashboard that shows them.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterable, Mapping

import psutil  # type: ignore[import-untyped]
from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.registry import Collector

from unisono.metrics.run_numbers import RankProcess, RunNumbers

GAUGES = {
    "unisono_step": ("step", "Steps that the run has done."),
    "unisono_step_timestamp_seconds": ("time", "When the last step ended, in seconds since 1970."),
    "unisono_loss": ("loss", "Loss of the last step."),
    "unisono_learning_rate": ("lr", "Learning rate of the first parameter group."),
    "unisono_gradient_norm": ("grad_norm", "Norm of the gradient before clipping, if the run computes it."),
    "unisono_checkpoint_step": ("checkpoint", "Steps that were done when the newest checkpoint was written."),
}
"""Metrics that are one number of the run: its name in RunNumbers.run, and the help text."""

COUNTERS = {
    "unisono_samples_total": ("samples", "Samples that the run has computed."),
    "unisono_deaths_total": ("deaths", "Processes that died while the run continued."),
}
"""The same for counters."""


class RunCollector(Collector):
    """Builds the page from the numbers, each time that it is read.

    Args:
        numbers: The numbers of the run.
        facts: Labels of unisono_info.
        lock: Held while the numbers change.
    """

    def __init__(self, numbers: RunNumbers, facts: Mapping[str, str], lock: threading.Lock) -> None:
        self._numbers, self._facts, self._lock = numbers, facts, lock

    def collect(self) -> Iterable[Metric]:
        """Return the metrics. One without a value is left out."""
        with self._lock:
            return [metric for metric in self._metrics() if metric.samples]

    def _metrics(self) -> Iterable[Metric]:
        numbers = self._numbers
        promise = {"promise": numbers.promise} if numbers.promise else {}
        yield InfoMetricFamily("unisono", "Facts of the run.", value={**self._facts, **promise})
        for name, (key, help_text) in GAUGES.items():
            yield GaugeMetricFamily(name, help_text, value=numbers.run.get(key))
        for name, (key, help_text) in COUNTERS.items():
            yield CounterMetricFamily(name, help_text, value=numbers.run.get(key))
        speed = numbers.speed.per_second
        yield GaugeMetricFamily("unisono_samples_per_second", "Speed in the last 30 seconds of training.", value=speed)
        logged = GaugeMetricFamily("unisono_logged", "Last values of run.log, by name.", labels=["name"])
        for name, value in numbers.logged.items():
            logged.add_metric([name], value)
        yield logged
        spent = "Seconds that a rank has spent in a phase of training."
        phases = CounterMetricFamily("unisono_phase_seconds_total", spent, labels=["rank", "phase"])
        for (rank, phase), seconds in numbers.phases.items():
            phases.add_metric([str(rank), phase], seconds)
        yield phases
        waited = "Seconds that a rank has waited for messages of other ranks."
        waits = CounterMetricFamily("unisono_wait_seconds_total", waited, labels=["rank"])
        for rank, seconds in numbers.waits.items():
            waits.add_metric([str(rank)], seconds)
        yield waits
        held = "Resident memory of a rank's process."
        resident = GaugeMetricFamily("unisono_resident_bytes", held, labels=["rank"])
        for rank, process in numbers.processes.items():
            here = process.host == socket.gethostname()
            count = resident_bytes(process) if here else numbers.sampled.get(rank)
            if count is not None:
                resident.add_metric([str(rank)], count)
        yield resident


def resident_bytes(process: RankProcess) -> int | None:
    """Return the resident memory of a process of this host; None if it has ended."""
    try:
        found = psutil.Process(process.pid)
        if found.create_time() > process.began + 1:  # another process got the id of one that has ended
            return None
        count: int = found.memory_info().rss
    except psutil.Error:
        return None
    return count


def build_registry(numbers: RunNumbers, facts: Mapping[str, str], lock: threading.Lock) -> CollectorRegistry:
    """Return a registry of the run's own, without the metrics of this Python process."""
    registry = CollectorRegistry()
    registry.register(RunCollector(numbers, facts, lock))
    return registry
