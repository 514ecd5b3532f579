"""What a run leaves for its readers: its page, and TensorBoard's tabs beside its curves."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from processes import MINUTE, PROGRAMS, ROOT, Process, Runs, environment, until
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from trainer.cluster.spec import free_addresses
from trainer.telemetry.outlets.tensorboard import EventWriter, write_mark

pytestmark = pytest.mark.timeout(300)
HTTP_SECONDS = 20.0


class Data(HTMLParser):
    """Reads a page's data, as its script does."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self._inside, self._text = False, ""
        self.feed(page)
        self.runs: list[dict[str, Any]] = json.loads(self._text)["runs"]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._inside = tag == "script" and ("id", "data") in attrs

    def handle_data(self, data: str) -> None:
        self._text += data if self._inside else ""


def test_the_coordinator_writes_the_page_at_the_runs_end(digits: Process, runs: Runs) -> None:
    page = (runs.directory("digits") / "report.html").read_text(encoding="utf-8")
    status = runs.status("digits")
    assert "It finished at step 1,500" in page
    assert f"{100 * status['ledger']['goodput']:.1f} %" in page
    [run] = Data(page).runs
    assert run["series"]["step"][-1] > 1250
    assert {"loss", "accuracy", "steps per second", "examples per second"} == set(run["series"]["values"])
    examples, speeds = run["series"]["values"]["examples per second"], run["series"]["values"]["steps per second"]
    assert examples[-1] == pytest.approx(32 * speeds[-1], rel=1e-3)
    assert run["evaluations"]["step"][-1] == 1500
    assert {"chief-0", "ps-0", "worker-0", "worker-1"} <= {lane["task"] for lane in run["lanes"]}
    assert [save[1] for save in run["saves"]][-1] == 1500
    assert run["tasks"]["worker-0"]["memory"][0] > 2**20


def test_tensorboard_has_the_settings_as_a_page(digits: Process, runs: Runs) -> None:
    read = EventAccumulator(str(runs.directory("digits") / "events" / "train")).Reload()
    [tensor] = read.Tensors("settings/text_summary")
    text = tensor.tensor_proto.string_val[0].decode()
    assert "| `steps` | `1500` |" in text
    assert "notify_" not in text


def test_tensorboard_shows_a_fault_as_a_step_of_a_curve_and_in_words(tmp_path: Path) -> None:
    writer = EventWriter(tmp_path)
    write_mark(writer, 1, {"step": 70, "time": 5.0, "event": "ps-lost", "task": "ps-0", "message": "has ended"})
    read = EventAccumulator(str(tmp_path)).Reload()
    assert [(each.step, each.value, each.wall_time) for each in read.Scalars("faults")] == [(70, 0, 5.0), (70, 1, 5.0)]
    [tensor] = read.Tensors("faults/text_summary")
    assert "ps-lost  ps-0" in tensor.tensor_proto.string_val[0].decode()


@pytest.fixture(scope="module")
def board(digits: Process, runs: Runs) -> Iterator[str]:
    """TensorBoard as a host of group tensorboard starts it; where it is."""
    [address] = free_addresses(1)
    host, _, port = address.rpartition(":")
    words = ["--logdir", str(runs.shared / "runs"), "--host", host, "--port", port]
    command = [sys.executable, "-m", "trainer.report.tensorboard_tab", *words]
    with subprocess.Popen(command, cwd=PROGRAMS, env=environment(), stderr=subprocess.DEVNULL) as process:
        try:
            until(lambda: answers(f"http://{address}/data/environment"), "TensorBoard's answer", 2 * MINUTE)
            yield f"http://{address}"
        finally:
            process.terminate()


def answers(url: str) -> bool:
    try:
        return ask(url)[0] == 200
    except OSError:
        time.sleep(0.5)
        return False


def ask(url: str) -> tuple[int, str, Any]:
    try:
        with urllib.request.urlopen(url, timeout=HTTP_SECONDS) as answer:
            return answer.status, answer.read().decode(), answer.headers
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode(), error.headers


def test_a_tab_beside_the_curves_has_the_runs_pages(board: str) -> None:
    listing = json.loads(ask(f"{board}/data/plugins_listing")[1])
    assert {"timeseries", "text", "hparams", "psfleet"} <= set(listing)
    assert listing["psfleet"]["enabled"]
    assert listing["psfleet"]["loading_mechanism"]["module_path"] == "/data/plugin/psfleet/index.js"
    assert "export async function render" in ask(f"{board}/data/plugin/psfleet/index.js")[1]
    listed = {each["run"]: each for each in json.loads(ask(f"{board}/data/plugin/psfleet/runs")[1])}
    assert (listed["digits"]["state"], listed["digits"]["step"]) == ("finished", 1500)
    status, page, headers = ask(f"{board}/data/plugin/psfleet/page?run=digits")
    assert status == 200
    assert Data(page).runs[0]["run"] == "digits"
    # Its own policy and TensorBoard's both permit the page's two scripts, and no others.
    permitted = [set(re.findall(r"sha256-[^']+", policy)) for policy in (headers["Content-Security-Policy"], page)]
    assert len(permitted[0]) == 2
    assert permitted[0] <= permitted[1]


@pytest.mark.parametrize(
    ("query", "code"),
    [("", 400), ("run=", 404), ("run=other", 404), ("run=..", 404), ("run=../../etc", 404), ("run=%2e%2e%2f", 404)],
)
def test_no_query_leads_out_of_the_runs(board: str, query: str, code: int) -> None:
    assert ask(f"{board}/data/plugin/psfleet/page?{query}")[0] == code


def test_curves_are_grouped_by_run(board: str) -> None:
    def known() -> list[str]:
        return [name for name in json.loads(ask(f"{board}/data/runs")[1]) if name.startswith("digits/")]

    names = until(lambda: len(known()) >= 3 and known(), "the run's curves", MINUTE)
    assert {name.split("/")[-1] for name in names} >= {"train", "eval"}


HANGING = """
import os, sys, threading, time
from pathlib import Path
from trainer.telemetry.outlets import tensorboard

writer = tensorboard.EventWriter(Path(sys.argv[1]))
name = f"events.out.tfevents.{7:017.6f}.{tensorboard.socket.gethostname()}.{os.getpid()}.0"
os.mkfifo(Path(sys.argv[1]) / name)
reader = os.open(Path(sys.argv[1]) / name, os.O_RDONLY | os.O_NONBLOCK)
writer.write(1, {"loss": 1.0}, 7.0)


def fill():
    for step in range(10_000):
        writer.write(step, {"loss": 1.0}, 8.0)


thread = threading.Thread(target=fill, daemon=True)
thread.start()
thread.join(2)
print("hangs" if thread.is_alive() else "written", flush=True)
os._exit(0)
"""


def test_a_path_that_hangs_holds_up_no_other_thread(tmp_path: Path) -> None:
    """A pipe that nobody empties takes as long as a path whose server is away."""
    command = [sys.executable, "-c", HANGING, str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "hangs\n"
