"use strict";

/* The page of one run. */

const VALUE_NAMES = { loss: "Loss", lr: "Learning rate", grad_norm: "Gradient norm" };
const valueName = (name) => VALUE_NAMES[name] || name.replace(/^log\./, "");

/* Times that never fall: a clock may have been set back. */
function growing(times) {
  let latest = 0;
  return times.map((t) => (latest = Math.max(t ?? 0, latest)));
}

/* Whether some of a curve's band is wide enough to be seen, on a linear or a logarithmic axis. */
function hasBand({ low, high }) {
  if (!low) return false;
  const known = low.map((_, i) => i).filter((i) => low[i] != null && high[i] != null);
  const whole = Math.max(...known.map((i) => high[i])) - Math.min(...known.map((i) => low[i]));
  return known.some((i) => high[i] - low[i] > 0.03 * whole || (low[i] > 0 && high[i] > 1.5 * low[i]));
}

/* The median of the values that are known. */
function middle(values) {
  const known = values.filter((v) => v != null).sort((a, b) => a - b);
  return known.length ? known[known.length >> 1] : null;
}

class RunPage {
  constructor() {
    this.head = new Place("header", { class: "head" });
    this.findings = new Place("div", { class: "findings" });
    this.events = new Place();
    this.marks = new Place();
    this.spent = new Place();
    this.assignments = new Place();
    this.settings = new Place();
    this.environment = new Place();
    this.result = new Place();
    this.logs = new Place();
    this.ranks = new RankTable((rank) => this.map.show(this.run.map, this.run.steps, rank));
    this.map = new RankMap((rank) => this.ranks.choose(rank));
    this.sections = new Map();
  }

  /* Return the elements of the page with this data. */
  show(run) {
    this.run = run;
    const hasSteps = Boolean(run.steps?.length);
    if (hasSteps) view.scale = { steps: run.steps, time: growing(run.time) };
    view.marks = run.events.map((event) => ({
      steps: event.step, time: event.t && run.began ? event.t - run.began : null, kind: event.kind, text: eventText(event),
    }));
    return [
      this.head.show([run.name, run.state, run.result, run.total, run.steps?.at(-1), run.time?.at(-1), run.environment, run.flops], () => this.header(run)),
      run.findings?.length && this.section("Findings", this.findings.show(run.findings, findingCards)),
      ...(hasSteps ? this.curves(run) : [el("p", { class: "empty" }, "This run has no finished step yet.")]),
      run.events.length > 0 && this.section("Events", this.events.show([run.events, run.began], () => eventTable(run.events, run.began))),
      run.settings.length > 0 && this.section("Settings", this.settings.show(run.settings, settingsPart)),
      Object.keys(run.environment).length > 0 && this.section("Environment", this.environment.show(run.environment, (all) => pairs(Object.entries(all)))),
      Object.keys(run.result).length > 0 && this.section("Result", this.result.show(run.result, (all) => pairs(Object.entries(all)))),
      Object.keys(run.logs).length > 0 && this.section("Logs", this.logs.show(run.logs, logPart)),
    ].filter(Boolean);
  }

  section(title, ...children) {
    const id = title.toLowerCase().replace(/\W+/g, "-");
    if (!this.sections.has(id)) {
      const content = el("div", { class: "content" });
      this.sections.set(id, { element: el("section", { id, "aria-labelledby": `${id}-title` }, el("h2", { id: `${id}-title` }, title), content), content });
    }
    const { element, content } = this.sections.get(id);
    setChildren(content, children.flat());
    return element;
  }

  grid(id, charts, look = "") {
    const key = `grid ${id}`;
    if (!this.sections.has(key)) this.sections.set(key, { element: el("div", { class: `grid ${look}` }) });
    const { element } = this.sections.get(key);
    setChildren(element, charts);
    return element;
  }

  header(run) {
    const { result, environment } = run, done = result.steps ?? (run.steps?.length ? run.steps.at(-1) + 1 : 0);
    const seconds = result.seconds ?? run.time?.at(-1), rate = result.samples_per_second ?? run.rate?.samples?.findLast((v) => v != null);
    const facts = [
      ["steps", run.total && run.total !== done ? `${format.count(done)} of ${format.count(run.total)}` : format.count(done)],
      ["loss", format.number(result.loss ?? run.values?.loss?.last.findLast((v) => v != null))],
      [result.resumed_at ? `since step ${format.count(result.resumed_at)}` : "duration", format.duration(seconds)],
      ["samples/s", rate == null ? UNKNOWN : format.rate(rate)],
      ["ranks", result.ranks ? `${result.ranks}${result.virtual_ranks ? ` (${result.virtual_ranks} virtual)` : ""}` : format.count(run.table?.length)],
      run.rate?.utilization && ["FLOPs used", format.share(middle(run.rate.utilization)), `of ${format.rate(run.flops.peak)} FLOP/s, the product of two matrices (${run.flops.dtype}) on ${run.flops.peak_of}`],
      result.energy?.joules != null && ["energy", format.joules(result.energy.joules)],
      ["promise", result.promise],
      ["survival", result.survival],
      result.deaths?.length > 0 && ["deaths", String(result.deaths.length)],
    ].filter((fact) => fact && fact[1] != null);
    return [
      el("h1", {}, run.name, el("span", { class: `state ${run.state.split(" ")[0]}` }, run.state)),
      el("p", { class: "command" }, el("code", {}, environment.command || run.path), environment.started && el("span", { class: "soft" }, ` ${environment.started.replace(/ ?\+0000$/, " UTC")}`)),
      run.total > 0 && done < run.total && run.state === "running" && el("progress", { max: run.total, value: done, "aria-label": `${done} of ${run.total} steps` }),
      el("dl", { class: "facts" }, facts.map(([name, value, title]) => el("div", {}, el("dt", {}, name), el("dd", { title }, value)))),
      result.promise && result.reason && el("p", { class: "fingerprint" }, el("span", { class: "soft" }, `${result.promise}: `), result.reason),
      result.weights_sha256 && el("p", { class: "fingerprint" }, el("span", { class: "soft" }, "fingerprint "), el("code", {}, result.weights_sha256)),
    ];
  }

  curves(run) {
    const base = { steps: run.steps, time: view.scale.time };
    const values = Object.entries(run.values).map(([name, curve], i) => Chart.of({
      ...base, id: `value-${i}-${name}`, title: valueName(name), unit: "number", log: true,
      curves: [{ name: valueName(name), color: CURVES[i % CURVES.length], values: curve.last, low: curve.low, high: curve.high }],
      note: hasBand(curve) ? "The band shows the lowest and the highest value between two points." : "",
    }));
    const phases = PHASES.filter((phase) => run.phases[phase]);
    const time = [
      Chart.of({ ...base, id: "phases", title: "Time of a step", unit: "seconds", stacked: true, note: "Mean of all ranks.",
        curves: phases.map((phase) => ({ name: phase, color: phaseColor(phase), values: run.phases[phase] })) }),
      Chart.of({ ...base, id: "waits", title: "Waiting in a step", unit: "seconds", zero: true, note: "Mean of all ranks. Exchange that backward hides is not counted.",
        curves: [
          { name: "for peers", color: "--c0", values: run.wait },
          run.phases.data && { name: "for data", color: "--phase-data", values: run.phases.data },
          run.phases.exchange && { name: "own exchange, not overlapped", color: "--phase-exchange",
            values: run.phases.exchange.map((v, i) => (v == null ? null : Math.max(0, v - (run.wait[i] || 0)))) },
        ].filter(Boolean) }),
      Chart.of({ ...base, id: "rate", title: "Throughput", unit: "per second", zero: true,
        curves: [{ name: "samples", color: "--c2", values: run.rate.samples }] }),
      run.rate.weight && Chart.of({ ...base, id: "weight", title: "Throughput in tokens (weight)", unit: "per second", zero: true,
        curves: [{ name: "tokens", color: "--c4", values: run.rate.weight }] }),
    ];
    if (run.rate.utilization) {
      time.push(Chart.of({ ...base, id: "utilization", title: "Model FLOPs utilization", unit: "share", zero: true,
        note: `Of ${format.rate(run.flops.peak)} FLOP/s for each process: the product of two matrices (${run.flops.dtype}) on ${run.flops.peak_of}. A sample takes ${format.rate(run.flops.flops_per_sample)} operations.`,
        curves: [{ name: "utilization", color: "--c3", values: run.rate.utilization }] }));
    }
    const several = run.table.length > 1;
    const ranks = several && [
      Chart.of({ ...base, id: "ranks-time", title: "Fastest and slowest rank", unit: "seconds", zero: true,
        note: "Own time of a step: without waiting, checkpoints and evaluations.",
        curves: [{ name: "slowest", color: "--c1", values: run.ranks.slowest }, { name: "median", color: "--c0", values: run.ranks.median },
          { name: "fastest", color: "--c2", values: run.ranks.fastest }] }),
      this.map.show(run.map, run.steps, this.ranks.rank),
    ];
    return [
      this.section("Learning", this.marks.show([...new Set(run.events.filter((event) => event.step <= run.steps.at(-1)).map((event) => event.kind))], markLegend), this.grid("values", values)),
      this.section("Time", this.spent.show([run.table, run.result.phases, run.findings?.length], () => this.spentPart(run)), this.grid("time", time, "two")),
      this.section(several ? "Ranks" : "Rank", several && this.grid("ranks", ranks, "two"), this.ranks.show(run.table),
        run.assignments.length > 0 && several && this.assignments.show([run.assignments, run.steps.at(-1)], () => assignmentFigure(run.assignments, run.steps.at(-1)))),
      ...this.machines(run),
    ];
  }

  spentPart(run) {
    const seconds = run.result.phases || {}, all = {};
    for (const row of run.table) for (const [phase, s] of Object.entries(row.seconds)) all[phase] = (all[phase] || 0) + s;
    const isWhole = sum(Object.values(seconds)) > 0;
    return [phaseSummary(isWhole ? seconds : all, isWhole ? 0 : sum(run.table.map((row) => row.steps))),
      el("p", { class: "note" }, isWhole ? "All time of the loop of the main process, with its first steps and what followed the last one." : "Mean of all ranks.",
        run.findings?.length > 0 && " Findings leave out the first steps and use the median or the fastest rank, so their figures differ.")];
  }

  machines(run) {
    const hosts = Object.entries(run.hosts || {});
    return hosts.map(([host, { time, charts, facts }]) => this.section(hosts.length > 1 ? `Machine ${host}` : "Machine",
      el("p", { class: "note" }, [host, facts.cores != null && plural(facts.cores, "core"), facts.memory?.total && `${format.bytes(facts.memory.total)} of memory`,
        facts.devices?.length && facts.devices.map((device) => device.name).join(", ")].filter(Boolean).join(" · ")),
      this.grid(`host ${host}`, charts.map((chart) => Chart.of({
        id: `host ${host} ${chart.id}`, title: chart.title, unit: chart.unit, zero: true, steps: time.map((t) => Math.round(convert(t, "time", "steps"))), time,
        curves: Object.entries(chart.curves).map(([name, values], i) => ({ name, color: CURVES[i % CURVES.length], values })),
      })))));
  }
}
