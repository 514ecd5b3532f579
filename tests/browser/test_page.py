"""A run's page in a real browser: what it shows is what the run's records say, for each reader, with each tool."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from axe_core_python.selenium import Axe
from selenium.webdriver.common.by import By

from bench.chromium import Browser
from trainer.report.html import render
from trainer.report.summary import read_summary
from trainer.run.directory import RunDirectory

# The series of a figure as it is drawn: [{name, data}], by the figure's kind and name.
SERIES = """
const found = window.psfleet.figures.find(({box, kind}) => kind === arguments[0] && box.dataset.name === arguments[1]);
return found.chart.getOption().series.map(({name, data}) => ({name, data}));
"""
# How much of a figure's canvas is of a colour of the style sheet, or nearly.
PAINTED = """
const [kind, name, colour] = arguments;
const found = window.psfleet.figures.find((each) => each.kind === kind && each.box.dataset.name === name);
const hex = getComputedStyle(document.documentElement).getPropertyValue(`--${colour}`).trim();
const wanted = [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16));
const canvas = found.box.querySelector("canvas");
const pixels = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
let count = 0;
for (let at = 0; at < pixels.length; at += 4) {
  if (pixels[at + 3] > 200 && wanted.every((part, number) => Math.abs(pixels[at + number] - part) < 24)) count += 1;
}
return count;
"""
# Where a figure shows a mark of the run, in pixels of its box.
PLACE_OF_MARK = """
const [name, number, over] = arguments;
const found = window.psfleet.figures.find(({box, kind}) => kind === "curve" && box.dataset.name === name);
const mark = window.psfleet.runs[0].marks[number];
const x = over === "time" ? mark.t * 1000 : mark.step;
return [found.chart.convertToPixel({xAxisIndex: 0}, x), found.chart.getHeight() / 2];
"""
TIP = """
const shown = [...document.querySelectorAll(".tip")].filter((each) => getComputedStyle(each.parentElement).opacity > 0.5
  && getComputedStyle(each.parentElement).visibility !== "hidden");
return shown.map((each) => each.textContent).join(" | ");
"""
BACKGROUND = "return getComputedStyle(document.body).backgroundColor"


def records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("name", ["night", "two", "large"])
def test_a_page_opens_without_a_complaint_and_fetches_nothing(
    browser: Browser, pages: dict[str, Path], name: str
) -> None:
    browser.open(pages[name])
    browser.run("document.querySelector('input[value=step]').click()")
    browser.wait("return psfleet.figures.every(({chart}) => chart)")
    assert browser.complaints() == []
    assert browser.fetched() == [pages[name].as_uri()]
    assert pages[name].stat().st_size < 3_000_000


def test_what_a_page_asks_of_others_would_be_seen(browser: Browser, pages: dict[str, Path], tmp_path: Path) -> None:
    """The tests above can fail: a page that does ask is told on, and is stopped by its own policy."""
    page = tmp_path / "leaks.html"
    page.write_text(pages["night"].read_text().replace("<footer>", '<img src="https://example.org/a.png"><footer>'))
    browser.open(page)
    assert any("Content Security Policy" in each for each in browser.complaints())


def test_curves_have_the_numbers_of_the_records(browser: Browser, pages: dict[str, Path], night: RunDirectory) -> None:
    browser.open(pages["night"])
    rows = [line for line in records(night.history) if "step" in line]
    for name in ("loss", "accuracy"):
        training, evaluation = browser.run(SERIES, "curve", name)[:2]
        drawn = [point for point in training["data"] if point[0] is not None]
        assert drawn == [[pytest.approx(row["t"] * 1000), pytest.approx(row["values"][name], 1e-4)] for row in rows]
        points = [(line["t"], line["values"][name]) for line in records(night.evaluations)]
        assert evaluation["data"] == [[pytest.approx(t * 1000, abs=60), pytest.approx(v, 1e-4)] for t, v in points]
    speeds = browser.run(SERIES, "curve", "steps per second")[0]["data"]
    assert [y for x, y in speeds if x is not None] == [pytest.approx(row["speed"], 1e-4) for row in rows]
    # The same points over steps.
    browser.run("document.querySelector('input[value=step]').click()")
    over_steps = [point for point in browser.run(SERIES, "curve", "loss")[0]["data"] if point[0] is not None]
    assert [x for x, _ in over_steps] == [row["step"] for row in rows]


def test_examples_per_second_are_steps_times_the_batch(
    browser: Browser, pages: dict[str, Path], night: RunDirectory
) -> None:
    browser.open(pages["night"])
    [batch] = {line["batch"] for line in records(night.history) if "batch" in line}
    speeds = [y for x, y in browser.run(SERIES, "curve", "steps per second")[0]["data"] if x is not None]
    examples = [y for x, y in browser.run(SERIES, "curve", "examples per second")[0]["data"] if x is not None]
    assert examples == [pytest.approx(speed * batch, 1e-3) for speed in speeds]


def test_the_top_says_the_result(browser: Browser, pages: dict[str, Path], night: RunDirectory) -> None:
    browser.open(pages["night"])
    status = json.loads(night.status.read_text())
    evaluation = json.loads(night.evaluation.read_text())
    tiles = {
        tile.find_element(By.TAG_NAME, "dt").text: tile.find_element(By.TAG_NAME, "dd").text.split("\n")[0]
        for tile in browser.driver.find_elements(By.CSS_SELECTOR, ".tiles div")
    }
    assert tiles["steps"] == f"{status['step']:,}"
    assert tiles["goodput"] == f"{100 * status['ledger']['goodput']:.1f} %"
    assert float(tiles["evaluation accuracy"]) == pytest.approx(evaluation["metrics"]["accuracy"], 1e-3)
    lost = sum(event.get("steps_lost") or 0 for event in records(night.event_log))
    assert f"{lost:,} steps lost" in browser.driver.find_element(By.CLASS_NAME, "tiles").text
    assert tiles["faults"] == "5"  # of which the run was made


def test_each_figure_is_painted(browser: Browser, pages: dict[str, Path]) -> None:
    browser.open(pages["night"])
    browser.run("scrollTo(0, document.body.scrollHeight)")
    for kind, name, colour, least in (
        ("curve", "loss", "run-0", 60),
        ("curve", "loss", "run-1", 60),
        ("curve", "loss", "fault", 30),
        ("curve", "steps per second", "run-0", 100),
        ("time", "", "productive", 5000),
        ("lanes", "", "training", 5000),
        ("lanes", "", "silent", 100),
        ("saves", "", "run-0", 60),
        ("memory", "", "run-0", 40),
        ("processor", "", "run-0", 40),
    ):
        assert browser.run(PAINTED, kind, name, colour) > least, (kind, name, colour)


@pytest.mark.parametrize("over", ["time", "step"])
def test_marks_under_the_mouse_say_what_and_where_and_for_how_long_and_what_it_cost(
    browser: Browser, pages: dict[str, Path], night: RunDirectory, over: str
) -> None:
    browser.open(pages["night"])
    browser.run("document.querySelector(`input[value=${arguments[0]}]`).click()", over)
    marks = browser.run("return psfleet.runs[0].marks")
    [number] = [at for at, mark in enumerate(marks) if mark["event"] == "ps-lost"]
    [event] = [event for event in records(night.event_log) if event["event"] == "ps-lost"]
    cost = next(
        each["steps_lost"]
        for each in records(night.event_log)
        if each["event"] == "restored" and each["time"] > event["time"]
    )
    x, y = browser.run(PLACE_OF_MARK, "loss", number, over)
    browser.hover(browser.driver.find_element(By.CSS_SELECTOR, '[data-name="loss"]'), x, y)
    text = browser.wait(TIP)
    assert "parameter server lost" in text
    assert f"{event['task']} at {event['host']}" in text
    assert re.search(r"lasted [\d.]+ (s|min)", text)
    assert f"{cost:,} steps lost" in text
    assert event["message"] in text


def test_lanes_and_shares_are_those_of_the_records(
    browser: Browser, pages: dict[str, Path], night: RunDirectory
) -> None:
    browser.open(pages["night"])
    steps_by_task: dict[str, int] = {}
    states: dict[str, set[str]] = {}
    for line in records(night.history):
        for task, steps in line.get("gave", {}).items():
            steps_by_task[task] = steps_by_task.get(task, 0) + steps
        for task, state in line.get("members", {}).items():
            states.setdefault(task, set()).add(state)
    table = browser.driver.find_element(By.XPATH, "//h3[.='Steps that each worker gave']/..").text
    for task, steps in steps_by_task.items():
        assert re.search(rf"{task} {steps:,}\b", table)
    lanes = {lane["task"]: {span[2] for span in lane["spans"]} for lane in browser.run("return psfleet.runs[0].lanes")}
    assert {"chief-0", *states} == set(lanes)
    for task, seen in states.items():
        assert lanes[task] <= seen, task
    assert "away" in lanes["chief-0"]  # while there was none
    assert "silent" in lanes["worker-0"]


def test_two_runs_share_their_axes_and_the_page_says_what_differs(browser: Browser, pages: dict[str, Path]) -> None:
    browser.open(pages["two"])
    names = [series["name"] for series in browser.run(SERIES, "curve", "loss") if not series["name"].startswith("mark")]
    assert names == ["night, training", "night, evaluation", "fast, training", "fast, evaluation"]
    differs = browser.driver.find_element(By.XPATH, "//h2[.='What differs']/..").text
    assert re.search(r"parameter learning_rate 0.001 0.003", differs)
    results = browser.driver.find_element(By.XPATH, "//h2[.='Results']/..").text
    assert re.search(r"faults 5 0", results)
    assert browser.run(PAINTED, "curve", "loss", "run-0") > 60
    assert browser.run(PAINTED, "curve", "loss", "run-1") > 60


def test_a_log_scale_shows_small_losses(browser: Browser, pages: dict[str, Path]) -> None:
    browser.open(pages["night"])
    kind = "return psfleet.figures.find(({box}) => box.dataset.name === arguments[0]).chart.getOption().yAxis[0].type"
    assert browser.run(kind, "loss") == "value"
    browser.run("document.getElementById('log').click()")
    assert browser.run(kind, "loss") == "log"
    assert browser.run(kind, "accuracy") == "value"
    assert browser.complaints() == []


def test_zoom_is_the_same_in_all_curves_and_is_taken_back(browser: Browser, pages: dict[str, Path]) -> None:
    curves = "psfleet.figures.filter(({kind}) => kind === 'curve')"
    shown = f"return {curves}.map(({{chart}}) => chart.getOption().dataZoom[0].end)"
    browser.open(pages["night"])
    browser.run("psfleet.figures[1].chart.dispatchAction({type: 'dataZoom', start: 10, end: 40})")
    assert set(browser.wait(f"{shown}.every((end) => end === 40) && ({shown.removeprefix('return ')})")) == {40}
    browser.driver.find_element(By.ID, "whole").click()
    assert set(browser.run(shown)) == {100}


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("name", ["night", "two"])
def test_everybody_can_read_it(browser: Browser, pages: dict[str, Path], name: str, scheme: str) -> None:
    """By axe-core's rules, of which contrast is one, as WCAG 2.1 AA has them."""
    with browser.media(scheme=scheme):
        browser.open(pages[name])
        browser.run("document.querySelectorAll('details').forEach((each) => { each.open = true; })")
        found = Axe().run(browser.driver, options={"runOnly": ["wcag2a", "wcag2aa", "wcag21aa", "best-practice"]})
    assert [(each["id"], each["nodes"][0]["html"][:200]) for each in found["violations"]] == []
    assert "color-contrast" in {each["id"] for each in found["passes"]}


def test_figures_are_told_in_words(browser: Browser, pages: dict[str, Path]) -> None:
    browser.open(pages["night"])
    figures = browser.driver.find_elements(By.TAG_NAME, "figure")
    assert len(figures) >= 8
    for each in figures:
        caption = each.find_element(By.TAG_NAME, "figcaption").text
        label = each.find_element(By.CSS_SELECTOR, "[role=img]").get_attribute("aria-label")
        assert caption
        assert caption in str(label)


def test_dark_is_dark_and_is_drawn_again(browser: Browser, pages: dict[str, Path]) -> None:
    browser.open(pages["night"])
    light = browser.run(BACKGROUND)
    with browser.media(scheme="dark"):
        browser.wait(f"{BACKGROUND} !== arguments[0]", light)
        assert (
            sum(map(int, re.findall(r"\d+", browser.run(BACKGROUND))[:3]))
            < 150
            < sum(map(int, re.findall(r"\d+", light)))
        )
        # The lines have the dark scheme's colour by now, which is that of the style sheet.
        assert browser.wait(f"return (() => {{ {PAINTED} }})(...arguments) > 60", "curve", "loss", "run-0")


@pytest.mark.parametrize("name", ["night", "two", "large"])
def test_a_phone_needs_no_sideways_scrolling(browser: Browser, pages: dict[str, Path], name: str) -> None:
    browser.size(390, 844, mobile=True)
    browser.open(pages[name])
    assert browser.run("return document.documentElement.scrollWidth") <= 390
    widths = browser.run("return psfleet.figures.map(({chart}) => chart.getWidth())")
    assert 250 < min(widths) <= max(widths) < 390


def test_a_phone_shows_each_fault_and_each_share_whole(browser: Browser, pages: dict[str, Path]) -> None:
    browser.size(390, 844, mobile=True)
    browser.open(pages["night"])
    hidden = browser.run("""
      return [...document.querySelectorAll('.table')].filter((each) => each.querySelector('.marks, .bars'))
        .map((each) => each.scrollWidth - each.clientWidth);
    """)
    assert len(hidden) == 4  # time, steps of the workers, placement, faults
    assert max(hidden) == 0
    text = browser.driver.find_element(By.CSS_SELECTOR, ".marks").text
    assert re.search(r"6,168\s+parameter server lost", text)


def test_a_sheet_cuts_off_no_figure_and_no_table(browser: Browser, pages: dict[str, Path], tmp_path: Path) -> None:
    """A4 has 717 pixels between a browser's margins, Letter 739."""
    browser.open(pages["night"])
    sizes = "return psfleet.figures.map(({box}) => [box.clientWidth, box.querySelector('canvas').clientWidth])"
    before = browser.run(sizes)
    browser.run(f"addEventListener('beforeprint', () => {{ window.printed = (() => {{ {sizes} }})(); }})")
    browser.print(tmp_path / "night.pdf")
    printed = browser.run("return window.printed")
    assert len(printed) >= 8
    for box, canvas in printed:
        assert 200 < canvas == box <= 717
    assert browser.run(sizes) == before
    with browser.media("print"):
        browser.wait("return document.documentElement.classList.contains('sheet')")
        assert browser.run("return Math.max(...psfleet.figures.map(({box}) => box.clientWidth))") <= 717
        tables = browser.run("return [...document.querySelectorAll('.table')].map((each) => each.scrollWidth)")
    assert max(tables) <= 717


def test_a_print_has_all_figures_within_the_sheet(browser: Browser, pages: dict[str, Path], tmp_path: Path) -> None:
    browser.open(pages["night"])
    browser.print(tmp_path / "night.pdf")
    printed = (tmp_path / "night.pdf").read_bytes()
    assert printed.startswith(b"%PDF")
    assert 2 <= len(re.findall(rb"/Type\s*/Page\b", printed)) <= 8
    with browser.media("print"):
        assert browser.run("return getComputedStyle(document.querySelector('.hint')).display") == "none"
        assert browser.run("return document.documentElement.scrollWidth") <= 1280


def test_a_page_of_a_long_night_has_all_of_it(browser: Browser, pages: dict[str, Path]) -> None:
    browser.open(pages["large"])
    series = browser.run("return psfleet.runs[0].series.values")
    assert sum(map(len, series.values())) >= 99_000
    assert len(browser.run("return psfleet.runs[0].marks")) >= 990
    assert browser.run(PAINTED, "curve", "loss", "fault") > 100


def test_gpus_are_drawn_where_there_are_any(browser: Browser, tmp_path: Path, night: RunDirectory) -> None:
    """The use is a stand-in: the run was recorded without GPUs."""
    shutil.copytree(night.path, tmp_path / "runs" / "night")
    directory = RunDirectory(tmp_path, "night")
    path = directory.tasks / "worker-0.jsonl"
    lines = [{**line, "gpu": 0.75, "gpu_memory": 3 * 2**30} for line in records(path)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    page = tmp_path / "gpus.html"
    page.write_text(render([read_summary(directory)]), encoding="utf-8")
    browser.open(page)
    assert browser.complaints() == []
    drawn = {kind: browser.run(SERIES, kind, "") for kind in ("gpu", "gpu_memory")}
    assert [each["name"] for each in drawn["gpu"]] == ["worker-0"]
    assert {y for _, y in drawn["gpu"][0]["data"]} == {75}
    assert {y for _, y in drawn["gpu_memory"][0]["data"]} == {3}  # GiB


def test_what_a_run_says_is_text_in_a_browser_too(browser: Browser, tmp_path: Path) -> None:
    from tests.unit.test_report_page import hostile_run

    page = tmp_path / "hostile.html"
    page.write_text(render([read_summary(hostile_run(tmp_path))]), encoding="utf-8")
    browser.open(page)
    assert browser.complaints() == []
    assert browser.fetched() == [page.as_uri()]
    assert browser.run("return document.querySelectorAll('main img, main script').length") == 0
