"""What callbacks may not change: steps are traced before the first epoch, and would go on as they were."""

from __future__ import annotations

from trainer.core.contracts import Model
from trainer.core.failures import UserError

FIX = (
    "steps were traced before and would go on as they were. Train that in a run of its own, which begins with this "
    "one's weights (initial_weights, docs/training.md), and give build_model a parameter for it"
)


class AsTraced:
    """A model as its steps were traced: what it was compiled with, and which of its layers are trained."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self._compiled = (model.optimizer, model.loss)
        self._trained = trained_layers(model)

    def check(self) -> None:
        """Raise UserError where that has changed since."""
        optimizer, loss = self._compiled
        if self._model.optimizer is not optimizer or self._model.loss is not loss:
            raise UserError(f"a callback has compiled the model again: {FIX}")
        now = trained_layers(self._model)
        changed = sorted(name for name, trained in now.items() if trained != self._trained.get(name, trained))
        if changed:
            raise UserError(f"a callback has changed `trainable` of {', '.join(changed)}: {FIX}")


def trained_layers(model: Model) -> dict[str, bool]:
    """Return by their names whether layers are trained."""
    return {layer.name: bool(layer.trainable) for layer in model._flatten_layers()}
