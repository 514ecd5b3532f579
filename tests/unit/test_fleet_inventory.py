"""The inventory as the operator's verbs read it."""

from pathlib import Path

import pytest

from fleet.errors import OperatorMistake
from fleet.site.inventory import Inventory, load_inventory
from trainer.core.settings.config import Config

SMALL = """
chief:
  hosts:
    head: {ansible_host: 192.0.2.10}
evaluator:
  hosts:
    head:
tensorboard:
  hosts:
    head:
ps:
  hosts:
    store-b: {ansible_host: 192.0.2.21}
    store-a: {ansible_host: 192.0.2.20}
worker:
  hosts:
    store-b:
    zeta: {ansible_host: 192.0.2.40, worker_tasks: 2}
    alpha: {ansible_host: 192.0.2.30}
all:
  vars:
    ansible_user: admin
    cluster_shared_dir: /srv/trainer
"""


def load(path: Path, text: str = SMALL) -> Inventory:
    (path / "hosts.yml").write_text(text)
    return load_inventory(str(path))


def test_tasks_follow_the_order_as_written_and_the_tasks_of_a_host(tmp_path: Path) -> None:
    found = load(tmp_path)
    assert [(task.name, task.host) for task in found.tasks] == [
        ("chief-0", "head"),
        ("ps-0", "store-b"),
        ("ps-1", "store-a"),
        ("worker-0", "store-b"),
        ("worker-1", "zeta"),
        ("worker-2", "zeta"),
        ("worker-3", "alpha"),
        ("evaluator-0", "head"),
    ]


def test_two_tasks_of_a_job_on_a_host_have_two_ports(tmp_path: Path) -> None:
    first, second = load(tmp_path).tasks_on("zeta")
    assert first.port is not None
    assert second.port == first.port + 1


def test_host_in_many_groups_is_one_host_with_many_tasks(tmp_path: Path) -> None:
    found = load(tmp_path)
    assert [task.unit for task in found.tasks_on("store-b")] == ["trainer@ps-0.service", "trainer@worker-0.service"]
    assert list(found.hosts) == ["head", "store-b", "store-a", "zeta", "alpha"]


def test_host_without_a_task_is_not_asked(tmp_path: Path) -> None:
    found = load(tmp_path, SMALL + "nfs_server:\n  hosts:\n    files: {ansible_host: 192.0.2.50}\n")
    assert "files" not in found.hosts


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (SMALL.replace("chief:\n", "chiefs:\n"), "group 'chief' has no task"),
        (SMALL.replace("{ansible_host: 192.0.2.30}", "{}"), "host 'alpha' has no address"),
        (SMALL.replace("worker_tasks: 2", "worker_tasks: two"), "worker_tasks"),
        ("chief: [", "can't be read"),
    ],
)
def test_wrong_inventory_is_the_operators_mistake(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(OperatorMistake, match=message) as caught:
        load(tmp_path, text)
    assert caught.value.code == 2


def test_cluster_without_servers_can_be_looked_at_but_not_started(tmp_path: Path) -> None:
    found = load(tmp_path, SMALL.replace("ps:\n", "stores:\n"))
    assert "ps" not in {task.job for task in found.tasks}
    with pytest.raises(OperatorMistake, match="group ps is empty"):
        load_inventory(found.source, check=True)


def test_run_and_steps_are_the_run_settings_or_their_defaults(tmp_path: Path) -> None:
    found = load(tmp_path, SMALL + "    trainer_run: {program: 'a.b:C', run: digits, steps: 7}\n")
    assert (found.run_name, found.steps) == ("digits", 7)
    found = load(tmp_path, SMALL + "    trainer_run: {program: 'a.b:C'}\n")
    assert (found.run_name, found.steps) == (Config.run, Config.steps)


def test_environment_names_the_inventory_unless_the_flag_does(tmp_path: Path) -> None:
    (tmp_path / "hosts.yml").write_text(SMALL)
    environment = {"PSFLEET_INVENTORY": str(tmp_path)}
    assert load_inventory(None, environment).source == str(tmp_path)
    with pytest.raises(OperatorMistake, match="--inventory"):
        load_inventory("nowhere", environment)
    with pytest.raises(OperatorMistake, match="PSFLEET_INVENTORY"):
        load_inventory(None, {"PSFLEET_INVENTORY": "nowhere"})


def test_ssh_settings_come_rendered_from_the_variables(tmp_path: Path) -> None:
    (tmp_path / "id").touch()
    lines = [
        "key_name: id",
        "ansible_port: 2022",
        f"ansible_ssh_private_key_file: '{tmp_path}/{{{{ key_name }}}}'",
        "unrelated: '{{ only_a_playbook_knows }}'",
    ]
    found = load(tmp_path, SMALL + "".join(f"    {line}\n" for line in lines))
    host = found.hosts["head"]
    assert (host.user, host.port, host.key_file) == ("admin", 2022, tmp_path / "id")
    assert type(host.user) is str


def test_key_path_is_relative_to_the_project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fleet.places._folder", lambda *_: tmp_path)
    (tmp_path / "keys").mkdir()
    (tmp_path / "keys" / "id").touch()
    host = load(tmp_path, SMALL + "    ansible_ssh_private_key_file: keys/id\n").hosts["head"]
    assert host.key_file == tmp_path / "keys" / "id"


def test_missing_key_is_named(tmp_path: Path) -> None:
    with pytest.raises(OperatorMistake, match="ansible_ssh_private_key_file: keys/none"):
        load(tmp_path, SMALL + "    ansible_ssh_private_key_file: keys/none\n")


def test_host_keys_are_verified_unless_the_inventory_says_no(tmp_path: Path) -> None:
    assert "stricthostkeychecking" not in load(tmp_path).hosts["head"].ssh_options
    args = "    ansible_ssh_common_args: -o StrictHostKeyChecking=no -oUserKnownHostsFile=/dev/null -C\n"
    assert load(tmp_path, SMALL + args).hosts["head"].ssh_options == {
        "stricthostkeychecking": "no",
        "userknownhostsfile": "/dev/null",
    }
    assert load(tmp_path, SMALL + "    ansible_host_key_checking: false\n").hosts["head"].ssh_options == {
        "stricthostkeychecking": "no"
    }


@pytest.mark.parametrize("args", ["-J bastion", "-o ProxyJump=bastion", "-o ProxyCommand='ssh -W %h:%p bastion'"])
def test_jump_host_outside_ssh_config_is_refused(tmp_path: Path, args: str) -> None:
    with pytest.raises(OperatorMistake, match=r"~/\.ssh/config"):
        load(tmp_path, SMALL + f'    ansible_ssh_common_args: "{args}"\n')


def test_host_that_ssh_does_not_reach_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OperatorMistake, match="ansible_connection: local"):
        load(tmp_path, SMALL + "    ansible_connection: local\n")


def test_shared_dir_must_be_an_absolute_path(tmp_path: Path) -> None:
    assert load(tmp_path).shared_dir == "/srv/trainer"
    with pytest.raises(OperatorMistake, match="cluster_shared_dir is None"):
        _ = load(tmp_path, SMALL.replace("cluster_shared_dir", "shared")).shared_dir


def test_without_a_shared_path_the_runs_lie_in_the_chiefs_own_directory(tmp_path: Path) -> None:
    alone = SMALL.replace("cluster_shared_dir: /srv/trainer", 'cluster_shared_dir: ""')
    assert (load(tmp_path).is_shared, load(tmp_path, alone).is_shared) == (True, False)
    assert load(tmp_path, alone).shared_dir == "/var/lib/trainer/local"
    assert load(tmp_path, alone + "    cluster_local_dir: /data/trainer\n").shared_dir == "/data/trainer"


def test_tensorboard_address_has_the_inventorys_port(tmp_path: Path) -> None:
    assert load(tmp_path, SMALL + "    tensorboard_port: 7007\n").tensorboard_url == "http://192.0.2.10:7007"
    assert load(tmp_path, SMALL.replace("tensorboard:", "unused:")).tensorboard_url is None


def test_unknown_task_is_answered_with_those_there_are(tmp_path: Path) -> None:
    with pytest.raises(OperatorMistake, match=r"no task 'worker-9'.*worker-3"):
        load(tmp_path).task("worker-9")
