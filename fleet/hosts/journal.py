"""The tasks' journals on the hosts: what to ask `journalctl` for, and how to read what it says."""

from __future__ import annotations

import json
import re
import shlex
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime

from fleet.errors import OperatorMistake
from fleet.hosts.observation import last_line, reject_bad_answers
from fleet.hosts.ssh import Answer
from fleet.site.schema.problems import show
from fleet.site.topology import Task

FIELDS = "MESSAGE,UNIT,_SYSTEMD_UNIT,PRIORITY,RUN,STEP"
# The supervisor and systemd speak of the end of a run's task after its last line.
LAST_WORDS_SECONDS = 5
# A host's clock may be ahead of this machine's.
SLOW_CLOCK_SECONDS = 60
_AGO = re.compile(r"([0-9]{1,12})\s*(s|sec|seconds?|m|min|minutes?|h|hours?|d|days?)(\s+ago)?")
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


@dataclass(frozen=True)
class JournalEntry:
    """One entry of a journal; several lines, where a program logged them as one."""

    time: float  # seconds since 1970, by the host's clock
    task: str
    message: str
    priority: int | None = None
    run: str | None = None
    step: int | None = None


@dataclass(frozen=True)
class JournalQuery:
    """Which lines: of a run, since a time (seconds since 1970), with a pattern."""

    run: str | None = None
    since: float | None = None
    grep: str | None = None


EVERY_LINE = JournalQuery()


def read_time(text: str, now: float | None = None) -> float:
    """Return the seconds since 1970 that `--since` names, by the clock and the time zone of this machine.

    Raises OperatorMistake for what is none, and for a time that is still to come: no line is as new.
    """
    now = time.time() if now is None else now
    found = _seconds_of(text, now)
    if found is None or found < 0:
        raise OperatorMistake(
            f"--since is {show(text)}: expected a time such as '10 min', '2 h', '14:30', '2026-03-02' or "
            "'2026-03-02 14:30'"
        )
    if found > now + SLOW_CLOCK_SECONDS:
        here = datetime.fromtimestamp(now).strftime("%Y-%m-%d %H:%M")
        raise OperatorMistake(
            f"--since is {show(text)}: expected a time that has passed, and here it is {here}. Write the date before "
            "a time of another day, as in '2026-03-02 14:30'"
        )
    return found


def _seconds_of(text: str, now: float) -> float | None:
    if found := _AGO.fullmatch(text.strip().lower()):
        return now - int(found[1]) * _SECONDS[found[2][0]]
    today = datetime.fromtimestamp(now).strftime("%Y-%m-%d")
    for form, moment in (("%Y-%m-%d %H:%M", f"{today} {text}"), ("%Y-%m-%d %H:%M:%S", f"{today} {text}")):
        try:
            return datetime.strptime(moment.strip(), form).timestamp()
        except (ValueError, OverflowError):
            pass
    try:
        return datetime.fromisoformat(text.strip()).timestamp()
    except (ValueError, OverflowError):
        return None


def script(tasks: Sequence[Task], lines: int, chosen: JournalQuery = EVERY_LINE, follow: bool = False) -> str:
    """Return the shell command that prints the last entries of tasks' journals as JSON, one a line."""
    units = " ".join(f"--unit={task.unit}" for task in tasks)
    # On a terminal, which `follow` has, journalctl colours even JSON; without --all it leaves out long lines.
    journalctl = "root env SYSTEMD_COLORS=0 journalctl --quiet --no-pager"
    words = [journalctl, "--all", f"--lines={lines}", "--output=json", f"--output-fields={FIELDS}", units]
    since = [] if chosen.since is None else [f"--since=@{chosen.since:.0f}"]
    if chosen.grep is not None:
        words.append(f"--grep={shlex.quote(chosen.grep)}")
    if follow:
        words.append("--follow")
    if chosen.run is None:
        return " ".join([*words, *since])
    # What systemd, the supervisor and TensorFlow say names no run: it is the run's from its first line to its last.
    match = shlex.quote(f"RUN={chosen.run}")
    span = f"{journalctl} --output=short-unix {units} {match}"
    begin = f"first=$({' '.join([span, *since])} | head -n 1 | cut -d. -f1)"
    end = f"last=$({span} --lines=1 | head -n 1 | cut -d. -f1)"
    until = "" if follow else f' --until="@$((last + {LAST_WORDS_SECONDS}))"'
    return f'{begin}; {end}; if [ -n "$first" ]; then {" ".join(words)} --since="@$first"{until}; fi'


def parse(text: str) -> JournalEntry | None:
    """Read one line of `journalctl --output=json`; None for any other."""
    if not text.startswith("{"):
        return None
    try:
        entry = json.loads(text)
    except ValueError:
        return None
    message = entry.get("MESSAGE") or ""
    if isinstance(message, list):  # bytes that are no UTF-8
        message = bytes(message).decode(errors="replace")
    # systemd's own lines about a unit name it in UNIT, the task's lines in _SYSTEMD_UNIT.
    unit = entry.get("UNIT") or entry.get("_SYSTEMD_UNIT") or ""
    step, priority = entry.get("STEP"), entry.get("PRIORITY")
    run = entry.get("RUN")
    return JournalEntry(
        int(entry.get("__REALTIME_TIMESTAMP") or 0) / 1e6,
        unit.removeprefix("trainer@").removesuffix(".service"),
        message,
        int(priority) if isinstance(priority, str) and priority.isdecimal() else None,
        run if isinstance(run, str) else None,
        int(step) if isinstance(step, str) and step.isdecimal() else None,
    )


def reject_bad_journals(answers: Mapping[str, Answer]) -> None:
    """Raise OperatorMistake for a bad --grep, and as reject_bad_answers does."""
    for answer in answers.values():
        if "pattern" in answer.stderr:  # as in "Bad pattern"
            raise OperatorMistake(f"--grep: expected a regular expression (PCRE): {last_line(answer)}")
    # With --grep it ends with 1 where nothing is found.
    found = {
        host: replace(each, code=0) if each.code == 1 and not each.stderr else each for host, each in answers.items()
    }
    reject_bad_answers(found, "the journal can't be read")
