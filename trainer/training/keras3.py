"""Models of Keras 3 on parameter servers (docs/keras3.md).

Its `fit` can't train there, and its variables and optimizers know of one process alone. So its own `train_step` runs in
the packed calls, with four changes: what a step writes over what it has read is added instead, tables are looked up
where they lie, the shards of a split variable are trained as variables of their own, and random numbers without a seed
are drawn. `keras` is imported where a model of it is at hand: other programs need not pay for it.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from trainer.config import Config
from trainer.failures import UserError
from trainer.program import is_keras3
from trainer.training.constraints import KEPT
from trainer.training.metrics import READING
from trainer.training.one_update import gather_keras3
from trainer.training.optimizers import overwrites_weights
from trainer.training.placement import size
from trainer.training.tf_internals import beneath, forget_keras3_seeds, is_read_since_writes, keras3_seeds_drawn
from trainer.variables import bytes_of, flatten

log = logging.getLogger(__name__)
ShardedVariable = tf.__internal__.distribute.ShardedVariable
PART = re.compile(r"_part_\d+")
COUNT = re.compile(r"_?\d+")
DIRECTION = re.compile(r"^(forward|backward)_")  # by which Bidirectional names its copies of a layer
# What they compute of a table's shard is no part of what they compute of the table.
WHOLE_TABLES = ("Adafactor", "Lamb", "Muon")
LOOKS_UP_ROWS = "_looks_up_rows"
TABLE_BYTES = 4 * 1024 * 1024  # from here on a read at each step takes time that is felt on a network
PASSED_ON = ("Identity", "Cast", "ConcatV2")
NOT_SPLIT = "Set partitioner to none, so that tables stay whole, or"


class Trained(tf.__internal__.tracking.AutoTrackable):
    """What a checkpoint holds of a model: its variables by their names in it, its optimizers' by those of its slots."""

    metrics = ()

    def __init__(self, model: Any, *, with_optimizers: bool = True) -> None:
        names = named(model)
        self.weights = {name: one._value for name, one in names.items()}
        self.optimizer = {name: slots(one, names) for name, one in optimizers_of(model)} if with_optimizers else {}

    @property
    def variables(self) -> list[Any]:
        """The variables as TensorFlow has them, a split one as a whole."""
        return [*self.weights.values(), *(one for held in self.optimizer.values() for one in held.values())]


def named(model: Any) -> dict[str, Any]:
    """Return the model's variables by names that no other order of layers changes, nor what else a process has built.

    Keras counts what it names by itself in all of a process. Such a layer is called as the attribute that it is, or
    as its class. Of several with one name, the number in Keras's tells which was made first.
    """
    found: dict[str, Any] = {}
    known: set[int] = set()

    def walk(layer: Any, path: str, around: Sequence[str] = ()) -> None:
        own = [*layer._trainable_variables, *layer._non_trainable_variables]
        own += [each.state for each in layer._seed_generators]
        variables = [one for one in own if id(one) not in known]
        layers = [one for one in layer._layers if id(one) not in known]
        known.update(map(id, [*variables, *layers]))
        for name, one in apart((COUNT.sub("", one.name), one) for one in variables):
            found[f"{path}{name}"] = one
        attributes = attributes_of(layer)
        around = [*around, uncounted(layer.name)] if is_named_by_keras(layer) else around
        for name, one in apart((label(one, attributes, around), one) for one in layers):
            walk(one, f"{path}{name}/", around)

    walk(model, "")
    return found


def label(layer: Any, attributes: Mapping[int, str], around: Iterable[str] = ()) -> str:
    """Return what a layer is called within another: by the program, else as its attribute, else by its class.

    A name that a program makes of one of Keras's has that one's number in it. `around` are the names, without numbers,
    of layers around this one that Keras has named.
    """
    name: str = layer.name
    if is_named_by_keras(layer):
        return attributes.get(id(layer), uncounted(name))
    if is_named_by_keras(layer, DIRECTION.sub("", name)):
        return uncounted(name)
    for other in around:
        name = re.sub(rf"(?<![a-z0-9]){re.escape(other)}_\d+(?!\d)", other, name)
    return name


def is_named_by_keras(layer: Any, name: str = "") -> bool:
    """Return whether a layer's name, or this one, is that of its class, with a number or without."""
    of_class = rf"{type(layer).__name__.replace('_', '')}\d*"
    return re.fullmatch(of_class, (name or layer.name).replace("_", ""), re.IGNORECASE) is not None


def uncounted(name: str) -> str:
    return re.sub(r"_\d+$", "", name)


def attributes_of(layer: Any) -> dict[int, str]:
    """Return the attributes that are layers, or hold some in a list or dict, by the layers' ids."""
    found: dict[int, str] = {}
    for name, value in sorted(vars(layer).items()):
        if not name.startswith("_"):
            found |= {id(one): path for path, one in reversed(list(leaves_by_name(name, value)))}
    return found


def leaves_by_name(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield what nested lists and dicts hold, with the way to it."""
    if isinstance(value, Mapping):
        parts: Iterable[tuple[Any, Any]] = value.items()
    elif isinstance(value, list | tuple):
        parts = enumerate(value)
    else:
        yield name, value
        return
    for key, part in parts:
        yield from leaves_by_name(f"{name}_{key}", part)


def apart(parts: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    """Yield parts with names that differ: those of one name in the order of the numbers in their own."""
    seen: Counter[str] = Counter()
    for name, one in sorted(parts, key=lambda part: [int(number) for number in re.findall(r"\d+", part[1].name)]):
        yield (f"{name}:{seen[name]}" if seen[name] else name), one
        seen[name] += 1


def trained_by(model: Any, *, with_optimizers: bool = True) -> Any:
    """Return what checkpoints hold of a model: of tf_keras the model itself."""
    return Trained(model, with_optimizers=with_optimizers) if is_keras3(model) else model


def raw(variables: Iterable[Any]) -> list[Any]:
    """Return TensorFlow's variables beneath Keras 3's; tf_keras has none of its own."""
    return [one._value if type(one).__module__.startswith("keras.") else one for one in variables]


def optimizers_of(model: Any) -> Iterator[tuple[str, Any]]:
    """Yield the optimizers that are attributes of the model, or in lists and dicts that are, each once by its name."""
    import keras

    found: dict[int, tuple[str, Any]] = {}
    for attribute, value in sorted(vars(model).items()):
        if attribute.startswith("_self_"):  # these are TensorFlow's own
            continue
        for name, one in leaves_by_name(attribute, value):
            if isinstance(one, keras.optimizers.Optimizer) and (id(one) not in found or name == attribute):
                found[id(one)] = (name, one)
    yield from found.values()


def slots(optimizer: Any, names: Mapping[str, Any]) -> dict[str, Any]:
    """Return the optimizer's variables, the slots of a split variable's shards as one; raises UserError.

    A slot is a list with an entry for each variable that is trained, and has that one's name in `names`.
    """
    trained = optimizer._trainable_variables
    known = {id(one): name for name, one in names.items()}
    wholes: dict[str, list[int]] = {}
    for number, one in enumerate(trained):
        whole = id(vars(one).get("_whole", one))
        # One that is no layer's is found by its place, and so are all its shards.
        wholes.setdefault(known.setdefault(whole, f"{len(wholes):04}"), []).append(number)
    held, done = {}, set()
    for name, slot in vars(optimizer).items():
        if name in ("_trainable_variables", "_variables") or not isinstance(slot, list) or len(slot) != len(trained):
            continue
        for of, numbers in wholes.items():
            parts = [slot[number] for number in numbers]
            if any(not hasattr(part, "_value") for part in parts):
                continue
            if len(parts) > 1 and any(slot[number].shape != trained[number].shape for number in numbers):
                continue
            done |= {id(part) for part in parts}
            values = raw(parts)
            held[f"{name}/{of}"] = values[0] if len(values) == 1 else ShardedVariable(values)
    own = {id(one): name for name, one in vars(optimizer).items()}
    for number, one in enumerate(one for one in optimizer.variables if id(one) not in done):
        if PART.search(one.name):
            raise UserError(
                f"{type(optimizer).__name__} keeps {one.name!r} for one part of a table that is split over the ps: on "
                f"another number of ps no checkpoint could be restored. {NOT_SPLIT} take another optimizer "
                "(docs/keras3.md lists those that work)"
            )
        held[own.get(id(one), f"{number:04}")] = one._value
    return held


def prepare(model: Any) -> None:
    """Make a model fit for parameter servers; call it in the strategy's scope, before anything is traced.

    Raises UserError for what would be wrong there, with the mend.
    """
    import keras

    refuse_model(model)
    train_shards()
    for layer in model._flatten_layers():
        if isinstance(layer, keras.layers.Embedding) and not layer.quantization_mode and not layer.lora_rank:
            object.__setattr__(layer, LOOKS_UP_ROWS, True)


def refuse_settings(config: Config, model: Any) -> None:
    """Raise UserError for a setting that a model of Keras 3 can't be trained with."""
    refused = (
        (f"strategy: {config.strategy}", not config.traits.remote, "they train under parameter_server alone"),
        ("api: fit", config.api == "fit", "its fit can't; set api to custom_loop, which calls the same callbacks"),
        ("lazy_adam", config.lazy_adam, "it is for tf_keras's Adam; leave it out"),
        ("evaluation: exact", config.evaluation == "exact", "take distributed, which gives each example once as well"),
        ("initial_weights", config.initial_weights != "", "call model.load_weights in build_model instead"),
    )
    for setting, given, why in refused:
        if given:
            raise UserError(
                f"{setting} is not for models of Keras 3, as {type(model).__name__} is: {why}. Or build the model with "
                "tf.keras (docs/keras3.md)"
            )


def refuse_model(model: Any) -> None:
    """Raise UserError where workers that train beside each other would be wrong about the model."""
    import keras

    name = type(model).__name__
    if keras.config.backend() != "tensorflow":
        raise UserError(f"Keras 3 runs on {keras.config.backend()}: set KERAS_BACKEND to tensorflow, or leave it out")
    if model.jit_compile:
        raise UserError(f"{name} was compiled with jit_compile=True, which is not for workers' calls: leave it out")
    for layer in model._flatten_layers():
        if getattr(layer, "stateful", False):
            raise UserError(
                f"the layer {layer.name!r} is stateful: it would go on from a batch of another worker. Leave stateful "
                "out, and give it sequences as they are to be seen"
            )
        if isinstance(layer, keras.layers.SpectralNormalization):
            raise UserError(
                f"the layer {layer.name!r} is a SpectralNormalization, which replaces weights at each step: workers "
                "would overwrite each other's. Leave it out"
            )
    for attribute, optimizer in optimizers_of(model):
        kind = f"{name}.{attribute} is {type(optimizer).__name__}"
        if optimizer._distribution_strategy is not tf.distribute.get_strategy():
            raise UserError(f"{kind}, made outside of build_model, so that it is not on the ps: make it in build_model")
        if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
            raise UserError(f"{kind} (mixed_float16), whose scale all workers would change: take mixed_bfloat16")
        if isinstance(optimizer, keras.optimizers.MultiOptimizer):
            raise UserError(f"{kind}, which is not tried on the ps: take one optimizer, or a train_step with several")
        if optimizer.gradient_accumulation_steps:
            raise UserError(
                f"{kind} with gradient_accumulation_steps: gradients would lie on the ps, where workers overwrite each "
                "other's. Add them up within a step (docs/programs.md)"
            )
        if overwrites_weights(optimizer):
            raise UserError(
                f"{kind} with ema_overwrite_frequency: each worker would overwrite what the others have trained. Set "
                "it to None: averages are taken for weights at the end"
            )
        if isinstance(optimizer, keras.optimizers.ScheduleFreeAdamW):
            raise UserError(f"{kind}, which replaces the weights at each step: workers would overwrite each other's")


def refuse_splits(model: Any) -> None:
    """Raise UserError where a split variable would be trained otherwise than a whole one."""
    split = [one for one in model.variables if len(shards_of(one)) > 1]
    if not split:
        return
    for one in split:
        if one.constraint is not None:
            raise UserError(f"{one.path} has a constraint and is split over the ps. {NOT_SPLIT} leave it out")
    for attribute, optimizer in optimizers_of(model):
        if any(kind.__name__ in WHOLE_TABLES for kind in type(optimizer).__mro__):
            raise UserError(
                f"{attribute} is {type(optimizer).__name__}, which looks at a whole table, and {split[0].path} is "
                f"split over the ps. {NOT_SPLIT} take another optimizer (docs/keras3.md lists those that work)"
            )
        if optimizer.clipnorm:
            raise UserError(
                f"{attribute} has clipnorm, and {split[0].path} is split over the ps: each part would be clipped by "
                f"itself. {NOT_SPLIT} take global_clipnorm"
            )


def refuse_hidden_optimizers(model: Any, step: Any) -> None:
    """Raise UserError where a traced step trains with an optimizer that no checkpoint would have."""
    known = {id(one) for _, one in optimizers_of(model)}
    used = {id(capture) for capture in step.graph.external_captures}
    for layer in model._flatten_layers(include_self=False):
        for attribute, one in optimizers_of(layer):
            if id(one) not in known and id(one._iterations._value.handle) in used:
                name = type(model).__name__
                raise UserError(
                    f"{name}.train_step trains with {layer.name}.{attribute}, which is of a model within it: no "
                    f"checkpoint would have its state. Make it an attribute of {name} as well"
                )


def is_built(model: Any) -> bool:
    """Return whether a model needs no data to be built."""
    return all(layer.built for layer in model._flatten_layers()) or not has_call(model)


def lacks_nothing(model: Any) -> bool:
    """Return whether all of a model's layers are built, and it makes no variables of its own."""
    import keras

    layers = model._flatten_layers(include_self=False)
    return bool(layers) and all(layer.built for layer in layers) and type(model).build is keras.Model.build


def build(model: Any, element_spec: Any) -> None:
    """Make the variables that a model and its optimizer still lack, and refuse what can't be trained with them.

    Call it in the strategy's scope. `element_spec` is of the training data; a model that is built needs none. Raises
    UserError.
    """
    if not is_built(model):
        call_with_symbols(model, element_spec)
        prepare(model)  # what was built now
    optimizer = model.optimizer
    if optimizer is not None and not optimizer.built:
        optimizer.build(model.trainable_variables)
    refuse_splits(model)
    for _, one in optimizers_of(model):
        exclude_shards(model, one)
        gather_keras3(one)


def exclude_shards(model: Any, optimizer: Any) -> None:
    """Leave a split variable's shards out of weight decay where it is left out: Keras looks for them by themselves."""
    excluded: set[str] = getattr(optimizer, "_exclude_from_weight_decay", set())
    for one in model.variables:
        if len(shards_of(one)) > 1 and optimizer._var_key(one) in excluded:
            excluded.update(optimizer._var_key(shard) for shard in shards_of(one))


def averaged(model: Any) -> list[tuple[Any, list[Any]]]:
    """Return the optimizers that average weights, each with those that it trains, in the order of their averages."""
    return [(one, one._trainable_variables) for _, one in optimizers_of(model) if one.use_ema and one.built]


def begin_averages(model: Any) -> None:
    """Give averages of weights the weights to begin with: they are zeros, which Keras's first step replaces.

    All workers do a first step at once, and each would add the whole weights. Call it when a step has been traced,
    which builds the optimizers.
    """
    for optimizer, weights in averaged(model):
        for weight, average in zip(weights, optimizer._model_variables_moving_average, strict=True):
            if average is not None:
                average._value.assign(weight._value)


def has_call(model: Any) -> bool:
    """Return whether a model computes something from its input by itself; one that only trains others does not."""
    return type(model).call is not model_class(model).call


def model_class(model: Any) -> Any:
    """Return the class Model of the model's own Keras."""
    if not is_keras3(model):
        return tf.keras.Model
    import keras

    return keras.Model


def call_with_symbols(model: Any, element_spec: Any) -> bool:
    """Call a model with symbols of what the data consists of, which builds it; returns whether it takes them.

    It may take something else, as a generator's noise, where there is nothing to build.
    """
    import keras

    def symbol(spec: Any) -> Any:
        sparse = isinstance(spec, tf.SparseTensorSpec)
        return keras.Input(batch_shape=tuple(spec.shape), dtype=spec.dtype.name, sparse=sparse)

    try:
        model(tf.nest.map_structure(symbol, features_of(element_spec)))
    except Exception:
        if not lacks_nothing(model):
            raise
        return False
    return True


def export(model: Any, path: str, element_spec: Any) -> None:
    """Export a model; of one that has no inputs of its own Keras would take all types for float32."""
    spec = None if getattr(model, "inputs", None) else [tf.nest.map_structure(batches, features_of(element_spec))]
    model.export(path, input_signature=spec, verbose=False)


def batches(spec: Any) -> Any:
    return tf.TensorSpec([None, *spec.shape[1:]], spec.dtype)


def features_of(element_spec: Any) -> Any:
    return element_spec[0] if isinstance(element_spec, tuple) else element_spec


class Step:
    """The model's own train_step, whose changes of what the workers share are added up; for what is traced.

    Which weights it replaces without training them, as those of a target network, is seen when it is traced. Trace it
    anew while `found_more`.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._replaced: dict[int, Any] = {}
        self.found_more = False

    @tf.autograph.experimental.do_not_convert
    def __call__(self, data: Any) -> Any:
        self.found_more = False
        for variable in self._replaced.values():
            self._refuse_trained(variable)  # its optimizer may have been built since then
        with contextlib.ExitStack() as stack:
            stack.enter_context(keras3_seeds_drawn())
            adding = {id(one): one for one in [*shared_state(self._model), *self._replaced.values()]}
            for variable in adding.values():
                stack.enter_context(changes_added(variable))
            weights = [one for layer in self._model._flatten_layers() for one in layer._trainable_variables]
            watched = {id(each): each for one in weights for each in (one, *shards_of(one))}
            for variable in watched.values():
                if id(variable) not in adding:
                    stack.enter_context(self._watched(variable))
            return self._model.train_step(data)

    @contextlib.contextmanager
    def _watched(self, variable: Any) -> Iterator[None]:
        """Note what replaces a weight, add what is added to one, and leave a constraint to the weight's update."""
        own, constraint = variable._value, variable.constraint

        def assign(value: Any) -> None:
            given = tf.convert_to_tensor(value)  # it may be a variable
            if (more := added(given, own)) is not None:
                own.assign_add(tf.broadcast_to(tf.cast(more, own.dtype), own.shape))
                return
            self._refuse_trained(variable)
            self._replaced[id(variable)] = variable
            self.found_more = True
            own.assign(tf.cast(given, own.dtype))

        variable._direct_assign = assign
        if constraint is not None:
            setattr(beneath(own), KEPT, constraint)
            variable._constraint = None
        try:
            yield
        finally:
            variable._constraint = constraint
            del variable._direct_assign

    def _refuse_trained(self, variable: Any) -> None:
        parts = {id(variable), *map(id, shards_of(variable))}
        for attribute, optimizer in optimizers_of(self._model):
            if optimizer.built and any(id(one) in parts for one in optimizer._trainable_variables):
                name = type(self._model).__name__
                raise UserError(
                    f"{name}.train_step assigns {variable.path}, which {attribute} trains: workers would overwrite "
                    "each other's changes. To keep weights within bounds give the layer a constraint; make layers that "
                    "follow others, as a target network, trainable=False"
                )


def shared_state(model: Any) -> list[Any]:
    """Return what each worker's step reads, changes and writes beside the weights: counters, seeds, layers' state.

    What is no number, such as a flag, is left out: nothing can be added to it, and it is overwritten.
    """
    found = []
    for layer in model._flatten_layers():
        found += [*layer._non_trainable_variables, *(each.state for each in layer._seed_generators)]
    for _, optimizer in optimizers_of(model):
        found.append(optimizer._iterations)
    numbers = [one for one in found if one is not None and one.dtype not in ("bool", "string")]
    there = [one for one in numbers if isinstance(one._value, tf.Variable | ShardedVariable)]
    return list({id(one): one for one in there}.values())


@contextlib.contextmanager
def changes_added(variable: Any) -> Iterator[None]:
    """Have what is traced inside read a variable once, and add to it what its `assign` changes.

    Keras adds by reading, adding and writing: what another worker has written meanwhile would be lost. What doesn't
    depend on the value that was read is no change of it, and is written as it is.
    """
    own = variable._value
    first = seen = tf.convert_to_tensor(own) if isinstance(own, ShardedVariable) else own.read_value()

    def assign(value: Any) -> None:
        nonlocal seen
        value = tf.identity(tf.cast(value, own.dtype))
        if depends(value, (first, seen)):
            own.assign_add(value - seen, read_value=False)
        else:
            own.assign(value, read_value=False)
        if value.graph is seen.graph:  # else it is of a branch
            variable._value = seen = value

    variable._value = seen
    variable._direct_assign = assign
    try:
        yield
    finally:
        variable._value = own
        del variable._direct_assign


def added(value: Any, own: Any) -> Any:
    """Return what a tensor has more than a variable, where it is a sum with what that holds now, or a difference."""

    def source(tensor: Any) -> Any:
        while tensor.op.type in ("Identity", "Cast"):
            tensor = tensor.op.inputs[0]
        return tensor

    def is_read(tensor: Any) -> bool:
        read, handle = source(tensor).op, value.graph.capture(own.handle)
        is_own = read.type == "ReadVariableOp" and read.inputs[0] is handle
        return is_own and is_read_since_writes(read, handle, READING)

    if isinstance(own, ShardedVariable):
        return None
    operation = source(value).op
    if operation.type not in ("AddV2", "Sub"):
        return None
    left, right = operation.inputs
    if is_read(left):
        return right if operation.type == "AddV2" else -right
    return left if operation.type == "AddV2" and is_read(right) else None


def depends(value: Any, sources: Sequence[Any]) -> bool:
    """Return whether a tensor is computed from one of these, of one graph, or may be.

    A branch of a condition has what it uses from outside as inputs of its own. The other inputs of a function, and
    what a loop carries, may come from anywhere.
    """

    def key(operation: Any) -> tuple[int, str]:
        return id(operation.graph), operation.name

    outside, found = sources[0].graph, {key(one.op) for one in sources}
    todo, known = [value.op], {key(value.op)}
    while todo:
        operation = todo.pop(0)  # those that are near come first: a sum has the value itself in it
        if key(operation) in found:
            return True
        tensors = list(operation.inputs)
        if operation.type == "Placeholder" and operation.graph is not outside:
            tensors = [outer for outer, inner in operation.graph.captures if inner.op is operation]
            if not tensors:
                return True
        inputs = [one.op for one in tensors if tf.is_symbolic_tensor(one)]
        todo += [one for one in inputs if key(one) not in known]
        known.update(map(key, inputs))
    return False


def callbacks() -> Any:
    """Return Keras 3's module of callbacks."""
    import keras

    return keras.callbacks


def callback_list(found: list[Any], **arguments: Any) -> Any:
    """Return Keras 3's list of callbacks, which leaves a call's outputs as they are, until somebody asks."""
    import keras

    class Callbacks(keras.callbacks.CallbackList):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            for callback in self.callbacks:
                callback.on_train_batch_end(batch, logs=logs)

    return Callbacks(found, **arguments)


def by_rows(plain: Callable[..., Any]) -> Callable[..., Any]:
    """Return a `call` that asks for rows where a layer is prepared: Keras would read the whole table onto the worker.

    Classes that derive from Embedding call it, too.
    """

    @functools.wraps(plain)
    def call(layer: Any, inputs: Any) -> Any:
        import keras

        if LOOKS_UP_ROWS not in vars(layer) or isinstance(inputs, keras.KerasTensor | tf.SparseTensor):
            return plain(layer, inputs)
        ids = inputs if inputs.dtype in (tf.int32, tf.int64) else tf.cast(inputs, tf.int32)
        return tf.cast(tf.nn.embedding_lookup(layer._embeddings._value, ids), layer.compute_dtype)

    return call


def warn_of_whole_tables(model: Any, step: Any) -> None:
    """Say which tables a traced step reads as a whole to look rows up: what a layer of the program's own may do."""
    names = {
        id(part.handle): (name, bytes_of(one._value))
        for name, one in named(model).items()
        for part in flatten([one._value])
    }
    handles = {inner.name: names[id(outer)] for outer, inner in step.graph.captures if id(outer) in names}
    warned = set()
    for operation in step.graph.get_operations():
        todo = [operation.inputs[0]] if operation.type == "GatherV2" else []
        while todo:
            source = todo.pop().op
            if source.type in PASSED_ON:
                todo += source.inputs
            elif source.type == "ReadVariableOp" and source.inputs[0].name in handles:
                warned.add(handles[source.inputs[0].name])
    for name, size_of in sorted(warned):
        if size_of >= TABLE_BYTES:
            log.warning(
                "each step reads all of %s (%s) to look rows up: use keras.layers.Embedding, or its own call in a "
                "class of yours, which ask for the batch's rows",
                name,
                size(size_of),
            )


def shards_of(variable: Any) -> list[Any]:
    """Return a split variable's shards as variables of Keras; one that is whole is its own."""
    value = variable._value
    if not isinstance(value, ShardedVariable):
        return [variable]
    if "_shards" not in vars(variable):
        import keras

        shards = []
        for number, part in enumerate(value.variables):
            shard = keras.Variable(part, dtype=variable._dtype, name=f"{variable.name}_part_{number}")
            shard._path = f"{variable.path}_part_{number}"
            shard._autocast, shard._regularizer = variable._autocast, variable._regularizer
            shard._overwrite_with_gradient = variable._overwrite_with_gradient
            shard._whole = variable
            shards.append(shard)
        variable._shards = shards
    found: list[Any] = variable._shards
    return found


def forget_seeds() -> None:
    """Have `keras.random` without a seed begin anew: its state lies on the ps of the cluster that was before.

    That is what `build_model` draws. A step draws otherwise (`drawing`).
    """
    if "keras" in sys.modules:
        forget_keras3_seeds()


def drawing(step: Callable[..., Any]) -> Callable[..., Any]:
    """Return a step of a model in which `keras.random` may be used without a seed; for what is traced."""

    @tf.autograph.experimental.do_not_convert
    def draws(*data: Any) -> Any:
        with keras3_seeds_drawn():
            return step(*data)

    return draws


def train_shards() -> None:
    """Have layers of Keras 3, if it is imported, name shards as what is trained: gradients and slots are of these.

    What reads a split variable as an array, to save it or to keep the best weights, gets it whole. Call it before
    build_model, which may build an optimizer.
    """
    keras = sys.modules.get("keras")
    if keras is None:
        return
    plain_array = keras.Variable.__array__
    if not hasattr(plain_array, "of_shards"):
        keras.Variable.__array__ = whole_array(plain_array)
        keras.Variable.numpy = lambda variable: np.array(variable)
    if not hasattr(keras.layers.Embedding.call, "__wrapped__"):
        keras.layers.Embedding.call = by_rows(keras.layers.Embedding.call)
    for name in ("trainable_weights", "trainable_variables"):
        plain = vars(keras.Layer)[name]
        if not hasattr(plain, "of_shards"):
            setattr(keras.Layer, name, OfShards(plain.fget))


def whole_array(plain: Callable[..., Any]) -> Callable[..., Any]:
    def array(variable: Any, dtype: Any = None, copy: bool | None = None) -> Any:
        if isinstance(variable._value, ShardedVariable):
            return tf.convert_to_tensor(variable._value).numpy()
        return plain(variable, dtype)

    array.of_shards = True  # type: ignore[attr-defined]
    return array


class OfShards(property):
    """A property of Keras's layers that lists variables, with shards in the place of split ones."""

    of_shards = True

    def __init__(self, listed: Callable[[Any], list[Any]]) -> None:
        super().__init__(lambda layer: [shard for one in listed(layer) for shard in shards_of(one)])
