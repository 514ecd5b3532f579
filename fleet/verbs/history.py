"""`fab history`: what was done to the cluster, when, by whom and why."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from itertools import pairwise
from types import MappingProxyType
from typing import Any

from fleet.actions.console import Console
from fleet.hosts import history
from fleet.hosts.cluster import Cluster
from fleet.hosts.journal import read_time
from fleet.hosts.run import Run
from fleet.output.tables import render_duration, render_table
from trainer.telemetry.history import number_of
from trainer.telemetry.status import render_metrics

SHOWN = 20
# These acts begin the tasks again, and note what a training was before.
SWITCHES = ("start-cluster", "restart-cluster", "sweep", "rollback")
# What a row shows apart, or what is not read there.
APART = (
    "time", "id", "verb", "outcome", "who", "from", "reason", "seconds", "since", "inventory", "message", "settings",
    "switched", "trained", "accounted", "members", "target",
)  # fmt: skip


def show_history(
    cluster: Cluster,
    console: Console,
    verb: str | None = None,
    host: str | None = None,
    who: str | None = None,
    since: str | None = None,
    lines: int = SHOWN,
) -> None:
    """Show the last acts that were asked for, the oldest first.

    Raises OperatorMistake for a time that can't be read, and HostsUnreachable where no host can read the file.
    """
    after = None if since is None else read_time(since)
    acts, damaged = history.read(cluster)
    chosen = [
        act
        for act in acts
        if (verb is None or act.get("verb") == verb)
        and (who is None or act.get("who") == who)
        and (host is None or host in named_in(act))
        and (after is None or act["time"] >= after)
    ][-lines:]
    since_then = since_last_switch(cluster, acts)
    if console.json_out is not None:
        console.print_json("history", {"history": chosen, "damaged": damaged, "compared": since_then})
        return
    console.print(render(chosen, changes_of(acts)) if chosen else "the history has nothing of this")
    if since_then:
        console.print(describe_switch(since_then))
    if damaged:
        console.print(f"{damaged} lines of it can't be read: look at {cluster.inventory.shared_dir}/{history.NAME}")


def since_last_switch(cluster: Cluster, acts: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """Return what the training was before the last start or rollback, and is now; nothing where none is to be held."""
    act = last_switch(acts)
    run = cluster.observe([cluster.inventory.chief.host], new_is_enough=True).run if act else None
    return compare_training(act, run) if act and run else None


def named_in(act: Mapping[str, Any]) -> list[str]:
    """Return the hosts that an act names."""
    hosts = act.get("hosts")
    return [str(host) for host in hosts] if isinstance(hosts, list) else []


def changes_of(acts: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Return by the act's id how its run settings differ from those that were noted before."""
    noted = [act for act in acts if isinstance(act.get("settings"), dict)]
    changed = {now["id"]: changed_settings(was["settings"], now["settings"]) for was, now in pairwise(noted)}
    return {key: ", ".join(f"setting {each}" for each in lines) for key, lines in changed.items()}


def changed_settings(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Say of each run setting that changed what it was and is."""
    changed = [key for key in sorted({*before, *now}) if before.get(key) != now.get(key)]
    return [f"{key}: {json.dumps(before.get(key))} -> {json.dumps(now.get(key))}" for key in changed]


def render(acts: Sequence[Mapping[str, Any]], changes: Mapping[str, str] = MappingProxyType({})) -> str:
    """Return a table, a row for each act; `changes` are those of run settings, by the act's id."""
    rows = [
        [
            time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(act["time"])),
            act.get("verb"),
            act.get("outcome"),
            f"{act.get('who', '?')}@{act.get('from', '?')}",
            render_duration(act.get("seconds")) if act.get("seconds") else None,
            act.get("reason"),
            "; ".join(filter(None, (describe(act), changes.get(str(act.get("id"))), act.get("message")))),
        ]
        for act in acts
    ]
    return render_table(["WHEN", "VERB", "OUTCOME", "WHO", "TOOK", "WHY", "WHAT"], rows)


def describe(act: Mapping[str, Any]) -> str:
    """Say what an act was about: run, release, hosts, and whatever else its line names."""
    parts = []
    for key, value in act.items():
        if key in APART or value in (None, "", [], {}):
            continue
        if isinstance(value, dict):  # numbers, unless another has written the line
            text = render_metrics({name: each for name, each in value.items() if number_of(each) is not None})
        else:
            text = ", ".join(map(str, value)) if isinstance(value, list) else str(value)
        parts.append(f"{key.replace('_', ' ')} {text}")
    return ", ".join(parts)


def last_switch(acts: Sequence[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """Return the last act that switched a training, of those that are done, the oldest first."""
    done = [act for act in acts if act.get("verb") in SWITCHES and act.get("outcome") == "done"]
    return done[-1] if done and isinstance(done[-1].get("training"), dict) else None


def compare_training(act: Mapping[str, Any], run: Run) -> dict[str, Any] | None:
    """Return a training's numbers before an act and now; nothing where another run trains, or none.

    Goodput before is of the run until then, and now of the time since.
    """
    if run.state != "training" or run.run != act.get("trained", act.get("run")):
        return None
    now = {name: value for name, value in run.numbers.items() if name != "goodput"}
    then = act.get("accounted") or {}
    since = {key: seconds - float(then.get(key, 0)) for key, seconds in run.accounted.items()}
    # Below what it was before, the run has been brought back from an earlier copy.
    if then and since.get("elapsed", 0) > 0 and min(since.values()) >= 0:
        now["goodput"] = round(since.get("productive", 0.0) / since["elapsed"], 4)
    named = {key: act.get(key) for key in ("verb", "time", "release")}
    return {**named, "run": run.run, "before": act["training"], "now": now}


def describe_switch(compared: Mapping[str, Any]) -> str:
    """Say in two lines what a training was before its last switch, and is since."""
    began = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(compared["time"]))
    title = f"run {compared['run']}, before {compared['verb']} of {began} and since then:"
    lines = [f"  {name:<7} {render_metrics(compared[name])}" for name in ("before", "now")]
    return "\n".join([title, *lines])
