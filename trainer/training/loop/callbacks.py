"""The program's Keras callbacks: which of them a training can call (docs/callbacks.md), and what they remember."""

from __future__ import annotations

import contextlib
import logging
from collections import Counter
from typing import Any

import tensorflow as tf

from trainer.core.contracts import Callback, Model, Optimizer, Program
from trainer.core.failures import UserError
from trainer.core.settings.config import Config
from trainer.run.callback_store import NotStorable, encode
from trainer.training.keras.adapters import keras_of
from trainer.training.updates.learning_rate import rate_of

log = logging.getLogger(__name__)
keras = tf.keras.callbacks

KERAS = ("tf_keras.", "keras.")
# By the names of Keras's classes.
REFUSED = {
    "BaseLogger": "the trainer averages the metrics: leave it out",
    "ProgbarLogger": "the log and `fab status` say how far the training is: leave it out",
    "BackupAndRestore": "the trainer's checkpoints do that, also between epochs: leave it out",
    "SidecarEvaluatorModelExport": "it is called at an evaluation's end, which happens elsewhere: "
    "take ModelCheckpoint with save_best_only=True, and evaluation: exact",
    "UpdateEmbeddingCallback": "it replaces tables and slots beside the training, so that no "
    "checkpoint fits: leave it out, and begin a new run with the larger vocabulary",
    "OrbaxCheckpoint": "the trainer's checkpoints do that, also between epochs: leave it out",
    "SwapEMAWeights": "averages are taken for weights at the end of the training: leave it out",
}
BATCHES = ("batch_begin", "batch_end", "train_batch_begin", "train_batch_end")
NEVER_CALLED = (
    *(f"{mode}_{when}" for mode in ("test", "predict") for when in ("begin", "end", "batch_begin", "batch_end")),
)
# Nothing that Keras gives each callback is its own.
NOT_ITS_OWN = ("model", "params", "validation_data", "_model", "_params")
# They change no weights, and call no function of the program's.
READING = ("CSVLogger", "History", "ModelCheckpoint", "ReduceLROnPlateau", "RemoteMonitor", "TensorBoard")
# They write what one process of several must write.
OF_THE_LEADER = (keras.CSVLogger, keras.RemoteMonitor)


def callbacks_of(config: Config, program: Program, model: Model, *, leads: bool = True) -> list[Callback]:
    """Return the program's callbacks, none where it has none; raises UserError for one that can't be called.

    Call it in the strategy's scope, with a model that has its optimizer's variables.
    """
    if not hasattr(program, "callbacks"):
        return []
    name = f"{type(program).__name__}.callbacks"
    returned = program.callbacks()
    found = tf.nest.flatten(returned) if returned is not None else []
    kind = keras_of(model).callbacks.Callback
    for callback in found:
        if not isinstance(callback, kind):
            wanted = f"{keras_of(model).library}.callbacks.Callback"
            raise UserError(f"{name} returned {callback!r}: it must be a list of {wanted}")
        if why := problem(config, callback, model):
            raise UserError(f"{name} returned {type(callback).__name__}, which this training can't call: {why}")
        if unheard := [f"on_{one}" for one in NEVER_CALLED if has_own(callback, f"on_{one}")]:
            log.warning("%s is never told %s: evaluation is not Keras's", type(callback).__name__, ", ".join(unheard))
    return [callback if leads or not isinstance(callback, OF_THE_LEADER) else idle(callback) for callback in found]


def idle(callback: Callback) -> Callback:
    """Return one of the same name that does nothing: members in step agree on what callbacks do, so that all have some.

    With a list that is empty on some members alone, the others would wait for them for ever.
    """
    return type(type(callback).__qualname__, (keras.Callback,), {})()


def problem(config: Config, callback: Callback, model: Model) -> str | None:
    """Say why a training can't call a callback, and what to do; None where it can."""
    for kind in type(callback).__mro__:
        if kind.__module__.startswith(KERAS) and kind.__name__ in REFUSED:
            return REFUSED[kind.__name__]
    library = keras_of(model).callbacks
    if config.traits.remote and (why := remote_problem(callback, library)):
        return why
    sets_rate = isinstance(callback, library.LearningRateScheduler | library.ReduceLROnPlateau)
    if sets_rate and has_schedule(model.optimizer):
        return "the optimizer has a LearningRateSchedule, which sets the rate: give it a number, or leave this out"
    wanted = getattr(callback, "monitor", "")
    best_only = getattr(callback, "save_best_only", True)  # ModelCheckpoint else saves whatever the metrics are
    if isinstance(wanted, str) and wanted.startswith("val_") and best_only and config.evaluation in ("sidecar", "none"):
        return (
            f"it watches {wanted}, which is never there with evaluation: {config.evaluation}: "
            f"set evaluation to {keras_of(model).evaluations}"
        )
    return None


def has_schedule(optimizer: Optimizer) -> bool:
    """Return whether a LearningRateSchedule sets the optimizer's rate."""
    return any(kind.__name__ == "LearningRateSchedule" for kind in type(rate_of(optimizer)).__mro__)


def remote_problem(callback: Callback, library: Any) -> str | None:
    """Say why a callback can't be called where workers do the batches."""
    if isinstance(callback, library.ModelCheckpoint) and callback.save_freq != "epoch":
        return f'save_freq={callback.save_freq!r} counts batches, which workers do: pass save_freq="epoch"'
    if isinstance(callback, library.TensorBoard):
        if callback.update_freq != "epoch":
            return f'update_freq={callback.update_freq!r} counts batches, which workers do: pass update_freq="epoch"'
        if callback._should_trace:
            return "profile_batch traces this process, where no batch is done: pass profile_batch=0"
        if callback.write_steps_per_second:
            return "write_steps_per_second counts batches, which workers do: leave it out, the trainer writes them"
    if own := [f"on_{one}" for one in BATCHES if has_own(callback, f"on_{one}")]:
        return f"workers do the batches, so that {', '.join(own)} can't be called: use on_epoch_end, and epoch_steps"
    return None


def has_own(callback: Callback, method: str) -> bool:
    """Return whether a class of the program's, or a LambdaCallback's function, takes the place of Keras's."""
    if method in vars(callback):
        return True
    owner = next(kind for kind in type(callback).__mro__ if method in vars(kind))
    return not owner.__module__.startswith(KERAS)


def hears_batches(callback: Callback) -> bool:
    """Return whether a callback of the program's is called for batches, as it may be where this process trains."""
    return any(has_own(callback, f"on_{one}") for one in BATCHES)


def may_write(callback: Callback) -> bool:
    """Return whether a callback may change weights."""
    kind = type(callback)
    keeps = kind.__name__ == "EarlyStopping" and not callback.restore_best_weights
    return not (kind.__module__.startswith(KERAS) and (keeps or kind.__name__ in READING))


def keys_of(callbacks: list[Callback]) -> list[str]:
    """Return a name for each callback by which the next process finds it: its class, and which one of these it is."""
    seen: Counter[str] = Counter()
    keys = []
    for callback in callbacks:
        name = type(callback).__qualname__
        keys.append(f"{name} {seen[name]}")
        seen[name] += 1
    return keys


def outlives(callback: Callback, name: str) -> bool:
    """Return whether an attribute goes on in the next process; in each one Keras 3 turns the sign of `min_delta`."""
    return name not in NOT_ITS_OWN and not (name == "min_delta" and hasattr(callback, "_set_monitor_op"))


def attributes(callback: Callback) -> dict[str, tuple[Any, dict[str, Any]]]:
    """Return the attributes that a record can hold: each encoded, and the arrays that it names."""
    found = {}
    for name, value in vars(callback).items():
        arrays: dict[str, Any] = {}
        if outlives(callback, name):
            with contextlib.suppress(NotStorable, RecursionError):
                found[name] = (encode(value, arrays), arrays)
    return found
