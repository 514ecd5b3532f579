"""The command line of `fab drill`."""

from __future__ import annotations

import sys

from invoke import Exit

from fleet.command_line import MEANWHILE, REASON, VerbCall, above_zero, leaving, verb, whole_number


@verb(
    {
        "names": "which drill, or several with commas between them; `--names` before it is optional",
        "all": "every drill that the inventory permits",
        "list": "say what each drill does, and its bounds",
        "random": "faults by chance, one or two at a time, and a verdict on the whole",
        "seed": "with --random: the number that decides on the faults (default: one that is drawn, and printed)",
        "minutes": "with --random: for how long (default: 10)",
        "bounds_factor": "multiply the bounds by this, on machines that have other work besides (default: 1)",
        **REASON,
    },
    MEANWHILE,
    # Fabric knows no argument without a flag that may be left out.
    positional=[] if {"--all", "--list", "--random"} & set(sys.argv) else ["names"],
)
def drill(
    call: VerbCall,
    names: str | None = None,
    all: bool = False,
    list: bool = False,
    random: bool = False,
    seed: str | None = None,
    minutes: str | None = None,
    bounds_factor: str = "1",
    reason: str | None = None,
) -> None:
    """Do a fault to the live cluster, in a run of its own, and judge the recovery."""
    from fleet.drills import runner

    if list:
        runner.list_drills(call.console)
        return
    if random and (names or all):
        raise Exit("--random chooses the drills itself: leave out --all and the names", 2)
    for flag, given in (("seed", seed), ("minutes", minutes)):
        if given is not None and not random:
            raise Exit(f"--{flag} is for faults by chance, and no drill takes it: leave it out, or add --random", 2)
    chosen = None if seed is None else whole_number("seed", seed)
    length = 10.0 if minutes is None else above_zero("minutes", minutes)
    factor = above_zero("bounds-factor", bounds_factor)
    with call.cluster(check=True) as cluster, leaving("left; the cluster was given back"):
        if random:
            runner.soak(cluster, call.console, chosen, length, factor, reason)
            return
        runner.drill(cluster, call.console, [name for name in (names or "").split(",") if name], all, factor, reason)
