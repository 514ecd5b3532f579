"""Another strategy on the same hosts, and back: only the run settings change."""

import json
import time

import pytest

from tests.hosts import wait_until

from .conftest import copy_inventory, environment_of, fab, give_group, give_second_task, status

BEGAN = f"@{int(time.time())}"  # a lab's hosts have this machine's clock
RUN = f"infra-sync-{BEGAN[1:]}"
FIT_RUN = f"infra-fit-{BEGAN[1:]}"
DATA_RUN = f"infra-data-{BEGAN[1:]}"
IN_STEP = {
    "program": "trainer.examples.sync_digits:SyncDigits",
    "strategy": "multi_worker_mirrored",
    "checkpoint_seconds": 10,
}
MEMBERS = {"head": "chief-0", "worker-0": "worker-0", "worker-1": "worker-1"}


@pytest.fixture(scope="module", autouse=True)
def _leave_no_run(lab):
    yield
    fab("stop-cluster")
    with lab["head"].sudo():
        lab["head"].run_expect([0], f"rm -rf /srv/trainer/runs/{RUN} /srv/trainer/runs/{FIT_RUN}")
        lab["head"].run_expect([0], f"rm -rf /srv/trainer/runs/{DATA_RUN} /srv/trainer/data-service")
        lab["head"].run_expect([0], "rm -f /srv/trainer/selection.json")


@pytest.fixture(scope="module")
def in_step(tmp_path_factory):
    return copy_inventory(tmp_path_factory.mktemp("in-step") / "lab", IN_STEP | {"steps": 1_000_000})


def state(host, task):
    """Whether systemd runs a task, and whether it would at the next boot."""
    listed = host.check_output(f"systemctl show --property=ActiveState,UnitFileState trainer@{task}")
    found = dict(line.split("=", 1) for line in listed.splitlines())
    return found["ActiveState"], found["UnitFileState"]


@pytest.fixture(scope="module")
def training(lab, in_step):
    """Hosts that trained with parameter servers, one of which runs, started with a strategy that has none."""
    with lab["ps-0"].sudo():
        lab["ps-0"].run_expect([0], "systemctl enable --now trainer@ps-0")
    started = fab("start-cluster", "--run", RUN, "--detach", inventory=in_step)
    assert started.returncode == 0, started.stdout + started.stderr
    return started.stdout


@pytest.mark.slow
def test_hosts_of_jobs_that_the_strategy_lacks_have_no_task(lab, training):
    for name in ("ps-0", "ps-1"):
        with lab[name].sudo():
            assert lab[name].check_output("ls /etc/trainer") == "run.json"
            assert state(lab[name], name) == ("inactive", "disabled")


@pytest.mark.slow
def test_cluster_is_chief_and_workers_that_train(lab, in_step, training):
    assert "group ps (ps-0, ps-1) is unused" in training
    for name, task in MEMBERS.items():
        with lab[name].sudo():
            environment = environment_of(lab[name], f"trainer@{task}")
            assert "step" in lab[name].check_output(f"systemctl show --value --property=StatusText trainer@{task}")
        assert sorted(json.loads(environment["TF_CONFIG"])["cluster"]) == ["chief", "worker"]
    shown = fab("status", inventory=in_step)
    assert shown.returncode == 0, shown.stdout + shown.stderr
    assert shown.stdout.count("active (running)") == 4


@pytest.mark.slow
def test_stop_ends_all_members_after_a_checkpoint(lab, in_step, training):
    stopped = fab("stop-cluster", inventory=in_step)
    assert stopped.returncode == 0, stopped.stdout + stopped.stderr
    for name, task in MEMBERS.items():
        with lab[name].sudo():
            assert state(lab[name], task) == ("inactive", "disabled"), task
            # systemd forgets how a unit that it has unloaded ended; the journal doesn't.
            last = lab[name].check_output(f"journalctl --quiet --no-pager --lines=8 --unit=trainer@{task}")
        assert "stopped at step" in last, last
        assert "Deactivated successfully" in last, last
    now = status(lab)
    assert now["state"] == "stopped"
    assert now["checkpoint"].endswith(f"ckpt-{now['step']}")


@pytest.mark.slow
def test_members_go_on_and_end_with_their_run(lab, in_step, tmp_path):
    steps = status(lab)["step"] + 50
    inventory = copy_inventory(tmp_path / "lab", IN_STEP | {"steps": steps})
    done = fab("start-cluster", inventory=inventory)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"run {RUN} finished" in done.stdout
    assert status(lab)["evaluation"]["step"] == steps
    for name, task in MEMBERS.items():  # the coordinator may be the first to end
        with lab[name].sudo():
            wait_until(lambda name=name, task=task: state(lab[name], task)[0] == "inactive", 60, f"{task} ended")
    shown = fab("status", inventory=inventory)
    assert shown.returncode == 0, shown.stdout + shown.stderr
    for name, task in MEMBERS.items():
        assert any(line.split()[:3] == [task, name, "finished"] for line in shown.stdout.splitlines()), shown.stdout


@pytest.mark.slow
def test_fit_trains_with_two_workers_on_a_host(lab, tmp_path):
    settings = {"program": "trainer.examples.digits:Digits", "api": "fit", "steps": 1000, "epoch_steps": 500}
    inventory = copy_inventory(tmp_path / "lab", settings)
    give_second_task(inventory)
    done = fab("start-cluster", "--run", FIT_RUN, inventory=inventory)
    assert done.returncode == 0, done.stdout + done.stderr
    now = status(lab)
    assert (now["state"], now["step"], now["evaluation"]["step"]) == ("finished", 1000, 1000)
    assert now["evaluation"]["metrics"]["accuracy"] >= 0.9
    ended = ("inactive", "enabled")
    for name in ("ps-0", "ps-1"):
        with lab[name].sudo():
            wait_until(lambda host=lab[name], task=name: state(host, task) == ended, 90, f"{name} ended with its run")
    for name, tasks in {"worker-0": ["worker-0", "worker-1"], "worker-1": ["worker-2"]}.items():
        with lab[name].sudo():
            files = lab[name].check_output("ls /etc/trainer").split()
            assert files == ["run.json", *(f"{task}.env" for task in tasks)]
            for task in tasks:
                journal = f"journalctl --quiet --no-pager --since={BEGAN} --unit=trainer@{task}"
                assert f"{task} serves at" in lab[name].check_output(journal)


@pytest.mark.slow
def test_a_data_service_reads_for_the_workers_and_ends_with_the_run(lab, in_step, tmp_path):
    settings = {"program": "trainer.examples.digits:Digits", "steps": 1000, "input": "service", "input_sharding": "off"}
    inventory = copy_inventory(tmp_path / "lab", settings)
    give_group(inventory, "data", ["ps-0", "ps-1"])
    done = fab("start-cluster", "--run", DATA_RUN, inventory=inventory)
    assert done.returncode == 0, done.stdout + done.stderr
    now = status(lab)
    assert (now["state"], now["step"]) == ("finished", 1000)
    assert now["evaluation"]["metrics"]["accuracy"] >= 0.9
    ended = ("inactive", "enabled")
    for host, task in {"ps-0": "data-0", "ps-1": "data-1", "head": "dispatcher-0"}.items():
        with lab[host].sudo():
            wait_until(lambda host=lab[host], task=task: state(host, task) == ended, 90, f"{task} ended with its run")
            journal = f"journalctl --quiet --no-pager --since={BEGAN} --unit=trainer@{task}"
            assert f"{task} serves at" in lab[host].check_output(journal)
    shown = fab("status", inventory=inventory)
    assert shown.returncode == 0, shown.stdout + shown.stderr
    for task in ("dispatcher-0", "data-0", "data-1"):
        assert any(line.split()[:1] == [task] and "finished" in line for line in shown.stdout.splitlines())
