"""The role wireguard, run by Ansible on a machine with files and a network of its own."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fleet.site import wireguard
from tests.security.test_role import OFFLINE, Machine

# For this unit the stand-in does what systemd would; for the others it is the offline one.
SYSTEMCTL = (
    """#!/bin/sh
unit=/etc/systemd/system/psfleet-wireguard.service
run() {
    sed -n -E "s/^($1)=-?//p" $unit | while read -r command; do sh -c "$command"; done >/dev/null 2>&1
}
case "$*" in
show*psfleet-wireguard*)
    [ -e $unit ] || { echo LoadState=not-found; exit 0; }
    state=inactive
    [ ! -e /run/wireguard-is-active ] || state=active
    printf 'Id=psfleet-wireguard.service\\nLoadState=loaded\\nActiveState=%s\\n' $state
    ;;
start*psfleet-wireguard* | restart*psfleet-wireguard*)
    run 'ExecStartPre|ExecStart'
    : >/run/wireguard-is-active
    ;;
stop*psfleet-wireguard*)
    run ExecStop
    rm -f /run/wireguard-is-active
    ;;
*)
"""
    + OFFLINE.removeprefix("#!/bin/sh\n")
    + """
    ;;
esac
"""
)
UP = "Bring the tunnel up now and at each boot"
PROGRAM = "/usr/local/sbin/psfleet-wireguard"


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    made = Machine(tmp_path, SYSTEMCTL)
    try:
        yield made
    finally:
        made.run("ip", "link", "delete", wireguard.INTERFACE)
        made.end()


def key() -> str:
    private = subprocess.run(["wg", "genkey"], capture_output=True, text=True, check=True).stdout
    return subprocess.run(["wg", "pubkey"], input=private, capture_output=True, text=True, check=True).stdout.strip()


def test_the_role_builds_a_tunnel_repairs_it_and_takes_it_away(machine: Machine, tmp_path: Path) -> None:
    def build(*arguments: str, **settings: Any) -> list[str]:
        changed: list[str] = machine.play(
            *arguments, playbook="encryption.yml", tags="wireguard", cluster_encryption=True, **settings
        )["changed"]
        return changed

    def settle(*arguments: str, encrypted: bool = True) -> list[str]:
        changed: list[str] = machine.play(*arguments, tags="wireguard", cluster_encryption=encrypted)["changed"]
        return changed

    kept = tmp_path / wireguard.KEYS_FILE
    others = {"there": key(), "gone": key()}
    kept.write_text(wireguard.keys_text(others))

    assert "Make the directories" in build("--check")
    assert machine.run("ip", "link", "show", wireguard.INTERFACE).returncode != 0

    first = build()
    assert {"Make the key, and read its public half", "Keep the public keys with the inventory", UP} <= set(first)
    assert machine.run(PROGRAM, "check").returncode == 0
    own = machine.run(PROGRAM, "public").stdout.strip()
    assert wireguard.read_keys(kept.read_text()) == {"here": own, "there": others["there"]}
    assert machine.run("wg", "show", wireguard.INTERFACE, "peers").stdout.split() == [others["there"]]
    assert machine.run("stat", "--format=%a", "/etc/psfleet/wireguard/private.key").stdout == "600\n"
    for unit in ("trainer@", "tensorboard"):
        dropin = machine.run("cat", f"/etc/systemd/system/{unit}.service.d/wireguard.conf").stdout
        assert f"ExecStartPre=+{PROGRAM} check" in dropin

    assert build() == []
    assert settle() == []
    assert build("--check") == []

    # Its unit is active all the same.
    machine.run("ip", "link", "delete", wireguard.INTERFACE)
    assert build() == [UP]
    assert machine.run(PROGRAM, "check").returncode == 0

    # The other host was made again.
    renewed = key()
    kept.write_text(wireguard.keys_text({"here": own, "there": renewed}))
    assert build() == ["Write whom the host speaks with", "Let in who is new"]
    assert settle() == ["Let out who has left"]
    assert machine.run("wg", "show", wireguard.INTERFACE, "peers").stdout.split() == [renewed]
    assert build() == settle() == []

    assert "Write the host's own end" in build(wireguard_mtu=1300)
    assert " mtu 1300 " in machine.run("ip", "link", "show", wireguard.INTERFACE).stdout

    assert "Bring the interface down, now and at each boot" in settle(encrypted=False)
    assert machine.run("ip", "link", "show", wireguard.INTERFACE).returncode != 0
    left = machine.run("find", "/etc", "/usr/local/sbin", "/run", "-name", "*wireguard*", "-newer", "/proc/1").stdout
    assert [line for line in left.splitlines() if "psfleet" in line or line.endswith("wireguard.conf")] == []
    assert settle(encrypted=False) == []
