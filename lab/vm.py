"""Build the box of the full VMs: the lab's Debian with a kernel of its own, which libvirt boots directly."""

import hashlib
import json
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from lab import box

PACKAGES = (
    *box.PACKAGES,
    "e2fsprogs",
    "initramfs-tools",
    "kmod",
    "linux-image-cloud-amd64",
    "systemd-resolved",
    "udev",
)
SIZE = "20G"  # of the disk; what is not written takes no room
LIBVIRT, NETWORK = "qemu:///system", "psfleet"
KERNEL, INITRD = "vmlinuz", "initrd.img"  # beside the box, where libvirt reads them

# What a VM has that a container hasn't: a boot, a disk and a network to set up by itself. The first interface is
# Vagrant's own way in and gets its address from DHCP; Vagrant gives the second the host's address. An RSA host key
# would take an emulated processor minutes.
CUSTOMIZE = (
    box.CUSTOMIZE
    + r"""
echo '/dev/vda / ext4 defaults,noatime,errors=remount-ro 0 1' >/etc/fstab
cat >/etc/systemd/network/20-management.network <<'NETWORK'
[Match]
Name=eth0
[Network]
DHCP=ipv4
NETWORK
ln -sf /run/systemd/resolve/stub-resolv.conf /etc/resolv.conf
mkdir -p /etc/systemd/resolved.conf.d
printf '[Resolve]\nLLMNR=no\n' >/etc/systemd/resolved.conf.d/psfleet.conf
systemctl enable systemd-networkd systemd-resolved
cat >/etc/systemd/system/ssh.service.d/host-keys.conf <<'UNIT'
[Service]
ExecStartPre=
ExecStartPre=/bin/sh -c 'test -s "$1" || ssh-keygen -q -t ed25519 -N "" -f "$1"' sh /etc/ssh/ssh_host_ed25519_key
ExecStartPre=/usr/sbin/sshd -t
UNIT
printf 'MODULES=list\nCOMPRESS=gzip\n' >/etc/initramfs-tools/conf.d/psfleet
printf 'virtio_pci\nvirtio_blk\next4\n' >>/etc/initramfs-tools/modules
update-initramfs -u
"""
)


def name() -> str:
    return f"psfleet-vm-{box.suite()}"


def directory() -> Path:
    return Path(box.setting("VAGRANT_HOME", "~/.vagrant.d")).expanduser() / "boxes" / name()


def box_id(archive: Path, public_key: str) -> str:
    return hashlib.sha256((archive.name + public_key + SIZE).encode()).hexdigest()


def rootfs(cache: Path) -> Path:
    return box.rootfs_path(cache, PACKAGES, CUSTOMIZE)


def installed_id(lab: Path) -> str | None:
    """Say which box Vagrant holds under our name; none where the kernel that goes with it is gone."""
    found = sorted(directory().glob("*/libvirt/metadata.json"))
    there = all((lab / name() / part).exists() for part in (KERNEL, INITRD))
    return json.loads(found[0].read_text()).get("psfleet") if found and there else None


def provide(lab: Path, cache: Path, public_key: str) -> None:
    """Have the box ready for Vagrant, and kernel and initrd for libvirt."""
    archive = rootfs(cache)
    wanted = box_id(archive, public_key)
    if installed_id(lab) == wanted:
        return
    forget()
    if not archive.exists():
        print(f"lab: building the box of the VMs ({box.suite()}, a few minutes)", file=sys.stderr)
        cache.mkdir(parents=True, exist_ok=True)
        box.build_rootfs(archive, PACKAGES, CUSTOMIZE)
    target = lab / name()
    target.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=lab) as scratch:
        made = pack(Path(scratch), archive, public_key, wanted)
        for part in (KERNEL, INITRD):
            shutil.copy(Path(scratch) / "root" / part, target / part)  # links into /boot
        made.rename(lab / f"{name()}.box")


def pack(scratch: Path, archive_of_root: Path, public_key: str, identity: str) -> Path:
    """Make the box: a disk without partitions, filled by mke2fs from a directory, so that nothing is mounted."""
    root, raw, disk = scratch / "root", scratch / "raw", scratch / "box.img"
    root.mkdir()
    subprocess.run(["tar", "--numeric-owner", "-xpf", archive_of_root, "-C", root], check=True)
    (root / "home/admin/.ssh/authorized_keys").write_text(f"{public_key}\n")
    options = ["-q", "-F", "-t", "ext4", "-L", "psfleet", "-m", "0", "-d", str(root)]
    subprocess.run(["mke2fs", *options, str(raw), SIZE], check=True)
    subprocess.run(["qemu-img", "convert", "-O", "qcow2", raw, disk], check=True)
    raw.unlink()
    metadata = {"provider": "libvirt", "format": "qcow2", "virtual_size": int(SIZE.rstrip("G")), "psfleet": identity}
    (scratch / "metadata.json").write_text(json.dumps(metadata))
    made = scratch / "box"
    with tarfile.open(made, "w") as archive:
        archive.add(scratch / "metadata.json", "metadata.json")
        archive.add(disk, "box.img")
    return made


def virsh(*words: str) -> str:
    """Have libvirt do something, and give what it prints; what is not there any more is no mistake."""
    if not shutil.which("virsh"):
        return ""
    return subprocess.run(["virsh", "--connect", LIBVIRT, *words], capture_output=True, text=True).stdout


def remove_volumes(box_name: str) -> None:
    """Remove libvirt's copies of a box's disk, which vagrant-libvirt names by box and time."""
    volumes = [line.split()[0] for line in virsh("vol-list", "--pool", "default").splitlines() if line.strip()]
    for volume in volumes:
        if volume.startswith(f"{box_name}_vagrant_box_image_"):
            virsh("vol-delete", "--pool", "default", volume)


def forget() -> None:
    """Take the box from Vagrant's store, and libvirt's copy of it."""
    shutil.rmtree(directory(), ignore_errors=True)
    remove_volumes(name())


def defined() -> list[str]:
    """The VMs of whatever checkout's lab, also where libvirt doesn't run."""
    return sorted(path.stem for path in Path("/etc/libvirt/qemu").glob("psfleet-*.xml"))


def remove(machines: list[str]) -> None:
    """Take these VMs away with their disks, whichever inventory made them, and then network and boxes."""
    for machine in machines:
        virsh("destroy", machine)
        virsh("undefine", machine, "--remove-all-storage")
    if machines:
        virsh("net-destroy", NETWORK)
        virsh("net-undefine", NETWORK)
    for store in directory().parent.glob("psfleet-vm-*"):
        shutil.rmtree(store)
        remove_volumes(store.name)
