"""Have a host work on a whole run, and show meanwhile how far it is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fleet.actions.console import Console
from fleet.actions.look_around import observe_own
from fleet.errors import OperatorMistake
from fleet.hosts.cluster import Cluster
from fleet.hosts.history import Trail
from fleet.site.schema.problems import show

STOPPED = "stopped; type it again to go on"


def have_done(
    cluster: Cluster,
    console: Console,
    verb: str,
    words: Sequence[str],
    plan: bool,
    expected: int | None = None,
    noted: bool = False,
    reason: str | None = None,
) -> dict[str, Any]:
    """Have a host do a verb of the trainer's; returns its answer. `expected` are the bytes of all of it.

    Ctrl-C, or a lost connection, ends the work on the host too. What is no plan leaves a line in the history, unless
    the caller has `noted` it.
    """
    with console.progress() as progress:

        def hear(record: Mapping[str, Any]) -> None:
            done = render_bytes(record["done"])
            progress.show(f"{verb}: {done} of {render_bytes(expected)}" if expected else f"{verb}: {done}")

        try:
            if plan:
                return cluster.upkeep(verb, [*words, "--plan"], hear)
            if noted:
                return cluster.upkeep(verb, words, hear)
            with Trail(cluster, console, verb, reason) as trail:
                trail.begin(words=" ".join(words))
                return cluster.upkeep(verb, words, hear)
        except KeyboardInterrupt:
            raise KeyboardInterrupt(STOPPED) from None


def have_copied(
    cluster: Cluster, console: Console, verb: str, words: Sequence[str], plan: bool, reason: str | None
) -> tuple[dict[str, Any], str]:
    """Have a host make a copy, unless it exists already; returns its answer, and the copy's size in words.

    The answer is printed where `--json` asked for it. Raises OperatorMistake where the runs are another cluster's.
    """
    observe_own(cluster, [cluster.inventory.chief.host])
    answer = have_done(cluster, console, verb, words, plan=True)
    if not plan and answer["outcome"] != "there already":
        answer = have_done(cluster, console, verb, words, plan=False, expected=answer["bytes"], reason=reason)
    console.print_json(verb, answer)
    return answer, f"step {answer['step']}, {answer['files']} files, {render_bytes(answer['bytes'])}"


def reject_path(flag: str, path: str | None) -> None:
    """Raise OperatorMistake for a path that doesn't say where it is on a host."""
    if path is None or not path.startswith("/"):
        found = "missing" if path is None else show(path)
        raise OperatorMistake(f"{flag} is {found}: expected a whole path of the chief's host, such as /srv/backup")


def render_bytes(number: int | None) -> str:
    """As `1.5 GB`, by powers of ten as disks have them."""
    left = float(number or 0)
    for unit in ("bytes", "kB", "MB", "GB"):
        if left < 1000:
            return f"{left:.0f} {unit}" if unit == "bytes" else f"{left:.1f} {unit}"
        left /= 1000
    return f"{left:.1f} TB"


def reject_unless_agreed(console: Console, yes: bool, question: str) -> None:
    """Raise OperatorMistake unless the operator agrees, with --yes or on the terminal."""
    if not yes and not console.ask(f"{question} [y/N] "):
        raise OperatorMistake("nothing was removed; agree with --yes, or on a terminal")
