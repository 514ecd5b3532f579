"""The role's real package installation and DKMS's real build, in a directory with Debian in it (`make test-driver`).

The machine is a chroot with recorded PCI devices: its kernel isn't running, so its release is told to the role, and
nothing is loaded. That is where this test ends; docs/gpu.md says what only a machine with a GPU can show.
"""

import hashlib
import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.gpu.machines import lay_out

ROOT = Path(__file__).resolve().parents[2]
CACHE = ROOT / ".cache" / "driver"
# What a rented machine has before site.yml, and what the role `common` adds.
PACKAGES = "ca-certificates,initramfs-tools,kmod,procps,python3,python3-apt,systemd"
SUITE = "bookworm"
# Debian 12's open module is older than what its security archive changed in the kernel (docs/gpu.md): it is built for
# the newest kernel of the point release, the proprietary one for the newest of all.
FLAVOURS = ("open", "proprietary")


def sources() -> list[str]:
    mirror = os.environ.get("PSFLEET_MIRROR", "http://deb.debian.org/debian")
    security = os.environ.get("PSFLEET_SECURITY_MIRROR", "http://deb.debian.org/debian-security")
    return [
        f"deb {mirror} {SUITE} main",
        f"deb {mirror} {SUITE}-updates main",
        f"deb {security} {SUITE}-security main",
    ]


def run(*command: str | Path, **options) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False, **options)
    assert done.returncode == 0, f"{command}: {done.stdout[-6000:]}\n{done.stderr[-3000:]}"
    return done.stdout


class Machine:
    """Debian in a directory. Commands there see a /proc of their own mount namespace, and nothing stays mounted."""

    def __init__(self, flavour: str) -> None:
        self.flavour = flavour
        self.root = CACHE / flavour
        recipe = hashlib.sha256(json.dumps([sources(), PACKAGES]).encode()).hexdigest()[:12]
        base = CACHE / f"{SUITE}-{recipe}.tar"
        if not base.exists():
            CACHE.mkdir(parents=True, exist_ok=True)
            made = CACHE / "new.tar"
            run("mmdebstrap", "--quiet", "--variant=minbase", f"--include={PACKAGES}", SUITE, made, *sources())
            made.rename(base)
        run("rm", "--recursive", "--force", "--one-file-system", self.root)  # never into what may be mounted there
        self.root.mkdir()
        run("tar", "--directory", self.root, "--extract", "--file", base)
        (self.root / "usr/sbin/policy-rc.d").write_text("#!/bin/sh\nexit 101\n")  # no service starts in a chroot
        (self.root / "usr/sbin/policy-rc.d").chmod(0o755)
        shutil.copy("/etc/resolv.conf", self.root / "etc/resolv.conf")
        lay_out(self.root, "tesla-t4")
        self.do("apt-get", "update", "--quiet")
        self.kernel = self.pick_kernel()
        self.do("apt-get", "install", "--yes", "--quiet", "--no-install-recommends", f"linux-image-{self.kernel}")

    def pick_kernel(self) -> str:
        """The newest cloud kernel; for the open module the newest outside the security archive."""
        offered = self.do("apt-cache", "madison", "linux-image-cloud-amd64").splitlines()
        rows = [line for line in offered if self.flavour != "open" or "security" not in line]
        version = rows[0].split("|")[1].strip()
        shown = self.do("apt-cache", "show", f"linux-image-cloud-amd64={version}")
        return re.search(r"Depends: linux-image-(\S+)", shown)[1]

    def do(self, *command: str) -> str:
        return self.inside("chroot", str(self.root), *command)

    def inside(self, *command: str, **environment: str) -> str:
        mount = f'mount -t proc proc "{self.root}/proc" && exec "$@"'
        environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive", "LC_ALL": "C.UTF-8", **environment}
        return run("unshare", "--mount", "sh", "-c", mount, "sh", *command, cwd=ROOT, env=environment)

    def play(self) -> str:
        inventory = CACHE / f"{self.flavour}.json"
        variables = {
            "ansible_host": str(self.root),
            "ansible_connection": "community.general.chroot",
            "ansible_python_interpreter": "/usr/bin/python3",
            "ansible_remote_tmp": "/tmp/.ansible",
            "nvidia_driver_flavour": self.flavour,
            "nvidia_driver_kernel": self.kernel,
            "nvidia_driver_mirror": sources()[0].split()[1],
            "nvidia_driver_security_mirror": sources()[2].split()[1],
        }
        inventory.write_text(json.dumps({"all": {"hosts": {"machine": variables}}}))
        return self.inside("ansible-playbook", "-i", str(inventory), "tests/gpu/driver.yml", ANSIBLE_FORCE_COLOR="0")


@pytest.fixture(scope="module", params=FLAVOURS)
def machine(request):
    if os.getuid() != 0:
        pytest.fail("make test-driver needs root: it builds in a chroot")
    return Machine(request.param)


@pytest.fixture(scope="module")
def first_run(machine):
    return machine.play()


def test_the_driver_is_installed_and_built_for_the_machines_kernel(machine, first_run):
    states = machine.do("dkms", "status", "-k", machine.kernel)
    module = {"open": "nvidia-current-open", "proprietary": "nvidia-current"}[machine.flavour]
    version = machine.do("dpkg-query", "--show", "--showformat=${Version}", "nvidia-smi").split("-")[0]
    assert f"{module}/{version}, {machine.kernel}, x86_64: installed" in states
    assert machine.do("modinfo", "-k", machine.kernel, "-F", "version", module).strip() == version
    assert version.startswith("535.")
    licenses = {"open": "Dual MIT/GPL", "proprietary": "NVIDIA"}
    assert machine.do("modinfo", "-k", machine.kernel, "-F", "license", module).strip() == licenses[machine.flavour]


def test_all_parts_have_one_version_although_the_archive_offers_two(machine, first_run):
    packages = ["firmware-nvidia-gsp", "libcuda1", "libnvidia-ml1", "libnvidia-ptxjitcompiler1", "nvidia-smi"]
    packages.append("nvidia-open-kernel-dkms" if machine.flavour == "open" else "nvidia-kernel-dkms")
    shown = machine.do("dpkg-query", "--show", "--showformat=${Version}\n", *packages).split()
    assert len({version.split("-")[0] for version in shown}) == 1, shown
    offered = machine.do("apt-cache", "madison", "nvidia-smi")
    assert len(offered.splitlines()) > 1, "the archive offers one version: this test shows nothing any more"


def test_an_upgrade_leaves_the_driver_alone(machine, first_run):
    simulated = machine.do("apt-get", "--simulate", "dist-upgrade")
    assert not [line for line in simulated.splitlines() if line.startswith("Inst") and "nvidia" in line]
    configured = machine.do("apt-config", "dump", "Unattended-Upgrade::Package-Blacklist")
    assert '"nvidia-"' in configured


def test_the_initramfs_keeps_nouveau_away(machine, first_run):
    listed = machine.do("lsinitramfs", f"/boot/initrd.img-{machine.kernel}")
    assert "etc/modprobe.d/psfleet-nvidia.conf" in listed
    assert "blacklist nouveau" in machine.do("modprobe", "--showconfig", "-S", machine.kernel)


def test_a_second_run_changes_nothing(machine, first_run):
    assert re.search(r"ok=\d+ +changed=0 ", machine.play())
