"""Which GPUs each task gets, what preflight says about them, and that hosts without GPUs notice nothing."""

import re
from pathlib import Path

import jinja2
import pytest

from fleet.site.filters import FILTERS
from fleet.site.members import ClusterSpecError
from fleet.site.preflight import preflight_problems
from fleet.site.topology import cluster_spec, host_tasks
from trainer.core.runtime import PS_ENVIRONMENT

ROOT = Path(__file__).parents[2]
TEMPLATE = ROOT / "roles" / "trainer" / "templates" / "task.env.j2"
CUDA = re.compile(r"^(?:CUDA|TF_FORCE|TRAINER_GPUS).*", re.MULTILINE)
RUN = {"program": "trainer.examples.digits:Digits"}
MIG = [f"MIG-{number:08x}-92db-5567-bf6d-fac646fe29f2" for number in range(7)]


def cluster(gpu=("box",), groups=None, run=None, **hosts):
    """A coordinator, a ps and workers, with what a test says laid over; `box` has a job of each kind."""
    groups = {"chief": ["box"], "ps": ["box"], "worker": ["box"], "evaluator": ["box"], **(groups or {})}
    groups["gpu"] = list(gpu)
    names = dict.fromkeys(host for members in groups.values() for host in members)
    site = {"cluster_shared_dir": "/srv/trainer", "cluster_uid": 6006, "trainer_run": RUN | (run or {})}
    hostvars = {name: site | {"ansible_host": f"10.9.0.{10 + i}"} | hosts.get(name, {}) for i, name in enumerate(names)}
    return groups | {"all": list(names)}, hostvars


def devices(*args, **kwargs):
    spec = cluster_spec(*cluster(*args, **kwargs))
    return {task["name"]: task.get("cuda_visible_devices") for task in spec["tasks"]}


def problems(*args, **kwargs):
    return preflight_problems(*cluster(*args, **kwargs), "2.19.0")


def test_a_worker_gets_all_gpus_of_its_host_and_the_others_none():
    assert devices(box={"gpu_count": 4}) == {
        "chief-0": "-1",
        "ps-0": "-1",
        "worker-0": "0,1,2,3",
        "evaluator-0": "-1",
    }


def test_several_workers_of_a_host_share_its_gpus_out():
    shared = devices(box={"gpu_count": 8, "worker_tasks": 4})
    assert [shared[f"worker-{index}"] for index in range(4)] == ["0,1", "2,3", "4,5", "6,7"]


def test_each_worker_gets_one_mig_instance_by_its_uuid():
    shared = devices(box={"gpu_devices": MIG, "worker_tasks": 7})
    assert [shared[f"worker-{index}"] for index in range(7)] == MIG


def test_who_trains_gets_gpus_whatever_its_job_is_called():
    run = {"strategy": "multi_worker_mirrored"}
    shared = devices(run=run, box={"gpu_count": 2})
    assert (shared["chief-0"], shared["worker-0"]) == ("0", "1")
    assert devices(run={"strategy": "mirrored"}, box={"gpu_count": 2})["chief-0"] == "0,1"


def test_a_host_outside_the_group_gets_no_word_about_gpus():
    spec = cluster_spec(*cluster(gpu=(), box={"gpu_count": 4}))
    assert [task for task in spec["tasks"] if "cuda_visible_devices" in task] == []


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({}, "host 'box' is in the group gpu and has gpu_count: None; expected how many"),
        ({"gpu_count": 0}, "gpu_count: 0"),
        ({"gpu_count": True}, "gpu_count: True"),
        ({"gpu_count": "4"}, "gpu_count: '4'"),
        ({"gpu_count": 4, "worker_tasks": 3}, "4 GPUs for 3 tasks; expected as many for each"),
        ({"gpu_count": 1, "worker_tasks": 2}, "1 GPUs for 2 tasks"),
        ({"gpu_devices": MIG, "worker_tasks": 1}, "CUDA shows a process only one of them. Set worker_tasks: 7"),
        ({"gpu_devices": "MIG-x"}, "gpu_devices: 'MIG-x'"),
        ({"gpu_devices": ["MIG-GPU-1/0/0"]}, "expected UUIDs as `nvidia-smi -L` prints them"),
        ({"gpu_devices": [MIG[0], MIG[0]]}, "each once"),
        ({"gpu_devices": []}, "gpu_devices: []"),
        ({"gpu_devices": 5}, "gpu_devices: 5; expected UUIDs"),
        ({"gpu_devices": True}, "gpu_devices: True"),
        ({"gpu_devices": {MIG[0]: 1}}, "expected UUIDs"),
        ({"gpu_devices": MIG[:1], "gpu_count": "1"}, "gpu_count: '1'"),
    ],
)
def test_gpus_that_cannot_be_shared_out_are_refused_by_value(variables, message):
    with pytest.raises(ClusterSpecError, match=re.escape(message)):
        cluster_spec(*cluster(box=variables))
    assert any(message in problem for problem in problems(box=variables))


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"nvidia_driver_source": "debian"}, "nvidia_driver_source: 'debian'; expected one of distribution, nvidia"),
        ({"nvidia_driver_flavour": "closed"}, "nvidia_driver_flavour: 'closed'; expected one of auto, open"),
        ({"nvidia_driver_branch": "470"}, "driver 470 is too old: TensorFlow 2.21 is built for CUDA 12.5"),
        ({"nvidia_driver_branch": "535.261.03"}, "'535.261.03'; expected a driver's major version"),
        ({"nvidia_driver_capability": "sm_86"}, "nvidia_driver_capability: 'sm_86'; expected a compute capability"),
        ({"nvidia_driver_capability": "8"}, 'such as "8.6"'),
    ],
)
def test_wrong_driver_settings_are_refused_before_a_host_is_touched(variables, message):
    (problem,) = problems(box={"gpu_count": 1} | variables)
    assert message in problem


def test_all_workers_must_have_as_many_gpus():
    groups = {"worker": ["box", "bare"]}
    (problem,) = problems(groups=groups, box={"gpu_count": 2})
    assert "same number of GPUs" in problem
    assert "0: worker-1 on bare; 2: worker-0 on box" in problem
    assert (
        problems(("box", "bare"), groups=groups, box={"gpu_count": 2}, bare={"gpu_count": 4, "worker_tasks": 2}) == []
    )


def test_a_coordinator_that_trains_counts_among_them():
    run = {"strategy": "multi_worker_mirrored"}
    (problem,) = problems(groups={"chief": ["bare"]}, run=run, box={"gpu_count": 2})
    assert "0: chief-0 on bare; 2: worker-0 on box" in problem
    assert problems(groups={"chief": ["bare"]}, box={"gpu_count": 2}) == []


def rendered(task):
    environment = jinja2.Environment(
        trim_blocks=True, keep_trailing_newline=True, undefined=jinja2.StrictUndefined, autoescape=False
    )
    environment.filters.update(FILTERS)
    template = environment.from_string(TEMPLATE.read_text())
    known = {"inventory_hostname": "box", "trainer_settings": {"shared_dir": "/srv/trainer"}}
    return template.render(item=task, ansible_managed="ours", **known)


def test_without_the_group_the_rendered_file_is_as_before():
    groups, hostvars = cluster(gpu=())
    (task,) = [task for task in host_tasks(cluster_spec(groups, hostvars), "box") if task["job"] == "worker"]
    assert rendered(task) == (
        f"# ours\nTF_CONFIG='{task['tf_config']}'\nTRAINER_SETTINGS=/etc/trainer/run.json\n"
        "TRAINER_HOST=box\nTF_USE_LEGACY_KERAS=1\nGRPC_FAIL_FAST=use_caller\nDATA_DIR=/srv/trainer/data\n"
    )


def test_a_ps_gets_what_local_ones_get():
    tasks = host_tasks(cluster_spec(*cluster(box={"gpu_count": 2})), "box")
    (set_for,) = PS_ENVIRONMENT.items()
    assert {task["job"] for task in tasks if "=".join(set_for) in rendered(task).splitlines()} == {"ps"}


def test_a_task_with_gpus_is_told_which_and_to_take_their_memory_as_it_needs_it():
    tasks = host_tasks(cluster_spec(*cluster(box={"gpu_count": 2})), "box")
    lines = {task["job"]: CUDA.findall(rendered(task)) for task in tasks}
    assert lines["worker"] == [
        "CUDA_DEVICE_ORDER=PCI_BUS_ID",
        "CUDA_VISIBLE_DEVICES=0,1",
        "TF_FORCE_GPU_ALLOW_GROWTH=true",
        "CUDA_CACHE_PATH=/var/cache/trainer-cuda",
        "CUDA_CACHE_MAXSIZE=4294967296",
        "TRAINER_GPUS=2",
    ]
    assert lines["ps"] == lines["chief"] == lines["evaluator"] == [*lines["worker"][:1], "CUDA_VISIBLE_DEVICES=-1"]
