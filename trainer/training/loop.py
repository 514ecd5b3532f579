"""The custom loop: call after call, until the last step or a request to stop."""

from __future__ import annotations

from trainer.training.controller import Controller


def train_with_loop(controller: Controller) -> None:
    """Train to the last step; raises Stopped, after a checkpoint, when asked to stop."""
    controller.begin()
    while not controller.done:
        if steps := controller.next_call():
            controller.call(steps)
        else:
            controller.evaluate()
