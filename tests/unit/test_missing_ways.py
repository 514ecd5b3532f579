"""Which members are left out, since a way is missing for too long."""

from __future__ import annotations

from trainer.cluster.reach.missing_ways import LOST_SECONDS, STUCK_SECONDS, MissingWays

PARTED, LOST = {"worker-1": "no way to ps-0"}, {"ps-0": "no worker has a way to it"}


def test_a_worker_whose_call_does_not_end_is_left_out_after_a_while() -> None:
    ways, busy = MissingWays(), {"worker-0": 0.0, "worker-1": 0.0}
    training = ["worker-0", "worker-1"]
    assert list(ways.find_lasting(training, PARTED, {}, busy, 100.0)) == []
    assert list(ways.find_lasting(training, PARTED, {}, busy, 100.0 + STUCK_SECONDS)) == []
    found = list(ways.find_lasting(training, PARTED, {}, busy, 100.1 + STUCK_SECONDS))
    assert found == [("worker-1", "no way to ps-0")]


def test_a_worker_whose_calls_end_stays() -> None:
    ways = MissingWays()
    for now in range(0, 100, 5):
        assert list(ways.find_lasting(["worker-1"], PARTED, {}, {"worker-1": now - 1.0}, now)) == []


def test_a_way_that_was_back_meanwhile_counts_from_its_next_loss() -> None:
    ways, busy = MissingWays(), {"worker-1": 0.0}
    assert list(ways.find_lasting(["worker-1"], PARTED, {}, busy, 0.0)) == []
    assert list(ways.find_lasting(["worker-1"], {}, {}, busy, 5.0)) == []
    assert list(ways.find_lasting(["worker-1"], PARTED, {}, busy, 9.0)) == []
    assert list(ways.find_lasting(["worker-1"], PARTED, {}, busy, STUCK_SECONDS + 1.0)) == []


def test_a_ps_is_lost_while_no_worker_trains() -> None:
    ways = MissingWays()
    assert list(ways.find_lasting(["worker-0"], {}, LOST, {}, 0.0)) == []
    assert list(ways.find_lasting(["worker-0"], {}, LOST, {}, 100.0)) == []
    assert list(ways.find_lasting([], {}, LOST, {}, 101.0)) == []
    assert list(ways.find_lasting([], {}, LOST, {}, 101.1 + LOST_SECONDS)) == [("ps-0", "no worker has a way to it")]


def test_a_generation_that_is_over_is_forgotten() -> None:
    ways = MissingWays()
    list(ways.find_lasting([], {}, LOST, {}, 0.0))
    ways.forget()
    assert list(ways.find_lasting([], {}, LOST, {}, 100.0)) == []
