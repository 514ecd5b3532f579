"""Which hosts and which tags site.yml's phases have, as Ansible lists them."""

from __future__ import annotations

import functools
import os
import re
import subprocess
import sys
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {**os.environ, "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg")}
PREFLIGHT = "localhost:chief:ps:worker:evaluator:data:tensorboard:nfs_server:gpu:prometheus:alertmanager"


@functools.cache
def listed(inventory: Path, *arguments: str) -> str:
    command = ["ansible-playbook", "--inventory", inventory, "site.yml", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout


def test_no_play_names_a_host_that_is_in_no_group_of_ours(tmp_path: Path) -> None:
    inventory = yaml.safe_load((ROOT / "inventory/lab/hosts.yml").read_text())
    inventory["bastions"] = {"hosts": {"bastion": {"ansible_host": "127.0.0.1"}}}
    (tmp_path / "hosts.yml").write_text(yaml.safe_dump(inventory))
    output = listed(tmp_path / "hosts.yml", "--list-hosts")
    assert output.count("      worker-0\n") >= 6
    assert "      bastion\n" not in output


def test_tags_are_the_roles_names() -> None:
    tags = re.findall(r"TASK TAGS: \[(.*)\]", listed(ROOT / "inventory/lab", "--list-tags"))
    found = {tag for line in tags for tag in line.split(", ")} - {""}
    # reset.yml alone has the role that takes psfleet away.
    assert found == {role.name for role in (ROOT / "roles").iterdir()} - {"reset"} | {"always"}


def test_hosts_are_looked_at_first_whatever_the_tags_are() -> None:
    """Else a part of site.yml would change a host of another cluster."""
    plays = (
        "Look at every machine",
        "Make every machine",
        "Serve the shared",
        "Configure the training",
        "Serve TensorBoard",
    )
    for tags in ("common", "trainer", "tensorboard"):
        output = listed(ROOT / "inventory/lab", "--list-tasks", "--tags", tags)
        assert "host_check : Refuse what would stop the training" in output, tags
        found = [output.index(play) for play in plays if play in output]
        assert found[0] == min(found)


def test_never_do_all_hosts_load_a_driver_at_once() -> None:
    """No GPU host is rebooted here without a GPU: `tests/infra/test_planned_reboot.py` has the batches on hosts."""
    plays = yaml.safe_load((ROOT / "ansible/gpu.yml").read_text())
    (play,) = [play for play in plays if "by a reboot" in play["name"]]
    assert play["serial"] == play["vars"]["reboot_batch"] == "{{ gpu_batch | default('25%') }}"
    others = [task for each in plays if each is not play for task in each.get("tasks", ())]
    assert "nvidia_driver_reboot_tasks" in str(play)
    assert "nvidia_driver_reboot_tasks" not in str(others)


def test_a_tasks_new_port_never_comes_without_its_table() -> None:
    plays = re.findall(
        r"play #\d+ \(.*?\): (.*?)\t", listed(ROOT / "inventory/lab", "--list-tags", "--tags", "trainer")
    )
    output = listed(ROOT / "inventory/lab", "--list-tasks", "--tags", "trainer")
    assert plays.index("Close the hosts to strangers") < plays.index("Configure the training tasks")
    assert "firewall : Close the host to strangers, or open it again" in output


def test_each_host_that_is_watched_is_closed_and_has_the_address_where_it_is_asked(tmp_path: Path) -> None:
    """The node exporter asks nobody for a password, and with encryption listens in the tunnel alone."""
    inventory = yaml.safe_load((ROOT / "inventory/lab/hosts.yml").read_text())
    more = {name: {"hosts": {name: {"ansible_host": "127.0.0.1"}}} for name in ("gpu", "prometheus")}
    (tmp_path / "hosts.yml").write_text(yaml.safe_dump({**inventory, **more}))
    output = listed(tmp_path / "hosts.yml", "--list-hosts")
    found = re.findall(r"play #\d+ \(.*?\): (.*?)\t.*\n    pattern: .*\n    hosts \(\d+\):\n((?:      .*\n)*)", output)
    hosts = {play: set(names.split()) for play, names in found}
    assert "gpu" in hosts["Tell of every host"]
    for play in ("Close the hosts to strangers", "Encrypt what the hosts say to one another"):
        assert hosts[play] == hosts["Tell of every host"], play


def test_the_phase_of_few_hosts_is_the_last_and_is_one() -> None:
    """A play that loses all of its hosts ends the run for the others too: also for what other hosts serve."""
    plays = re.findall(r"play #\d+ \((.*?)\)", listed(ROOT / "inventory/lab", "--list-hosts"))
    serving = [play for play in plays if "tensorboard" in play or "alertmanager" in play]
    assert [play for play in serving if "worker" not in play] == plays[-1:] == ["alertmanager:prometheus:tensorboard"]


def test_each_play_computes_the_same_spec() -> None:
    """Without preflight's fact, which --start-at-task leaves out."""
    plays = [play for path in (ROOT / "ansible").glob("*.yml") for play in yaml.safe_load(path.read_text())]
    needing = [play for play in plays if isinstance(play, dict) and "psfleet_spec" in str(play.get("roles", play))]
    given = [play["vars"]["psfleet_spec"] for play in needing if play["hosts"] != PREFLIGHT]
    assert len(given) > 5
    assert set(given) == {"{{ groups | cluster_spec(hostvars) }}"}


def test_a_host_is_asked_for_its_facts_once() -> None:
    """A later play takes what an earlier one has asked for: so all ask for the same, or say that they need none."""
    plays = [play for path in (ROOT / "ansible").glob("*.yml") for play in yaml.safe_load(path.read_text())]
    plays = [play for play in plays if isinstance(play, dict) and "hosts" in play]
    assert len(plays) > 20
    asking = [play for play in plays if play["gather_facts"]]
    assert len({tuple(play["gather_subset"]) for play in asking}) == 1
    assert "gathering = smart" in (ROOT / "ansible.cfg").read_text()


def test_no_host_evaluates_for_itself_what_asks_every_host() -> None:
    """It would cost the square of the hosts: Ansible evaluates also what stands in a branch that is not taken."""
    for role in [*(ROOT / "roles").iterdir(), ROOT / "ansible"]:
        values: dict[str, str] = {}
        for path in role.glob("vars/*.yml"):
            values |= {name: str(value) for name, value in (yaml.safe_load(path.read_text()) or {}).items()}
        asking = {name for name, value in values.items() if "'extract', hostvars" in value}
        while more := {name for name, value in values.items() if names_one_of(asking, value)} - asking:
            asking |= more
        if role.name == "release":
            assert asking == {
                *("__release_cpu_pythons", "__release_gpu_pythons", "__release_wheel_sets"),
                *("__release_fetch_sets", "__release_sets_ahead", "__release_sets_locked"),
            }
        tasks = [task for path in role.glob("tasks/*.yml") for task in yaml.safe_load(path.read_text())]
        for task in tasks:
            if "'extract', hostvars" in str(task) or names_one_of(asking, str(task)):
                assert task.get("run_once") is True, f"{role.name}: {task['name']}"
        naming = [task["name"] for task in tasks if "__release_wheel_sets" in str(task)]
        assert naming in ([], ["Choose who puts the wheels on the shared path, and which"])


def names_one_of(names: set[str], text: str) -> bool:
    return any(re.search(rf"\b{name}\b", text) for name in names)


def test_a_run_that_begins_at_the_proof_is_refused_with_the_task_to_begin_at(tmp_path: Path) -> None:
    here = {"ansible_connection": "local", "ansible_python_interpreter": sys.executable}
    (tmp_path / "hosts.yml").write_text(yaml.safe_dump({"chief": {"hosts": {"here": here}}}))
    arguments = ["--check", "--tags", "release", "--start-at-task", "Prove the release"]
    command = ["ansible-playbook", "--inventory", tmp_path / "hosts.yml", ROOT / "site.yml", *arguments]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=ENVIRONMENT, check=False)
    assert done.returncode == 2, done.stdout
    assert "Begin at its task: --start-at-task 'Build the release on the control machine'" in done.stdout
    tasks = yaml.safe_load((ROOT / "roles/release/tasks/build.yml").read_text())
    assert tasks[0]["name"] == "Build the release on the control machine"
