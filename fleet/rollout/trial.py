"""What a canary does on its host: a new release trains on from a copy of a live run's checkpoint, in a run of its own.

It is one transient unit of systemd with the sandbox of a proof. It gets the processor time that is left over, memory
that is free, and no GPU. Its files lie in the unit's cache directory, which goes with it.
"""

from __future__ import annotations

import json
import math
import shlex
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fleet.errors import OperatorMistake
from fleet.hosts.observation import load_json, split_sections
from fleet.hosts.run import AS_TRAINER, NO_SECTION
from fleet.output.tables import render_duration
from fleet.rollout.roles import Role
from fleet.site.escaping import config_word
from fleet.site.inventory import Inventory
from trainer.core.settings.config import Config, ConfigError
from trainer.telemetry.history import number_of
from trainer.telemetry.status import render_number

UNIT = "psfleet-canary"
PLACE = f"/var/cache/{UNIT}"
# So many losses, of the last lines of a run's history.
LIVE_LOSSES = 20
TAIL_BYTES = 2**17
LOG_LINES = 200
MAX_LOG_LINES = 10
# A member of the trial may wait long for a processor.
HEARTBEAT_SECONDS = 60.0

END = f"systemctl stop {UNIT}.service 2>/dev/null; systemctl reset-failed {UNIT}.service 2>/dev/null; rm -rf {PLACE}"
# The live run's folder is read alone: all but the unit's own directory is read-only to it.
BODY = f"""exec >{PLACE}/log 2>&1 </dev/null
set -e
mkdir {PLACE}/runs
ln -s "$1/runs/$2" {PLACE}/runs/"$2"
env/bin/python -m trainer begin --run "$3" --from "$2@$4" --shared-dir {PLACE}
rm {PLACE}/runs/"$2"
shift 4
exec env/bin/python -m trainer local "$@"
"""


@dataclass(frozen=True)
class TrialRun:
    """A trial, as it is asked for."""

    release: str
    run: str
    """The live run, whose checkpoint of `step` it goes on from."""
    step: int
    shared_dir: str
    settings: Mapping[str, Any]
    memory: int
    """Bytes that it may take."""
    seconds: float
    """How long it may take."""

    @property
    def name(self) -> str:
        return "canary" if self.run != "canary" else "canary-2"

    @property
    def until(self) -> int:
        return int(self.settings["steps"])


@dataclass(frozen=True)
class TrialState:
    """What is seen of a trial."""

    over: bool = False
    result: str = ""
    """systemd's word for how it ended."""
    code: int = 0
    status: Mapping[str, Any] = field(default_factory=dict)
    evaluation: Mapping[str, Any] = field(default_factory=dict)
    losses: Sequence[tuple[int, float]] = ()
    """Of each line of its history: the step, and the loss since the line before."""
    speeds: Sequence[float] = ()
    """Of each of these lines: steps per second, all workers together."""
    log: Sequence[str] = ()

    @property
    def step(self) -> int | None:
        step = self.status.get("step")
        return step if isinstance(step, int) else None

    @property
    def speed(self) -> float | None:
        """Steps per second of one worker, on the average."""
        workers = len(self.status.get("workers") or ()) or 1
        return statistics.median(self.speeds) / workers if self.speeds else None


def settings_of(
    given: Mapping[str, Any], program: str, program_args: Mapping[str, Any], step: int, steps: int
) -> dict[str, Any]:
    """Return the settings with which a run is tried for `steps` steps from a checkpoint of `step`.

    All that shapes the training stays. Raises OperatorMistake where they are wrong.
    """
    try:
        before = Config.from_dict({**given, "program": program, "program_args": dict(program_args)})
        found = {
            **{key: value for key, value in before.as_dict().items() if value is not None},
            "shared_dir": PLACE,
            "local_run_dir": False,
            "steps": step + steps,
            "epoch_steps": before.epoch_steps if before.epoch_steps <= steps else 0,
            "evaluation": "inline" if before.evaluation == "sidecar" else before.evaluation,
            "export": False,
            "checkpoint_steps": 0,
            "checkpoint_seconds": 86400.0,  # one at its end
            "checkpoints_kept_hours": 0.0,
            "initial_weights": "",
            "notify_webhook": "",
            "notify_webhook_secret": "",
            "notify_command": "",
            "log_seconds": 1.0,
            "max_restarts_without_step": 1,
        }
        shortest = min(before.training_timeout_seconds, before.restoring_timeout_seconds)
        found["heartbeat_timeout_seconds"] = max(before.heartbeat_timeout_seconds, min(HEARTBEAT_SECONDS, shortest / 2))
        Config.from_dict(found)
    except ConfigError as error:
        raise OperatorMistake(f"the run settings can't be tried: {error}") from error
    return found


def flags_of(settings: Mapping[str, Any]) -> list[str]:
    """Return settings as `python -m trainer local` takes them."""
    flags = []
    for key, value in settings.items():
        if key == "program_args":
            flags += [f"--set={name}={json.dumps(each)}" for name, each in value.items()]
        else:
            text = value if isinstance(value, str) else json.dumps(value)
            flags.append(f"--{key.replace('_', '-')}={text}")
    return flags


def command_of(trial: TrialRun, inventory: Inventory, host: str) -> list[str]:
    """Return the command that begins a trial on a host, as root."""
    release = f"/opt/trainer/releases/{trial.release}"
    role = Role(inventory, host, "release", "release.yml", "prove", psfleet_release=trial.release)
    environment = {
        key: value
        for key, value in role.value("__release_check_environment").items()
        if key not in ("TF_CONFIG", "TRAINER_FORKS")
    }
    properties = [
        *role.value("__release_sandbox"),
        *(f"ReadWritePaths=-{config_word(path)}" for path in role.value("release_writable")),
        *(f"LoadCredential={name}:/etc/trainer/secrets-coming/{name}" for name in role.value("release_secrets")),
        f"CacheDirectory={UNIT}",
        "CacheDirectoryMode=0700",
        "CPUWeight=10",
        "IOWeight=10",
        f"MemoryMax={trial.memory}",
        "OOMScoreAdjust=1000",
        "OOMPolicy=kill",
        f"RuntimeMaxSec={trial.seconds:.0f}",
        "TimeoutStopSec=20",
        "RemainAfterExit=yes",
    ]
    return [
        *("systemd-run", "--quiet", f"--unit={UNIT}", "--service-type=exec", "--nice=19"),
        *("--uid=trainer", "--gid=trainer", f"--working-directory={release}"),
        *(f"--property={each}" for each in properties),
        *(f"--setenv={name}={value}" for name, value in environment.items()),
        # systemd-run would put a variable's value in the place of its name.
        *(
            word.replace("$", "$$")
            for word in (
                *("/bin/sh", "-c", BODY, "sh"),
                *(trial.shared_dir, trial.run, trial.name, str(trial.step)),
                *flags_of({**trial.settings, "run": trial.name}),
            )
        ),
    ]


def status_script(trial: TrialRun) -> str:
    """Return the script with which a host says how far a trial is."""
    run = f"{PLACE}/runs/{trial.name}"
    # As the user whose files they are: a link among them may lead anywhere.
    files = "; ".join(
        (
            *(f"echo @{each}; cat {run}/{each}.json 2>/dev/null; echo" for each in ("status", "evaluation")),
            f"echo @history; tail -c {TAIL_BYTES} {run}/history.jsonl 2>/dev/null | {NO_SECTION}",
            f"echo @log; tail -n {LOG_LINES} {PLACE}/log 2>/dev/null | {NO_SECTION}",
        )
    )
    show = f"systemctl show --property=ActiveState,SubState,Result,ExecMainStatus {UNIT}.service"
    return f"echo @unit; root {show}; {AS_TRAINER} sh -c {shlex.quote(files)}"


def live_losses(shared_dir: str, run: str) -> str:
    """Return the script that prints the end of a live run's history."""
    path = shlex.quote(f"{shared_dir}/runs/{run}/history.jsonl")
    return f"{AS_TRAINER} tail -c {TAIL_BYTES} {path} 2>/dev/null; true"


def read(text: str) -> TrialState:
    """Read what `status_script` printed."""
    parts = split_sections(text)
    unit = dict(line.partition("=")[::2] for line in parts.get("unit", "").splitlines())
    status, evaluation = (load_json(parts.get(name, "")) for name in ("status", "evaluation"))
    code = unit.get("ExecMainStatus", "")
    return TrialState(
        over=unit.get("ActiveState") in ("failed", "inactive") or unit.get("SubState") == "exited",
        result=unit.get("Result", ""),
        code=int(code) if code.isdecimal() else 0,
        status=status if isinstance(status, dict) else {},
        evaluation=evaluation if isinstance(evaluation, dict) else {},
        losses=read_numbers(parts.get("history", ""), "loss"),
        speeds=[speed for _, speed in read_numbers(parts.get("history", ""), "speed")],
        log=parts.get("log", "").splitlines(),
    )


def read_numbers(text: str, name: str) -> list[tuple[int, float]]:
    """Return the step and a number (`speed`, or one of the values) of each line of a history that has both."""
    found = []
    for line in map(load_json, text.splitlines()):
        if isinstance(line, dict) and isinstance(line.get("step"), int) and isinstance(line.get("values"), dict):
            number = number_of(line.get("speed") if name == "speed" else line["values"].get(name))
            if number is not None:
                found.append((line["step"], number))
    return found


def most_loss(live: Sequence[float], factor: float) -> float | None:
    """Return the loss that a trial's must not exceed; None where the live run has reported none.

    It is the highest of the live ones, and above that `factor` - 1 times its size or their spread.
    """
    known = [loss for loss in live[-LIVE_LOSSES:] if math.isfinite(loss)]
    if not known:
        return None
    highest, lowest = max(known), min(known)
    return highest + (factor - 1) * max(abs(highest), highest - lowest, 1e-6)


def judge(trial: TrialRun, seen: TrialState, limit: float | None) -> list[str]:
    """Say what is wrong with a trial that is over; nothing where all is well."""
    done = f"step {seen.step}" if seen.step is not None else "no step"
    if seen.result == "timeout":
        return [
            f"it was not through in {render_duration(trial.seconds)}: it has {done} of {trial.until}. More: --minutes"
        ]
    if seen.result == "oom-kill":
        return [f"it needs more memory than the {trial.memory / 2**30:.1f} GiB that it may take: drain the host first"]
    if seen.code or seen.result not in ("success", ""):
        return errors_of(seen)
    problems = []
    if seen.step != trial.until:
        problems.append(f"it ended at {done}, and not at step {trial.until}")
    if not seen.losses or seen.losses[0][0] <= trial.step:
        problems.append(
            f"it did not go on from the checkpoint of step {trial.step}" if seen.losses else "it reported no loss"
        )
    odd = [f"its loss at step {step} is {loss}" for step, loss in seen.losses if not math.isfinite(loss)]
    numbers = {name: number_of(value) for name, value in (seen.evaluation.get("metrics") or {}).items()}
    odd += [
        f"the evaluation's {name} is {value}" for name, value in numbers.items() if value and not math.isfinite(value)
    ]
    problems += odd[:1]
    losses = [loss for _, loss in seen.losses]
    if not problems and limit is not None and (middle := statistics.median(losses)) > limit:
        problems.append(
            f"its loss is {render_number(middle)} in the middle, and {render_number(limit)} is the most by the live "
            "run's last losses (--loss-factor)"
        )
    return problems


def errors_of(seen: TrialState) -> list[str]:
    """Return why a trial failed, in its own words: its message, its errors, else its last lines."""
    if seen.status.get("state") == "failed" and (message := str(seen.status.get("message") or "")):
        return [message]
    lines = [line.partition(" | ")[2] if " | " in line else line for line in seen.log if line.strip()]
    errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    return list(dict.fromkeys(errors)) or lines[-10:] or [f"it ended with {seen.result}, exit code {seen.code}"]


def last_words(seen: TrialState) -> list[str]:
    """Return the last lines of a trial's tasks, each after its task."""
    return [line for line in seen.log if " | " in line][-MAX_LOG_LINES:]
