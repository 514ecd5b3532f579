"""The custom loop: call after call, until the last step, a callback that ends it, or a request to stop."""

from __future__ import annotations

from trainer.core.contracts import Model
from trainer.training.loop.controller import Controller
from trainer.training.loop.epochs import Epochs, finalise


def train_with_loop(model: Model, controller: Controller) -> None:
    """Train to the last step; raises Stopped, after a checkpoint, when asked to stop."""
    controller.begin()
    while not controller.done:
        if steps := controller.next_call():
            controller.call(steps)
        else:
            controller.evaluate()
    finalise(model)


def train_in_epochs(model: Model, epochs: Epochs) -> None:
    """Do the same with the program's callbacks, which are called as Keras's `fit` calls them."""
    callbacks, logs = epochs.callbacks, {}
    model.stop_training = False
    callbacks.on_train_begin()
    first, batch = epochs.next
    for epoch in range(first, epochs.count):
        callbacks.on_epoch_begin(epoch)
        while epochs.follow.steps and not model.stop_training:
            callbacks.on_train_batch_begin(batch)
            batch += epochs.follow.steps
            callbacks.on_train_batch_end(batch - 1, epochs.follow.call())
        logs, batch = epochs.logs(), 0
        callbacks.on_epoch_end(epoch, logs)
        if model.stop_training:
            break
    callbacks.on_train_end(logs)
