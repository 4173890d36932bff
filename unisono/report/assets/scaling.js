"use strict";

/* The page of scaling curves: speed-up and efficiency by the number of processes, and the parts that cost efficiency. */
const SHARE = (part) => `${Math.round(100 * part) || 0}%`; // no "-0%"

class ScalingPage extends RunPage {
  show({ name, curves, parts, findings, line }) {
    const counts = [...new Set(curves.flatMap(({ points }) => points.map((point) => point.processes)))].sort((a, b) => a - b);
    const first = counts[0], colors = ["--c0", "--c1"];
    const values = ({ points }, key) => counts.map((count) => points.find((point) => point.processes === count)?.[key] ?? null);
    view.words = { name: "processes", least: 1, increments: [1, 2, 4, 8, 16, 32, 64], place: (x) => `${x} processes`, tick: (x) => String(x) };
    view.scale = { steps: counts, time: [0, 1] };
    view.marks = [];
    const drawn = (key) => curves.map((curve, i) => ({ name: curve.kind, color: colors[i], values: values(curve, key) }));
    const ideal = { name: "ideal", color: "--c2", values: counts.map((count) => count / first) };
    return [
      this.head.show([name, findings, line], () => [
        el("h1", {}, `Scaling of ${name}`),
        el("p", { class: "command" }, el("code", {}, line)),
        ...findings.map((text) => el("p", { class: "note" }, text)),
      ]),
      this.section("Speed-up", Chart.of({ id: "speedup", title: "Samples per second, relative to the smallest number", unit: "number", steps: counts, curves: [...drawn("speed_up"), ideal], height: 360 })),
      this.section("Efficiency", Chart.of({ id: "efficiency", title: "Part of the ideal speed-up", unit: "number", steps: counts, curves: drawn("efficiency"), height: 300 })),
      ...curves.map(({ kind, title, points }) => this.section(title, el("table", {},
        el("thead", {}, el("tr", {}, ["processes", "ms a step", "samples/s", "speed-up", "efficiency", ...Object.keys(parts)].map((text) => el("th", { title: parts[text] ?? "" }, text)))),
        el("tbody", {}, points.map((point) => el("tr", {}, [
          point.processes, format.number(1000 * point.seconds), format.number(point.samples_per_second),
          point.speed_up.toFixed(2), SHARE(point.efficiency), ...Object.keys(parts).map((part) => SHARE(point.lost[part])),
        ].map((text) => el("td", {}, String(text))))))))),
    ];
  }
}
