"""The report in a real browser, Debian's chromium: no errors, no requests, zoom, keyboard, themes, a growing page."""

from __future__ import annotations

import json
import shutil
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from benchmarks.report_size import write_run
from tests.cli.command import PATIENCE_SECONDS, Command
from unisono.cli.planning.rate_page import RateReport, write_rate_page
from unisono.cli.scaling_curve.curve import PARTS, ScalePoint, ScalingCurve
from unisono.cli.scaling_curve.curve_report import CurveReport, write_scaling_page
from unisono.config import CommandLine
from unisono.report.report_page import write_page, write_report
from unisono.report.run_comparison import comparison_page
from unisono.report.run_files import RunFiles
from unisono.train.lr_range.rate_curve import RateCurve

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: pip install playwright")
CHROMIUM = shutil.which("chromium")
pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed: apt-get install chromium"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),  # of playwright's pipes
]

FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--disable-background-networking"]
FLAGS += ["--disable-component-update", "--disable-sync"]


@dataclass
class Tab:
    """A page of the browser, and what it complained about and asked for."""

    page: Any
    errors: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)

    @classmethod
    def open(cls, context: Any, url: str) -> Tab:
        tab = cls(context.new_page())
        tab.page.on("console", lambda message: tab.errors.append(message.text))
        tab.page.on("pageerror", lambda error: tab.errors.append(str(error)))
        tab.page.on("request", lambda request: tab.requests.append(request.url))
        tab.page.goto(url)
        return tab

    def wait(self, expression: str) -> None:
        """Wait until a JavaScript expression is true. (The page allows no eval inside itself.)"""
        until = time.monotonic() + PATIENCE_SECONDS
        while not self.page.evaluate(expression):
            assert time.monotonic() < until, f"never {expression}"
            self.page.wait_for_timeout(50)

    def range(self) -> list[float]:
        """Return the visible steps."""
        found: list[float] = self.page.evaluate("view.range || extent()")
        return found


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_report(write_run(tmp_path_factory.mktemp("run") / "mine", ranks=4, steps=2000))


@pytest.fixture
def tab(browser: Any, report: Path) -> Iterator[Tab]:
    context = browser.new_context(viewport={"width": 1300, "height": 900})
    tab = Tab.open(context, report.as_uri())
    yield tab
    assert tab.errors == []
    assert tab.requests == [report.as_uri()]
    context.close()


@pytest.mark.ci
def test_a_curve_is_zoomed_and_all_charts_follow(tab: Tab) -> None:
    plot = tab.page.locator(".plot .u-over").first
    box = plot.bounding_box()
    middle = box["y"] + box["height"] / 2
    tab.page.mouse.move(box["x"] + 0.25 * box["width"], middle)
    tab.page.mouse.down()
    tab.page.mouse.move(box["x"] + 0.5 * box["width"], middle, steps=4)
    tab.page.mouse.up()
    low, high = tab.range()
    assert low == pytest.approx(500, abs=15)
    assert high == pytest.approx(1000, abs=15)
    scales = tab.page.evaluate(
        "[...view.charts.values()].filter((c) => c.plot && c.isNear).map((c) => c.plot.scales.x.min)"
    )
    assert len(scales) > 2
    assert {round(scale) for scale in scales} == {round(low)}
    tab.page.get_by_role("button", name="time", exact=True).click()
    assert tab.page.evaluate("convert(view.range[0], 'time', 'steps')") == pytest.approx(low, abs=5)
    tab.page.get_by_role("group", name="Axis").get_by_role("button", name="steps").click()
    tab.page.mouse.dblclick(box["x"] + 0.4 * box["width"], middle)
    assert tab.range() == tab.page.evaluate("extent()")


def test_a_rank_is_chosen(tab: Tab) -> None:
    assert tab.page.locator("#rank-detail").count() == 0
    tab.page.locator('[data-key="rank 1"]').click()
    assert "Rank 1 on node0" in tab.page.locator("#rank-detail").inner_text()
    tab.page.get_by_role("button", name="own time of a step").click()
    tab.page.get_by_role("button", name="own time of a step").click()
    assert tab.page.locator(".ranks tbody tr").first.get_attribute("class") == "chosen", "the slowest one is the first"
    tab.page.locator(".map canvas").click(position={"x": 5, "y": 5})
    assert "Rank 0" in tab.page.locator("#rank-detail").inner_text()


def test_the_marks_of_events_have_a_legend(tab: Tab) -> None:
    marks = tab.page.locator(".marks .mark")
    assert marks.all_inner_texts() == ["checkpoint", "death", "join", "spike of the loss"]
    assert "line" not in str(marks.nth(0).get_attribute("class")).split()
    assert "line" in str(marks.nth(1).get_attribute("class")).split()


def test_only_commands_of_an_advice_are_code(tab: Tab) -> None:
    code = "[...withCode('--set threads=2; do it (if step.every(100): ...), or fewer --ranks, or wait')]"
    found = tab.page.evaluate(f"{code}.filter((part) => part.tagName).map((part) => part.textContent)")
    assert found == ["--set threads=2", "step.every(100)", "--ranks"]
    assert tab.page.locator(".finding p code").count() == 0, "to look at a host is no command"


def test_the_keyboard_moves_and_zooms(tab: Tab) -> None:
    plot = tab.page.locator(".plot").first
    plot.focus()
    for key in ("Home", "ArrowRight", "Shift+ArrowRight"):
        tab.page.keyboard.press(key)
    chart = tab.page.locator("figure.chart").first
    at = tab.page.evaluate("[...view.charts.values()][0].at")
    assert at == 11
    step = tab.page.evaluate("page.content.steps[11]")
    tab.wait(f"document.querySelector('figure.chart .spoken').textContent.startsWith('step {step} ')")
    whole = tab.range()
    tab.page.keyboard.press("+")
    assert tab.range()[1] - tab.range()[0] == pytest.approx((whole[1] - whole[0]) / 2)
    tab.page.keyboard.press("0")
    assert tab.range() == whole
    chart.locator("details.values summary").click()
    chart.locator("tbody tr").nth(20).wait_for()


@pytest.mark.slow
def test_themes_and_a_phone(browser: Any, report: Path) -> None:
    paper = {}
    for scheme in ("light", "dark"):
        context = browser.new_context(viewport={"width": 375, "height": 800}, color_scheme=scheme)
        tab = Tab.open(context, report.as_uri())
        paper[scheme] = tab.page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert tab.page.evaluate("document.documentElement.scrollWidth") == 375
        for _ in range(2):  # to light, to dark
            tab.page.locator("#theme").click()
        assert tab.page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(21, 23, 26)"
        assert tab.errors == []
        context.close()
    assert paper == {"light": "rgb(251, 251, 249)", "dark": "rgb(21, 23, 26)"}


def test_text_of_a_run_is_not_run(browser: Any, tmp_path: Path) -> None:
    evil = "<img src=x onerror=alert(1)></script><script>alert(2)</script>"
    run_dir = write_run(tmp_path / evil.replace("/", "|"), ranks=2, steps=9)
    (run_dir / "log" / "rank-0.log").write_text(evil)
    (run_dir / "environment.json").write_text(json.dumps({"command": evil, "host": evil}))
    finding = {"kind": evil, "severity": "high", "fact": evil, "evidence": [evil], "advice": evil, "gain": evil}
    path = tmp_path / "evil.html"
    write_page(path, write_report(run_dir, findings=[finding]).read_text())
    context = browser.new_context()
    tab = Tab.open(context, path.as_uri())
    tab.page.wait_for_selector("h1")
    assert evil.replace("/", "|") in tab.page.locator("h1").inner_text()
    assert tab.page.locator(".finding h3").inner_text() == evil
    assert tab.page.locator("img").count() == 0
    assert tab.page.locator("script").count() == 2
    assert (tab.errors, tab.requests) == ([], [path.as_uri()])
    context.close()


def test_runs_are_compared(browser: Any, tmp_path: Path) -> None:
    runs = [write_run(tmp_path / name, ranks=2, steps=steps) for name, steps in (("one", 300), ("two", 200))]
    files = [RunFiles(run) for run in runs]
    for each in files:
        each.read()
    path = tmp_path / "both.html"
    write_page(path, comparison_page(files))
    context = browser.new_context()
    tab = Tab.open(context, path.as_uri())
    assert tab.page.locator(".legend").first.inner_text().split()[::2] == ["one", "two"]
    assert "steps" in tab.page.locator("#differences").inner_text()
    assert tab.errors == []
    context.close()


def test_sixteen_runs_look_different(browser: Any, tmp_path: Path) -> None:
    files = [RunFiles(write_run(tmp_path / f"run{i}", ranks=1, steps=50)) for i in range(17)]
    for each in files:
        each.read()
    path = tmp_path / "all.html"
    write_page(path, comparison_page(files))
    context = browser.new_context(viewport={"width": 1300, "height": 900})
    tab = Tab.open(context, path.as_uri())
    first = "[...view.charts.values()][0]"
    tab.wait(f"{first}.plot")
    looks = tab.page.evaluate(f"{first}.plot.series.slice(1).map((s) => JSON.stringify([s.stroke(), s.dash]))")
    assert len(set(looks)) == len(files)
    for place in (".legend:first-of-type .chip i", "#overview .swatch, h1 ~ * .swatch"):
        marks = tab.page.evaluate(
            f"[...document.querySelectorAll('{place}')].slice(0, 17).map((e) => getComputedStyle(e).background)"
        )
        assert len(set(marks)) == len(files), place
    heads = tab.page.locator("table").first.locator("thead th").all_inner_texts()
    assert "time" in heads
    assert "seconds" not in heads
    assert tab.errors == []
    context.close()


def test_the_start_of_a_run_has_its_time_zone(browser: Any, tmp_path: Path) -> None:
    run = write_run(tmp_path / "one", ranks=1, steps=5)
    (run / "environment.json").write_text(json.dumps({"command": "train", "started": "2026-11-25 17:24:40+0000"}))
    context = browser.new_context()
    tab = Tab.open(context, write_report(run).as_uri())
    assert "2026-11-25 17:24:40 UTC" in tab.page.locator("p.command").first.inner_text()
    context.close()


TRAIN = """
import torch
from torch import nn

def main(run):
    data = torch.utils.data.TensorDataset(torch.randn(64, 4))
    model = run.place(lambda: nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    run.track(model=model, optimizer=optimizer)
    for step in run.steps(data):
        for (x,) in step:
            step.backward(model(x).square().sum(), weight=len(x))
        step.update(optimizer)
        if not Path("seen").exists():
            time.sleep(0.04 if step.number < 1300 else 1.0)

unisono.main(main)
"""


@pytest.mark.slow
def test_the_page_grows_while_a_run_trains(browser: Any, command: Command) -> None:
    """`unisono run --watch` prints an address. Seven tabs of one browser show the page, and its growth."""
    command.script(TRAIN)
    running = command.start("run", "script.py", "--ranks", "2", "--run-dir", "out", "--set", "steps=1400", "--watch")
    assert running.stderr is not None
    address = next(line for line in running.stderr if " at http://" in line).split(" at ")[1].strip()
    context = browser.new_context()
    tabs = [Tab.open(context, address) for _ in range(7)]
    seen = []
    for tab in tabs:
        tab.wait("page.content.steps?.length > 5")
        seen.append(tab.page.evaluate("page.content.steps.at(-1)"))
    for tab, before in zip(tabs, seen, strict=True):
        tab.wait(f"page.content.steps.at(-1) > {before}")
    assert tabs[0].page.locator(".state").inner_text() == "running"
    (command.folder / "seen").touch()  # the rest of the 1,400 steps need no browser
    tabs[0].wait("page.content.state === 'finished'")
    assert command.end(running).status == 0
    assert [tab.errors for tab in tabs] == [[] for _ in tabs]
    assert "1,400" in tabs[0].page.locator(".facts").inner_text()
    context.close()


@pytest.mark.slow
def test_a_run_is_stopped_with_the_button(browser: Any, command: Command) -> None:
    """The page of the first address has no button. That of the second one asks, and then the run saves and ends."""
    command.script(TRAIN)
    running = command.start("run", "script.py", "--ranks", "2", "--run-dir", "out", "--set", "steps=100000", "--watch")
    assert running.stderr is not None
    next(line for line in running.stderr if " at http://" in line)
    watching = command.start("watch", "out", "--stop")
    assert watching.stdout is not None
    look, stop = (watching.stdout.readline().split(" at ")[1].strip() for _ in range(2))
    context = browser.new_context()
    looking, stopping = Tab.open(context, look), Tab.open(context, stop)
    for tab in (looking, stopping):
        tab.wait("page.content.steps?.length > 5")
    assert [tab.page.locator("#stop").count() for tab in (looking, stopping)] == [0, 1]
    button = stopping.page.locator("#stop")
    stopping.page.once("dialog", lambda dialog: dialog.dismiss())
    button.click()
    assert button.inner_text() == "Stop"
    asked: list[str] = []

    def accept(dialog: Any) -> None:
        asked.append(dialog.message)
        dialog.accept()

    stopping.page.once("dialog", accept)
    button.click()
    stopping.wait("document.getElementById('stop').textContent === 'Stopping'")
    assert asked == ["Save and end this run?"]
    ended = command.end(running)
    assert ended.status == 0, ended.err
    found = json.loads((command.folder / "out" / "result.json").read_text())
    assert found["stopped"] is True
    assert found["steps"] < 100000
    stopping.wait("page.content.state !== 'running'")
    assert looking.errors + stopping.errors == []
    watching.send_signal(signal.SIGINT)
    context.close()


def test_places_of_a_range_test_are_rates(browser: Any, tmp_path: Path) -> None:
    rates = [10.0 ** (n / 4 - 5) for n in range(21)]
    curve = RateCurve(rates, [5.0 - 4 / (1 + 1e-3 / rate) for rate in rates], 21)
    found = {"points": [*rates], "start": 5.0, "ended": "all rates", "optimizers": ["SGD"], "groups": 1, "given": {}}
    path = tmp_path / "rates.html"
    write_rate_page(path, RateReport("<train>", curve, found, 21, 1e-5, 1.0, None, None))
    context = browser.new_context()
    tab = Tab.open(context, path.as_uri())
    plot = tab.page.locator(".plot").first
    plot.focus()
    tab.page.keyboard.press("Home")
    tab.wait("document.querySelector('figure.chart .spoken').textContent.startsWith('rate 1e-5')")
    tab.page.keyboard.press("+")
    assert tab.range()[1] - tab.range()[0] == pytest.approx(2.5, abs=0.1), "half of five powers of ten"
    assert tab.page.locator("h1").inner_text() == "Learning rates of <train>"
    assert f"{curve.rates[curve.steepest or 0]:.3g}" in tab.page.locator("main").inner_text()
    assert (tab.errors, tab.requests) == ([], [path.as_uri()])
    context.close()


def test_scaling_curves_have_all_numbers_of_processes(browser: Any, tmp_path: Path) -> None:
    def point(count: int, samples: int, seconds: float) -> ScalePoint:
        return ScalePoint(count, samples, seconds, {**dict.fromkeys(PARTS, 0.0), "compute": count * seconds})

    strong = ScalingCurve("strong", [point(1, 8, 4.0), point(2, 8, 2.5), point(4, 8, 2.0)])
    weak = ScalingCurve("weak", [point(1, 8, 4.0), point(4, 32, 5.0)])
    line = CommandLine(("unisono", "run", "<train>.py", "--ranks", "4"))
    write_scaling_page(tmp_path / "page.html", CurveReport("<train>", [strong, weak], 2, 1, ["<b>note"], line))
    context = browser.new_context(viewport={"width": 1300, "height": 900})
    tab = Tab.open(context, (tmp_path / "page.html").as_uri())
    tab.wait("document.querySelectorAll('canvas').length == 2")
    assert tab.page.inner_text("h1") == "Scaling of <train>"
    rows = [row.inner_text().split("\t")[:5] for row in tab.page.query_selector_all("tbody tr")]
    assert [row[0] for row in rows] == ["1", "2", "4", "1", "4"]
    assert [row[4] for row in rows] == ["100%", "80%", "50%", "100%", "80%"]
    assert tab.errors == []
    assert tab.requests == [(tmp_path / "page.html").as_uri()]
    context.close()
