"use strict";

/* The runs in a folder: a table with links; several runs can be chosen to compare them. */
class ListPage {
  constructor() {
    this.chosen = new Set();
    this.place = new Place("section", {});
  }

  show(list) {
    this.list = list;
    return [this.place.show([list, [...this.chosen]], () => this.parts(list))];
  }

  link(...names) {
    const query = new URLSearchParams(location.search);
    query.delete("run");
    for (const name of names) query.append("run", name);
    return `?${query}`;
  }

  parts({ folder, runs }) {
    const compare = el("a", { class: "button", href: this.link(...this.chosen), "aria-disabled": String(this.chosen.size < 2), "data-key": "compare",
      on: { click: (event) => { if (this.chosen.size < 2) event.preventDefault(); } } },
      this.chosen.size < 2 ? "Choose two runs to compare" : `Compare ${this.chosen.size} runs`);
    return [
      el("header", { class: "head" }, el("h1", {}, "Runs"), el("p", { class: "command" }, el("code", {}, folder))),
      runs.length === 0 ? el("p", { class: "empty" }, "No run is here yet.") : [el("p", { class: "command" }, compare), table(["", "run", "state", "steps", "loss", "last change"], runs.map((run) => el("tr", {},
        el("td", {}, el("input", { type: "checkbox", "aria-label": `Compare ${run.name}`, "data-key": `choose ${run.name}`, checked: this.chosen.has(run.name),
          on: { change: (event) => {
            if (event.target.checked) this.chosen.add(run.name); else this.chosen.delete(run.name);
            this.show(this.list);
          } } })),
        el("th", { scope: "row", class: "text" }, el("a", { href: this.link(run.name), "data-key": `run ${run.name}` }, run.name)),
        el("td", { class: "text" }, el("span", { class: `state ${run.state.split(" ")[0]}` }, run.state)),
        el("td", { class: "meter", style: { "--part": `${run.total ? (100 * run.steps) / run.total : 0}%` } }, run.total ? `${format.count(run.steps)} of ${format.count(run.total)}` : format.count(run.steps)),
        el("td", {}, format.number(run.loss)), el("td", {}, run.changed ? format.date(run.changed) : UNKNOWN))))],
    ].flat();
  }
}
