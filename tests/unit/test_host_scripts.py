"""What a host keeps before a start, and how it brings it back: the scripts themselves, below a directory."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from fleet.hosts.cluster import Cluster
from fleet.hosts.host_scripts import DIGEST, RESTORE_STATE, SAVE_STATE
from fleet.hosts.ssh import Answer
from fleet.site.topology import Task
from tests.unit.stand_ins import put_program

UNITS = "etc/systemd/system"
WANTS = f"{UNITS}/multi-user.target.wants"
SYSTEMCTL = """#!/bin/sh
echo "$@" >>"$CALLS"
[ "$1" != list-units ] || echo "trainer@chief-0.service loaded active running psfleet training task chief-0"
"""


@pytest.fixture
def host(tmp_path: Path) -> Path:
    """A host with a release, a task's files and its unit, and a systemctl that notes what it is asked for."""
    root = tmp_path / "root"
    for name in ("etc/trainer", WANTS, "opt/trainer/releases/old", "opt/trainer/releases/new"):
        (root / name).mkdir(parents=True)
    (root / "opt/trainer/current").symlink_to("releases/old")
    (root / "etc/trainer/run.json").write_text('{"steps": 1}')
    (root / "etc/trainer/ps-0.env").write_text("TF_CONFIG='old'\n")
    (root / UNITS / "trainer@.service").write_text("[Unit]\n")
    (root / WANTS / "trainer@ps-0.service").symlink_to("/etc/systemd/system/trainer@.service")
    put_program(tmp_path / "systemctl", SYSTEMCTL)
    return root


def run(script: str, root: Path) -> None:
    script = script.replace("/opt/trainer", f"{root}/opt/trainer").replace("cd /\n", f"cd {root}\n")
    environment = os.environ | {"PATH": f"{root.parent}:{os.environ['PATH']}", "CALLS": str(root.parent / "calls")}
    subprocess.run(["sh", "-c", script], env=environment, check=True)


def digest(root: Path) -> str:
    return subprocess.run(
        ["sh", "-c", DIGEST.replace("cd /\n", f"cd {root}\n")], capture_output=True, text=True, check=True
    ).stdout


CHIEF = f"{UNITS}/trainer@chief-0.service.d"


@pytest.mark.parametrize(
    "name",
    [
        "etc/trainer/run.json",
        "etc/trainer/secrets/KEY",
        f"{UNITS}/trainer@.service",
        f"{CHIEF}/psfleet-secrets.conf",
        f"{CHIEF}/psfleet-task.conf",
        f"{CHIEF}/firewall.conf",
        "var/lib/psfleet/firewall.nft",
    ],
)
def test_whatever_a_start_changes_shows_in_the_digest(host: Path, name: str) -> None:
    before = digest(host)
    assert digest(host) == before
    (host / name).parent.mkdir(parents=True, exist_ok=True)
    (host / name).write_text("another")
    assert digest(host) != before


def test_the_secrets_of_a_proof_are_no_change(host: Path) -> None:
    before = digest(host)
    (host / "etc/trainer/secrets-coming").mkdir()
    (host / "etc/trainer/secrets-coming/KEY").write_text("another")
    assert digest(host) == before


def look(root: Path) -> dict[str, str]:
    found = {}
    for path in sorted(root.rglob("*")):
        name = path.relative_to(root).as_posix()
        if path.is_symlink():
            found[name] = f"-> {path.readlink()}"
        elif path.is_file() and "before" not in name:
            found[name] = path.read_text()
    return found


def test_what_a_start_changes_is_put_back(host: Path) -> None:
    (host / "opt/trainer/previous").symlink_to("releases/older")
    before = look(host)
    run(SAVE_STATE, host)
    for name in ("current", "previous"):
        (host / "opt/trainer" / name).unlink()
        (host / "opt/trainer" / name).symlink_to("releases/new")
    (host / "etc/trainer/run.json").write_text('{"steps": 2}')
    (host / "etc/trainer/ps-0.env").unlink()
    (host / "etc/trainer/worker-7.env").write_text("")
    (host / UNITS / "trainer@.service").write_text("[Unit]\n# new\n")
    (host / WANTS / "trainer@ps-0.service").unlink()
    (host / WANTS / "trainer@worker-7.service").symlink_to("/etc/systemd/system/trainer@.service")
    run(RESTORE_STATE, host)
    assert look(host) == before
    assert (host / "opt/trainer/before/running").read_text() == "trainer@chief-0.service\n"
    calls = (host.parent / "calls").read_text().splitlines()
    assert [call.split()[0] for call in calls] == ["list-units", "stop", "reset-failed", "daemon-reload"]


def test_what_a_start_has_begun_parked_did_not_run_before(host: Path, tmp_path: Path) -> None:
    (tmp_path / "parked").mkdir()
    remember = SAVE_STATE.replace("/run/psfleet-parked", str(tmp_path / "parked"))
    run(remember, host)
    assert (host / "opt/trainer/before/running").read_text() == "trainer@chief-0.service\n"
    (tmp_path / "parked/trainer@chief-0.service").touch()
    run(remember, host)
    assert (host / "opt/trainer/before/running").read_text() == ""
    run(RESTORE_STATE.replace("/run/psfleet-parked", str(tmp_path / "parked")), host)
    assert not (tmp_path / "parked").exists()


def test_who_may_come_in_is_put_back_and_loaded(host: Path) -> None:
    table, dropin = host / "var/lib/psfleet/firewall.nft", host / UNITS / "trainer@.service.d/firewall.conf"
    for path in (table, dropin):
        path.parent.mkdir(parents=True)
        path.write_text("old")
    before = look(host)
    run(SAVE_STATE, host)
    table.write_text("new")
    dropin.write_text("new")
    run(RESTORE_STATE, host)
    assert look(host) == before
    assert (host.parent / "calls").read_text().splitlines()[-1] == "restart psfleet-firewall.service"


WALLS = (
    "var/lib/psfleet/firewall.nft",
    "etc/psfleet/firewall.nft",
    "usr/local/sbin/psfleet-firewall",
    f"{UNITS}/psfleet-firewall.service",
    f"{UNITS}/sysinit.target.wants/psfleet-firewall.service",
    f"{UNITS}/nftables.service.d/psfleet.conf",
    f"{UNITS}/trainer@.service.d/firewall.conf",
    f"{UNITS}/tensorboard.service.d/firewall.conf",
)


def close(host: Path) -> None:
    for name in WALLS:
        (host / name).parent.mkdir(parents=True, exist_ok=True)
        (host / name).write_text("wall")


def note_nft(host: Path) -> None:
    """An nft that has a table until it is deleted."""
    put_program(host.parent / "nft", '#!/bin/sh\necho "nft $@" >>"$CALLS"\n')


def test_a_host_that_was_closed_is_closed_again(host: Path) -> None:
    close(host)
    note_nft(host)
    before = look(host)
    run(SAVE_STATE, host)
    for name in WALLS:
        (host / name).unlink()
    run(RESTORE_STATE, host)
    assert look(host) == before
    calls = (host.parent / "calls").read_text().splitlines()
    assert calls[-1] == "restart psfleet-firewall.service"
    assert not any(call.startswith("nft") for call in calls)


def test_a_host_that_was_open_is_opened_again(host: Path) -> None:
    note_nft(host)
    before = look(host)
    run(SAVE_STATE, host)
    close(host)
    tried = host / "run/psfleet-firewall/tried.nft"
    tried.parent.mkdir(parents=True)
    tried.write_text("a table on trial")
    run(RESTORE_STATE, host)
    assert look(host) == before
    assert (host.parent / "calls").read_text().splitlines()[-1] == "nft delete table inet psfleet"


def test_a_table_on_trial_is_not_loaded_again(host: Path) -> None:
    close(host)
    before = look(host)
    run(SAVE_STATE, host)
    tried = host / "run/psfleet-firewall/tried.nft"
    tried.parent.mkdir(parents=True)
    tried.write_text("a table on trial")
    run(RESTORE_STATE, host)
    assert look(host) == before


def test_a_host_without_a_task_keeps_that(host: Path) -> None:
    (host / "etc/trainer/ps-0.env").unlink()
    (host / WANTS / "trainer@ps-0.service").unlink()
    before = look(host)
    run(SAVE_STATE, host)
    (host / "etc/trainer/ps-0.env").write_text("new")
    run(RESTORE_STATE, host)
    assert look(host) == before


def test_nothing_is_removed_where_nothing_was_kept(host: Path) -> None:
    before = look(host)
    with pytest.raises(subprocess.CalledProcessError):
        run(RESTORE_STATE, host)
    assert look(host) == before


def test_who_starts_or_stops_by_hand_forgets_what_a_reboot_has_stopped(tmp_path: Path) -> None:
    done: list[str] = []
    (tmp_path / "bin").mkdir()
    put_program(tmp_path / "bin/systemctl", '#!/bin/sh\necho "systemctl $*"\n')
    environment = {**os.environ, "PATH": f"{tmp_path}/bin:{os.environ['PATH']}"}

    class Here:
        def run(self, scripts: dict[str, str], timeout: float = 30) -> dict[str, Answer]:
            for script in scripts.values():
                script = script.replace("/opt", f"{tmp_path}/opt").replace("/run/", f"{tmp_path}/run/")
                command = ["sh", "-c", f'root() {{ "$@"; }}; {script}']
                output = subprocess.run(command, env=environment, capture_output=True, text=True).stdout
                done.extend(output.splitlines())
            return dict.fromkeys(scripts, Answer())

    cluster = Cluster(None, Here())  # type: ignore[arg-type]
    for act, call, left in (
        (cluster.start, "systemctl enable", ["worker-1"]),  # which another reboot has stopped
        (cluster.disable, "systemctl disable", []),
    ):
        for name in ("opt/trainer/drained", "run/psfleet-leaving/ps-0", "run/psfleet-leaving/worker-1"):
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text("trainer@ps-0.service enabled\n")
        act([Task("ps", 0, "store", "192.0.2.20", 2300, server=True)])
        assert sorted(path.name for path in tmp_path.rglob("*") if path.is_file()) == ["systemctl", *left]
        assert any(line.startswith(call) for line in done), done
