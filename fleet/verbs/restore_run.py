"""`fab restore-run COPY`: make a run of a copy that `fab backup` made."""

from __future__ import annotations

from fleet.cluster import Cluster
from fleet.run_work import have_copied, refuse_name, refuse_path
from fleet.verbs import Desk


def restore_run(cluster: Cluster, desk: Desk, copy: str, name: str | None = None, plan: bool = False) -> None:
    """Prove a copy and make a run of it, under its own name or another one."""
    refuse_path("the copy", copy)
    if name is not None:
        refuse_name(name)
    words = [copy, *(["--as", name] if name else [])]
    said, size = have_copied(cluster, desk, "restore-run", words, plan)
    if said["outcome"] == "planned":
        desk.say(f"would make run {said['run']} of {said['host']}:{copy}: {size}\ndo it: fab restore-run {copy}")
        return
    there = "is there already" if said["outcome"] == "there already" else "is there again"
    desk.say(f"run {said['run']} {there}: {size}\ngo on with it: fab start-cluster --run {said['run']}")
