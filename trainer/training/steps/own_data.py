"""The training data as this process reads them for its own devices."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from trainer.core.contracts import ElementSpec, Program, Strategy
from trainer.core.settings.config import Config
from trainer.training.data.data_service import DataService
from trainer.training.data.input import own_train_dataset, replica_element_spec
from trainer.training.steps.draws import draw_seed, seed_for_step


class OwnData:
    """A dataset, and the iterator that calls read from."""

    def __init__(self, config: Config, program: Program, strategy: Strategy, service: DataService | None) -> None:
        self._config, self._program, self._strategy, self._service = config, program, strategy, service
        self._seed = draw_seed(config)
        # A data service begins to read as soon as there is an iterator: what is traced needs its type alone.
        own = config if service is None else config.replace(input="local", input_sharding="program")
        self._dataset = own_train_dataset(own, program, strategy, None, self._seed)
        self.iterator: Any = iter(self._dataset)
        self.has_begun = False
        """Whether a call reads by now."""

    @property
    def element_spec(self) -> ElementSpec:
        """What one replica gets of the program's data."""
        return replica_element_spec(self._dataset)

    @property
    def step_examples(self) -> int | None:
        """How many examples a step has, where that is known."""
        first = {spec.shape[0] for spec in tf.nest.flatten(self.element_spec) if getattr(spec, "shape", None)}
        known = first.pop() if len(first) == 1 else None
        return None if known is None else known * self._strategy.num_replicas_in_sync

    def begin(self, step: int) -> None:
        """Make the dataset again where the training doesn't begin at step 0, for which it was made."""
        self.has_begun = True
        seed_for_step(self._config, step)
        if step or self._service:
            own = own_train_dataset(self._config, self._program, self._strategy, self._service, self._seed, step)
            self._dataset, self.iterator = own, iter(own)
