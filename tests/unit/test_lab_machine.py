"""The lab machine's side of the lab, without a lab: whose it is, what is refused, what a box is named by."""

import os
from ipaddress import IPv4Interface
from pathlib import Path

import pytest

from lab import box, machine, vm
from tests.unit.stand_ins import put_program


@pytest.fixture
def record(tmp_path: Path) -> Path:
    (tmp_path / "record").mkdir()
    return tmp_path / "record"


@pytest.fixture
def taken_away(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Stand in for everything that would touch the machine, and list what was asked for."""
    asked: list[str] = []
    monkeypatch.setattr(machine, "remove_hosts", lambda: asked.append("hosts"))
    monkeypatch.setattr(machine, "unmount", lambda directory: asked.append(f"mount {directory}"))
    monkeypatch.setattr(machine.box, "forget", lambda: asked.append("box"))
    monkeypatch.setattr(machine.vm, "defined", lambda: ["psfleet-ps-0"])
    monkeypatch.setattr(machine.vm, "remove", asked.extend)
    monkeypatch.setattr(machine, "raise_libvirt", lambda: None)
    return asked


def checkout(path: Path) -> Path:
    path.mkdir()
    (path / "Vagrantfile").touch()
    return path


def test_claim_records_the_checkout(tmp_path: Path, record: Path, taken_away: list[str]) -> None:
    machine.claim(tmp_path / "one", record)
    assert machine.owner(record) == tmp_path / "one"
    assert taken_away == []


def test_claim_refuses_a_second_checkout_and_names_the_first(
    tmp_path: Path, record: Path, taken_away: list[str]
) -> None:
    first = checkout(tmp_path / "one")
    machine.claim(first, record)
    with pytest.raises(machine.LabError, match=f"{first}.*make clean"):
        machine.claim(tmp_path / "two", record)
    assert machine.owner(record) == first
    assert taken_away == []


def test_claim_takes_away_the_lab_of_a_directory_that_is_gone(
    tmp_path: Path, record: Path, taken_away: list[str]
) -> None:
    machine.claim(tmp_path / "gone", record)
    machine.claim(tmp_path / "two", record)
    assert machine.owner(record) == tmp_path / "two"
    assert taken_away == ["hosts", f"mount {tmp_path / 'gone' / '.lab' / 'shared'}", "box"]


def test_clean_of_a_second_checkout_leaves_the_first_ones_lab(
    tmp_path: Path, record: Path, taken_away: list[str]
) -> None:
    first, second = checkout(tmp_path / "one"), checkout(tmp_path / "two")
    machine.claim(first, record)
    (second / ".lab").mkdir()
    machine.clean(second, record=record)
    assert taken_away == []
    assert machine.owner(record) == first
    assert not (second / ".lab").exists()


def test_clean_takes_another_checkouts_lab_away_when_told_so(
    tmp_path: Path, record: Path, taken_away: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "require_root", lambda: None)
    first, second = checkout(tmp_path / "one"), checkout(tmp_path / "two")
    machine.claim(first, record)
    machine.clean(second, anyones=True, record=record)
    assert taken_away[:2] == ["psfleet-ps-0", "hosts"]
    assert machine.owner(record) is None
    machine.claim(second, record)
    assert machine.owner(record) == second


@pytest.mark.parametrize("address", ["10.0.4.10", "10.0.3.1"])
def test_addresses_outside_the_bridge_are_refused(address: str) -> None:
    with pytest.raises(machine.LabError, match=rf"{address}.*10\.0\.3\.0/24"):
        machine.check_addresses([address], IPv4Interface("10.0.3.1/24"))


@pytest.mark.parametrize("size", ["6", "big", "0G", "6 G", "-1G"])
def test_shared_size_without_a_unit_is_refused(size: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PSFLEET_SHARED_SIZE", size)
    with pytest.raises(machine.LabError, match="PSFLEET_SHARED_SIZE"):
        machine.shared_size()


def test_strays_are_the_containers_that_vagrant_does_not_know(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    known = tmp_path / "machines" / "head" / "lxc"
    known.mkdir(parents=True)
    (known / "id").write_text("psfleet-head")
    removed: list[str] = []
    monkeypatch.setattr(machine, "hosts", lambda: ["psfleet-head", "psfleet-ps-0"])
    monkeypatch.setattr(machine, "remove_host", removed.append)
    machine.remove_strays(tmp_path)
    assert removed == ["psfleet-ps-0"]


def test_cached_system_is_named_by_what_goes_into_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = box.rootfs_path(tmp_path)
    assert box.rootfs_path(tmp_path) == before
    monkeypatch.setattr(box, "PACKAGES", (*box.PACKAGES, "rsync"))
    assert box.rootfs_path(tmp_path) != before
    monkeypatch.setenv("PSFLEET_SUITE", "trixie")
    assert box.rootfs_path(tmp_path).name.startswith("trixie-")


MIRROR_FAILS_ONCE = r"""#!/bin/sh
# In place of mmdebstrap: the first call leaves a mount that is in use, as one that is cut off does.
for made; do case $made in */rootfs.tar) break ;; esac; done
if [ ! -e "$LAB_TRIED" ]; then
  mkdir "$TMPDIR/proc" && mount -t proc -o ro proc "$TMPDIR/proc" && touch "$LAB_TRIED"
  cd "$TMPDIR/proc" && exec sh -c "sleep 600 & exit 25"
fi
echo system >"$made"
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts need root")
def test_a_box_whose_build_fails_is_built_again_and_leaves_no_mount(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    tried = tmp_path / "tried"
    stand_in = put_program(tmp_path / "bin" / "mmdebstrap", MIRROR_FAILS_ONCE.replace("$LAB_TRIED", str(tried)))
    monkeypatch.setenv("PATH", f"{stand_in.parent}:{os.environ['PATH']}")
    monkeypatch.setattr(box, "PAUSE_SECONDS", 0)
    (tmp_path / "cache").mkdir()
    box.build_rootfs(tmp_path / "cache" / "system.tar")
    assert (tmp_path / "cache" / "system.tar").read_text() == "system\n"
    assert [path.name for path in (tmp_path / "cache").iterdir()] == ["system.tar"]
    assert tried.exists()
    assert "ended with 25: trying again" in capfd.readouterr().err
    assert str(tmp_path) not in Path("/proc/self/mounts").read_text()


def test_box_differs_by_key(tmp_path: Path) -> None:
    assert box.box_id(tmp_path / "system", "key one") != box.box_id(tmp_path / "system", "key two")


def test_a_resolver_that_is_gone_or_another_process_is_seen(tmp_path: Path) -> None:
    record = tmp_path / "dnsmasq.pid"
    assert not machine.resolver_runs(record)
    record.write_text("1\n")  # alive, and no dnsmasq
    assert not machine.resolver_runs(record)
    record.write_text("")
    assert not machine.resolver_runs(record)


def test_hosts_of_another_debian_release_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    there: list[str] = []
    monkeypatch.setattr(machine, "hosts", lambda: there)
    monkeypatch.setenv("PSFLEET_SUITE", "bookworm")
    machine.check_suite(tmp_path)
    there.append("psfleet-head")
    machine.check_suite(tmp_path)
    monkeypatch.setenv("PSFLEET_SUITE", "trixie")
    with pytest.raises(machine.LabError, match=r"hosts are bookworm, and trixie is asked for.*make clean"):
        machine.check_suite(tmp_path)
    there.clear()
    machine.check_suite(tmp_path)
    assert (tmp_path / "suite").read_text() == "trixie"


def test_box_of_the_vms_is_named_by_what_goes_into_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = vm.rootfs(tmp_path)
    assert before != box.rootfs_path(tmp_path)
    assert vm.box_id(before, "a key") != vm.box_id(before, "another")
    monkeypatch.setattr(vm, "PACKAGES", (*vm.PACKAGES, "rsync"))
    assert vm.rootfs(tmp_path) != before


def test_box_of_the_vms_counts_only_with_its_kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VAGRANT_HOME", str(tmp_path / "home"))
    store = vm.directory() / "0" / "libvirt"
    store.mkdir(parents=True)
    (store / "metadata.json").write_text('{"psfleet": "an id"}')
    assert vm.installed_id(tmp_path) is None
    (tmp_path / vm.name()).mkdir()
    for part in (vm.KERNEL, vm.INITRD):
        (tmp_path / vm.name() / part).touch()
    assert vm.installed_id(tmp_path) == "an id"


def test_kvm_is_opened_to_qemu_s_group_where_no_udev_did(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(machine.shutil, "chown", lambda path, group: asked.append((path, group)))
    device = tmp_path / "kvm"
    machine.open_kvm(device)  # a machine without one
    device.touch(mode=0o600)
    machine.open_kvm(device)
    assert asked == [(device, "kvm")]
    assert device.stat().st_mode & 0o777 == 0o660
