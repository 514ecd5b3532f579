"""The lab machine: its packages, bridge, shared file system and libvirt, and whose lab it carries."""

import fcntl
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from ipaddress import IPv4Address, IPv4Interface
from pathlib import Path

from lab import box, vm

RECORD = Path("/var/lib/psfleet-lab")
CONTAINERS = Path("/var/lib/lxc")
PREFIX = "psfleet-"
BRIDGE = "lxcbr0"
PACKAGES = (
    "dnsmasq-base", "e2fsprogs", "git", "iproute2", "lxc", "mmdebstrap", "mount", "nftables", "openssh-client",
    "python3-venv", "rsync", "strace", "sudo", "vagrant", "vagrant-lxc",
)  # fmt: skip
BROWSER_PACKAGES = ("chromium", "chromium-driver", "fonts-dejavu-core")
SECURITY_PACKAGES = (
    "btrfs-progs", "iproute2", "nftables", "nmap", "tcpdump", "util-linux", "wireguard-go", "wireguard-tools",
)  # fmt: skip
VM_PACKAGES = (
    "dnsmasq-base", "e2fsprogs", "iptables", "libvirt-clients", "libvirt-daemon-system", "mmdebstrap",
    "qemu-system-x86", "qemu-utils", "vagrant", "vagrant-libvirt",
)  # fmt: skip


class LabError(Exception):
    """Something that the user can fix; the message says how."""


def say(message: str) -> None:
    print(f"lab: {message}", file=sys.stderr, flush=True)


def run(*command: str | Path, **options: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(word) for word in command], check=True, text=True, **options)  # type: ignore[call-overload]


def require_root() -> None:
    if os.geteuid() != 0:
        raise LabError("the lxc lab needs root: type `sudo make lab`, or choose VMs (docs/lab.md)")


# Packages


def missing_packages(wanted: tuple[str, ...]) -> list[str]:
    asked = subprocess.run(
        ["dpkg-query", "--show", "--showformat=${Package} ${db:Status-Status}\n", *wanted],
        capture_output=True,
        text=True,
    )
    there = {line.split()[0] for line in asked.stdout.splitlines() if line.endswith(" installed")}
    return [name for name in wanted if name not in there]


def install_packages(wanted: tuple[str, ...]) -> None:
    if not shutil.which("apt-get"):
        raise LabError(f"not a Debian machine: install what matches {' '.join(wanted)}, then type `vagrant up`")
    missing = missing_packages(wanted)
    if not missing:
        return
    if os.geteuid() != 0:
        raise LabError(f"packages are missing: type `sudo apt-get install --no-install-recommends {' '.join(missing)}`")
    say(f"installing {' '.join(missing)}")
    quiet = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
    run("apt-get", "update", "-qq", env=quiet)
    # Without recommendations: Vagrant's would bring a whole libvirt.
    run("apt-get", "install", "-y", "-qq", "--no-install-recommends", *missing, env=quiet, stdout=subprocess.DEVNULL)


# Ownership


@contextmanager
def lock(record: Path = RECORD) -> Iterator[None]:
    record.mkdir(parents=True, exist_ok=True)
    with (record / "lock").open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def owner(record: Path = RECORD) -> Path | None:
    """The checkout whose lab this machine carries."""
    try:
        return Path((record / "owner").read_text().strip())
    except FileNotFoundError:
        return None


def lives(checkout: Path) -> bool:
    return (checkout / "Vagrantfile").is_file()


def claim(root: Path, record: Path = RECORD) -> None:
    """Make this checkout the owner of the machine's one lab, or say whose it is."""
    other = owner(record)
    if other == root:
        return
    if other and lives(other):
        raise LabError(f"this machine carries the lab of {other}, and can carry one: type `make clean` there first")
    if other:
        say(f"the lab of {other} is left over (the directory is gone): taking it away")
        remove_hosts()
        unmount(other / ".lab" / "shared")
        box.forget()
    (record / "owner").write_text(f"{root}\n")


# Containers


def hosts() -> list[str]:
    return sorted(path.name for path in CONTAINERS.glob(f"{PREFIX}*"))


def remove_host(name: str) -> None:
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    subprocess.run(["lxc-stop", "--kill", "--name", name], **quiet)  # type: ignore[call-overload]
    subprocess.run(["lxc-destroy", "--name", name], **quiet)  # type: ignore[call-overload]
    if (CONTAINERS / name).exists():  # half a container, which lxc-destroy doesn't know
        shutil.rmtree(CONTAINERS / name)


def remove_hosts() -> None:
    for name in hosts():
        remove_host(name)


def known_to_vagrant(dotfile: Path) -> set[str]:
    return {path.read_text().strip() for path in dotfile.glob("machines/*/lxc/id")}


def remove_strays(dotfile: Path) -> None:
    """Take away containers that Vagrant forgot (a deleted .vagrant): it would trip over their names."""
    for name in sorted(set(hosts()) - known_to_vagrant(dotfile)):
        say(f"container {name} is left over: taking it away")
        remove_host(name)


# Network


def bridge() -> IPv4Interface | None:
    asked = subprocess.run(["ip", "-json", "-4", "address", "show", BRIDGE], capture_output=True, text=True)
    if asked.returncode != 0:
        return None
    for interface in json.loads(asked.stdout or "[]"):
        for address in interface.get("addr_info", []):
            return IPv4Interface(f"{address['local']}/{address['prefixlen']}")
    return None


def resolver_runs(record: Path = Path("/run/lxc/dnsmasq.pid")) -> bool:
    """Whether the bridge's dnsmasq, which the hosts ask for names, is alive; the bridge itself may outlive it."""
    try:
        return Path(f"/proc/{int(record.read_text())}/comm").read_text().strip() == "dnsmasq"
    except (OSError, ValueError):
        return False


def raise_bridge() -> IPv4Interface:
    if not bridge() or not resolver_runs():
        if Path("/run/systemd/system").is_dir():
            run("systemctl", "restart", "lxc-net")
        else:
            script = "/usr/libexec/lxc/lxc-net"
            subprocess.run([script, "stop"], capture_output=True)  # its record may outlive bridge and dnsmasq
            run(script, "start")
    found = bridge()
    if not found:
        raise LabError(f'no bridge {BRIDGE}: USE_LXC_BRIDGE in /etc/default/lxc-net must be "true"')
    return found


def check_addresses(addresses: list[str], interface: IPv4Interface) -> None:
    for address in addresses:
        if IPv4Address(address) not in interface.network or IPv4Address(address) == interface.ip:
            raise LabError(
                f"ansible_host {address} can't be a container's address: "
                f"it must lie in {interface.network} ({BRIDGE}) and not be {interface.ip}"
            )


# Shared file system


def shared_size() -> str:
    size = box.setting("PSFLEET_SHARED_SIZE", "6G")
    if not re.fullmatch(r"[1-9][0-9]*[MGT]", size):
        raise LabError(f"PSFLEET_SHARED_SIZE is {size!r}: write a number with M, G or T, such as 6G")
    return size


def mount_shared(lab: Path, owner_uid: int) -> None:
    image, directory = lab / "shared.img", lab / "shared"
    if directory.is_mount():
        if image.exists():
            return
        if hosts():
            raise LabError(f"{image} was deleted under the running lab: type `make clean`, then `make lab`")
        unmount(directory)
    if not image.exists():
        made = lab / "shared.new"
        run("truncate", "--size", shared_size(), made)
        root_owner = f"root_owner={owner_uid}:{owner_uid}"
        run("mkfs.ext4", "-q", "-F", "-m", "0", "-L", "psfleet-shared", "-E", root_owner, made)
        made.rename(image)
    directory.mkdir(exist_ok=True)
    run("mount", "-o", "loop,nodev,nosuid", image, directory)


def loop_devices() -> list[tuple[str, str]]:
    """Loop devices of labs' images: (device, image)."""
    asked = subprocess.run(
        ["losetup", "--json", "--list", "--output", "NAME,BACK-FILE"], capture_output=True, text=True
    )
    devices = json.loads(asked.stdout or "{}").get("loopdevices", [])
    found = [(d["name"], (d["back-file"] or "").removesuffix(" (deleted)")) for d in devices]
    return [(name, image) for name, image in found if image.endswith("/.lab/shared.img")]


def unmount(directory: Path) -> None:
    """Unmount a lab's shared file system, wherever it moved with its checkout."""
    targets = [str(directory)] if directory.is_mount() else []
    for device, _ in loop_devices():
        asked = subprocess.run(["findmnt", "-nro", "TARGET", "--source", device], capture_output=True, text=True)
        targets += asked.stdout.split()
    for target in dict.fromkeys(targets):
        if subprocess.run(["umount", target], stderr=subprocess.DEVNULL).returncode:
            run("umount", "--lazy", target)  # a shell stands in it
    for device, _ in loop_devices():
        subprocess.run(["losetup", "--detach", device], stderr=subprocess.DEVNULL)


# The whole


def make_key(lab: Path) -> str:
    key = lab / "key"
    if not key.exists():
        run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "psfleet-lab", "-f", key)
    public = key.with_suffix(".pub")
    if not public.exists():
        public.write_text(run("ssh-keygen", "-y", "-f", key, stdout=subprocess.PIPE).stdout)
    return public.read_text().strip()


def check_suite(lab: Path) -> None:
    """Refuse to go on with another Debian release than the hosts that exist were made from."""
    record = lab / "suite"
    if hosts() and record.exists() and record.read_text() != box.suite():
        raise LabError(
            f"the lab's hosts are {record.read_text()}, and {box.suite()} is asked for: type `make clean` first, "
            f"or PSFLEET_SUITE={record.read_text()}"
        )
    if not hosts():
        record.write_text(box.suite())


def prepare(root: Path, dotfile: Path, provider: str, addresses: list[str], shared_owner: int) -> None:
    """Make what Vagrant needs before it makes hosts; nothing changes where it exists already."""
    lab = root / ".lab"
    if provider != "lxc":
        lab.mkdir(exist_ok=True)
        key = make_key(lab)
        if provider == "libvirt" and not os.environ.get("PSFLEET_BOX"):
            prepare_vms(root, key)
        return
    require_root()
    with lock():
        claim(root)
        lab.mkdir(exist_ok=True)
        check_addresses(addresses, raise_bridge())
        remove_strays(dotfile)
        check_suite(lab)
        mount_shared(lab, shared_owner)
        key = make_key(lab)
        if not os.environ.get("PSFLEET_BOX"):
            box.provide(lab / "debian.box", root / ".cache", key)


def prepare_vms(root: Path, key: str) -> None:
    """Have libvirt answer and the VMs' box ready."""
    missing = missing_packages(VM_PACKAGES)
    if missing and shutil.which("dpkg-query"):
        raise LabError(f"VMs need {' '.join(missing)}: type `sudo python3 -m lab packages --vms`")
    raise_libvirt()
    lab = root / ".lab"
    if vm.installed_id(lab) != vm.box_id(vm.rootfs(root / ".cache"), key):
        require_root()
        vm.provide(lab, root / ".cache", key)


def libvirt_answers() -> bool:
    asked = subprocess.run(["virsh", "--connect", vm.LIBVIRT, "uri"], capture_output=True)
    return asked.returncode == 0


def open_kvm(device: Path = Path("/dev/kvm")) -> None:
    """Let QEMU's user open the device, as udev would have done; also one that doesn't work.

    Else libvirt, which tries as root, finds KVM and then that QEMU can't have it, and probes QEMU again at each call.
    """
    if device.exists():
        shutil.chown(device, group="kvm")
        device.chmod(0o660)


def raise_libvirt() -> None:
    """Start libvirt's daemons where no systemd does it."""
    if libvirt_answers():
        return
    if Path("/run/systemd/system").is_dir():
        run("systemctl", "start", "libvirtd")
    else:
        require_root()
        open_kvm()
        for daemon in ("virtlogd", "libvirtd"):
            run(daemon, "--daemon")
    for _ in range(30):
        if libvirt_answers():
            return
        time.sleep(1)
    raise LabError(f"libvirt does not answer at {vm.LIBVIRT}: look at `systemctl status libvirtd`")


def clean(root: Path, *, anyones: bool = False, record: Path = RECORD) -> None:
    """Take away all that a lab made, also where half of it is gone; another checkout's only if `anyones`."""
    lab, dotfile = root / ".lab", root / ".vagrant"
    if any(path.parent.name not in ("lxc", "libvirt") for path in dotfile.glob("machines/*/*/id")):
        run("vagrant", "destroy", "--force", cwd=root)
    ids = dotfile.glob("machines/*/libvirt/id")
    vms = vm.defined() if anyones else [path.read_text().strip() for path in ids]
    if vms and shutil.which("virsh"):
        raise_libvirt()  # or they would stay, and not be known any more
    vm.remove(vms)
    other = owner(record)
    ours = not (other and other != root and lives(other))
    if (ours or anyones) and (other or hosts() or loop_devices()):
        require_root()
        began = time.monotonic()
        with lock(record):
            remove_hosts()
            unmount(lab / "shared")
            box.forget()
            (record / "owner").unlink(missing_ok=True)
        whose = "" if ours else f" of {other}"
        say(f"hosts, shared file system and box{whose} are gone ({time.monotonic() - began:.0f} s)")
    for directory in (lab, dotfile):
        if directory.exists():
            shutil.rmtree(directory)
