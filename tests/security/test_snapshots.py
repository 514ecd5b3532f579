"""Snapshots of what is served, on a real btrfs: what a task overwrites is in them as it was."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jinja2
import pytest
import yaml

from tests.hosts import ROOT
from tests.security.test_role import Machine, machine  # noqa: F401  a fixture

ROLE = ROOT / "roles/snapshots"
NOBODY = 65534


class Disk:
    """A file system of its own, with a directory that is served."""

    def __init__(self, scratch: Path, make: str) -> None:
        self._scratch = scratch
        image, self.top = scratch / "disk.img", scratch / "disk"
        with image.open("wb") as file:
            file.truncate(300 << 20)
        subprocess.run([make, "-q", str(image)], check=True, capture_output=True)
        self.top.mkdir()
        subprocess.run(["mount", "-o", "loop", image, self.top], check=True)
        self.served = self.top / "trainer"

    def end(self) -> None:
        subprocess.run(["umount", self.top], check=True)

    def subvolume(self) -> None:
        subprocess.run(["btrfs", "-q", "subvolume", "create", self.served], check=True)
        os.chown(self.served, NOBODY, NOBODY)

    def run(self, *words: str, path: Path | None = None, kept: int = 3) -> subprocess.CompletedProcess[str]:
        """Run the host's psfleet-snapshot."""
        environment = jinja2.Environment(trim_blocks=True, keep_trailing_newline=True)
        environment.filters["quote"] = lambda value: shlex.quote(str(value))
        text = (ROLE / "templates/psfleet-snapshot.j2").read_text()
        script = self._scratch / "psfleet-snapshot"
        values = {"snapshots_path": path or self.served, "snapshots_kept": kept, "ansible_managed": "x"}
        script.write_text(environment.from_string(text).render(values))
        return subprocess.run(["sh", script, *words], capture_output=True, text=True)

    def snapshots(self) -> list[Path]:
        return sorted(Path(f"{self.served}.snapshots").glob("*"))


@pytest.fixture
def btrfs(tmp_path: Path) -> Iterator[Disk]:
    disk = Disk(tmp_path, "mkfs.btrfs")
    try:
        yield disk
    finally:
        disk.end()


def as_task(disk: Disk, command: str) -> None:
    """Run a command in the directory that is served, as the user who owns it."""
    user = ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups"]
    subprocess.run([*user, "sh", "-ec", command], check=True, cwd=disk.served)


def test_what_a_task_overwrites_and_removes_is_in_the_snapshot(btrfs: Disk) -> None:
    btrfs.subvolume()
    as_task(btrfs, "mkdir -p runs/digits; echo right >runs/digits/ckpt-1")
    done = btrfs.run()
    assert done.returncode == 0, done.stderr
    [snapshot] = btrfs.snapshots()
    assert done.stdout == f"{snapshot}\n"
    as_task(btrfs, "echo wrong >runs/digits/ckpt-1; echo more >runs/digits/ckpt-2")
    assert (snapshot / "runs/digits/ckpt-1").read_text() == "right\n"
    assert [file.name for file in (snapshot / "runs/digits").iterdir()] == ["ckpt-1"]
    as_task(btrfs, "rm -r runs")
    assert (snapshot / "runs/digits/ckpt-1").read_text() == "right\n"
    with pytest.raises(OSError, match="Read-only file system"):
        (snapshot / "runs/digits/ckpt-1").write_text("wrong")
    assert snapshot.parent.stat().st_mode & 0o777 == 0o700, "others may not even look"


def test_the_newest_are_kept(btrfs: Disk) -> None:
    btrfs.subvolume()
    (btrfs.served / "file").write_text("x")
    for _ in range(4):
        assert btrfs.run(kept=2).returncode == 0
        time.sleep(1.1)  # a name is a second
    names = [path.name for path in btrfs.snapshots()]
    assert len(names) == 2
    assert btrfs.run(kept=2).returncode == 0
    assert [path.name for path in btrfs.snapshots()][:-1] == names[1:]


def test_a_check_leaves_nothing_and_a_broken_one_is_cleared_up(btrfs: Disk) -> None:
    btrfs.subvolume()
    assert btrfs.run("check").returncode == 0
    assert btrfs.snapshots() == []
    left = Path(f"{btrfs.served}.snapshots/.check-1")
    subprocess.run(["btrfs", "-q", "subvolume", "snapshot", "-r", btrfs.served, left], check=True)
    assert btrfs.run().returncode == 0
    assert not left.exists()


def test_what_has_no_snapshots_is_refused(btrfs: Disk, tmp_path: Path) -> None:
    btrfs.served.mkdir()
    done = btrfs.run("check")
    assert (done.returncode, "it is a directory; expected a subvolume" in done.stderr) == (1, True), done.stderr
    done = btrfs.run("check", path=btrfs.top)
    assert (done.returncode, "mount the disk above" in done.stderr) == (1, True), done.stderr
    done = btrfs.run("check", path=tmp_path / "missing")
    assert (done.returncode, "it can't be read" in done.stderr) == (1, True), done.stderr
    other = Path("/dev/shm")
    done = btrfs.run("check", path=other)
    assert (done.returncode, "it lies on tmpfs" in done.stderr) == (1, True), done.stderr
    assert not Path(f"{other}.snapshots").exists()


def play(machine: Machine, path: Path, *arguments: str, **settings: Any) -> list[str]:  # noqa: F811
    """Run the role in a machine; returns which tasks changed something."""
    playbook = path.parent.parent / "play.yml"
    role = {"role": "snapshots", "vars": {"snapshots_path": str(path), **settings}}
    plays = [{"hosts": "all", "gather_facts": True, "gather_subset": ["!all", "!min", "distribution"], "roles": [role]}]
    playbook.write_text(yaml.safe_dump(plays))
    command = ["ansible-playbook", "--inventory", "here,", "--connection", "local", str(playbook), *arguments]
    command += ["--extra-vars", "ansible_python_interpreter=/usr/bin/python3"]
    done = machine.run("env", f"ANSIBLE_ROLES_PATH={ROOT / 'roles'}", *command)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr
    report, _ = json.JSONDecoder().raw_decode(done.stdout[done.stdout.index("{\n") :])
    tasks = [task for each in report["plays"] for task in each["tasks"]]
    changed = [task for task in tasks if any(result.get("changed") for result in task["hosts"].values())]
    return [task["task"]["name"].rpartition(" : ")[2] for task in changed]


@pytest.fixture
def disk_of_machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Disk]:
    disk = Disk(tmp_path_factory.mktemp("disk"), "mkfs.btrfs")
    try:
        yield disk
    finally:
        disk.end()


def test_the_role_installs_the_timer_and_takes_it_away(disk_of_machine: Disk, machine: Machine) -> None:  # noqa: F811
    path = disk_of_machine.served
    disk_of_machine.subvolume()
    assert play(machine, path) == []
    assert "Install its timer" in play(machine, path, "--check", snapshots_kept=2)
    first = play(machine, path, snapshots_kept=2, snapshots_minutes=5)
    assert {"Install what makes a snapshot", "Install its unit", "Install its timer"} <= set(first)
    assert disk_of_machine.snapshots() == [], "the proof leaves nothing"
    assert play(machine, path, snapshots_kept=2, snapshots_minutes=5) == []
    units = "/etc/systemd/system/psfleet-snapshot"
    done = machine.run("systemd-analyze", "verify", f"{units}.timer", f"{units}.service")
    assert (done.returncode, done.stderr) == (0, "")
    assert "OnUnitActiveSec=5min" in machine.run("cat", f"{units}.timer").stdout
    assert machine.run("/usr/local/sbin/psfleet-snapshot").returncode == 0
    play(machine, path, snapshots_kept=0)
    assert machine.run("sh", "-c", f"ls {units}* /usr/local/sbin/psfleet-snapshot").stdout == ""
    assert len(disk_of_machine.snapshots()) == 1, "what is there stays"
