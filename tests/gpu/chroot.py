"""Debian in a directory, which Ansible takes for a machine. Needs root."""

import hashlib
import json
import os
import shutil
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CACHE = ROOT / ".cache" / "driver"
# What a rented machine has before site.yml, and what the role `common` adds.
PACKAGES = "ca-certificates,initramfs-tools,kmod,procps,python3,python3-apt,systemd"
# What a test lays there stands in for the kernel's own.
PRETENDED = {"pretended/boot_id": "proc/sys/kernel/random/boot_id", "pretended/driver": "proc/driver"}
SUITE = "bookworm"
MIRROR = os.environ.get("PSFLEET_MIRROR", "http://deb.debian.org/debian")
SECURITY_MIRROR = os.environ.get("PSFLEET_SECURITY_MIRROR", "http://deb.debian.org/debian-security")
SOURCES = (
    f"deb {MIRROR} {SUITE} main",
    f"deb {MIRROR} {SUITE}-updates main",
    f"deb {SECURITY_MIRROR} {SUITE}-security main",
)


def run(*command: str | Path, check: bool = True, **options) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False, **options)
    output = f"{done.stdout[-6000:]}\n{done.stderr[-3000:]}"
    assert (done.returncode == 0) is check, f"{command} ended with {done.returncode}: {output}"
    return done.stdout


class Machine:
    """One such directory. Commands there have a mount namespace of their own, so that nothing stays mounted."""

    def __init__(self, name: str) -> None:
        self.root = CACHE / name
        recipe = hashlib.sha256(json.dumps([SOURCES, PACKAGES]).encode()).hexdigest()[:12]
        base = CACHE / f"{SUITE}-{recipe}.tar"
        if not base.exists():
            CACHE.mkdir(parents=True, exist_ok=True)
            made = CACHE / "new.tar"
            run("mmdebstrap", "--quiet", "--variant=minbase", f"--include={PACKAGES}", SUITE, made, *SOURCES)
            made.rename(base)
        run("rm", "--recursive", "--force", "--one-file-system", self.root)  # never into what may be mounted there
        self.root.mkdir()
        run("tar", "--directory", self.root, "--extract", "--file", base)
        self.script("/usr/sbin/policy-rc.d", "exit 101")  # no service starts in a chroot
        shutil.copy("/etc/resolv.conf", self.root / "etc/resolv.conf")

    def script(self, path: str, body: str) -> None:
        """Put a program there."""
        target = self.root / path.lstrip("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(f"#!/bin/sh\n{body}\n")
        target.chmod(0o755)

    def do(self, *command: str) -> str:
        return self._inside("chroot", str(self.root), *command)

    def play(self, playbook: str, *options: str, check: bool = True, **variables) -> str:
        """Run a playbook against a cluster of this machine alone; `check=False` expects it to fail."""
        inventory = self.root.with_suffix(".json")
        reached = {
            "ansible_host": str(self.root),
            "ansible_connection": "community.general.chroot",
            "ansible_python_interpreter": "/usr/bin/python3",
            "ansible_remote_tmp": "/tmp/.ansible",
            "cluster_address": "192.0.2.10",
            "gpu_count": 2,
        }
        listed = {"all": {"hosts": {"machine": reached | variables}}}
        groups = {group: {"hosts": {"machine": {}}} for group in ("chief", "ps", "worker", "gpu")}
        inventory.write_text(json.dumps(listed | groups))
        return self._inside("ansible-playbook", "-i", str(inventory), playbook, *options, check=check)

    def _inside(self, *command: str, check: bool = True) -> str:
        mount = f'cd "{self.root}" && mount -t proc proc proc && '
        for pretended, real in PRETENDED.items():
            mount += f'{{ [ ! -e "{pretended}" ] || mount --bind "{pretended}" "{real}"; }} && '
        mount += f'cd "{ROOT}" && exec "$@"'
        environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive", "LC_ALL": "C.UTF-8"}
        return run("unshare", "--mount", "sh", "-c", mount, "sh", *command, check=check, cwd=ROOT, env=environment)
