"""The lab as the tests see it: over SSH, through the inventory that Ansible reads."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import testinfra
import yaml
from testinfra.host import Host
from testinfra.utils.ansible_runner import AnsibleRunner

from tests.hosts import ROOT, adding_journals, answer, listed_inventory, name_of, wait_until

TRAINING_GROUPS = ("chief", "ps", "worker", "evaluator")
LONG_RUN = "infra-long"
# From a cluster just made right to one that trains, is damaged, restarted, stopped, changes its strategy, and at last
# trains to the end as the inventory says.
ORDER = [
    "test_site", "test_odd_hosts", "test_lost_host", "test_chief", "test_ps", "test_worker", "test_evaluator",
    "test_tensorboard", "test_all_hosts", "test_firewall", "test_other_firewalls", "test_repair", "test_supply",
    "test_sandbox", "test_reboot", "test_planned_reboot", "test_second_day", "test_newcomers", "test_replaced_hosts",
    "test_reset", "test_plan", "test_fab", "test_runs", "test_strategies", "test_local_run_dir", "test_encryption",
    "test_sweep", "test_queue", "test_slurm", "test_training", "test_package", "test_monitoring",
]  # fmt: skip


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "slow: repeats, or tells little more than the others: `make infra-slow`")
    # Else testinfra opens an SSH connection for each command: ansible.cfg says that they are shared, and not where.
    connections = tempfile.mkdtemp(prefix="psfleet-")
    config.add_cleanup(partial(shutil.rmtree, connections, ignore_errors=True))
    AnsibleRunner.get_runner(None).ansible_config.read_dict(
        {
            "ssh_connection": {"control_path": "%(directory)s/%%C"},
            "persistent_connection": {"control_path_dir": connections},
        }
    )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: ORDER.index(item.path.stem))


def journal(host: Host) -> str:
    try:
        with host.sudo():
            return host.run("journalctl --no-pager --lines=25 --unit='trainer@*' --unit=tensorboard").stdout
    except RuntimeError as error:  # testinfra's word for a host that can't be reached
        return str(error)


pytest_runtest_makereport = adding_journals(journal)


@pytest.fixture
def _as_root(host: Host) -> Iterator[None]:
    with host.sudo():
        yield


@pytest.fixture(scope="session")
def truth() -> dict[str, Any]:
    return listed_inventory()


@pytest.fixture(scope="session")
def lab(truth: dict[str, Any]) -> dict[str, Host]:
    """Each host of the lab by its inventory name; commands run as the login user."""
    names = [name for group in TRAINING_GROUPS for name in truth[group]["hosts"]]
    return {name: testinfra.get_host(f"ansible://{name}") for name in dict.fromkeys(names)}


@dataclass
class Play:
    """What a run of ansible-playbook did."""

    code: int
    changed: list[tuple[str, str]]  # (host, task)
    failed: list[tuple[str, str]]  # (host, message)
    stats: dict[str, dict[str, int]]
    reached: Counter[str]  # by host: how many tasks were done there, and not on the control machine


# What they do is done by Ansible itself.
CONTROL = {"assert", "debug", "fail", "include_role", "include_tasks", "mark_unreachable", "meta", "set_fact",
           "validate_argument_spec"}  # fmt: skip


def play(*arguments: str, inventory: Path | None = None) -> Play:
    command = ["ansible-playbook", *(("--inventory", str(inventory)) if inventory else ()), *arguments]
    environment = os.environ | {
        "ANSIBLE_STDOUT_CALLBACK": "ansible.posix.json",
        "_ANSIBLE_TEMPLAR_UNTRUSTED_TEMPLATE_BEHAVIOR": "error",
    }
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    start = f"\n{done.stdout}".rfind("\n{\n")  # each playbook's report has those before it
    if start < 0:
        pytest.fail(f"{' '.join(command)} exited {done.returncode}:\n{done.stdout}\n{done.stderr}")
    output, _ = json.JSONDecoder().raw_decode(done.stdout[start:])  # hosts that are not right stand below
    results = [
        (host, task["task"]["name"].rpartition(" : ")[2], result)
        for one in output["plays"]
        for task in one["tasks"]
        for host, result in task["hosts"].items()
    ]
    return Play(
        done.returncode,
        [(host, name) for host, name, result in results if result.get("changed")],
        [(host, str(result.get("msg"))) for host, _, result in results if result.get("failed")],
        output["stats"],
        Counter(host for host, _, result in results if reaches(host, result)),
    )


def reaches(host: str, result: Mapping[str, Any]) -> bool:
    """Whether a task's result is of something that was done on its host."""
    elsewhere = host == "localhost" or "_ansible_delegated_vars" in result
    return not (elsewhere or result.get("skipped") or result["action"].rpartition(".")[2] in CONTROL)


def copy_inventory(copy: Path, run: dict[str, Any], release_program: str = "", **site: Any) -> Path:
    """Copy the lab's inventory to a new directory, with other run settings, and other variables."""
    shutil.copytree(ROOT / os.environ.get("PSFLEET_INVENTORY", "inventory/lab"), copy)
    variables = copy / "group_vars" / "all.yml"
    values = yaml.safe_load(variables.read_text()) | {"trainer_run": run, "release_program": release_program} | site
    variables.write_text(yaml.safe_dump(values))
    return copy


def give_second_task(inventory: Path) -> None:
    """Have worker-0 of a copied inventory run two tasks, which makes worker-1's task worker-2."""
    hosts = yaml.safe_load((inventory / "hosts.yml").read_text())
    hosts["worker"]["hosts"]["worker-0"]["worker_tasks"] = 2
    (inventory / "hosts.yml").write_text(yaml.safe_dump(hosts, sort_keys=False))


def give_group(inventory: Path, group: str, hosts: list[str]) -> None:
    """Put hosts of a copied inventory into a further group."""
    groups = yaml.safe_load((inventory / "hosts.yml").read_text())
    groups[group] = {"hosts": dict.fromkeys(hosts)}
    (inventory / "hosts.yml").write_text(yaml.safe_dump(groups, sort_keys=False))


@pytest.fixture(scope="session")
def long_inventory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The lab's inventory with the tests' own program, which trains for hours."""
    run = {"program": "slow:Slow", "run": LONG_RUN, "steps": 1_000_000, "checkpoint_seconds": 5, "log_seconds": 1}
    return copy_inventory(tmp_path_factory.mktemp("inventory") / "lab", run, "tests/infra/programs")


def fab(*arguments: str, inventory: Path | None = None, timeout: int = 900) -> subprocess.CompletedProcess[str]:
    environment = os.environ | ({"PSFLEET_INVENTORY": str(inventory)} if inventory else {})
    return subprocess.run(
        ["fab", *arguments], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=timeout
    )


@pytest.fixture(scope="session")
def long_run(long_inventory: Path, lab: dict[str, Host]) -> Iterator[Path]:
    """A training under way with the tests' own program; gives the inventory that it was started from."""
    with lab["head"].sudo():
        lab["head"].run_expect([0], f"rm -rf /srv/trainer/runs/{LONG_RUN}")
    # It ships code and settings, with the playbooks that site.yml runs too.
    started = fab("start-cluster", "--run", LONG_RUN, "--detach", inventory=long_inventory)
    assert started.returncode == 0, started.stdout + started.stderr
    for name in ("ps-0", "ps-1", "worker-0", "worker-1"):  # training may have begun without one that was slow
        with lab[name].sudo():
            wait_until(lambda name=name: lab[name].service(f"trainer@{name}").is_running, 180, f"{name} runs")
    yield long_inventory
    fab("stop-cluster")


def units(lab: dict[str, Host]) -> dict[str, str]:
    """The InvocationID of each task's unit: it changes when, and only when, systemd starts the task again."""
    found = {}
    for host in lab.values():
        with host.sudo():
            listed = host.check_output("systemctl show --property=Id,InvocationID 'trainer@*.service'")
        for block in filter(None, listed.split("\n\n")):  # a task that never ran is not listed
            values = dict(line.split("=", 1) for line in block.splitlines())
            found[values["Id"].removeprefix("trainer@").removesuffix(".service")] = values["InvocationID"]
    return found


def children(host: Host) -> dict[str, tuple[str, str]]:
    """The process that each task's supervisor has forked, and where that works; as root. Waits for one that forks."""
    script = (
        "for unit in $(systemctl list-units --plain --no-legend --state=active 'trainer@*' | cut -d' ' -f1); do "
        "pid=$(systemctl show --value --property=MainPID $unit); read child others </proc/$pid/task/$pid/children; "
        "echo $unit $child $(readlink /proc/$child/cwd); done"
    )

    def forked() -> tuple[list[list[str]]] | None:
        lines = [line.split() for line in host.check_output(script).splitlines()]
        return (lines,) if all(len(line) == 3 for line in lines) else None

    (lines,) = wait_until(forked, 60, "each active task has a process")
    return {unit.removeprefix("trainer@").removesuffix(".service"): (child, place) for unit, child, place in lines}


def status(lab: dict[str, Host]) -> dict[str, Any]:
    """The run's state as the trainer itself tells it, on the chief's host."""
    command = "cd /opt/trainer/current && env/bin/python -m trainer status --json --settings /etc/trainer/run.json"
    with lab["head"].sudo("trainer"):
        return json.loads(lab["head"].check_output(command))


def wait_for_progress(lab: dict[str, Host], seconds: float = 180) -> None:
    """Wait until a step is trained that was not trained when this was called."""
    before = status(lab)
    wait_until(
        lambda: (
            (now := status(lab))["state"] == "training"
            and now["updated"] > before["updated"]
            and (now["step"] or 0) > 0
            and now["step"] != before["step"]
        ),
        seconds,
        f"a further step than {before['step']}",
    )


def reboot(host: Host) -> None:
    started = "ps --pid 1 --format lstart="  # a container shares its machine's boot id
    before = answer(host, started)
    answer(host, "systemctl reboot")
    wait_until(lambda: answer(host, started) not in ("", before), 90, "the host is back")
    wait_until(lambda: answer(host, "systemctl is-system-running --wait") == "running", 90, "it is up")


def environment_of(host: Host, unit: str) -> dict[str, str]:
    """The environment of a unit's running process. `systemctl show` would not tell an EnvironmentFile's."""
    pid = host.check_output(f"systemctl show --value --property=MainPID {unit}")
    assert pid != "0", f"{unit} is not running"
    raw = host.check_output(f"cat /proc/{pid}/environ")
    return dict(entry.split("=", 1) for entry in raw.split("\0") if "=" in entry)


def expected_cluster(truth: dict[str, Any]) -> dict[str, list[str]]:
    """The cluster written down from the inventory by hand, for the lab's one task a host."""
    ports = {"chief": 2222, "ps": 2300, "worker": 2400}
    address = {name: values["ansible_host"] for name, values in truth["_meta"]["hostvars"].items()}
    return {job: [f"{address[name]}:{port}" for name in truth[job]["hosts"]] for job, port in ports.items()}


def check_task(host: Host, truth: dict[str, Any], job: str) -> None:
    """Assert what every training task's unit must be while the cluster runs."""
    index = truth[job]["hosts"].index(name_of(host))
    unit = f"trainer@{job}-{index}"
    service = host.service(unit)
    assert service.is_running
    assert service.is_enabled
    files = f"/etc/trainer/{job}-{index}.env /etc/trainer/run.json /etc/systemd/system/trainer@.service"
    assert set(host.check_output(f"stat --format='%U %G %a' {files}").splitlines()) == {"root root 644"}
    environment = environment_of(host, unit)
    assert json.loads(environment["TF_CONFIG"]) == {
        "cluster": expected_cluster(truth),
        "task": {"type": job, "index": index},
    }
    assert environment["TF_USE_LEGACY_KERAS"] == "1"
    pid = host.check_output(f"systemctl show --value --property=MainPID {unit}")
    assert host.check_output(f"ps -o user= -p {pid}") == "trainer"
    held = f"/proc/{pid}/root{environment.get('TMPDIR', '/tmp')}"  # the unit has such directories of its own
    assert host.check_output(f"stat --file-system --format=%T {held}") != "tmpfs"
    child, place = children(host)[f"{job}-{index}"]
    assert place == host.check_output("readlink -f /opt/trainer/current")
    if job != "evaluator":
        port = {"chief": 2222, "ps": 2300, "worker": 2400}[job]
        listening = host.check_output("ss --listening --tcp --numeric --processes --no-header")
        assert any(f":{port} " in line and f"pid={child}," in line for line in listening.splitlines()), listening
