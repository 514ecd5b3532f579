"""What the play that looks at the hosts first needs: their addresses and ports, and words for a sudo that refuses."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from fleet.site.members import SERVICES, SERVING_UNITS
from fleet.site.outcome import outcome
from fleet.site.wireguard import endpoint
from trainer.cluster.spec import JOBS

# A login's shell may print before a command does, as in ~/.bashrc: what comes before this line is none of the answer.
BEGIN = "psfleet-answers"
MAX_SAID = 200

# What sudo says, and what fixes it.
SUDO = {
    "must have a tty": "its sudo wants a terminal (requiretty); expected none for {user}: put the line "
    "`Defaults:{user} !requiretty` into /etc/sudoers.d/psfleet",
    "no tty present": "its sudo wants a terminal or a password; expected neither for {user}: put the line "
    "`{user} ALL=(ALL) NOPASSWD: ALL` into /etc/sudoers.d/psfleet",
    "password": "its sudo asks {user} for a password; expected none: put the line "
    "`{user} ALL=(ALL) NOPASSWD: ALL` into /etc/sudoers.d/psfleet",
    "not in the sudoers": "{user} may not use sudo there; expected it without a password: put the line "
    "`{user} ALL=(ALL) NOPASSWD: ALL` into /etc/sudoers.d/psfleet",
    "permission denied": "under its sudo nothing else begins (noexec); expected that it does for {user}: put the line "
    "`Defaults:{user} !noexec` into /etc/sudoers.d/psfleet",
    "not found": "it has no sudo, which the login needs to become root; install it: apt-get install sudo",
}


def member_addresses(groups: Mapping[str, Sequence[str]], hostvars: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """Return where each host's packets meet the others; those of a tunnel go from there too."""
    ours = (*JOBS, *SERVICES, "nfs_server")
    hosts = dict.fromkeys(host for group in ours for host in groups.get(group, ()))
    found = {host: endpoint(hostvars[host]) for host in hosts}
    return {host: str(address) for host, address in found.items() if address}


class Listener(NamedTuple):
    """A port of a host, and the inventory's variable that has it."""

    port: int
    name: str
    unit: str
    variable: str


def task_listeners(tasks: Iterable[Mapping[str, Any]]) -> Iterator[Listener]:
    """Give where tasks listen, each with its `name`, `job` and `port`."""
    for task in tasks:
        if task["port"] is not None:
            yield Listener(task["port"], task["name"], f"trainer@{task['name']}.service", f"{task['job']}_port")


def service_listener(group: str, port: int) -> Listener:
    return Listener(port, group, SERVING_UNITS[group], f"{group}_port")


def host_listeners(spec: Mapping[str, Any], host: str) -> list[list[Any]]:
    """Return what listens on a host, by the cluster's spec (topology.py), each as Listener has it."""
    services = [service_listener(group, spec[group][host]["port"]) for group in SERVICES if host in spec[group]]
    return [[*each] for each in (*task_listeners(spec["by_host"].get(host, ())), *services)]


def taken_ports(
    wanted: Iterable[Sequence[Any]], found: Mapping[str, Mapping[str, str]], ours: bool = False
) -> Iterator[tuple[str, str]]:
    """Say of each port that another process has who that is, and the fix.

    Args:
        wanted: Listeners of the host.
        found: By port the process that listens there, as roles/host_check's host_look finds it.
        ours: Whether a unit of psfleet's may have another's port, as before a change that site.yml is to make.
    """
    for port, name, unit, variable in wanted:
        taken = found.get(str(port))
        if not taken or taken["unit"] == unit or (ours and _is_ours(taken["unit"])):
            continue
        if name in SERVICES and taken["address"].startswith(("127.", "::1")):  # a service has the host's own address
            continue
        who = f"{taken['name']} (process {taken['pid']}{', ' + taken['unit'] if taken['unit'] else ''})"
        stop = f"systemctl stop {taken['unit']}" if taken["unit"] else f"kill {taken['pid']}"
        yield f"port {port} of {name} is taken by {who}", f"{stop}, there; or another {variable} in the inventory"


def _is_ours(unit: str) -> bool:
    return unit.startswith("trainer@") or unit in SERVING_UNITS.values()


def port_problems(listens: Iterable[Sequence[Any]], seen: Mapping[str, Any], host: str) -> list[str]:
    """Say what site.yml could not start on a host."""
    taken = taken_ports(listens, seen.get("listeners", {}), ours=True)
    return [f"host '{host}': {what}. Fix it: {fix}" for what, fix in taken]


def login_problem(result: Mapping[str, Any], user: str = "") -> str:
    """Say what is wrong with a login's shell that was asked to print `psfleet-answers`, with the fix; else nothing."""
    if result.get("timedout"):
        return f"its login's shell ran no command within {result['timedout']['period']} s; {shell_fix('', user)}"
    printed, errors = str(result.get("stdout") or ""), str(result.get("stderr") or "")
    if BEGIN not in printed:
        said = in_a_line(f"{printed} {errors}")
        return f"its login's shell ran no command: it printed {said!r}; {shell_fix(said, user)}"
    if said := in_a_line(printed.replace(BEGIN, "", 1)):
        return (
            f"its login prints {said!r} also where nobody reads, and rsync and sftp take that for an answer; expected "
            "nothing. Let only a shell for people print: in ~/.bashrc, or /etc/bash.bashrc, put the line "
            "`case $- in *i*) ;; *) return ;; esac` above it"
        )
    return ""


def in_a_line(text: str) -> str:
    """Return the beginning of what a login printed, as a message can hold it."""
    return " ".join(text.split())[:MAX_SAID]


def shell_fix(said: str, user: str) -> str:
    """Say what lets a login run commands, by what it printed instead of their answers."""
    if "password" in said.lower():
        return "expected a password that is good: log in by hand and change it, or let it be good for ever with chage"
    return (
        f"expected a shell such as bash: `getent passwd {user}`, there. It must begin no other one in ~/.bashrc, wait "
        "for no home that hangs, and have no ForceCommand of sshd"
    )


def sudo_fix(result: Mapping[str, Any], user: str = "the login") -> str:
    """Say why a login does not become root, and what to write where."""
    text = outcome(result)
    if "interpreter" in str(result.get("msg")):  # in Ansible's own words: "The module interpreter '…' was not found."
        return (
            f"it has no Python where Ansible looks for it ({text.splitlines()[-1]}); install it: apt-get install "
            "python3. Or name the one that it has as ansible_python_interpreter"
        )
    if result.get("timedout"):
        return (
            f"it did not look at itself as root within {result['timedout']['period']} s; expected seconds. Look there "
            "for what hangs: `sudo -n true`, `getent hosts` with a member's name, and `df`"
        )
    if "No usable temporary directory" in text or "No space left on device" in text:
        return (
            f"it has no room for a small file ({text.splitlines()[-1]}); expected some in /tmp or /var/tmp. Look for "
            "what is full there: `df -h`, and `df -i`"
        )
    if "ModuleNotFoundError" in text or "ImportError" in text:
        return (
            f"its Python is not whole ({text.splitlines()[-1]}); expected the distribution's own: apt-get install "
            "--reinstall libpython3-stdlib python3-minimal. Or name another as ansible_python_interpreter"
        )
    for sign, fix in SUDO.items():
        if sign in text.lower():
            return f"{fix.format(user=user)} (sudo: {text.splitlines()[-1]})"
    return f"the login does not become root: {text}"
