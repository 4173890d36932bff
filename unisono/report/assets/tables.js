"use strict";

/* Parts of the page that are no curves: bars, the table and the map of ranks, virtual ranks, events, settings, logs. */

const PHASES = ["forward", "backward", "exchange", "update", "data", "checkpoint", "evaluate", "other"];
const CURVES = ["--c0", "--c1", "--c2", "--c3", "--c4", "--c5", "--c6", "--c7"];
const phaseColor = (phase) => (PHASES.includes(phase) ? `--phase-${phase}` : "--phase-other");

const sum = (values) => values.reduce((a, b) => a + (b || 0), 0);

/* A horizontal bar of parts: {name: number}. */
function stackedBar(parts, total = sum(Object.values(parts))) {
  const known = PHASES.filter((phase) => parts[phase] > 0);
  const text = known.map((phase) => `${phase} ${format.share(parts[phase] / total)}`).join(", ");
  return el("div", { class: "bar", role: "img", "aria-label": text, title: text },
    known.map((phase) => el("span", { style: { width: `${(100 * parts[phase]) / total}%`, background: `var(${phaseColor(phase)})` } })));
}

/* The phases of a step as a bar with a legend of seconds and shares. */
function phaseSummary(parts, steps) {
  const total = sum(Object.values(parts));
  const known = PHASES.filter((phase) => parts[phase] > 0); // in the order of the bar
  return el("div", { class: "phases" }, stackedBar(parts),
    el("ul", {}, known.map((phase) => el("li", {}, el("i", { style: { background: `var(${phaseColor(phase)})` } }),
      el("span", {}, phase), el("b", {}, format.share(parts[phase] / total)),
      el("small", {}, steps ? `${format.seconds(parts[phase] / steps)} a step` : format.seconds(parts[phase]))))));
}

const TEXTS = new Set(["event", "value", "from", "run", "state", "host", "device"]); // columns of text, not of numbers

function table(heads, rows, { caption, scroll = true } = {}) {
  const content = el("table", {}, caption && el("caption", {}, caption),
    el("thead", {}, el("tr", {}, heads.map((head) => el("th", { scope: "col", class: (TEXTS.has(head) || head instanceof Node) && "text" }, head)))), el("tbody", {}, rows));
  return scroll ? el("div", { class: "scroll", tabindex: "0" }, content) : content;
}

function details(key, title, ...children) {
  return el("details", { "data-key": key }, el("summary", {}, title), ...children);
}

/* The ranks of a run: a table, in which a rank can be chosen, and its phases beside those of all. */
class RankTable {
  constructor(chosen) {
    this.place = new Place();
    this.rank = null;
    this.chosen = chosen;
    this.order = null; // by which column the rows are sorted; null: by rank
  }

  show(rows) {
    this.rows = rows;
    return this.place.show([rows, this.rank, this.order], () => [this.heads(), this.detail()]);
  }

  choose(rank) {
    this.rank = rank === this.rank ? null : rank;
    this.show(this.rows);
    this.chosen(this.rank);
  }

  heads() {
    const slowest = Math.max(...this.rows.map((row) => row.own || 0));
    const columns = [["rank", (row) => row.rank], ["host", (row) => row.host], ["device", (row) => row.device],
      ["steps", (row) => row.steps], ["own time of a step", (row) => row.own], ["waiting", (row) => row.wait / (sum(Object.values(row.seconds)) || 1)]];
    const by = this.order && columns.find(([name]) => name === this.order.name)[1];
    const rows = [...this.rows].sort((a, b) => (by ? this.order.sign * (by(a) > by(b) ? 1 : by(a) < by(b) ? -1 : 0) : 0));
    const heads = columns.map(([name]) => el("button", { type: "button", class: "sort", "data-key": `sort ${name}`,
      on: { click: () => {
        this.order = { name, sign: this.order?.name === name ? -this.order.sign : 1 };
        this.show(this.rows);
      } } }, name, this.order?.name === name ? (this.order.sign > 0 ? " ↑" : " ↓") : ""));
    return el("div", { class: "scroll ranks", tabindex: "0" }, el("table", {},
      el("thead", {}, el("tr", {}, heads.map((head, i) => el("th", { scope: "col", class: TEXTS.has(columns[i][0]) && "text" }, head)), el("th", { scope: "col", class: "text" }, "phases"))),
      el("tbody", {}, rows.map((row) => el("tr", { class: row.rank === this.rank && "chosen", on: { click: () => this.choose(row.rank) } },
        el("th", { scope: "row" }, el("button", { type: "button", class: "rank", "data-key": `rank ${row.rank}`,
          "aria-pressed": String(row.rank === this.rank) }, row.rank)),
        el("td", { class: "text" }, row.host || UNKNOWN), el("td", { class: "text" }, row.device || UNKNOWN), el("td", {}, format.count(row.steps)),
        el("td", { class: "meter", style: { "--part": `${(100 * (row.own || 0)) / (slowest || 1)}%` } }, format.seconds(row.own)),
        el("td", {}, format.share(columns[5][1](row))), el("td", { class: "wide" }, stackedBar(row.seconds)))))));
  }

  detail() {
    const row = this.rows.find((each) => each.rank === this.rank);
    if (!row) return el("p", { class: "note" }, "Choose a rank to see its phases.");
    const all = {};
    for (const each of this.rows) for (const [phase, s] of Object.entries(each.seconds)) all[phase] = (all[phase] || 0) + s / (each.steps || 1) / this.rows.length;
    const own = Object.fromEntries(Object.entries(row.seconds).map(([phase, s]) => [phase, s / (row.steps || 1)]));
    return el("div", { class: "detail", id: "rank-detail" }, el("h4", {}, `Rank ${row.rank}`, row.host && ` on ${row.host}`, row.device && `, ${row.device}`),
      table(["phase", `rank ${row.rank}`, "mean of all", "difference"], PHASES.filter((phase) => own[phase] || all[phase]).map((phase) => {
        const more = (own[phase] || 0) - (all[phase] || 0);
        return el("tr", {}, el("th", { scope: "row" }, el("i", { class: "swatch", style: { background: `var(${phaseColor(phase)})` } }), phase),
          el("td", {}, format.seconds(own[phase] || 0)), el("td", {}, format.seconds(all[phase] || 0)),
          el("td", {}, `${more < 0 ? "−" : "+"}${format.seconds(Math.abs(more))}`));
      }), { scroll: false }));
  }
}

/* A canvas with a row for each rank, and its own time of a step from fast to slow. */
class RankMap {
  constructor(choose) {
    this.choose = choose;
    this.canvas = el("canvas", { role: "img", on: {
      mousemove: (event) => this.hover(event), mouseleave: () => { this.tip.textContent = ""; },
      click: (event) => { const cell = this.cell(event); if (cell) this.choose(cell.rank); } } });
    this.tip = el("span", { class: "readout" });
    this.low = el("span"); this.high = el("span");
    this.first = el("span"); this.last = el("span");
    this.element = el("figure", { class: "chart map" },
      el("figcaption", {}, el("h3", {}, "Map of ranks"), this.tip), this.canvas,
      el("div", { class: "ends" }, this.first, this.last),
      el("p", { class: "note" }, el("span", { class: "ramp" }, this.low, el("i"), this.high),
        " a step without waiting, checkpoints and evaluations. A row is a rank."));
    new ResizeObserver(() => this.draw()).observe(this.canvas);
  }

  show(map, steps, chosen) {
    Object.assign(this, { map, steps, chosen });
    this.cells = Uint8Array.from(atob(map.cells), (c) => c.charCodeAt(0));
    this.low.textContent = format.seconds(map.low);
    this.high.textContent = format.seconds(map.high);
    this.first.textContent = `step ${format.count(steps[0])}`;
    this.last.textContent = format.count(steps[steps.length - 1]);
    this.rowHeight = Math.max(2, Math.min(18, Math.floor(280 / map.ranks.length)));
    this.canvas.style.height = `${this.rowHeight * map.ranks.length}px`;
    this.canvas.setAttribute("aria-label", `Own time of a step for ${plural(map.ranks.length, "rank")} over time, from ${format.seconds(map.low)} to ${format.seconds(map.high)}. The table of ranks has the means.`);
    this.draw();
    return this.element;
  }

  draw() {
    const { canvas, map, cells, rowHeight } = this;
    if (!map || !canvas.clientWidth) return;
    const scale = devicePixelRatio || 1, width = Math.round(canvas.clientWidth * scale), row = Math.round(rowHeight * scale);
    canvas.width = width; canvas.height = row * map.ranks.length;
    const paint = canvas.getContext("2d");
    const stops = ["--ramp-0", "--ramp-1", "--ramp-2"].map((name) => css(name).match(/\w\w/g).map((two) => parseInt(two, 16)));
    const color = (v) => {
      const at = (2 * (v - 1)) / 254, i = Math.min(1, Math.floor(at));
      return `rgb(${stops[i].map((a, j) => Math.round(a + (stops[i + 1][j] - a) * (at - i))).join()})`;
    };
    const colors = Array.from({ length: 256 }, (_, v) => (v ? color(v) : css("--rule")));
    const gap = row > 6 * scale ? 1 : 0;
    map.ranks.forEach((rank, r) => {
      for (let c = 0; c < map.columns; c += 1) {
        const left = Math.round((c * width) / map.columns), right = Math.round(((c + 1) * width) / map.columns);
        paint.fillStyle = colors[cells[r * map.columns + c]];
        paint.fillRect(left, r * row, right - left, row - gap);
      }
      if (rank === this.chosen) {
        paint.strokeStyle = css("--ink"); paint.lineWidth = 2 * scale;
        paint.strokeRect(scale, r * row + scale, width - 2 * scale, Math.max(row - 2 * scale, 1));
      }
    });
  }

  cell(event) {
    const { map } = this, box = this.canvas.getBoundingClientRect();
    const r = Math.floor((event.clientY - box.top) / (box.height / map.ranks.length));
    const c = Math.floor((event.clientX - box.left) / (box.width / map.columns));
    return map.ranks[r] == null || c < 0 || c >= map.columns ? null : { rank: map.ranks[r], r, c };
  }

  hover(event) {
    const cell = this.cell(event), { map, steps } = this;
    if (!cell) return;
    const value = this.cells[cell.r * map.columns + cell.c];
    const step = steps[Math.min(steps.length - 1, Math.floor(((cell.c + 1) * steps.length) / map.columns) - 1)];
    const time = value ? format.seconds(map.low + ((value - 1) / 254) * (map.high - map.low)) : "no step";
    this.tip.textContent = `rank ${cell.rank} · step ${format.count(step)} · ${value === 255 ? "at least " : ""}${time}`;
  }
}

/* Virtual ranks by process over time: a row for each virtual rank, in the color of the rank that computes it. */
function assignmentFigure(assignments, lastStep) {
  const steps = [...new Set(assignments.map(([step]) => step))].sort((a, b) => a - b);
  const virtual = Math.max(...assignments.map(([, , , end]) => end));
  const ranks = [...new Set(assignments.map(([, rank]) => rank))].sort((a, b) => a - b);
  const end = Math.max(lastStep + 1, steps[steps.length - 1] + 1), width = 1000, row = Math.max(4, Math.min(16, Math.floor(240 / virtual)));
  const owners = Array(virtual).fill(null), parts = [];
  steps.forEach((step, i) => {
    for (const [at, rank, first, last] of assignments) if (at === step) owners.fill(rank, first, last);
    const until = steps[i + 1] ?? end, x = (width * step) / end, w = (width * (until - step)) / end;
    for (let v = 0; v < virtual; v += 1) {
      if (owners[v] == null) continue;
      let u = v;
      while (u + 1 < virtual && owners[u + 1] === owners[v]) u += 1;
      parts.push([x, v * row, w, (u - v + 1) * row, owners[v], `rank ${owners[v]}: virtual ranks ${v} to ${u}, steps ${step} to ${until - 1}`]);
      v = u;
    }
  });
  const svg = (name, attributes, ...children) => {
    const element = document.createElementNS("http://www.w3.org/2000/svg", name);
    for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
    element.append(...children);
    return element;
  };
  const color = (rank) => `var(${CURVES[ranks.indexOf(rank) % CURVES.length]})`;
  const drawing = svg("svg", { viewBox: `0 0 ${width} ${virtual * row}`, preserveAspectRatio: "none", role: "img", style: `height:${virtual * row}px`,
    "aria-label": parts.slice(0, 40).map((part) => part[5]).join("; ") },
    ...parts.map(([x, y, w, h, rank, text]) => {
      const rect = svg("rect", { x, y: y + 0.5, width: Math.max(w - 1.5, 0.5), height: h - 1, rx: 1 }, svg("title", {}, text));
      rect.style.fill = color(rank);
      return rect;
    }));
  return el("figure", { class: "chart" }, el("figcaption", {}, el("h3", {}, "Virtual ranks by process")),
    el("div", { class: "legend" }, ranks.slice(0, 24).map((rank) => el("span", { class: "chip", style: { "--color": color(rank) } }, el("i"), `rank ${rank}`))),
    drawing, el("div", { class: "ends" }, el("span", {}, "step 0"), el("span", {}, format.count(end - 1))),
    el("p", { class: "note" }, `${plural(virtual, "virtual rank")} from top to bottom, over steps.`));
}

const EVENT_NAMES = {
  checkpoint: "checkpoint", death: "death", join: "join", resume: "resume", skipped: "skipped step", spike: "spike of the loss",
  promise: "promise lowered", rebalance: "rebalancing", evaluation: "evaluation",
};

function eventText(event) {
  const name = EVENT_NAMES[event.kind] || event.kind, ranks = event.ranks?.length ? ` of rank${event.ranks.length > 1 ? "s" : ""} ${event.ranks.join(", ")}` : "";
  if (event.kind === "checkpoint") return `checkpoint after ${plural(event.step, "step")}`;
  if (event.kind === "spike") return `spike of the loss: ${format.number(event.loss)}, before it about ${format.number(event.typical)}`;
  if (event.kind === "promise") return `promise lowered to ${event.promise}${event.reason ? `: ${event.reason}` : ""}`;
  return name + ranks;
}

const eventColor = (kind) => `var(--event-${kind in EVENT_NAMES ? kind : "other"})`;

/* The legend of the marks that events have in the charts; nothing without an event. */
function markLegend(kinds) {
  return kinds.length > 0 && el("div", { class: "legend marks" }, el("span", { class: "soft" }, "Marks:"), kinds.map((kind) => el("span",
    { class: `chip mark${COMMON.has(kind) ? "" : " line"}`, style: { "--color": eventColor(kind) } }, el("i"), EVENT_NAMES[kind] || kind)));
}

function eventTable(events, began) {
  return table(["step", "time", "event"], events.map((event) => el("tr", {}, el("th", { scope: "row" }, format.count(event.step)),
    el("td", {}, event.t && began ? format.duration(event.t - began) : UNKNOWN),
    el("td", { class: "text" }, el("i", { class: "swatch", style: { background: eventColor(event.kind) } }), eventText(event)))));
}

function pairs(entries) {
  return el("dl", { class: "pairs" }, entries.map(([name, value]) => [el("dt", {}, name), el("dd", {}, shownValue(value))]));
}

function shownValue(value) {
  if (value == null || value === "") return UNKNOWN;
  const text = typeof value === "object" ? JSON.stringify(value) : String(value);
  return text.length > 600 ? `${text.slice(0, 600)} …` : text;
}

function settingsPart(settings) {
  const row = ([name, value, source]) => el("tr", {}, el("th", { scope: "row" }, name), el("td", { class: "text" }, shownValue(value)), el("td", { class: "text soft" }, source));
  const own = settings.filter(([, , source]) => source !== "default"), rest = settings.filter(([, , source]) => source === "default");
  return [
    own.length ? table(["setting", "value", "from"], own.map(row)) : el("p", { class: "note" }, "All settings have their defaults."),
    rest.length && details("defaults", `${plural(rest.length, "default")}`, table(["setting", "value", "from"], rest.map(row))),
  ];
}

function logPart(logs) {
  return Object.entries(logs).map(([name, lines]) => details(`log ${name}`, `${name}${lines.length ? "" : " (empty)"}`, el("pre", { class: "scroll", tabindex: "0" }, lines.join("\n"))));
}

/* Return advice with options of the command, settings and calls in the font of code. */
function withCode(advice) {
  return advice.split(CODE).map((part, i) => (i % 2 ? el("code", {}, part) : part));
}

const CODE = /(--set [\w.]+(?:=[^\s,;)]+)?|--[a-z][\w-]*(?: \d+)?|\.?[a-z_]+(?:\.[a-z_]+)*\([^)]*\)|\w+\.\w+=\w+)/;

function findingCards(findings) {
  return findings.map((finding) => el("article", { class: `finding ${finding.gain == null || finding.gain >= 0.3 ? "high" : finding.gain >= 0.15 ? "medium" : "low"}` },
    el("h3", {}, finding.fact),
    finding.evidence.length > 0 && el("ul", {}, finding.evidence.map((each) => el("li", {}, each))),
    el("p", {}, el("span", { class: "next" }, "Next"), " ", withCode(finding.advice)),
    finding.gain != null && el("p", { class: "gain" }, `saves about ${format.share(finding.gain)} of the time`),
    finding.changes_result && el("p", { class: "soft" }, "It changes the result.")));
}
