"""The training run as the trainer on the chief's host describes it."""

from __future__ import annotations

import json
import re
import shlex
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from fleet.hosts import drain_records
from fleet.output.tables import render_duration
from trainer.core.settings.config import Config
from trainer.core.settings.formats import RUN_NAME
from trainer.run.directory import RunDirectory
from trainer.run.records import to_json
from trainer.telemetry.events import TAIL_BYTES
from trainer.telemetry.status import Status, read_status

AS_TRAINER = "root setpriv --reuid=trainer --regid=trainer --init-groups --"
SETTINGS = "/etc/trainer/run.json"
# A shared path hangs while its server is away: what looks there ends before its host counts as away itself.
PATH_SECONDS = 15
HANGS = 124  # the exit code of timeout(1)
# What `python -m trainer status` reads of a run, which has a file of events beside these.
RECORDS = ("status.json", "run.json", "evaluation.json")
EVENTS = "events.jsonl"
_OF_A_PROCESS = ("phase", "host", "pid")  # which no verb shows
# A line of a file that looks like a section of the script's answer.
NO_SECTION = "sed 's/^@/ @/'"
# As tail(1) heads each of several files.
_FILE = re.compile(r"^==> (\S+) <==\n(.*?)(?=^==> )", re.MULTILINE | re.DOTALL)


def on_path(words: str) -> str:
    """Return a command of the trainer's user that looks at the shared path; it ends with HANGS where that hangs."""
    return f"{AS_TRAINER} timeout {PATH_SECONDS} {words}"


def describe_hang(shared_dir: str, host: str) -> str:
    return f"the shared path {shared_dir} gives no answer on {host} within {PATH_SECONDS} s: is its server up?"


@dataclass(frozen=True)
class Evaluation:
    step: int
    metrics: Mapping[str, float | str] = field(default_factory=dict)


@dataclass
class Run(Status):
    """What `python -m trainer status --json` says of a run; an unknown value is None.

    A number may be a text, where JSON has no word for it.
    """

    run_dir: str = ""
    evaluation: Evaluation | None = None  # type: ignore[assignment]  # a mapping in the trainer

    @property
    def numbers(self) -> dict[str, float | str]:
        """What a training tells just now, to be held against later ones; the evaluation's metrics begin with `val_`."""
        known: dict[str, float | str | None] = {"step": self.step, "loss": self.loss}
        known["steps_per_second"] = self.steps_per_second
        known["goodput"] = (self.ledger or {}).get("goodput")
        known |= {f"val_{name}": value for name, value in (self.evaluation.metrics if self.evaluation else {}).items()}
        return {name: value for name, value in known.items() if value is not None}

    @property
    def accounted(self) -> dict[str, float]:
        """The seconds that the run has taken, and those that were productive; empty where nothing has counted them."""
        ledger = self.ledger or {}
        return {key: float(ledger[key]) for key in ("productive", "elapsed") if key in ledger}

    @property
    def pause(self) -> str:
        """How long the training stands still while its cluster is formed again, in words: as long as it did lately."""
        lately = [event["seconds"] for event in self.events if event.get("event") == "training" and "seconds" in event]
        return f"some {render_duration(max(lately))}, as lately" if lately else "some seconds"

    def as_json(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if name not in _OF_A_PROCESS}


def parse_run(values: Mapping[str, Any]) -> Run:
    """Make a Run of the trainer's JSON; keys of a newer trainer are passed over."""
    known = {each.name for each in fields(Run)}
    kept = {key: value for key, value in values.items() if key in known and value is not None}
    if evaluation := kept.pop("evaluation", None):
        kept["evaluation"] = Evaluation(evaluation["step"], evaluation.get("metrics") or {})
    return Run(**kept)


def script_of_files(shared_dir: str) -> str:
    """Return a script that prints the files of the run that is chosen, each below its name, and starts no Python."""
    selection, runs = (shlex.quote(f"{shared_dir}/{name}") for name in ("selection.json", "runs"))
    # Few processes: where a training has all processors, each of them waits for its turn.
    files = f"echo @files; tail -v -c {TAIL_BYTES} {' '.join(RECORDS)} {EVENTS} 2>/dev/null | {NO_SECTION}"
    # The last `run` of the first line that has one: where that is no run's name, the trainer is asked.
    name = r"""/"run": *"/{s/.*"run": *"\([^"]*\)".*/\1/p;q}"""
    look = "\n".join(
        (
            drain_records.script_of_shared(shared_dir),
            f"echo @selection; {NO_SECTION} {selection} 2>/dev/null; echo",
            f"run=$(sed -n '{name}' {selection} {SETTINGS} 2>/dev/null); echo @run-name; echo \"$run\"",
            # The run's directory is missing where the run is new.
            f'[ -n "$run" ] && cd {runs} || exit 0; if [ -d "$run" ]; then cd "$run" || exit 0; {files}; fi',
            "echo; echo @looked",
        )
    )
    # The path may be shut to others than the trainer's user.
    return (
        f"echo '@run-settings'; cat {SETTINGS} 2>/dev/null; echo\n"
        f"{on_path('sh')} -c {shlex.quote(look)}; [ $? != {HANGS} ] || {{ echo; echo @hangs; }}"
    )


def script_of_news(run: Run, seconds: float) -> str:
    """Return a script that ends once a run's status is another than `run`, and after so many seconds in any case."""
    file = shlex.quote(f"{run.run_dir}/{RECORDS[0]}")
    known = shlex.quote(f'"updated": {json.dumps(run.updated)}')
    same = f"[ ! -e {file} ]" if run.updated is None else f"grep -qsF {known} {file}"
    look = f"i=0; while [ $i -lt {seconds / 0.1:.0f} ] && {same}; do i=$((i + 1)); sleep 0.1; done"
    return f"{on_path('sh')} -c {shlex.quote(look)}"


def read_files(parts: Mapping[str, str], shared_dir: str) -> Run | None:
    """Return the run as its files have it; None where the trainer has to be asked.

    That is for a sweep or the queue, for other settings than the inventory's, and for what is damaged or can't be read.
    A run without a status is `new`, and what it will train is left out.
    """
    try:
        return _read_files(parts, shared_dir)
    except (ValueError, TypeError, KeyError, AttributeError, OSError):
        return None  # a task that was taken over may write anything there


def _read_files(parts: Mapping[str, str], shared_dir: str) -> Run | None:
    selection, settings = (json.loads(parts.get(name) or "{}") for name in ("selection", "run-settings"))
    name = {"run": Config.run, **settings, **selection}["run"]
    there = settings.get("shared_dir", Config.shared_dir)
    if {"sweep", "queue"} & selection.keys() or there != shared_dir or name != parts.get("run-name"):
        return None
    if "looked" not in parts or not RUN_NAME.fullmatch(name):
        return None
    files = dict(_FILE.findall(f"{parts.get('files', '')}\n==> "))
    if not files.get(RECORDS[0], "").strip():
        return Run(name, f"{shared_dir}/runs/{name}")
    with tempfile.TemporaryDirectory(prefix="psfleet-") as place:
        directory = RunDirectory(place, name)
        directory.path.mkdir(parents=True)
        for each in (*RECORDS, EVENTS):  # by their names alone: what a file holds may look like the head of another
            if each in files:
                (directory.path / each).write_text(files[each], encoding="utf-8", errors="replace")
        text = to_json(asdict(read_status(directory)))
    text = text.replace(json.dumps(str(directory.path)), json.dumps(f"{shared_dir}/runs/{name}"))
    return None if place in text else parse_run(json.loads(text))  # it names a file that is damaged
