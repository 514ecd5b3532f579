"""Names that Keras counts in all of a process: each model that a program builds begins at the same numbers."""

from __future__ import annotations

import contextlib
import copy
import sys
import weakref
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from trainer.core.contracts import Program

Numbers = dict[str, Any]
_began: weakref.WeakKeyDictionary[type[Any], Numbers] = weakref.WeakKeyDictionary()


def count_names_again(program: Program) -> None:
    """Have Keras count from where it was when this process first built a model of this program.

    A program, or Keras itself, may make names of counted ones, as FeatureSpace does: with other numbers a model built
    for a recovery, or for the export, would find no variables of these names in a checkpoint. Metrics have such names
    too: an AUC is `auc`, and would be `auc_1` after a recovery.
    """
    set_numbers(_began.setdefault(type(program), copy.deepcopy(numbers())))


@contextlib.contextmanager
def counting_no_names() -> Iterator[None]:
    """Have Keras count from where it is now again, once the block has ended."""
    before = copy.deepcopy(numbers())
    yield
    set_numbers(before)


def set_numbers(wanted: Numbers) -> None:
    """Have each Keras count from these numbers; one that is not among them, from the beginning."""
    for name, counted in numbers().items():
        counted.clear()
        counted.update(wanted.get(name, ()))


def numbers() -> Numbers:
    """Return what each imported Keras counts by, itself; nothing of a release whose names are not known."""
    found: Numbers = {}
    with contextlib.suppress(ImportError):
        if "keras" in sys.modules:
            from keras.src.backend.common import global_state

            found["keras"] = global_state.get_global_attribute("object_name_uids", defaultdict(int), True)
    with contextlib.suppress(ImportError):
        if "tf_keras" in sys.modules:
            from tf_keras.src import backend

            found["tf_keras"] = backend.get_default_graph_uid_map()
            found["tf_keras, names in use"] = backend.OBSERVED_NAMES
    return found
