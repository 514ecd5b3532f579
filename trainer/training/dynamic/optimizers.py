"""What an optimizer does to the rows of a dynamic table: the formula of its Keras, for rows alone."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import tensorflow as tf

from trainer.core.contracts import Optimizer, Tensor, Variable
from trainer.core.failures import UserError
from trainer.training.dynamic.shard import Change
from trainer.training.row_updates import add_up_rows_once, has_momentum
from trainer.training.tf_internals.variables import Reserved

WHICH = "SGD without momentum, Adagrad, or Adam with lazy_optimizers: true"


@dataclasses.dataclass(frozen=True)
class Formula:
    """How an optimizer changes a row, and what its slots begin with."""

    slots: Sequence[float]
    change: Callable[[Any, Any], Change]
    """Takes the optimizer and its learning rate in a step, and returns the change."""


def sgd(optimizer: Optimizer, rate: Tensor) -> Change:
    return lambda gradient, values: (values - gradient * rate,)


def adagrad(optimizer: Optimizer, rate: Tensor) -> Change:
    def change(gradient: Tensor, values: Tensor, sums: Tensor) -> tuple[Tensor, ...]:
        sums = sums + gradient * gradient
        return values - rate * gradient / tf.sqrt(sums + optimizer.epsilon), sums

    return change


def lazy_adam(optimizer: Optimizer, rate: Tensor) -> Change:
    beta_1, beta_2 = optimizer.beta_1, optimizer.beta_2
    step = tf.cast(tf.convert_to_tensor(optimizer.iterations) + 1, tf.float32)
    correction = tf.sqrt(1 - tf.pow(tf.cast(beta_2, tf.float32), step))
    rate = rate * correction / (1 - tf.pow(tf.cast(beta_1, tf.float32), step))
    epsilon = optimizer.epsilon * (correction if getattr(optimizer, "adaptive_epsilon", False) else 1.0)

    def change(gradient: Tensor, values: Tensor, m: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        m = m + (gradient - m) * (1 - beta_1)
        v = v + (tf.square(gradient) - v) * (1 - beta_2)
        return values - m * rate / (tf.sqrt(v) + epsilon), m, v

    return change


def formula_of(optimizer: Optimizer, *, lazy: bool) -> Formula:
    """Return what a model's optimizer does to rows; raises UserError where it does more, or another thing."""
    name = type(optimizer).__name__
    kinds = [tf.keras.optimizers]
    if "keras" in sys.modules:
        kinds.append(sys.modules["keras"].optimizers)
    if not any(type(optimizer) in (kind.SGD, kind.Adagrad, kind.Adam) for kind in kinds):
        legacy = "legacy." if hasattr(optimizer, "get_slot") else ""
        raise refused(f"the model's optimizer is {legacy}{name}", "compile with one of these")
    if argument := touches_all_rows(optimizer) or gradient_argument(optimizer):
        raise refused(f"the model's {name} has {argument}, which is not for rows alone", f"leave {argument} out")
    if name == "Adam" and not lazy:
        raise refused("the model's optimizer is Adam, which changes all rows at each step", "set lazy_optimizers: true")
    if name == "SGD":
        return Formula((), sgd)
    if name == "Adagrad":
        return Formula((float(optimizer.initial_accumulator_value),), adagrad)
    return Formula((0.0, 0.0), lazy_adam)


def touches_all_rows(optimizer: Optimizer) -> str:
    """Name an argument that makes an optimizer change rows that a gradient doesn't name; nothing where none does."""
    given = {
        "momentum": has_momentum(optimizer),
        "amsgrad": getattr(optimizer, "amsgrad", False),
        "weight_decay": optimizer.weight_decay is not None,
        "use_ema": optimizer.use_ema,
    }
    return next((name for name, is_given in given.items() if is_given), "")


def gradient_argument(optimizer: Optimizer) -> str:
    """Name an argument by which an optimizer changes gradients; nothing where none does."""
    names = ("clipnorm", "clipvalue", "global_clipnorm", "gradient_accumulation_steps", "loss_scale_factor")
    return next((name for name in names if getattr(optimizer, name, None)), "")


def refused(why: str, mend: str) -> UserError:
    return UserError(f"dynamic_tables: {why}; expected {WHICH}: {mend}")


def one_optimizer(optimizers: Iterable[Optimizer | None]) -> Optimizer:
    """Return the one optimizer of a model with dynamic tables; raises UserError where there is another number."""
    found = list(filter(None, optimizers))
    if len(found) != 1:
        raise refused(f"the model has {len(found)} optimizers", "compile it with one, and keep no other in it")
    return found[0]


def leave_out(optimizer: Optimizer) -> None:
    """Have an optimizer, of either Keras, make no variables for dynamic tables; call it before it is built."""
    if getattr(optimizer, "built", False) or getattr(optimizer, "_built", False):
        raise refused("the model's optimizer is built already", "leave that to the training")
    build = optimizer.build

    def build_others(variables: Sequence[Variable]) -> None:
        build([one for one in variables if not is_dynamic(one)])
        # Both Keras refuse what they were not built with.
        places = "_trainable_variables_indices" if hasattr(optimizer, "_trainable_variables_indices") else "_index_dict"
        getattr(optimizer, places).update({optimizer._var_key(one): -1 for one in variables if is_dynamic(one)})

    object.__setattr__(optimizer, "build", build_others)


def train_rows(optimizer: Optimizer, update: Callable[[Any, Any, Change], None], formula: Formula) -> None:
    """Have `update` change the rows of dynamic tables, and the optimizer all others, as it does it by now."""
    plain = optimizer.update_step

    def update_step(gradient: Tensor, variable: Variable, *rate: Tensor) -> None:
        if not is_dynamic(variable):
            plain(gradient, variable, *rate)
            return
        now = tf.cast(rate[0] if rate else optimizer.learning_rate, tf.float32)
        update(getattr(variable, "_value", variable), gradient, formula.change(optimizer, now))

    if hasattr(optimizer, "_deduplicate_sparse_grad"):
        add_up_rows_once(optimizer)  # the update does so itself, with the keys
    object.__setattr__(optimizer, "update_step", update_step)


@tf.autograph.experimental.do_not_convert
def is_dynamic(variable: Variable) -> bool:
    """Return whether a variable, of either Keras, is a part of a dynamic table."""
    return isinstance(getattr(variable, "_value", variable), Reserved)
