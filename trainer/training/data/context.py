"""What a program's datasets are asked for: the part of the data, its seed and its files, in one pass or reading."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from trainer.core.contracts import Program
from trainer.training.data.doubts import warn_of_one_order, warn_of_whole_data
from trainer.training.data.file_names import names_of, patterns_of
from trainer.training.data.given_files import GivenFile
from trainer.training.tf_internals.datasets import drawing_from

Found = Callable[[Sequence[str]], object]


class InputContext(tf.distribute.InputContext):
    """TensorFlow's context, with a seed for what a program draws by itself, and its files (docs/input.md)."""

    def __init__(
        self,
        pipelines: int = 1,
        number: Any = 0,
        replicas: int = 1,
        seed: Any = 0,
        given: GivenFile | None = None,
        found: Found = lambda names: None,
    ) -> None:
        """With a `given` file that is all there is to read. `found` is given the names of all parts' files."""
        super().__init__(pipelines, number, replicas)
        self._seed = seed
        self._given = given
        self._found = found
        self.gave_seed = False
        """Whether the program has asked for the seed."""
        self.asked = False
        """Whether the program has asked for the number of the part."""

    @property
    def input_pipeline_id(self) -> Any:
        self.asked = True
        return super().input_pipeline_id

    def files(self, pattern: str | Sequence[str]) -> tf.data.Dataset:
        """Return the names of this part's files, of those that match a pattern, or one of several, as "/data/train-*".

        With `input_sharding: dynamic` that is one file, and this is asked for each. Else the names are shuffled.
        Python lists them, once for all workers: TensorFlow would pass over a folder that can't be read. Workers list
        themselves what is on disks of their own, and the coordinator's host lacks.
        """
        if self._given is not None:
            return self._given.dataset(pattern)
        names = names_of(patterns_of(pattern), elsewhere=not tf.executing_eagerly(), found=self._found)
        names = names.shard(self.num_input_pipelines, tf.cast(self.input_pipeline_id, tf.int64))
        return names.shuffle(tf.maximum(names.cardinality(), 1))

    @property
    def seed(self) -> Any:
        """Another number below 2^31 for each part and each reading of it, as an integer tensor; 0 of an evaluation."""
        self.gave_seed = True
        return self._seed


# The context of a program that must give all its data.
WHOLE = InputContext()


@dataclasses.dataclass(frozen=True)
class DataPass:
    """Which part of the data is read once more, and in which order: that of this seed and of the reading's number.

    The run's first reading has the number 0. Where they are not `seeded`, each iterator draws its own order.
    `goes_on` says that the reading begins where the one before was.
    """

    pipelines: int
    part: Any
    replicas: int
    seed: Any
    number: Any
    seeded: bool = True
    goes_on: bool = False
    given: GivenFile | None = None
    found: Found = lambda names: None

    def ask(self, program: Program, call: Callable[[InputContext], tf.data.Dataset]) -> tf.data.Dataset:
        """Return what the program's `train_dataset`, which `call` calls, gives of it."""
        both = tf.stack([tf.cast(self.seed, tf.int64), tf.cast(self.part, tf.int64)])
        number = tf.cast(self.number, tf.int64)
        folded = tf.random.experimental.stateless_fold_in(both, number)
        drawn = tf.random.stateless_uniform([], folded, maxval=2**31 - 1, dtype=tf.int64)
        context = InputContext(self.pipelines, self.part, self.replicas, drawn, self.given, self.found)
        with drawing_from(drawn if self.seeded else None, number) as draws:
            dataset = call(context)
        if not (draws or context.gave_seed or self.goes_on):
            warn_of_one_order(type(program).__name__)
        if self.pipelines > 1 and not (context.asked or context.gave_seed):
            warn_of_whole_data(type(program).__name__, self.pipelines)
        return dataset
