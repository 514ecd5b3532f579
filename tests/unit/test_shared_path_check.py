"""The check that each task runs before it starts: does another host use the same file system?"""

from __future__ import annotations

import os
import shlex
import subprocess
from fnmatch import fnmatch
from pathlib import Path

import jinja2
import pytest
import yaml

from fleet.rollout.desired_state import load
from tests.unit.stand_ins import put_program
from tests.unit.test_cluster_note import render

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "roles/storage/templates/psfleet-check-shared-path.j2"
# What the test's machine has no mount and no user for.
STUBS = {
    "findmnt": "echo /mnt",
    "setpriv": 'while [ "${1#--}" != "$1" ]; do shift; done; exec "$@"',
}
OWN_ID = Path("/etc/machine-id")

pytestmark = pytest.mark.skipif(not OWN_ID.exists(), reason="this machine has no /etc/machine-id")


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    path = tmp_path / "shared"
    path.mkdir()
    (path / ".psfleet-host-head").write_text(OWN_ID.read_text())
    for name, text in STUBS.items():
        put_program(tmp_path / name, f"#!/bin/sh\n{text}\n")
    return path


def check(path: Path, host: str, witness: str, *arguments: str) -> tuple[int, str]:
    environment = jinja2.Environment(trim_blocks=True, keep_trailing_newline=True, autoescape=False)
    environment.filters["quote"] = lambda value: shlex.quote(str(value))
    script = environment.from_string(SCRIPT.read_text()).render(
        storage_path=path, storage_witness=witness, inventory_hostname=host, ansible_managed="",
        storage_rename_seconds=1, storage_clock_seconds=5, storage_free_mib=1,
    )  # fmt: skip
    search = {"PATH": f"{path.parent}:{os.environ['PATH']}"}
    done = subprocess.run(["/bin/sh", "-c", script, "check", *arguments], env=search, capture_output=True, text=True)
    return done.returncode, done.stderr


def test_any_other_host_will_do_where_none_is_named(shared: Path) -> None:
    assert "no marker of another host" in check(shared, "head", "")[1]
    (shared / ".psfleet-host-worker-7").write_text("0123\n")
    assert check(shared, "head", "") == (0, "")


def test_another_host_needs_a_machine_id_of_its_own(shared: Path) -> None:
    (shared / ".psfleet-host-clone").write_text(OWN_ID.read_text())
    code, message = check(shared, "head", "")
    assert code == 1
    assert "no marker of another host with a machine-id of its own" in message
    (shared / ".psfleet-host-worker-7").write_text("0123\n")
    assert check(shared, "head", "") == (0, "")


def test_a_host_that_is_named_must_have_its_marker(shared: Path) -> None:
    assert "no marker of ps-0 is there" in check(shared, "worker-0", "ps-0")[1]
    (shared / ".psfleet-host-ps-0").write_text("0123\n")
    assert check(shared, "worker-0", "ps-0") == (0, "")


def test_what_another_host_wrote_is_looked_for_under_its_name(shared: Path) -> None:
    (shared / ".psfleet-host-ps-0").write_text("0123\n")
    (shared / ".psfleet-probe-ps-0").write_text("ps-0 17.5\n")
    assert check(shared, "head", "", "--read", "ps-0 17.5") == (0, "")
    assert "what ps-0 wrote and renamed is not seen here" in check(shared, "head", "", "--read", "ps-0 18.5")[1]


def test_a_path_belongs_to_one_cluster(shared: Path) -> None:
    marker = shared / ".psfleet-cluster"
    assert check(shared, "head", "head", "--write", "10.0.0.1", "head") == (0, f"left the marker {marker}\n")
    assert marker.read_text() == "10.0.0.1\n"
    assert check(shared, "ps-0", "head", "--write", "10.0.0.1")[0] == 0
    assert check(shared, "head", "head", "--write", "10.0.0.1", "head") == (0, "")
    assert check(shared, "head", "head", "--write") == (0, "")  # as `fab doctor` does, which takes no path over
    for names in (["10.0.0.9"], ["10.0.0.9", "head"], ["10.0.0.11"], ["1000001"]):
        code, message = check(shared, "ps-9", "head", "--write", *names)
        assert code == 1
        assert f"it is of the cluster 10.0.0.1, and this inventory is the cluster {names[0]}" in message
        assert "once: site.yml -e cluster_takes_over=10.0.0.1" in message
        assert not (shared / ".psfleet-host-ps-9").exists()
    assert marker.read_text() == "10.0.0.1\n"
    assert check(shared, "head", "head", "--write", "mine", "10.0.0.1") == (0, f"left the marker {marker}\n")
    assert marker.read_text() == "mine\n"
    assert sorted(path.name for path in shared.glob(".psfleet-cluster*")) == [".psfleet-cluster"]


def test_after_a_reset_another_cluster_may_have_the_path_with_its_runs(shared: Path) -> None:
    assert check(shared, "head", "head", "--write", "10.0.0.1", "head")[0] == 0
    (shared / "runs/digits").mkdir()
    gone = yaml.safe_load((ROOT / "roles/reset/vars/main.yml").read_text())["__reset_passing"]
    for path in [path for path in shared.iterdir() if any(fnmatch(path.name, pattern) for pattern in gone)]:
        path.unlink()
    assert check(shared, "ps-9", "ps-9", "--write", "10.0.0.9", "ps-9")[0] == 0
    assert (shared / ".psfleet-cluster").read_text() == "10.0.0.9\n"
    assert (shared / "runs/digits").is_dir()


def test_the_role_says_which_cluster_the_path_must_be_of() -> None:
    """As rendered by the play: its own name first, then those that it was known by, or takes over."""
    tasks = yaml.safe_load((SCRIPT.parents[1] / "tasks/main.yml").read_text())
    (argv,) = [task["ansible.builtin.command"]["argv"] for task in tasks if "--write" in str(task)]
    (play,) = [play for play in load(ROOT / "ansible/storage.yml") if "storage_cluster" in str(play)]
    given = play["roles"][0]["vars"]
    groups, hostvars = {"chief": ["head"]}, {"head": {"ansible_host": "10.0.0.1"}}
    known = {"groups": groups, "hostvars": hostvars, "cluster_takes_over": "gone", "__storage_script": "check"}
    names = {name: render(given[name], known) for name in ("storage_cluster", "storage_takes_over")}
    for shared, check_mode, words in (
        (True, False, ["--write", "10.0.0.1", "gone", "10.0.0.1", "head"]),
        (True, True, ["--mount-only"]),
        (False, False, ["--mount-only"]),
    ):
        asked = {**known, **names, "storage_shared": shared, "ansible_check_mode": check_mode}
        assert render(argv, asked) == ["check", *words]


def test_who_writes_leaves_its_marker_where_it_is_not_there(shared: Path) -> None:
    marker = shared / ".psfleet-host-ps-0"
    assert check(shared, "ps-0", "head", "--write") == (0, f"left the marker {marker}\n")
    assert marker.read_text() == OWN_ID.read_text()
    assert check(shared, "ps-0", "head", "--write") == (0, "")
    marker.unlink()
    marker.symlink_to(OWN_ID)
    assert "left the marker" in check(shared, "ps-0", "head", "--write")[1]
    assert not marker.is_symlink()
