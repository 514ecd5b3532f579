"""What a training has come to since the last start or rollback, beside what it was before. Pure functions."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from fleet.run import Run
from trainer.telemetry.status import render_metrics

VERBS = ("start-cluster", "rollback")  # which note what a training was when they began


def last_switch(acts: Sequence[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """Return the last act that switched a training, of those that are done, the oldest first."""
    done = [act for act in acts if act.get("verb") in VERBS and act.get("outcome") == "done"]
    return done[-1] if done and isinstance(done[-1].get("training"), dict) else None


def compare(act: Mapping[str, Any], run: Run) -> dict[str, Any] | None:
    """Return a training's numbers before an act and now; nothing where another run trains, or none.

    Goodput before is of the run until then, and now of the time since.
    """
    if run.state != "training" or run.run != act.get("run"):
        return None
    now = {name: value for name, value in run.numbers.items() if name != "goodput"}
    then = act.get("accounted") or {}
    since = {key: seconds - float(then.get(key, 0)) for key, seconds in run.accounted.items()}
    if then and since.get("elapsed", 0) > 0:
        now["goodput"] = round(since.get("productive", 0.0) / since["elapsed"], 4)
    named = {key: act.get(key) for key in ("verb", "time", "run", "release")}
    return {**named, "before": act["training"], "now": now}


def describe(compared: Mapping[str, Any]) -> str:
    """Say in two lines what a training was and is."""
    began = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(compared["time"]))
    title = f"run {compared['run']}, before {compared['verb']} of {began} and since then:"
    lines = [f"  {name:<7} {render_metrics(compared[name])}" for name in ("before", "now")]
    return "\n".join([title, *lines])
