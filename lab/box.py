"""Build the lab's box: a minimal Debian such as a provider of machines would rent out."""

import hashlib
import inspect
import json
import os
import shlex
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from pathlib import Path

NAME = "psfleet-lab"
PAUSE_SECONDS = 15
TEMPLATE = Path(__file__).with_name("lxc-template")
PACKAGES = (
    "ca-certificates", "dbus", "ifupdown", "iproute2", "openssh-server", "python3", "sudo", "systemd", "systemd-sysv",
)  # fmt: skip

# Runs in the new system. SSH host keys and the machine's id are each host's own, made at its first boot.
CUSTOMIZE = r"""
set -eu
useradd --create-home --shell /bin/bash admin
install -d -m 0700 -o admin -g admin /home/admin/.ssh
install -m 0600 -o admin -g admin /dev/null /home/admin/.ssh/authorized_keys
echo 'admin ALL=(ALL) NOPASSWD: ALL' >/etc/sudoers.d/admin
chmod 0440 /etc/sudoers.d/admin
rm -f /etc/ssh/ssh_host_*
mkdir -p /etc/systemd/system/ssh.service.d
cat >/etc/systemd/system/ssh.service.d/host-keys.conf <<'UNIT'
[Service]
ExecStartPre=
ExecStartPre=/usr/bin/ssh-keygen -A
ExecStartPre=/usr/sbin/sshd -t
UNIT
printf 'auto lo\niface lo inet loopback\n' >/etc/network/interfaces
echo 'LANG=C.UTF-8' >/etc/default/locale
: >/etc/machine-id
"""


def setting(name: str, default: str) -> str:
    return os.environ.get(name) or default


def suite() -> str:
    return setting("PSFLEET_SUITE", "bookworm")


def sources() -> list[str]:
    """The lines of the hosts' sources.list, which are what the box is built from as well."""
    mirror = setting("PSFLEET_MIRROR", "http://deb.debian.org/debian")
    security = setting("PSFLEET_SECURITY_MIRROR", "http://deb.debian.org/debian-security")
    return [
        f"deb {mirror} {suite()} main",
        f"deb {mirror} {suite()}-updates main",
        f"deb {security} {suite()}-security main",
    ]


def rootfs_path(cache: Path, packages: tuple[str, ...] | None = None, customize: str = CUSTOMIZE) -> Path:
    """Where the system's archive lies, named by all that goes into it."""
    recipe = json.dumps([sources(), packages or PACKAGES, customize, inspect.getsource(build_rootfs)])
    return cache / f"{suite()}-{hashlib.sha256(recipe.encode()).hexdigest()[:12]}.tar"


def build_rootfs(target: Path, packages: tuple[str, ...] = PACKAGES, customize: str = CUSTOMIZE) -> None:
    """Write the system's archive, in namespaces of its own: its mounts and processes end with mmdebstrap.

    Not compressed: it never leaves this machine, and each host would pay for it again as it is unpacked.
    """
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        made = Path(scratch) / "rootfs.tar"
        command = [
            *("unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"),
            "mmdebstrap",
            "--quiet",
            "--variant=minbase",
            f"--include={','.join(packages)}",
            "--dpkgopt=path-exclude=/usr/share/man/*",
            "--dpkgopt=path-exclude=/usr/share/doc/*",
            "--dpkgopt=path-include=/usr/share/doc/*/copyright",
            "--dpkgopt=path-exclude=/usr/share/locale/*",
            f'--customize-hook=chroot "$1" sh -c {shlex.quote(customize)}',
            suite(),
            str(made),
            *sources(),
        ]
        persist(command, {"PATH": os.environ["PATH"], "LC_ALL": "C.UTF-8", "TMPDIR": scratch})
        made.rename(target)


def persist(command: list[str], env: dict[str, str], attempts: int = 3) -> None:
    """Run what asks Debian's mirror for hundreds of files, of which one may fail, again after a pause."""
    for left in reversed(range(attempts)):
        ended = subprocess.run(command, env=env, check=not left)
        if not ended.returncode:
            return
        print(f"lab: {command[0]} ended with {ended.returncode}: trying again in {PAUSE_SECONDS} s", file=sys.stderr)
        time.sleep(PAUSE_SECONDS)


def box_id(rootfs: Path, public_key: str) -> str:
    return hashlib.sha256((rootfs.name + public_key + TEMPLATE.read_text()).encode()).hexdigest()


def installed_id() -> str | None:
    """Say which box Vagrant holds under our name."""
    found = sorted(vagrant_directory().glob("*/lxc/metadata.json"))
    return json.loads(found[0].read_text()).get("psfleet") if found else None


def vagrant_directory() -> Path:
    return Path(setting("VAGRANT_HOME", "~/.vagrant.d")).expanduser() / "boxes" / NAME


def forget() -> None:
    shutil.rmtree(vagrant_directory(), ignore_errors=True)


def provide(box: Path, cache: Path, public_key: str) -> None:
    """Have the box ready for Vagrant, which copies it into its own store when it makes the first host."""
    rootfs = rootfs_path(cache)
    wanted = box_id(rootfs, public_key)
    if installed_id() == wanted:
        return
    forget()
    if not rootfs.exists():
        print(f"lab: building the Debian box ({suite()}, about half a minute)", file=sys.stderr)
        cache.mkdir(parents=True, exist_ok=True)
        build_rootfs(rootfs)
    # A template option rather than a file in the archive, so that one archive serves every checkout's key.
    metadata = {"provider": "lxc", "version": "1.0.0", "psfleet": wanted, "template-opts": {"--key": public_key}}
    with tempfile.TemporaryDirectory(dir=box.parent) as scratch:
        (Path(scratch) / "metadata.json").write_text(json.dumps(metadata))
        made = Path(scratch) / "box"
        with tarfile.open(made, "w") as archive:
            archive.add(Path(scratch) / "metadata.json", "metadata.json")
            archive.add(TEMPLATE, "lxc-template")
            archive.add(rootfs, "rootfs.tar.gz")  # the name that vagrant-lxc asks for; tar looks at the content
        made.rename(box)
