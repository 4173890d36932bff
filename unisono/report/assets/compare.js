"use strict";

/* The page of several runs: a table, their curves in one chart each, time by phase, and what differs. */
class ComparePage extends RunPage {
  constructor() {
    super();
    this.table = new Place();
    this.spent = new Place();
    this.differences = new Place();
  }

  show({ runs, differences, fingerprints }) {
    const ends = runs.map((run) => run.steps?.at(-1) ?? 0), first = Math.min(...runs.map((run) => run.steps?.[0] ?? 0));
    view.scale = { steps: [first, Math.max(...ends, first + 1)], time: [0, 1] };
    const names = [...new Set(runs.flatMap((run) => Object.keys(run.values || {})))];
    const overlay = (id, title, unit, values, more = {}) => {
      const known = runs.filter((run) => run.steps && values(run));
      if (!known.length) return null;
      const steps = [...new Set(known.flatMap((run) => run.steps))].sort((a, b) => a - b);
      const places = new Map(steps.map((step, i) => [step, i]));
      return Chart.of({ id, title, unit, steps, isOverlay: true, ...more, curves: known.map((run) => {
        const column = Array(steps.length).fill(null), own = values(run);
        run.steps.forEach((step, i) => { column[places.get(step)] = own[i]; });
        return { name: run.name, color: this.color(runs, run), dash: this.dash(runs, run), values: column };
      }) });
    };
    return [
      this.head.show([runs.map((run) => [run.name, run.state, run.result, run.total, run.steps?.at(-1)]), fingerprints], () => this.overview(runs, fingerprints)),
      names.length > 0 && this.section("Learning", this.grid("values", names.map((name, i) =>
        overlay(`value-${i}-${name}`, valueName(name), "number", (run) => run.values[name]?.last, { log: true })), "two")),
      this.section("Time", this.spent.show(runs.map((run) => [run.name, run.seconds, run.rank_steps]), () => this.bars(runs)),
        this.grid("time", [
          overlay("step-time", "Time of a step", "seconds", (run) => run.steps.map((_, i) => sum(Object.values(run.phases).map((phase) => phase[i]))), { zero: true, note: "Mean of all ranks." }),
          overlay("rate", "Throughput in samples", "per second", (run) => run.rate.samples, { zero: true }),
        ], "two")),
      this.section("Differences", this.differences.show([runs.map((run) => run.name), differences], () => this.differing(runs, differences))),
    ].filter(Boolean);
  }

  color(runs, run) { return CURVES[runs.indexOf(run) % CURVES.length]; }

  dash(runs, run) { return Math.floor(runs.indexOf(run) / CURVES.length) % DASHES.length; }

  key(runs, run) { return el("i", { class: `swatch dash${this.dash(runs, run)}`, style: { "--color": `var(${this.color(runs, run)})` } }); }

  overview(runs, fingerprints) {
    const same = runs.every((run) => run.result.weights_sha256) && fingerprints === 1;
    return [
      el("h1", {}, `${plural(runs.length, "run")} compared`),
      el("p", { class: "command soft" }, same ? "All have the same fingerprint: equal weights, to the last bit." : fingerprints > 1 ? `They have ${fingerprints} different fingerprints.` : ""),
      table(["run", "state", "steps", "loss", "time", "samples/s", "ranks", "promise", "fingerprint"], runs.map((run) => el("tr", {},
        el("th", { scope: "row", class: "text" }, this.key(runs, run), run.name), el("td", { class: "text" }, run.state),
        el("td", {}, format.count(run.result.steps ?? (run.steps ? run.steps.at(-1) + 1 : 0))), el("td", {}, format.number(run.result.loss ?? run.values?.loss?.last.at(-1))),
        el("td", {}, format.duration(run.result.seconds ?? run.time?.at(-1))), el("td", {}, run.result.samples_per_second ? format.rate(run.result.samples_per_second) : UNKNOWN),
        el("td", {}, format.count(run.result.ranks)), el("td", {}, shownValue(run.result.promise)), el("td", {}, el("code", {}, run.result.weights_sha256?.slice(0, 12) ?? UNKNOWN))))),
    ];
  }

  bars(runs) {
    const means = runs.map((run) => Object.fromEntries(Object.entries(run.seconds).map(([phase, s]) => [phase, s / (run.rank_steps || 1)])));
    const longest = Math.max(...means.map((mean) => sum(Object.values(mean))));
    const phases = PHASES.filter((phase) => means.some((mean) => mean[phase]));
    return table(["run", "", ...phases, "step"], runs.map((run, i) => el("tr", {}, el("th", { scope: "row", class: "text" }, this.key(runs, run), run.name),
      el("td", { class: "wide" }, stackedBar(means[i], longest)), phases.map((phase) => el("td", {}, means[i][phase] ? format.seconds(means[i][phase]) : UNKNOWN)),
      el("td", {}, el("b", {}, format.seconds(sum(Object.values(means[i]))))))), { caption: "Mean time of a step in each phase, over all ranks" });
  }

  differing(runs, differences) {
    const parts = Object.entries(differences).filter(([, rows]) => rows.length);
    if (!parts.length) return el("p", { class: "note" }, "Settings, environments and results are the same.");
    return parts.map(([part, rows]) => table([part, ...runs.map((run) => el("span", {}, this.key(runs, run), run.name))], rows.map(([name, values]) => el("tr", {},
      el("th", { scope: "row" }, name), values.map((value) => el("td", { class: "text" }, shownValue(value)))))));
  }
}
