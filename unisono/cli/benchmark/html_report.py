"""The page of `unisono bench`: plots and tables in one file without scripts and without links to other files.

The template is bench.html. Plots are SVG with logarithmic axes, and check boxes hide lines by CSS.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from html import escape
from pathlib import Path
from string import Template
from typing import Any, NamedTuple

from unisono.cli.benchmark.units import bandwidth, duration, size_of

TEMPLATE = Path(__file__).with_name("bench.html")

WIDTH, HEIGHT = 720, 400
LEFT, RIGHT, TOP, BOTTOM = 74, 26, 14, 44
"""The size of a plot, and the space around its axes, in SVG units."""

DASHES = ("", "7 3", "2 3")
"""Lines differ in color and in strokes, so that a reader needs no color."""


class PlotSeries(NamedTuple):
    """The line of one collective.

    Args:
        name: the collective.
        place: its index.
        points: (bytes, value) of each size.
    """

    name: str
    place: int
    points: Sequence[tuple[int, float]]

    @property
    def look(self) -> str:
        dash = DASHES[self.place % len(DASHES)]
        return f'stroke="var(--c{self.place % 9})"' + (f' stroke-dasharray="{dash}"' if dash else "")


def page(found: Mapping[str, Any]) -> str:
    """Return the page for the result of `bench.collected`."""
    about, rows = found["about"], found["collectives"]
    names = list(dict.fromkeys(row["collective"] for row in rows))
    hosts = list(dict.fromkeys(about.get("hosts", [])))
    facts = f"{about.get('ranks', '?')} processes on {len(hosts)} host{'s' * (len(hosts) != 1)} ({', '.join(hosts)}), "
    facts += f"{about.get('device')}, {about.get('back_end')}, torch {about.get('torch')}; {about.get('time')}"
    facts += "; stopped early" if found["stopped"] else ""
    parts = [_finding(text) for text in found["findings"]]
    if rows:
        parts += [
            _legend(names),
            "<h2>Bus bandwidth</h2>",
            _plot(rows, names, "bus_bytes_per_second", bandwidth, "bytes per second over the busiest link"),
            "<h2>Time</h2>",
            _plot(rows, names, "seconds", duration, "until the last process is done"),
            "<h2>Figures</h2>",
            _figures(rows, names),
        ]
    if found["pairs"]:
        parts += ["<h2>Pairs</h2>", _pairs(found["pairs"], about["ranks"])]
    hidden = "".join(f"body:has(#show-{i}:not(:checked)) .s{i} {{ display: none; }}\n" for i in range(len(names)))
    return Template(TEMPLATE.read_text(encoding="utf-8")).substitute(
        ranks=about.get("ranks", "?"), hidden=hidden, facts=escape(facts), body="\n".join(parts)
    )


def _finding(text: str) -> str:
    first, *rest = text.splitlines()
    return f'<div class="finding"><b>{escape(first)}</b><br>' + "<br>".join(map(escape, rest)) + "</div>"


def _legend(names: Sequence[str]) -> str:
    boxes = []
    for i, name in enumerate(names):
        look = PlotSeries(name, i, []).look
        stroke = f'<svg viewBox="0 0 26 10" aria-hidden="true"><path class="line" {look} d="M0 5H26"/></svg>'
        boxes.append(f'<label><input type="checkbox" id="show-{i}" checked>{stroke}{escape(name)}</label>')
    return f'<div class="legend">{"".join(boxes)}</div>'


# -- plots


def _plot(
    rows: Sequence[Mapping[str, Any]], names: Sequence[str], key: str, words: Callable[[float], str], what: str
) -> str:
    """Return a plot of one value over the size of the tensor, with a line for each collective."""
    series = [
        PlotSeries(name, i, [(row["bytes"], row[key]) for row in rows if row["collective"] == name])
        for i, name in enumerate(names)
    ]
    sizes = sorted({row["bytes"] for row in rows})
    values = [row[key] for row in rows]
    low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
    high = max(high, low + 1)

    def x(size: int) -> float:
        span = math.log(sizes[-1] / sizes[0]) or 1.0
        return LEFT + (WIDTH - LEFT - RIGHT) * math.log(size / sizes[0]) / span

    def y(value: float) -> float:
        return TOP + (HEIGHT - TOP - BOTTOM) * (high - math.log10(value)) / (high - low)

    drawn = []
    for exponent in range(low, high + 1):
        at = y(10.0**exponent)
        drawn.append(f'<path class="rule" d="M{LEFT} {at:.1f}H{WIDTH - RIGHT}"/>')
        label = escape(words(10.0**exponent))
        drawn.append(f'<text x="{LEFT - 8}" y="{at + 4:.1f}" text-anchor="end">{label}</text>')
    for size in sizes[:: -(-len(sizes) // 12)]:
        drawn.append(f'<text x="{x(size):.1f}" y="{HEIGHT - 22}" text-anchor="middle">{size_of(size)}</text>')
    drawn.append(
        f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 4}" text-anchor="middle">size of the tensor</text>'
    )
    for one in series:
        path = "L".join(f"{x(size):.1f} {y(value):.1f}" for size, value in one.points)
        dots = "".join(
            f'<circle class="dot" fill="var(--c{one.place % 9})" cx="{x(size):.1f}" cy="{y(value):.1f}" r="4">'
            f"<title>{escape(one.name)}, {size_of(size)}: {escape(words(value))}</title></circle>"
            for size, value in one.points
        )
        drawn.append(f'<g class="series s{one.place}"><path class="line" {one.look} d="M{path}"/>{dots}</g>')
    label = escape(f"{what}, by the size of the tensor, for {', '.join(names)}")
    svg = f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{label}">{"".join(drawn)}</svg>'
    return f"<figure>{svg}<figcaption>{escape(what)}</figcaption></figure>"


# -- tables


def _figures(rows: Sequence[Mapping[str, Any]], names: Sequence[str]) -> str:
    sizes = sorted({row["bytes"] for row in rows})
    found = {(row["collective"], row["bytes"]): row for row in rows}
    head = "".join(f"<th>{size_of(size)}</th>" for size in sizes)
    body = []
    for name in names:
        cells = []
        for size in sizes:
            row = found.get((name, size))
            if row is None:
                cells.append("<td></td>")
                continue
            bus = row["bus_bytes_per_second"] / 1e6
            title = f"algorithm bandwidth {bandwidth(row['algorithm_bytes_per_second'])}; median of {row['times']}"
            text = (
                f"{duration(row['seconds'])}<br>{bus:.0f}" if bus >= 10 else f"{duration(row['seconds'])}<br>{bus:.2g}"
            )
            cells.append(f'<td title="{escape(title)}">{text}</td>')
        body.append(f"<tr><th>{escape(name)}</th>{''.join(cells)}</tr>")
    return _table("Time, and bus bandwidth in MB/s below it", head, body)


def _pairs(pairs: Sequence[Mapping[str, Any]], ranks: int) -> str:
    """Return the table of latency and bandwidth of each pair."""
    found = {tuple(pair["ranks"]): pair for pair in pairs}
    head = "".join(f"<th>{rank}</th>" for rank in range(1, ranks))
    body = []
    for one in range(ranks - 1):
        cells = []
        for other in range(1, ranks):
            pair = found.get((one, other))
            if pair is None:
                cells.append("<td></td>")
                continue
            text = f"{duration(pair['latency_seconds'])}<br>{bandwidth(pair['bytes_per_second'])}"
            cells.append(f"<td>{text}</td>")
        body.append(f"<tr><th>{one}</th>{''.join(cells)}</tr>")
    return _table(
        "Latency of a small message, and bandwidth of a large one (4 MB), between two ranks: lower quartiles",
        head,
        body,
    )


def _table(caption: str, head: str, body: Sequence[str]) -> str:
    return (
        f'<div class="scroll"><table><caption>{escape(caption)}</caption><thead><tr><th></th>{head}</tr></thead>'
        f"<tbody>{''.join(body)}</tbody></table></div>"
    )
