"""The VMs as the tests see them: over SSH, through the inventory that Ansible reads. Emulated ones are slow."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Iterator
from typing import Any

import pytest
import testinfra
from testinfra.host import Host

from fleet.site.wireguard import is_encrypted, tunnel_address
from lab.vm import LIBVIRT
from tests.hosts import ROOT, adding_journals, answer, listed_inventory, name_of, wait_until

RUN = "vms"
# From VMs just made right to a power failure, a training under way, the reboot of all, and the server's return.
ORDER = [
    "test_site", "test_all_hosts", "test_nfs_server", "test_nfs_client", "test_wire", "test_power", "test_training",
    "test_reboot",
]  # fmt: skip


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: ORDER.index(item.path.stem))


def journal(host: Host) -> str:
    units = "--unit='trainer@*' --unit='*.mount' --unit='nfs-*' --unit=chrony --unit=psfleet-wireguard"
    return answer(host, f"journalctl --no-pager --lines=30 {units}")


pytest_runtest_makereport = adding_journals(journal)


def boot_of(host: Host) -> str:
    """The number of the host's present boot; empty while it does not answer."""
    return answer(host, "cat /proc/sys/kernel/random/boot_id")


def wait_for_boot(host: Host, before: str, seconds: float = 1800) -> None:
    """Wait until the host has another boot id than `before`, and all its units are up."""
    wait_until(lambda: boot_of(host) not in ("", before), seconds, f"{name_of(host)} is back")
    up = ("running", "degraded")
    wait_until(lambda: answer(host, "systemctl is-system-running") in up, seconds, f"{name_of(host)} is up")


def reboot(*hosts: Host) -> None:
    """Reboot all at once, and wait until each has another boot id and all its units are up."""
    boots = [boot_of(host) for host in hosts]
    assert all(boots), "a host did not answer before its reboot"
    for host in hosts:
        answer(host, "systemd-run --quiet --on-active=2 systemctl reboot")
    for host, boot in zip(hosts, boots, strict=True):
        wait_for_boot(host, boot)


def virsh(*words: str) -> str:
    """Have libvirt do something from outside of the VMs, and give what it prints."""
    command = ["virsh", "--connect", LIBVIRT, *words]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout


def domain(host: Host) -> str:
    """The host's name in libvirt (`default_prefix` in the Vagrantfile)."""
    return f"psfleet-{name_of(host)}"


def member_address(truth: dict[str, Any], host: str) -> str:
    """By which address the others know a host: with cluster_encryption the tunnel's."""
    values = truth["_meta"]["hostvars"][host]
    return tunnel_address(host, values) if is_encrypted(values) else values["ansible_host"]


def fab(*arguments: str, timeout: int = 5400) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["fab", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=timeout)


def status(host: Host) -> dict[str, Any]:
    """The run's state as the trainer itself tells it, on the chief's host; empty while it can't be asked."""
    command = "cd /opt/trainer/current && env/bin/python -m trainer status --json --settings /etc/trainer/run.json"
    try:
        with host.sudo("trainer"):
            return json.loads(host.run(command).stdout or "{}")
    except RuntimeError:
        return {}


@pytest.fixture(scope="session")
def truth() -> dict[str, Any]:
    return listed_inventory()


@pytest.fixture(scope="session")
def vms(truth: dict[str, Any]) -> dict[str, Host]:
    """Each VM by its inventory name; commands run as the login user."""
    return {name: testinfra.get_host(f"ansible://{name}") for name in truth["_meta"]["hostvars"]}


@pytest.fixture(scope="session")
def site(truth: dict[str, Any]) -> dict[str, Any]:
    """The site's values, as any host has them."""
    return next(iter(truth["_meta"]["hostvars"].values()))


@pytest.fixture(scope="session")
def head(vms: dict[str, Host], truth: dict[str, Any]) -> Host:
    return vms[truth["chief"]["hosts"][0]]


@pytest.fixture(scope="session")
def server(vms: dict[str, Host], truth: dict[str, Any]) -> Host:
    return vms[truth["nfs_server"]["hosts"][0]]


@pytest.fixture
def _as_root(host: Host) -> Iterator[None]:
    with host.sudo():
        yield


@pytest.fixture(scope="session")
def training(head: Host) -> Iterator[str]:
    """A training under way that has saved a checkpoint; gives the run's name."""
    run = f"{RUN}-{int(time.time())}"
    try:
        started = fab("start-cluster", "--run", run, "--detach", "--timeout", "3600")
        assert started.returncode == 0, started.stdout + started.stderr
        wait_until(lambda: status(head).get("checkpoint"), 3600, "the first checkpoint")
        yield run
    finally:
        fab("stop-cluster")


assert "PSFLEET_INVENTORY" in os.environ or "ANSIBLE_INVENTORY" in os.environ, "type `make test-vms` (docs/vms.md)"
