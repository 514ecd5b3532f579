"""Where workers begin to read: from the settings, what calls have told, and a checkpoint's position."""

from __future__ import annotations

from typing import Any

from trainer.core.settings.config import Config
from trainer.run.data_position import Beginning, Position
from trainer.training.steps.read_order import ReadOrder


def order(workers: int = 2, seed: int = 7, *, of_all: bool = False, **settings: Any) -> ReadOrder:
    return ReadOrder(Config(program="a:B", **settings), workers, seed, of_all=of_all)


def test_a_worker_that_comes_back_reads_in_the_order_of_the_step_that_is_reached() -> None:
    reading = order()
    reading.begin(100)
    assert reading.beginning(0) == reading.beginning(1) == Beginning(7, 100)
    reading.count(140)
    reading.count(120)  # an older report
    assert reading.beginning(1) == Beginning(7, 140)


def test_workers_of_a_data_service_have_one_order() -> None:
    reading = order(of_all=True)
    reading.begin(100)
    reading.count(140)
    assert reading.beginning(0) == reading.beginning(1) == Beginning(7, 100)


def test_an_exact_part_goes_on_where_its_worker_was() -> None:
    reading = order(input_position="exact")
    reading.begin(100)
    reading.advance(1, (2, 64))
    assert [reading.beginning(worker) for worker in (0, 1)] == [Beginning(7), Beginning(7, 2, 64)]
    assert reading.position is not None
    assert reading.position.parts == ((0, 0), (2, 64))


def test_only_an_exact_order_has_a_position() -> None:
    reading = order()
    assert reading.position is None
    assert not reading.go_on_from(Position(3, ((1, 8), (1, 8))))
    assert reading.beginning(0) == Beginning(7)


def test_an_exact_order_goes_on_with_the_positions_seed() -> None:
    before, reading = order(seed=3, input_position="exact"), order(input_position="exact")
    before.advance(0, (1, 8))
    assert before.position is not None
    assert not reading.go_on_from(before.position)
    assert reading.position == before.position


def test_other_data_begin_the_pass_again() -> None:
    before = order(seed=3, input_position="exact", program_args={"size": 4})
    reading = order(input_position="exact", program_args={"size": 8})
    before.advance(0, (1, 8))
    before.advance(1, (1, 4))
    assert before.position is not None
    assert "size" in reading.go_on_from(before.position)
    assert [reading.beginning(worker) for worker in (0, 1)] == [Beginning(3, 1, 0)] * 2


def test_an_order_follows_from_a_seed_that_was_set_or_where_it_is_exact() -> None:
    assert not order().seeded
    assert order(seed=5, input_position="exact").seeded
    assert ReadOrder(Config(program="a:B", seed=5), 2, 5).seeded
