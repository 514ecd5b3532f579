"""psfleet as an installed package, on the lab: a site's folder outside of any checkout makes hosts right and trains."""

import json
import os
import time

import pytest
import yaml

from tests.hosts import ROOT
from tests.package import build_wheel, install

from .conftest import play

pytestmark = pytest.mark.slow  # what it repeats is installed here: tests/unit/test_package.py has it without hosts
RUN = f"infra-package-{int(time.time())}"
STEPS = 400
LAB = ROOT / os.environ.get("PSFLEET_INVENTORY", "inventory/lab")


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    directory = tmp_path_factory.mktemp("package")
    return install(build_wheel(directory), directory / "env")


@pytest.fixture(scope="module")
def site(lab, installed, tmp_path_factory):
    """A folder that `psfleet init` made, with the lab's hosts and login; what it trains is in it."""
    directory = tmp_path_factory.mktemp("sites") / "mine"
    hosts = [f"{name}={host['ansible_host']}" for name, host in addresses().items()]
    made = installed.run(directory.parent, "psfleet", "init", "mine", *hosts)
    assert made.returncode == 0, made.stderr
    # The lab's own groups and values, so that its hosts are right already.
    (directory / "inventory/hosts.yml").write_text((LAB / "hosts.yml").read_text())
    values = yaml.safe_load((LAB / "group_vars/all.yml").read_text())
    values |= {"ansible_ssh_private_key_file": str(ROOT / ".lab/key"), "release_cache": str(ROOT / ".cache")}
    (directory / "inventory/group_vars/all.yml").write_text(yaml.safe_dump(values))
    yield directory
    installed.run(directory, "psfleet", "stop-cluster")
    with lab["head"].sudo():
        lab["head"].run_expect([0], f"rm -rf /srv/trainer/runs/{RUN} /srv/trainer/selection.json")


def addresses():
    """Each host of the lab, with its address."""
    read = yaml.safe_load((LAB / "hosts.yml").read_text())
    lines = [line for group in read.values() for line in (group["hosts"] or {}).items()]
    return {name: values for name, values in lines if values}


def test_site_yml_of_the_package_changes_nothing_on_hosts_that_are_right(installed, site):
    right = play("site.yml")  # of the checkout
    assert right.code == 0, right.failed
    done = installed.run(
        site, "ansible-playbook", "site.yml", ANSIBLE_STDOUT_CALLBACK="ansible.posix.json", ANSIBLE_NOCOLOR="1"
    )
    assert done.returncode == 0, done.stdout + done.stderr
    start = f"\n{done.stdout}".rfind("\n{\n")
    output, _ = json.JSONDecoder().raw_decode(done.stdout[start:])
    assert len(output["stats"]) == 6
    changed = [
        (host, task["task"]["name"])
        for play in output["plays"]
        for task in play["tasks"]
        for host, result in task["hosts"].items()
        if result.get("changed")
    ]
    assert changed == []


def test_a_program_of_the_folder_is_trained_looked_at_and_stopped(lab, installed, site):
    variables = site / "inventory/group_vars/all.yml"
    run = {"program": "digits:Digits", "run": RUN, "steps": STEPS, "checkpoint_steps": 200}
    values = yaml.safe_load(variables.read_text()) | {"release_program": "programs", "trainer_run": run}
    variables.write_text(yaml.safe_dump(values))
    program = site / "programs/digits.py"
    program.write_text(program.read_text() + f"# of {RUN}\n")
    started = installed.run(site, "psfleet", "start-cluster", "--run", RUN)
    assert started.returncode == 0, started.stdout + started.stderr
    shown = installed.run(site / "programs", "psfleet", "status", "--json")
    assert shown.returncode == 0, shown.stdout + shown.stderr
    assert f'"{RUN}"' in shown.stdout
    with lab["head"].sudo("trainer"):  # nobody else may look into a run
        status = json.loads(lab["head"].check_output(f"cat /srv/trainer/runs/{RUN}/status.json"))
    assert (status["state"], status["step"] >= STEPS, status["program"]) == ("finished", True, "digits:Digits")
    assert f"# of {RUN}" in lab["head"].run_expect([0], "cat /opt/trainer/current/digits.py").stdout
    stopped = installed.run(site, "fab", "stop-cluster")
    assert stopped.returncode == 0, stopped.stdout + stopped.stderr
    for host in lab.values():
        assert host.run("systemctl is-active 'trainer@*'").stdout.strip() in ("", "inactive")
