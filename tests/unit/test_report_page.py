"""A run's page: what it tells from which records, and that nothing which a run has said becomes markup or script."""

from __future__ import annotations

import hashlib
import html
import itertools
import json
import re
import time
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from trainer.__main__ import main
from trainer.report import html as pages
from trainer.report import lanes as member_lanes
from trainer.report import sections, summary
from trainer.report.curves import thin_rows
from trainer.report.html import ASSETS, LIBRARY, PageWriter, render, to_data
from trainer.report.records import RunRecords
from trainer.report.summary import read_summary, summarize
from trainer.report.text import describe_curve, describe_lanes, describe_shares, duration
from trainer.run.directory import RunDirectory

# What the page carries of Apache ECharts. To renew it: `npm pack echarts`, take dist/echarts.min.js, LICENSE and NOTICE
# out of the archive, name the new file with its version here and in trainer/report/html.py, run
# `sha256sum trainer/report/assets/echarts*`, then `make test-browser`, and look at the page.
HASHES = {
    "echarts-6.1.0.min.js": "b66b25aeb4df84e33199dc21694014d336d222cbd9deb0e5a7c14bd6aa0d0fd0",
    "echarts-LICENSE": "634293835b43a6dd2094fa39182a3d9a6b9ca43b7fdb9ac354e8037af2a3093a",
    "echarts-NOTICE": "d491d358344f842685c1b1585970999db65fe30ecf7ef3867af8814f4016c016",
}
BEGAN = 1_700_000_000.0
HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)>\"'&`<!--\u2028${title}"


@pytest.fixture
def directory(tmp_path: Path) -> RunDirectory:
    """A run whose ps died once: 50 of 350 steps were lost."""
    directory = RunDirectory(tmp_path, "night")
    directory.path.mkdir(parents=True)
    record(
        directory.settings, created=BEGAN, program="net:Net", program_args={"rate": 0.1}, settings={"strategy": "one"}
    )
    record(
        directory.status, run="night", state="finished", step=500, steps=500, loss=0.25, metrics={"accuracy": 0.9},
        workers={"worker-0": {"staleness": 0.75, "staleness_max": 2},
                 "worker-1": {"staleness": 1.5, "staleness_max": 9}},
        updated=BEGAN + 100, ledger={"productive": 80, "down": 20, "goodput": 0.8, "elapsed": 100},
    )  # fmt: skip
    record(directory.evaluation, step=500, metrics={"loss": 0.5, "accuracy": 0.8}, updated=BEGAN + 100)
    numbers = [
        {
            "t": BEGAN + n * 10,
            "step": n * 50,
            "speed": 5,
            "values": {"loss": 2 / (n + 1)},
            "ledger": {"productive": n * 8, "down": n * 2},
        }
        for n in range(11)
    ]
    states = [{"t": BEGAN, "members": {"ps-0": "training"}}, {"t": BEGAN + 70, "members": {"ps-0": "closed"}},
              {"t": BEGAN + 75, "members": {"ps-0": "training"}}]  # fmt: skip
    lines(directory.history, *numbers, *states, {"t": BEGAN + 99, "gave": {"worker-0": 300, "worker-1": 100}})
    lines(
        directory.event_log,
        {"time": BEGAN, "event": "started"},
        {"time": BEGAN + 1, "event": "training", "seconds": 1, "message": "step 1"},
        {"time": BEGAN + 40, "event": "checkpoint-saved", "seconds": 0.5, "message": "step 200", "size": 2**20},
        {"time": BEGAN + 70, "event": "ps-lost", "task": "ps-0", "host": "10.0.0.1:2222", "message": "has ended"},
        {"time": BEGAN + 71, "event": "recovering", "message": "ps-0 has ended"},
        {"time": BEGAN + 76, "event": "restored", "steps_lost": 50, "message": "step 300"},
        {"time": BEGAN + 78, "event": "training", "seconds": 7, "message": "step 310"},
        {"time": BEGAN + 100, "event": "finished", "message": "step 500"},
    )
    return directory


def record(path: Path, **values: Any) -> None:
    path.write_text(json.dumps(values), encoding="utf-8")


def lines(path: Path, *records: Any) -> None:
    path.write_text("".join(json.dumps(each) + "\n" for each in records), encoding="utf-8")


def test_what_the_page_carries_is_what_was_fetched() -> None:
    found = {name: hashlib.sha256((ASSETS / name).read_bytes()).hexdigest() for name in HASHES}
    assert found == HASHES
    assert LIBRARY in HASHES
    assert {path.name for path in ASSETS.iterdir()} == {*HASHES, "page.html", "page.css", "page.js", "board.js"}


def test_no_asset_ends_the_script_or_style_that_holds_it() -> None:
    for name in (LIBRARY, "page.js", "page.css"):
        assert not re.search(r"</(script|style)|<!--", (ASSETS / name).read_text(encoding="utf-8"), re.IGNORECASE), name


def test_a_fault_is_told_with_what_it_cost(directory: RunDirectory) -> None:
    marks = read_summary(directory)["marks"]
    assert [(mark["event"], mark["kind"]) for mark in marks] == [
        ("ps-lost", "fault"),
        ("recovering", "recovery"),
        ("restored", "recovery"),
        ("training", "recovery"),
        ("finished", "other"),
    ]
    lost = marks[0]
    assert (lost["task"], lost["host"], lost["step"]) == ("ps-0", "10.0.0.1:2222", 350)
    assert (lost["seconds"], lost["lost"]) == (8.0, 50)
    assert marks[2]["step"] == 300


def test_a_fault_before_the_first_numbers_of_a_run_that_began_from_another(directory: RunDirectory) -> None:
    lines(directory.history, {"t": BEGAN + 20, "step": 5300, "values": {"loss": 1}})
    lines(directory.event_log, {"time": BEGAN, "event": "started"}, {"time": BEGAN + 9, "event": "ps-lost"})
    assert read_summary(directory)["marks"][0]["step"] == 0
    record(directory.settings, created=BEGAN, **{"from": "other@5000"})
    assert read_summary(directory)["marks"][0]["step"] == 5000


def test_what_follows_from_a_lost_member_is_no_fault_of_its_own(directory: RunDirectory) -> None:
    def kinds(*events: dict[str, Any]) -> list[tuple[str, str, int]]:
        first = {"time": BEGAN + 1, "event": "training", "message": "step 1"}
        lines(directory.event_log, {"time": BEGAN, "event": "started"}, first, *events)
        return [(mark["event"], mark["kind"], mark["lost"]) for mark in read_summary(directory)["marks"]]

    restored = {"time": BEGAN + 13, "event": "restored", "steps_lost": 7, "message": "step 3"}
    # A call fails before it is known whose server is gone.
    recovering = {"time": BEGAN + 10, "event": "recovering", "message": "Connection refused"}
    lost = {"time": BEGAN + 11, "event": "ps-lost", "task": "ps-0"}
    assert kinds(recovering, lost, restored) == [
        ("recovering", "recovery", 0),
        ("ps-lost", "fault", 7),
        ("restored", "recovery", 7),
    ]
    # A coordinator that can't let go of a frozen ps begins again; one that dies by itself is a fault.
    frozen = {"time": BEGAN + 10, "event": "member-silent", "task": "ps-0"}
    taken = {"time": BEGAN + 12, "event": "lease-taken"}
    assert kinds(frozen, taken, restored)[:2] == [("member-silent", "fault", 7), ("lease-taken", "recovery", 0)]
    assert kinds(lost, taken, restored)[1] == ("lease-taken", "fault", 0)
    assert kinds(taken, restored)[0] == ("lease-taken", "fault", 7)
    assert kinds(recovering, restored)[0] == ("recovering", "fault", 7)
    # What the training went on with cost it no step.
    unsaved = {"time": BEGAN + 3, "event": "save-failed"}
    worker = {"time": BEGAN + 4, "event": "member-lost", "task": "worker-0"}
    on = {"time": BEGAN + 5, "event": "training", "message": "step 9"}
    assert [lost for *_, lost in kinds(unsaved, worker, on, lost, restored)] == [0, 0, 0, 7, 7]
    assert [lost for *_, lost in kinds(unsaved, worker, lost, restored)] == [0, 0, 7, 7]


def test_lanes_show_when_a_member_was_away(directory: RunDirectory) -> None:
    lanes = {lane["task"]: lane["spans"] for lane in read_summary(directory)["lanes"]}
    assert list(lanes) == ["chief-0", "ps-0"]
    assert lanes["ps-0"] == [
        [BEGAN, BEGAN + 70, "training"],
        [BEGAN + 70, BEGAN + 75, "closed"],
        [BEGAN + 75, BEGAN + 100, "training"],
    ]


def test_a_member_that_the_next_coordinator_does_not_know_has_left(directory: RunDirectory) -> None:
    lines(directory.event_log, {"time": BEGAN, "event": "started"}, {"time": BEGAN + 40, "event": "stopped"},
          {"time": BEGAN + 60.04, "event": "started"})  # fmt: skip
    lines(directory.history, {"t": BEGAN + 1, "members": {"worker-0": "training", "worker-1": "training"}},
          {"t": BEGAN + 60, "members": {"worker-0": "starting"}},
          {"t": BEGAN + 65, "members": {"worker-0": "training"}})  # fmt: skip
    lanes = {lane["task"]: lane["spans"] for lane in read_summary(directory)["lanes"]}
    assert lanes["worker-1"] == [[BEGAN + 1, BEGAN + 40, "training"]]
    assert lanes["worker-0"] == [
        [BEGAN + 1, BEGAN + 40, "training"],
        [BEGAN + 60, BEGAN + 65, "starting"],
        [BEGAN + 65, BEGAN + 100, "training"],
    ]


def test_no_time_is_told_twice_or_left_out(directory: RunDirectory) -> None:
    time = read_summary(directory)["time"]
    assert {kind: round(sum(parts)) for kind, parts in time["kinds"].items()} == {"productive": 80, "down": 20}
    assert (time["edges"][0], time["edges"][-1]) == (BEGAN, BEGAN + 100)


def test_a_coordinator_that_died_is_away_and_one_that_was_stopped_is_not(directory: RunDirectory) -> None:
    lines(
        directory.event_log,
        {"time": BEGAN, "event": "started"},
        {"time": BEGAN + 30, "event": "stopped"},
        {"time": BEGAN + 40, "event": "started"},
        {"time": BEGAN + 75, "event": "started"},
    )
    spans = next(lane["spans"] for lane in read_summary(directory)["lanes"] if lane["task"] == "chief-0")
    assert [span[2] for span in spans] == ["running", "stopped", "running", "away", "running"]


def test_a_worker_that_was_removed_leaves_the_page(directory: RunDirectory) -> None:
    with directory.history.open("a") as file:
        file.write(json.dumps({"t": BEGAN + 99, "gave": {"worker-2": 9}}) + "\n")
    assert read_summary(directory)["gave"] == {"worker-0": 300, "worker-1": 100}
    directory.status.unlink()  # who takes part is not known
    assert read_summary(directory)["gave"].keys() == {"worker-0", "worker-1", "worker-2"}


def test_the_page_says_what_it_shows(directory: RunDirectory) -> None:
    page = render([read_summary(directory)])
    text = html.unescape(re.sub(r"<[^>]+>", " ", page.split("<main>")[1].split("</main>")[0]))
    for sentence in (
        "It finished at step 500, 100 s after it began.",
        "The last evaluation, of step 500, says loss 0.5, accuracy 0.8.",
        "Training: from 2 to 0.1818, lowest 0.1818 at step 500.",
        "rate=0.1",
        "80.0 %",
        "ps-0 was closed for 5 s",
        "worker-1 gave the fewest, 100",
        "others made up to 9 updates; for worker-1 1.50 in the mean",
        "ps-0 at 10.0.0.1:2222",
        "50 steps lost",
        "1 MiB",
        "net:Net",
    ):
        assert sentence in text, sentence


@pytest.mark.parametrize(
    ("status", "advice"),
    [
        ({"state": "failed", "message": "UserError: no data"}, "UserError: no data"),
        ({"state": "waiting", "message": "no answer from ps-1"}, "no answer from ps-1"),
        ({"state": "training", "without": {"worker-1": "silent"}}, "It trains without worker-1 (silent)"),
        ({"state": "waiting", "without": {"ps-1": "away"}}, "It waits without ps-1 (away)"),
        ({"state": "stopped", "step": 7}, "`fab start-cluster --run night` goes on at step 7"),
    ],
)
def test_what_is_wrong_is_said_with_what_to_do(directory: RunDirectory, status: dict[str, Any], advice: str) -> None:
    record(directory.status, **status)
    assert any(advice in text for text in read_summary(directory)["advice"])


def test_numbers_that_are_none_are_said(directory: RunDirectory) -> None:
    rows = [(1, "NaN"), (2, 1.0)]
    lines(directory.history, *({"t": BEGAN + step, "step": step, "values": {"loss": loss}} for step, loss in rows))
    summary = read_summary(directory)
    assert summary["series"]["values"]["loss"] == [None, 1.0]
    assert any("NaN" in text for text in summary["advice"])


def test_a_model_that_learns_by_heart_is_said(directory: RunDirectory) -> None:
    lines(
        directory.evaluations,
        *({"t": BEGAN + n, "step": n, "values": {"loss": loss}} for n, loss in enumerate((3, 1, 2, 3))),
    )
    assert any("lowest at step 1" in text for text in read_summary(directory)["advice"])
    lines(
        directory.evaluations,
        *({"t": BEGAN + n, "step": n, "values": {"loss": loss}} for n, loss in enumerate((3, 2, 1, 0.9))),
    )
    assert not any("lowest at step" in text for text in read_summary(directory)["advice"])


class Tags(HTMLParser):
    """Notes the elements and attributes that a browser would make."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))


def hostile_run(tmp_path: Path) -> RunDirectory:
    """A run all of whose words want to be markup."""
    directory = RunDirectory(tmp_path, "night")
    directory.path.mkdir(parents=True)
    directory.tasks.mkdir()
    bad = {HOSTILE: HOSTILE}
    record(
        directory.settings,
        created=BEGAN,
        program=HOSTILE,
        program_args=bad,
        settings={**bad, "strategy": HOSTILE},
        **{"from": HOSTILE},
    )
    record(
        directory.status, state=HOSTILE, message=HOSTILE, phase=HOSTILE, step=5, loss=0.1, metrics={HOSTILE: 1.0},
        without=bad, workers={HOSTILE: {"staleness": HOSTILE, "staleness_max": 1}},
        checkpoint=HOSTILE, export=HOSTILE, updated=BEGAN + 9,
        ledger={"productive": 9, "goodput": 1, "elapsed": 9},
    )  # fmt: skip
    record(directory.evaluation, step=5, metrics={HOSTILE: 1.0}, trouble=HOSTILE, updated=BEGAN + 9)
    lines(
        directory.history,
        {"t": BEGAN, "step": 1, "speed": 1, "values": {HOSTILE: 1.0}, "ledger": {"productive": 1, HOSTILE: 3}},
        {"t": BEGAN + 1, "members": bad, "gave": {HOSTILE: 3}},
        {"t": BEGAN + 2, "placed": {HOSTILE: {"bytes": 3, "variables": 1, "largest": [[HOSTILE, [HOSTILE], 3]]}}},
    )
    events = ["started", "member-lost", HOSTILE, "save-failed", "restored", "training", "failed"]
    words = {"task": HOSTILE, "host": HOSTILE, "message": HOSTILE, "seconds": HOSTILE}
    lines(directory.event_log, *({"time": BEGAN + n, "event": event, **words} for n, event in enumerate(events)))
    lines(
        directory.evaluations, {"t": BEGAN, "step": 1, "values": bad}, {"t": BEGAN, "step": HOSTILE, "values": HOSTILE}
    )
    lines(directory.tasks / "worker-0.jsonl", {"t": BEGAN, "memory": HOSTILE, "processor": HOSTILE, "cores": HOSTILE})
    return directory


@pytest.mark.parametrize("several", [False, True])
def test_nothing_that_a_run_says_becomes_markup(tmp_path: Path, several: bool) -> None:
    summary = read_summary(hostile_run(tmp_path))
    page = render([summary, summary] if several else [summary])
    tags = Tags(page)
    assert sum(tag == "script" for tag, _ in tags.found) == 3
    assert {tag for tag, _ in tags.found} & {"img", "iframe", "object", "base", "form"} == set()
    assert [
        name for _, attributes in tags.found for name in attributes if name.startswith("on") or name == "style"
    ] == []
    assert HOSTILE in html.unescape(page)
    data = json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)[1])  # type: ignore[index]
    assert HOSTILE in data["runs"][0]["series"]["values"]


def test_only_the_scripts_of_the_page_may_run(directory: RunDirectory) -> None:
    page = render([read_summary(directory)])
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', page)[1]  # type: ignore[index]
    assert policy.startswith("default-src 'none'")
    assert "unsafe" not in policy
    assert "http" not in policy
    fetched = [
        value for _, attributes in Tags(page).found for name, value in attributes.items() if name in ("src", "href")
    ]
    assert fetched == ["data:,"]


def test_data_hold_no_end_of_their_own() -> None:
    assert "<" not in to_data({"a": "</script>", "b": float("nan")})
    assert json.loads(to_data({"a": "</script>\u2028", "b": float("nan")})) == {"a": "</script>\u2028", "b": "NaN"}


def test_a_run_without_records_gives_a_page_that_says_so(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path, "empty")
    directory.path.mkdir(parents=True)
    page = render([read_summary(directory)])
    assert "status.json is missing" in page
    assert "No numbers yet." in page


@pytest.mark.parametrize(
    "damage",
    [b"", b"{", b"[1, 2]", b"\xff\xfe\x00", b'{"a": 1}', b"null", b'{"metrics": 3, "ledger": [], "step": "x"}'],
)
def test_a_record_that_is_damaged_costs_what_it_would_have_told(directory: RunDirectory, damage: bytes) -> None:
    for path in [path for path in directory.path.iterdir() if path.is_file()]:
        before = path.read_bytes()
        path.write_bytes(damage)
        assert "<h1>night" in render([read_summary(directory)]), path.name
        path.write_bytes(before)
    for path in [path for path in directory.path.iterdir() if path.is_file()]:
        path.write_bytes(damage)
    assert "<h1>night" in render([read_summary(directory)])


def test_damage_is_said_on_the_page(directory: RunDirectory) -> None:
    directory.status.write_text("{")
    page = render([read_summary(directory)])
    assert "status.json is not JSON" in page
    assert "status.json is missing" not in page


@pytest.mark.parametrize("odd", ["NaN", "Infinity", 1e18, 10**400, -1e300])
def test_a_number_beyond_all_bounds_costs_what_it_would_have_told(directory: RunDirectory, odd: Any) -> None:
    record(directory.settings, created=odd)
    record(directory.status, state="training", step=1, steps_per_second=odd, eta_seconds=odd, updated=odd,
           ledger={"productive": 1, "goodput": odd, "elapsed": odd})  # fmt: skip
    lines(directory.history, {"t": BEGAN, "step": odd, "values": {"loss": odd}}, {"t": odd, "step": 1})
    lines(directory.event_log, {"time": odd, "event": "failed"}, {"time": BEGAN, "event": "failed", "seconds": odd})
    assert "<h1>night" in render([read_summary(directory)])


def test_what_a_page_leaves_out_is_counted_all_the_same(
    directory: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module, name in ((summary, "MAX_MARKS"), (summary, "MAX_SAVES"), (sections, "MAX_ROWS")):
        monkeypatch.setattr(module, name, 3)
    events = [{"time": BEGAN, "event": "started"}, {"time": BEGAN + 1, "event": "training"}]
    for n in range(10):
        at = BEGAN + 2 + 3 * n
        events += [
            {"time": at, "event": "ps-lost", "task": "ps-0"}, {"time": at + 1, "event": "restored", "steps_lost": 5},
            {"time": at + 2, "event": "training"}, {"time": at + 2, "event": "checkpoint-saved", "message": "step 9"},
        ]  # fmt: skip
    lines(directory.event_log, *events)
    page = render([read_summary(directory)])
    assert re.search(r"<dt>faults</dt><dd>10<small>50 steps lost", page)
    assert "The last 3 of 30<" in page
    assert "The last 3 of 10 checkpoints" in page
    assert "10 checkpoints, of which the last 3 are shown." in page


def test_a_run_that_was_resumed_a_thousand_times_takes_no_longer_for_it(directory: RunDirectory) -> None:
    workers = [f"worker-{n}" for n in range(20)]
    starts = [BEGAN + 100 * n for n in range(1000)]
    lines(directory.event_log, *({"time": at, "event": "started"} for at in starts))
    states = [{"t": at + wait, "members": dict.fromkeys(workers, what)} for at in starts
              for wait, what in ((1, "starting"), (2, "training"), (90, "closed"))]  # fmt: skip
    lines(directory.history, *states)
    began = time.process_time()
    found = {lane["task"]: lane["missed"] for lane in read_summary(directory)["lanes"]}
    assert time.process_time() - began < 5
    assert found["worker-19"] == {}
    assert found["chief-0"] == {"away": 9990}


def test_a_lane_with_many_absences_shows_the_longest_and_tells_all(
    directory: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(member_lanes, "MAX_SPANS", 20)
    states = [{"t": BEGAN + n, "members": {"ps-0": "closed" if n % 2 else "training"}} for n in range(60)]
    lines(directory.history, *states, {"t": BEGAN + 60, "members": {"ps-0": "away"}})
    summary = read_summary(directory)
    spans = {lane["task"]: lane["spans"] for lane in summary["lanes"]}["ps-0"]
    assert len(spans) == 20
    assert [BEGAN + 60, BEGAN + 100, "away"] in spans
    assert spans == sorted(spans)
    assert "ps-0 was closed for 30 s and away for 40 s" in describe_lanes(summary)


def test_a_page_says_of_which_time_it_is(directory: RunDirectory) -> None:
    """One of a run whose coordinator is gone, or that is opened a day later, still says that it trains."""
    record(directory.status, run="night", state="training", step=500, updated=BEGAN + 160)
    page = render([read_summary(directory)])
    ends = ["2023-11-14T22:13:20+00:00", "2023-11-14T22:16:00+00:00"]
    assert re.search(r"<dt>time</dt><dd>2 min 40 s<small>(.*?)</small>", page)[1].count("<time ") == 2  # type: ignore[index]
    assert all(f'datetime="{end}"' in page for end in ends)


def test_one_is_no_plural(directory: RunDirectory) -> None:
    lines(directory.history, {"t": BEGAN, "placed": {"ps-0": {"bytes": 1, "variables": 1}}})
    page = render([read_summary(directory)])
    assert "1 task, all there the whole time" in page
    assert "1 checkpoint;" in page
    assert "on 1 parameter server." in page


def test_lines_of_other_kinds_are_passed_over(directory: RunDirectory) -> None:
    odd: list[Any] = [
        *(None, 1, "text", [], {"t": "x"}, {"t": True, "step": 1}, {"t": float("inf")}),
        {"t": BEGAN, "step": None},
        {"t": BEGAN, "members": []},
        {"t": BEGAN, "gave": {"worker-0": "x"}},
        {"t": BEGAN, "placed": {"ps-0": 1}},
        {"t": BEGAN, "ledger": {"down": "x"}},
        {"t": BEGAN, "step": 3, "values": "x"},
    ]
    lines(directory.history, *odd)
    lines(
        directory.event_log,
        *odd,
        {"time": BEGAN, "event": None},
        {"time": BEGAN},
        {"time": BEGAN, "event": "training", "steps_lost": "x"},
    )
    lines(directory.evaluations, *odd)
    assert "<h1>night" in render([read_summary(directory)])


def test_more_points_than_a_page_holds_keep_their_peaks() -> None:
    rows = [{"t": n, "step": n, "values": {"loss": 9.0 if n == 777 else 1.0}} for n in range(5000)]
    kept = thin_rows(rows, 100)
    assert len(kept) <= 100
    assert 777 in [row["step"] for row in kept]
    assert kept[-1]["step"] == 4999
    assert [row["step"] for row in kept] == sorted(row["step"] for row in kept)
    summary = summarize(RunRecords("night", history=[{**row, "t": row["t"] + 1.0} for row in rows]), most_points=1000)
    assert sum(map(len, summary["series"]["values"].values())) <= 1000


def test_several_runs_are_compared_by_what_differs(directory: RunDirectory, tmp_path: Path) -> None:
    other = RunDirectory(tmp_path, "day")
    other.path.mkdir()
    record(other.settings, created=BEGAN, program="net:Net", program_args={"rate": 0.2}, settings={"strategy": "one"})
    record(other.status, run="day", state="stopped", step=3)
    page = render([read_summary(directory), read_summary(other)])
    differs = page.split('id="differs"')[1].split("</section>")[0]
    assert re.search(r"parameter rate</th><td>0.1</td><td>0.2</td>", differs)
    assert "strategy" not in differs


def test_the_page_is_written_beside_the_records(directory: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = PageWriter(directory)
    writer.write_if_due()  # too soon
    assert not directory.report.exists()
    writer.write()
    assert "<h1>night" in directory.report.read_text()


def test_a_page_is_written_no_oftener_than_it_may_cost(
    directory: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, written = [1000.0], []

    def slow(summaries: Any) -> str:
        written.append(now[0])
        now[0] += 3.0  # so long it takes
        return "<p>"

    monkeypatch.setattr(pages.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(pages, "render", slow)
    writer = PageWriter(directory)
    for _ in range(1200):
        writer.write_if_due()
        now[0] += 1.0
    assert written[0] == pytest.approx(1030, abs=2)
    assert [round(later - earlier) for earlier, later in itertools.pairwise(written)] == [303, 303, 303]


def test_what_goes_wrong_in_a_page_ends_nothing(
    directory: RunDirectory, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(pages, "read_summary", lambda directory: 1 / 0)
    PageWriter(directory).write()
    assert "ZeroDivisionError" in caplog.text
    assert not directory.report.exists()


def test_no_page_tells_whom_a_run_notifies(directory: RunDirectory) -> None:
    settings = {"strategy": "one", "notify_webhook": "https://chat.example.org/hooks/secret", "notify_command": "/tell"}
    record(directory.settings, created=BEGAN, program="net:Net", settings=settings)
    for summaries in (
        [read_summary(directory)],
        [read_summary(directory), {**read_summary(directory), "settings": {}}],
    ):
        page = render(summaries)
        assert "strategy" in page
        assert "example.org" not in page
        assert "/tell" not in page


def test_gpus_are_shown_where_there_are_any(directory: RunDirectory) -> None:
    assert "GPUs of each task" not in render([read_summary(directory)])
    directory.tasks.mkdir()
    taken = [{"t": BEGAN + n, "memory": 5, "processor": 0.5, "gpu": n / 10, "gpu_memory": 2**30} for n in (2, 8)]
    lines(directory.tasks / "worker-0.jsonl", *taken)
    lines(directory.tasks / "ps-0.jsonl", {"t": BEGAN, "memory": 5, "processor": 0.5})
    page = render([read_summary(directory)])
    assert "worker-0 kept its GPUs busiest, 80% at most" in page
    assert read_summary(directory)["tasks"]["worker-0"]["gpu_memory"] == [2**30, 2**30]


def test_a_page_that_cannot_be_written_ends_nothing(directory: RunDirectory, caplog: pytest.LogCaptureFixture) -> None:
    directory.report.mkdir()
    PageWriter(directory).write()
    assert "cannot write" in caplog.text


def test_the_command_prints_the_page(directory: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    shared_dir = str(directory.path.parent.parent)
    assert main(["report", "--shared-dir", shared_dir, "--run", "night"], {}) == 0
    assert capsys.readouterr().out.startswith("<!doctype html>")
    assert main(["report", "--shared-dir", shared_dir, "--run", "night", "--json"], {}) == 0
    assert json.loads(capsys.readouterr().out)["runs"] == ["night"]
    for name in ("other", "../night", "."):
        assert main(["report", "--shared-dir", shared_dir, "--run", name], {}) == 78
        assert "there is no run" in capsys.readouterr().err


def test_curves_and_amounts_are_said_as_a_person_says_them() -> None:
    assert [duration(seconds) for seconds in (0, 0.5, 75, 256, 600, 3599.6, 7300, 200_000)] == [
        "0 s",
        "0.5 s",
        "75 s",
        "4 min 16 s",
        "10 min",
        "60 min",
        "2 h 2 min",
        "2 d 7 h",
    ]
    assert describe_shares({"worker-0": 100, "worker-1": 50}).startswith("The median worker gave 75 steps;")
    nothing = {"series": {"values": {}, "step": []}, "evaluations": {"values": {}, "step": []}, "run": "a"}
    assert describe_curve("loss", [nothing]) == "No number yet."


def test_a_page_shows_dynamic_tables(directory: RunDirectory) -> None:
    table = {"rows": 12_345, "new_per_minute": 60.0, "evicted_per_minute": 5.5, "refused": 7, "bytes": 2**21}
    status = json.loads(directory.status.read_text(encoding="utf-8"))
    assert "Dynamic tables" not in render([read_summary(directory)])
    record(directory.status, **status, tables={HOSTILE: table, "odd": {"rows": "x"}, "none": 5})
    page = render([read_summary(directory)])
    for part in ("Dynamic tables", "12,345", "2 MiB, 60 new and 5.5 evicted a minute, 7 keys without room"):
        assert part in page
    assert HOSTILE not in page


def test_a_page_shows_what_steps_ask_of_tables(directory: RunDirectory) -> None:
    asked = {
        "ids_per_step": 10_240.0,
        "rows_per_step": 5_262.6,
        "by_ps": {"ps-0": 0.9, "ps-1": 0.1},
        "hot": [[7, 0.52, "ps-0"]],
    }
    status = json.loads(directory.status.read_text(encoding="utf-8"))
    assert "Lookups" not in render([read_summary(directory)])
    record(directory.status, **status, lookups={HOSTILE: asked, "odd": {"rows_per_step": "x"}, "none": 5})
    page = render([read_summary(directory)])
    for part in ("Lookups", "5,263", "10,240 ids and 5,263 rows a step: ps-0 90%, ps-1 10%; hot keys 7 (52%)"):
        assert part in page
    assert HOSTILE not in page
