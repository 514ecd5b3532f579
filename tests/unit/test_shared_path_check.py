"""The check that each task runs before it starts: does another host use the same file system?"""

from __future__ import annotations

import os
import shlex
import subprocess
from pathlib import Path

import jinja2
import pytest

SCRIPT = Path(__file__).parents[2] / "roles/storage/templates/psfleet-check-shared-path.j2"
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
        stub = tmp_path / name
        stub.write_text(f"#!/bin/sh\n{text}\n")
        stub.chmod(0o755)
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


def test_a_host_that_is_named_must_be_there(shared: Path) -> None:
    assert "no marker of ps-0 is there" in check(shared, "worker-0", "ps-0")[1]
    (shared / ".psfleet-host-ps-0").write_text("0123\n")
    assert check(shared, "worker-0", "ps-0") == (0, "")


def test_what_another_host_wrote_is_looked_for_under_its_name(shared: Path) -> None:
    (shared / ".psfleet-host-ps-0").write_text("0123\n")
    (shared / ".psfleet-probe-ps-0").write_text("ps-0 17.5\n")
    assert check(shared, "head", "", "--read", "ps-0 17.5") == (0, "")
    assert "what ps-0 wrote and renamed is not seen here" in check(shared, "head", "", "--read", "ps-0 18.5")[1]


def test_who_writes_leaves_its_marker_where_it_is_not_there(shared: Path) -> None:
    marker = shared / ".psfleet-host-ps-0"
    assert check(shared, "ps-0", "head", "--write") == (0, f"left the marker {marker}\n")
    assert marker.read_text() == OWN_ID.read_text()
    assert check(shared, "ps-0", "head", "--write") == (0, "")
    marker.unlink()
    marker.symlink_to(OWN_ID)
    assert "left the marker" in check(shared, "ps-0", "head", "--write")[1]
    assert not marker.is_symlink()
