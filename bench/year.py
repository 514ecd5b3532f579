"""What a year leaves behind, and what each look at it costs: many runs, a long queue, much in the history.

Everything is done for a quarter and for all of it. Times are processor seconds, so that a busy machine does not count
as a slow one. Growth is the time of all by that of a quarter: 4 is linear, 16 quadratic.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from bench.options import parser_of, scratch_directory
from bench.tables import print_row
from fleet.hosts.history import merge
from fleet.verbs.history import render
from trainer.__main__ import main as trainer
from trainer.core.settings.config import Config
from trainer.core.states import RunState
from trainer.run.directory import RunDirectory
from trainer.run.records import write_record
from trainer.run.selections.queue import Queue, queue_file
from trainer.run.selections.selection import apply_selection
from trainer.telemetry.status import describe_runs

BEGAN = 1_700_000_000.0
CHECKPOINTS, MEMBERS = 5, 50


def main() -> None:
    parser = parser_of("year", __doc__)
    parser.add_argument("--runs", type=int, default=300, help="runs on the shared path")
    parser.add_argument("--queue", type=int, default=200, help="entries of the queue, of which 50 have ended")
    parser.add_argument("--lines", type=int, default=100_000, help="lines of a run's events, and of the history")
    parser.add_argument("--points", type=int, default=1000, help="points of a sweep, of which half have ended")
    args = parser.parse_args()
    sizes = (args.runs, args.queue, args.lines, args.points)
    columns = [measure(*(size // part for size in sizes)) for part in (4, 1)]
    print_row("what", "a quarter, s", "all, s", "growth", head=True)
    for name, seconds in columns[1].items():
        before = columns[0][name]
        print_row(name, f"{before:.3f}", f"{seconds:.3f}", f"{seconds / max(before, 1e-4):.1f}")


def measure(runs: int, entries: int, lines: int, points: int) -> dict[str, float]:
    """Fill a shared path, and return by what is done the processor seconds that it takes."""
    with scratch_directory() as scratch:
        config = Config(program="p:P", run="run-0", shared_dir=str(scratch), steps=1000)
        settings = {
            "program": config.program,
            "run": config.run,
            "shared_dir": config.shared_dir,
            "steps": config.steps,
        }
        file = scratch / "run.json"
        write_record(file, settings)
        for number in range(runs):
            write_run(config, f"run-{number}", lines if number == 0 else 100)
        history = [json.dumps(act) for act in acts(lines)]
        found: dict[str, float] = {}
        for words in ("status", "runs", "checkpoints", "prune --keep 5 --plan"):
            found[words] = seconds_of(partial(ask, file, words))
        found["fab history, here"] = seconds_of(lambda: render(merge(history)[0][-20:]))
        shown = json.loads(ask(file, "runs"))
        found["fab runs, here"] = seconds_of(lambda: describe_runs(shown))
        write_queue(config, entries)
        found["queue list"] = seconds_of(lambda: ask(file, "queue list"))
        found["queue move"] = seconds_of(lambda: ask(file, "queue move --name next-1 --to first"))
        found["queue remove --plan"] = seconds_of(lambda: ask(file, "queue remove --name next-2 --plan"))
        added = itertools.count()
        found["queue add"] = seconds_of(
            lambda: ask(file, "queue add", ["--entry", json.dumps({"name": f"new-{next(added)}"})])
        )
        found["each second, in each task"] = seconds_of(lambda: apply_selection(config))
        found["the end of a run"] = seconds_of(lambda: Queue.read(scratch).end_point("next-0", RunState.FINISHED))
        select_sweep(config, points)
        found["each second, in a sweep"] = seconds_of(lambda: apply_selection(config))
        found["sweep"] = seconds_of(lambda: ask(file, "sweep"))
        return found


def ask(settings: Path, words: str, more: Sequence[str] = ()) -> str:
    """Have the trainer do a command; returns what it prints."""
    out = io.StringIO()
    command, *rest = words.split()
    chosen = [command, *rest, *more, "--settings", str(settings), "--json"]
    with contextlib.redirect_stdout(out):
        code = trainer(chosen, {})
    if code:
        raise SystemExit(f"bench: {' '.join(chosen)} ended with {code}")
    return out.getvalue()


def seconds_of(work: Callable[[], object]) -> float:
    """Return the least processor time of three."""
    least = float("inf")
    for _ in range(3):
        before = time.process_time()
        work()
        least = min(least, time.process_time() - before)
    return least


def write_run(config: Config, name: str, events: int) -> None:
    """Write the records of a run with members that come and go."""
    directory = RunDirectory(config.shared_dir, name)
    directory.claim(config.replace(run=name))
    directory.checkpoints.mkdir()
    for step in range(200, 200 * CHECKPOINTS + 1, 200):
        for ending in (".index", ".data-00000-of-00001"):
            Path(directory.catalogue.prefix(step) + ending).write_text("x")
        directory.catalogue.write_manifest(step, 3, "2.21.0", loss=1.0, sound=True)
    directory.set_state(RunState.FINISHED, 1000, epoch=1)
    members = {f"worker-{number}": "training" for number in range(MEMBERS)}
    status: dict[str, Any] = {"run": name, "state": "finished", "step": 1000, "steps": 1000, "workers": members}
    status |= {"program": "p:P", "loss": 0.05, "updated": BEGAN, "ledger": {"elapsed": 100.0, "goodput": 0.9}}
    directory.status.write_text(json.dumps(status), encoding="utf-8")
    write_record(directory.evaluation, {"step": 1000, "metrics": {"loss": 0.06, "accuracy": 0.9}})
    kinds = ("member-lost", "member-back")
    each = [{"time": BEGAN + n, "event": kinds[n % 2], "task": f"worker-{n // 2 % MEMBERS}"} for n in range(events)]
    directory.event_log.write_text("".join(json.dumps(line) + "\n" for line in each), encoding="utf-8")


def write_queue(config: Config, entries: int) -> None:
    """Write a queue of which the first entries have ended, as many as are kept."""
    ended = [f"run-{number}" for number in range(min(50, entries // 4))]
    names = [*ended, *(f"next-{number}" for number in range(entries - len(ended)))]
    about = {
        "attempt": 1,
        "added": BEGAN,
        "owner": "ana",
        "settings": {"program": "p:P", "program_args": {"rate": 0.1}},
    }
    write_record(queue_file(config.shared_dir), {"entries": [{"name": name, **about} for name in names]})
    end = {"state": "finished", "message": "", "attempt": 1, "time": BEGAN}
    ends: Mapping[str, Any] = {"ends": dict.fromkeys(ended, end), "begun": dict.fromkeys(ended, end)}
    write_record(Path(config.shared_dir) / "sweeps/queue/ends.json", dict(ends))
    write_record(Path(config.shared_dir) / "selection.json", {"queue": {}})


def select_sweep(config: Config, points: int) -> None:
    """Select a sweep of which half of the points have ended."""
    chosen = {"name": "s", "attempt": 1, "points": [{"rate": number / points} for number in range(points)]}
    write_record(Path(config.shared_dir) / "selection.json", {"sweep": chosen})
    end = {"state": "finished", "message": "", "attempt": 1, "time": BEGAN}
    ends = {f"s-{number}": end for number in range(1, points // 2)}
    write_record(Path(config.shared_dir) / "sweeps/s.json", {"name": "s", "attempt": 1, "points": [], "ends": ends})


def acts(lines: int) -> list[dict[str, Any]]:
    """Return the history's lines: each act has two."""
    settings = {f"setting_{number}": number for number in range(20)}
    return [
        {
            "time": BEGAN + number, "id": f"{number // 2:012x}", "verb": "start-cluster", "who": "ana", "from": "desk",
            "outcome": ("begun", "done")[number % 2], "release": f"{number // 2:012x}", "settings": settings,
        }
        for number in range(lines)
    ]  # fmt: skip


if __name__ == "__main__":
    main()
