"""Optuna's part of a search: it gets the outcomes of the points so far, and chooses the next one.

Nothing is kept between two calls, so the same records give the same answer, whichever process asks.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

from trainer.core.settings.config import ConfigError
from trainer.core.settings.search_space import MAX_TRIALS, SearchSpace, has_whole_numbers

MISSING = (
    "search: optuna needs the Python package optuna, which this environment lacks: add it to the list of your "
    "release_lock, and lock that again (docs/sweeps.md)"
)


@dataclass(frozen=True)
class Trial:
    """What a search knows of a point: of one that has ended, or of the present one."""

    parameters: Mapping[str, Any]
    value: float | None = None
    """The metric of its last evaluation; None of a point that failed, or has not ended."""
    step: int = 0
    """Of that evaluation."""
    pruned: bool = False
    """Whether it was stopped early."""
    evaluations: Mapping[int, float] = field(default_factory=dict)
    """The metric by step."""


def optuna() -> ModuleType:
    """Return Optuna, which logs what is wrong and nothing else; raises ConfigError where it is missing."""
    try:
        import optuna
    except ImportError as error:
        raise ConfigError(MISSING) from error
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    return optuna


def choose(space: SearchSpace, trials: Sequence[Trial]) -> dict[str, Any]:
    """Return the next point's parameters; raises ConfigError where Optuna is missing, or refuses a trial."""
    library = optuna()
    # Each call has a seed of its own: from the search's alone it would be the same first number each time.
    sampler = library.samplers.TPESampler(seed=(space.seed * MAX_TRIALS + len(trials)) % 2**32)
    study = library.create_study(direction=space.direction, sampler=sampler)
    try:
        study.add_trials([frozen(library, space, trial) for trial in trials])
        asked = study.ask(distributions(library, space))
    except ValueError as error:
        raise ConfigError(f"Optuna can't choose the next point: {error}") from error
    return {name: decode(space.parameters[name], value) for name, value in asked.params.items()}


def is_behind(space: SearchSpace, trials: Sequence[Trial], present: Trial) -> bool:
    """Whether Optuna's median pruner stops the present trial at its last evaluation; raises ConfigError.

    Evaluations are not at the same steps in all points: each earlier one counts with its newest up to that step.
    """
    library = optuna()
    step = max(present.evaluations)
    pruner = library.pruners.MedianPruner(space.n_startup_trials, space.n_warmup_steps)
    study = library.create_study(direction=space.direction, pruner=pruner)
    try:
        study.add_trials([frozen(library, space, trial, step) for trial in trials])
    except ValueError as error:
        raise ConfigError(f"Optuna can't judge the point: {error}") from error
    running = library.trial.create_trial(
        state=library.trial.TrialState.RUNNING,
        params=encoded(space, present),
        distributions=distributions(library, space),
        intermediate_values=dict(present.evaluations),
    )
    return bool(pruner.prune(study, running))


def frozen(library: ModuleType, space: SearchSpace, trial: Trial, step: int | None = None) -> Any:
    """Return a trial that has ended as Optuna has it, with its newest evaluation up to a step."""
    state = library.trial.TrialState
    value = None if trial.value is None or math.isnan(trial.value) else trial.value
    seen = [each for each in trial.evaluations if step is not None and each <= step]
    if step is not None:
        values = {step: trial.evaluations[max(seen)]} if seen else {}
    else:
        values = {trial.step: value} if value is not None else {}
    return library.trial.create_trial(
        state=state.FAIL if value is None else state.PRUNED if trial.pruned else state.COMPLETE,
        value=value,
        params=encoded(space, trial),
        distributions=distributions(library, space),
        intermediate_values=values,
    )


def distributions(library: ModuleType, space: SearchSpace) -> dict[str, Any]:
    """Return Optuna's distributions; a choice is its JSON, since Optuna takes no lists."""
    of = library.distributions
    found = {}
    for name, asked in space.parameters.items():
        if "choices" in asked:
            found[name] = of.CategoricalDistribution([json.dumps(choice) for choice in asked["choices"]])
        else:
            kind = of.IntDistribution if has_whole_numbers(asked) else of.FloatDistribution
            found[name] = kind(**asked)
    return found


def encoded(space: SearchSpace, trial: Trial) -> dict[str, Any]:
    parameters = space.parameters.items()
    return {name: encode(asked, trial.parameters[name]) for name, asked in parameters}


def encode(asked: Mapping[str, Any], value: Any) -> Any:
    return json.dumps(value) if "choices" in asked else value


def decode(asked: Mapping[str, Any], value: Any) -> Any:
    return json.loads(value) if "choices" in asked else value
