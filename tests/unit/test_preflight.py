import datetime
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from fleet.site.preflight import preflight_problems
from fleet.site.preflight.notes import preflight_notes

ROOT = Path(__file__).parents[2]
ANSIBLE = "2.19.4"
RUN = {"program": "trainer.examples.digits:Digits"}
DAY = datetime.date(2024, 1, 1)
SERVICE = {"input": "service", "input_sharding": "dynamic"}
UUID = "GPU-8e0e2a41-30d1-4fa0-8a3c-4a1f0a3c1b11"
UNSHARED = {"cluster_shared_dir": ""}


def inventory(groups=None, **hosts):
    """A right inventory of four machines, with what a test says laid over it."""
    groups = {"chief": ["head"], "ps": ["ps-0"], "worker": ["worker-0", "worker-1"]} | (groups or {})
    names = dict.fromkeys(host for group in groups.values() for host in group)
    site = {"cluster_shared_dir": "/srv/trainer", "cluster_uid": 6006, "trainer_run": RUN}
    hostvars = {
        name: site | {"ansible_host": f"10.0.{3 + i // 200}.{10 + i % 200}"} | hosts.get(name.replace("-", "_"), {})
        for i, name in enumerate(names)
    }
    return groups | {"all": list(names)}, hostvars


def problems(groups=None, **hosts):
    return preflight_problems(*inventory(groups, **hosts), ANSIBLE)


def everywhere(**variables):
    return dict.fromkeys(("head", "ps_0", "worker_0", "worker_1"), variables)


def test_a_right_inventory_has_no_problems():
    assert problems() == []
    assert problems({"evaluator": ["head"], "tensorboard": ["head"]}, worker_0={"worker_tasks": 2}) == []


def test_an_empty_inventory_is_refused():
    (problem,) = preflight_problems({"all": [], "ungrouped": []}, {}, ANSIBLE)
    assert "no hosts" in problem


@pytest.mark.parametrize(
    ("groups", "hosts", "message"),
    [
        ({"chief": []}, {}, "group chief is empty; expected exactly one host"),
        ({"chief": ["head", "spare"]}, {}, "group chief has 2 (head, spare)"),
        ({}, {"head": {"chief_tasks": 2}}, "group chief has 2 (head, head)"),
        ({"evaluator": ["head", "worker-0"]}, {}, "group evaluator has 2 (head, worker-0)"),
        ({"ps": []}, {}, "group ps is empty; the strategy parameter_server needs"),
        ({"worker": []}, {}, "group worker is empty; the strategy parameter_server needs"),
        ({}, {"ps_0": {"ps_tasks": 0}}, "group ps is empty"),
        (
            {"workers": ["worker-2"]},
            {},
            "group 'workers' is none of psfleet's, and worker-2 would get nothing for it. Did you mean worker?",
        ),
        ({}, {"worker_1": {"ansible_host": None}}, "host 'worker-1' has ansible_host: None; expected an address"),
        ({}, {"worker_1": {"ansible_host": "10.0.3.11"}}, "the hosts ps-0, worker-1 have the same address 10.0.3.11"),
        ({"ps": ["ps-0", "worker-0"]}, {"worker_0": {"ps_port": 2400}}, "port 2400 on host 'worker-0' is taken twice"),
        ({"tensorboard": ["head"]}, {"head": {"tensorboard_port": 2222}}, "taken twice, by chief-0 and by tensorboard"),
        ({}, {"worker_0": {"worker_tasks": 3, "worker_port": 65534}}, "would listen on port 65536"),
        ({}, everywhere(cluster_shared_dir="data"), "cluster_shared_dir is 'data'; expected the absolute path"),
        ({}, everywhere(cluster_shared_dir="/mnt/my share"), "cluster_shared_dir is '/mnt/my share'"),
        ({}, everywhere(trainer_run=RUN | {"shared_dir": "/x"}), "trainer_run has shared_dir"),
        (
            {},
            everywhere(cluster_shared_dir="gs://bucket/x"),
            "(the run directory lies in a file system",
        ),
        ({}, everywhere(trainer_run=RUN | {"local_run_dir": True}), "trainer_run has local_run_dir"),
        ({}, everywhere(**UNSHARED, cluster_local_dir="data"), "cluster_local_dir is 'data'; expected the absolute"),
        ({"evaluator": ["head"]}, everywhere(**UNSHARED), "group evaluator has head, and cluster_shared_dir is empty"),
        ({"nfs_server": ["head"]}, everywhere(**UNSHARED), "group nfs_server has head, and cluster_shared_dir is"),
        ({"tensorboard": ["ps-0"]}, everywhere(**UNSHARED), "group tensorboard has ps-0, and cluster_shared_dir is"),
        (
            {"ps": []},
            everywhere(**UNSHARED, trainer_run=RUN | {"strategy": "multi_worker_mirrored"}),
            "local_run_dir: with strategy multi_worker_mirrored every member reads the run directory",
        ),
        ({"nfs_server": ["head"]}, {}, "cluster_nfs_dir is missing; expected the absolute path"),
        (
            {"nfs_server": ["head", "ps-0"]},
            everywhere(cluster_nfs_dir="/srv/nfs"),
            "group nfs_server has head, ps-0; expected one host, or none",
        ),
        ({"nfs_server": ["head"]}, everywhere(cluster_nfs_dir="/srv/trainer"), "cluster_nfs_dir is /srv/trainer, and"),
        ({"nfs_server": ["head"]}, everywhere(cluster_nfs_dir="/srv/trainer/nfs"), "neither in the other"),
        ({"nfs_server": ["head"]}, everywhere(cluster_nfs_dir="/srv/a", cluster_shared_dir="/srv/a/b"), "neither in"),
        (
            {"nfs_server": ["store"]},
            {"store": {"ansible_host": None, "cluster_nfs_dir": "/srv/nfs"}},
            "host 'store' has ansible_host: None",
        ),
        ({}, everywhere(cluster_uid="trainer"), "cluster_uid is 'trainer'; expected the user number"),
        ({}, everywhere(trainer_run=None), "trainer_run is None; expected the run settings"),
        ({}, everywhere(trainer_run=RUN | {"step": 10}), "did you mean 'steps'"),
        ({}, everywhere(port=8080), "did you mean ansible_port? Give a variable of your own another name"),
        ({}, {"worker_0": {"worker_tasks": "2"}}, "such as -e '{\"name\": 2}'"),
        ({}, everywhere(trainer_run=RUN | {"steps": "many"}), "steps"),
        ({}, everywhere(trainer_run=RUN | {"steps": "1e6"}), "'1e6'; YAML takes it for a text: write 1000000"),
        ({}, everywhere(trainer_run=RUN | {"checkpoint_seconds": "25e-1"}), "it for a text: write 2.5"),
        ({}, everywhere(trainer_run=RUN | {"steps": "25e-1"}), "write a whole number in digits alone"),
        (
            {},
            everywhere(trainer_run=RUN | {"run": DAY}),
            'the date 2024-01-01; YAML reads it so: write it in quotes, "2024',
        ),
        (
            {},
            everywhere(trainer_run=RUN | {"program_args": {"since": [DAY]}}),
            'since has the date 2024-01-01; expected what JSON can say: write it in quotes, "2024-01-01"',
        ),
        ({}, everywhere(release_lock=DAY), "release_lock is 2024-01-01; expected the path of lock files without"),
        ({}, everywhere(release_lock=DAY), "YAML reads it as a date; write it in quotes"),
        ({}, {"worker_0": {"worker_tasks": "02"}}, "write 2, without zeros before it"),
        ({}, {"ps_0": {"nvidia_driver_reboot": "no"}}, "write false without quotes, in an INI file False; -e makes"),
        ({}, {"ps_0": {"nvidia_driver_reboot": "Yes"}}, "write true without quotes, in an INI file True;"),
        ({}, everywhere(cluster_minimum={"ps": 0}), "cluster_minimum: ps is 0, and nothing is trained without any ps"),
        (
            {"data": ["head"]},
            everywhere(cluster_minimum={"data": 0}, trainer_run=RUN | SERVICE),
            "nothing is trained without any data",
        ),
        (
            {},
            {
                "ps_0": {"cluster_address": "10.0.9.9"},
                "worker_1": {"ansible_host": "10.0.9.9", "cluster_address": "10.0.9.8"},
            },
            "the hosts ps-0, worker-1 are reached at the same address and port (10.0.9.9:22)",
        ),
        (
            {"gpu": ["worker-0", "worker-1"]},
            {"worker_0": {"gpu_devices": [UUID]}, "worker_1": {"gpu_devices": [UUID]}},
            f"the hosts worker-0, worker-1 both have {UUID} in gpu_devices",
        ),
        (
            {"gpu": ["worker-0", "worker-1"]},
            everywhere(gpu_count=1, nvidia_driver_branch="580", nvidia_driver_version="575.57.08"),
            "host 'worker-0' has nvidia_driver_version: 575.57.08, and nvidia_driver_branch: 580; expected a",
        ),
        (
            {"nfs_server": ["head"]},
            everywhere(cluster_nfs_dir="/srv/nfs") | {"ps_0": {"cluster_nfs_dir": "/srv/nfs", "nfs_client_port": 2050}},
            "host 'ps-0': nfs_client_port is 2050, and the host in nfs_server serves on 2049",
        ),
        ({}, {"ps_0": {"ansible_host": "169.254.7.7"}}, "a link-local address holds on one link"),
        ({}, everywhere(nfs_client_options="vers=4.2,soft,timeo=9"), "may be lost in silence; write hard"),
        (
            {},
            {"ps_0": {"ansible_ssh_common_args": "-AJ bastion"}},
            "-J changes the way to the host: put it into ~/.ssh",
        ),
        ({}, {"ps_0": {"ansible_ssh_common_args": "-Z"}}, "ssh would refuse it: option -Z not recognized"),
        (
            {},
            {"ps_0": {"ansible_ssh_args": "-C"}},
            "ansible_ssh_args can't be set (host 'ps-0'): what stands there would",
        ),
        ({}, {"ps_0": {"ansible_password": "x"}}, "fab logs in with keys alone. Put a key on the hosts"),
        ({}, {"ps_0": {"ansible_become_pass": "x"}}, "fab's sudo gives no password. Let the login have sudo without"),
        ({}, {"ps_0": {"ansible_become_method": "su"}}, "expected sudo, which is how fab becomes root"),
        (
            {},
            {"ps_0": {"ansible_connection": "paramiko"}},
            "expected ssh, which is how fab reaches every host",
        ),
        (
            {"worker": []},
            everywhere(trainer_run=RUN | {"strategy": "multi_worker_mirrored"}),
            "group worker is empty; the strategy multi_worker_mirrored needs",
        ),
    ],
)
def test_a_wrong_inventory_is_refused_by_value(groups, hosts, message):
    found = problems(groups, **hosts)
    assert any(message.lower() in problem.lower() for problem in found), found


@pytest.mark.parametrize(
    ("strategy", "idle"),
    [
        ("multi_worker_mirrored", {"ps": []}),
        ("mirrored", {"ps": [], "worker": []}),
        ("one_device", {"ps": [], "worker": []}),
        ("central_storage", {"ps": [], "worker": []}),
    ],
)
def test_jobs_that_a_strategy_lacks_are_not_required(strategy, idle):
    assert problems(idle, **everywhere(trainer_run=RUN | {"strategy": strategy})) == []


def test_an_unknown_strategy_is_told_once():
    (problem,) = problems(**everywhere(trainer_run=RUN | {"strategy": "tpu"}))
    assert problem.startswith("trainer_run: strategy: must be one of parameter_server")


def notes(groups=None, **run):
    return preflight_notes(*inventory(groups, **everywhere(trainer_run=RUN | run)))


def test_no_shared_path_is_right_and_noted():
    board = {"tensorboard": ["head"]}
    assert problems(board, **everywhere(**UNSHARED)) == []
    alone, nobody = preflight_notes(*inventory(board, **everywhere(**UNSHARED)))
    assert "the runs lie on the disk of head alone, in /var/lib/trainer/local" in alone
    assert nobody.endswith("Let the coordinator do it with trainer_run: {evaluation: inline}")


def test_hosts_without_a_group_are_noted_and_the_control_machine_is_not():
    groups, hostvars = inventory({"evaluator": ["head"]})
    assert preflight_notes(groups | {"ungrouped": ["localhost"]}, hostvars) == []
    assert preflight_notes(groups | {"ungrouped": ["spare-0", "localhost", "spare-1"]}, hostvars) == [
        "hosts spare-0, spare-1: in no group, so psfleet does nothing with them"
    ]


def test_hosts_with_one_address_are_one_problem():
    (problem,) = problems(
        {"worker": [f"worker-{i}" for i in range(40)]},
        **{f"worker_{i}": {"ansible_host": "10.9.9.9"} for i in range(40)},
    )
    assert (
        problem
        == "the hosts worker-0, worker-1, worker-2 and 37 more have the same address 10.9.9.9; expected one each"
    )


def test_a_group_that_the_strategy_has_no_use_for_is_noted():
    evaluator = {"evaluator": ["head"]}
    assert notes(evaluator) == []
    assert notes(evaluator, strategy="multi_worker_mirrored") == [
        "group ps (ps-0) is unused: the strategy multi_worker_mirrored has no ps"
    ]
    assert [note.split()[1] for note in notes(evaluator, strategy="one_device")] == ["ps", "worker"]


def test_a_gpu_that_no_task_uses_is_noted():
    gpus = {"evaluator": ["head"], "gpu": ["worker-0", "ps-0"]}
    assert notes(gpus) == ["ps-0 is in the group gpu and has no task that computes: its GPU is not used"]


@pytest.mark.parametrize(
    ("run", "needs"),
    [
        ({}, None),
        ({"strategy": "multi_worker_mirrored"}, "multi_worker_mirrored"),
        ({"elastic": False}, "elastic: false"),
    ],
)
def test_a_vacant_place_is_noted_or_refused_where_every_member_is_needed(run, needs):
    settings = everywhere(trainer_run=RUN | run)
    hosts = settings | {"worker_0": settings["worker_0"] | {"worker_index": 0}}
    hosts |= {"worker_1": settings["worker_1"] | {"worker_index": 2}}
    found = problems(**hosts)
    if needs is None:
        assert found == []
    else:
        assert "no host is worker-1, and " in found[0]
        assert needs in found[0]
    notes = preflight_notes(*inventory(**hosts))
    assert "no host is worker-1: the training goes on without, until a new machine has that index" in notes


@pytest.mark.parametrize(("index", "refused"), [(20, False), (500, True), (9999, True)])
def test_an_index_far_beyond_the_others_is_refused_by_its_host(index, refused):
    settings = everywhere(trainer_run=RUN)
    hosts = settings | {"worker_0": settings["worker_0"] | {"worker_index": 0}}
    hosts |= {"worker_1": settings["worker_1"] | {"worker_index": index}}
    text = f"worker-{index} on 'worker-1' has the highest worker_index, and of the places below {index - 1} are vacant"
    assert any(text in problem for problem in problems(**hosts)) is refused


def test_an_evaluator_that_evaluates_nothing_is_noted():
    (note,) = notes({"evaluator": ["head"]}, evaluation="inline")
    assert note == "group evaluator (head) is unused: it evaluates with evaluation: sidecar, and this is inline"
    assert notes(evaluation="inline") == []


def test_the_data_service_needs_its_group():
    (problem,) = problems(**everywhere(trainer_run=RUN | SERVICE))
    assert problem.startswith("group data is empty, and trainer_run has input: service; expected at least one host")
    assert problems({"data": ["worker-1"]}, **everywhere(trainer_run=RUN | SERVICE)) == []


def test_a_group_data_that_reads_nothing_is_noted():
    groups = {"data": ["worker-1"], "evaluator": ["head"]}
    (note,) = notes(groups)
    assert note.startswith("group data (worker-1) is unused: it reads with trainer_run: {input: service}")
    assert notes(groups, **SERVICE) == []


@pytest.mark.parametrize(
    ("groups", "hosts"),
    [
        ({}, everywhere(cluster_minimum={"evaluator": 0, "data": 0})),
        ({"ps": []}, everywhere(cluster_minimum={"ps": 0}, trainer_run=RUN | {"strategy": "multi_worker_mirrored"})),
        # Behind one address with a port each, and where a host's own address is written twice.
        ({}, {"ps_0": {"ansible_host": "10.0.8.8", "ansible_port": 2201, "cluster_address": "10.0.9.1"},
              "worker_0": {"ansible_host": "10.0.8.8", "ansible_port": 2202, "cluster_address": "10.0.9.2"},
              "worker_1": {"ansible_host": "10.0.8.8", "cluster_address": "10.0.8.8"}}),
        ({}, everywhere(common_time_servers=["169.254.169.123"])),
        ({}, everywhere(nfs_client_port=20049)),
        ({}, everywhere(nfs_client_options="vers=4.2,hard,softreval")),
        ({}, {"ps_0": {"ansible_ssh_common_args": "-4 -C -o StrictHostKeyChecking=accept-new -vv"}}),
        ({"gpu": ["worker-0", "worker-1"]}, everywhere(gpu_count=1, nvidia_driver_branch="580",
                                                       nvidia_driver_version="580.95.05")),
        ({}, {"ps_0": {"ansible_become_method": "sudo", "ansible_connection": "ssh"}}),
    ],
)  # fmt: skip
def test_what_is_right_and_unusual_is_right(groups, hosts):
    assert problems(groups, **hosts) == []


def test_a_host_that_is_none_of_psfleets_may_have_a_password():
    groups, hostvars = inventory({"bastion": ["door"]}, **everywhere(cluster_own_groups=["bastion"]))
    hostvars["door"] |= {"ansible_password": "x", "ansible_ssh_args": "-C", "user": "x"}
    assert preflight_problems(groups, hostvars, ANSIBLE) == []


def test_own_variables_may_begin_with_data():
    assert problems(**everywhere(data_dir="/mnt/data", data_path="images")) == []
    (problem,) = problems(worker_0={"data_task": 2})
    assert "data_task" in problem


@pytest.mark.parametrize(("port", "of"), [("dispatcher_port", "chief-0 and by dispatcher-0"), ("data_port", "data-0")])
def test_the_data_services_ports_are_free_of_others(port, of):
    values = everywhere(trainer_run=RUN | SERVICE, **{port: 2222 if port == "dispatcher_port" else 2400})
    found = problems({"data": ["worker-0"]}, **values)
    assert any("is taken twice" in problem and of in problem and port in problem for problem in found)


def test_a_training_that_nobody_evaluates_is_noted():
    (note,) = notes()
    assert "nothing is evaluated: evaluation is sidecar and the group evaluator is empty" in note
    assert notes(evaluation="none") == []


def test_all_problems_are_named_at_once():
    found = problems({"chief": [], "ps": []}, worker_0={"worker_port": 0})
    assert len(found) == 3, found


def test_an_environment_too_large_is_refused():
    many = [f"worker-{i}" for i in range(8000)]
    (problem,) = problems({"worker": many})
    assert "TF_CONFIG for 8002 tasks is" in problem
    assert "131,071" in problem


@pytest.mark.parametrize("version", ["2.16.3", "2.21.0"])
def test_another_ansible_is_refused(version):
    (problem,) = preflight_problems(*inventory(), version)
    assert f"this is ansible-core {version}" in problem


def test_a_missing_command_is_named(monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert [p for p in problems() if "no `rsync`" in p]


@pytest.mark.parametrize("name", ["lab", "three-machines", "gpu-example"])
def test_the_inventories_that_we_ship_are_right(name):
    assert problems_of(ROOT / "inventory" / name) == []


@pytest.mark.parametrize(("page", "number"), [("README.md", 0), ("docs/from-other-setups.md", 0)])
def test_the_inventories_of_the_pages_are_right(tmp_path, page, number):
    blocks = re.findall(r"```yaml\n# inventory/(?:\w+/)?hosts.yml\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)
    if page == "README.md":  # it lays its hosts over a copy of these
        shutil.copytree(ROOT / "inventory/three-machines/group_vars", tmp_path / "group_vars")
    (tmp_path / "hosts.yml").write_text(blocks[number])
    assert problems_of(tmp_path) == []


def problems_of(path):
    command = ["ansible-inventory", "--inventory", path, "--list"]
    listed = json.loads(subprocess.run(command, check=True, capture_output=True, cwd=ROOT).stdout)
    hostvars = listed.pop("_meta")["hostvars"]
    groups = {group: content.get("hosts", []) for group, content in listed.items()} | {"all": list(hostvars)}
    return preflight_problems(groups, hostvars, ANSIBLE)


@pytest.mark.parametrize(
    ("run", "site", "message"),
    [
        ({"notify_webhook": "http://198.51.100.7:9/x"}, {}, "as in firewall_egress: [198.51.100.7/32]"),
        ({"notify_webhook": "http://198.51.100.7/x"}, {"firewall_egress": ["192.0.2.0/24"]}, "does not reach"),
        ({"notify_webhook": "http://[2001:db8::1]/x"}, {}, "as in firewall_egress: [2001:db8::1/128]"),
        ({"notify_webhook": "https://hooks.example.org/x"}, {}, "notify_webhook names hooks.example.org, and"),
        ({"notify_webhook_secret": "HOOK"}, {}, "notify_webhook_secret is HOOK, and firewall_egress of head is empty"),
        ({"notify_webhook": "http://198.51.100.7/x"}, {"firewall_egress": ["198.51.100.0/24"]}, None),
        ({"notify_webhook": "http://198.51.100.7/x"}, {"firewall_closes": "none"}, None),
        ({"notify_webhook": "http://127.0.0.1/x"}, {}, None),
        ({"notify_webhook": "https://hooks.example.org/x"}, {"firewall_egress": ["198.51.100.0/24"]}, None),
        ({"notify_webhook_secret": "HOOK"}, {"firewall_egress": ["any"]}, None),
        ({"notify_command": "/usr/local/bin/page"}, {}, None),
    ],
)
def test_a_webhook_that_the_list_of_addresses_shuts_off_is_noted(
    run: dict[str, str], site: dict[str, object], message: str | None
) -> None:
    run = {"evaluation": "none"} | run
    found = preflight_notes(*inventory(**everywhere(trainer_run=RUN | run, **site)))
    assert len(found) == (message is not None)
    assert message is None or message in found[0]
