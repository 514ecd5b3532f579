"""Run site.yml on the lab and lose hosts on the way: no packet goes in or out, or their power is gone."""

from __future__ import annotations

import os
import re
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from fleet.rollout.release import Recap, parse_recap
from tests.hosts import ROOT, wait_until

RETRY = ROOT / "site.retry"
# A silent host is given up after 6 s instead of 45, so that the tests are short.
QUICK = {
    "ANSIBLE_SSH_ARGS": "-o ControlMaster=auto -o ControlPersist=60s -o ServerAliveInterval=2 -o ServerAliveCountMax=3",
    "ANSIBLE_TIMEOUT": "10",
}
TOLD = {"ANSIBLE_NOCOLOR": "1", "PYTHONUNBUFFERED": "1"}
TABLE = "psfleet_lost"
DAMAGE = """
rm -f /etc/trainer/*.env /etc/systemd/journald.conf.d/60-psfleet.conf
rm -f /usr/local/sbin/psfleet-check-release /usr/local/sbin/psfleet-check-shared-path
chmod 0600 /etc/systemd/system/psfleet-firewall.service
"""
SILENCE = f"""
table inet {TABLE} {{
  chain in {{ type filter hook input priority -300; policy drop; iifname "lo" accept; }}
  chain out {{ type filter hook output priority -300; policy drop; oifname "lo" accept; }}
}}
"""
_PLAY = re.compile(r"^PLAY \[(.*)\] \**$")
_TASK = re.compile(r"^TASK \[(?:\S+ : )?(.*)\] \**$")


@dataclass(frozen=True)
class Run:
    """What a run of site.yml said."""

    code: int
    output: str
    seconds: float

    @property
    def recaps(self) -> dict[str, Recap]:
        return parse_recap(self.output)

    @property
    def lost(self) -> list[str]:
        return sorted(host for host, recap in self.recaps.items() if recap.unreachable)

    @property
    def phases(self) -> dict[str, list[str]]:
        """The tasks of each play, in order."""
        phases: dict[str, list[str]] = {}
        for line in self.output.splitlines():
            if play := _PLAY.match(line):
                tasks = phases.setdefault(play[1], [])
            elif task := _TASK.match(line):
                tasks.append(task[1])
        return phases


def inside(host: str, *command: str, stdin: str | None = None) -> str:
    """Run a command on a host of the lab, past its network."""
    attached = ["lxc-attach", "--name", f"psfleet-{host}", "--clear-env", "--", *command]
    return subprocess.run(attached, input=stdin, capture_output=True, text=True, check=True).stdout


def silence(host: str) -> None:
    """Cut a host off."""
    inside(host, "/usr/sbin/nft", "-f", "-", stdin=SILENCE)


def pull_plug(host: str) -> None:
    """Take a host's power away: its first process is killed, with all the others."""
    subprocess.run(["lxc-stop", "--kill", "--name", f"psfleet-{host}"], check=True)


def give_power(host: str) -> None:
    """Have a host boot, and wait until it answers."""
    subprocess.run(["lxc-start", "--name", f"psfleet-{host}"], check=True)
    listens = ["lxc-attach", "--name", f"psfleet-{host}", "--clear-env", "--", "systemctl", "is-active", "ssh"]
    wait_until(
        lambda: subprocess.run(listens, capture_output=True, text=True).stdout.strip() == "active", 120, f"{host} is up"
    )


@contextmanager
def restored(*hosts: str) -> Iterator[None]:
    """Whatever happens: no host stays cut off, or without power."""
    try:
        yield
    finally:
        for host in hosts:
            state = subprocess.run(
                ["lxc-info", "-s", "-H", "--name", f"psfleet-{host}"], capture_output=True, text=True
            )
            if state.stdout.strip() == "STOPPED":
                give_power(host)
            attached = ["lxc-attach", "--name", f"psfleet-{host}", "--clear-env", "--"]
            subprocess.run([*attached, "/usr/sbin/nft", "delete", "table", "inet", TABLE], capture_output=True)


def site(
    *arguments: str, cut: Mapping[tuple[str, str], str] | None = None, loss: Callable[[str], None] = silence
) -> Run:
    """Run site.yml; `cut` names by (play, task) the host that is lost, by `loss`, when that task begins."""
    due = dict(cut or {})
    command = ["ansible-playbook", "site.yml", *arguments]
    environment = os.environ | TOLD | (QUICK if cut else {})
    begun, lines, play = time.monotonic(), [], ""
    with subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        assert process.stdout
        for line in process.stdout:
            lines.append(line)
            if header := _PLAY.match(line):
                play = header[1]
            elif (header := _TASK.match(line)) and (host := due.pop((play, header[1]), None)):
                loss(host)
    assert not due, f"no such task was met: {due}\n{''.join(lines)}"
    return Run(process.returncode, "".join(lines), time.monotonic() - begun)


def damage(host: str) -> None:
    """Give each phase something to fix on a host: where all is right, it takes one look."""
    inside(host, "sh", "-c", DAMAGE)


def environments(lab: Iterable[str]) -> dict[str, str]:
    """What the hosts' tasks are told, TF_CONFIG with it; empty where the file is missing."""
    return {host: inside(host, "sh", "-c", "cat /etc/trainer/*.env 2>/dev/null || true") for host in lab}


def lose(
    lab: Mapping[str, object],
    tasks: list[str],
    phase: str,
    victims: list[str],
    loss: Callable[[str], None] = silence,
) -> Run:
    """Lose hosts at the beginning, in the middle and at the end of a phase, and have them finished afterwards.

    Each host is damaged before: who has its tasks' files afterwards has gone through to the end.
    """
    RETRY.unlink(missing_ok=True)
    right = environments(lab)
    assert all(right.values())
    tasks = list(dict.fromkeys(tasks))  # an include may have the name of one of its tasks
    places = [tasks[0], tasks[len(tasks) // 2], tasks[-1]]
    cut = {(phase, place): host for place, host in zip(places, victims, strict=False)}
    assert len(cut) == len(victims), f"the phase {phase!r} has too few tasks for {victims}: {tasks}"
    with restored(*victims):
        for host in lab:
            damage(host)
        run = site(cut=cut, loss=loss)
        found = environments(host for host in lab if host not in victims)
    assert run.code == 4, run.output
    assert run.lost == sorted(victims), run.output
    assert found == {host: right[host] for host in found}, run.output
    assert f"{len(lab) - len(victims)} of {len(lab)} hosts are right" in run.output, run.output
    assert RETRY.read_text().split() == sorted(victims)
    finished = site("--limit", f"@{RETRY.name}")
    assert (finished.code, sorted(finished.recaps)) == (0, sorted(victims)), finished.output
    assert environments(lab) == right
    assert not RETRY.exists()
    return run


def assert_right(lab: Mapping[str, object]) -> None:
    """A whole run finds nothing to do."""
    again = site()
    assert again.code == 0, again.output
    assert {host: again.recaps[host].changed for host in lab} == dict.fromkeys(lab, 0), again.output
