"""The page of `unisono bench`: plots, tables and what the words mean, in one file that asks nobody for anything.

No script runs in it: the plots are SVG, the boxes that hide a line are CSS, and dark or light is what the reader's
system says. Both axes are logarithmic.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from html import escape
from typing import Any, NamedTuple

from unisono.cli.benchmark.units import bandwidth, duration, size_of

WIDTH, HEIGHT = 720, 400
LEFT, RIGHT, TOP, BOTTOM = 74, 26, 14, 44
"""Of a plot: its size, and the room around its axes, in units of the SVG."""

DASHES = ("", "7 3", "2 3")
"""Lines are told apart by colour, and where colours are hard to tell by their strokes too."""

STYLE = """
:root { color-scheme: light dark; --paper: #fdfcf9; --ink: #22242a; --soft: #6a6e78; --rule: #dddad2; --warm: #b3261e;
  --c0: #1f6f8b; --c1: #c4511d; --c2: #2f7d3b; --c3: #8a3ea8; --c4: #a8791c; --c5: #b02a5b; --c6: #3f51b5;
  --c7: #5d6d3a; --c8: #6b4f3a; }
@media (prefers-color-scheme: dark) { :root { --paper: #17181c; --ink: #e6e4df; --soft: #9a9da6; --rule: #34363d;
  --warm: #ff8a80; --c0: #6cc4e0; --c1: #ff9a66; --c2: #7ed491; --c3: #d39af0; --c4: #e6c15a; --c5: #ff86ae;
  --c6: #9fa8ff; --c7: #bccf8a; --c8: #d0ae94; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 60rem; padding: 2rem 1.25rem 4rem; background: var(--paper); color: var(--ink);
  font: 16px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.6rem; margin: 0 0 .25rem; } h2 { font-size: 1.15rem; margin: 2.2rem 0 .5rem; }
p { max-width: 46rem; } .soft, caption, figcaption { color: var(--soft); }
.finding { border-left: 3px solid var(--warm); padding: .1rem 0 .1rem .9rem; margin: .8rem 0; }
.finding b { color: var(--warm); }
figure { margin: 0; overflow-x: auto; } svg { width: 100%; min-width: 34rem; height: auto; display: block; }
svg text { fill: var(--soft); font-size: 12px; } .rule { stroke: var(--rule); stroke-width: 1; }
.line { fill: none; stroke-width: 2; stroke-linejoin: round; } .dot { stroke: var(--paper); stroke-width: 1.5; }
svg:has(g:hover) g.series:not(:hover) { opacity: .25; }
.legend { display: flex; flex-wrap: wrap; gap: .3rem 1.1rem; margin: .6rem 0 1rem; }
.legend label { display: inline-flex; align-items: center; gap: .4rem; cursor: pointer; }
.legend svg { width: 26px; min-width: 26px; height: 10px; }
.scroll { overflow-x: auto; } table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .9rem; }
caption { text-align: left; padding-bottom: .4rem; white-space: nowrap; }
th, td { padding: .25rem .7rem; text-align: right; }
th:first-child { text-align: left; } thead th, tbody tr + tr > * { border-top: 1px solid var(--rule); }
th { font-weight: 600; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .3rem 1rem; }
dt { font-weight: 600; } dd { margin: 0; }
"""


class PlotSeries(NamedTuple):
    """A collective: its place among them, and (bytes, value) of each size."""

    name: str
    place: int
    points: Sequence[tuple[int, float]]

    @property
    def look(self) -> str:
        dash = DASHES[self.place % len(DASHES)]
        return f'stroke="var(--c{self.place % 9})"' + (f' stroke-dasharray="{dash}"' if dash else "")


def page(found: Mapping[str, Any]) -> str:
    """The page of what `bench.collected` says."""
    about, rows = found["about"], found["collectives"]
    names = list(dict.fromkeys(row["collective"] for row in rows))
    hide = "".join(f"body:has(#show-{i}:not(:checked)) .s{i} {{ display: none; }}\n" for i in range(len(names)))
    hosts = list(dict.fromkeys(about.get("hosts", [])))
    facts = f"{about.get('ranks', '?')} processes on {len(hosts)} host{'s' * (len(hosts) != 1)} ({', '.join(hosts)}), "
    facts += f"{about.get('device')}, {about.get('back_end')}, torch {about.get('torch')}; {about.get('time')}"
    facts += "; stopped before its end" if found["stopped"] else ""
    parts = [
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">',
        f"<title>unisono bench: {about.get('ranks', '?')} processes</title><style>{STYLE}{hide}</style></head><body>",
        f'<h1>How fast they talk to each other</h1><p class="soft">{escape(facts)}</p>',
        *(_finding(text) for text in found["findings"]),
    ]
    if rows:
        parts += [
            _legend(names),
            "<h2>Bus bandwidth</h2>",
            _plot(rows, names, "bus_bytes_per_second", bandwidth, "bytes a second over the busiest link"),
            "<h2>Time</h2>",
            _plot(rows, names, "seconds", duration, "until the last process is done"),
            "<h2>Figures</h2>",
            _figures(rows, names),
        ]
    if found["pairs"]:
        parts += ["<h2>Pairs</h2>", _pairs(found["pairs"], about["ranks"])]
    return "\n".join([*parts, WORDS, "</body></html>\n"])


WORDS = """<h2>What the words mean</h2><dl>
<dt>time</dt><dd>The median of several calls. Before each all processes meet, and it lasts until the last of them is
done.</dd>
<dt>algorithm bandwidth</dt><dd>The bytes that a collective is about (of a gather: of all processes together), over its
time.</dd>
<dt>bus bandwidth</dt><dd>The bytes that the busiest link must carry, over the time, so that numbers of processes can be
compared with each other and with the hardware, as nccl-tests define it: 2 (n - 1) / n times the algorithm bandwidth
for sums on all processes, (n - 1) / n for all_gather, reduce_scatter and all_to_all, once for broadcast and
send_receive.</dd>
<dt>tree</dt><dd>The exchange of a run, from the end of backward: it also divides by the weight, and looks for what is
not finite. On one host it reads its neighbours' memory; tree_messages sends, as between hosts.</dd></dl>"""


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
    """Lines over the size of the tensor."""
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
    label = escape(f"{what}, by the size of the tensor, a line for each of {', '.join(names)}")
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
            told = (
                f"{duration(row['seconds'])}<br>{bus:.0f}" if bus >= 10 else f"{duration(row['seconds'])}<br>{bus:.2g}"
            )
            cells.append(f'<td title="{escape(title)}">{told}</td>')
        body.append(f"<tr><th>{escape(name)}</th>{''.join(cells)}</tr>")
    return _table("Time, and below it bus bandwidth in MB/s", head, body)


def _pairs(pairs: Sequence[Mapping[str, Any]], ranks: int) -> str:
    """Each pair's latency and bandwidth."""
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
            told = f"{duration(pair['latency_seconds'])}<br>{bandwidth(pair['bytes_per_second'])}"
            cells.append(f"<td>{told}</td>")
        body.append(f"<tr><th>{one}</th>{''.join(cells)}</tr>")
    return _table(
        "A small message's way between two ranks, and the bandwidth of a large one (4 MB): lower quartiles of the time",
        head,
        body,
    )


def _table(caption: str, head: str, body: Sequence[str]) -> str:
    return (
        f'<div class="scroll"><table><caption>{escape(caption)}</caption><thead><tr><th></th>{head}</tr></thead>'
        f"<tbody>{''.join(body)}</tbody></table></div>"
    )
