"""Where the time of a run is counted, by a clock that the test turns."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest

from trainer.core.states import Phase
from trainer.telemetry.goodput import KINDS, Ledger, describe_ledger


class Clock:
    def __init__(self, now: float = 1000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def spend(ledger: Ledger, clock: Clock, phase: str, seconds: float, step: int | None = None) -> None:
    ledger.enter(phase)
    clock.now += seconds
    if step is not None:
        ledger.trained(step)


def spent(ledger: Ledger) -> dict[str, Any]:
    """Return the kinds that have any time."""
    return {kind: seconds for kind, seconds in ledger.as_dict().items() if kind in KINDS and seconds}


def test_each_phase_is_counted(clock: Clock) -> None:
    ledger = Ledger(None, clock)
    clock.now += 3  # until the first phase
    for seconds, phase in enumerate(Phase, start=1):
        spend(ledger, clock, phase, seconds, 10 if phase == "training" else None)
    assert tuple(Phase) == ("waiting", "restoring", "compiling", "training", "evaluating", "saving")
    assert spent(ledger) == {
        "productive": 4, "down": 2, "waiting": 1, "checkpointing": 6, "compiling": 6, "evaluating": 5
    }  # fmt: skip
    assert (ledger.as_dict()["elapsed"], ledger.as_dict()["goodput"]) == (24, pytest.approx(4 / 24, abs=1e-4))


def test_saving_in_between_is_no_end_of_the_training(clock: Clock) -> None:
    ledger = Ledger(None, clock)
    spend(ledger, clock, "training", 4)
    spend(ledger, clock, "saving", 1)
    spend(ledger, clock, "training", 6, step=100)
    assert spent(ledger) == {"productive": 10, "checkpointing": 1}


def test_steps_that_were_trained_before_are_recomputed(clock: Clock) -> None:
    ledger = Ledger(None, clock)
    spend(ledger, clock, "training", 10, step=100)
    assert ledger.restored(60) == 40
    spend(ledger, clock, "training", 8, step=140)  # 40 of these 80 steps for the second time
    assert spent(ledger) == {"productive": 14, "recomputed": 4}
    assert ledger.restored(130) == 10


def test_training_whose_steps_were_lost_unheard_is_down(clock: Clock) -> None:
    ledger = Ledger(None, clock)
    spend(ledger, clock, "training", 10, step=100)
    clock.now += 15  # a member froze in the middle of the next block
    assert ledger.as_dict()["elapsed"] == 25
    spend(ledger, clock, "restoring", 2)
    assert ledger.restored(100) == 0
    assert spent(ledger) == {"productive": 10, "down": 17}


def test_next_process_goes_on_and_counts_what_lay_between_as_down(clock: Clock) -> None:
    first = Ledger(None, clock)
    spend(first, clock, "training", 10, step=100)
    clock.now += 2  # of steps that will not be heard of
    record = first.as_dict()
    clock.now += 5  # dead
    second = Ledger(record, clock)
    clock.now += 3  # its start
    second.enter(Phase.WAITING)
    clock.now += 1
    assert second.restored(80) == 20
    assert spent(second) == {"productive": 10, "down": 10, "waiting": 1}
    assert second.as_dict()["elapsed"] == 21


def test_time_in_which_a_run_was_stopped_counts_nowhere(clock: Clock) -> None:
    first = Ledger(None, clock)
    spend(first, clock, "training", 10, step=100)
    first.end()
    clock.now += 3600
    assert first.as_dict()["elapsed"] == 10
    second = Ledger(first.as_dict(), clock)
    clock.now += 2
    assert spent(second) == {"productive": 10, "compiling": 2}


def test_clock_that_was_set_back_between_processes_takes_nothing_away(clock: Clock) -> None:
    first = Ledger(None, clock)
    spend(first, clock, "training", 10, step=100)
    clock.now -= 500
    assert spent(Ledger(first.as_dict(), clock)) == {"productive": 10}


def test_line_names_what_there_is_with_the_most_first(clock: Clock) -> None:
    ledger = Ledger(None, clock)
    assert describe_ledger(ledger.as_dict()) == "goodput 0.0 % of 0.0 s"
    spend(ledger, clock, "waiting", 1)
    spend(ledger, clock, "saving", 4)
    spend(ledger, clock, "training", 15, step=1)
    assert describe_ledger(ledger.as_dict()) == (
        "goodput 75.0 % of 20.0 s: productive 15.0 s, checkpointing 4.0 s, waiting 1.0 s"
    )


def train(ledger: Ledger, clock: Clock, *gaps: float, steps: int = 1) -> None:
    """Train on, with so many steps after each gap."""
    ledger.enter(Phase.TRAINING)
    for gap in gaps:
        clock.now += gap
        ledger.trained(ledger.as_dict()["step"] + steps)


def test_a_step_counter_that_stands_still_is_down(clock: Clock) -> None:
    ledger = Ledger(None, clock)
    train(ledger, clock, *[0.5] * 100, 174.5, *[0.5] * 100)
    assert spent(ledger) == {"productive": 100.5, "down": 174}


def test_looking_at_it_meanwhile_makes_no_difference(clock: Clock) -> None:
    ledger = Ledger(None, clock)
    train(ledger, clock, *[0.5] * 100)
    for _ in range(349):
        clock.now += 0.5
        ledger.trained(100)
        ledger.as_dict()
    train(ledger, clock, *[0.5] * 100)
    assert spent(ledger) == {"productive": 100, "down": 174.5}


def test_each_of_several_stalls_is_down(clock: Clock) -> None:
    ledger = Ledger(None, clock)
    train(ledger, clock, *[0.5] * 60, *([60.5] + [0.5] * 9) * 5)
    assert spent(ledger) == {"productive": 55, "down": 300}


@pytest.mark.parametrize("step_seconds", [0.001, 0.5, 6, 300])
@pytest.mark.parametrize("workers", [1, 4, 50])
def test_regular_steps_are_all_productive_however_long_and_though_they_end_together(
    clock: Clock, step_seconds: float, workers: int
) -> None:
    ledger = Ledger(None, clock)
    for _ in range(20):
        train(ledger, clock, step_seconds, *[0.0] * (workers - 1))
    assert spent(ledger) == {"productive": pytest.approx(20 * step_seconds)}


def test_a_jitter_is_no_stall(clock: Clock) -> None:
    ledger = Ledger(None, clock)
    random = Random(7)
    gaps = [random.uniform(0.1, 2) * 6 for _ in range(300)]
    train(ledger, clock, *gaps)
    assert spent(ledger) == {"productive": pytest.approx(sum(gaps), abs=0.01)}


def test_a_hang_among_long_steps_is_down(clock: Clock) -> None:
    ledger = Ledger(None, clock)
    train(ledger, clock, *[60] * 10, 3600, *[60] * 10)
    assert spent(ledger) == {"productive": 21 * 60, "down": 3540}


def test_steps_that_become_slower_for_good_are_soon_productive_again(clock: Clock) -> None:
    """As when all workers but one have gone."""
    ledger = Ledger(None, clock)
    train(ledger, clock, *[0.5] * 100)
    train(ledger, clock, *[20] * 100)
    down = spent(ledger)["down"]
    assert 0 < down < 400
    train(ledger, clock, *[20] * 100)
    assert spent(ledger)["down"] == down


def test_recomputed_steps_that_stall_are_down_as_well(clock: Clock) -> None:
    ledger = Ledger(None, clock)
    train(ledger, clock, *[1] * 20)
    ledger.restored(0)
    train(ledger, clock, *[1] * 10, 101, *[1] * 9)
    assert spent(ledger) == {"productive": 20, "recomputed": 20, "down": 100}
