"""`fab backup RUN --to FOLDER`: copy a run, also one that trains, to a folder of the chief's host."""

from __future__ import annotations

from fleet.cluster import Cluster
from fleet.run_work import have_done, refuse_name, refuse_path, render_bytes
from fleet.verbs import Desk


def back_up(cluster: Cluster, desk: Desk, run: str, to: str, plan: bool = False) -> None:
    """Copy a run to <to>/<run>@<step>; says where it is. Typed twice at one step it proves the copy."""
    refuse_name(run)
    refuse_path("--to", to)
    words = [run, "--to", to]
    planned = have_done(cluster, desk, "backup", words, plan=True)
    done = plan or planned["outcome"] == "there already"
    said = planned if done else have_done(cluster, desk, "backup", words, plan=False, expected=planned["bytes"])
    if desk.answers is not None:
        desk.answer("backup", said)
    size = f"step {said['step']}, {said['files']} files, {render_bytes(said['bytes'])}"
    if said["outcome"] == "planned":
        desk.say(f"would copy run {run} to {said['host']}:{said['copy']}: {size}\ndo it: fab backup {run} --to {to}")
        return
    there = "is there already, and whole" if said["outcome"] == "there already" else "copied"
    desk.say(f"{said['host']}:{said['copy']}: {there}: {size}\nget it back: fab restore-run {said['copy']}")
