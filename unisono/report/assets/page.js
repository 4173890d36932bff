"use strict";

/* Start: show the data of the page, and, when a server is behind it, ask for news. */

const POLL_MS = 1000, SLOW_POLL_MS = 5000;
const THEMES = { auto: "◐", light: "☀", dark: "☾" };

const page = JSON.parse(document.getElementById("data").textContent);
const shown = new { run: RunPage, compare: ComparePage, list: ListPage, rates: RatePage, scaling: ScalingPage }[page.kind]();
const main = el("main");
const links = el("nav", { "aria-label": "Sections" });
const liveState = el("span", { class: "live", role: "status" });

const themeButton = el("button", { type: "button", class: "small", id: "theme", on: { click: () => {
  const names = Object.keys(THEMES);
  setTheme(names[(names.indexOf(document.documentElement.dataset.theme) + 1) % names.length]);
} } });
const resetButton = el("button", { type: "button", class: "small", id: "reset", disabled: true, on: { click: () => setView(null) } }, "Reset zoom");
const axisButtons = ["steps", "time"].map((axis) => el("button", { type: "button", "aria-pressed": String(axis === view.axis), on: { click: () => {
  setAxis(axis);
  for (const button of axisButtons) button.setAttribute("aria-pressed", String(button.textContent === axis));
} } }, axis));
view.changed = () => { resetButton.disabled = view.range == null; };

function setTheme(name) {
  document.documentElement.dataset.theme = name;
  themeButton.textContent = THEMES[name];
  themeButton.title = `Theme: ${name}`;
  themeButton.setAttribute("aria-label", `Theme: ${name}`);
  try { localStorage.setItem("theme", name); } catch { /* a page from a file may have no storage */ }
  repaint();
}

function repaint() {
  for (const chart of view.charts.values()) chart.plot?.redraw(true);
  shown.map?.draw();
}

function show(content) {
  setChildren(main, shown.show(content));
  const sections = [...main.querySelectorAll("section[id]")];
  const names = sections.map((section) => section.firstElementChild.textContent);
  if (names.join("\n") !== links.dataset.names) {
    links.dataset.names = names.join("\n");
    links.replaceChildren(...sections.map((section, i) => el("a", { href: `#${section.id}` }, names[i])));
  }
}

/* Ask the server for news, once a second while the page is visible. */
async function follow() {
  let wait = POLL_MS;
  if (!document.hidden) {
    try {
      const answer = await fetch(`data${location.search}&since=${encodeURIComponent(page.version)}`, { cache: "no-store" });
      if (answer.status === 200) {
        Object.assign(page, await answer.json());
        show(page.content);
      } else if (answer.status !== 204) throw new Error(answer.statusText);
      liveState.textContent = page.content.state && page.content.state !== "running" ? page.content.state : "live";
      liveState.classList.remove("lost");
      if (page.content.state && page.content.state !== "running") wait = SLOW_POLL_MS;
    } catch {
      liveState.textContent = "no connection";
      liveState.classList.add("lost");
      wait = SLOW_POLL_MS;
    }
  }
  clearTimeout(follow.timer);
  follow.timer = setTimeout(follow, wait);
}

/* Ask the server to stop the run. It answers with what happens, or why it cannot. */
const stopButton = el("button", { type: "button", class: "small", id: "stop", on: { click: async () => {
  if (!confirm("Save and end this run?")) return;
  stopButton.disabled = true;
  try {
    const answer = await fetch(`stop${location.search}`, { method: "POST", cache: "no-store" });
    stopButton.title = (await answer.text()).trim();
    stopButton.textContent = answer.ok ? "Stopping" : "Not stopped";
    stopButton.disabled = answer.ok;
  } catch {
    stopButton.textContent = "Not stopped";
    stopButton.disabled = false;
  }
} } }, "Stop");

let theme = "auto";
try { theme = localStorage.getItem("theme") || theme; } catch { /* no storage */ }
setTheme(theme in THEMES ? theme : "auto");
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", repaint);
document.getElementById("page").append(
  el("div", { class: "top" }, page.back && el("a", { href: page.back, class: "back" }, "All runs"), links,
    el("div", { class: "tools" }, liveState, page.kind === "run" && el("div", { class: "switch", role: "group", "aria-label": "Axis" }, axisButtons),
      page.kind !== "list" && resetButton, document.getElementById("page").dataset.stops ? stopButton : null, themeButton)),
  main,
);
show(page.content);
if (document.getElementById("page").dataset.live) {
  document.addEventListener("visibilitychange", () => { if (!document.hidden) { clearTimeout(follow.timer); follow(); } });
  follow();
}
