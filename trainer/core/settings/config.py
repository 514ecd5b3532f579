"""The run settings: each is declared here, and nowhere else, with its default, its meaning and its check.

Plain Python, so that the control machine can check an inventory without TensorFlow. docs/run-settings.md is made of it.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

from trainer.core.settings.dynamic_tables import tables_problem
from trainer.core.settings.formats import (
    NO_PROGRAM_NAME,
    RUN_NAME,
    SECRET_NAME,
    SOURCE,
    is_command,
    program_name_problem,
    url_problem,
    webhook_problem,
)
from trainer.core.settings.parameters import parse_assignments, values_problem
from trainer.core.settings.possible import impossibilities
from trainer.core.settings.relations import relation_problems
from trainer.core.settings.setting import (
    REQUIRED,
    above_zero,
    at_least,
    check_that,
    empty_or,
    found,
    from_zero,
    one_of,
    setting,
    setting_of,
    unknown_key,
    value_problem,
)
from trainer.core.settings.strategies import STRATEGIES, Strategy

APIS = ("custom_loop", "fit")
EVALUATIONS = ("sidecar", "inline", "distributed", "exact", "none")
MODES = ("auto", "min", "max")
# In the names of metrics, as Keras goes by them.
GREATEST_IS_BEST = ("acc", "auc", "precision", "recall", "f1_score", "iou", "io_u")
LEAST_IS_BEST = ("loss", "error", "entropy", "mae", "mse")
INPUTS = ("local", "service")
POSITIONS = ("beginning", "exact")
SHARDINGS = ("program", "auto", "file", "data", "off", "dynamic")
PARTITIONERS = ("min_size", "max_size", "fixed_shards", "none")
strategy_problem = one_of(
    tuple(STRATEGIES),
    " (there is no tpu: a TPU is driven by TPUStrategy from Google's own TPU machines, which make their cluster "
    "themselves)",
)


class ConfigError(ValueError):
    """The operator's mistake in the settings: names the value, what was expected and how to fix it."""


def best_by_name(metric: str) -> str:
    """Whether the least (min) or the greatest (max) of a metric is the best; "" where its name does not say that."""
    greatest, least = (any(part in metric for part in parts) for parts in (GREATEST_IS_BEST, LEAST_IS_BEST))
    return "" if greatest == least else "max" if greatest else "min"


def program_problem(key: str, value: str) -> str | None:
    """Say why a text can't be the program; None where it can."""
    if problem := program_name_problem(value):
        return f"{key}: {problem}, not {value!r}" if problem == NO_PROGRAM_NAME else f"{key}: {value!r} {problem}"
    return None


def shared_dir_problem(key: str, value: str) -> str | None:
    """Say why a text can't be the shared path; None where it can."""
    if problem := url_problem(key, value):
        return problem
    is_absolute = Path(value).is_absolute()
    return None if is_absolute else f"{key}: must be an absolute path that every task host mounts, not {value!r}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """What one run trains and how. Build it with `from_dict` or `from_file`, which check every value."""

    program: str = setting(
        REQUIRED,
        "As `package.module:Name`: an object with `build_model`, `train_dataset` and `eval_dataset`. Its package is in "
        "`release_program`, or installed.",
        program_problem,
    )
    program_args: Mapping[str, Any] = setting(
        dict,
        "Parameters of the program's constructor, by name ([below](#parameters-of-the-program)).",
        found(values_problem),
    )
    run: str = setting(
        "default",
        "The run's name and its directory `<shared_dir>/runs/<run>`. A run belongs to one program; a new name is a "
        "new training. Letters, digits, `.`, `_` and `-`.",
        check_that(
            lambda value: RUN_NAME.fullmatch(value) is not None,
            "is the name of a directory: letters, digits, '.', '_' and '-', at most 100, the first a letter or a digit",
        ),
    )
    shared_dir: str = setting(
        "/srv/trainer",
        "The path that every task host mounts. Ansible sets it from `cluster_shared_dir`.",
        shared_dir_problem,
    )
    local_run_dir: bool = setting(
        False,
        "Whether each host has a `shared_dir` of its own, and the chief alone has the run. Not with "
        "`multi_worker_mirrored`. Ansible sets it where `cluster_shared_dir` is empty "
        "([storage.md](storage.md#no-shared-path-at-all)).",
    )
    strategy: str = setting(
        "parameter_server",
        "How the work is distributed: `parameter_server`, `multi_worker_mirrored`, or on the chief alone `mirrored`, "
        "`one_device`, `central_storage`. It [decides which tasks](operations.md#another-strategy) the hosts get.",
        strategy_problem,
        choices=tuple(STRATEGIES),
    )
    api: str = setting(
        "custom_loop",
        "[How the model is trained](training.md#two-apis-one-training): `custom_loop`, or `fit`, Keras's `Model.fit` "
        "(not with [Keras 3](keras3.md)).",
        choices=APIS,
    )
    steps: int = setting(
        1000,
        "Train until this many batches are applied, all workers together. Raise it to go on with a finished run.",
        at_least(1),
    )
    steps_per_execution: int | str = setting(
        "auto",
        "The most steps that a worker is given at once. `auto` measures and makes a call last about half a second on "
        "the median worker.",
        check_that(
            lambda value: value == "auto" or (isinstance(value, int) and value >= 1),
            'must be a whole number of at least 1, or "auto"',
        ),
    )
    epoch_steps: int = setting(
        0,
        "An epoch is so many steps: at its end the coordinator evaluates (see `evaluation`) and callbacks are called. "
        "0: the whole run is one epoch.",
        from_zero("the whole run is one epoch"),
    )
    evaluation: str = setting(
        "sidecar",
        "Who evaluates: `sidecar` (the evaluator, each checkpoint), `inline` (the coordinator), `distributed` and "
        "`exact` (the workers), `none`. All but `sidecar` do so at each epoch's end. [evaluation.md](evaluation.md) "
        "compares them.",
        choices=EVALUATIONS,
    )
    export: bool = setting(
        True,
        "Whether the model is exported as a SavedModel when the run is finished. `fab export --run NAME` does it "
        "later.",
    )
    input: str = setting(
        "local",
        "Who reads the training data: each worker (`local`), or the hosts of the group `data` (`service`). "
        "[input.md](input.md#hosts-that-read-for-the-workers-input-service) says when that helps.",
        choices=INPUTS,
    )
    input_sharding: str = setting(
        "program",
        "Who divides the training data: `program`; for `parameter_server` `dynamic`, "
        "[file by file](input.md#files-for-the-worker-that-is-free-input_sharding-dynamic); for other strategies "
        "`auto`, `file`, `data` or `off` (TensorFlow's). With `input: service`: `dynamic` or `off`.",
        choices=SHARDINGS,
    )
    input_position: str = setting(
        "beginning",
        "Where a worker reads on after a fault or a stop: from the `beginning`, in another order, or `exact`, where "
        "it was (`parameter_server` alone). [What is read twice](input.md#input_position-exact).",
        choices=POSITIONS,
    )
    input_new_files_seconds: float = setting(
        0.0,
        "With `input_sharding: dynamic`: look for [new files](input.md#files-that-come-while-it-trains) every so many "
        "seconds, and train each once; 0: pass after pass.",
        from_zero("pass after pass over the files"),
    )
    input_no_files_seconds: float = setting(
        0.0,
        "With `input_new_files_seconds`: end the run when all files are trained, and for so long none has come; 0: "
        "wait for ever.",
        from_zero("wait for ever"),
    )
    checkpoint_steps: int = setting(
        0, "Save a checkpoint when so many steps have passed; 0 disables it.", from_zero("disabled")
    )
    checkpoint_seconds: float = setting(
        30.0,
        "Save a checkpoint every so many seconds; 0 disables it. Finishing or stopping a run always saves.",
        from_zero("disabled"),
    )
    checkpoints_kept: int = setting(
        5,
        "Newest checkpoints to keep, at least 3. [What else is kept](training.md#which-checkpoints-are-kept).",
        at_least(3, ", so that a damaged checkpoint has a predecessor"),
    )
    checkpoints_kept_best: int = setting(
        0,
        "Checkpoints to keep besides, those with the best evaluations. Not with `evaluation: none`.",
        from_zero("none but the newest"),
    )
    checkpoints_best_metric: str = setting(
        "loss",
        "By which metric of the evaluation they are the best.",
        check_that(lambda value: value != "", "must name a metric of the evaluation, such as loss"),
    )
    checkpoints_best_mode: str = setting(
        "auto",
        "Whether the least of that metric is the best (`min`) or the greatest (`max`). "
        "[`auto` goes by its name](training.md#the-best-by-an-evaluation).",
        choices=MODES,
    )
    checkpoints_kept_hours: float = setting(
        0.0,
        "Keep one checkpoint every so many hours besides, for as long as the run is kept; 0 is none.",
        from_zero("none besides"),
    )
    initial_weights: str = setting(
        "",
        "What a new run begins with: `RUN@STEP`, or the absolute path of a checkpoint, of Keras weights or of a "
        "SavedModel. [What is read](training.md#initial-weights). Empty is the model's own.",
        empty_or(
            lambda value: SOURCE.fullmatch(value) is not None or Path(value).is_absolute(),
            "must be empty, RUN@STEP, or an absolute path that the coordinator's host sees",
        ),
    )
    partitioner: str = setting(
        "min_size",
        "How large variables are split over the ps: `min_size` (as many shards as there are ps, none under the "
        "minimum), `max_size`, `fixed_shards` or `none`.",
        choices=PARTITIONERS,
    )
    partitioner_min_bytes: int = setting(256 * 1024, "With `min_size`: a shard is at least this large.", at_least(1))
    partitioner_max_bytes: int = setting(
        64 * 1024 * 1024, "With `max_size`: a shard is at most this large.", at_least(1)
    )
    partitioner_shards: int = setting(
        2, "With `fixed_shards`: into how many shards every variable is split.", at_least(1)
    )
    lazy_optimizers: bool = setting(
        False,
        "Whether all optimizers change only the rows of a table that a step has looked up: faster by far, and for "
        "most [another algorithm](large-tables.md#lazy_optimizers). With `parameter_server` alone.",
    )
    incremental_saves: int = setting(
        0,
        "How many checkpoints after a whole one write only the changed rows of "
        "[large variables](large-tables.md#incremental-saves). With `parameter_server` alone.",
        at_least(0),
    )
    weights_ahead: bool = setting(
        False,
        "Whether workers [read weights a step ahead](large-tables.md#weights_ahead): faster where messages take a "
        "millisecond. With `parameter_server` alone.",
    )
    dynamic_tables: Mapping[str, Any] = setting(
        dict,
        "[Tables without a vocabulary](dynamic-tables.md), by the names of the program's layers: `{items: {capacity: "
        "50000000}}`. With `parameter_server` alone.",
        found(tables_problem),
    )
    heartbeat_timeout_seconds: float = setting(
        5.0,
        "A worker or ps that answers no question for so long is silent: cut off or frozen. At least 3.",
        at_least(3, ": a member is asked every second, and has two to answer"),
    )
    ps_recovery: str = setting(
        "all",
        "What goes back to the newest checkpoint when a ps is lost: `all` variables, or those of the `lost` ps alone "
        "([what that means](faults.md#a-pss-process-ends)). With `parameter_server` alone.",
        choices=("all", "lost"),
    )
    elastic: bool = setting(
        True,
        "Whether the run goes on with fewer members than the inventory lists, and takes the others in when they come "
        "back. `false`: it waits for all of them.",
    )
    ps_grace_seconds: float = setting(
        30.0,
        "With `elastic`: how long a missing ps is waited for before the model is laid out again on the others, from "
        "the newest checkpoint.",
        from_zero(),
    )
    worker_wait_seconds: float = setting(
        60.0,
        "With `elastic`: how long the very first start of a run waits for a missing worker. Later none is waited for.",
        from_zero(),
    )
    member_wait_timeout_seconds: float = setting(
        0.0,
        "How long to wait for members that can't be done without before the run ends with an error that names them; 0 "
        "is for ever.",
        from_zero("wait for ever"),
    )
    restoring_timeout_seconds: float = setting(
        1800.0,
        "Deadline of a restore. A phase of the coordinator that passes its deadline is taken for hanging: the "
        "coordinator restarts.",
        above_zero,
    )
    compiling_timeout_seconds: float = setting(
        1800.0, "Deadline of making the strategy, building the model and tracing its calls.", above_zero
    )
    training_timeout_seconds: float = setting(
        3600.0, "How long no call may end; as long as the longest call at least.", above_zero
    )
    evaluating_timeout_seconds: float = setting(7200.0, "Deadline of an evaluation by any task.", above_zero)
    saving_timeout_seconds: float = setting(
        1800.0, "Deadline of a save that the training waits for, and of the export.", above_zero
    )
    storage_timeout_seconds: float = setting(
        3600.0,
        "For how long checkpoints may fail to be saved before the run ends with an error; each failure is logged.",
        from_zero("end at the first save that fails"),
    )
    lease_seconds: float = setting(
        30.0,
        "A run has one coordinator, which holds its lease. One that has not been renewed for so long is taken over. "
        "At least 10.",
        at_least(10, ": a coordinator renews its lease four times in it"),
    )
    max_restarts_without_step: int = setting(
        10,
        "How many crashes a run survives: of the coordinator without a new checkpoint, of the evaluator "
        "(which ends alone) without an evaluation. Waiting for machines or storage is none.",
        at_least(1),
    )
    log_seconds: float = setting(
        5.0, "Log, write TensorBoard events and update the status every so many seconds.", above_zero
    )
    evaluate_poll_seconds: float = setting(2.0, "How often the evaluator looks for a new checkpoint.", above_zero)
    notify_webhook: str = setting(
        "",
        "An `http://` or `https://` address that gets a message of the run's end and of members that are away "
        "([observing.md](observing.md#notifications)). It stands in the run's records.",
        empty_or(
            lambda value: webhook_problem(value) is None,
            "must be empty, or the http:// or https:// address that takes a POST, without a user or a password in it "
            "(put an address that is a secret into trainer_secrets, and its name into notify_webhook_secret)",
        ),
    )
    notify_webhook_secret: str = setting(
        "",
        "The name of a secret in `trainer_secrets` that holds such an address.",
        empty_or(
            lambda value: SECRET_NAME.fullmatch(value) is not None,
            "must be empty, or the name of a secret in trainer_secrets whose text is the webhook's address;",
        ),
    )
    notify_command: str = setting(
        "",
        "A command of the chief's host that gets the same on its standard input, as user `trainer`.",
        empty_or(
            is_command,
            "must be empty, or a command that begins with the absolute path of a program on the chief's host;",
        ),
    )
    notify_absent_seconds: float = setting(
        600.0, "A member that takes no part for so long is reported, and its return.", at_least(1)
    )
    seed: int | None = setting(
        None,
        "Seed of Python's, NumPy's and TensorFlow's random numbers, and of the order of the data "
        "([below](#what-a-seed-decides)).",
        check_that(lambda value: value is None or 0 <= value < 2**31, "must be null or between 0 and 2147483647"),
    )

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            if problem := key_problem(field.name, getattr(self, field.name)):
                raise ConfigError(problem)
        if problem := next(chain(impossibilities(self), relation_problems(self)), None):
            raise ConfigError(problem)

    @classmethod
    def from_dict(cls, settings: Mapping[str, Any]) -> Config:
        """Check the settings and lay them over the defaults; raises ConfigError."""
        if not isinstance(settings, Mapping):
            raise ConfigError(f"the run settings must be a mapping of keys to values, not {settings!r}")
        known = [field.name for field in dataclasses.fields(cls)]
        for key in settings:
            if key not in known:
                raise ConfigError(unknown_key(key, known))
        if "program" not in settings:
            raise ConfigError("program is missing: name what to train as package.module:Name")
        return cls(**settings)

    @classmethod
    def from_file(cls, path: Path) -> Config:
        """Read the settings from a JSON file; raises ConfigError, naming the file."""
        try:
            settings = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise ConfigError(f"cannot read the run settings {path}: {error.strerror}") from error
        except ValueError as error:
            raise ConfigError(f"the run settings {path} are not JSON: {error}") from error
        try:
            return cls.from_dict(settings)
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from error

    @property
    def traits(self) -> Strategy:
        """What the package must know of the strategy."""
        return STRATEGIES[self.strategy]

    @property
    def best_mode(self) -> str:
        """Whether the least (min) or the greatest (max) of checkpoints_best_metric is the best; "" where not known.

        Keras's callbacks take what they don't know for min, and keep the worst by a precision. Here it must be said.
        """
        is_known = self.checkpoints_best_mode != "auto"
        return self.checkpoints_best_mode if is_known else best_by_name(self.checkpoints_best_metric)

    @property
    def best_metric(self) -> str:
        """By which metric of the evaluation checkpoints are kept; "" where none are."""
        return self.checkpoints_best_metric if self.checkpoints_kept_best else ""

    def replace(self, **changes: Any) -> Config:
        """Return these settings with some keys changed, checked again."""
        return dataclasses.replace(self, **changes)

    def as_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def read_assignments(texts: Sequence[str]) -> dict[str, Any]:
    """Read what `--set NAME=VALUE` said of program_args; raises ConfigError."""
    try:
        return parse_assignments(texts)
    except ValueError as error:
        raise ConfigError(str(error)) from error


def absolute_path(text: str) -> str:
    """Return the absolute path of a directory that the command line names; raises ConfigError for a URL."""
    if problem := url_problem("shared_dir", text):
        raise ConfigError(problem)
    return str(Path(text).absolute())


TYPES: dict[str, Any] = get_type_hints(Config)
# The classes of which a value is one.
KINDS = {
    key: get_args(hint) if get_origin(hint) is UnionType else (get_origin(hint) or hint,) for key, hint in TYPES.items()
}

DECLARED = {field.name: setting_of(field) for field in dataclasses.fields(Config)}


def key_problem(key: str, value: object) -> str | None:
    """Say what is wrong with one setting by itself; None where it is right."""
    return value_problem(key, value, KINDS[key], DECLARED[key])
