"""Ship the checkout's code and the inventory's run settings with the playbooks that `site.yml` runs too."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from fleet.errors import ClusterTrouble, FleetError, HostsUnreachable, OperatorMistake
from fleet.inventory import ROOT, Inventory

# In one call, so that what preflight derives from the inventory is there for training.
PLAYBOOKS = [ROOT / "ansible" / name for name in ("preflight.yml", "release.yml", "training.yml")]

# Bits of ansible-playbook's exit code.
_HOSTS_FAILED = 2
_HOSTS_UNREACHABLE = 4

_RECAP = re.compile(
    r"^(?P<host>\S+)\s+: ok=\d+\s+changed=(?P<changed>\d+)\s+unreachable=(?P<unreachable>\d+)\s+failed=(?P<failed>\d+)",
    re.MULTILINE,
)


@dataclass(frozen=True)
class Recap:
    """One host's line at the end of a playbook's output."""

    changed: int
    unreachable: int
    failed: int


def ship(
    inventory: Inventory, execute: Callable[..., subprocess.CompletedProcess[str]] = subprocess.run
) -> dict[str, Recap]:
    """Bring code and settings to every host; running tasks that a change touches are restarted by the playbooks.

    Returns each host's recap. Raises with Ansible's output when a host is unreachable or failed.
    """
    for playbook in PLAYBOOKS:
        if not playbook.is_file():
            raise OperatorMistake(f"{playbook} is missing: this checkout is incomplete")
    environment = {**os.environ, "ANSIBLE_NOCOLOR": "1", "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg")}
    done = execute(
        [_find_ansible(), *map(str, PLAYBOOKS), "--inventory", inventory.source],
        cwd=ROOT,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    recaps = parse_recap(done.stdout)
    if done.returncode:
        raise _failure(done.returncode, done.stdout, recaps, inventory)
    return recaps


def parse_recap(output: str) -> dict[str, Recap]:
    """Read the lines below PLAY RECAP."""
    return {
        found["host"]: Recap(int(found["changed"]), int(found["unreachable"]), int(found["failed"]))
        for found in _RECAP.finditer(output)
    }


def _failure(code: int, output: str, recaps: dict[str, Recap], inventory: Inventory) -> FleetError:
    message = f"{output.rstrip()}\n\nnot everything was shipped: ansible-playbook ended with code {code}, see above"
    unreachable = {host: "Ansible could not reach it" for host, recap in recaps.items() if recap.unreachable}
    if code & _HOSTS_UNREACHABLE and unreachable:
        return HostsUnreachable(unreachable, message)
    failed = {host for host, recap in recaps.items() if recap.failed}
    # What fails on the control machine, or before any host is asked, is in the checkout or in the inventory.
    if code & _HOSTS_FAILED and failed & set(inventory.hosts):
        return ClusterTrouble(message)
    return OperatorMistake(message)


def _find_ansible() -> str:
    beside = Path(sys.executable).parent / "ansible-playbook"
    found = str(beside) if beside.is_file() else shutil.which("ansible-playbook")
    if not found:
        raise OperatorMistake(
            "ansible-playbook is not installed beside fab. Install both with the control machine's lock: "
            "uv pip install --require-hashes -r locks/control.txt"
        )
    return found
