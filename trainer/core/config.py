"""The run settings. Defaults live here and nowhere else; docs/run-settings.md describes every key.

Plain Python, so that the control machine can check an inventory without TensorFlow.
"""

from __future__ import annotations

import dataclasses
import datetime
import difflib
import json
import math
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints
from urllib.parse import urlsplit

from trainer.core.dynamic_tables import tables_problem
from trainer.core.parameters import parse_assignments, plain_number, values_problem
from trainer.core.relations import relation_problems

# More is a mistake of the hand; and what is added to them stays in TensorFlow's 64 bits.
MAX_SECONDS = 315_360_000  # ten years
MAX_WHOLE = 10**15
# Less than a millisecond, or its part of an hour, is no duration that anything here keeps to.
MIN_SECONDS = MIN_HOURS = 0.001
RUN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
SOURCE = re.compile(rf"(?P<run>{RUN_NAME.pattern})@(?P<step>\d{{1,15}})")
SECRET_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,63}")
NO_PROGRAM_NAME = "must look like package.module:Name, the object that builds the model and the datasets"
PROGRAM_NAME = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")


@dataclasses.dataclass(frozen=True)
class Strategy:
    """What the package must know of a strategy; trainer/training/strategies.py makes them."""

    jobs: tuple[str, ...] = ("chief",)
    """Those that take part. An evaluator may stand beside any of them."""
    remote: bool = False
    """Whether workers compute what the coordinator schedules, on variables that lie on the ps."""
    in_step: bool = False
    """Whether each member runs the program, and must save, evaluate and stop together with the others."""


STRATEGIES = {
    "parameter_server": Strategy(("chief", "ps", "worker"), remote=True),
    "multi_worker_mirrored": Strategy(("chief", "worker"), in_step=True),
    "mirrored": Strategy(),
    "one_device": Strategy(),
    "central_storage": Strategy(),
}
APIS = ("custom_loop", "fit")
EVALUATIONS = ("sidecar", "inline", "distributed", "exact", "none")
MODES = ("auto", "min", "max")
# In the names of metrics, as Keras goes by them.
GREATEST_IS_BEST = ("acc", "auc", "precision", "recall", "f1_score", "iou", "io_u")
LEAST_IS_BEST = ("loss", "error", "entropy", "mae", "mse")
INPUTS = ("local", "service")
POSITIONS = ("beginning", "exact")
SHARDINGS = ("program", "auto", "file", "data", "off", "dynamic")
SERVICE_SHARDINGS = ("off", "dynamic")
PARTITIONERS = ("min_size", "max_size", "fixed_shards", "none")
# Keys that had another name once.
RENAMED = {
    "chief_alone": "local_run_dir",
    "lazy_adam": "lazy_optimizers",
    "silent_seconds": "heartbeat_timeout_seconds",
    "steps_per_call": "steps_per_execution",
    "storage_seconds": "storage_timeout_seconds",
    "waiting_seconds": "member_wait_timeout_seconds",
    **{
        f"{phase}_seconds": f"{phase}_timeout_seconds"
        for phase in ("restoring", "compiling", "training", "evaluating", "saving")
    },
}
URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://.*", re.DOTALL)
NO_URL = (
    "the run directory lies in a file system, since its records are renamed into place and its lease is a file that "
    "one process creates. Give an absolute path; docs/storage.md has the choices"
)


class ConfigError(ValueError):
    """The operator's mistake in the settings: names the value, what was expected and how to mend it."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """What one run trains and how. Build it with `from_dict` or `from_file`, which check every value."""

    program: str
    program_args: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    run: str = "default"
    shared_dir: str = "/srv/trainer"
    local_run_dir: bool = False
    strategy: str = "parameter_server"
    api: str = "custom_loop"
    steps: int = 1000
    steps_per_execution: int | str = "auto"
    epoch_steps: int = 0
    evaluation: str = "sidecar"
    export: bool = True
    input: str = "local"
    input_sharding: str = "program"
    input_position: str = "beginning"
    checkpoint_steps: int = 0
    checkpoint_seconds: float = 30.0
    checkpoints_kept: int = 5
    checkpoints_kept_best: int = 0
    checkpoints_best_metric: str = "loss"
    checkpoints_best_mode: str = "auto"
    checkpoints_kept_hours: float = 0.0
    initial_weights: str = ""
    partitioner: str = "min_size"
    partitioner_min_bytes: int = 256 * 1024
    partitioner_max_bytes: int = 64 * 1024 * 1024
    partitioner_shards: int = 2
    lazy_optimizers: bool = False
    dynamic_tables: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    heartbeat_timeout_seconds: float = 5.0
    elastic: bool = True
    ps_grace_seconds: float = 30.0
    worker_wait_seconds: float = 60.0
    member_wait_timeout_seconds: float = 0.0
    restoring_timeout_seconds: float = 1800.0
    compiling_timeout_seconds: float = 1800.0
    training_timeout_seconds: float = 3600.0
    evaluating_timeout_seconds: float = 7200.0
    saving_timeout_seconds: float = 1800.0
    storage_timeout_seconds: float = 3600.0
    lease_seconds: float = 30.0
    max_restarts_without_step: int = 10
    log_seconds: float = 5.0
    evaluate_poll_seconds: float = 2.0
    notify_webhook: str = ""
    notify_webhook_secret: str = ""
    notify_command: str = ""
    notify_absent_seconds: float = 600.0
    seed: int | None = None

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            if problem := key_problem(field.name, getattr(self, field.name)):
                raise ConfigError(problem)
        if self.checkpoint_steps == 0 and self.checkpoint_seconds == 0:
            raise ConfigError(
                "checkpoint_steps and checkpoint_seconds are both 0, so that a crash would lose the whole run: "
                "set at least one of them"
            )
        if self.checkpoints_kept_best and self.evaluation == "none":
            raise ConfigError(
                f"checkpoints_kept_best is {self.checkpoints_kept_best}, but with evaluation none nobody knows which "
                "checkpoints are the best: choose who evaluates, or set it to 0"
            )
        if self.checkpoints_kept_best and not self.best_mode:
            raise ConfigError(
                "checkpoints_best_mode: auto can't tell by the name whether the least or the greatest "
                f"{self.checkpoints_best_metric!r} is the best: write min or max"
            )
        if self.local_run_dir and self.traits.in_step:
            raise ConfigError(
                f"local_run_dir: with strategy {self.strategy} every member reads the run directory: "
                "give all hosts a shared path, or choose parameter_server"
            )
        if self.input == "service":
            self._check_service()
        elif self.input_sharding == "dynamic":
            raise ConfigError(
                "input_sharding: dynamic divides the data over the hosts of the group data, and input is local: "
                "set input: service, or leave input_sharding out"
            )
        elif self.traits.remote and self.input_sharding != "program":
            raise ConfigError(
                f"input_sharding: {self.input_sharding!r} does nothing under {self.strategy}: TensorFlow ignores "
                "the options of a worker's dataset: leave it out, and shard by the context in train_dataset"
            )
        if self.input_position == "exact" and not self.traits.remote:
            raise ConfigError(
                f"input_position: exact is for workers of parameter servers, and strategy {self.strategy} has none: "
                "leave it out, or choose parameter_server"
            )
        if self.lazy_optimizers and not self.traits.remote:
            raise ConfigError(
                f"lazy_optimizers: it is for tables on parameter servers, and strategy {self.strategy} has none: "
                "leave it out, or choose parameter_server"
            )
        if self.dynamic_tables:
            self._check_dynamic_tables()
        if problem := next(relation_problems(self), None):
            raise ConfigError(problem)

    def _check_dynamic_tables(self) -> None:
        """Raise ConfigError unless the rest of the settings can do with dynamic tables."""
        refused = (
            (not self.traits.remote, f"strategy {self.strategy} has no parameter servers: choose parameter_server"),
            (
                self.evaluation == "exact",
                "evaluation is 'exact', which copies the model: take distributed, inline or sidecar",
            ),
            (
                self.initial_weights != "",
                f"initial_weights is {self.initial_weights!r}, expected none: it fills tables of rows, and keys have "
                "first values of their own. Leave it out",
            ),
        )
        for is_refused, why in refused:
            if is_refused:
                raise ConfigError(f"dynamic_tables: {why}")

    def _check_service(self) -> None:
        """Raise ConfigError unless the data service can read for this training."""
        if self.input_position == "exact":
            raise ConfigError(
                "input: service: the hosts of the group data know no position to go on from: leave input_position "
                "out, or have each worker read its own part with input: local"
            )
        if self.input_sharding not in SERVICE_SHARDINGS:
            raise ConfigError(
                f"input: service: input_sharding is {self.input_sharding!r}; expected dynamic (the hosts of the group "
                "data divide the data) or off (each of them reads all)"
            )
        if self.traits.in_step:
            raise ConfigError(
                f"input: service: with strategy {self.strategy} each member reads for itself: leave input out, or "
                "choose another strategy"
            )
        if self.local_run_dir:
            raise ConfigError(
                "input: service: the hosts of the group data learn on the shared path when a run ends, and "
                "local_run_dir says that there is none: give all hosts a shared path, or leave input out"
            )

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
        """Whether the least (min) or the greatest (max) of checkpoints_best_metric is the best; "" where nobody knows.

        Keras's callbacks take what they don't know for min, and keep the worst by a precision. Here it must be said.
        """
        if self.checkpoints_best_mode != "auto":
            return self.checkpoints_best_mode
        greatest, least = (
            any(part in self.checkpoints_best_metric for part in parts) for parts in (GREATEST_IS_BEST, LEAST_IS_BEST)
        )
        return "" if greatest == least else "max" if greatest else "min"

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


def url_problem(name: str, path: str) -> str | None:
    """Say why a directory, which the setting `name` names, can't be a URL; None where it is none."""
    return f"{name} is {path!r}: {NO_URL}" if URL.fullmatch(path) else None


def is_command(text: str) -> bool:
    """Return whether a text is a command with the absolute path of its program."""
    try:
        return Path(shlex.split(text)[0]).is_absolute() and "\0" not in text
    except (IndexError, ValueError):
        return False


def webhook_problem(url: str) -> str | None:
    """Say why a text is no address of a webhook that may stand in the settings; None where it is one."""
    try:
        parts = urlsplit(url)
        is_one = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:
        is_one = False
    if not is_one or re.search(r"[^\x21-\x7e]", url):
        return "it is no http:// or https:// address"
    return "it has a user or a password in it" if "@" in parts.netloc else None


def absolute_path(text: str) -> str:
    """Return the absolute path of a directory that the command line names; raises ConfigError for a URL."""
    if problem := url_problem("shared_dir", text):
        raise ConfigError(problem)
    return str(Path(text).absolute())


def kinds_of(hint: Any) -> tuple[type, ...]:
    """Return the classes of which a value of this type is one."""
    origin = get_origin(hint)
    return get_args(hint) if origin is UnionType else (origin or hint,)


TYPES: dict[str, Any] = get_type_hints(Config)
KINDS = {key: kinds_of(hint) for key, hint in TYPES.items()}

CHECKS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "run": (
        lambda value: RUN_NAME.fullmatch(value) is not None,
        "is the name of a directory: letters, digits, '.', '_' and '-', at most 100, the first a letter or a digit",
    ),
    "shared_dir": (lambda value: Path(value).is_absolute(), "must be an absolute path that every task host mounts"),
    "strategy": (
        lambda value: value in STRATEGIES,
        f"must be one of {', '.join(STRATEGIES)} (there is no tpu: a TPU is driven by TPUStrategy from Google's own "
        "TPU machines, which make their cluster themselves)",
    ),
    "api": (lambda value: value in APIS, f"must be one of {', '.join(APIS)}"),
    "steps": (lambda value: value >= 1, "must be at least 1"),
    "steps_per_execution": (
        lambda value: value == "auto" or (isinstance(value, int) and value >= 1),
        'must be a whole number of at least 1, or "auto"',
    ),
    "epoch_steps": (lambda value: value >= 0, "must be 0 (the whole run is one epoch) or more"),
    "evaluation": (lambda value: value in EVALUATIONS, f"must be one of {', '.join(EVALUATIONS)}"),
    "input": (lambda value: value in INPUTS, f"must be one of {', '.join(INPUTS)}"),
    "input_sharding": (lambda value: value in SHARDINGS, f"must be one of {', '.join(SHARDINGS)}"),
    "input_position": (lambda value: value in POSITIONS, f"must be one of {', '.join(POSITIONS)}"),
    "checkpoint_steps": (lambda value: value >= 0, "must be 0 (not by steps) or more"),
    "checkpoint_seconds": (lambda value: value >= 0, "must be 0 (not by time) or more"),
    "checkpoints_kept": (
        lambda value: value >= 3,
        "must be at least 3, so that a damaged checkpoint has a predecessor",
    ),
    "checkpoints_kept_best": (lambda value: value >= 0, "must be 0 (none but the newest) or more"),
    "checkpoints_best_metric": (lambda value: value != "", "must name a metric of the evaluation, such as loss"),
    "checkpoints_best_mode": (lambda value: value in MODES, f"must be one of {', '.join(MODES)}"),
    "checkpoints_kept_hours": (lambda value: value >= 0, "must be 0 (none besides) or more"),
    "initial_weights": (
        lambda value: value == "" or SOURCE.fullmatch(value) is not None or Path(value).is_absolute(),
        "must be empty, RUN@STEP, or an absolute path that the coordinator's host sees",
    ),
    "partitioner": (lambda value: value in PARTITIONERS, f"must be one of {', '.join(PARTITIONERS)}"),
    "partitioner_min_bytes": (lambda value: value >= 1, "must be at least 1"),
    "partitioner_max_bytes": (lambda value: value >= 1, "must be at least 1"),
    "partitioner_shards": (lambda value: value >= 1, "must be at least 1"),
    "heartbeat_timeout_seconds": (
        lambda value: value >= 3,
        "must be at least 3: a member is asked every second, and has two to answer",
    ),
    "ps_grace_seconds": (lambda value: value >= 0, "must be 0 or more"),
    "worker_wait_seconds": (lambda value: value >= 0, "must be 0 or more"),
    "member_wait_timeout_seconds": (lambda value: value >= 0, "must be 0 (wait for ever) or more"),
    **{
        f"{phase}_timeout_seconds": (lambda value: value > 0, "must be more than 0")
        for phase in ("restoring", "compiling", "training", "evaluating", "saving")
    },
    "storage_timeout_seconds": (lambda value: value >= 0, "must be 0 (end at the first save that fails) or more"),
    "lease_seconds": (
        lambda value: value >= 10,
        "must be at least 10: a coordinator renews its lease four times in it",
    ),
    "max_restarts_without_step": (lambda value: value >= 1, "must be at least 1"),
    "log_seconds": (lambda value: value > 0, "must be more than 0"),
    "evaluate_poll_seconds": (lambda value: value > 0, "must be more than 0"),
    "notify_webhook": (
        lambda value: value == "" or webhook_problem(value) is None,
        "must be empty, or the http:// or https:// address that takes a POST, without a user or a password in it: put "
        "an address that is a secret into trainer_secrets, and its name into notify_webhook_secret;",
    ),
    "notify_webhook_secret": (
        lambda value: value == "" or SECRET_NAME.fullmatch(value) is not None,
        "must be empty, or the name of a secret in trainer_secrets whose text is the webhook's address;",
    ),
    "notify_command": (
        lambda value: value == "" or is_command(value),
        "must be empty, or a command that begins with the absolute path of a program on the chief's host;",
    ),
    "notify_absent_seconds": (lambda value: value >= 1, "must be at least 1"),
    "seed": (lambda value: value is None or 0 <= value < 2**31, "must be null or between 0 and 2147483647"),
}

TYPE_NAMES = {
    int: "a whole number",
    float: "a number",
    str: "a text",
    bool: "true or false",
    type(None): "null",
    Mapping: "a mapping of names to values",
}


def program_name_problem(name: str) -> str:
    """Say why a text can't name a program; nothing where it can."""
    if PROGRAM_NAME.fullmatch(name):
        return ""
    module, colon, attribute = name.partition(":")
    if "/" in module or module.endswith(".py"):
        dotted = module.removesuffix(".py").strip("./").replace("/", ".")
        return f"is a path: write the module with dots and without .py, as {dotted}:{attribute or 'Name'}"
    parts = [*module.split("."), *attribute.split(".")] if colon and module and attribute else []
    wrong = next((part for part in parts if part and not re.fullmatch(r"[A-Za-z_]\w*", part)), None)
    if wrong is None:
        return NO_PROGRAM_NAME
    mend = re.sub(r"\W", "_", wrong)
    mend = f"_{mend}" if mend[0].isdigit() else mend
    what = f"the module {wrong} (its file or directory)" if wrong in module.split(".") else wrong
    return (
        f"has {wrong!r}, which Python can't import by name: names have letters, digits and _, and begin with no digit. "
        f"Rename {what} to {mend}"
    )


def key_problem(key: str, value: Any) -> str | None:
    """Say what is wrong with one setting by itself; None where it is right."""
    try:
        check_type(key, value, KINDS[key])
    except ConfigError as error:
        return str(error)
    if isinstance(value, (int, float)):
        if isinstance(value, float) and not math.isfinite(value):
            return f"{key}: must be a finite number, not {value!r}; docs/run-settings.md says which value is for ever"
        most = MAX_SECONDS if key.endswith("_seconds") else MAX_WHOLE
        if abs(value) > most:
            return f"{key}: must be at most {most:,}"
        least = MIN_SECONDS if key.endswith("_seconds") else MIN_HOURS if key.endswith("_hours") else 0
        if 0 < value < least:
            return f"{key}: must be at least {least:g}, not {value!r}"
    if key == "program_args" and (problem := values_problem(value)):
        return f"{key}: {problem}"
    if key == "dynamic_tables" and (problem := tables_problem(value)):
        return f"{key}: {problem}"
    if key == "program" and (problem := program_name_problem(value)):
        return f"{key}: {problem}, not {value!r}" if problem == NO_PROGRAM_NAME else f"{key}: {value!r} {problem}"
    if key == "shared_dir" and (problem := url_problem(key, value)):
        return problem
    holds, expected = CHECKS.get(key, (None, ""))
    return None if holds is None or holds(value) else f"{key}: {expected}, not {value!r}"


def check_type(key: str, value: object, kinds: tuple[type, ...]) -> None:
    """Raise ConfigError unless the value has the type; a whole number will do where a number is expected."""
    accepted = (*kinds, int) if float in kinds else kinds
    if isinstance(value, accepted) and (bool in kinds or not isinstance(value, bool)):
        return
    wanted = " or ".join(TYPE_NAMES[kind] for kind in kinds)
    mend = f"; {number_mend(value, kinds)}" if isinstance(value, str) and is_number(value) else ""
    if isinstance(value, datetime.date):
        said = value.isoformat()
        raise ConfigError(
            f'{key}: expected {wanted}, not the date {said}; YAML reads it so: write it in quotes, "{said}"'
        )
    if isinstance(value, bool) and str in kinds:
        mend = '; YAML reads off, no, on and yes as that: write them in quotes, as "off"'
    raise ConfigError(f"{key}: expected {wanted}, not {value!r}{mend}")


def is_number(text: str) -> bool:
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False


def number_mend(text: str, kinds: tuple[type, ...]) -> str:
    """Say how to write the number that a text is: YAML reads 1e6 as a text, with quotes and without."""
    if "e" not in text.lower():
        return "write it without quotes"
    number = float(text)
    if not number.is_integer() and float not in kinds:
        return "write a whole number in digits alone"
    return f"YAML takes it for a text: write {plain_number(number)}"


def unknown_key(key: object, known: list[str]) -> str:
    """Say that a key is unknown, and which one was probably meant."""
    if new := RENAMED.get(str(key)):
        return f"the run setting {key!r} is called {new!r} now: write {new}"
    close = difflib.get_close_matches(str(key), known, n=1)
    if close:
        return f"unknown key {key!r} in the run settings: did you mean {close[0]!r}?"
    return f"unknown key {key!r} in the run settings; the keys are {', '.join(known)}"
