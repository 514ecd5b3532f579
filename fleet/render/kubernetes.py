"""A cluster as Kubernetes' objects: servers as StatefulSets with stable names, the coordinator as a Job that ends.

A StatefulSet starts its containers again whatever they ended with. That is right for servers and the evaluator, which
take part in one run after the other. The coordinator ends with the run: as a Job it is complete then, and an error of
the program (78) fails it at once.
"""

from __future__ import annotations

import json
from typing import Any

import yaml

from fleet.render import SHARED_DIR, RenderedCluster
from trainer.core.failures import USER_ERROR
from trainer.core.runtime import TASK_ENVIRONMENT

PORT, METRICS_PORT = 2222, 9200
SETTINGS, SECRETS = "/etc/trainer", "/etc/secrets"
READ_BY_GROUP = 0o440
INDEX_LABEL = "apps.kubernetes.io/pod-index"
# The coordinator saves a checkpoint when it is asked to end.
GRACE_SECONDS = 120
MAX_FAILURES = 1000
# The image needs no user of this number.
USER = 10001


class Dumper(yaml.SafeDumper):
    """Writes texts of several lines as they are."""

    def ignore_aliases(self, data: Any) -> bool:
        return True  # kubectl would take them, readers would not


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


Dumper.add_representer(str, _text)


def render(wanted: RenderedCluster, image: str, size: str, storage_class: str | None = None) -> str:
    """Return the objects as YAML, for `kubectl apply -f -`."""
    objects = [_settings(wanted), _claim(wanted, size, storage_class), _policy(wanted), _budget(wanted)]
    for job, count in wanted.tasks.items():
        objects.append(_service(wanted, job))
        objects.append(_coordinator(wanted, image) if job == "chief" else _servers(wanted, job, count, image))
    return yaml.dump_all(objects, Dumper=Dumper, sort_keys=False, explicit_start=True, width=1000)


def addresses(wanted: RenderedCluster) -> dict[str, list[str]]:
    """Return the members that TF_CONFIG names, by their names in the namespace's DNS."""
    return {
        job: [f"{_pod(wanted, job, index)}.{_set(wanted, job)}:{PORT}" for index in range(count)]
        for job, count in wanted.tasks.items()
        if job != "evaluator"
    }


def _set(wanted: RenderedCluster, job: str) -> str:
    return f"{wanted.name}-{job}"


def _pod(wanted: RenderedCluster, job: str, index: int) -> str:
    return f"{_set(wanted, job)}-{index}"


def _labels(wanted: RenderedCluster, job: str | None = None) -> dict[str, str]:
    labels = {"app.kubernetes.io/name": "psfleet", "app.kubernetes.io/instance": wanted.name}
    return {**labels, "app.kubernetes.io/component": job} if job else labels


def _object(kind: str, version: str, name: str, wanted: RenderedCluster, job: str | None = None) -> dict[str, Any]:
    return {"apiVersion": version, "kind": kind, "metadata": {"name": name, "labels": _labels(wanted, job)}}


def _settings(wanted: RenderedCluster) -> dict[str, Any]:
    text = json.dumps(wanted.settings, indent=2) + "\n"
    return {**_object("ConfigMap", "v1", f"{wanted.name}-settings", wanted), "data": {"run.json": text}}


def _claim(wanted: RenderedCluster, size: str, storage_class: str | None) -> dict[str, Any]:
    spec: dict[str, Any] = {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": size}}}
    if storage_class:
        spec["storageClassName"] = storage_class
    return {**_object("PersistentVolumeClaim", "v1", f"{wanted.name}-shared", wanted), "spec": spec}


def _policy(wanted: RenderedCluster) -> dict[str, Any]:
    """Members reach each other, and others none of them: TensorFlow's ports know no password."""
    selector = {"matchLabels": _labels(wanted)}
    rule = {"from": [{"podSelector": selector}]}
    spec = {"podSelector": selector, "policyTypes": ["Ingress"], "ingress": [rule]}
    return {**_object("NetworkPolicy", "networking.k8s.io/v1", wanted.name, wanted), "spec": spec}


def _budget(wanted: RenderedCluster) -> dict[str, Any]:
    """One pod at a time is moved by those who drain nodes: a worker costs no pause, a ps a short one."""
    # With the coordinator among them none would be moved: Kubernetes counts by the scale, which a Job lacks.
    others = {"key": "app.kubernetes.io/component", "operator": "NotIn", "values": ["chief"]}
    spec = {"maxUnavailable": 1, "selector": {"matchLabels": _labels(wanted), "matchExpressions": [others]}}
    return {**_object("PodDisruptionBudget", "policy/v1", wanted.name, wanted), "spec": spec}


def _service(wanted: RenderedCluster, job: str) -> dict[str, Any]:
    spec = {
        "clusterIP": "None",
        # A member is asked before it is ready, and named in TF_CONFIG by this name.
        "publishNotReadyAddresses": True,
        "selector": _labels(wanted, job),
        "ports": [{"name": "grpc", "port": PORT}, {"name": "metrics", "port": METRICS_PORT}],
    }
    return {**_object("Service", "v1", _set(wanted, job), wanted, job), "spec": spec}


def _servers(wanted: RenderedCluster, job: str, count: int, image: str) -> dict[str, Any]:
    index = {"valueFrom": {"fieldRef": {"fieldPath": f"metadata.labels['{INDEX_LABEL}']"}}}
    template = _template(wanted, job, image, [{"name": "TASK_INDEX", **index}])
    spec = {
        "replicas": count,
        "serviceName": _set(wanted, job),
        "podManagementPolicy": "Parallel",  # members wait for each other
        "selector": {"matchLabels": _labels(wanted, job)},
        "template": template,
    }
    return {**_object("StatefulSet", "apps/v1", _set(wanted, job), wanted, job), "spec": spec}


def _coordinator(wanted: RenderedCluster, image: str) -> dict[str, Any]:
    template = _template(wanted, "chief", image, [{"name": "TASK_INDEX", "value": "0"}])
    template["spec"] |= {
        "hostname": _pod(wanted, "chief", 0),
        "subdomain": _set(wanted, "chief"),
        "restartPolicy": "Never",
    }
    rules = [
        {"action": "FailJob", "onExitCodes": {"operator": "In", "values": [USER_ERROR]}},
        {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
    ]
    spec = {"backoffLimit": MAX_FAILURES, "podFailurePolicy": {"rules": rules}, "template": template}
    return {**_object("Job", "batch/v1", _set(wanted, "chief"), wanted, "chief"), "spec": spec}


def _template(wanted: RenderedCluster, job: str, image: str, index: list[dict[str, Any]]) -> dict[str, Any]:
    spec = {
        "terminationGracePeriodSeconds": GRACE_SECONDS,
        "automountServiceAccountToken": False,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": USER,
            "fsGroup": USER,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [_container(wanted, job, image, index)],
        "volumes": [
            {"name": "settings", "configMap": {"name": f"{wanted.name}-settings"}},
            {"name": "shared", "persistentVolumeClaim": {"claimName": f"{wanted.name}-shared"}},
            {"name": "tmp", "emptyDir": {}},
            *_secrets(wanted, job),
        ],
    }
    return {"metadata": {"labels": _labels(wanted, job)}, "spec": spec}


def _container(wanted: RenderedCluster, job: str, image: str, index: list[dict[str, Any]]) -> dict[str, Any]:
    mounts = [
        {"name": "settings", "mountPath": SETTINGS, "readOnly": True},
        {"name": "shared", "mountPath": SHARED_DIR},
        {"name": "tmp", "mountPath": "/tmp"},
    ]
    if wanted.secrets.get(job):
        mounts.append({"name": "secrets", "mountPath": SECRETS, "readOnly": True})
    container: dict[str, Any] = {
        "name": "trainer",
        "image": image,
        "command": ["python", "-m", "trainer"],
        "env": [*index, *({"name": name, "value": value} for name, value in _environment(wanted, job).items())],
        "ports": [{"name": "grpc", "containerPort": PORT}, {"name": "metrics", "containerPort": METRICS_PORT}],
        "volumeMounts": mounts,
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
        **_probes(),
    }
    if gpus := wanted.gpus.get(job):
        container["resources"] = {"limits": {"nvidia.com/gpu": gpus}}
    return container


def _secrets(wanted: RenderedCluster, job: str) -> list[dict[str, Any]]:
    """Return the volume of a Secret that is made beforehand; a pod does not start that lacks one of its keys."""
    names = wanted.secrets.get(job, ())
    items = [{"key": name, "path": name} for name in names]
    secret = {"secretName": f"{wanted.name}-secrets", "defaultMode": READ_BY_GROUP, "items": items}
    return [{"name": "secrets", "secret": secret}] if names else []


def _environment(wanted: RenderedCluster, job: str) -> dict[str, str]:
    # Kubernetes puts the index in, since TASK_INDEX stands before.
    task = json.dumps({"cluster": addresses(wanted), "task": {"type": job, "index": "INDEX"}})
    return {
        "TF_CONFIG": task.replace('"INDEX"', "$(TASK_INDEX)"),
        "TRAINER_SETTINGS": f"{SETTINGS}/run.json",
        "TRAINER_METRICS": f"0.0.0.0:{METRICS_PORT}",
        **TASK_ENVIRONMENT,
        "DATA_DIR": f"{SHARED_DIR}/data",
        "HOME": "/tmp",
        "PYTHONDONTWRITEBYTECODE": "1",
        **({"CREDENTIALS_DIRECTORY": SECRETS} if wanted.secrets.get(job) else {}),
    }


def _probes() -> dict[str, Any]:
    """The trainer answers for its metrics from a thread of the process that lives: a frozen one answers nothing.

    The supervisor keeps the port while one process follows another, and a caller waits meanwhile.
    """
    get = {"httpGet": {"path": "/metrics", "port": "metrics"}, "timeoutSeconds": 10}
    return {
        "startupProbe": {**get, "periodSeconds": 5, "failureThreshold": 60},
        "livenessProbe": {**get, "periodSeconds": 15, "failureThreshold": 4},
    }
