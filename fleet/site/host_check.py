"""What the play that looks at the hosts first needs: their addresses, and words for a sudo that refuses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fleet.site.members import SERVICES
from fleet.site.outcome import outcome
from fleet.site.wireguard import endpoint
from trainer.cluster.spec import JOBS

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
    "not found": "it has no sudo, which the login needs to become root; install it: apt-get install sudo",
}


def member_addresses(groups: Mapping[str, Sequence[str]], hostvars: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """Return where each host's packets meet the others; those of a tunnel go from there too."""
    ours = (*JOBS, *SERVICES, "nfs_server")
    hosts = dict.fromkeys(host for group in ours for host in groups.get(group, ()))
    found = {host: endpoint(hostvars[host]) for host in hosts}
    return {host: str(address) for host, address in found.items() if address}


def sudo_fix(result: Mapping[str, Any], user: str = "the login") -> str:
    """Say why a login does not become root, and what to write where."""
    text = outcome(result)
    if "interpreter" in str(result.get("msg")):  # in Ansible's own words: "The module interpreter '…' was not found."
        return (
            f"it has no Python where Ansible looks for it ({text.splitlines()[-1]}); install it: apt-get install "
            "python3. Or name the one that it has as ansible_python_interpreter"
        )
    for sign, fix in SUDO.items():
        if sign in text.lower():
            return f"{fix.format(user=user)} (sudo: {text.splitlines()[-1]})"
    return f"the login does not become root: {text}"
