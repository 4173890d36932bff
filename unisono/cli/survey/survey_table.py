"""A survey as tables: the hosts, and the links between them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from unisono.cli.benchmark.units import bandwidth, duration
from unisono.cli.survey.host_survey import Survey, SurveyedHost
from unisono.cli.survey.host_troubles import Trouble

COLUMNS = ("host", "python", "torch", "unisono", "cores", "memory", "disk", "clock", "reached at")


def lines_of(survey: Survey, troubles: Sequence[Trouble]) -> Iterator[str]:
    """Yield the lines of a survey: what is wrong, then the tables."""
    for trouble in troubles:
        yield str(trouble.problem)
        yield ""
    yield from _columns([COLUMNS, *(_cells(host) for host in survey.hosts)])
    if survey.links:
        yield ""
        yield "from each host to the others: latency, bandwidth"
        names = [host.name for host in survey.hosts]
        found = {(link.source, link.target): link for link in survey.links}
        rows: list[Sequence[str]] = [["", *names]]
        for source, name in enumerate(names):
            cells = [name]
            for target in range(len(names)):
                link = found.get((source, target))
                fits = link is not None and not link.error
                cells.append(
                    f"{duration(link.latency_seconds)}, {bandwidth(link.bytes_per_second)}"
                    if link is not None and fits
                    else "-"
                    if link is None
                    else "no link"
                )
            rows.append(cells)
        yield from _columns(rows)


def as_json(survey: Survey, troubles: Sequence[Trouble]) -> dict[str, Any]:
    """Return a survey as JSON can hold it."""
    return {
        "troubles": [{"level": each.level, **each.problem._asdict()} for each in troubles],
        "hosts": [
            {
                "name": host.name,
                "reachable": not host.unreachable,
                "facts": dict(host.facts),
                "address": host.address,
                "interface": host.interface,
                "clock": host.clock._asdict() if host.clock else None,
            }
            for host in survey.hosts
        ],
        "links": [
            {**link._asdict(), "source": survey.hosts[link.source].name, "target": survey.hosts[link.target].name}
            for link in survey.links
        ],
    }


def _cells(host: SurveyedHost) -> list[str]:
    facts = host.facts
    if not facts:
        return [host.name, *["-"] * 7, "not reached"]
    clock = "-"
    if host.clock is not None:
        sign = "+" if host.clock.offset_seconds >= 0 else "-"
        clock = f"{sign}{duration(abs(host.clock.offset_seconds))} ±{duration(host.clock.error_seconds)}"
    disk = facts["free_bytes"]
    return [
        host.name,
        facts["python"],
        facts["torch"],
        facts["unisono"].replace(", sources", ""),
        str(facts["cores"]),
        f"{facts['memory'] / 2**30:.1f} GB",
        f"{disk / 2**30:.1f} GB" if disk is not None else "-",
        clock,
        f"{host.address} ({host.interface})" if host.address else "-",
    ]


def _columns(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Yield rows as lines, with aligned columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  ".join(f"{cell:{width}}" for cell, width in zip(row, widths, strict=True)).rstrip()
