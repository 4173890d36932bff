"use strict";

/* Charts over steps or time. All charts of a page share the visible interval and the cursor. A chart is drawn when it
   comes near the window, so a page with many charts opens quickly. */

const view = {
  axis: "steps", // or "time"
  range: null, // the visible interval of the axis; null: everything
  scale: { steps: [0, 1], time: [0, 1] }, // the same places on both axes, by which one is converted to the other
  marks: [], // {steps, time, kind, text}
  words: {}, // replaces entries of AXES.steps, on a page whose axis has no steps
  charts: new Map(),
  changed: () => {},
};

const DASHES = [undefined, [9, 5], [2, 4]]; // of curves beyond the number of colors; page.css has the same of their names

const COMMON = new Set(["checkpoint", "evaluation"]); // events that are short ticks; others are lines

const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const alpha = (name, two) => css(name) + two;

function extent() {
  const xs = view.scale[view.axis];
  const low = xs[0], high = xs[xs.length - 1];
  return low < high ? [low, high] : [low - 0.5, high + 0.5];
}

/* Convert a place on one axis to the other one, linearly between known places. */
function convert(x, from, to) {
  const a = view.scale[from], b = view.scale[to];
  let low = 0, high = a.length - 1;
  if (x <= a[0]) return b[0];
  if (x >= a[high]) return b[high];
  while (high - low > 1) {
    const mid = (low + high) >> 1;
    if (a[mid] <= x) low = mid; else high = mid;
  }
  return b[low] + ((b[high] - b[low]) * (x - a[low])) / (a[high] - a[low] || 1);
}

function setView(range) {
  const [low, high] = extent();
  if (range) {
    const span = Math.max(range[1] - range[0], (high - low) / 1e5, axisNow().least);
    if (span >= high - low) range = null;
    else {
      const start = Math.min(Math.max((range[0] + range[1] - span) / 2, low), high - span);
      range = [start, start + span];
    }
  }
  view.range = range;
  view.changed();
  for (const chart of view.charts.values()) chart.rescale();
}

function setAxis(axis) {
  if (axis === view.axis) return;
  const range = view.range && view.range.map((x) => convert(x, view.axis, axis));
  view.axis = axis;
  view.range = null;
  for (const chart of view.charts.values()) chart.draw();
  setView(range);
}

let cursorFrame = 0;
function shareCursor(x, source) {
  cancelAnimationFrame(cursorFrame);
  cursorFrame = requestAnimationFrame(() => {
    for (const chart of view.charts.values()) if (chart !== source) chart.point(x);
  });
}

const STEP_INCREMENTS = [];
for (let size = 1; size <= 1e12; size *= 10) STEP_INCREMENTS.push(size, 2 * size, 5 * size);
const TIME_INCREMENTS = [
  0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200,
  10800, 21600, 43200, 86400, 172800, 432800, 864000, 1728000,
];

/* What an axis is made of: name, least visible interval, distances of ticks, text of a tick and of a place. */
const AXES = {
  steps: {
    name: "step", least: 1, increments: STEP_INCREMENTS, place: format.count,
    tick: (value) => (value >= 1e5 ? format.rate(value).replace(" ", "") : format.count(value)),
  },
  time: {
    name: "time", least: 0.01, increments: TIME_INCREMENTS, place: format.duration,
    tick: (value, increment) => (increment < 1 ? `${Number(value.toFixed(3))} s` : format.duration(value)),
  },
};
const axisNow = (axis = view.axis) => (axis === "steps" ? { ...AXES.steps, ...view.words } : AXES[axis]);

function placeText(step, seconds) {
  const parts = [];
  if (step != null) parts.push(`${axisNow("steps").name} ${axisNow("steps").place(step)}`);
  if (seconds != null) parts.push(seconds < 60 ? format.seconds(Number(seconds.toPrecision(4))) : format.duration(seconds));
  return parts.join(" · ");
}

const near = new IntersectionObserver(
  (entries) => { for (const entry of entries) view.charts.get(entry.target.id)?.approach(entry.isIntersecting); },
  { rootMargin: "300px" },
);
const sizes = new ResizeObserver((entries) => {
  for (const entry of entries) view.charts.get(entry.target.parentNode.id)?.resize();
});
addEventListener("beforeprint", () => { for (const chart of view.charts.values()) chart.approach(true); });

/* A chart of: {id, title, note, unit, steps, time, curves: [{name, color, dash, values, low, high}], stacked, zero, log, top};
   `dots`: of a curve, points without a line; `top`: values above it are not shown on a linear axis. */
class Chart {
  constructor(id) {
    this.hidden = new Set();
    this.isNear = this.isDirty = this.isLog = false;
    this.title = el("h3");
    this.readout = el("span", { class: "readout" });
    this.logButton = el("button", {
      type: "button", class: "small", "aria-pressed": "false", title: "Logarithmic scale",
      on: { click: () => { this.isLog = !this.isLog; this.draw(); } },
    }, "log");
    this.legend = el("div", { class: "legend" });
    this.frame = el("div", {
      class: "plot", tabindex: "0", role: "group", "aria-roledescription": "chart",
      on: { keydown: (event) => this.key(event), blur: () => shareCursor(null, null) },
    });
    this.spoken = el("div", { class: "spoken", "aria-live": "polite" });
    this.table = el("details", { class: "values", on: { toggle: () => this.fillTable() } }, el("summary", {}, "Values"));
    this.note = el("p", { class: "note" });
    this.element = el("figure", { class: "chart", id },
      el("figcaption", {}, this.title, this.readout, this.logButton), this.legend, this.frame, this.note, this.spoken,
      this.table);
    view.charts.set(id, this);
    near.observe(this.element);
    sizes.observe(this.frame);
  }

  /* Return the element of the chart with this id, with this content. */
  static of(spec) {
    const chart = view.charts.get(spec.id) || new Chart(spec.id);
    chart.show(spec);
    return chart.element;
  }

  show(spec) {
    this.spec = spec;
    this.title.textContent = spec.title;
    this.note.textContent = spec.note || "";
    this.frame.setAttribute("aria-label",
      `${spec.title}: ${spec.curves.map((curve) => curve.name).join(", ")}. Arrows move the cursor, + and - zoom, 0 resets.`);
    this.logButton.hidden = !spec.log || spec.curves.some(({ values }) => values.some((v) => v != null && v <= 0));
    const names = spec.curves.map((curve) => curve.name).join("\n");
    if (names !== this.names) {
      this.names = names;
      this.chips = spec.curves.map((curve) => {
        const value = el("b");
        const chip = el("button", {
          type: "button", class: `chip dash${curve.dash || 0}`, "aria-pressed": "true", style: { "--color": `var(${curve.color})` },
          on: { click: () => this.toggle(curve.name, chip) },
        }, el("i"), curve.name, " ", value);
        chip.value_ = value;
        return chip;
      });
      this.legend.replaceChildren(...this.chips);
    }
    this.draw();
  }

  toggle(name, chip) {
    if (!this.hidden.delete(name)) this.hidden.add(name);
    chip.setAttribute("aria-pressed", String(!this.hidden.has(name)));
    this.draw();
  }

  get shown() { return this.spec.curves.filter((curve) => !this.hidden.has(curve.name)); }
  get xs() { return view.axis === "steps" ? this.spec.steps : this.spec.time; }

  approach(isNear) {
    this.isNear = isNear;
    if (isNear && this.isDirty) this.draw();
  }

  resize() {
    if (this.plot && this.frame.clientWidth) {
      this.plot.setSize({ width: this.frame.clientWidth, height: this.height });
    }
  }

  get height() { return this.spec.height || 210; }

  /* Return uPlot's columns, and for each what is drawn. */
  columns() {
    const data = [this.xs], series = [{}], bands = [];
    if (this.spec.stacked) {
      let below = this.xs.map(() => 0);
      for (const curve of this.shown) {
        below = below.map((v, i) => v + (curve.values[i] || 0));
        data.push(below);
        const fill = () => alpha(curve.color, "d0");
        series.push({ stroke: () => css(curve.color), width: 1, points: { show: false }, fill: data.length === 2 ? fill : undefined });
        if (data.length > 2) bands.push({ series: [data.length - 1, data.length - 2], fill });
      }
      return { data, series, bands };
    }
    for (const [i, curve] of this.shown.entries()) {
      const known = curve.values.reduce((n, v) => n + (v != null), 0);
      if (curve.low) {
        data.push(curve.high, curve.low);
        series.push(...[0, 1].map(() => ({ stroke: "transparent", width: 0, points: { show: false }, spanGaps: true })));
        bands.push({ series: [data.length - 2, data.length - 1], fill: () => alpha(curve.color, "38") });
      }
      data.push(curve.values);
      series.push({
        stroke: () => css(curve.color), dash: DASHES[curve.dash || 0], spanGaps: true,
        paths: curve.dots ? () => null : undefined, // points alone
        width: this.spec.isOverlay ? 1.75 + Math.min(3, 1.25 * (this.shown.length - 1 - i)) : 1.75, // equal curves stay visible
        points: { show: curve.dots || known <= 40, size: curve.dots ? 4 : 5, fill: () => css(curve.color) },
      });
    }
    return { data, series, bands };
  }

  draw() {
    this.isDirty = !this.isNear;
    this.say(this.at);
    if (this.isDirty || !this.frame.clientWidth) { this.isDirty = true; return; }
    const { data, series, bands } = this.columns();
    const shape = JSON.stringify([this.names, [...this.hidden], this.isLog, view.axis, series.map((s) => s.points?.show), bands.length]);
    const [low, high] = view.range || extent();
    if (this.plot && shape === this.shape) {
      this.plot.batch(() => { this.plot.setData(data, false); this.plot.setScale("x", { min: low, max: high }); });
    } else {
      this.plot?.destroy();
      this.shape = shape;
      this.plot = new uPlot(this.options(series, bands), data, this.frame);
      this.plot.setScale("x", { min: low, max: high });
    }
    this.logButton.setAttribute("aria-pressed", String(this.isLog));
    if (this.table.open) this.fillTable();
  }

  rescale() {
    if (!this.plot || !this.isNear) { this.isDirty = true; return; }
    const [low, high] = view.range || extent();
    this.plot.setScale("x", { min: low, max: high });
  }

  options(series, bands) {
    const text = () => css("--soft"), rule = () => css("--rule");
    const axis = { stroke: text, font: "11px system-ui, sans-serif", grid: { stroke: rule, width: 1 }, ticks: { show: false } };
    const unit = format[this.spec.unit] || format.number;
    const room = (u, values) => 14 + 6.2 * Math.max(3, ...(values || []).map((value) => String(value).length));
    return {
      width: this.frame.clientWidth, height: this.height, series, bands,
      legend: { show: false },
      padding: [8, 10, 0, 0],
      scales: {
        x: { time: false },
        y: this.isLog ? { distr: 3 } : { range: (u, low, high) => this.bounds(low, high) },
      },
      axes: [
        { ...axis, gap: 4, size: 26, space: 64, incrs: axisNow().increments,
          values: (u, ticks, _, __, increment) => ticks.map((x) => axisNow().tick(x, increment)) },
        { ...axis, gap: 4, size: room, space: 34, values: (u, ticks) => ticks.map((v) => (v == null ? "" : unit(v))) },
      ],
      cursor: {
        y: false, drag: { x: true, y: false, setScale: false, dist: 4 }, points: { size: 7, show: !this.spec.stacked },
        bind: { dblclick: () => () => { setView(null); return null; } },
      },
      hooks: {
        drawAxes: [(u) => this.drawMarks(u)],
        setSelect: [(u) => {
          const { left, width } = u.select;
          if (width < 4) return;
          u.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false);
          setView([u.posToVal(left, "x"), u.posToVal(left + width, "x")]);
        }],
        setCursor: [(u) => {
          const { idx, left } = u.cursor;
          const inside = idx != null && left >= 0;
          this.say(inside ? idx : null);
          shareCursor(inside ? this.xs[idx] : null, this);
        }],
      },
    };
  }

  bounds(low, high) {
    if (low == null) return [0, 1];
    if (this.spec.zero || this.spec.stacked) {
      return [Math.min(0, low), Math.max(high, this.spec.unit === "share" ? 0.02 : 0) * 1.06 || 1];
    }
    if (this.spec.top > low) high = Math.min(high, this.spec.top);
    const room = (high - low) * 0.07 || Math.abs(high) * 0.1 || 1;
    return [low >= 0 ? Math.max(0, low - room) : low - room, high + room];
  }

  drawMarks(u) {
    const { left, top, width, height } = u.bbox;
    u.ctx.save();
    for (const mark of view.marks) {
      const x = mark[view.axis];
      if (x == null) continue;
      const at = Math.round(u.valToPos(x, "x", true)) + 0.5;
      if (at < left || at > left + width) continue;
      u.ctx.strokeStyle = u.ctx.fillStyle = css(`--event-${mark.kind}`) || css("--soft");
      u.ctx.lineWidth = devicePixelRatio;
      const size = 4 * devicePixelRatio;
      if (!COMMON.has(mark.kind)) {
        u.ctx.globalAlpha = 0.75;
        u.ctx.setLineDash([size, size * 0.75]);
        u.ctx.beginPath(); u.ctx.moveTo(at, top); u.ctx.lineTo(at, top + height); u.ctx.stroke();
      }
      u.ctx.globalAlpha = 1;
      u.ctx.beginPath(); u.ctx.moveTo(at - size, top - size); u.ctx.lineTo(at + size, top - size); u.ctx.lineTo(at, top + size * 0.6);
      u.ctx.fill();
    }
    u.ctx.restore();
  }

  /* Show the values at an index of the data; without one, the last values. */
  say(index) {
    this.at = index;
    const unit = format[this.spec.unit] || format.number;
    const isSet = index != null && index < this.xs.length;
    this.spec.curves.forEach((curve, i) => {
      let value = isSet ? curve.values[index] : undefined;
      for (let j = index; isSet && this.spec.isOverlay && value == null && j > 0; j -= 1) value = curve.values[j - 1];
      if (!isSet) for (let j = curve.values.length - 1; j >= 0 && value == null; j -= 1) value = curve.values[j];
      this.chips[i].value_.textContent = value == null ? UNKNOWN : unit(value);
    });
    const events = isSet ? this.eventsAt(this.xs[index]) : [];
    this.readout.textContent = isSet
      ? [placeText(this.spec.steps[index], this.spec.time?.[index]), ...events].join(" · ")
      : "";
  }

  eventsAt(x) {
    const [low, high] = view.range || extent();
    const close = (high - low) * 0.008;
    return view.marks.filter((mark) => mark[view.axis] != null && Math.abs(mark[view.axis] - x) <= close).slice(0, 2).map((mark) => mark.text);
  }

  /* Point at a place of the axis, as the cursor of another chart does; null: nowhere. */
  point(x) {
    if (!this.plot || !this.isNear) return;
    if (x == null) {
      this.plot.setCursor({ left: -10, top: -10 }, false);
      this.say(null);
      return;
    }
    this.plot.setCursor({ left: this.plot.valToPos(x, "x"), top: 2 }, false);
    this.say(this.plot.cursor.idx ?? null);
  }

  key(event) {
    const far = this.xs.length - 1, stride = event.shiftKey ? 10 : 1;
    const at = Math.min(this.at ?? far, far);
    const [low, high] = view.range || extent();
    const moves = {
      ArrowLeft: () => this.moveTo(this.at == null ? far : at - stride), ArrowRight: () => this.moveTo(this.at == null ? far : at + stride),
      Home: () => this.moveTo(0), End: () => this.moveTo(far),
      "+": () => this.zoom(0.5), "=": () => this.zoom(0.5), "-": () => this.zoom(2), 0: () => setView(null),
      Escape: () => { this.point(null); shareCursor(null, this); },
    };
    if (event.ctrlKey || event.metaKey || event.altKey || !moves[event.key] || low === high) return;
    event.preventDefault();
    moves[event.key]();
  }

  zoom(factor) {
    const [low, high] = view.range || extent();
    const middle = this.at == null ? (low + high) / 2 : this.xs[Math.min(this.at, this.xs.length - 1)];
    const half = (factor * (high - low)) / 2;
    setView([middle - half, middle + half]);
  }

  moveTo(index) {
    const to = Math.min(Math.max(index, 0), this.xs.length - 1), x = this.xs[to];
    const [low, high] = view.range || extent();
    if (x < low || x > high) setView([x - (high - low) / 2, x + (high - low) / 2]);
    this.at = to; // now, because the next key may come before the next frame
    requestAnimationFrame(() => {
      this.point(x);
      this.say(to);
      shareCursor(x, this);
      this.spoken.textContent = `${this.readout.textContent}: ${this.chips.map((chip) => chip.textContent).join(", ")}`;
    });
  }

  fillTable() {
    if (!this.table.open) return;
    const { steps, time, curves, unit } = this.spec, most = 40;
    const stride = Math.max(1, Math.ceil(this.xs.length / most));
    const rows = this.xs.map((_, i) => i).filter((i) => i % stride === 0 || i === this.xs.length - 1);
    const show = format[unit] || format.number;
    const caption = stride > 1 ? `Every ${stride}th of ${this.xs.length} points` : "";
    this.table.replaceChildren(this.table.firstElementChild, el("div", { class: "scroll", tabindex: "0" }, el("table", {},
      caption && el("caption", {}, caption),
      el("thead", {}, el("tr", {}, el("th", { scope: "col" }, axisNow("steps").name), time && el("th", { scope: "col" }, "time"),
        curves.map((curve) => el("th", { scope: "col" }, curve.name)))),
      el("tbody", {}, rows.map((i) => el("tr", {}, el("th", { scope: "row" }, axisNow("steps").place(steps[i])),
        time && el("td", {}, format.duration(time[i])), curves.map((curve) => el("td", {}, show(curve.values[i])))))))));
  }
}
