"""The role's real package installation and DKMS's real build, in a directory with Debian in it (`make test-driver`).

The machine is a chroot with recorded PCI devices: its kernel isn't running, so its release is told to the role, and
nothing is loaded. That is where this test ends; docs/gpu.md says what only a machine with a GPU can show.
"""

import re

import pytest

from tests.gpu.chroot import MIRROR, SECURITY_MIRROR, Machine
from tests.gpu.machines import lay_out

PLAYBOOK = "tests/gpu/driver.yml"
# Debian 12's open module is older than what its security archive changed in the kernel (docs/gpu.md): it is built for
# the newest kernel of the point release, the proprietary one for the newest of all.
MODULES = {"open": "nvidia-current-open", "proprietary": "nvidia-current"}
PACKAGES = {"open": "nvidia-open-kernel-dkms", "proprietary": "nvidia-kernel-dkms"}
LICENSES = {"open": "Dual MIT/GPL", "proprietary": "NVIDIA"}


class Buildable(Machine):
    """A machine with a kernel, of which the role knows the release."""

    def __init__(self, flavour: str) -> None:
        super().__init__(flavour)
        self.flavour = flavour
        lay_out(self.root, "tesla-t4")
        self.do("apt-get", "update", "--quiet")
        offered = self.do("apt-cache", "madison", "linux-image-cloud-amd64").splitlines()
        rows = [line for line in offered if flavour != "open" or "security" not in line]
        version = rows[0].split("|")[1].strip()
        shown = self.do("apt-cache", "show", f"linux-image-cloud-amd64={version}")
        self.kernel = re.search(r"Depends: linux-image-(\S+)", shown)[1]
        self.do("apt-get", "install", "--yes", "--quiet", "--no-install-recommends", f"linux-image-{self.kernel}")

    def install(self) -> str:
        return self.play(
            PLAYBOOK,
            nvidia_driver_flavour=self.flavour,
            nvidia_driver_kernel=self.kernel,
            nvidia_driver_mirror=MIRROR,
            nvidia_driver_security_mirror=SECURITY_MIRROR,
        )


@pytest.fixture(scope="module", params=MODULES)
def machine(request):
    return Buildable(request.param)


@pytest.fixture(scope="module")
def first_run(machine):
    return machine.install()


def test_the_driver_is_installed_and_built_for_the_machines_kernel(machine, first_run):
    module = MODULES[machine.flavour]
    version = machine.do("dpkg-query", "--show", "--showformat=${Version}", "nvidia-smi").split("-")[0]
    assert version.startswith("535.")
    states = machine.do("dkms", "status", "-k", machine.kernel)
    assert f"{module}/{version}, {machine.kernel}, x86_64: installed" in states
    assert machine.do("modinfo", "-k", machine.kernel, "-F", "version", module).strip() == version
    assert machine.do("modinfo", "-k", machine.kernel, "-F", "license", module).strip() == LICENSES[machine.flavour]


def test_all_parts_have_one_version_although_the_archive_offers_two(machine, first_run):
    packages = ["firmware-nvidia-gsp", "libcuda1", "libnvidia-ml1", "libnvidia-ptxjitcompiler1", "nvidia-smi"]
    packages.append(PACKAGES[machine.flavour])
    shown = machine.do("dpkg-query", "--show", "--showformat=${Version}\n", *packages).split()
    assert len({version.split("-")[0] for version in shown}) == 1, shown
    offered = machine.do("apt-cache", "madison", "nvidia-smi")
    assert len(offered.splitlines()) > 1, "the archive offers one version: this test shows nothing any more"


def test_an_upgrade_leaves_the_driver_alone(machine, first_run):
    simulated = machine.do("apt-get", "--simulate", "dist-upgrade").splitlines()
    moved = [line for line in simulated if line.startswith("Inst") and re.search("nvidia|libcuda", line)]
    # What has versions of its own may move: no process of the driver's has it loaded.
    assert [line for line in moved if not re.search("nvidia-(modprobe|persistenced|support)", line)] == []
    assert '"nvidia-"' in machine.do("apt-config", "dump", "Unattended-Upgrade::Package-Blacklist")


def test_the_initramfs_keeps_nouveau_away(machine, first_run):
    listed = machine.do("lsinitramfs", f"/boot/initrd.img-{machine.kernel}")
    assert "etc/modprobe.d/psfleet-nvidia.conf" in listed


def test_a_second_run_changes_nothing(machine, first_run):
    assert re.search(r"ok=\d+ +changed=0 ", machine.install())
