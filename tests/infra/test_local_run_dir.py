"""No path is shared: the run lies on the chief's own disk, and the coordinator tells the servers when to end."""

import time

import pytest
import yaml

from tests.hosts import wait_until

from .conftest import copy_inventory, fab, play, status

RUN = f"infra-alone-{int(time.time())}"
LOCAL = "/var/lib/trainer/local"
# What site.yml does where no path is shared, besides what start-cluster ships.
STORAGE = ("ansible/preflight.yml", "ansible/storage.yml", "ansible/monitoring.yml")
SETTINGS = {
    "program": "trainer.examples.digits:Digits",
    "steps": 2500,
    "checkpoint_steps": 200,
    "checkpoints_kept": 100,
    "evaluation": "inline",
}


@pytest.fixture(scope="module")
def evaluated(tmp_path_factory):
    """The lab without a shared path, and with its evaluator."""
    return copy_inventory(tmp_path_factory.mktemp("evaluated") / "lab", SETTINGS, cluster_shared_dir="")


@pytest.fixture(scope="module")
def inventory(evaluated):
    """The same without the evaluator."""
    groups = yaml.safe_load((evaluated / "hosts.yml").read_text())
    hosts = yaml.safe_dump(groups | {"evaluator": {"hosts": None}}, sort_keys=False)
    copy = evaluated.parent / "alone"
    copy.mkdir()
    (copy / "hosts.yml").write_text(hosts)
    (copy / "group_vars").symlink_to(evaluated / "group_vars")
    return copy


@pytest.fixture(scope="module")
def trained(lab, evaluated, inventory):
    """Training, with its coordinator killed after the first checkpoint, to the end."""
    moved = play(*STORAGE, inventory=inventory)
    assert moved.code == 0, moved.failed
    began = int(time.time())  # a lab's hosts have this machine's clock
    started = fab("start-cluster", "--run", RUN, "--detach", inventory=inventory)
    assert started.returncode == 0, started.stdout + started.stderr
    with lab["head"].sudo():
        wait_until(lambda: "manifest" in listed(lab["head"], f"{LOCAL}/runs/{RUN}/checkpoints"), 300, "a checkpoint")
        lab["head"].run_expect([0], "systemctl kill --signal=KILL trainer@chief-0")
    wait_until(lambda: status(lab)["state"] == "finished", 900, "the end of the run")
    yield started.stdout, began
    fab("stop-cluster", inventory=inventory)
    for host in lab.values():
        with host.sudo():
            host.run_expect([0], f"rm -rf {LOCAL}")
    back = play(*STORAGE)
    assert back.code == 0, back.failed


def listed(host, directory):
    return host.run(f"ls {directory}").stdout


def test_an_evaluator_is_refused_before_any_host_is_touched(evaluated):
    refused = play("site.yml", inventory=evaluated)
    assert refused.code != 0
    assert "group evaluator has head, and cluster_shared_dir is empty" in refused.failed[0][1]
    assert refused.changed == []


@pytest.mark.slow
def test_the_chief_alone_has_the_run(lab, trained):
    assert f"the runs lie on the disk of head alone, in {LOCAL}" in trained[0]
    for name, host in lab.items():
        with host.sudo():
            assert "wheels" in listed(host, LOCAL), name
            assert (f"{RUN}\n" in listed(host, f"{LOCAL}/runs")) == (name == "head"), name
    with lab["head"].sudo():
        files = listed(lab["head"], f"{LOCAL}/runs/{RUN}/checkpoints").split()
    assert {"ckpt-2500.index", "ckpt-2500.manifest.json"} <= set(files)
    assert any(file.startswith("ckpt-2500.data-") for file in files)


@pytest.mark.slow
def test_a_killed_coordinator_went_on_with_what_was_on_the_parameter_servers(lab, trained):
    def journal(host, task):
        with host.sudo():
            return host.check_output(f"journalctl --quiet --no-pager --since=@{trained[1]} --unit=trainer@{task}")

    assert "attached to the variables on the ps" in journal(lab["head"], "chief-0")
    assert (status(lab)["state"], status(lab)["step"]) == ("finished", 2500)
    for name in ("ps-0", "ps-1"):
        assert "restarting" not in journal(lab[name], name)


@pytest.mark.slow
def test_the_servers_end_with_the_run(lab, trained):
    for name in ("ps-0", "ps-1", "worker-0", "worker-1"):
        with lab[name].sudo():
            unit = lab[name].service(f"trainer@{name}")
            wait_until(lambda unit=unit: not unit.is_running, 90, f"{name} ended with its run")
            shown = lab[name].check_output(f"systemctl show --value --property=ExecMainStatus trainer@{name}")
        assert shown == "0", name


@pytest.mark.slow
def test_a_second_run_of_the_playbook_changes_nothing(inventory, trained):
    again = play("site.yml", "--limit", "head", inventory=inventory)
    assert (again.code, again.changed) == (0, [])
