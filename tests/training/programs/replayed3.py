"""`matrix3`, as `replayed` has `matrix`."""

import keras
from matrix3 import Matrix
from replayed import Replay


class Replay3(keras.callbacks.Callback):
    def on_train_end(self, logs=None):
        Replay().on_train_end()


class Replayed3(Matrix):
    def callbacks(self):
        return [Replay3()]
