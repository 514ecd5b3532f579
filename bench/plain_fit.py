"""Model.fit on parameter servers as TensorFlow's guide has it: DatasetCreator, one step a call.

Prints a JSON line {"time", "step"} at the end of each epoch, until it is killed. The cluster comes from TF_CONFIG.
With a directory BackupAndRestore saves there at the end of each epoch, before that, and begins where it has saved.
Source: https://www.tensorflow.org/tutorials/distribute/parameter_server_training, "Parameter server training with
Model.fit API".
"""

from __future__ import annotations

import sys
from typing import Any

import tensorflow as tf

from bench.timeline import print_point
from trainer.core.program import load_program


class Points(tf.keras.callbacks.Callback):
    """Says when an epoch has ended; at that time no step is in flight."""

    def __init__(self, epoch_steps: int) -> None:
        super().__init__()
        self._epoch_steps = epoch_steps

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        print_point((epoch + 1) * self._epoch_steps)


def main(program_name: str, epoch_steps: int, directory: str = "") -> None:
    resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    program = load_program(program_name, {})
    strategy = tf.distribute.ParameterServerStrategy(resolver)
    with strategy.scope():
        model = program.build_model()
    creator = tf.keras.utils.experimental.DatasetCreator(program.train_dataset)
    callbacks = [tf.keras.callbacks.BackupAndRestore(directory)] if directory else []
    callbacks.append(Points(epoch_steps))
    model.fit(creator, epochs=10**9, steps_per_epoch=epoch_steps, callbacks=callbacks, verbose=0)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), *sys.argv[3:])
