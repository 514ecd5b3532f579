"""The accounts of a run whose coordinator is killed, then stopped, then told to finish."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from processes import MINUTE, Runs, kill, until

from trainer.run.records import read_record
from trainer.telemetry.goodput import KINDS
from trainer.telemetry.outlets.tensorboard import EventWriter

pytestmark = pytest.mark.timeout(600)
STEPS = 1000
# A step takes 10 ms.
OPTIONS = (
    "--steps-per-execution", "20", "--checkpoint-steps", "300", "--checkpoints-kept", "30", "--log-seconds", "0.5",
    "--export", "false",
)  # fmt: skip


def shown(runs: Runs) -> dict[str, Any]:
    """Read the status as soon as it is written: the trainer's own command takes a second to start."""
    return read_record(runs.directory("accounts") / "status.json") or {}


def caught_up(ledger: dict[str, float], step: int) -> bool:
    return ledger["recomputed"] > 0 and ledger["step"] == ledger["highest_step"] > step


def test_accounts_go_on_over_a_crash_and_leave_out_the_time_of_a_stop(runs: Runs) -> None:
    began = time.monotonic()
    process = runs.local("ids:Ids", "accounts", STEPS, *OPTIONS, "--no-evaluator")
    process.search(r"saved \S+/ckpt-3\d\d in")
    reached = until(lambda: (step := shown(runs)["step"] or 0) > 450 and step, "step 450")
    kill(process.pids("ps-0")[0])  # or the next coordinator would lose no step
    kill(process.pids("chief-0")[0])
    process.search(rf"going on at step \d+ of {STEPS}")
    until(lambda: caught_up(shown(runs)["ledger"], reached), "new steps", say=lambda: process.output)
    process.send(signal.SIGTERM)
    assert process.wait() == 143, process.output
    assert "goodput" in process.output
    took = time.monotonic() - began
    stopped = runs.status("accounts")["ledger"]
    assert stopped["ended"]
    assert stopped["highest_step"] >= reached
    for kind in ("productive", "recomputed", "down", "compiling", "checkpointing"):
        assert stopped[kind] > 0, kind
    # The rest is the start of the first coordinator and the end of the last.
    assert took - MINUTE < stopped["elapsed"] <= took

    time.sleep(5)
    again = runs.local("ids:Ids", "accounts", STEPS, *OPTIONS, "--no-evaluator")
    began = time.monotonic()
    assert again.wait() == 0, again.output
    status = runs.status("accounts")
    ledger = status["ledger"]
    assert sum(ledger[kind] for kind in KINDS) == pytest.approx(ledger["elapsed"], abs=0.02)
    assert ledger["elapsed"] - stopped["elapsed"] <= time.monotonic() - began
    assert ledger["goodput"] == pytest.approx(ledger["productive"] / ledger["elapsed"], abs=1e-3)
    assert ledger["highest_step"] == ledger["step"] >= STEPS
    assert ledger["recomputed"] == stopped["recomputed"]  # what was saved at the stop is not trained again
    assert f"goodput {100 * ledger['goodput']:.1f} %" in again.output

    lines = (runs.directory("accounts") / "events.jsonl").read_text().splitlines()
    events = [json.loads(line) for line in lines]
    lost = [event["steps_lost"] for event in events if event["event"] == "restored"]
    assert lost[1] > 0
    assert lost[2] == 0
    # Again where one was not back in time, and came later.
    assert [event["event"] for event in events].count("formed") >= 3
    assert [event["time"] for event in events] == sorted(event["time"] for event in events)
    assert status["events"] == [event for event in events if event["event"] != "checkpoint-saved"][-5:]
    ends = [event["event"] for event in events if event["event"] in ("started", "stopped", "finished", "failed")]
    assert ends == ["started", "started", "stopped", "started", "finished"]


def test_tensorboard_reads_what_was_written_before_and_after_the_path_was_away(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tensorboard.backend.event_processing.event_multiplexer import EventMultiplexer

    directory = tmp_path / "train"
    writer = EventWriter(directory)
    writer.write(1, {"loss": 3.0, "steps_per_second": 100.0})
    writer = EventWriter(tmp_path / "file" / "train")
    (tmp_path / "file").write_text("")
    writer.write(2, {"loss": 2.0})
    assert "cannot write TensorBoard's events of step 2" in caplog.text
    writer._directory = directory
    writer.write(3, {"loss": 1.5})  # so soon it is not tried again
    monkeypatch.setattr(writer, "_open_at", 0.0)
    writer.write(4, {"loss": 1.0})
    board = EventMultiplexer().AddRunsFromDirectory(str(tmp_path)).Reload()
    assert [(scalar.step, scalar.value) for scalar in board.Scalars("train", "loss")] == [(1, 3.0), (4, 1.0)]
    assert [scalar.value for scalar in board.Scalars("train", "steps_per_second")] == [100.0]
