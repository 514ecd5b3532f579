"""Load a user's program: an object with build_model, train_dataset and eval_dataset, named package.module:Name."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import inspect
import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from trainer.core.constructor import construct
from trainer.core.contracts import Model, Program
from trainer.core.failures import RAISED, UserError, explain, is_the_programs
from trainer.core.layer_names import count_names_again, counting_no_names
from trainer.core.own_frames import is_user_file
from trainer.core.settings.parameters import describe_values
from trainer.core.slow_code import naming_slow_code

log = logging.getLogger(__name__)
OTHER_BACKENDS = ("jax", "openvino", "torch")  # Keras 3's, named as their libraries
# Methods of a model that the trainer does not call as Keras's `fit` does, with what can do the same.
NOT_CALLED = {"fit": "train_step, callbacks, or the program's train_dataset", "make_train_function": "train_step"}
FITTED_TO_THE_LOSS = ("accuracy", "acc", "crossentropy", "ce")  # names of metrics for which tf_keras looks at the loss
EVAL = "eval_dataset"  # which no run needs that evaluates nothing
REQUIRED = ("build_model", "train_dataset", EVAL)


def required_methods(evaluates: bool) -> list[str]:
    """Return the methods that a program must have; without `evaluates`, which is `evaluation: none`, fewer."""
    return [method for method in REQUIRED if evaluates or method != EVAL]


def load_program(
    name: str, arguments: Mapping[str, Any], once_imported: Callable[[], None] = lambda: None, *, evaluates: bool = True
) -> Program:
    """Import the module and build the object with these arguments; raises UserError that says what is wrong.

    Without `evaluates`, which is `evaluation: none`, the program needs no evaluation data.
    """
    module_name, _, attribute = name.partition(":")
    found = import_module(name, module_name)
    once_imported()
    for part in attribute.split("."):
        if not hasattr(found, part):
            close = difflib.get_close_matches(part, [item for item in dir(found) if item[0] != "_"], n=1)
            hint = f"did you mean {close[0]!r}?" if close else f"expected a class with {', '.join(REQUIRED)}"
            raise UserError(f"program {name}: {module_name} has no {part!r}: {hint}")
        found = getattr(found, part)
    try:
        with naming_slow_code(f"building the program {name}"):
            program = construct(found, name, arguments)
    except RAISED as error:
        if isinstance(error, UserError) or not is_the_programs(error):
            raise
        described = describe_values(arguments) or "no arguments"
        raise UserError(f"program {name}: building it with {described} failed: {explain(error)}") from error
    reject_modes(f"program {name}")
    return check_program(program, name, evaluates)


def reject_missing_package(name: str) -> None:
    """Raise UserError where the program's package, or module without one, is nowhere; nothing is imported."""
    package = name.partition(":")[0].partition(".")[0]
    if package not in sys.modules and importlib.util.find_spec(package) is None:
        raise _no_module(name, package)


def _no_module(name: str, missing: str) -> UserError:
    places = ", ".join(str(Path(place or ".").resolve()) for place in sys.path[:3])
    return UserError(
        f"program {name}: there is no module {missing!r}; looked first in {places}. "
        "Its package must be in release_program, here in the working directory, or installed"
    )


def import_module(name: str, module_name: str) -> Any:
    """Import the module of the program of this name; raises UserError that says what is wrong."""
    try:
        with naming_slow_code(f"importing the program's module {module_name}"):
            return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name and (module_name == error.name or module_name.startswith(error.name + ".")):
            raise _no_module(name, error.name) from error
        why = explain(error)
        if error.name in OTHER_BACKENDS and os.environ.get("KERAS_BACKEND") in OTHER_BACKENDS:
            why = f"{error}: Keras 3 runs on TensorFlow here: leave KERAS_BACKEND out of the program"
        raise UserError(f"program {name}: {why}") from error
    except RAISED as error:
        if not is_the_programs(error):
            raise
        raise UserError(f"program {name}: importing it failed: {explain(error)}") from error


def reject_modes(what: str) -> None:
    """Raise UserError where a program has TensorFlow run otherwise than workers can."""
    if "tensorflow" not in sys.modules:
        return
    import tensorflow as tf

    if not tf.executing_eagerly():
        raise UserError(
            f"{what} has switched eager execution off (tf.compat.v1.disable_eager_execution or disable_v2_behavior). "
            "The trainer and tf.keras need it, and steps are traced to graphs all the same: leave the call out"
        )
    if tf.config.functions_run_eagerly():
        raise UserError(
            f"{what} has called tf.config.run_functions_eagerly(True). Workers run traced functions alone: leave the "
            "call out. To look at numbers within a step, use tf.print"
        )
    if not tf.config.get_soft_device_placement():
        raise UserError(
            f"{what} has called tf.config.set_soft_device_placement(False). TensorFlow then places no part of a step, "
            "a save or a dataset on workers and ps by itself: leave the call out"
        )


def check_program(program: Program, name: str, evaluates: bool = True) -> Program:
    """Return the program, or raise UserError that says which method it has not, or takes something else."""
    needed = required_methods(evaluates or hasattr(program, EVAL))
    missing = [method for method in needed if not callable(getattr(program, method, None))]
    if missing:
        is_call = callable(program) and len(missing) == len(needed)
        hint = "it is a function, and is not called. Name a class, or an object of one"
        if not is_call:
            hint = f"expected {', '.join(REQUIRED)}, as docs/programs.md has them"
        if missing == [EVAL]:
            hint = "write it, or set evaluation: none"
        raise UserError(f"program {name} has no method {' and no method '.join(missing)}: {hint}")
    for method in needed:
        given = () if method == "build_model" else ("context",)
        try:
            inspect.signature(getattr(program, method)).bind(*given)
        except TypeError as error:
            right = f"{method}({', '.join(('self', *given))})"
            raise UserError(f"program {name}: {method} can't be called ({error}): expected {right}") from error
    return program


def program_file(program: Program) -> Path | None:
    """Return the source file of the program's class, to tell the user's lines from a library's."""
    module = sys.modules.get(type(program).__module__)
    name = getattr(module, "__file__", None)
    return Path(name).resolve() if name else None


def build_model(program: Program) -> Model:
    """Call the program's build_model and check what it returns; raises UserError."""
    count_names_again(program)
    with naming_slow_code(f"{type(program).__name__}.build_model", program_file(program)):
        model = program.build_model()
    name = type(program).__name__
    reject_modes(f"{name}.build_model")
    if not is_keras3(model) and not (hasattr(model, "train_step") and hasattr(model, "compiled_metrics")):
        raise UserError(
            f"{name}.build_model returned {type(model).__module__}.{type(model).__name__}, not a tf_keras model: "
            "build it with tf.keras (which is tf_keras here), or with keras (which is Keras 3), and compile it"
        )
    if not (model.compiled if is_keras3(model) else getattr(model, "_is_compiled", False)):
        raise UserError(f"{name}.build_model returned a model that is not compiled: call model.compile(...) in it")
    if model.run_eagerly:
        raise UserError(f"{name}.build_model compiled with run_eagerly=True, which workers cannot do: leave it out")
    reject_mixture(model, f"{name}.build_model")
    reject_unknown_metrics(model, f"{name}.build_model")
    for method, place in NOT_CALLED.items():
        reject_own_function(program, model, method, f"put what it does into {place}")
    return model


def reject_own_function(program: Program, model: Model, method: str, fix: str) -> None:
    """Raise UserError where the user's code has a method that Keras's `fit` or `evaluate` is, makes or calls.

    A library's own is warned of: with its default settings it may do what Keras's does.
    """
    owner = next((kind for kind in type(model).__mro__ if method in vars(kind)), None)
    kinds = {getattr(owner, "__module__", None), getattr(getattr(model, method, None), "__module__", None)}
    modules = {module for module in kinds if module and not module.startswith(("keras.", "tf_keras."))}
    name = type(model).__name__
    if method in vars(model) or any(is_users(module, program) for module in modules):
        raise UserError(
            f"{name} has its own {method}, which the trainer does not call, since it packs steps into calls of its "
            f"own: {fix} (docs/programs.md)"
        )
    if modules:
        log.warning(
            "%s has a %s of the library %s, which the trainer does not call: what it does beside Keras's is left out. "
            "Do that in the datasets, and return keras.Model(model.inputs, model.outputs) (docs/programs.md)",
            name,
            method,
            min(modules).partition(".")[0],
        )


def is_users(module: str, program: Program) -> bool:
    """Return whether a module is the user's, as a notebook is, which has no file."""
    file = getattr(sys.modules.get(module), "__file__", None)
    return is_user_file(Path(file).absolute(), program_file(program)) if file else module == "__main__"


def is_keras3(model: Model) -> bool:
    """Return whether a model is of Keras 3, which a program chooses with `import keras`; tf.keras is tf_keras."""
    return any(kind.__module__.startswith("keras.") for kind in type(model).__mro__)


def reject_mixture(model: Model, what: str) -> None:
    """Raise UserError where a model was compiled with losses or metrics of the other Keras: it may take them."""
    if is_keras3(model):
        kept, other, fix = getattr(model, "_compile_metrics", None), "tf_keras.", "keras.{} instead of tf.keras.{}"
    else:
        kept, other, fix = model.compiled_metrics, "keras.", "tf.keras.{} instead of keras.{}"
    compiled = [model.loss, *(getattr(kept, name, None) for name in ("_user_metrics", "_user_weighted_metrics"))]
    for value in leaves(compiled):
        kind = type(value)
        # One of the program's own is of the Keras that it derives from.
        theirs = next((each for each in kind.__mro__ if each.__module__.startswith(other)), None)
        if theirs is not None:
            where = "losses" if "loss" in theirs.__module__ else "metrics"
            name = f"{where}.{theirs.__name__}"
            raise UserError(
                f"{what} compiled a model of {'Keras 3' if is_keras3(model) else 'tf_keras'} with "
                f"{kind.__module__}.{kind.__name__}, which is of the other Keras: write {fix.format(name, name)}"
            )


def reject_unknown_metrics(model: Model, what: str) -> None:
    """Raise UserError for a name that is no metric's, which tf_keras would call in the step; Keras 3 refuses it."""
    if is_keras3(model):
        return
    known = sys.modules["tf_keras"].metrics
    kept = model.compiled_metrics
    for name in leaves([getattr(kept, each, None) for each in ("_user_metrics", "_user_weighted_metrics")]):
        is_known = not isinstance(name, str) or name.lower() in FITTED_TO_THE_LOSS
        with counting_no_names():
            is_unknown = not is_known and isinstance(known.get(name), str)
        if is_unknown:
            close = difflib.get_close_matches(name, [*FITTED_TO_THE_LOSS, *dir(known)], n=1)
            hint = f": did you mean {close[0]!r}?" if close else ""
            raise UserError(f"{what} compiled the metric {name!r}, which tf_keras does not know{hint}")


def leaves(value: object) -> Iterator[Any]:
    """Yield what nested lists and dicts hold."""
    if isinstance(value, Mapping):
        value = value.values()
    elif not isinstance(value, list | tuple):
        yield value
        return
    for one in value:
        yield from leaves(one)
