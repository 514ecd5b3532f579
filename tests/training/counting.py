"""What the program `ids` counted: which worker saw which example how often."""

from __future__ import annotations

import numpy as np
import tensorflow as tf
from processes import Runs


def counts(runs: Runs, run: str) -> np.ndarray:
    """Return counts[worker, example] from the newest checkpoint."""
    prefix = runs.directory(run) / "checkpoints" / f"ckpt-{runs.checkpoints(run)[-1]}"
    reader = tf.train.load_checkpoint(str(prefix))
    [name] = [name for name in reader.get_variable_to_shape_map() if name.startswith("model/counts")]
    return reader.get_tensor(name)


def own_parts(seen: np.ndarray) -> bool:
    """Return whether each worker saw examples of its own part only."""
    return not seen[0, 1::2].any() and not seen[1, 0::2].any()
