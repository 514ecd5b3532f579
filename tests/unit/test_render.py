"""The same cluster for other managers: names, members, settings, ends."""

from __future__ import annotations

import ast
import io
import json
import os
import signal
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from fleet.actions.console import Console
from fleet.errors import OperatorMistake
from fleet.render import RenderedCluster, kubernetes, slurm, spark, wanted
from fleet.site.inventory import Inventory, Source, describe
from fleet.verbs.render import render
from tests.unit.stand_ins import put_program
from trainer.cluster.spec import ClusterConfig
from trainer.core.failures import STOPPED, TRY_AGAIN

GROUPS = {"chief": ["a"], "ps": ["a", "b"], "worker": ["b", "c"], "evaluator": ["a"]}
SETTINGS = {"program": "mine:Model", "run": "first", "steps": 100}
POD = {"manager": "kubernetes", "name": "x", "image": "10.0.0.7:5000/mine@sha256:0a"}


def inventory(groups: Mapping[str, list[str]] | None = None, **variables: Any) -> Inventory:
    groups = groups or GROUPS
    hosts = sorted({host for members in groups.values() for host in members})
    common = {"cluster_shared_dir": "/mnt/shared", "trainer_run": SETTINGS, **variables}
    of_hosts = {host: {**common, "ansible_host": f"192.0.2.{number}"} for number, host in enumerate(hosts, 10)}
    of_hosts["c"]["worker_tasks"] = 2
    return describe(Source("test", {**groups}, of_hosts))


def rendered(found: Inventory, **given: Any) -> dict[tuple[str, str], Any]:
    out = io.StringIO()
    render(found, Console(out), "kubernetes", "mine", image="example.org/mine:1", **given)
    return {(one["kind"], one["metadata"]["name"]): one for one in yaml.safe_load_all(out.getvalue())}


def environment(template: Mapping[str, Any], index: int) -> dict[str, str]:
    """As Kubernetes makes it of a container's, where `index` is the pod's."""
    found: dict[str, str] = {}
    for each in template["spec"]["containers"][0]["env"]:
        found[each["name"]] = str(each.get("value", index)).replace("$(TASK_INDEX)", found.get("TASK_INDEX", ""))
    return found


def test_pods_may_be_moved_though_a_job_has_no_scale() -> None:
    """Kubernetes allows no disruption of any pod that a budget with `maxUnavailable` selects together with a Job's."""
    objects = rendered(inventory())
    selector = objects["PodDisruptionBudget", "mine"]["spec"]["selector"]
    [beside] = selector["matchExpressions"]
    assert beside["operator"] == "NotIn"
    kinds: dict[str, set[str]] = {"budgeted": set(), "free": set()}
    for (kind, _), one in objects.items():
        if template := one.get("spec", {}).get("template"):
            labels = template["metadata"]["labels"]
            is_selected = selector["matchLabels"].items() <= labels.items() and (
                labels[beside["key"]] not in beside["values"]
            )
            kinds["budgeted" if is_selected else "free"].add(kind)
    assert kinds == {"budgeted": {"StatefulSet"}, "free": {"Job"}}


def test_each_pod_is_a_task_of_the_same_cluster() -> None:
    objects = rendered(inventory())
    members = {
        "chief": ["mine-chief-0.mine-chief:2222"],
        "ps": [f"mine-ps-{index}.mine-ps:2222" for index in range(2)],
        "worker": [f"mine-worker-{index}.mine-worker:2222" for index in range(3)],
    }
    for job, count in (("ps", 2), ("worker", 3), ("evaluator", 1)):
        servers = objects["StatefulSet", f"mine-{job}"]["spec"]
        assert (servers["replicas"], servers["serviceName"]) == (count, f"mine-{job}")
        variables = environment(servers["template"], count - 1)
        cluster = ClusterConfig.from_tf_config(variables["TF_CONFIG"])
        assert (cluster.job, cluster.index, cluster.jobs) == (job, count - 1, members)
        assert ("Service", f"mine-{job}") in objects
    chief = objects["Job", "mine-chief"]["spec"]
    pod = chief["template"]["spec"]
    assert (pod["hostname"], pod["subdomain"], pod["restartPolicy"]) == ("mine-chief-0", "mine-chief", "Never")
    assert ClusterConfig.from_tf_config(environment(chief["template"], 0)["TF_CONFIG"]).job == "chief"
    assert {"action": "FailJob", "onExitCodes": {"operator": "In", "values": [78]}} in chief["podFailurePolicy"][
        "rules"
    ]


def test_settings_are_the_inventorys_on_the_pods_own_path() -> None:
    objects = rendered(inventory(), run="second")
    found = json.loads(objects["ConfigMap", "mine-settings"]["data"]["run.json"])
    assert found == {**SETTINGS, "run": "second", "shared_dir": "/srv/trainer"}


def test_secrets_are_named_for_those_that_run_the_program() -> None:
    objects = rendered(inventory(trainer_secrets={"WANDB": "geheim-words", "HOOK": "other-words"}))
    assert "words" not in json.dumps([*objects.values()])
    for (kind, name), one in objects.items():
        if kind in ("Job", "StatefulSet"):
            pod = one["spec"]["template"]["spec"]
            volumes = {each["name"]: each for each in pod["volumes"]}
            mounts = {each["name"]: each["mountPath"] for each in pod["containers"][0]["volumeMounts"]}
            directory = environment(one["spec"]["template"], 0).get("CREDENTIALS_DIRECTORY")
            if name in ("mine-chief", "mine-evaluator"):
                secret = volumes["secrets"]["secret"]
                assert secret["secretName"] == "mine-secrets"
                assert [each["path"] for each in secret["items"]] == ["HOOK", "WANDB"]
                assert mounts["secrets"] == directory
            else:
                assert not {"secrets"} & {*volumes, *mounts}
                assert directory is None
    assert "secret" not in json.dumps([*rendered(inventory()).values()])


def test_strangers_reach_no_port() -> None:
    objects = rendered(inventory())
    rules = objects["NetworkPolicy", "mine"]["spec"]
    mine = {"app.kubernetes.io/name": "psfleet", "app.kubernetes.io/instance": "mine"}
    assert rules["podSelector"]["matchLabels"] == mine
    assert rules["ingress"] == [{"from": [{"podSelector": {"matchLabels": mine}}]}]
    for (kind, _), one in objects.items():
        if kind in ("Job", "StatefulSet"):
            assert mine.items() <= one["spec"]["template"]["metadata"]["labels"].items()


def test_gpus_are_asked_for_and_different_numbers_are_refused() -> None:
    groups = {**GROUPS, "gpu": ["b", "c"]}
    found = wanted(inventory({**GROUPS, "worker": ["c"], "gpu": ["c"]}, gpu_count=2), "mine", None, None, "/srv")
    assert found.gpus["worker"] == 1
    assert "nvidia.com/gpu: 1" in kubernetes.render(found, "x", "1Gi")
    with pytest.raises(OperatorMistake, match="sbatch --gpus-per-task say how many: a ps gets them too, and uses none"):
        slurm.render(found, "python")
    with pytest.raises(OperatorMistake, match=r"spark\.task\.resource\.gpu\.amount say how many: a ps gets them too"):
        spark.render(found, "python")
    with pytest.raises(OperatorMistake, match="different numbers of GPUs"):
        wanted(inventory(groups, gpu_count=2), "mine", None, None, "/srv")


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"manager": "nomad", "name": "x"}, "'nomad' is none of kubernetes, slurm, spark"),
        ({"manager": "slurm", "name": "My_Job"}, "--name 'My_Job' can't name pods"),
        ({"manager": "kubernetes", "name": "x"}, "--image is missing"),
        ({"manager": "slurm", "name": "x", "run": "a b"}, "--run 'a b' can't name a run"),
        ({"manager": "spark", "name": "x", "program": "mine"}, "--program 'mine' names no program"),
        ({"manager": "slurm", "name": "x", "shared_dir": "mine"}, "--shared-dir is 'mine': expected an absolute path"),
        ({"manager": "spark", "name": "x", "shared_dir": "/a\nb"}, "expected an absolute path"),
        ({"manager": "slurm", "name": "x", "python": ""}, "--python is '': expected a program"),
        ({"manager": "kubernetes", "name": "x", "image": "my image"}, "--image is 'my image': expected an image"),
        ({**POD, "size": "lots"}, "--size is 'lots': expected a size as Kubernetes has it, such as 100Gi"),
        ({**POD, "size": "0Gi"}, "--size is '0Gi'"),
        ({**POD, "size": "0.0Ti"}, "--size is '0.0Ti'"),
        ({**POD, "storage_class": "My Class"}, "--storage-class is 'My Class': expected a storage class's name"),
    ],
)
def test_wrong_words_are_named(given: Mapping[str, str], named: str) -> None:
    with pytest.raises(OperatorMistake, match=named):
        render(inventory(), Console(io.StringIO()), **given)


@pytest.mark.parametrize("size", ["1500G", "1.5Ti", "0.5T"])
def test_what_a_claim_asks_for_is_as_it_was_given(size: str) -> None:
    out = io.StringIO()
    render(inventory(), Console(out), **POD, size=size, storage_class="nfs.client-1")
    claim = next(each for each in yaml.safe_load_all(out.getvalue()) if each["kind"] == "PersistentVolumeClaim")
    assert claim["spec"]["storageClassName"] == "nfs.client-1"
    assert claim["spec"]["resources"] == {"requests": {"storage": size}}


def test_the_batch_script_is_a_script_with_the_tasks_and_the_settings() -> None:
    settings = {**SETTINGS, "note": "it's a 'quoted' one"}
    script = slurm.render(
        RenderedCluster("mine", {"chief": 1, "worker": 2, "ps": 1}, {}, {**settings, "shared_dir": "/a b"}), "python"
    )
    assert "#SBATCH --ntasks=4\n" in script
    assert "tasks=(chief-0 worker-0 worker-1 ps-0)\n" in script
    assert "shared='/a b'\n" in script
    assert json.loads(script.split("<<'SETTINGS'\n")[1].split("\nSETTINGS\n")[0])["note"] == settings["note"]
    assert subprocess.run(["bash", "-n"], input=script, text=True).returncode == 0


STANDS_IN = {
    "srun": """case "$*" in *hostname) echo '0: here'; echo '1: here';; *) exec sleep 60;; esac""",
    "scontrol": 'echo "$*" >>"$WORK/queued"',
    # A coordinator, which is asked to end by TERM. It is up when the script, its parent, traps TERM, after USR1.
    "python": """trap 'exit {code}' TERM
while :; do
    caught=0x$(awk '/SigCgt/ {print $2}' /proc/$PPID/status)
    (( !(caught & 0x4000) )) || touch "$WORK/up"
    sleep 0.1
done""",
}


@pytest.mark.parametrize(
    ("asked", "code", "queued"),
    [
        (signal.SIGUSR1, STOPPED, True),  # the time limit is near
        (signal.SIGTERM, STOPPED, False),  # scancel
        (signal.SIGTERM, TRY_AGAIN, False),  # the same, when the ps ended first
    ],
)
def test_a_cancelled_batch_job_is_not_queued_again(tmp_path: Path, asked: int, code: int, queued: bool) -> None:
    for name, text in STANDS_IN.items():
        put_program(tmp_path / name, f"#!/bin/bash\n{text.replace('{code}', str(code))}\n")
    wanted = RenderedCluster("mine", {"chief": 1, "ps": 1}, {}, {**SETTINGS, "shared_dir": str(tmp_path)})
    script = slurm.render(wanted, str(tmp_path / "python"))
    environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "WORK": str(tmp_path), "SLURM_JOB_ID": "7"}
    with subprocess.Popen(["bash", "-c", script], env=environment, stdout=subprocess.PIPE, text=True) as batch:
        while not (tmp_path / "up").exists():
            assert batch.poll() is None
            time.sleep(0.05)
        batch.send_signal(asked)
        assert batch.wait(60) == code
    assert (tmp_path / "queued").exists() is queued
    assert f"#SBATCH --signal=B:USR1@{slurm.SAVE_SECONDS}\n" in script


def test_sparks_program_is_one_with_the_tasks_and_the_settings() -> None:
    settings = {**SETTINGS, "note": 'it\'s a "quoted" $one', "shared_dir": "/a b"}
    script = spark.render(RenderedCluster("mine", {"chief": 1, "worker": 2, "ps": 1}, {}, settings), "/my own/python")
    assigned = {
        line.targets[0].id: line.value
        for line in ast.parse(script).body
        if isinstance(line, ast.Assign) and isinstance(line.targets[0], ast.Name)
    }
    assert ast.literal_eval(assigned["TASKS"]) == ["chief-0", "worker-0", "worker-1", "ps-0"]
    assert ast.literal_eval(assigned["PYTHON"]) == "/my own/python"
    loads = assigned["SETTINGS"]
    assert isinstance(loads, ast.Call)
    assert json.loads(ast.literal_eval(loads.args[0])) == settings
