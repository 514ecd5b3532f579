"""What is said and left where only a lost ps's variables go back; the ps here are names."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import tensorflow as tf

from trainer.core.settings.config import Config
from trainer.training.loop.resumption import Resumption


class Going:
    """A run that goes on at step 90, of whose second ps only the checkpoint of step 60 is left."""

    def __init__(self) -> None:
        self.done: list[str] = []
        self.reported: list[str] = []
        step = tf.Variable(90, dtype=tf.int64)
        runner = SimpleNamespace(
            step=step, trained=None, tables=None, position=None, copy=None, agree=lambda numbers: numbers
        )
        progress = SimpleNamespace(
            leads=True,
            ledger=SimpleNamespace(restored=lambda step: 0),
            events=SimpleNamespace(write=lambda name, message, **_: self.reported.append(f"{name}: {message}")),
            checkpointed=lambda *_: None,
        )
        checkpoints = SimpleNamespace(restore=lambda: 60, prepare=lambda: self.done.append("prepare"))
        handover = SimpleNamespace(
            lacking={1}, take_over=lambda *_: True, position=None, offer=lambda *_: self.done.append("offer")
        )
        catalogue = SimpleNamespace(newest=lambda: 60, prefix=str)
        context = SimpleNamespace(
            config=Config(program="a:B", steps=100),
            directory=SimpleNamespace(catalogue=catalogue),
            progress=progress,
            membership=SimpleNamespace(servers=["ps-1", "ps-2"]),
        )
        self.parts: list[Any] = [context, runner, checkpoints, handover, None]

    def restore(self) -> int:
        return Resumption(*cast(Any, self.parts)).restore()


def test_a_lost_ps_is_named_as_elsewhere_where_another_is_left_out() -> None:
    going = Going()
    assert going.restore() == 90
    assert going.reported == ["attached: step 90; ps-2 of step 60"]


def test_what_was_set_aside_counts_until_the_next_generation_can_train() -> None:
    """Else a ps that is lost meanwhile takes the step with it, which the coordinator has not read yet."""
    going = Going()
    going.restore()
    assert going.done == ["prepare", "offer"]
