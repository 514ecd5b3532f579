"""The command line of the verbs of docs/second-day.md: what was done, and hosts that come, go and go back."""

from __future__ import annotations

import sys

from invoke import Exit

from fleet.command_line import MEANWHILE, PLAN, REASON, VerbCall, above_zero, leaving, verb, whole_number

_BARE = ("--plan", "--json", "--ask-vault-pass", "--help")


def names_follow(verb: str) -> bool:
    """Whether a word of the command line, behind this verb, is neither a flag nor a flag's value."""
    words = sys.argv[sys.argv.index(verb) :] if verb in sys.argv else []
    takes = [word.startswith("--") and "=" not in word and word not in _BARE for word in words]
    return any(not word.startswith("-") and not before for word, before in zip(words[1:], takes, strict=False))


_HOST = {"host": "which host of the inventory; `--host` before it is optional"}


@verb(
    {
        "verb": "of one verb only, such as drain or start-cluster",
        "host": "what names this host",
        "who": "of one user only",
        "since": "since then: '10 min', '2 h', '14:30', '2026-03-02 14:30'",
        "lines": "how many of the last (default: 20)",
    }
)
def history(
    call: VerbCall,
    verb: str | None = None,
    host: str | None = None,
    who: str | None = None,
    since: str | None = None,
    lines: str = "20",
) -> None:
    """Show what was done to the cluster: when, by whom, from where, and why."""
    from fleet.verbs.history import show_history

    number = whole_number("lines", lines)
    with call.cluster() as cluster:
        show_history(cluster, call.console, verb, host, who, since, number)


@verb()
def hosts(call: VerbCall) -> None:
    """Show each host: its tasks, state and why, release, load, memory, disks, clock, GPUs."""
    from fleet.verbs.hosts import show_hosts

    with call.cluster() as cluster:
        show_hosts(cluster, call.console)


@verb({**_HOST, **REASON, **PLAN}, positional=["host"])
def drain(call: VerbCall, host: str, reason: str | None = None, plan: bool = False) -> None:
    """Take a host out of the training in order, and keep it out until `undrain`."""
    from fleet.verbs.drain import drain

    left = f"left in the middle of it. Go on: fab drain {host}. Or have it back: fab undrain {host}"
    with call.cluster() as cluster, leaving(left):
        drain(cluster, call.console, host, reason, plan)


@verb({**_HOST, **REASON, **PLAN}, positional=["host"])
def undrain(call: VerbCall, host: str, reason: str | None = None, plan: bool = False) -> None:
    """Have a drained host back in the training."""
    from fleet.verbs.drain import undrain

    with call.cluster() as cluster, leaving(f"left. Go on: fab undrain {host}"):
        undrain(cluster, call.console, host, reason, plan)


@verb(
    {
        "hosts": "which hosts, with commas between them (default: all); `--hosts` before it is optional",
        "reboot": "when-needed, always, never, or only: no updates (default: when-needed)",
        "timeout": "seconds until a rebooted host must answer (default: 900)",
        **REASON,
        **PLAN,
    },
    MEANWHILE,
    # Fabric knows no argument without a flag that may be left out.
    positional=["hosts"] if names_follow("update-hosts") else [],
)
def update_hosts(
    call: VerbCall,
    hosts: str | None = None,
    reboot: str = "when-needed",
    timeout: str = "900",
    reason: str | None = None,
    plan: bool = False,
) -> None:
    """Update Debian and reboot, host by host while the others train: a rolling reboot."""
    from fleet.verbs.update_hosts import UpdateRequest, update_hosts

    chosen = [each for each in (hosts or "").split(",") if each]
    request = UpdateRequest(chosen, reboot, above_zero("timeout", timeout), reason, plan)
    with call.cluster() as cluster, leaving("left. Type it again to go on; fab hosts shows what is drained"):
        update_hosts(cluster, call.console, request)


@verb({"hosts": "which hosts, with commas between them; `--hosts` before it is optional"}, positional=["hosts"])
def ok_to_stop(call: VerbCall, hosts: str) -> None:
    """Say whether hosts may be taken away now: what stops, for how long, and what is lost. Exit code 0 or 1."""
    from fleet.verbs.ok_to_stop import ok_to_stop

    with call.cluster() as cluster:
        ok_to_stop(cluster, call.console, hosts.split(","))


@verb(
    {
        **_HOST,
        "steps": "how many steps it trains (default: 200)",
        "loss_factor": "how far its loss may be above the live run's last ones: 2 is twice (default: 2)",
        "minutes": "how long it may take (default: 15)",
        **REASON,
        **PLAN,
    },
    positional=["host"],
)
def canary(
    call: VerbCall,
    host: str,
    steps: str = "200",
    loss_factor: str = "2",
    minutes: str = "15",
    reason: str | None = None,
    plan: bool = False,
) -> None:
    """Try the checkout's release and settings on one host, with a copy of the live run; nothing is switched."""
    from fleet.verbs.canary import CanaryRequest, canary

    ask = CanaryRequest(
        host,
        whole_number("steps", steps),
        above_zero("loss-factor", loss_factor),
        above_zero("minutes", minutes),
        reason,
        plan,
    )
    with call.cluster(check=True) as cluster, leaving(f"left; nothing was switched. Again: fab canary {host}"):
        canary(cluster, call.console, ask)


@verb({"to": "which release, as fab history shows it (default: what the hosts had before)", **REASON, **PLAN})
def rollback(call: VerbCall, to: str | None = None, reason: str | None = None, plan: bool = False) -> None:
    """Switch code, environment and run settings back, from what the hosts have kept."""
    from fleet.verbs.rollback import rollback

    if to is not None and not to:
        raise Exit(
            "--to is '': expected a release, as fab history shows it, or its first letters; or leave --to out", 2
        )
    with call.cluster() as cluster, leaving("left. Look: fab status, fab history"):
        rollback(cluster, call.console, to, reason, plan)


@verb({**_HOST, **REASON, **PLAN}, positional=["host"])
def remove_host(call: VerbCall, host: str, reason: str | None = None, plan: bool = False) -> None:
    """Clean a drained or dead host, and take it out of the inventory."""
    from fleet.verbs.remove_host import remove_host

    with call.cluster() as cluster, leaving(f"left. Go on: fab remove-host {host}"):
        remove_host(cluster, call.console, host, reason, plan)


@verb(
    {
        "old": "the host whose place and numbers are taken; `--old` before it is optional",
        "new": "the new host's name in the inventory; `--new` before it is optional",
        "address": "the new host's address (default: its name)",
        **REASON,
        **PLAN,
    },
    positional=["old", "new"],
)
def replace_host(
    call: VerbCall, old: str, new: str, address: str | None = None, reason: str | None = None, plan: bool = False
) -> None:
    """Have a new host take the place of one that is drained or dead."""
    from fleet.verbs.remove_host import replace_host

    with call.cluster() as cluster, leaving("left. Type it again to go on"):
        replace_host(cluster, call.console, old, new, address, reason, plan)
