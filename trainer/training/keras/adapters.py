"""Chooses between the two Keras, by the class of the program's model."""

from __future__ import annotations

from trainer.core.contracts import Model
from trainer.core.program import is_keras3
from trainer.training.keras.base import KerasModel
from trainer.training.keras.keras2 import Keras2Model
from trainer.training.keras.keras3.model import Keras3Model


def keras_of(model: Model) -> KerasModel:
    """Return the model as its Keras has it trained."""
    return Keras3Model(model) if is_keras3(model) else Keras2Model(model)
