"""`fab prune --keep N`: remove old runs, releases and wheels."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from fleet.actions.console import Console, with_reason
from fleet.actions.exclusive import begin_exclusively
from fleet.actions.look_around import observe_own
from fleet.actions.run_work import have_done, reject_unless_agreed, render_bytes
from fleet.errors import ClusterTrouble, HostsUnreachable, OperatorMistake
from fleet.hosts.agent_request import sources
from fleet.hosts.cluster import Cluster
from fleet.hosts.history import Trail
from fleet.site.schema.problems import show

KINDS = ("runs", "releases", "wheels")
SECONDS = 600
NOTED = 20  # of each kind, in the history
ROOT = "/opt/trainer"
# A line for each release: its environments with their locks, by Python's version.
_RELEASES = (
    f"""for each in {ROOT}/releases/*/release.json; do [ ! -e "$each" ] || {{ tr -d '\\n' <"$each"; echo; }}; done"""
)
_USED = "du --summarize --block-size=1 --total {paths} 2>/dev/null | tail -n 1 | cut -f 1"


def prune(
    cluster: Cluster,
    console: Console,
    keep: int,
    only: Sequence[str] = (),
    yes: bool = False,
    plan: bool = False,
    reason: str | None = None,
) -> None:
    """Say what would go and how much that frees, ask, and remove it.

    What trains, is selected or is in use stays, whatever `keep` says. `only` are some of KINDS. Raises HostsUnreachable
    after the rest where a host is away that isn't drained.
    """
    kinds = _chosen(only)
    begin_exclusively(cluster, console, "prune", plan)
    seen = observe_own(cluster, list(cluster.inventory.hosts))
    here = [host for host in cluster.inventory.hosts if host not in seen.unreachable]
    looks = {kind: _LOOKS[kind](cluster, console, keep, here, None) for kind in kinds}
    for kind, found in looks.items():
        console.print(f"{kind}: {_describe(found)}")
    total = sum(found["bytes"] for found in looks.values())
    command = " ".join([f"fab prune --keep {keep}", *(f"--only {kind}" for kind in only)])
    if plan:
        console.print(f"would free {render_bytes(total)}\ndo it: {with_reason(command, reason)}")
    elif any(found["removed"] for found in looks.values()):
        reject_unless_agreed(console, yes, f"Remove all that for ever ({render_bytes(total)})?")
        with Trail(cluster, console, "prune", reason) as trail:
            noted = {kind: found["removed"][:NOTED] for kind, found in looks.items()}
            trail.begin(words=command.partition("prune ")[2], **noted)
            looks = {kind: _LOOKS[kind](cluster, console, keep, here, looks[kind]["removed"]) for kind in kinds}
        console.print(f"freed {render_bytes(sum(found['bytes'] for found in looks.values()))}\nwhat is left: fab runs")
    else:
        console.print("nothing to remove")
    answer = {"outcome": "planned" if plan else "done", "bytes": total}
    console.print_json("prune", {**answer, **dict.fromkeys(KINDS), **looks})
    if away := {host: why for host, why in seen.unreachable.items() if host not in seen.drains and kinds != ["runs"]}:
        raise HostsUnreachable(away, f"What is there stays. When they are back: {with_reason(command, reason)}")


def _chosen(only: Sequence[str]) -> list[str]:
    """Return the kinds that were asked for; raises OperatorMistake for what is none."""
    if wrong := [kind for kind in only if kind not in KINDS]:
        raise OperatorMistake(
            f"--only is {show(wrong[0])}: expected {', '.join(KINDS)}; it may be given more than once"
        )
    return [kind for kind in KINDS if kind in (only or KINDS)]


def _describe(found: Mapping[str, Any]) -> str:
    if not found["removed"]:
        return "nothing to remove"
    return f"{', '.join(found['removed'])} ({render_bytes(found['bytes'])})"


def _runs(
    cluster: Cluster, console: Console, keep: int, here: Sequence[str], agreed: Sequence[str] | None
) -> dict[str, Any]:
    words = ["--keep", str(keep), *([] if agreed is None else ["--agreed", *agreed])]
    found = have_done(cluster, console, "prune", words, agreed is None, noted=True)
    return {"removed": [*found["removed"], *found["left"]], "bytes": found["bytes"]}


def _releases(
    cluster: Cluster, console: Console, keep: int, here: Sequence[str], agreed: Sequence[str] | None
) -> dict[str, Any]:
    """Have each host remove releases and environments that are neither recent nor in use, as `site.yml` does."""
    arguments = {"root": ROOT, "keep": keep}
    step = {"name": "prune", "module": "release_prune", "arguments": arguments, "check": True}
    asked = {host: {"steps": [step], "sources": sources([step])} for host in here}
    looked = cluster.act(asked, SECONDS)
    going = {host: _result(host, each)["removed"] for host, each in looked.items()}
    measured = cluster.act({host: _measure(paths) for host, paths in going.items() if paths}, SECONDS)
    used = {host: int(each["steps"]["used"]["stdout"].strip() or 0) for host, each in measured.items()}
    if agreed is not None:
        step = {key: value for key, value in step.items() if key != "check"}
        done = cluster.act(
            {host: {"steps": [step], "sources": sources([step]), "alone": True} for host in used}, SECONDS
        )
        going = {host: _result(host, each)["removed"] for host, each in done.items()}
    named = [f"{host}:{path.removeprefix(ROOT + '/')}" for host, paths in going.items() for path in paths]
    return {"removed": named, "bytes": sum(used.values())}


def _wheels(
    cluster: Cluster, console: Console, keep: int, here: Sequence[str], agreed: Sequence[str] | None
) -> dict[str, Any]:
    """Remove sets of wheels that no host has an environment of: `site.yml` brings those back that it needs.

    Where they share a path, none: what a host that is away has is not known.
    """
    place, is_shared = f"{cluster.inventory.shared_dir}/wheels", cluster.inventory.is_shared
    if is_shared and len(here) < len(cluster.inventory.hosts):
        if agreed is None:
            console.print("no wheels go while a host does not answer: it may need them")
        return {"removed": [], "bytes": 0}
    carriers = [cluster.inventory.chief.host] if is_shared else here
    look = {"list": [place, f"{ROOT}/envs"], "steps": [{"name": "releases", "command": ["sh", "-c", _RELEASES]}]}
    answers = cluster.act(dict.fromkeys(here, look), SECONDS)
    removed: list[str] = []
    freed = 0
    for host in carriers:
        mine = answers.values() if is_shared else [answers[host]]
        needed: set[str] = set()
        for each in mine:
            needed |= wheel_sets(each["names"][f"{ROOT}/envs"], each["steps"]["releases"]["stdout"])
        spare = [name for name in answers[host]["names"][place] if name not in needed]
        shown = {name: name if is_shared else f"{host}:{name}" for name in spare}
        spare = [name for name in spare if agreed is None or shown[name] in agreed]
        paths = [f"{place}/{name}" for name in spare]
        if paths:
            freed += int(cluster.act({host: _measure(paths)}, SECONDS)[host]["steps"]["used"]["stdout"].strip() or 0)
        if paths and agreed is not None:
            command = ["setpriv", "--reuid=trainer", "--regid=trainer", "--init-groups", "--", "rm", "-rf", *paths]
            done = cluster.act({host: {"steps": [{"name": "remove", "command": command}]}}, SECONDS)[host]
            if done["steps"]["remove"]["rc"]:
                raise ClusterTrouble(f"{host}: {done['steps']['remove']['stderr'].strip()}")
        removed += [shown[name] for name in spare]
    return {"removed": removed, "bytes": freed}


def wheel_sets(environments: Collection[str], releases: str) -> set[str]:
    """Return the sets of wheels that a host's environments were installed from, as roles/release names them.

    `releases` has a line for each of the host's releases. An environment of none has no set, and is removed itself.
    """
    found = set()
    for line in releases.splitlines():
        try:
            release = json.loads(line)
        except ValueError:  # damaged, as its list of files says at each start
            continue
        for kind in ("environments", "gpu_environments"):
            for python, each in release.get(kind, {}).items():
                no_gpu = "no-gpu-" if each["lock"].endswith(f"-no-gpu-{python}.txt") else ""
                if each["name"] in environments:
                    found.add(f"{'cuda-' if kind.startswith('gpu') else no_gpu}{python}")
    return found


def _measure(paths: Sequence[str]) -> dict[str, Any]:
    return {"steps": [{"name": "used", "command": ["sh", "-c", _USED.format(paths='"$@"'), "sh", *paths]}]}


def _result(host: str, answer: Mapping[str, Any]) -> dict[str, Any]:
    result: dict[str, Any] = answer["steps"]["prune"]
    if result.get("failed"):
        raise ClusterTrouble(f"{host}: {result['msg']}")
    return result


_LOOKS = {"runs": _runs, "releases": _releases, "wheels": _wheels}
