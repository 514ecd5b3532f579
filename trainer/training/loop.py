"""The custom loop: {a block of calls, what is due} until the last step or a request to stop."""

from __future__ import annotations

from typing import Any

from trainer.training.controller import Controller


def train_with_loop(replicas: Any, course: Controller) -> None:
    """Train to the last step; raises Stopped, after a checkpoint, when asked to stop."""
    course.begin()
    while not course.done:
        outputs = None
        for steps in course.plan():
            outputs = replicas.call(steps)
        replicas.join(course.waiting)
        course.block_ended(outputs)
        if course.epoch_ended:
            course.evaluate()
