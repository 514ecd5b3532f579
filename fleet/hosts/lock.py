"""One change of the cluster at a time: a lock on the chief's host, which ends with the connection.

A stop waits for nobody: it notes itself, and what is at work starts no task any more.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from fleet.errors import OperatorMistake, OthersAtWork
from fleet.hosts.removed_hosts import describe_removed, find_removed, forget_removals
from fleet.hosts.ssh import Hosts, SshHosts
from fleet.site.origin import origin
from fleet.site.routes import Host

START_LOCK = "/run/psfleet-start"
STOPPED = "/run/psfleet-stopped"
STOPPED_SCRIPT = f"echo '@stopped'; cat {STOPPED} 2>/dev/null"
# A start that has just ended may still be hanging up.
WAIT_SECONDS = 3
LOOK_SECONDS = 0.2
AGAIN_SECONDS = 3
# A line every few seconds finds out that the other side is gone.
_HOLD = f"""echo "$1 since $(date --utc +%H:%M:%S) UTC" >{START_LOCK}
echo held
while sleep 5 && echo; do :; done"""


def take_lock(hosts: Hosts, chief: str, what: str, again: bool = False, process: int | None = None) -> str | None:
    """Keep others away until `hosts` lets go, or until this process or its connection ends.

    What had it before takes it `again`: a stop that came meanwhile counts. Others are shown the `process` that works,
    by default this one. Raises OthersAtWork where another is at work. Returns why no start is kept away, where the host
    doesn't answer.
    """
    # With its process: a person may type the same twice on one machine.
    own = f"{'an' if what[0] in 'aeiou' else 'a'} {what} of {origin()} (process {process or os.getpid()})"
    who = shlex.quote(own)
    hold = shlex.quote(_HOLD if again else f"rm -f {STOPPED}\n{_HOLD}")
    lock = f"root flock --timeout {WAIT_SECONDS} --conflict-exit-code 75 {START_LOCK} sh -c {hold} sh"
    # The first line is the answer. What sudo says beside it, as of a host name that it can't resolve, comes later.
    answer = hosts.hold(
        chief,
        f"""exec 3>&1
why=$({{ {lock} {who} >&3; }} 2>&1)
case $? in
75)
  who=$(root cat {START_LOCK} 2>/dev/null)
  if [ -z "$who" ]; then  # taken this moment
    sleep 1
    who=$(root cat {START_LOCK} 2>/dev/null)
  fi
  echo "taken by $who"
  ;;
*) echo "$why" | tail -n 1 ;;
esac""",
    )
    if again and answer.stdout.startswith(f"taken by {own} since "):
        return "the connection that was lost has not ended there yet"
    if answer.stdout.startswith("taken by "):
        raise OthersAtWork(
            f"this cluster is {answer.stdout}. Begin when that is over; a start is, once it has trained a step. "
            "Or end it there with Ctrl-C. `fab stop-cluster` waits for nobody"
        )
    return answer.unreachable or (None if answer.stdout == "held" else answer.stdout or "it said nothing")


def who_is_at_work(hosts: Hosts, chief: str) -> str | None:
    """Say who has the lock now, without waiting for it; None where it is free, and where the host can't be asked."""
    return _ask(hosts, chief)


def note_stop(hosts: Hosts, chief: str) -> str | None:
    """Have what is at work start no task any more, and say what it is; None where nothing is.

    What has lost the lock for a moment, as by a reboot of that host, finds the note, too.
    """
    write = f'umask 022; echo "$1 at $(date --utc +%H:%M:%S) UTC" >{STOPPED}'
    return _ask(hosts, chief, f"root sh -c {shlex.quote(write)} sh {shlex.quote(f'a stop-cluster of {origin()}')}")


def _ask(hosts: Hosts, chief: str, first: str = "true") -> str | None:
    """Return who has the lock, without waiting for it; runs a command `first`."""
    look = f"root flock --shared --nonblock --conflict-exit-code 75 {START_LOCK} true"
    script = f"{first}; [ -e {START_LOCK} ] || exit 0; {look} 2>/dev/null; [ $? != 75 ] || root cat {START_LOCK}"
    lines = hosts.run({chief: script})[chief].stdout.splitlines()
    return lines[-1] if lines else None


def describe_others(who: str) -> str:
    """Say to a plan that another is at work."""
    return f"this cluster is taken by {who}. Until that is over nothing else begins, and it may change this plan"


def hold_for(
    process: int, chief: Host, what: str, listed: Sequence[str] = (), back: Sequence[str] = (), plan: bool = False
) -> None:
    """Hold the lock for as long as a process runs; the first line printed says whether it was taken.

    It also refuses `listed` hosts that were taken out, but for those that come `back`. The lock is taken once more
    when the connection was lost: `site.yml` may reboot the host. Where another has begun by then, the process is ended
    as by Ctrl-C. A `plan` takes none and changes nothing.
    """
    hosts = SshHosts({chief.name: chief})
    try:
        answer = {}
        if plan:
            answer = {"busy": describe_others(who)} if (who := who_is_at_work(hosts, chief.name)) else {}
        elif why := take_lock(hosts, chief.name, what, process=process):
            answer = {"warning": why}
        else:
            forget_removals(hosts, chief.name, back)
        expected = [] if "warning" in answer else [name for name in listed if name not in back]
        if removed := find_removed(hosts, chief.name, expected):
            answer = {"refused": describe_removed(removed)}
    except OperatorMistake as mistake:
        answer = {"refused": str(mistake)}
    print(json.dumps(answer), flush=True)
    while not (answer or plan) and _is_there(process):
        if not hosts.is_holding():
            hosts.let_go()
            try:
                take_lock(hosts, chief.name, what, again=True, process=process)
            except OthersAtWork as others:
                _end(process, f"the connection to {chief.name} that kept others away was lost, and now {others}\n")
                break
        time.sleep(LOOK_SECONDS if hosts.is_holding() else AGAIN_SECONDS)
    hosts.let_go()
    hosts.close()


def _end(process: int, why: str) -> None:
    """End a process as Ctrl-C does, and say why where it says the rest."""
    with contextlib.suppress(OSError):  # not Linux, or nobody reads it
        out = os.open(f"/proc/{process}/fd/2", os.O_WRONLY | os.O_APPEND | os.O_NONBLOCK)
        with os.fdopen(out, "w", encoding="utf-8") as errors:
            errors.write(why)
    with contextlib.suppress(ProcessLookupError):
        os.kill(process, signal.SIGINT)


def _is_there(process: int) -> bool:
    """Whether a process has not ended yet: a zombie has."""
    try:
        os.kill(process, 0)
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except ProcessLookupError:
        return False
    except FileNotFoundError:  # not Linux
        return True


def main() -> None:
    """Read from stdin for which process, where and what for: ansible/action_plugins/acquire_start_lock.py."""
    asked = json.load(sys.stdin)
    host = asked["chief"]
    key = host.pop("key_file")
    chief = Host(**host, key_file=Path(key) if key else None)
    hold_for(asked["process"], chief, asked["what"], asked["listed"], asked["back"], asked["plan"])


if __name__ == "__main__":
    main()
