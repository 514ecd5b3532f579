"""Mixed precision where tables are split over the parameter servers; docs/programs.md says what works.

A layer with the policy `mixed_bfloat16` keeps its weights in float32, and computes with them in bfloat16: tf_keras
wraps each weight into a variable that casts itself. It has no such wrapper for a split one, which is made here.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from trainer.core.contracts import Variable
from trainer.core.failures import UserError
from trainer.training.tf_internals.variables import autocast_dtype, wrap_autocast_variables

NO_LOSS_SCALING = "is not supported with the tf.distribute.Strategy"


class CastShards(tf.__internal__.distribute.ShardedVariable):
    """A split variable whose value casts itself where a layer computes; its shards stay as they are."""

    @property
    def dtype(self) -> Any:
        """The type when the value is read, that is after casting."""
        return autocast_dtype() or self.true_dtype

    @property
    def true_dtype(self) -> Any:
        """The type of the shards."""
        return self.variables[0].dtype

    def __tf_tensor__(self, dtype: Any = None, name: str | None = None) -> Any:
        if dtype is not None and not dtype.is_compatible_with(self.dtype):
            raise ValueError(f"{self.name} is {self.dtype.name} here, not {dtype.name}")
        return tf.cast(tf.concat(self.variables, axis=0, name=name or "concat"), self.dtype)

    @classmethod
    def _overload_operator(cls, operator: str) -> None:
        of_tensor = getattr(tf.Tensor, operator)
        setattr(cls, operator, lambda self, *rest, **named: of_tensor(tf.convert_to_tensor(self), *rest, **named))


CastShards._overload_all_operators()


def wrap(plain: Callable[[Any], Any], variable: Variable) -> Any:
    """Return what tf_keras makes of a layer's weight under a mixed policy, also of a split one."""
    if isinstance(variable, tf.__internal__.distribute.ShardedVariable):
        return CastShards(variable.variables, name=variable.name)
    return plain(variable)


def cast_split_variables() -> None:
    """Have layers with a mixed policy take split variables, in this process."""
    wrap_autocast_variables(wrap)


@contextlib.contextmanager
def no_loss_scaling() -> Iterator[None]:
    """Say what to do where a program wants loss scaling, which tf_keras does not do with such a strategy."""
    try:
        yield
    except ValueError as error:
        if NO_LOSS_SCALING not in str(error):
            raise
        raise UserError(
            "tf_keras scales no losses under this strategy, which the policy mixed_float16 and LossScaleOptimizer "
            "need: take the policy mixed_bfloat16, which needs none, or float32"
        ) from error
