"""What takes a real systemd: the reboot, the unit that makes device files, and the rights that the proof runs with.

Two containers with systemd, a boot id of their own and a pretended module that loads at boot.

SSH goes through lxc-attach: the containers have no network. What is pretended is NVIDIA's alone (modinfo, modprobe,
the module's version in /sys); the reboot, the waiting and the boot id's comparison are Ansible's on a real systemd.
"""

import json
import os
import re
import subprocess
from pathlib import Path

import jinja2
import pytest

from fleet.site.filters import FILTERS
from tests.gpu import machines
from tests.gpu.chroot import CACHE, ROOT, Machine, run
from tests.waiting import until

OLD, DISK = "535.261.03", "535.309.01"
PACKAGES = ("dbus", "openssh-server", "systemd-sysv")
NAMES = ("psfleet-gpu-a", "psfleet-gpu-b")
# At each boot the kernel has what is on disk, as depmod's would.
LOAD_AT_BOOT = f"""\
[Unit]
DefaultDependencies=no
Before=ssh.service
[Service]
Type=oneshot
ExecStart=/bin/sh -c 'echo {DISK} >/sys/module/nvidia/version; echo boot >>/boots; rm -f /device-files'
ExecStart=/bin/sh -c 'if [ -e /lose-module ]; then mv /lose-module /no-module; fi'
[Install]
WantedBy=multi-user.target
"""
CONFIG = """\
lxc.include = /usr/share/lxc/config/common.conf
lxc.rootfs.path = dir:{root}
lxc.uts.name = {name}
lxc.apparmor.profile = unconfined
lxc.signal.halt = SIGRTMIN+3
lxc.net.0.type = empty
lxc.hook.pre-start = {directory}/new-boot-id
lxc.mount.entry = {directory}/boot_id proc/sys/kernel/random/boot_id none bind 0 0
lxc.mount.entry = {directory}/module sys/module none bind 0 0
lxc.mount.entry = {directory}/devices sys/bus/pci/devices none bind 0 0
"""


class Container:
    def __init__(self, name: str, key: Path, loaded: str) -> None:
        self.name = name
        made = Machine(name)
        self.root, self.directory = made.root, CACHE / f"{name}.lxc"
        run("rm", "--recursive", "--force", "--one-file-system", self.directory)
        made.do("apt-get", "update", "--quiet")
        made.do("apt-get", "install", "--yes", "--quiet", "--no-install-recommends", *PACKAGES)
        (self.root / "usr/sbin/policy-rc.d").unlink()
        machines.write(self.root / "root/.ssh/authorized_keys", key.with_suffix(".pub").read_text())
        made.script(
            "/usr/local/sbin/modinfo",
            f'[ ! -e /no-module ] || exit 1; case "$4" in version) echo {DISK};; license) echo NVIDIA;; esac',
        )
        made.script("/usr/bin/nvidia-modprobe", 'echo "nvidia-modprobe $*" >>/device-files')
        made.script("/usr/bin/nvidia-smi", 'echo "nvidia-smi $*" >>/device-files')
        units = {"load.service": LOAD_AT_BOOT, "nvidia-persistenced.service": "[Service]\nExecStart=/bin/sleep inf\n"}
        for unit, text in units.items():
            machines.write(self.root / "etc/systemd/system" / unit, text)
        install = "\n[Install]\nWantedBy=multi-user.target\n"
        with (self.root / "etc/systemd/system/nvidia-persistenced.service").open("a") as unit_file:
            unit_file.write(install)
        made.do("systemctl", "enable", "load.service")
        machines.load(self.directory, loaded)
        (self.directory / "sys/module").rename(self.directory / "module")
        machines.lay_out(self.directory, "tesla-t4")
        (self.directory / "sys/bus/pci/devices").rename(self.directory / "devices")
        hook = self.directory / "new-boot-id"
        hook.write_text(f"#!/bin/sh\ncat /proc/sys/kernel/random/uuid >{self.directory}/boot_id\n")
        hook.chmod(0o755)
        (self.directory / "config").write_text(CONFIG.format(root=self.root, name=name, directory=self.directory))

    def start(self, loaded: str) -> None:
        run("lxc-start", "--name", self.name, "--rcfile", self.directory / "config", "--lxcpath", CACHE)
        run("lxc-wait", "--name", self.name, "--lxcpath", CACHE, "--state", "RUNNING", "--timeout", "30")
        is_active = ("systemctl", "is-active", "multi-user.target")
        until(lambda: self.attach(*is_active, check=None).strip() == "active", f"{self.name} is up", pause=0.5)
        (self.directory / "module/nvidia/version").write_text(loaded + "\n")

    def attach(self, *command: str, check: bool | None = True) -> str:
        words = ["lxc-attach", "--name", self.name, "--lxcpath", str(CACHE), "--clear-env", "--", *command]
        return run(*words) if check else subprocess.run(words, capture_output=True, text=True, check=False).stdout

    def boots(self) -> int:
        return len((self.root / "boots").read_text().splitlines())

    def loaded(self) -> str:
        return (self.directory / "module/nvidia/version").read_text().strip()

    def stop(self) -> None:
        self.attach("true", check=None)
        words = ["lxc-stop", "--kill", "--name", self.name, "--lxcpath", str(CACHE)]
        subprocess.run(words, capture_output=True, check=False)


@pytest.fixture(scope="module")
def containers():
    key = CACHE / "key"
    if not key.exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", key)
    made = [Container(name, key, OLD) for name in NAMES]
    try:
        for container in made:
            container.start(OLD)
        yield made
    finally:
        for container in made:
            container.stop()


def play(containers, playbook="tests/gpu/load.yml", check=True, **variables):
    hosts = {}
    for container in containers:
        proxy = f"lxc-attach --name {container.name} --lxcpath {CACHE} --clear-env -- /usr/sbin/sshd -i"
        hosts[container.name] = {
            "ansible_host": container.name,
            "ansible_user": "root",
            "ansible_python_interpreter": "/usr/bin/python3",
            "ansible_ssh_private_key_file": str(CACHE / "key"),
            "ansible_ssh_common_args": f"-o ProxyCommand='{proxy}' -o StrictHostKeyChecking=no "
            "-o UserKnownHostsFile=/dev/null -o LogLevel=ERROR -o ControlMaster=no",
        } | variables
    inventory = CACHE / "reboot.json"
    inventory.write_text(json.dumps({"machine": {"hosts": hosts}}))
    environment = {**os.environ, "LC_ALL": "C.UTF-8"}
    command = ["ansible-playbook", "-i", inventory, playbook, "-e", "gpu_batch=1"]
    output = run(*command, check=check, cwd=ROOT, env=environment)
    return {name: int(changed) for name, changed in re.findall(r"(psfleet-gpu-\S+) +: .*changed=(\d+)", output)}, output


def test_only_the_machine_that_runs_another_module_reboots_and_only_once(containers):
    old, right = containers
    (right.directory / "module/nvidia/version").write_text(DISK + "\n")
    before = [container.boots() for container in containers]
    changed, output = play(containers)
    assert [container.boots() for container in containers] == [before[0] + 1, before[1]], output
    assert (old.loaded(), right.loaded()) == (DISK, DISK)
    assert changed[old.name] > 0
    for container in containers:
        assert container.attach("systemctl", "is-active", "nvidia-persistenced").strip() == "active"
    changed, _said = play(containers)
    assert changed == dict.fromkeys(NAMES, 0)
    assert [container.boots() for container in containers] == [before[0] + 1, before[1]]


def test_device_files_are_made_at_each_boot(containers):
    for container in containers:
        assert container.attach("systemctl", "is-active", "psfleet-nvidia-devices").strip() == "active"
        made = (container.root / "device-files").read_text().splitlines()  # of this boot alone
        assert made == ["nvidia-smi --list-gpus", "nvidia-modprobe -u -c 0"]


# Tells what its rights are, wherever it runs.
RIGHTS = """\
id -un
grep -E '^(NoNewPrivs|CapBnd|Seccomp):' /proc/self/status
for place in /var/lib/trainer /var/cache/trainer-cuda /etc /run /dev/shm; do
  if touch $place/try 2>/dev/null; then echo $place; fi
done
"""


def test_the_proof_has_the_rights_of_a_task_and_keeps_what_it_translated(containers):
    container = containers[0]
    if "trainer" not in (container.root / "etc/passwd").read_text():
        container.attach("useradd", "--system", "--create-home", "--home-dir", "/var/lib/trainer", "trainer")
    python = container.root / "opt/trainer/current/env/bin/python"
    machines.write(python, f"#!/bin/sh\n{RIGHTS}echo $CUDA_CACHE_PATH\n")
    python.chmod(0o755)
    _changed, output = play([container], "tests/gpu/proof.yml")
    changed, output = play([container], "tests/gpu/proof.yml")
    assert changed == {container.name: 0}, output
    proof = container.attach("/usr/local/sbin/psfleet-gpu-check").splitlines()
    assert proof[:2] == ["trainer", "CapBnd:\t0000000000000000"]
    assert "NoNewPrivs:\t1" in proof
    assert "/var/cache/trainer-cuda" in proof
    assert not {"/var/lib/trainer", "/etc", "/run"} & set(proof)
    # The same of a task: the role's unit, less what a training has and this program hasn't.
    environment = jinja2.Environment(autoescape=False)
    environment.filters.update(FILTERS)
    template = environment.from_string((ROOT / "roles/trainer/templates/trainer@.service.j2").read_text())
    unit = template.render(
        trainer_start_seconds=9,
        trainer_stop_seconds=5,
        trainer_watchdog_seconds=0,
        trainer_settings={"shared_dir": "/srv"},
    )
    unit = re.sub(r"(?m)^(Type|EnvironmentFile|ExecStartPre|Restart\w*|WatchdogSec)=.*\n", "", unit)
    unit = unit.replace("[Service]\n", "[Service]\nType=oneshot\nStandardOutput=file:/rights\n")
    machines.write(container.root / "etc/systemd/system/trainer@.service", unit)
    container.attach("systemctl", "daemon-reload")
    container.attach("systemctl", "start", "trainer@worker-0")
    task = (container.root / "rights").read_text().splitlines()
    assert task[:-1] == proof[:-1]  # the last line is CUDA_CACHE_PATH, which a task has from its own file
    shown = container.attach("systemctl", "show", "-P", "After", "trainer@worker-0").split()
    assert "psfleet-nvidia-devices.service" in shown


def test_a_kernel_without_the_module_is_named_after_the_reboot(containers):
    container = containers[0]
    machines.write(container.root / "lose-module", "")
    (container.directory / "module/nvidia/version").write_text(OLD + "\n")
    _changed, output = play([container], check=False)
    output = " ".join(output.split())
    assert f"host '{container.name}' came up with the kernel" in output
    assert f"for which it has no NVIDIA module; it left {os.uname().release} with {DISK}. Run site.yml again" in output
