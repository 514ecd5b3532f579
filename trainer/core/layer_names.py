"""Names that Keras 3 counts in all of a process: each model that a program builds begins at the same numbers."""

from __future__ import annotations

import weakref
from collections import defaultdict
from typing import Any

from trainer.core.contracts import Program

UIDS = "object_name_uids"
_began: weakref.WeakKeyDictionary[type[Any], dict[str, int]] = weakref.WeakKeyDictionary()


def count_names_again(program: Program) -> None:
    """Have Keras 3 count from where it was when this process first built a model of this program.

    A program, or Keras itself, may make names of counted ones, as FeatureSpace does: with other numbers a model built
    for a recovery, or for the export, would find no variables of these names in a checkpoint.
    """
    try:
        from keras.src.backend.common import global_state
    except ImportError:  # another release of Keras, whose names are not known
        return
    counted = global_state.get_global_attribute(UIDS, default=defaultdict(int), set_to_default=True)
    began = _began.setdefault(type(program), dict(counted))
    global_state.set_global_attribute(UIDS, defaultdict(int, began))
