"""The short way of a start: where the hosts are as the roles want them but for code, run settings and choice.

Whether they are is asked of the hosts themselves, each time. Each step is then one script a host, all hosts at once,
and runs the roles' own modules with the roles' own variables.
"""

from __future__ import annotations

import base64
import hashlib
import json
import uuid
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from fleet.errors import ClusterTrouble, FleetError, OperatorMistake, first_line
from fleet.hosts.agent_request import pack, sources
from fleet.hosts.cluster import Cluster
from fleet.hosts.host_scripts import CURRENT, WARM, WARM_EARLY
from fleet.hosts.run import SETTINGS
from fleet.output.tables import ProgressLine
from fleet.places import ROLES, site_file
from fleet.rollout.desired_state import DesiredState, UnknownTask, files_differ
from fleet.rollout.release import CHANGES, STAGE, Recap, Shipment, ShipmentResult, read_release, sign_release
from fleet.rollout.roles import Role
from fleet.signals import undisturbed
from fleet.site.topology import Task
from trainer.core.failures import USER_ERROR
from trainer.run.release import kit_of

# The proof may take its time: RuntimeMaxSec= in roles/release/vars/main.yml.
STAGE_SECONDS = 1000
SWITCH_SECONDS = 120
CHECK = "/usr/local/sbin/psfleet-check-release"
SUMS = f"{CURRENT}/SHA256SUMS"
TUNNEL = "/etc/systemd/system/psfleet-wireguard.service"
FIREWALL = "/etc/systemd/system/psfleet-firewall.service"
UNIT = "/etc/systemd/system/trainer@.service"
# Whose hosts ansible/release.yml and training.yml name.
GROUPS = ("chief", "ps", "worker", "evaluator", "data", "tensorboard")
# What a module's finding means.
FINDINGS = {
    "reserved_ports": "the tasks' ports are not kept from other connections",
    "task_secrets": "its secrets are not those of the inventory",
    "firewall_table": "its packet filter is not the one that was kept",
    "python_environment": "its Python environment is not as it was installed",
}
# Whose supervisors import TensorFlow at once; an evaluator's waits for a checkpoint first.
WARM_JOBS = ("chief", "ps", "worker")


class ShortWay:
    """What a start does by itself, and whether it may."""

    def __init__(self, cluster: Cluster) -> None:
        self.start = uuid.uuid4().hex[:12]
        """By what name hosts know this start."""
        self._cluster = cluster
        self._inventory = cluster.inventory
        self._release: Mapping[str, Any] = {}
        self._files: Mapping[str, bytes] = {}
        self._kit: frozenset[str] = frozenset()  # its lines in the release's list of files
        self._wanted: dict[str, DesiredState] = {}
        self._firewalls: dict[str, Role | None] = {}  # by host, with the role firewall where the host is to be closed
        self._answers: Mapping[str, Any] = {}
        self._reasons: dict[str, str] = {}

    def questions(self, warm: bool = False) -> dict[str, dict[str, Any]]:
        """Return what each host is to look at, for `Cluster.observe`.

        With `warm` an idle chief imports TensorFlow from then on, where it can: its proof waits for that. The caller
        must cool it where it doesn't go on.
        """
        self._release, self._files = read_release(self._inventory)
        self._kit = kit_of(self._list())
        leads = self._inventory.chief.host
        asked = {}
        for host in self._inventory.hosts:
            try:
                asked[host] = self._question(host) | (self._warm_early(host) if warm and host == leads else {})
            except UnknownTask as unknown:
                self._reasons[host] = str(unknown)
            except Exception as error:  # whatever a template raises, Ansible says it in its own words
                self._reasons[host] = f"what it should hold can't be worked out here: {first_line(error)}"
        return asked

    def judge(self, answers: Mapping[str, Any], hosts: Sequence[str]) -> dict[str, str]:
        """Return by host why only Ansible can bring it where it should be; nothing where the short way will do."""
        self._answers = answers
        named = {host for group in GROUPS for host in self._inventory.groups.get(group, ())}
        idle = sorted(named - self._inventory.hosts.keys())
        reasons = dict.fromkeys(idle, "it has no task, and fab asks only hosts that have one")
        for host in hosts:
            try:
                reason = self._reasons.get(host) or self._reason(host)
            except Exception as error:
                reason = f"what it should hold can't be worked out here: {first_line(error)}"
            if reason:
                reasons[host] = reason
        return reasons

    def changes(self, shipment: Shipment) -> dict[str, list[str]]:
        """Say what the switch would change, by the names of Ansible's tasks."""
        hosts = [host for host in self._inventory.hosts if host not in shipment.without]
        moved = [host for host in hosts if self._current(host) != shipment.release]
        written = [host for host in hosts if not self._has_settings(host)]
        named = dict(zip(CHANGES, (moved, written), strict=True))
        return {name: hosts for name, hosts in named.items() if hosts}

    def ship(self, shipment: Shipment, display: ProgressLine) -> ShipmentResult:
        """Do what the playbooks of a shipment do; raises as fleet.rollout.release.ship."""
        if shipment.check:
            return ShipmentResult({}, self.changes(shipment))
        hosts = [host for host in self._inventory.hosts if host not in shipment.without]
        if shipment.playbooks == STAGE:
            display.show("shipping: stage and prove the release")
            return self._stage(shipment, hosts, display)
        display.show("shipping: switch to the release")
        return self._switch(shipment, hosts)

    def stage_alone(self, host: str, shipment: Shipment, display: ProgressLine) -> None:
        """Stage a release on one host; nothing is started or pruned there. Raises as `ship`."""
        display.show(f"shipping: stage the release on {host}")
        self._stage(shipment, [host], display, alone=True)

    def differences(self, host: str) -> dict[str, list[str]]:
        """Return by part of a release the files in which the checkout's differs from a host's current one."""
        here = {line for line in self._list() if not line.startswith("#")}
        there = {line for line in (self._answers[host]["texts"][SUMS] or "").splitlines() if not line.startswith("#")}
        found: dict[str, list[str]] = {"program": [], "kit": [], "environment": []}
        for name in sorted({line[66:] for line in here ^ there} - {"release.json"}):
            part = {"trainer": "kit", "locks": "environment"}.get(name.partition("/")[0], "program")
            found[part].append(name)
        return {part: names for part, names in found.items() if names}

    def prove(self, release: str, selection: Mapping[str, Any], display: ProgressLine) -> None:
        """Prove a choice with a release that the chief's host has, beside what runs; raises as `ship`."""
        host = self._inventory.chief.host
        shipment = Shipment(self._inventory, STAGE, release, selection, untried=True)
        steps = [self._proof(host, shipment, release, nice=19)]
        answer = self._act({host: {"steps": steps, "sources": sources(steps)}}, STAGE_SECONDS)[host]
        self._reject_unproven(host, answer["steps"].get("proof"), release, display)

    def _question(self, host: str) -> dict[str, Any]:
        trainer = Role(self._inventory, host, "trainer", "training.yml")
        wanted = self._wanted[host] = trainer.desired_state("main", {})
        wanted.checks += trainer.desired_state("secrets", {}).checks
        wanted.file(CHECK, "0755", (ROLES / "release/files" / Path(CHECK).name).read_text(encoding="utf-8"))
        steps = [{"name": f"{check['module']} {number}", **check} for number, check in enumerate(wanted.checks)]
        firewall = Role(self._inventory, host, "firewall", "training.yml")
        paths = [*wanted.files, TUNNEL, FIREWALL]
        self._firewalls[host] = None
        if firewall.value("__firewall_closes") != "none":
            self._firewalls[host] = firewall
            paths += firewall.desired_state("close").files
            asked = firewall.arguments("close", "firewall_facts")
            table = firewall.arguments("close", "try_firewall") | {"state": "tried"}
            steps += [
                {"name": "facts", "module": "firewall_facts", "arguments": asked, "check": True},
                {"name": "firewall_table", "module": "firewall_table", "arguments": table, "check": True},
                {"name": "firewall enabled", "command": ["systemctl", "is-enabled", Path(FIREWALL).name]},
                {"name": "firewall active", "command": ["systemctl", "is-active", Path(FIREWALL).name]},
            ]
        python = {"dest": "@environment", "lock": f"{CURRENT}/locks/@lock.txt", "wheels": CURRENT, "quick": True}
        steps.append({"name": "code", "command": [CHECK, CURRENT]})
        steps.append({"name": "python_environment", "module": "python_environment", "arguments": python, "check": True})
        kinds = (self._release.get(kind, {}) for kind in ("environments", "gpu_environments"))
        locks = [f"{CURRENT}/{each['lock']}" for kind in kinds for each in kind.values()]
        return {
            "look": [*paths, *locks],
            "read": [CURRENT, f"{CURRENT}/env", SUMS],
            "list": ["/etc/trainer"],
            "steps": steps,
            "sources": sources(steps),
        }

    def _reason(self, host: str) -> str | None:
        answer, wanted = self._answers.get(host), self._wanted[host]
        if answer is None:
            return "it can't be looked at"
        environment = self._environment(host)
        found = str(answer["texts"][f"{CURRENT}/env"]).rpartition("/")[2]
        if environment is None or found != environment["name"]:
            named = environment["name"] if environment else f"none for Python {answer['python']}"
            return f"its environment is {found}, and the release has {named}"
        lock = f"{CURRENT}/{environment['lock']}"
        digest = (answer["files"][lock] or ["", ""])[1]
        if not environment["name"].endswith(f"-{digest[:12]}"):
            return f"{lock} differs"
        names = {f"{task.name}.env" for task in self._inventory.tasks_on(host)}
        if gone := [name for name in answer["names"]["/etc/trainer"] if name.endswith(".env") and name not in names]:
            return f"/etc/trainer/{gone[0]} is of a task that is no longer there"
        encrypted = self._inventory.variables[host].get("cluster_encryption") is True
        if (answer["files"][TUNNEL] is not None) != encrypted:
            return f"{TUNNEL} {'is missing' if encrypted else 'exists'}"
        others = {path: state for path, state in wanted.files.items() if path != SETTINGS}  # which a switch writes
        if difference := files_differ(answer["files"], others) or self._firewall_difference(host, answer):
            return difference
        if answer["steps"]["code"]["rc"]:  # a part of it would be sent alone, and Ansible fixes the rest
            return str(answer["steps"]["code"]["stderr"]).strip()
        for name, result in answer["steps"].items():
            if result.get("failed") or result.get("changed"):
                return str(result.get("msg") or FINDINGS[name.split()[0]])
        return None

    def _firewall_difference(self, host: str, answer: Mapping[str, Any]) -> str | None:
        """Say in what a host's packet filter is not what it should be."""
        role = self._firewalls[host]
        if role is None:
            return None if answer["files"][FIREWALL] is None else f"{FIREWALL} exists"
        facts = answer["steps"]["facts"]
        if facts.get("failed"):
            return str(facts["msg"])
        if facts["unread"]:
            return "systemd has yet to read what an earlier run wrote"
        wanted = role.desired_state("close", {"__firewall_facts": facts})
        if wanted.refusals:
            return wanted.refusals[0]
        if difference := files_differ(answer["files"], wanted.files):
            return difference
        if answer["steps"]["firewall enabled"]["rc"] or answer["steps"]["firewall active"]["rc"]:
            return f"{Path(FIREWALL).name} is not enabled, or does not run"
        return None

    def _environment(self, host: str) -> Mapping[str, str] | None:
        """Return the release's environment for a host, and its lock."""
        minor = ".".join(self._answers[host]["python"].split(".")[:2])
        kind = "gpu_environments" if host in self._inventory.groups.get("gpu", ()) else "environments"
        found: Mapping[str, str] | None = self._release[kind].get(minor)
        return found

    def _list(self) -> list[str]:
        """Return the lines of the release's list of files."""
        return self._files[Path(SUMS).name].decode().splitlines()

    def _current(self, host: str) -> str:
        return str(self._answers[host]["texts"][CURRENT]).rpartition("/")[2]

    def _has_settings(self, host: str) -> bool:
        return not files_differ(self._answers[host]["files"], {SETTINGS: self._wanted[host].files[SETTINGS]})

    def _stage(
        self, shipment: Shipment, hosts: Sequence[str], display: ProgressLine, alone: bool = False
    ) -> ShipmentResult:
        release, chief = self._release, self._inventory.chief.host
        if release["id"] != shipment.release:
            raise OperatorMistake(
                f"the checkout became release {release['id']}, and release {shipment.release} was planned: its files "
                "changed meanwhile. Start again"
            )
        settings = Role(self._inventory, chief, "release", "release.yml")
        key, allowed = settings.value("release_key"), settings.value("release_signers")
        kept = site_file(settings.value("release_cache"))
        archive, signature, signers = sign_release(self._files, release["id"], kept, key, allowed)
        asked = {}
        packed = cache(lambda there: base64.b64encode(pack(archive, there)).decode())
        for host in hosts:
            environment = self._environment(host)
            assert environment is not None
            # What the host's current release has, byte by byte, need not be sent again.
            there = frozenset((self._answers[host]["texts"][SUMS] or "").splitlines())
            arguments = {
                "state": "staged", "id": release["id"], "archive": "@blobs/archive", "signature": signature,
                "signers": signers, "environment": environment["name"],
            }  # fmt: skip
            keep = {"root": "/opt/trainer", "keep": settings.value("release_keep"), "coming": release["id"]}
            has_kit = self._kit <= there
            steps: list[dict[str, Any]] = [
                *(self._warm(host) if has_kit and not alone else []),  # another kit may not know how to wait
                {"name": "stage", "module": "host_release", "arguments": arguments},
                *([] if alone else [{"name": "prune", "module": "release_prune", "arguments": keep}]),
            ]
            # The chief's host proves a program for all with its environment, and each a kit that it hasn't.
            like_chief = environment["name"] == self._environment(chief)["name"]  # type: ignore[index]
            if host == chief or not (self._current(host) == release["id"] or (like_chief and has_kit)):
                steps.append(self._proof(host, shipment, self._current(host)))
            asked[host] = {"steps": steps, "sources": sources(steps), "blobs": {"archive": packed(there)}}
        answers = self._act(asked, STAGE_SECONDS)
        for host, each in answers.items():
            self._reject_unproven(host, each["steps"].get("proof"), release["id"], display)
        return ShipmentResult({host: _recap(each) for host, each in answers.items()}, {})

    def _warm_early(self, host: str) -> dict[str, Any]:
        """Return what the agent does first, so that an idle chief imports TensorFlow while the start is planned."""
        kit = hashlib.sha256("\n".join(sorted(self._kit)).encode()).hexdigest()
        command = ["sh", "-c", WARM_EARLY, "sh", self.start, self._inventory.chief.unit]
        return {"warm": {"files": {UNIT: self._wanted[host].files[UNIT]}, "sums": SUMS, "kit": kit, "command": command}}

    def _warm(self, host: str) -> list[dict[str, Any]]:
        """Return the step that has a host's idle tasks import TensorFlow meanwhile."""
        idle = [task.unit for task in self._inventory.tasks_on(host) if task.job in WARM_JOBS]
        return [{"name": "warm", "command": ["sh", "-c", WARM, "sh", self.start, *idle]}] if idle else []

    def _proof(self, host: str, shipment: Shipment, current: str, nice: int = 0) -> dict[str, Any]:
        """Return the step that proves a release as tasks/prove.yml of the role release does."""
        role = Role(
            self._inventory, host, "release", "release.yml", "prove",
            psfleet_release=shipment.release,
            fab_shipment=shipment.as_variable,
            __release_now={"stdout_lines": [f"releases/{current}"]},
            __release_running=False,  # the choice is proven, whatever runs
            __release_nice=nice,
        )  # fmt: skip
        given = role.arguments("prove", "ansible.builtin.command")
        return {
            "name": "proof",
            "command": given["argv"],
            "directory": given["chdir"],
            "stdin": given["stdin"] if isinstance(given["stdin"], str) else json.dumps(given["stdin"]),
            "environment": role.value("__release_proof_environment"),
        }

    def _reject_unproven(self, host: str, proof: dict[str, Any] | None, release: str, display: ProgressLine) -> None:
        if proof is None:
            return
        lines = {f"{name}_lines": proof[name].splitlines() for name in ("stdout", "stderr")}
        role = Role(self._inventory, host, "release", "release.yml", "prove", __release_proof={**proof, **lines})
        if notes := role.value("__release_notes"):
            display.keep(f"host '{host}': " + "\n".join(notes))
        if proof["rc"] == USER_ERROR:
            raise OperatorMistake(f"host '{host}': {role.value('__release_said')}")
        if proof["rc"]:
            raise ClusterTrouble(f"host '{host}': release {release} does not work here: {role.value('__release_said')}")

    def _switch(self, shipment: Shipment, hosts: Sequence[str]) -> ShipmentResult:
        asked = {}
        for host in hosts:
            role = Role(self._inventory, host, "trainer", "training.yml")
            arguments = {"state": "current", "id": shipment.release}
            steps: list[dict[str, Any]] = [{"name": "switch", "module": "host_release", "arguments": arguments}]
            # As the handler of roles/release; but TensorBoard runs nothing of the program's.
            if self._kit != kit_of((self._answers[host]["texts"][SUMS] or "").splitlines()):
                board = ["systemctl", "try-restart", "tensorboard*.service"]
                steps.append({"name": "board", "command": board, "after": ["switch", "changed"]})
            if not self._has_settings(host):
                steps.append({"name": "settings", "write": SETTINGS, "text": self._wanted[host].texts[SETTINGS]})
            steps.append({"name": "stale", "module": "stale_tasks", "arguments": role.arguments("main", "stale_tasks")})
            asked[host] = {"steps": steps, "sources": sources(steps), "alone": True}
        try:
            answers = self._act(asked, SWITCH_SECONDS)
        except KeyboardInterrupt:
            # What is under way on the hosts has ended before anything is put back.
            with undisturbed():
                self._cluster.act({host: {"alone": True} for host in asked}, SWITCH_SECONDS)
            raise
        if any(each["steps"]["stale"].get("tasks") for each in answers.values()):
            self._cluster.publish_release(shipment.release)  # they may take minutes to end, and another to start
        leave_stale(self._cluster, answers)
        return ShipmentResult({host: _recap(each) for host, each in answers.items()}, {})

    def _act(self, asked: Mapping[str, Mapping[str, Any]], seconds: float) -> dict[str, Any]:
        answers = self._cluster.act(asked, seconds)
        reject_failures(answers)
        return answers


def prove_beside(cluster: Cluster, release: str, selection: Mapping[str, Any], display: ProgressLine) -> None:
    """Prove a choice with a release that the hosts have; raises as `ShortWay.ship`."""
    try:
        ShortWay(cluster).prove(release, selection, display)
    except FleetError:
        raise
    except Exception as error:  # whatever a template raises
        raise ClusterTrouble(f"the proof can't be worked out here: {first_line(error)}") from error


def leave_stale(cluster: Cluster, answers: Mapping[str, Any]) -> list[Task]:
    """Park or stop the tasks that run on older files, by what stale_tasks says of each host; returns them.

    They come back with the others that a start starts. A task that trains saves while the servers still run.
    """
    found = [each["steps"]["stale"] for each in answers.values()]
    stale, warm = ({name for each in found for name in each.get(kind, ())} for kind in ("tasks", "warm"))
    tasks = [task for task in cluster.inventory.tasks if task.name in stale]
    for leaving in ([task for task in tasks if not task.server], [task for task in tasks if task.server]):
        if leaving:
            # What trains in step stops at once.
            may_park = all(task.name in warm for task in leaving)
            (cluster.park if may_park else cluster.stop)(leaving)
    return tasks


def reject_failures(answers: Mapping[str, Any]) -> None:
    """Raise ClusterTrouble with what failed on hosts, as fleet/hosts/agent.py says it."""
    failed = [
        f"{host}: {result['msg']}"
        for host, each in answers.items()
        for result in each["steps"].values()
        if result.get("failed")
    ]
    if failed:
        raise ClusterTrouble("\n".join(failed))


def _recap(answer: Mapping[str, Any]) -> Recap:
    return Recap(sum(bool(result.get("changed")) for result in answer["steps"].values()), 0, 0)
