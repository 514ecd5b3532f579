#!/usr/bin/python
"""Find the training tasks of a host that run on other files than those that exist now.

Looks at the processes themselves, so that a restart that an interrupted run still owes is found by the next one. A task
that is stopped is never stale. A task's unit has a supervisor, and the supervisor's child does the work. Unit,
environment file, secrets, kit and Python packages are the supervisor's. The child reads run settings and release. An
environment file that names more workers or ps than the process knows makes nothing stale. The task reads it again by
itself, where its unit has `TRAINER_MEMBERS`. What it has followed so is kept in `/run/psfleet-followed`, and a file
that names fewer makes it stale.

Returns:
    tasks: Names of the stale tasks, each with the file that is newer.
    warm: Names of the tasks, stale or not, whose supervisor may fork the next child.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path

from ansible.module_utils.basic import AnsibleModule

MEMBERS = "TRAINER_MEMBERS"  # in the unit: where a task finds its TF_CONFIG again
GROWING = ("worker", "ps")
FOLLOWING = ("TF_CONFIG", "TRAINER_METRICS_OF_WORKERS")
OURS = ("TRAINER_", "CUDA_", "TF_")
# What each supervisor's task has followed beyond what it began with; gone with the processes at a boot.
FOLLOWED = Path("/run/psfleet-followed")
OF_UNIT = re.compile(r"^Environment=(\w+)=", re.MULTILINE)


def newer_file(started: float, paths: Iterable[Path]) -> str | None:
    """Name the first path that changed (content, owner or mode) after a time in seconds since the epoch."""
    for path in paths:
        try:
            if path.lstat().st_ctime > started:
                return str(path)
        except FileNotFoundError:
            continue
    return None


def same_kit(one: Path, other: Path) -> bool:
    """Whether two releases have one environment, and the same package `trainer` by their lists of files."""
    if one == other:
        return True
    try:
        listed = [(place / "SHA256SUMS").read_text().splitlines() for place in (one, other)]
        environments = {(place / "env").readlink() for place in (one, other)}
    except OSError:
        return False
    kits = [sorted(line for line in lines if line[66:].startswith("trainer/")) for lines in listed]
    return kits[0] == kits[1] and len(environments) == 1


def read_environment(text: str) -> dict[str, str]:
    """Read an environment file as `environment_value` writes it (fleet/site/escaping.py)."""
    lines = [line.partition("=") for line in text.splitlines() if "=" in line and not line.startswith("#")]
    return {name: "".join(shlex.split(value)) for name, _, value in lines}


def names_more(before: str, after: str) -> bool:
    """Whether one TF_CONFIG has more workers or ps behind those of another, and is the same apart from that.

    Without ps no member can join (docs/decisions/0235-members-join-a-training.md).
    """
    one, other = json.loads(before), json.loads(after)
    had, has = one.get("cluster", {}), other.get("cluster", {})
    if one.get("task") != other.get("task") or not had.get("ps"):
        return False
    others = [job for job in {**had, **has} if job not in GROWING]
    return all(had.get(job) == has.get(job) for job in others) and all(
        has.get(job, [])[: len(had.get(job, []))] == had.get(job, []) for job in GROWING
    )


def known_members(pid: str, task: str, began: str) -> str:
    """Return the TF_CONFIG that a task goes by: what its supervisor `began` with, or what it has followed since."""
    try:
        record = json.loads((FOLLOWED / task).read_text())
        return str(record["tf_config"]) if record["process"] == [pid, start_ticks(pid)] else began
    except (OSError, ValueError, KeyError, TypeError):
        return began


def keep_followed(pid: str, task: str, path: Path) -> None:
    """Keep the members that a task finds in its environment file: when some of them go again, it must restart."""
    followed = read_environment(path.read_text())["TF_CONFIG"]
    FOLLOWED.mkdir(mode=0o700, exist_ok=True)
    new = FOLLOWED / f"{task}.new"
    new.write_text(json.dumps({"process": [pid, start_ticks(pid)], "tf_config": followed}))
    new.replace(FOLLOWED / task)


def has_only_grown(pid: str, path: Path, unit: Path) -> bool:
    """Whether a process differs from its environment file only in members that were added, and looks for these.

    `unit` sets variables, too.
    """
    try:
        pairs = (pair.partition("=") for pair in Path(f"/proc/{pid}/environ").read_text().split("\0"))
        has = {name: value for name, _, value in pairs}
        given = read_environment(path.read_text())
        known = {*given, *OF_UNIT.findall(unit.read_text())}
        left = [name for name in has if name.startswith(OURS) and name not in known]
        differing = [name for name, value in given.items() if has.get(name) != value and name not in FOLLOWING]
        more = names_more(known_members(pid, path.stem, has["TF_CONFIG"]), given["TF_CONFIG"])
    except (OSError, ValueError, KeyError, AttributeError):
        return False
    return MEMBERS in has and more and not left and not differing


def inputs(task: str, reads_settings: bool, release: Path, config_dir: Path, unit: Path, pid: str) -> Iterator[Path]:
    """List what a task's supervisor `pid` reads when it starts; `release` is the one that it works in."""
    yield unit
    if not has_only_grown(pid, config_dir / f"{task}.env", unit):
        yield config_dir / f"{task}.env"
    yield unit.with_name(f"trainer@{task}.service.d") / "psfleet-task.conf"
    if reads_settings:
        yield unit.with_name(f"trainer@{task}.service.d") / "psfleet-secrets.conf"
        yield config_dir / "secrets"
        yield from sorted((config_dir / "secrets").glob("*"))
    yield release / "env"
    yield from sorted((release / "trainer").rglob("*"))
    # A distribution that is installed again leaves its mark on the directory.
    yield from release.glob("env/lib/python3.*/site-packages")


def inputs_of_child(reads_settings: bool, release: Path, config_dir: Path) -> Iterator[Path]:
    """List what the child of a supervisor reads."""
    if reads_settings:
        yield config_dir / "run.json"
    # The list of the files and its signature are what others read.
    yield from sorted(path for path in release.rglob("*") if not path.name.startswith("SHA256SUMS"))


def start_ticks(pid: str) -> int | None:
    """When a process started, in the kernel's ticks since the boot; None when it has ended."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    except FileNotFoundError:
        return None


def start_time(pid: str) -> float | None:
    """When a process started, in seconds since the epoch; None when it has ended."""
    ticks = start_ticks(pid)
    if ticks is None:
        return None
    age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    return time.time() - age


def directory_of(pid: str) -> Path | None:
    """Return where a process works; None when it has ended."""
    try:
        return Path(f"/proc/{pid}/cwd").readlink()
    except OSError:
        return None


def child_of(pid: str) -> str | None:
    """Return the process that a supervisor has forked; what that has left behind comes after it."""
    try:
        return next(iter(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()), None)
    except OSError:
        return None


def judge(pid: str, release: Path, own: Callable[[Path], Iterable[Path]], childs: Iterable[Path]) -> tuple[str, bool]:
    """Say what is newer than a task, if anything, and whether its supervisor may go on.

    `own` are the inputs of a supervisor that works in a directory, `childs` those of its child.
    """
    home, started = directory_of(pid), start_time(pid)
    if home is None or started is None:
        return "", False
    if not same_kit(home, release):
        return str(release), False
    if newer := newer_file(started, own(home)):
        return newer, False
    child = child_of(pid)
    place, began = (directory_of(child), start_time(child)) if child else (None, None)
    if place is None or began is None:
        return "", True  # the next one reads all of it
    return str(release) if place != release else newer_file(began, childs) or "", True


def running_tasks(listing: str) -> Iterator[tuple[str, str]]:
    """Read `systemctl show --property=Id,MainPID trainer@*` as (task, process id) of those that run."""
    for block in filter(None, listing.split("\n\n")):
        values = dict(line.split("=", 1) for line in block.splitlines())
        if values["MainPID"] != "0":
            yield values["Id"].removeprefix("trainer@").removesuffix(".service"), values["MainPID"]


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            # Directory with the link `current` to the release.
            "root": {"type": "path", "required": True},
            # Directory with `run.json`, the tasks' environment files and the secrets.
            "config_dir": {"type": "path", "required": True},
            "unit": {"type": "path", "required": True},
            # Names of the tasks that read `run.json` and the secrets. The others only serve.
            "settings_readers": {"type": "list", "elements": "str", "required": True},
        },
        supports_check_mode=True,
    )
    release = (Path(module.params["root"]) / "current").resolve()
    config_dir, unit = Path(module.params["config_dir"]), Path(module.params["unit"])
    readers = module.params["settings_readers"]
    command = ["systemctl", "show", "--property=Id,MainPID", "trainer@*.service"]
    _code, listing, _error = module.run_command(command, check_rc=True)
    stale, warm = {}, []
    for task, pid in running_tasks(listing):
        reads = task in readers
        own = partial(inputs, task, reads, config_dir=config_dir, unit=unit, pid=pid)
        newer, goes_on = judge(pid, release, own, inputs_of_child(reads, release, config_dir))
        if newer:
            stale[task] = newer
        if goes_on:
            warm.append(task)
        path = config_dir / f"{task}.env"
        if not module.check_mode and has_only_grown(pid, path, unit):
            keep_followed(pid, task, path)
    diff = {"before": "".join(f"{task} started before {path} changed\n" for task, path in stale.items()), "after": ""}
    module.exit_json(changed=bool(stale), tasks=stale, warm=warm, diff=diff)


if __name__ == "__main__":
    main()
