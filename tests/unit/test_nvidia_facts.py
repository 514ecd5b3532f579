"""What the role reads of a machine, on recorded machines (tests/gpu/records says where each comes from)."""

import nvidia_facts
import pytest
import yaml
from nvidia_packages import answer, choose, installed_versions, offered_versions

from tests.gpu import machines

SMI = yaml.safe_load((machines.RECORDS / "smi.yml").read_text())
KERNEL = "6.1.0-50-cloud-amd64"


def look(root, commands=None):
    def run(command):
        return (commands or {}).get(" ".join(command), (1, ""))

    return nvidia_facts.collect_facts(root, run, KERNEL)


@pytest.mark.parametrize(
    ("machine", "gpus", "nvswitches"),
    [
        ("tesla-t4", ["1eb8"], []),
        ("a100-nvswitch", ["20b2"], ["1af1"]),
        ("h100", ["2330"], []),
        ("h200", ["2335"], []),
        ("two-graphics-cards", ["2582", "2b85"], []),  # not their sound cards
        ("nforce-laptop", [], []),  # NVIDIA's chipset, its network interface of NVSwitch's class
    ],
)
def test_gpus_are_found_by_class_and_vendor(tmp_path, machine, gpus, nvswitches):
    seen = look(machines.lay_out(tmp_path, machine))
    assert [gpu["device"] for gpu in seen["gpus"]] == gpus
    assert [switch["device"] for switch in seen["nvswitches"]] == nvswitches


def test_a_machine_without_pci_has_no_gpu(tmp_path):
    assert look(tmp_path)["gpus"] == []


@pytest.mark.parametrize(
    ("record", "version"), [("open_module", "580.95.05"), ("h200", "580.159.04"), ("mismatch", "580.173.02")]
)
def test_the_loaded_version_is_read_of_both_kinds_of_module(tmp_path, record, version):
    machines.write(tmp_path / "proc/driver/nvidia/version", SMI[record]["module"])
    assert look(tmp_path)["loaded"] == version
    assert look(tmp_path)["loaded_open"] is (record != "mismatch")
    machines.load(tmp_path, "535.1.2")
    assert look(tmp_path)["loaded"] == "535.1.2"


def test_nothing_is_loaded_or_installed_on_a_fresh_machine(tmp_path):
    seen = look(tmp_path)
    assert (seen["loaded"], seen["installed"], seen["open"], seen["dkms"]) == (None, None, None, {})


# `dkms status` and modinfo as they spoke in tests/gpu/test_driver.py's machine.
def test_the_module_on_disk_is_found_under_debians_name(tmp_path):
    commands = {
        f"modinfo -k {KERNEL} -F version nvidia-current-open": (0, "535.261.03\n"),
        f"modinfo -k {KERNEL} -F license nvidia-current-open": (0, "Dual MIT/GPL\n"),
        f"dkms status -k {KERNEL}": (0, f"nvidia-current-open/535.261.03, {KERNEL}, x86_64: installed\n"),
    }
    seen = look(tmp_path, commands)
    assert (seen["installed"], seen["open"]) == ("535.261.03", True)
    assert seen["dkms"] == {"nvidia-current-open/535.261.03": "installed"}


def test_dkms_states_are_told_apart():
    listing = (
        "nvidia-current-open/535.261.03: added\n"
        "nvidia/580.95.05, 6.8.0-45-generic, x86_64: built\n"
        "nvidia, 470.1, 5.4.0-1-amd64, x86_64: installed (WARNING! Diff between built and installed module!)\n"
        "zfs/2.1.11, 6.1.0-50-amd64, x86_64: installed\n"
    )
    assert nvidia_facts.dkms_states(listing) == {
        "nvidia-current-open/535.261.03": "added",
        "nvidia/580.95.05": "built",
        "nvidia/470.1": "installed",
    }


@pytest.mark.parametrize(("content", "on"), [(b"\x06\0\0\0\x01", True), (b"\x06\0\0\0\0", False), (None, None)])
def test_secure_boot_is_read_from_the_firmwares_variable(tmp_path, content, on):
    if content:
        machines.write(tmp_path / nvidia_facts.SECURE_BOOT, content)
    assert look(tmp_path)["secure_boot"] is on


# mokutil's own words (its source, mokutil.c): "%s is already enrolled", "%s is not enrolled".
@pytest.mark.parametrize(("output", "enrolled"), [("is already enrolled", True), ("is not enrolled", False)])
def test_a_key_that_the_firmware_trusts_is_found(tmp_path, output, enrolled):
    for system, key in (("debian", nvidia_facts.DKMS_KEY), ("ubuntu", nvidia_facts.UBUNTUS_DKMS_KEY)):
        machines.write(tmp_path / "etc/os-release", f"ID_LIKE=debian\nID={system}\n")
        answers = {f"mokutil --test-key {key}": (0, f"{key} {output}\n")}
        assert look(tmp_path, answers)["key_enrolled"] is enrolled


def test_a_key_that_dkms_does_not_use_counts_for_nothing(tmp_path):
    machines.write(tmp_path / "etc/os-release", "ID=ubuntu\n")
    key = nvidia_facts.DKMS_KEY
    assert look(tmp_path, {f"mokutil --test-key {key}": (0, f"{key} is already enrolled\n")})["key_enrolled"] is False


# `apt-cache madison` in Debian 12 on the day when the security archive's libraries were newer than the open module.
MADISON = """\
nvidia-open-kernel-dkms | 535.261.03-1 | http://mirror bookworm/contrib amd64 Packages
nvidia-smi | 535.309.01-0+deb12u1 | http://mirror bookworm-security/non-free amd64 Packages
nvidia-smi | 535.261.03-1 | http://mirror bookworm/non-free amd64 Packages
nvidia-kernel-dkms | 535.309.01-0+deb12u1 | http://mirror bookworm-security/non-free amd64 Packages
nvidia-kernel-dkms | 535.261.03-1 | http://mirror bookworm/non-free amd64 Packages
mokutil | 0.6.0-2 | http://mirror bookworm/main amd64 Packages
"""
OPEN = ["nvidia-open-kernel-dkms", "nvidia-smi"]
PROPRIETARY = ["nvidia-kernel-dkms", "nvidia-smi"]


def test_the_version_is_one_that_all_parts_have():
    offered = offered_versions(MADISON)
    assert choose("535", "", OPEN, offered, {})[0] == "535.261.03"
    assert choose("535", "", PROPRIETARY, offered, {})[0] == "535.309.01"


def test_an_installed_version_is_kept_and_an_exact_one_obeyed():
    offered = offered_versions(MADISON)
    installed = dict.fromkeys(PROPRIETARY, "535.261.03-1")
    assert choose("535", "", PROPRIETARY, offered, installed)[0] == "535.261.03"
    assert choose("535", "535.309.01", PROPRIETARY, offered, installed)[0] == "535.309.01"
    # Gone from the archive, and still there: nothing is missing.
    gone = dict.fromkeys(PROPRIETARY, "535.200.01-1")
    assert choose("535", "", PROPRIETARY, offered, gone)[0] == "535.200.01"


@pytest.mark.parametrize(("branch", "version"), [("580", ""), ("535", "535.1.1"), ("535", "535.309.01")])
def test_a_version_that_is_not_to_be_had_is_refused_with_what_is(branch, version):
    chosen, why = choose(branch, version, OPEN, offered_versions(MADISON), {})
    assert chosen is None
    assert f"of branch {branch}" in why
    assert "nvidia-open-kernel-dkms: 535.261.03; nvidia-smi: 535.261.03, 535.309.01" in why


def test_ten_is_newer_than_nine():
    offered = {"a": {"535.9.1-1", "535.10.1-1"}}
    assert choose("535", "", ["a"], offered, {})[0] == "535.10.1"


def ask(installed="", others=("mokutil",), following=None):
    def output(*command):
        return MADISON if command[0] == "apt-cache" else installed

    return answer(output, "535", "", OPEN, list(others), following or {})


def test_only_what_is_missing_is_installed():
    assert ask()["install"] == ["nvidia-open-kernel-dkms=535.261.03*", "nvidia-smi=535.261.03*", "mokutil"]
    half = "installed nvidia-smi 535.261.03-1\nhalf-configured nvidia-open-kernel-dkms 535.261.03-1\n"
    assert ask(half + "installed mokutil 0.6.0-2\n")["install"] == ["nvidia-open-kernel-dkms=535.261.03*"]
    whole = "".join(f"installed {name} 535.261.03-1\n" for name in OPEN) + "installed mokutil 0.6.0-2\n"
    assert ask(whole) == {"version": "535.261.03", "install": [], "problems": []}


def test_a_newer_library_is_taken_back_to_the_modules_version():
    newer = "installed nvidia-open-kernel-dkms 535.261.03-1\ninstalled nvidia-smi 535.309.01-0+deb12u1\n"
    assert ask(newer)["install"] == ["nvidia-smi=535.261.03*", "mokutil"]


def test_headers_of_a_kernel_that_the_archive_has_left_behind_are_named():
    (problem,) = ask(others=["linux-headers-6.1.0-13-amd64"])["problems"]
    assert "linux-headers-6.1.0-13-amd64" in problem
    assert "upgrade the kernel and reboot" in problem


def test_headers_of_later_kernels_come_where_later_kernels_do():
    following = {"linux-image-cloud-amd64": "mokutil"}  # of which the recorded archive has one
    assert ask(others=[], following=following)["install"] == [
        "nvidia-open-kernel-dkms=535.261.03*",
        "nvidia-smi=535.261.03*",
    ]
    later = ask("installed linux-image-cloud-amd64 6.1.176-1\n", others=[], following=following)
    assert later["install"][-1] == "mokutil"
    assert (
        ask("installed linux-image-cloud-amd64 6.1.176-1\n", following={"linux-image-cloud-amd64": "x"})["problems"]
        == []
    )


def test_dpkgs_states_are_read():
    assert installed_versions("installed a 1-1\nconfig-files b 2-1\nnot-installed c \n") == {"a": "1-1"}


KERNELS = "linux-modules-nvidia-580-server-open-6.8.0-{}-generic"
# Ubuntu's archive with a later driver, of which the modules of its later kernel are made.
UBUNTU = """\
nvidia-utils-580-server | 580.159.03-0ubuntu0.24.04.1 | http://mirror noble-updates/restricted amd64 Packages
nvidia-utils-580-server | 580.142-0ubuntu0.24.04.1 | http://mirror noble/restricted amd64 Packages
linux-modules-nvidia-580-server-open-6.8.0-45-generic | 6.8.0-45.45 | http://mirror noble/restricted amd64 Packages
linux-modules-nvidia-580-server-open-6.8.0-50-generic | 6.8.0-50.51 | http://mirror noble/restricted amd64 Packages
"""


@pytest.mark.parametrize(
    ("kernel", "version", "chosen"),
    [(45, "", "580.142"), (50, "", "580.159.03"), (50, "580.142", "580.142")],
)
def test_the_version_follows_the_modules_of_the_kernel_that_runs(kernel, version, chosen):
    made_of = {45: "580.142", 50: "580.159.03"}
    depends = {
        KERNELS.format(
            number
        ): f"nvidia-kernel-common-580-server (<= {made}-1), nvidia-kernel-common-580-server (>= {made})"
        for number, made in made_of.items()
    }

    def output(*command):
        if command[:2] == ("apt-cache", "show"):
            return f"Package: {command[-1]}\nDepends: {depends[command[-1]]}\n"
        if command[0] == "apt-cache":
            return UBUNTU
        if command[2] == "--showformat=${Depends}":
            return depends[command[-1]]
        return (
            f"installed nvidia-utils-580-server 580.142-0ubuntu0.24.04.1\ninstalled {KERNELS.format(45)} 6.8.0-45.45\n"
        )

    leader = KERNELS.format(kernel)
    found = answer(output, "580", version, ["nvidia-utils-580-server"], [leader], {}, leader)
    assert (found["version"], found["problems"]) == (chosen, [])
    assert (leader in found["install"]) is (kernel == 50)
