"""Ask every rule, and order what was found by its expected gain."""

from __future__ import annotations

from collections.abc import Callable

from unisono.report.findings import balance_rules, data_rules, exchange_rules, loop_rules, machine_rules
from unisono.report.findings.evidence import Evidence, Finding
from unisono.report.run_files import RunFiles

RULES: tuple[Callable[[Evidence], Finding | None], ...] = (
    machine_rules.memory,
    machine_rules.swapping,
    data_rules.data_bound,
    balance_rules.straggler,
    balance_rules.uneven,
    balance_rules.micro_batches,
    balance_rules.bubbles,
    exchange_rules.exchange_bound,
    exchange_rules.gathers,
    loop_rules.checkpoints,
    loop_rules.evaluations,
    loop_rules.garbage,
    loop_rules.script,
    machine_rules.threads,
    machine_rules.shared_cores,
    machine_rules.quota,
    machine_rules.heat,
    machine_rules.copies,
    machine_rules.launch_bound,
)


def find_all(files: RunFiles) -> list[Finding]:
    """Return what slows a run down, or will end it: first dangers without a gain, then by gain."""
    evidence = Evidence(files)
    if not evidence.ranks:
        return []
    found = [finding for rule in RULES if (finding := rule(evidence)) is not None]
    return sorted(found, key=lambda finding: -1.0 if finding.gain is None else -finding.gain)
