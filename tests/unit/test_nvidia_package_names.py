"""What each source calls the driver's packages, as Ansible renders the role's own files."""

from pathlib import Path

import pytest
from ansible.parsing.dataloader import DataLoader
from ansible.template import Templar

VARS = Path(__file__).parents[2] / "roles" / "nvidia_driver" / "vars"
KERNEL = "6.8.0-45-generic"


def render(source, system, branch, name, is_open=True, nvswitches=0):
    """Render one of the role's variables on such a machine."""
    loader = DataLoader()
    variables: dict = {}
    for file in ("main", source):
        variables |= loader.load_from_file(str(VARS / f"{file}.yml"), trusted_as_template=True)
    distribution, _, version = system.partition(" ")
    facts = {"distribution": distribution, "distribution_version": version, "distribution_major_version": version}
    variables |= {
        "ansible_facts": facts,
        "__nvidia_driver_choice": {"branch": branch, "open": is_open},
        "__nvidia_driver_seen": {"kernel": KERNEL, "nvswitches": [{}] * nvswitches},
    }
    return Templar(loader=loader, variables=variables).template(variables[f"__nvidia_driver_{name}"])


OTHERS = [f"linux-headers-{KERNEL}", "mokutil", "nvidia-modprobe"]


@pytest.mark.parametrize(
    ("system", "branch", "is_open", "together", "more"),
    [
        (
            "Ubuntu 24.04",
            "580",
            True,
            ["nvidia-dkms-580-open", "libnvidia-compute-580", "nvidia-utils-580", "nvidia-compute-utils-580"],
            [],
        ),
        (
            "Ubuntu 22.04",
            "570",
            False,
            ["nvidia-dkms-570", "libnvidia-compute-570", "nvidia-utils-570", "nvidia-compute-utils-570"],
            [],
        ),
        ("Ubuntu 24.04", "590", True, ["nvidia-dkms-open", "libnvidia-compute"], ["nvidia-persistenced"]),
        ("Debian 12", "580", True, ["nvidia-kernel-open-dkms", "nvidia-driver-cuda"], ["nvidia-persistenced"]),
        ("Debian 13", "590", False, ["nvidia-kernel-dkms", "nvidia-driver-cuda"], ["nvidia-persistenced"]),
    ],
)
def test_nvidias_packages_have_the_branch_in_their_names_on_ubuntu_before_590(system, branch, is_open, together, more):
    assert render("nvidia", system, branch, "together", is_open) == together
    assert render("nvidia", system, branch, "others", is_open) == OTHERS + more


@pytest.mark.parametrize(
    ("system", "branch", "package"),
    [
        ("Debian 12", "570", "nvidia-fabricmanager-570"),
        ("Debian 12", "580", "nvidia-fabricmanager"),
        ("Ubuntu 24.04", "580", "nvidia-fabricmanager"),
    ],
)
def test_the_fabric_manager_lost_its_number_with_580(system, branch, package):
    assert render("nvidia", system, branch, "together", nvswitches=2)[-1] == package


def test_modules_follow_each_kind_of_kernel_that_a_machine_may_get():
    following = render("ubuntu", "Ubuntu 24.04", "580", "following")
    modules = "linux-modules-nvidia-580-server-open"
    assert following == {
        "linux-image-generic": f"{modules}-generic",
        "linux-image-generic-hwe-24.04": f"{modules}-generic-hwe-24.04",
    }
    assert render("ubuntu", "Ubuntu 24.04", "580", "leader") == f"{modules}-{KERNEL}"
    assert render("nvidia", "Ubuntu 24.04", "580", "leader") == ""


@pytest.mark.parametrize(
    ("check", "source", "python3_apt", "installs"),
    [
        (True, "ubuntu", "", False),
        (True, "nvidia", "installed", True),
        (True, "none", None, False),
        (False, "distribution", None, True),
        (False, "none", None, False),
    ],
)
def test_check_mode_asks_apt_nothing_on_a_machine_that_has_no_python3_apt_yet(check, source, python3_apt, installs):
    """The module would install it, but not in check mode, and ended the run."""
    loader = DataLoader()
    variables = loader.load_from_file(str(VARS / "main.yml"), trusted_as_template=True)
    variables |= {"ansible_check_mode": check, "nvidia_driver_source": source}
    if python3_apt is not None:
        variables["__nvidia_driver_apt"] = {"stdout": python3_apt}
    tasks = loader.load_from_file(str(VARS.parent / "tasks/main.yml"), trusted_as_template=True)
    (when,) = [task["when"] for task in tasks if "install.yml" in task.values()]
    assert Templar(loader=loader, variables=variables).evaluate_conditional(when) is installs
