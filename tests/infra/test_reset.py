"""`reset.yml` leaves a host as the image has it that it was made from, file by file, while the others train."""

from __future__ import annotations

import hashlib
import json
import re
import stat
import tarfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import pytest
import yaml

from tests.hosts import ROOT, answer, wait_until

from .conftest import copy_inventory, play, status
from .test_second_day import Training, done

pytestmark = pytest.mark.slow  # tests/unit/test_reset.py says it of a pretended machine
HOST = "worker-1"
# What a boot, a login and the distribution's own tools leave: of these no list is the same twice. The lab itself mounts
# the runs at /srv/trainer; all else of /srv is compared.
LEFT_OUT = re.compile(
    r"\.?$|srv/trainer$|(proc|sys|dev|run|tmp|var/(log|tmp|cache|run|backups|lib/(apt|systemd)))(/|$)|.*/__pycache__(/|$)|.*\.pyc$"
    r"|etc/(passwd|group|shadow|gshadow|subuid|subgid)-$|var/lib/dpkg/(?!info/).|var/lib/(ucf/.*|dbus/machine-id)$"
    r"|etc/(hostname|hosts|resolv\.conf|machine-id|fstab|\.pwd\.lock|network/interfaces|ld\.so\.cache|ssh/ssh_host_.*)$"
    r"|home/admin/\.(ssh/authorized_keys|ansible|sudo_as_admin_successful)|root/\.ansible"
)
Entry = tuple[Any, ...]


def of_image() -> dict[str, Entry]:
    """Return each file of the lab's image: kind and mode, owner, and its sum or where it leads."""
    found = {}
    with tarfile.open(ROOT / ".lab/debian.box") as box:
        (inner,) = [each for each in box if each.name.endswith("rootfs.tar.gz")]
        with tarfile.open(fileobj=box.extractfile(inner), mode="r|*") as rootfs:
            for each in rootfs:
                name = each.name.removeprefix("./").rstrip("/")
                if LEFT_OUT.match(name) or each.ischr() or each.isblk():
                    continue
                kind = "d" if each.isdir() else "l" if each.issym() else "f"
                content = rootfs.extractfile(each) if each.isfile() else None
                what = each.linkname if each.issym() else sum_of(content) if content else ""
                found[name] = (kind, each.mode if kind != "l" else 0, each.uid, each.gid, what)
                if each.islnk():  # the archive has the file under its first name
                    first = found.get(each.linkname.removeprefix("./"))
                    found[name] = first if first else found[name]
    return found


def of_host() -> dict[str, Entry]:
    top = Path(f"/var/lib/lxc/psfleet-{HOST}/rootfs")
    found = {}
    for path in top.rglob("*"):
        name = str(path.relative_to(top))
        if LEFT_OUT.match(name):
            continue
        about = path.lstat()
        kind = "d" if path.is_dir() and not path.is_symlink() else "l" if path.is_symlink() else "f"
        what = ""
        if kind == "l":
            what = str(path.readlink())
        elif stat.S_ISREG(about.st_mode):
            with path.open("rb") as content:
                what = sum_of(content)
        found[name] = (kind, stat.S_IMODE(about.st_mode) if kind != "l" else 0, about.st_uid, about.st_gid, what)
    return found


def sum_of(content: IO[bytes]) -> str:
    return hashlib.file_digest(content, "sha256").hexdigest()


@pytest.fixture(scope="module")
def training(lab: dict[str, Any], long_run: Path) -> Iterator[Training]:
    """A training whose worker-1 is taken out, and its host reset; in the end it is back."""
    wait_until(lambda: status(lab)["without"] == {}, 120, "all members take part")
    found = Training(lab)
    done("drain", HOST, "--reason", "it goes to others", inventory=long_run)
    begun = time.monotonic()
    reset = play("reset.yml", "--limit", HOST, "-e", "reset_confirmed=yes", inventory=long_run)
    print(f"reset.yml: {time.monotonic() - begun:.1f} s")
    yield found
    back = play("site.yml", inventory=long_run)
    done("undrain", HOST, inventory=long_run)
    assert (reset.code, reset.failed, back.code, back.failed) == (0, [], 0, [])


def test_a_host_is_left_as_its_image_has_it(training: Training) -> None:
    """A minute: each file of the host's disk is compared with the archive that the lab made the host of."""
    image, host = of_image(), of_host()
    print(f"{len(image)} entries compared")
    assert {name: (image.get(name), host.get(name)) for name in image | host if image.get(name) != host.get(name)} == {}
    training.check(HOST)


# A kernel without an NFS server can't serve: this stands for it, and goes with the next boot.
LISTENER = """
cat >/run/systemd/system/nfs-server.service <<'UNIT'
[Service]
ExecStart=/usr/bin/python3 -c "import socket, time; it = socket.create_server((str(), 2049)); time.sleep(1e9)"
[Install]
WantedBy=multi-user.target
UNIT
systemctl daemon-reload
"""
NO_LISTENER = "rm /run/systemd/system/nfs-server.service; systemctl daemon-reload"
GROUPS = ("chief", "ps", "worker", "evaluator", "data", "tensorboard", "prometheus", "alertmanager", "nfs_server")
# What a host with all roles is known by, beside its files: processes, units, links, mounts, the packet filter's tables.
TRACES = (
    "ps -e -o user=,comm= | grep -E 'trainer|prometheus|wireguard|chronyd|rpc'; "
    "systemctl list-units --all --plain --no-legend | "
    "grep -E 'trainer@|psfleet|prometheus|wireguard|chrony|tensorboard|nfs|rpc'; "
    "ip -oneline link | grep psfleet; grep -E 'nfs|served|everything' /proc/mounts; "
    "command -v nft && nft list tables; echo looked"
)


@pytest.fixture
def all_roles(training: Training, lab: dict[str, Any], tmp_path: Path) -> str:
    """The host that was reset, made a cluster of its own with all roles but the driver's, and reset again."""
    whole: dict[str, Any] = {"cluster_shared_dir": "/srv/everything", "cluster_nfs_dir": "/srv/served"}
    whole |= {"cluster_encryption": True, "wireguard_userspace": True}
    program = {"program": "trainer.examples.digits:Digits", "run": "alone", "steps": 100}
    inventory = copy_inventory(tmp_path / "lab", program, **whole)
    address = yaml.safe_load((inventory / "hosts.yml").read_text())["worker"]["hosts"][HOST]
    groups = {group: {"hosts": {HOST: address}} for group in GROUPS}
    (inventory / "hosts.yml").write_text(yaml.safe_dump(groups, sort_keys=False))
    clock = ("-e", json.dumps({"__common_container": False}))  # a container has its machine's clock, and no chrony
    answer(lab[HOST], LISTENER)
    planned = play("site.yml", "--check", *clock, inventory=inventory)
    made = play("site.yml", *clock, inventory=inventory)
    traces = answer(lab[HOST], TRACES)
    reset = play("reset.yml", "-e", "reset_confirmed=yes", "-e", "reset_runs=yes", inventory=inventory)
    answer(lab[HOST], NO_LISTENER)
    assert (planned.failed, made.failed, reset.code, reset.failed) == ([], [], 0, [])
    return traces


def test_a_host_that_had_all_roles_is_left_as_its_image_has_it(
    training: Training, lab: dict[str, Any], all_roles: str
) -> None:
    """Some minutes, in which it is a cluster by itself, with Debian's packages of all roles."""
    for what in ("prometheus", "alertmanager", "wireguard-go", "chrony", "tensorboard", "psfleet0", "nfs-server"):
        assert what in all_roles, what
    image, host = of_image(), of_host()
    assert {name: (image.get(name), host.get(name)) for name in image | host if image.get(name) != host.get(name)} == {}
    assert answer(lab[HOST], TRACES) == "looked"
    training.check(HOST)
