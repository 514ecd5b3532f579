"""Flags say what TF_CONFIG says."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from trainer.cluster.spec import ClusterConfig
from trainer.command_line import parse
from trainer.core.settings.config import ConfigError
from trainer.tasks.flags import read_cluster

ROOT = Path(__file__).resolve().parents[2]
JOBS = {"chief": ["h:1"], "worker": ["w0:1", "w1:1"], "ps": ["p:1"]}
HOSTS = ["--chief_hosts=h:1", "--worker_hosts=w0:1,w1:1", "--ps_hosts=p:1"]


def tf_config(job: str, index: int, jobs: dict[str, list[str]] = JOBS) -> str:
    return json.dumps({"cluster": jobs, "task": {"type": job, "index": index}})


def read(*arguments: str, tf_config_text: str | None = None) -> ClusterConfig:
    return read_cluster(parse(list(arguments)), {} if tf_config_text is None else {"TF_CONFIG": tf_config_text})


@pytest.mark.parametrize(
    "arguments",
    [
        [*HOSTS, "--job_name=worker", "--task_index=1"],
        [
            "--chief-hosts",
            "h:1",
            "--worker-hosts",
            "w0:1, w1:1",
            "--ps-hosts",
            "p:1",
            "--job-name=worker",
            "--task-index=1",
        ],
        [*HOSTS, "--evaluator_hosts=e:1", "--task_type", "worker", "--task_index", "1"],
    ],
)
def test_hosts_make_the_cluster_of_tf_config(arguments: list[str]) -> None:
    assert read(*arguments) == ClusterConfig.from_tf_config(tf_config("worker", 1))


@pytest.mark.parametrize(
    "content",
    [
        JOBS,
        {"cluster": JOBS},
        {"cluster": {**JOBS, "evaluator": ["e:1"]}, "task": {"type": "worker", "index": 1}},
    ],
)
def test_cluster_file_makes_the_cluster_of_tf_config(tmp_path: Path, content: object) -> None:
    path = tmp_path / "cluster.json"
    path.write_text(json.dumps(content))
    cluster = read("--task_type", "worker", "--task_index", "1", "--cluster", str(path))
    assert cluster == ClusterConfig.from_tf_config(tf_config("worker", 1))


def test_only_member_of_a_job_needs_no_index() -> None:
    assert read(*HOSTS, "--job_name=ps").task == "ps-0"


def test_evaluator_needs_no_cluster() -> None:
    assert read("--job_name=evaluator").task == "evaluator-0"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (HOSTS, "^--chief-hosts is set, and not which task this is: add --job-name and --task-index$"),
        (["--task_index=0"], "^--task-index is set, and not which task this is"),
        (["--job_name=ps"], "^--job-name is set, and not the cluster: add --chief-hosts"),
        ([*HOSTS, "--job_name=worker"], "^--task-index is missing: there are 2 members of the job worker"),
        ([*HOSTS, "--job_name=worker", "--task_index=2"], "the flags: the task is worker 2.*1 chief, 1 ps, 2 worker"),
        ([*HOSTS, "--job_name=master"], "unknown task type 'master': expected one of .*master is called chief now"),
        ([*HOSTS[:2], "--ps_hosts=p", "--job_name=chief"], "job 'ps' must be a list of host:port, and 'p' is none"),
        ([*HOSTS[:2], "--ps_hosts=p:1,,q:1", "--job_name=chief"], "job 'ps' .* and '' is none"),
        ([*HOSTS, "--cluster=c.json", "--job_name=chief"], "^--cluster and --chief-hosts both say the cluster"),
        (
            [*HOSTS[1:], "--job_name=ps"],
            "the flags: the cluster has no chief. In TensorFlow 1.*--chief-hosts=host:port",
        ),
    ],
)
def test_wrong_flags_are_refused_by_name(arguments: list[str], expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        read(*arguments)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (None, "--cluster: cannot read .*c.json: No such file"),
        ("{", "--cluster: .*c.json is not JSON"),
        ("[]", '--cluster: .*c.json must be like {"chief": '),
        (json.dumps({**JOBS, "workers": ["w:1"]}), "--cluster .*c.json: unknown job 'workers' in the cluster: "),
        (tf_config("worker", 0), "c.json says task worker 0, the flags say worker 1"),
    ],
)
def test_wrong_cluster_file_is_refused_by_name(tmp_path: Path, content: str | None, expected: str) -> None:
    path = tmp_path / "c.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigError, match=expected):
        read("--cluster", str(path), "--task_type=worker", "--task_index=1")


def test_tf_config_and_flags_may_agree() -> None:
    given = tf_config("worker", 1, {**JOBS, "evaluator": ["e:1"]})
    assert read(*HOSTS, "--job_name=worker", "--task_index=1", tf_config_text=given).task == "worker-1"


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (tf_config("worker", 0), "^TF_CONFIG says task worker 0, the flags say worker 1: unset TF_CONFIG, or"),
        (
            tf_config("worker", 1, {**JOBS, "ps": ["p:1", "q:1"]}),
            "^TF_CONFIG says ps p:1,q:1, the flags say p:1: unset TF_CONFIG, or",
        ),
    ],
)
def test_tf_config_and_flags_may_not_differ(given: str, expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        read(*HOSTS, "--job_name=worker", "--task_index=1", tf_config_text=given)


@pytest.mark.parametrize("arguments", [[], ["local", "--program", "a:b"]])
def test_mistake_is_one_line_and_78(arguments: list[str]) -> None:
    environment = {key: value for key, value in os.environ.items() if key != "TF_CONFIG"}
    command = [sys.executable, "-m", "trainer", HOSTS[0], *arguments]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 78
    assert done.stderr.startswith("error: --chief-hosts is ")
    assert done.stderr.count("\n") == 1
