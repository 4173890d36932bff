"use strict";

/* Numbers, times and sizes as text, and elements of the page. Text of a run only ever becomes text nodes. */

const UNKNOWN = "–";

const format = {
  number(v) {
    if (v == null) return UNKNOWN;
    if (typeof v !== "number") return String(v);
    const size = Math.abs(v);
    if (size !== 0 && (size < 1e-3 || size >= 1e7)) return v.toExponential(3).replace(/\.?0+e/, "e").replace("e+", "e");
    if (size >= 1e4) return Math.round(v).toLocaleString("en-US");
    return String(Number(v.toPrecision(5)));
  },
  count: (v) => (v == null ? UNKNOWN : typeof v === "number" ? Math.round(v).toLocaleString("en-US") : String(v)),
  share(v) {
    if (v == null) return UNKNOWN;
    const percent = 100 * v;
    return `${percent !== 0 && Math.abs(percent) < 9.95 ? Number(percent.toPrecision(2)) : Math.round(percent)}%`;
  },
  seconds(v) {
    if (v == null) return UNKNOWN;
    const size = Math.abs(v);
    if (size === 0) return "0 s";
    if (size < 1e-3) return `${Number((v * 1e6).toPrecision(3))} µs`;
    if (size < 0.9995) return `${Number((v * 1e3).toPrecision(3))} ms`;
    if (size < 99.95) return `${Number(v.toPrecision(3))} s`;
    return format.duration(v);
  },
  /* 0:42, 12:34, 3:00:05, 2d 03h */
  duration(v) {
    if (v == null) return UNKNOWN;
    const whole = Math.max(0, Math.round(v));
    const two = (n) => String(n).padStart(2, "0");
    const minutes = Math.floor(whole / 60), hours = Math.floor(whole / 3600), days = Math.floor(whole / 86400);
    if (days >= 2) return `${days}d ${two(hours % 24)}h`;
    if (hours) return `${hours}:${two(minutes % 60)}:${two(whole % 60)}`;
    return `${minutes}:${two(whole % 60)}`;
  },
  bytes(v) {
    if (v == null) return UNKNOWN;
    const units = ["B", "kB", "MB", "GB", "TB", "PB"];
    let place = 0, size = v;
    while (Math.abs(size) >= 999.5 && place < units.length - 1) { size /= 1000; place += 1; }
    return `${Number(size.toPrecision(3))} ${units[place]}`;
  },
  rate(v) {
    if (v == null) return UNKNOWN;
    for (const [size, unit] of [[1e9, " G"], [1e6, " M"], [1e3, " k"]]) {
      if (v >= 0.9995 * size) return Number((v / size).toPrecision(3)) + unit;
    }
    return String(Number(v.toPrecision(3)));
  },
  "per second": (v) => (v == null ? UNKNOWN : `${format.rate(v)}/s`),
  joules: (v) => (v == null ? UNKNOWN : `${format.rate(v)}${v < 999.5 ? " " : ""}J`),
  "bytes/s": (v) => (v == null ? UNKNOWN : `${format.bytes(v)}/s`),
  cores: (v) => (v == null ? UNKNOWN : Number(v.toPrecision(3)).toString()),
  watts: (v) => (v == null ? UNKNOWN : `${Number(v.toPrecision(3))} W`),
  celsius: (v) => (v == null ? UNKNOWN : `${Number(v.toPrecision(3))} °C`),
  date: (t) => new Date(1000 * t).toLocaleString("en-GB", { dateStyle: "medium", timeStyle: "medium" }),
};

/* Create an element: el("a", { href, class, on: { click } }, "text", child, ...). */
function el(name, attributes, ...children) {
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(attributes || {})) {
    if (value == null || value === false) continue;
    if (key === "on") for (const [event, call] of Object.entries(value)) element.addEventListener(event, call);
    else if (key === "style") for (const [property, to] of Object.entries(value)) element.style.setProperty(property, to);
    else element.setAttribute(key, value === true ? "" : value);
  }
  element.append(...children.flat(Infinity).filter((child) => child != null && child !== false));
  return element;
}

const plural = (n, one, many = `${one}s`) => `${format.count(n)} ${n === 1 ? one : many}`;

/* Replace the children only where they differ, so that focus and scrolling stay. */
function setChildren(parent, children) {
  const wanted = children.filter(Boolean);
  if (wanted.length !== parent.childNodes.length || wanted.some((child, i) => parent.childNodes[i] !== child)) {
    parent.replaceChildren(...wanted);
  }
}

/* A place whose content is made again only when `content` (anything that JSON can hold) has changed. Opened parts
   (details with data-key) stay open, and the focus stays on the element with the same data-key. */
class Place {
  constructor(name = "div", attributes = {}) {
    this.element = el(name, attributes);
    this.known = "";
  }

  show(content, make) {
    const text = JSON.stringify(content);
    if (text === this.known) return this.element;
    this.known = text;
    const open = [...this.element.querySelectorAll("details[open][data-key]")].map((each) => each.dataset.key);
    const focus = this.element.contains(document.activeElement) ? document.activeElement.dataset.key : null;
    const scrolled = [...this.element.querySelectorAll(".scroll")].map((each) => each.scrollTop);
    this.element.replaceChildren(...[make(content)].flat().filter(Boolean));
    for (const each of this.element.querySelectorAll("details[data-key]")) each.open ||= open.includes(each.dataset.key);
    this.element.querySelectorAll(".scroll").forEach((each, i) => { each.scrollTop = scrolled[i] || 0; });
    if (focus) this.element.querySelector(`[data-key="${CSS.escape(focus)}"]`)?.focus();
    return this.element;
  }
}
