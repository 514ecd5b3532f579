"""The role itself, run by Ansible in a namespace with files of its own; systemd alone is missing there."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.hosts import ROOT
from tests.security.hosts import SYSTEMCTL, SYSTEMD_RUN

# What the role writes below, and what a real machine has in memory.
TREES = ("/etc", "/usr/local/sbin", "/var/lib", "/run")
INVENTORY = {
    "all": {
        "vars": {
            "ansible_python_interpreter": "/usr/bin/python3",
            "ansible_become": False,  # sudo would take the stand-ins' path away
            "cluster_uid": 6006,
            "cluster_shared_dir": "/srv/trainer",
            "trainer_run": {"program": "trainer.examples.digits:Digits"},
        }
    },
    "chief": {"hosts": {"here": {"ansible_host": "192.0.2.11"}}},
    "ps": {"hosts": {"there": {"ansible_host": "2001:db8::12"}}},
    "worker": {"hosts": {"here": None, "elsewhere": {"ansible_host": "192.0.2.13"}}},
    "tensorboard": {"hosts": {"here": None}},
}
# The role closes all ports only where it does not come by "local", and the same plugin has this name, too.
ALL = "ansible.builtin.local"
# The real systemctl, which without a running systemd enables units and ignores the rest; and the stand-in's timer.
OFFLINE = """#!/bin/sh
case "$*" in
stop*take-back*) ;;
*) exec /usr/bin/systemctl "$@" ;;
esac
""" + SYSTEMCTL.removeprefix("#!/bin/sh\n")
HOLD = r"""
set -e
mount --make-rprivate /
for tree in {trees}; do
    upper={scratch}/$(echo "$tree" | tr / _)
    mkdir -p "$upper/upper" "$upper/work"
    mount -t overlay overlay -o "lowerdir=$tree,upperdir=$upper/upper,workdir=$upper/work" "$tree"
done
ip link set lo up
exec {scratch}/sshd -c '
import socket, time
server = socket.create_server(("", 22))
print("ready", flush=True)
time.sleep(3600)'
"""


class Machine:
    """A machine that shares this one's programs, and nothing that the role changes."""

    def __init__(self, scratch: Path, systemctl: str = OFFLINE) -> None:
        self._scratch = scratch
        self._inventory = scratch / "hosts.yml"
        # Its files lie in memory: an overlay can't lie on another one.
        subprocess.run(["mount", "-t", "tmpfs", "tmpfs", scratch], check=True)
        for name, text in (("systemd-run", SYSTEMD_RUN), ("systemctl", systemctl)):
            path = scratch / "bin" / name
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)
            path.chmod(0o755)
        shutil.copy(os.path.realpath("/usr/bin/python3"), scratch / "sshd")
        script = HOLD.format(trees=" ".join(TREES), scratch=scratch)
        command = ["unshare", "--net", "--mount", "--pid", "--fork", "--kill-child", "sh", "-c", script]
        self._holder = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self._holder.stdout
        assert self._holder.stdout.readline() == "ready\n"
        [child] = Path(f"/proc/{self._holder.pid}/task/{self._holder.pid}/children").read_text().split()
        self._inside = ["nsenter", f"--target={child}", "--net", "--mount"]

    def end(self) -> None:
        self._holder.kill()
        self._holder.wait()
        subprocess.run(["umount", "--lazy", self._scratch], check=True)

    def run(self, *command: str) -> subprocess.CompletedProcess[str]:
        path = f"{self._scratch / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}"
        environment = os.environ | {
            "PATH": path,
            "TIMER": str(self._scratch / "timer"),
            "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg"),
            "ANSIBLE_STDOUT_CALLBACK": "ansible.posix.json",
            "_ANSIBLE_TEMPLAR_UNTRUSTED_TEMPLATE_BEHAVIOR": "error",
            "ANSIBLE_HOME": str(self._scratch / "ansible"),
            "SYSTEMD_OFFLINE": "1",
        }
        return subprocess.run([*self._inside, *command], cwd=ROOT, env=environment, capture_output=True, text=True)

    def play(
        self,
        *arguments: str,
        connection: str = ALL,
        playbook: str = "training.yml",
        tags: str = "firewall",
        **settings: Any,
    ) -> dict[str, Any]:
        """Run a role, as site.yml does with --limit; returns which tasks changed something, and what was said."""
        inventory = json.loads(json.dumps(INVENTORY))
        inventory["chief"]["hosts"]["here"] |= settings
        self._inventory.write_text(yaml.safe_dump(inventory))
        command = [
            "ansible-playbook",
            "--inventory",
            str(self._inventory),
            str(ROOT / "ansible" / playbook),
            *arguments,
        ]
        done = self.run(*command, "--tags", tags, "--connection", connection, "--limit", "here")
        assert done.returncode == 0, done.stdout[-6000:] + done.stderr
        report, _ = json.JSONDecoder().raw_decode(done.stdout[done.stdout.index("{\n") :])
        results = [
            (task["task"]["name"].rpartition(" : ")[2], result)
            for play in report["plays"]
            for task in play["tasks"]
            for result in task["hosts"].values()
        ]
        return {
            "changed": [name for name, result in results if result.get("changed")],
            "said": [result["msg"] for name, result in results if name.startswith("Say what") and "msg" in result],
        }

    def table(self) -> str:
        return self.run("nft", "list", "table", "inet", "psfleet").stdout


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    made = Machine(tmp_path)
    try:
        yield made
    finally:
        made.end()


def test_the_role_closes_a_machine_and_opens_it_again(machine: Machine) -> None:
    checked = machine.play("--check")
    assert "Have no task start without it" in checked["changed"]
    assert machine.table() == ""

    first = machine.play()
    assert "Load the table, and keep it once a new connection has come through it" in first["changed"]
    table = machine.table()
    assert "policy drop" in table
    assert "tcp dport 22 accept" in table
    for member in ("192.0.2.11", "2001:db8::12", "192.0.2.13"):
        assert member in table, "--limit renders all members"
    assert "2222" in table
    assert "2300" not in table  # a ps's, and none is here
    for unit in ("trainer@", "tensorboard"):
        dropin = machine.run("cat", f"/etc/systemd/system/{unit}.service.d/firewall.conf").stdout
        assert "ExecStartPre=+/usr/local/sbin/psfleet-firewall check" in dropin
        assert "IPAddressAllow=2001:db8::12" in dropin

    assert machine.play()["changed"] == []
    assert machine.play("--check")["changed"] == []

    opened = {"firewall_open": [{"port": 9100, "from": ["203.0.113.0/24"]}], "firewall_egress": ["any"]}
    assert set(machine.play(**opened)["changed"]) == {
        "Write the table",
        "Load the table, and keep it once a new connection has come through it",
        "Have no task start without it",
    }
    assert re.search(r"9100 ip saddr (\{ )?203\.0\.113\.0/24", machine.table())
    assert "IPAddress" not in machine.run("cat", "/etc/systemd/system/trainer@.service.d/firewall.conf").stdout

    machine.run("nft", "flush", "ruleset")
    assert machine.play(**opened)["changed"] == [
        "Load the table, and keep it once a new connection has come through it"
    ]

    # No second connection can confirm.
    machine.play(connection="local")
    assert "policy accept" in machine.table()

    assert "Unload it" in machine.play(firewall_closes="none")["changed"]
    assert machine.table() == ""
    left = machine.run(
        "find", "/etc", "/var/lib/psfleet", "/usr/local/sbin", "-name", "*firewall*", "-newer", "/proc/1"
    )
    assert [line for line in left.stdout.splitlines() if "psfleet" in line or line.endswith("firewall.conf")] == []
    assert machine.play(firewall_closes="none")["changed"] == []
