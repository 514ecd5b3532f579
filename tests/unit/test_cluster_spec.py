import json

import pytest

from fleet.site.members import ClusterSpecError
from fleet.site.monitoring import scrape_targets
from fleet.site.topology import cluster_spec, host_tasks, metrics_targets

LAB = {
    "chief": ["head"],
    "evaluator": ["head"],
    "tensorboard": ["head"],
    "ps": ["ps-0", "ps-1"],
    "worker": ["worker-0", "worker-1"],
}


def addresses(groups, **run):
    """Variables of the groups' hosts: an address each, and the run settings."""
    hosts = sorted({host for group in groups.values() for host in group})
    return {host: {"ansible_host": f"10.0.3.{10 + i}", "trainer_run": run} for i, host in enumerate(hosts)}


def test_cluster_has_jobs_in_the_order_written_and_no_evaluator():
    groups = {"worker": ["b", "a"], "ps": ["c"], "chief": ["d"], "evaluator": ["d"]}
    spec = cluster_spec(groups, addresses(groups))
    assert spec["cluster"] == {
        "chief": ["10.0.3.13:2222"],
        "ps": ["10.0.3.12:2300"],
        "worker": ["10.0.3.11:2400", "10.0.3.10:2400"],
    }
    assert [task["name"] for task in spec["tasks"]] == ["chief-0", "ps-0", "worker-0", "worker-1", "evaluator-0"]
    assert spec["tasks"][-1]["port"] is None


SERVICE = {"input": "service", "input_sharding": "dynamic"}


def test_the_data_service_has_its_dispatcher_on_the_chiefs_host():
    groups = LAB | {"data": ["worker-1", "data-1"]}
    hostvars = addresses(groups, **SERVICE)
    spec = cluster_spec(groups, hostvars)
    tasks = {task["name"]: (task["host"], task["port"], task["server"]) for task in spec["tasks"]}
    assert tasks["dispatcher-0"] == ("head", 2500, True)
    assert (tasks["data-0"], tasks["data-1"]) == (("worker-1", 2600, True), ("data-1", 2600, True))
    assert [spec["cluster"][job] for job in ("dispatcher", "data")] == [
        [f"{hostvars['head']['ansible_host']}:2500"],
        [f"{hostvars[host]['ansible_host']}:2600" for host in groups["data"]],
    ]
    assert "data-1" in spec["hosts"]
    alone = cluster_spec(groups, addresses(groups, strategy="one_device", **SERVICE))
    assert {task["name"]: task["port"] for task in alone["tasks"]} == {
        "chief-0": None,
        "evaluator-0": None,
        "dispatcher-0": 2500,
        "data-0": 2600,
        "data-1": 2600,
    }


def test_a_chiefs_host_that_stands_by_has_no_dispatcher():
    groups = LAB | {"chief": ["old", "head"], "data": ["data-1"]}
    hostvars = addresses(groups, **SERVICE)
    hostvars["old"]["chief_tasks"] = 0
    spec = cluster_spec(groups, hostvars)
    assert [task["host"] for task in spec["tasks"] if task["job"] == "dispatcher"] == ["head"]
    assert len(spec["cluster"]["dispatcher"]) == 1


def test_a_group_data_without_the_setting_has_no_task():
    groups = LAB | {"data": ["worker-1"]}
    spec = cluster_spec(groups, addresses(groups))
    assert not {"dispatcher", "data"} & {*spec["cluster"], *(task["job"] for task in spec["tasks"])}


def test_storage_is_the_shared_path_or_each_hosts_own_directory():
    def storage(**site):
        return cluster_spec(LAB, {host: values | site for host, values in addresses(LAB).items()})["storage"]

    shared = {"path": "/srv/t", "shared": True, "settings": {"shared_dir": "/srv/t"}}
    assert storage(cluster_shared_dir="/srv/t") == shared
    assert storage(cluster_shared_dir="/srv/t", cluster_local_dir="/data") == shared
    own = {"path": "/data", "shared": False, "settings": {"shared_dir": "/data", "local_run_dir": True}}
    assert storage(cluster_shared_dir="", cluster_local_dir="/data") == own
    assert storage(cluster_shared_dir="")["path"] == "/var/lib/trainer/local"


def test_index_counts_all_tasks_of_a_job():
    hostvars = addresses(LAB) | {"worker-0": {"ansible_host": "10.0.3.30", "worker_tasks": 2, "worker_port": 5000}}
    spec = cluster_spec(LAB, hostvars)
    assert [(t["name"], t["host"], t["port"]) for t in spec["tasks"] if t["job"] == "worker"] == [
        ("worker-0", "worker-0", 5000),
        ("worker-1", "worker-0", 5001),
        ("worker-2", "worker-1", 2400),
    ]


def numbered(**indices):
    """The lab's variables with a worker_index for each host named; None leaves it out."""
    hostvars = addresses(LAB | {"worker": list(indices)})
    return LAB | {"worker": list(indices)}, {
        host: variables | ({} if indices.get(host) is None else {"worker_index": indices[host]})
        for host, variables in hostvars.items()
    }


def workers(groups, hostvars):
    return {t["index"]: t["host"] for t in cluster_spec(groups, hostvars)["tasks"] if t["job"] == "worker"}


def test_an_index_counts_whatever_the_order():
    groups, hostvars = numbered(a="2", b=0, c="1")
    spec = cluster_spec(groups, hostvars)
    assert workers(groups, hostvars) == {0: "b", 1: "c", 2: "a"}
    assert [task["name"] for task in spec["tasks"]][-4:] == ["worker-0", "worker-1", "worker-2", "evaluator-0"]
    shuffled = {name: list(reversed(hosts)) for name, hosts in groups.items()}
    hostvars |= {host: variables | {"ps_index": host[-1]} for host, variables in hostvars.items() if "ps" in host}
    assert cluster_spec(shuffled, hostvars)["cluster_json"] == cluster_spec(groups, hostvars)["cluster_json"]


def test_a_machine_that_goes_shifts_nobody_and_one_that_comes_takes_its_place():
    before = numbered(a=0, b=1, c=2)
    gone = numbered(a=0, c=2)
    spec = cluster_spec(*gone)
    assert workers(*gone) == {0: "a", 2: "c"}
    assert spec["vacant"] == ["worker-1"]
    assert [member.rpartition(":")[2] for member in spec["cluster"]["worker"]] == ["2400", "1", "2400"]
    assert [task["name"] for task in host_tasks(spec, "c")] == ["worker-2"]
    assert workers(*numbered(new=1, c=2, a=0)) == {0: "a", 1: "new", 2: "c"}
    assert cluster_spec(*before)["vacant"] == []


def test_without_an_index_a_machine_that_goes_shifts_the_next():
    """What the index is for."""
    assert workers(*numbered(a=None, b=None, c=None))[1] == "b"
    assert workers(*numbered(a=None, c=None))[1] == "c"


def test_the_index_is_that_of_a_hosts_first_task():
    groups, hostvars = numbered(a=2, b=0)
    hostvars["b"]["worker_tasks"] = 2
    assert workers(groups, hostvars) == {0: "b", 1: "b", 2: "a"}
    hostvars["a"]["worker_index"] = 1
    with pytest.raises(ClusterSpecError, match=r"'a' and 'b' are both worker-1.*worker_index: 2 is free"):
        cluster_spec(groups, hostvars)


@pytest.mark.parametrize(
    ("indices", "message"),
    [
        ({"a": 0, "b": None, "c": 2}, "worker_index is missing on b, and other hosts .*1 is free"),
        ({"a": 0, "b": ""}, "worker_index is missing on b"),
        ({"a": 1, "b": "1"}, "the hosts 'a' and 'b' are both worker-1.*worker_index: 0 is free"),
        ({"a": "first"}, "host 'a' has worker_index: 'first'; expected the index of its first worker task"),
        ({"a": -1}, "worker_index: -1"),
        ({"a": 1.0}, "worker_index: 1.0"),
        ({"a": True}, "worker_index: True"),
        ({"a": "20261121"}, "worker_index: '20261121'; expected .* a number from 0 to 9999"),
    ],
)
def test_a_wrong_index_is_refused_by_value(indices, message):
    with pytest.raises(ClusterSpecError, match=message):
        cluster_spec(*numbered(**indices))


def test_the_coordinator_and_the_evaluator_are_alone_and_need_no_index():
    groups, hostvars = numbered(a=0, b=1)
    hostvars["head"] |= {"chief_index": 3, "evaluator_index": 3, "ps_index": 3}
    assert cluster_spec(groups, hostvars)["cluster"]["chief"] == ["10.0.3.12:2222"]


def test_a_job_without_tasks_is_left_out():
    hostvars = addresses(LAB) | {
        "ps-0": {"ansible_host": "a", "ps_tasks": 0},
        "ps-1": {"ansible_host": "b", "ps_tasks": 0},
    }
    assert "ps" not in cluster_spec(LAB, hostvars)["cluster"]


def test_cluster_address_is_preferred_and_ipv6_is_bracketed():
    groups = {"chief": ["a"], "ps": ["b"]}
    hostvars = {
        "a": {"ansible_host": "192.0.2.1", "cluster_address": "10.0.0.1"},
        "b": {"ansible_host": "2001:db8::2"},
    }
    assert cluster_spec(groups, hostvars)["cluster"] == {"chief": ["10.0.0.1:2222"], "ps": ["[2001:db8::2]:2300"]}


def test_host_tasks_carry_the_whole_cluster():
    spec = cluster_spec(LAB, addresses(LAB))
    (task,) = host_tasks(spec, "worker-1")
    config = json.loads(task["tf_config"])
    assert config == {"cluster": spec["cluster"], "task": {"type": "worker", "index": 1}}
    assert [task["name"] for task in host_tasks(spec, "head")] == ["chief-0", "evaluator-0"]


def test_tasks_are_scraped_where_a_prometheus_is_in_the_order_of_the_spec():
    groups = LAB | {"prometheus": ["watch"], "alertmanager": ["watch"]}
    hosts = addresses(groups)
    spec = cluster_spec(groups, hosts)
    assert [(t["task"], t["port"]) for t in metrics_targets(spec) if t["host"] == "head"] == [
        ("chief-0", 2700), ("evaluator-0", 2701),
    ]  # fmt: skip
    assert {t["task"] for t in metrics_targets(spec)} == {task["name"] for task in spec["tasks"]}
    assert metrics_targets(spec)[0] == {
        "task": "chief-0", "job": "chief", "index": 0, "host": "head", "address": "10.0.3.10", "port": 2700,
    }  # fmt: skip
    assert set(spec["node_exporter"]) == set(hosts)
    assert spec["prometheus"] == {"watch": {"address": hosts["watch"]["ansible_host"], "port": 9090}}
    assert spec["alertmanager"]["watch"]["port"] == 9093
    assert [task["metrics"] for task in host_tasks(spec, "head")] == ["10.0.3.10:2700", "10.0.3.10:2701"]
    targets = {task["name"]: task["metrics_of_workers"] for host in hosts for task in host_tasks(spec, host)}
    assert json.loads(targets.pop("chief-0")) == {
        target["task"]: f"{target['address']}:{target['port']}"
        for target in metrics_targets(spec)
        if target["job"] == "worker"
    }
    assert set(targets.values()) == {""}


def test_no_task_listens_for_nobody():
    spec = cluster_spec(LAB, addresses(LAB))
    assert metrics_targets(spec) == []
    assert [task["metrics"] for task in host_tasks(spec, "head")] == ["", ""]
    assert [task["metrics_of_workers"] for task in host_tasks(spec, "head")] == ["", ""]
    assert (spec["prometheus"], spec["alertmanager"], spec["node_exporter"]) == ({}, {}, {})


def test_a_host_says_where_it_is_scraped_and_that_it_is_not():
    hosts = addresses(LAB)
    hosts["head"] |= {"metrics_port": 3000, "cluster_address": "fd00::7"}
    found = metrics_targets(cluster_spec(LAB, hosts))
    assert [(t["task"], t["address"], t["port"]) for t in found] == [
        ("chief-0", "fd00::7", 3000), ("evaluator-0", "fd00::7", 3001),
    ]  # fmt: skip
    assert host_tasks(cluster_spec(LAB, hosts), "head")[0]["metrics"] == "[fd00::7]:3000"
    groups = LAB | {"prometheus": ["head"]}
    hosts["ps-0"] |= {"metrics_port": 0}
    assert "ps-0" not in {t["host"] for t in metrics_targets(cluster_spec(groups, hosts))}


def test_tensorboard_is_given_its_address():
    assert cluster_spec(LAB, addresses(LAB))["tensorboard"] == {"head": {"address": "10.0.3.10", "port": 6006}}


@pytest.mark.parametrize(
    ("strategy", "members"),
    [
        ("parameter_server", ["chief-0", "ps-0", "ps-1", "worker-0", "worker-1"]),
        ("multi_worker_mirrored", ["chief-0", "worker-0", "worker-1"]),
        ("mirrored", ["chief-0"]),
        ("one_device", ["chief-0"]),
        ("central_storage", ["chief-0"]),
    ],
)
def test_strategy_decides_which_jobs_have_tasks(strategy, members):
    spec = cluster_spec(LAB, addresses(LAB, strategy=strategy))
    assert [task["name"] for task in spec["tasks"]] == [*members, "evaluator-0"]
    jobs = list(dict.fromkeys(name.partition("-")[0] for name in members))
    assert list(json.loads(host_tasks(spec, "head")[0]["tf_config"])["cluster"]) == jobs
    assert host_tasks(spec, "ps-0") == [] or strategy == "parameter_server"


def test_workers_serve_parameter_servers_and_train_without_them():
    serving = {
        strategy: [
            task["name"] for task in cluster_spec(LAB, addresses(LAB, strategy=strategy))["tasks"] if task["server"]
        ]
        for strategy in ("parameter_server", "multi_worker_mirrored", "one_device")
    }
    assert serving == {
        "parameter_server": ["ps-0", "ps-1", "worker-0", "worker-1"],
        "multi_worker_mirrored": [],
        "one_device": [],
    }


def test_a_coordinator_alone_has_an_address_and_no_port():
    spec = cluster_spec(LAB, addresses(LAB, strategy="mirrored"))
    assert spec["cluster"] == {"chief": ["10.0.3.10:2222"]}
    assert spec["tasks"][0]["port"] is None


@pytest.mark.parametrize("evaluation", ["inline", "distributed", "exact", "none"])
def test_the_evaluator_has_a_task_only_where_it_evaluates(evaluation):
    spec = cluster_spec(LAB, addresses(LAB, evaluation=evaluation))
    assert "evaluator" not in {task["job"] for task in spec["tasks"]}


def test_hosts_of_an_idle_group_need_no_right_values():
    hostvars = addresses(LAB, strategy="multi_worker_mirrored") | {"ps-0": {"ps_tasks": "two"}}
    assert len(cluster_spec(LAB, hostvars)["tasks"]) == 4


@pytest.mark.parametrize("strategy", ["parameter_server", "multi_worker_mirrored", "one_device"])
def test_hosts_are_those_of_all_jobs_under_any_strategy(strategy):
    spec = cluster_spec(LAB, addresses(LAB, strategy=strategy))
    assert spec["hosts"] == ["head", "ps-0", "ps-1", "worker-0", "worker-1"]


@pytest.mark.parametrize("strategy", ["tpu", None, ["mirrored"]])
def test_an_unknown_strategy_is_refused(strategy):
    with pytest.raises(ClusterSpecError, match="trainer_run: strategy: must be one of parameter_server, multi"):
        cluster_spec(LAB, addresses(LAB, strategy=strategy))


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({}, "host 'worker-0' has no address"),
        ({"ansible_host": "{{ ansible_default_ipv4.address }}"}, "expected a literal such as 192.0.2.10"),
        ({"ansible_host": "10.0.3.30", "worker_tasks": "two"}, "worker_tasks: 'two'; expected a number"),
        ({"ansible_host": "10.0.3.30", "worker_tasks": True}, "worker_tasks: True; expected a number"),
        ({"ansible_host": "10.0.3.30", "worker_port": 70000}, "worker_port: 70000; expected a number from 1 to 65535"),
    ],
)
def test_bad_values_are_named(variables, message):
    with pytest.raises(ClusterSpecError, match=message.replace("(", r"\(")):
        cluster_spec(LAB, addresses(LAB) | {"worker-0": variables})


@pytest.mark.parametrize(("evaluation", "expected"), [("sidecar", {"evaluator-0"}), ("inline", set()), ("none", set())])
def test_an_evaluator_is_scraped_where_it_evaluates_alone(evaluation, expected):
    """The alert PsfleetEvaluatorBehind takes the target for what is wanted."""
    groups = LAB | {"prometheus": ["watch"]}
    targets = scrape_targets(cluster_spec(groups, addresses(groups, program="x:Y", evaluation=evaluation)))
    assert {each["labels"]["task"] for each in targets if each["labels"].get("job") == "evaluator"} == expected
