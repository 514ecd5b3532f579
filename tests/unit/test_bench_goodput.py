import pytest

from bench.faults import GoodputOutcome, PlannedFault, Steps, pause_after, schedule, value_at
from bench.goodput import main, rows
from bench.timeline import TimedStep


def steady(begin, end, step=0, rate=10):
    """A point each 0.1 s, of a training of so many steps a second."""
    count = round((end - begin) * 10)
    return [TimedStep(begin + i / 10, step + round(i * rate / 10)) for i in range(count)]


# From 100 s to 200 s, with a fault at 130 s that costs 20 s and 50 steps: the checkpoint of step 300 is of 130 s, and
# what was begun after it is begun again.
STEPS = [*steady(90, 135), *steady(155, 200, step=450)]
OUTCOME = GoodputOutcome(
    begin=100,
    end=200,
    reference=0.1,
    steps=STEPS,
    saves=[TimedStep(99.95, 100), TimedStep(129.95, 400), TimedStep(161, 460), TimedStep(199, 840)],
    faults=[PlannedFault(35, "ps kill", "ps-0")],
)


def test_goodput_is_what_the_checkpoints_gained_at_the_undisturbed_speed():
    assert OUTCOME.trained == 740
    assert OUTCOME.goodput == pytest.approx(0.74)


def test_steps_that_are_in_no_checkpoint_are_lost():
    assert OUTCOME.lost == pytest.approx(50, abs=1)


def test_training_without_faults_has_a_goodput_of_one():
    saves = [TimedStep(100 + 5 * i, 50 * i) for i in range(20)]
    outcome = GoodputOutcome(100, 195, 0.1, steady(100, 195.1), saves, [])
    assert outcome.goodput == pytest.approx(1)
    assert outcome.lost == pytest.approx(0)


def test_pause_is_the_time_without_a_step():
    assert OUTCOME.pauses("ps kill") == [pytest.approx(20.1, abs=0.2)]
    assert OUTCOME.pauses("freeze") == []


def test_pause_that_does_not_end_lasts_to_the_end():
    points = [*steady(0, 10), TimedStep(30, 99)]
    assert pause_after(points, at=9.9, until=30) == pytest.approx(20.1, abs=0.2)


def test_pause_belongs_to_the_fault_that_it_began_after():
    assert pause_after(STEPS, at=130, until=140) == pytest.approx(20.1, abs=0.2)
    assert pause_after(STEPS, at=140, until=200) < 0.3


def test_value_grows_evenly_between_two_points():
    points = [TimedStep(10, 0), TimedStep(20, 100)]
    assert [value_at(points, time) for time in (5, 10, 15, 25)] == [0, 0, 50, 100]


def test_schedule_of_ten_minutes():
    faults = schedule(600, partition=True)
    kinds = [fault.kind for fault in faults]
    assert {kind: kinds.count(kind) for kind in set(kinds)} == {
        "worker kill": 19,
        "ps kill": 7,
        "freeze": 1,
        "partition": 1,
    }
    assert faults == sorted(faults, key=lambda fault: fault.at)
    assert len({fault.at for fault in faults}) == len(faults)


@pytest.mark.parametrize("seconds", [60, 120, 600])
def test_who_is_frozen_or_cut_off_is_not_killed(seconds):
    faults = schedule(seconds, partition=True)
    for held in (fault for fault in faults if fault.seconds):
        meanwhile = [fault for fault in faults if held.at <= fault.at <= held.at + held.seconds and fault is not held]
        assert held.task not in [fault.task for fault in meanwhile]


def test_steps_are_counted_over_all_datasets(tmp_path):
    steps = Steps(tmp_path)
    (tmp_path / "1").write_text("5")
    (tmp_path / "2").write_text("7")
    steps.poll(10.0)
    (tmp_path / "2").write_text("")  # being written
    (tmp_path / "1").write_text("6")
    steps.poll(11.0)
    assert steps.points == [TimedStep(10.0, 12), TimedStep(11.0, 13)]
    assert (steps.datasets, steps.newest, steps.active(10.5)) == (2, 11.0, 1)


def test_table_has_a_column_for_each_side_and_no_row_for_what_did_not_happen():
    table = {row[0]: row[1:] for row in rows({"psfleet-loop": OUTCOME, "guide-loop": OUTCOME})}
    assert table["goodput"] == ["0.740", "0.740"]
    assert "pause after a ps kill, s (1)" in table
    assert not any("partition" in name for name in table)


def test_dynamic_tables_are_for_the_program_that_has_tables(capsys):
    with pytest.raises(SystemExit):
        main(["--dynamic"])
    assert "--dynamic is for --program recommender" in capsys.readouterr().err
