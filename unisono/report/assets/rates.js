"use strict";

/* The page of a learning-rate range test: the loss over the logarithm of the rate. Places of the axis are powers of 10. */
const RATE_INCREMENTS = [0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5];
const NOTE = "Dashed lines: the steepest descent, and the lowest smoothed loss. Losses far above the first one are outside.";
const rateText = (rate) => (rate == null ? UNKNOWN : format.number(Number(rate.toPrecision(3))));

class RatePage extends RunPage {
  show({ name, rates, losses, smoothed, start, suggestion, steepest, minimum, findings, line }) {
    const places = rates.map(Math.log10), mark = (rate, kind, text) => rate && { steps: Math.log10(rate), kind, text };
    view.words = {
      name: "rate", least: 0.05, increments: RATE_INCREMENTS,
      place: (x) => rateText(10 ** x), tick: (x) => format.number(Number((10 ** x).toPrecision(2))),
    };
    view.scale = { steps: places.length ? places : [0, 1], time: [0, 1] };
    view.marks = [mark(steepest, "join", "steepest descent"), mark(minimum, "resume", "lowest loss")].filter(Boolean);
    const curves = [
      { name: "loss of a step", color: "--c1", values: losses, dots: true },
      { name: "smoothed", color: "--c0", values: smoothed },
    ];
    const facts = [
      ["suggested rate", rateText(suggestion)], ["steepest descent", rateText(steepest)], ["lowest loss at", rateText(minimum)],
      ["lowest loss", format.number(smoothed.length ? Math.min(...smoothed) : null)], ["loss before training", format.number(start)],
    ];
    return [
      this.head.show([name, facts, line], () => [
        el("h1", {}, `Learning rates of ${name}`),
        line && el("p", { class: "command" }, el("code", {}, line)),
        el("dl", { class: "facts" }, facts.map(([fact, value]) => el("div", {}, el("dt", {}, fact), el("dd", {}, value)))),
        ...findings.map((text) => el("p", { class: "note" }, text)),
      ]),
      rates.length > 0 && this.section("Loss by learning rate",
        Chart.of({ id: "rates", title: "Loss", unit: "number", steps: places, curves, log: true, height: 420, note: NOTE, top: 1.1 * Math.max(...smoothed, start ?? 0) })),
    ].filter(Boolean);
  }
}
