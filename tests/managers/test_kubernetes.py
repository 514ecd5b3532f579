"""What `fab render kubernetes` prints: valid for the API, and a training where each pod's command is a process.

There is no Kubernetes here. So the pods' names become ports of this machine, and the volumes become directories.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import yaml

from fleet.render import SHARED_DIR, RenderedCluster, kubernetes
from tests.managers.conftest import free_port

pytestmark = pytest.mark.timeout(600)
ROOT = Path(__file__).resolve().parents[2]
VALIDATE = ROOT / ".cache/managers/bin/kubernetes-validate"
TASKS = {"chief": 1, "worker": 2, "ps": 2, "evaluator": 1}
SETTINGS = {"program": "trainer.examples.digits:Digits", "run": "pods", "steps": 200, "shared_dir": SHARED_DIR}
WANTED = RenderedCluster("mine", TASKS, {"worker": 1}, SETTINGS, {"chief": ["WANDB"]})


def test_the_objects_are_valid_for_the_api(tmp_path: Path) -> None:
    path = tmp_path / "objects.yml"
    path.write_text(kubernetes.render(WANTED, "example.org/mine:1", "1Gi", "shared"))
    done = subprocess.run([VALIDATE, "--strict", path], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    path.write_text(path.read_text().replace("serviceName", "nameOfService"))
    assert subprocess.run([VALIDATE, "--strict", path], capture_output=True).returncode


def test_the_pods_commands_train_together(tmp_path: Path) -> None:
    objects = list(yaml.safe_load_all(kubernetes.render(WANTED, "example.org/mine:1", "1Gi")))
    pods = {name: pod for one in objects for name, pod in pods_of(one).items()}
    ports = {name: (free_port(), free_port()) for name in pods}
    settings = next(one for one in objects if one["kind"] == "ConfigMap")["data"]["run.json"]
    (tmp_path / "run.json").write_text(settings.replace(SHARED_DIR, str(tmp_path)))
    with ExitStack() as stack:
        running = {
            name: start(stack, pod, environment(name, pod, ports, tmp_path), tmp_path) for name, pod in pods.items()
        }
        for name in ("mine-worker-0", "mine-ps-1"):
            assert b"psfleet" in probe(pods[name], ports[name][1])
        frozen = last_child(running["mine-worker-1"].pid)
        probe(pods["mine-worker-1"], ports["mine-worker-1"][1])
        os.kill(frozen, signal.SIGSTOP)
        try:
            with pytest.raises(OSError, match="timed out"):
                ask(pods["mine-worker-1"]["containers"][0]["livenessProbe"], ports["mine-worker-1"][1])
        finally:
            os.kill(frozen, signal.SIGCONT)
        assert running["mine-chief-0"].wait(300) == 0, (tmp_path / "mine-chief-0.log").read_text()[-4000:]
        assert all(one.poll() is None for name, one in running.items() if "-ps-" in name or "-worker-" in name)
    assert '"state": "finished"' in (tmp_path / "runs/pods/status.json").read_text()


def pods_of(one: Mapping[str, Any]) -> dict[str, Any]:
    """Return the pods that an object makes, by their names, each with the environment of its index."""
    if one["kind"] not in ("Job", "StatefulSet"):
        return {}
    template = one["spec"]["template"]["spec"]
    return {f"{one['metadata']['name']}-{index}": template for index in range(one["spec"].get("replicas", 1))}


def environment(name: str, pod: Mapping[str, Any], ports: Mapping[str, tuple[int, int]], path: Path) -> dict[str, str]:
    found: dict[str, str] = {}
    for each in pod["containers"][0]["env"]:
        found[each["name"]] = str(each.get("value", name.rpartition("-")[2]))
    text = found["TF_CONFIG"].replace("$(TASK_INDEX)", found["TASK_INDEX"])
    for other, (port, _) in ports.items():
        text = text.replace(f"{other}.{other.rpartition('-')[0]}:{kubernetes.PORT}", f"127.0.0.1:{port}")
    return found | {
        "TF_CONFIG": text,
        "TRAINER_SETTINGS": str(path / "run.json"),
        "TRAINER_METRICS": f"127.0.0.1:{ports[name][1]}",
        "DATA_DIR": str(path),
    }


def start(stack: ExitStack, pod: Mapping[str, Any], env: Mapping[str, str], path: Path) -> subprocess.Popen[bytes]:
    name = f"mine-{'-'.join(task_of(env))}"
    command = [sys.executable, *pod["containers"][0]["command"][1:]]
    log = stack.enter_context((path / f"{name}.log").open("wb"))
    given = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), **env}
    process = subprocess.Popen(command, env=given, cwd=path, stdout=log, stderr=subprocess.STDOUT)
    stack.callback(process.wait, 60)
    stack.callback(process.terminate)
    return process


def task_of(variables: Mapping[str, str]) -> tuple[str, str]:
    task = yaml.safe_load(variables["TF_CONFIG"])["task"]
    return task["type"], str(task["index"])


def last_child(pid: int) -> int:
    """Return the process that trains, which its supervisor has started."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return int(children[-1])


def probe(pod: Mapping[str, Any], port: int) -> bytes:
    """Ask as the pod's startup probe does, as often as it may."""
    given = pod["containers"][0]["startupProbe"]
    for _ in range(given["failureThreshold"]):
        try:
            return ask(given, port)
        except OSError:
            time.sleep(given["periodSeconds"])
    raise AssertionError(f"nothing answered at {port}")


def ask(given: Mapping[str, Any], port: int) -> bytes:
    url = f"http://127.0.0.1:{port}{given['httpGet']['path']}"
    with urllib.request.urlopen(url, timeout=given["timeoutSeconds"]) as answer:
        return bytes(answer.read())
