"""The text that the verbs print."""

import io
import os

import pytest

from fleet.hosts.run import Run, parse_run
from fleet.output.tables import ProgressLine, put, render_duration, render_table
from fleet.status.status_text import render_progress
from trainer.telemetry.status import describe_runs, render_metrics, render_number
from trainer.telemetry.sweep import describe_sweep


def test_table_aligns_columns_and_ends_no_line_in_blanks() -> None:
    assert render_table(
        ["TASK", "STATE", "NOTE"], [["chief-0", "active", None], ["ps-0", "failed (78)", "no disk"]]
    ) == ("TASK     STATE        NOTE\nchief-0  active\nps-0     failed (78)  no disk")


def test_table_without_rows_is_its_header() -> None:
    assert render_table(["RUN", "STATE"], []) == "RUN  STATE"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (None, ""),
        (0, "0 s"),
        (59.6, "1 min"),
        (185, "3 min 5 s"),
        (7800, "2 h 10 min"),
        (7205, "2 h"),
        (360000, "4 d 4 h"),
    ],
)
def test_duration_has_two_units_at_most(seconds: float | None, text: str) -> None:
    assert render_duration(seconds) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "?"), (0.123456, "0.1235"), (350.24, "350.2"), (12345.6, "12346"), (1e30, "1e+30"), ("NaN", "nan")],
)
def test_number_has_four_digits(value: float | str | None, text: str) -> None:
    assert render_number(value) == text


def test_progress_tells_step_pace_loss_evaluation_and_time_left() -> None:
    run = parse_run(
        {
            "run": "digits-1",
            "state": "training",
            "step": 1200,
            "steps": 2000,
            "steps_per_second": 350.2,
            "eta_seconds": 2.3,
            "loss": 0.12,
            "evaluation": {"step": 1000, "metrics": {"accuracy": 0.96}},
            "a_key_of_a_later_trainer": 1,
        }
    )
    assert render_progress(run) == (
        "step 1200/2000  350.2 steps/s  loss 0.12  evaluated at 1000: accuracy 0.96  2 s left"
    )
    assert render_progress(run, 75).endswith("no new step for 1 min 15 s")


def test_progress_leaves_out_what_nobody_knows() -> None:
    assert render_progress(Run("digits", state="training", step=0)) == "step 0"


def test_metrics_are_named() -> None:
    assert render_metrics({"accuracy": 0.9612, "loss": 0.1}) == "accuracy 0.9612, loss 0.1"


def test_runs_have_a_row_each() -> None:
    text = describe_runs(
        [
            {
                "run": "a",
                "state": "finished",
                "step": 30,
                "steps": 30,
                "evaluation": {"step": 30, "metrics": {"accuracy": 0.5}},
                "program": "p:P",
                "program_args": {"rate": 0.1, "layers": [64, 64]},
            },
            {"run": "b", "state": "new", "step": None, "steps": None},
        ]
    ).splitlines()
    assert " ".join(text[1].split()) == "a finished 30/30 accuracy 0.5 (step 30) p:P rate=0.1, layers=[64, 64]"
    assert text[2].split() == ["b", "new", "-/?"]


def test_numbers_that_json_has_no_word_for_are_shown_of_a_sweeps_points() -> None:
    point = {"run": "a", "state": "finished", "step": 30, "steps": 30, "goodput": None, "message": ""}
    point |= {"program_args": {"rate": 0.1}, "evaluation": {"loss": "NaN", "mae": "Infinity"}}
    text = describe_sweep({"name": "rates", "over": True, "size": 1, "points": [point]}).splitlines()
    assert text[2].startswith("rate=0.1    finished  loss nan, mae inf  30/30")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_is_rewritten_in_place_on_a_terminal() -> None:
    out = Terminal()
    line = ProgressLine(out, width=12)
    line.show("step 1 of many")
    line.show("step 2")
    line.end()
    assert out.getvalue() == "\rstep 1 of m\x1b[K\rstep 2\x1b[K\r\x1b[K"


def test_progress_is_a_line_every_few_seconds_elsewhere() -> None:
    out = io.StringIO()
    now = 0.0
    line = ProgressLine(out, every=5, clock=lambda: now)
    for now in range(12):
        line.show(f"step {now}")
    line.end()
    assert out.getvalue() == "step 0\nstep 5\nstep 10\n"


def test_a_reader_may_leave_before_the_end() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as stream:
        put(stream, "nobody reads this")
        ProgressLine(stream, clock=lambda: 0.0).show("nor this")
