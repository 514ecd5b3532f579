"""Restores checkpoints, and sets those aside that are damaged."""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Protocol

from trainer.core.contracts import Model
from trainer.core.failures import CheckpointMismatch, Infrastructure, UserError, first_line, is_infrastructure
from trainer.run.catalogue import Catalogue
from trainer.run.directory import RunDirectory
from trainer.run.saves.checkpoint_state import CheckpointState, Reading, RestoredTables
from trainer.run.saves.save_failures import STORAGE

log = logging.getLogger(__name__)
MOMENTUM = re.compile(r"[^/]+/m/")  # by the optimizer's name
# What an optimizer of tf_keras keeps, in the names of its variables. In a checkpoint these have numbers alone.
SLOT = re.compile(
    r"/(m|v|vhat|u|r|c|average|accumulator|linear|velocity|momentum|average_gradient|accumulated_grad|accumulated_delta_var)/"
)
# A weight that tf_keras finds by its layer's place: others are found by attributes or, in Keras 3, by names.
PLACE = re.compile(r"/(layer_with_weights-)?\d+/")
# Of both m is the only slot: of one a sum of steps, of the other a mean of gradients.
OTHER_M = {"SGD", "Lion"}
# What a checkpoint or the model may have alone, as of a Dropout that is new, or of a schedule in the place of a rate.
OF_NO_WEIGHT = re.compile(r"(^|/)((current_)?learning_rate|seed_generator_state)$")
# What one of Keras 3 keeps of a weight, in the paths of a checkpoint: which list it is in.
LISTED = re.compile(r".*/optimizer/_\w+(?=\.S)")
# How TensorFlow says that the model has more, or the checkpoint.
UNBOUND, VARIABLE = "not bound to checkpointed values", re.compile(r"<tf\.Variable '([^']+?)(?::0)?' ")
UNRESOLVED = re.compile(r"Unresolved object in checkpoint \(root\)\.(?:model\.)?([^:]+): ")
MAX_NAMES = 5


class LeftOut(Protocol):
    """Variables whose values stay in a checkpoint."""

    def read(self, prefix: str, keys: Mapping[int, str]) -> None: ...


class CheckpointReader:
    """Restores a run's state from its catalogue."""

    def __init__(self, catalogue: Catalogue, state: CheckpointState, on_set_aside: Callable[[str], None]) -> None:
        """`on_set_aside` is called for each bad checkpoint that is found."""
        self._catalogue = catalogue
        self._state = state
        self._on_set_aside = on_set_aside

    def read(self, step: int) -> None:
        """Restore the checkpoint that another member has restored; raises Infrastructure when it can't be read."""
        import tensorflow as tf

        prefix = self._catalogue.prefix(step)
        try:
            check_fit(self._state.read(prefix))
        except (tf.errors.OpError, OSError, IndexError) as error:
            raise Infrastructure(f"cannot read {prefix}: {error}") from error

    def restore(self, steps: Sequence[int] | None = None) -> int | None:
        """Restore the newest good checkpoint, of these steps or of all; returns its step, None without any.

        Every variable, optimizer slots included, must exist already: nothing may be left for later, and nothing may
        be left over. A bad checkpoint is set aside: it may neither stand in the way of a new one of the same step
        nor be kept instead of a good one. Raises UserError when the model does not fit the checkpoint, or all are
        bad; Infrastructure when the storage fails.
        """
        catalogue = self._catalogue
        catalogue.finish_replacements()
        for step in catalogue.unreadable():
            self._set_aside(step, catalogue.check(step))
        for step in reversed(catalogue.steps() if steps is None else steps):
            if wrong := catalogue.check(step) or self._damage(catalogue.prefix(step)):
                self._set_aside(step, wrong)
                continue
            log.info("restored %s", catalogue.prefix(step))
            return step
        # Also at the next start: a run that has lost its training must not begin again as if it were new.
        if damaged := catalogue.set_aside_files():
            raise UserError(
                f"none of the checkpoints in {catalogue.path} can be read "
                f"(set aside: {', '.join(path.name for path in damaged)}): put a good one there, with its manifest, "
                "or start again with another --run NAME"
            )
        return None

    def _damage(self, prefix: str) -> str:
        """Restore a checkpoint; returns what is wrong with its files, nothing where it is restored."""
        import tensorflow as tf

        try:
            check_fit(self._state.read(prefix))
            self._state.restore_tables(prefix)
        except (AssertionError, ValueError) as error:
            raise mismatch(prefix, error) from error
        except (tf.errors.OpError, IndexError) as error:
            if is_infrastructure(error):
                raise
            if isinstance(error, tf.errors.InvalidArgumentError):
                raise mismatch(prefix, error) from error
            if not is_damage(error):
                raise Infrastructure(f"cannot read {prefix}: {error}") from error
            return first_line(error)
        return ""

    def _set_aside(self, step: int, wrong: str) -> None:
        aside = self._catalogue.set_aside(step)
        log.warning("the checkpoint %s is bad and set aside as %s: %s", self._catalogue.prefix(step), aside.name, wrong)
        self._on_set_aside(f"{aside.name}: {wrong}")


def is_damage(error: Exception) -> bool:
    """Return whether a checkpoint's files were read and are wrong, rather than could not be read."""
    import tensorflow as tf

    errors = tf.errors
    if isinstance(error, (IndexError, errors.DataLossError, errors.OutOfRangeError)):
        return True
    # What TensorFlow's reader of the index raises is of no particular kind.
    return type(error) is errors.OpError and not str(error).rstrip().endswith(STORAGE)


def read_model(
    directory: RunDirectory,
    model: Model,
    step: int,
    tables: RestoredTables | None = None,
    left_out: LeftOut | None = None,
    reading: Reading = nullcontext,
) -> None:
    """Restore the weights of a model that has no strategy, without its optimizer, and its tables.

    `reading` is that of CheckpointState.

    Raises tf.errors.OpError or IndexError when the checkpoint can't be read, perhaps because it was just removed.
    """
    import tensorflow as tf

    prefix = directory.catalogue.prefix(step)
    try:
        with reading(prefix):
            status = tf.train.Checkpoint(model=model).read(prefix)
        check_all_matched(status)
        status.expect_partial()
        if left_out is not None:
            left_out.read(prefix, saved_keys(status))
        if tables is not None:
            tables.restore(prefix)
    except (AssertionError, ValueError) as error:
        raise mismatch(prefix, error) from error


def saved_keys(status: Any) -> dict[int, str]:
    """Return the names that values have in a checkpoint that was read, by the identity of their variables."""
    read = status._checkpoint
    nodes = enumerate(read.object_graph_proto.nodes)
    return {
        id(read.object_by_proto_id[number]): each.checkpoint_key
        for number, node in nodes
        for each in node.attributes
        if number in read.object_by_proto_id
    }


def check_fit(status: Any) -> None:
    """Raise AssertionError where a checkpoint that was read has too little, or something that has no place.

    A momentum that it lacks was never written: an SGD without momentum makes none where it updates rows alone.
    Keras 3's optimizers may keep less than they did: of the weights alone that they train. Seeds and rates may be new.
    """
    check_slots(status._checkpoint)
    try:
        status.assert_consumed()
    except AssertionError:
        read = status._checkpoint
        kept: dict[bool, list[Any]] = {True: [], False: []}
        for number, node in enumerate(read.object_graph_proto.nodes):
            kept[number in read.object_by_proto_id] += node.attributes
        lists = {listed_in(each.checkpoint_key) for each in kept[True]} - {""}
        for each in kept[False]:
            is_momentum = "/_variables/" in each.checkpoint_key and MOMENTUM.match(each.full_name)
            is_left = is_momentum or OF_NO_WEIGHT.search(each.full_name)
            if not is_left and listed_in(each.checkpoint_key) not in lists:
                raise
        check_all_matched(status)


def check_all_matched(status: Any) -> None:
    """Raise AssertionError where a checkpoint that was read has no value for something of the model."""
    import tensorflow as tf

    try:
        status.assert_existing_objects_matched()
    except AssertionError:
        read = status._checkpoint
        known = {id(one) for one in (*read.object_by_proto_id.values(), *never_saved(read))}
        # A layer has no value itself.
        lacking = [one for one in read.all_python_objects if id(one) not in known and not isinstance(one, tf.Module)]
        if not all(OF_NO_WEIGHT.search(name_now(one)) for one in lacking):
            raise


def never_saved(read: Any) -> list[Any]:
    """Return what a model of Keras 3 keeps beside its weights, where a release before this one has saved the rest."""
    import tensorflow as tf

    model, nodes = getattr(read.graph_view.root, "model", None), read.object_graph_proto.nodes
    saved = next((nodes[one.node_id].children for one in nodes[0].children if one.local_name == "model"), ())
    beside = None if any(one.local_name == "beside" for one in saved) else getattr(model, "beside", None)
    return [] if beside is None or hasattr(model, "layers") else tf.train.TrackableView(beside).descendants()


def listed_in(path: str) -> str:
    """Return which list of an optimizer of Keras 3 has a variable, by its path in a checkpoint, or ""."""
    found = LISTED.match(path)
    return found[0] if found else ""


def slot_in(path: str, name: str) -> str:
    """Return which slot of an optimizer of tf_keras a variable is, by its path in a checkpoint and its name, or ""."""
    found = SLOT.search(name) if "/_variables/" in path else None
    return found[1] if found else ""


def name_now(variable: Any) -> str:
    """Return the name of a variable, and of a split one that of its parts without their numbers."""
    first = next(iter(getattr(variable, "variables", [])), variable)
    return re.sub(r"(/part_\d+)?:\d+$", "", str(getattr(first, "name", "")))


def check_slots(read: Any) -> None:
    """Raise AssertionError where weights got values of others, or an optimizer's variables those of another's."""
    present = read.object_by_proto_id
    names = [
        (each.checkpoint_key, each.full_name, name_now(present.get(number)))
        for number, node in enumerate(read.object_graph_proto.nodes)
        for each in node.attributes
    ]
    weights: dict[str, set[str]] = {}
    for _, saved, now in names:
        weights.setdefault(saved, set()).add(now)
    reject_swapped(names)
    for path, saved, now in names:
        slot, here = (slot_in(path, one) for one in (saved, now))
        if slot and here and (slot != here or {saved.partition("/")[0], now.partition("/")[0]} == OTHER_M):
            raise AssertionError(f"the optimizer's {saved} is now {now}: the optimizer is another one")
        weight, its = (one.partition(f"/{slot}/")[2] for one in (saved, now))
        if slot and here and its not in weights.get(weight, {its}):  # a layer may have another name by now
            raise AssertionError(f"the optimizer's {saved} is now {now}: the optimizer trains other weights")


def reject_swapped(names: Sequence[tuple[str, str, str]]) -> None:
    """Raise AssertionError where layers have each other's places, by which tf_keras finds their weights.

    Layers without a name of their own have numbers, which follow the order in which they are made: where the
    checkpoint has several of a class, one that gets a name changes the others'.
    """
    placed = [each for each in names if PLACE.search(each[0]) and all(each) and "/_variables/" not in each[0]]
    present = {now for _, _, now in placed}
    alike = Counter(without_numbers(saved) for _, saved, _ in placed)
    for _, saved, now in placed:
        kind = without_numbers(saved)
        # A layer may have a new name by now.
        if saved in present and kind != without_numbers(now) and alike[kind] == 1:
            raise AssertionError(f"its {saved} would become {now}: layers have changed places, or names")


def without_numbers(name: str) -> str:
    """Return a variable's name without what tells layers of one class apart."""
    return re.sub(r"_\d+(?=[/_]|$)", "", name)


def what_differs(error: Exception) -> str:
    """Say which values differ, or return the line of an error that does, of a function's the one behind its heading."""
    text = str(error).strip()
    if UNBOUND in text and (names := VARIABLE.findall(text)):
        more = f" and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else ""
        return f"it has no {', '.join(names[:MAX_NAMES])}{more}"
    if found := UNRESOLVED.match(text):
        return f"the model has no {found[1]}"
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return next((line for line in lines if "shape" in line or "tensor_name" in line), lines[0]).rstrip(".")


def mismatch(prefix: str, error: Exception) -> CheckpointMismatch:
    path = Path(prefix)
    source = f"{path.parent.parent.name}@{path.name.removeprefix('ckpt-')}"
    return CheckpointMismatch(
        f"the checkpoint {prefix} does not fit the model: {what_differs(error)}. "
        "A changed model needs a new run: start it with another --run NAME. "
        f"With tf.keras it may begin with the weights that fit, by initial_weights: {source}"
    )
