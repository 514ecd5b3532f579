"""How the model's optimizers train the rows of dynamic tables: by their own updates, as rows of fixed tables.

Slots are asked of another optimizer of the same class and arguments, built with a small variable: the model's own makes
none for a table. Which of several optimizers trains a table is known when a step is traced, and its slots must be known
when rows are given, so that step is traced again.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Sequence
from typing import Any, Protocol

import tensorflow as tf

from trainer.core.contracts import Optimizer, Tensor, Variable
from trainer.core.failures import UserError
from trainer.training.tables.row_updates import LAZY, add_up_rows_once, changes_rows, has_momentum, is_same
from trainer.training.tf_internals.variables import Reserved
from trainer.training.updates.part_totals import reject_part_totals
from trainer.training.updates.rows import NOT_BUILT, own, slots_of, with_slots

Slots = dict[str, float]


class Trains(Protocol):
    """Has gradients change rows."""

    def update(self, optimizer: Optimizer, variable: Reserved, gradient: Any, change: Any) -> None: ...


def row_slots(optimizer: Optimizer, *, lazy: bool) -> Slots:
    """Return what an optimizer keeps of each number of a row, by its lists' names, with what that begins with.

    Raises UserError where it can't train rows alone.
    """
    name, libraries = type(optimizer).__name__, [tf.keras.optimizers]
    if "keras" in sys.modules:
        libraries.append(sys.modules["keras"].optimizers)
    if not any(changes_rows(optimizer, one, lazy=True) for one in libraries):
        legacy = "legacy." if hasattr(optimizer, "get_slot") else ""
        raise table_error(
            f"the optimizer is {legacy}{name}; expected one of {', '.join(LAZY)}", "compile with one of these"
        )
    for argument, why in REFUSED.items():
        if getattr(optimizer, argument, None):
            raise table_error(f"the optimizer {name} has {argument}, {why}", f"leave {argument} out")
    if optimizer.clipnorm and not isinstance(optimizer, tf.keras.optimizers.Optimizer):
        raise table_error(
            f"Keras 3's {name} has clipnorm, and would clip each ps's part by itself", "take global_clipnorm"
        )
    if not any(changes_rows(optimizer, one, lazy=lazy) for one in libraries):
        raise table_error(f"the optimizer {name}, as it is, changes all rows at each step", "set lazy_optimizers: true")
    return first_slots(optimizer)


# What an optimizer may be told that it can't do to rows, with the reason.
REFUSED = {
    "use_ema": "whose averages replace a whole table at the end",
    "gradient_accumulation_steps": "whose sums would take a second table",
    "loss_scale_factor": "which Keras can't take back from gradients of rows",
}


def first_slots(optimizer: Optimizer) -> Slots:
    """Return the slots of a variable, and what they begin with, as another optimizer with the same arguments has it."""
    if type(optimizer).__name__ == "SGD" and not has_momentum(optimizer):
        return {}
    kind: Any = type(optimizer)
    wanted = inspect.signature(kind.__init__).parameters
    other = kind(**{name: value for name, value in vars(optimizer).items() if name in wanted and name != "name"})
    variable = tf.Variable(tf.zeros([2, 3]))
    other.build([variable])
    return {name: float(own(listed[0]).numpy()[0, 0]) for name, listed in slots_of(other, variable, 0).items()}


def table_error(why: str, fix: str) -> UserError:
    return UserError(f"dynamic_tables: {why}: {fix}, or leave the layer out of dynamic_tables")


def clips(optimizer: Optimizer) -> bool:
    """Return whether an optimizer looks at gradients before those of a row are added up."""
    return any(getattr(optimizer, one, None) for one in ("clipnorm", "clipvalue", "global_clipnorm"))


def takes_one_by_one(optimizer: Optimizer) -> bool:
    """Return whether an optimizer does other things to a row's gradients than to their sum, as Adagrad of Keras 3."""
    libraries = [sys.modules["keras"].optimizers] if "keras" in sys.modules else []
    return any(type(optimizer) is one.Adagrad for one in libraries) and is_same(optimizer)


def leave_out(optimizer: Optimizer) -> None:
    """Have an optimizer, of either Keras, make no variables for dynamic tables; call it before it is built."""
    if getattr(optimizer, "built", False) or getattr(optimizer, "_built", False):
        raise table_error("the model's optimizer is built already", "leave that to the training")
    build = optimizer.build

    def build_others(variables: Sequence[Variable]) -> None:
        build([one for one in variables if not is_dynamic(one)])
        # Both Keras refuse what they were not built with.
        places = "_trainable_variables_indices" if hasattr(optimizer, "_trainable_variables_indices") else "_index_dict"
        getattr(optimizer, places).update({optimizer._var_key(one): NOT_BUILT for one in variables if is_dynamic(one)})
        if type(optimizer).__name__ == "SGD" and not has_momentum(optimizer):
            optimizer.momentums.append(None)  # tf_keras looks there, also where no other weight is trained

    object.__setattr__(optimizer, "build", build_others)


def train_rows(optimizer: Optimizer, tables: Trains) -> None:
    """Have an optimizer do to rows of `tables` what it does to other variables; call it when that is final."""
    plain = optimizer.update_step

    def update_step(gradient: Tensor, variable: Variable, *rate: Tensor) -> None:
        if not is_dynamic(variable):
            plain(gradient, variable, *rate)
            return
        reject_part_totals(optimizer, variable, gradient, [])

        def change(
            values: Tensor, places: Tensor | None, own_variable: Variable, slots: dict[str, Any], numbers: Tensor
        ) -> None:
            if places is not None and takes_one_by_one(optimizer):
                values = tf.IndexedSlices(values, places)
            elif places is not None:
                values = tf.math.unsorted_segment_sum(values, places, tf.size(numbers))
            with with_slots(optimizer, own_variable, slots, numbers) as rows:
                plain(values, rows, *rate)

        tables.update(optimizer, getattr(variable, "_value", variable), gradient, change)

    if hasattr(optimizer, "_deduplicate_sparse_grad"):
        add_up_rows_once(optimizer)  # the tables do so themselves, with the keys
    object.__setattr__(optimizer, "update_step", update_step)


@tf.autograph.experimental.do_not_convert
def is_dynamic(variable: Variable) -> bool:
    """Return whether a variable, of either Keras, is a part of a dynamic table."""
    return isinstance(getattr(variable, "_value", variable), Reserved)
