"""What the role refuses, and when it loads and when it would reboot: on a chroot with recorded devices.

modinfo and modprobe are pretended there, and no service runs; the reboot itself needs a machine (docs/gpu.md).
"""

import os
import re
import time

import pytest

from tests.gpu import machines
from tests.gpu.chroot import Machine

DISK = "535.309.01"
OLD = "535.261.03"
LOADED = "/sys/module/nvidia/version"
DEVICES = "etc/systemd/system/psfleet-nvidia-devices.service"
DAEMON = "lib/systemd/system/nvidia-persistenced.service"


@pytest.fixture(scope="module")
def debian():
    return Machine("load")


@pytest.fixture
def machine(debian):
    """A machine with the module on disk, none in its kernel, and a modprobe that loads what is on disk."""
    root = debian.root
    directories = ("sys/bus", "sys/module", "pretended", "etc/systemd/system/nvidia-persistenced.service.d")
    for path in (*directories, DEVICES, "modprobe.log"):
        debian.do("rm", "-rf", f"/{path}")
    debian.do("rm", "-f", "/etc/systemd/system/multi-user.target.wants/psfleet-nvidia-devices.service")
    machines.lay_out(root, "tesla-t4")
    debian.script(
        "/usr/local/sbin/modinfo",
        f'case "$4:$5" in version:nvidia-current) echo {DISK};; license:nvidia-current) echo NVIDIA;; *) exit 1;; esac',
    )
    debian.script(
        "/usr/local/sbin/modprobe",
        f'echo "$@" >>/modprobe.log; mkdir -p {LOADED.rpartition("/")[0]}; echo {DISK} >{LOADED}',
    )
    machines.write(root / DAEMON, "[Service]\nExecStart=/bin/true\n[Install]\nWantedBy=multi-user.target\n")
    return debian


def changed(output):
    return int(re.search(r"changed=(\d+)", output)[1])


def in_one_line(output):
    return " ".join(output.split())


def test_a_module_is_loaded_where_none_is_and_a_second_run_changes_nothing(machine):
    machine.play("tests/gpu/load.yml")
    assert (machine.root / "modprobe.log").read_text() == "nvidia\n"
    assert_device_files_at_boot(machine)
    assert not (machine.root / "etc/systemd/system/nvidia-persistenced.service.d").exists()
    assert changed(machine.play("tests/gpu/load.yml")) == 0
    assert (machine.root / "modprobe.log").read_text() == "nvidia\n"


def assert_device_files_at_boot(machine):
    assert "nvidia-modprobe -u -c 0" in (machine.root / DEVICES).read_text()
    assert machine.do("systemctl", "is-enabled", "psfleet-nvidia-devices").strip() == "enabled"


def test_a_module_that_cannot_be_loaded_is_told_with_why(machine):
    machine.script("/usr/local/sbin/modprobe", "echo 'could not insert nvidia: No such device' >&2; exit 1")
    output = in_one_line(machine.play("tests/gpu/load.yml", check=False))
    assert (
        f"host 'machine' can't load the NVIDIA module {DISK} (proprietary): could not insert nvidia: No such" in output
    )
    assert "try the other nvidia_driver_flavour" in output


# As Ubuntu's packages have it.
def test_ubuntus_persistence_daemon_is_made_to_hold_the_gpus_awake(machine):
    unit = (
        "[Unit]\nStopWhenUnneeded=true\n[Service]\nType=forking\n"
        "ExecStart=/usr/bin/nvidia-persistenced --user nvidia-persistenced --no-persistence-mode --verbose\n"
    )
    machines.write(machine.root / DAEMON, unit)
    machine.play("tests/gpu/load.yml")
    settings = machine.root / "etc/systemd/system/nvidia-persistenced.service.d/psfleet.conf"
    lines = settings.read_text().splitlines()
    assert "ExecStart=/usr/bin/nvidia-persistenced --user nvidia-persistenced --verbose" in lines
    assert "StopWhenUnneeded=no" in lines
    assert machine.do("systemctl", "is-enabled", "nvidia-persistenced").strip() == "enabled"
    assert changed(machine.play("tests/gpu/load.yml")) == 0


def test_check_mode_tells_of_a_reboot_that_is_due_and_goes_on(machine):
    machines.load(machine.root, OLD)
    machines.write(machine.root / "pretended/boot_id", "00000000-0000-4000-8000-000000000000\n")
    output = machine.play("tests/gpu/load.yml", "--check")
    assert re.search(r"TASK \[nvidia_driver : Reboot\] \*+\nchanged: \[machine\]", output)
    assert (machine.root / LOADED[1:]).read_text() == OLD + "\n"


def test_check_mode_announces_no_reboot_where_the_module_is_only_not_loaded_yet(machine):
    output = machine.play("tests/gpu/load.yml", "--check")
    assert "TASK [nvidia_driver : Reboot]" not in output
    assert not (machine.root / "modprobe.log").exists()


def test_an_open_module_in_the_kernel_asks_for_a_reboot_where_the_other_is_on_disk(machine):
    machines.load(machine.root, DISK)
    module = f"NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  {DISK}  Release Build\n"
    machines.write(machine.root / "pretended/driver/nvidia/version", module)
    output = in_one_line(machine.play("tests/gpu/load.yml", check=False))
    assert f"host 'machine' runs the NVIDIA module {DISK} (open) and has {DISK} (proprietary) on disk" in output


def test_another_module_than_the_one_on_disk_asks_for_a_reboot_which_ansibles_own_machine_never_gets(machine):
    machines.load(machine.root, OLD)
    output = in_one_line(machine.play("tests/gpu/load.yml", check=False))
    assert f"host 'machine' runs the NVIDIA module {OLD} and has {DISK} (proprietary) on disk, so it must" in output
    assert "It is the machine that Ansible runs on, or a container there" in output
    assert not (machine.root / "modprobe.log").exists()


def test_nouveau_in_the_kernel_asks_for_a_reboot(machine):
    (machine.root / "sys/module/nouveau").mkdir(parents=True)
    output = in_one_line(machine.play("tests/gpu/load.yml", check=False, nvidia_driver_reboot=False))
    assert "runs the NVIDIA module nouveau instead and has" in output
    assert "nvidia_driver_reboot is false" in output


def test_a_host_without_a_gpu_is_refused_by_name_before_anything_is_installed(machine):
    machine.do("rm", "-rf", "/sys/bus")
    output = in_one_line(machine.play("tests/gpu/driver.yml", check=False))
    assert "host 'machine' is in the group gpu and has no NVIDIA GPU" in output
    assert changed(output) == 0


def test_a_gpu_that_the_wheel_does_not_know_is_refused_before_anything_is_installed(machine):
    machine.do("rm", "-rf", "/sys/bus")
    machines.lay_out(machine.root, "two-graphics-cards")
    output = in_one_line(machine.play("tests/gpu/driver.yml", check=False))
    assert "10de:2b85 (Blackwell, compute capability 12.0)" in output
    assert changed(output) == 0


def test_a_driver_that_the_machine_came_with_is_only_looked_at(machine):
    machines.load(machine.root, "580.95.05")
    own = {"nvidia_driver_source": "none"}
    assert changed(machine.play("tests/gpu/driver.yml", **own)) == 0
    machine.play("ansible/gpu.yml", **own)
    assert_device_files_at_boot(machine)
    assert changed(machine.play("ansible/gpu.yml", **own)) == 0
    machines.load(machine.root, "470.82.01")
    output = in_one_line(machine.play("ansible/gpu.yml", check=False, **own))
    assert "driver 470 is too old: TensorFlow 2.21 is built for CUDA 12.5, which needs 525 or newer" in output


def test_a_module_that_cannot_be_built_is_told_with_the_compilers_line(machine):
    # As tests/gpu/test_driver.py's machine left it when it built the open module for the security archive's kernel.
    error = "/var/lib/dkms/nvidia-current-open/535.261.03/build/nvidia/nv-pci.c:223:9: error: too few arguments"
    log = machine.root / "var/lib/dkms/nvidia-current-open/535.261.03/build/make.log"
    machines.write(log, f"  CC nv.o\n{error}\n")
    os.utime(log, (time.time() - 60, time.time() - 60))
    output = in_one_line(machine.play("tests/gpu/packages.yml", check=False))
    assert "psfleet-no-such-package" in output
    assert "error: too few arguments" not in output  # of an old build
    os.utime(log, (time.time() + 600, time.time() + 600))
    output = in_one_line(machine.play("tests/gpu/packages.yml", check=False))
    assert "host 'machine' can't install driver 535.261.03 (open modules) for its kernel 6.1.0-56-cloud-amd64" in output
    assert f"{error} (this driver is older than the kernel" in output
