"""Measure the control machine's own work for simulated hosts: the spec, the files, the preflight. Nothing uses SSH.

In turn for each number of hosts: psfleet's functions alone, in this process; the same through Ansible
(ansible/preflight.yml, then the role's templates rendered for every host); this where no path is shared, with the
choice of the wheels that each host gets; and as many empty tasks, which is Ansible alone. Times are processor seconds
of all processes, so that a busy machine does not count as a slow one. Linear means that a host costs the same in a
large cluster as in a small one: the time of a host at the largest number of hosts, divided by that at the smallest.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jinja2
import yaml

from bench.commands import processor_seconds, run_command
from bench.options import parser_of, scratch_directory
from bench.tables import print_row
from fleet.site.filters import FILTERS
from fleet.site.preflight import preflight_problems
from fleet.site.topology import cluster_spec, host_tasks

ROOT = Path(__file__).resolve().parent.parent
RELEASE = ROOT / "roles" / "release" / "tasks" / "main.yml"
WHEELS = ("Choose who puts the wheels on the shared path, and which", "Put the wheels where they are installed from")
TEMPLATE = ROOT / "roles" / "trainer" / "templates" / "task.env.j2"
SITE = {
    "cluster_shared_dir": "/srv/trainer",
    "cluster_uid": 6006,
    "trainer_run": {"program": "trainer.examples.digits:Digits"},
}
ANSIBLE = "2.19.0"  # what the functions alone are given


def main() -> None:
    parser = parser_of("control", __doc__)
    parser.add_argument("--hosts", type=int, nargs="+", default=[100, 300, 1000], help="sizes of the cluster")
    parser.add_argument("--rounds", type=int, default=2, help="repetitions; the least time counts")
    parser.add_argument("--functions-only", action="store_true", help="without Ansible: seconds, not minutes")
    args = parser.parse_args()
    os.chdir(ROOT)
    # Ansible would compile the filters in the process of each host's task: twice the time, on no operator's machine.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    columns: dict[str, list[float]] = {}
    for number in args.hosts:
        for name, seconds in measure(number, args.rounds, with_ansible=not args.functions_only).items():
            columns.setdefault(name, []).append(seconds)
    print_table(args.hosts, columns)


def measure(number: int, rounds: int, *, with_ansible: bool) -> dict[str, float]:
    """Measure a cluster of so many hosts: {what: processor seconds}."""
    groups = groups_of(number)
    with scratch_directory() as scratch:
        inventory = scratch / "hosts.yml"
        inventory.write_text(yaml.safe_dump(inventory_of(groups)))
        alone = scratch / "alone.yml"
        without_path = inventory_of({job: hosts for job, hosts in groups.items() if job != "evaluator"})
        without_path["all"]["vars"] = SITE | {"cluster_shared_dir": ""}
        alone.write_text(yaml.safe_dump(without_path))
        wheels = scratch / "wheels.yml"
        wheels.write_text(yaml.safe_dump(wheels_play()))
        work: dict[str, Callable[[], object]] = {
            "psfleet's functions alone": lambda: render_all(groups, scratch / "files"),
        }
        if with_ansible:
            work |= {
                "fab validate": lambda: run_command(["fab", "validate", "--inventory", str(inventory)]),
                "preflight and files through Ansible": lambda: play(
                    inventory, "ansible/preflight.yml", "bench/control.yml"
                ),
                "the same and the wheels, without a shared path": lambda: play(
                    alone, "ansible/preflight.yml", "bench/control.yml", str(wheels)
                ),
                "as many empty tasks (Ansible alone)": lambda: play(inventory, "bench/control_empty.yml"),
            }
        least = dict.fromkeys(work, float("inf"))
        for _ in range(rounds):
            for name, each in work.items():
                before = processor_seconds()
                each()
                least[name] = min(least[name], processor_seconds() - before)
                print(f"{number} hosts, {name}: {least[name]:.2f} s", file=sys.stderr, flush=True)
    return least


# Simulated clusters


def groups_of(number: int) -> dict[str, dict[str, dict[str, Any]]]:
    """Divide hosts among the jobs: one head, a tenth parameter servers, the rest workers; each with its address."""
    if not 3 <= number <= 60_000:
        raise ValueError(f"{number} hosts; expected 3 to 60,000: a head, a parameter server, a worker or more of them")
    addresses = ({"ansible_host": f"10.{16 + i // 250}.{i % 250 // 25}.{i % 25 + 1}"} for i in range(number))
    servers = max(1, number // 10)
    head = {"head": next(addresses)}
    return {
        "chief": head,
        "evaluator": {"head": {}},
        "tensorboard": {"head": {}},
        "ps": {f"ps-{i}": next(addresses) for i in range(servers)},
        "worker": {f"worker-{i}": next(addresses) for i in range(number - servers - 1)},
    }


def inventory_of(groups: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Write the groups as Ansible's YAML inventory, with the site's variables."""
    return {"all": {"vars": SITE, "children": {job: {"hosts": dict(hosts)} for job, hosts in groups.items()}}}


def wheels_play() -> list[dict[str, Any]]:
    """Write a play of the role's tasks that choose each host's wheels, with nothing that copies them."""
    chosen, put = (task for task in yaml.safe_load(RELEASE.read_text()) if task["name"] in WHEELS)
    put["ansible.builtin.include_tasks"] = str(ROOT / "bench" / "control_wheels.yml")
    return [
        {
            "name": "Choose each host's wheels",
            "hosts": "all",
            "gather_facts": False,
            "vars": yaml.safe_load((RELEASE.parent.parent / "vars" / "main.yml").read_text())
            | {"release_wheels_shared": False, "release_gpu_hosts": [], "release_lock": "locks/cpu"},
            "tasks": [
                {
                    "name": "Pretend to have asked each host for its Python",
                    "ansible.builtin.set_fact": {"python_version": "3.11.2", "cacheable": True},
                    "run_once": True,
                },
                chosen,
                put,
            ],
        }
    ]


# The work


def render_all(groups: Mapping[str, Mapping[str, Mapping[str, Any]]], directory: Path) -> None:
    """Do with psfleet's functions what the playbooks do with them: check, derive, and write each task's file."""
    hostvars: dict[str, dict[str, Any]] = {}
    for hosts in groups.values():
        for host, variables in hosts.items():
            hostvars.setdefault(host, dict(SITE)).update(variables)
    members = {"all": list(hostvars)} | {job: list(hosts) for job, hosts in groups.items()}
    problems = preflight_problems(members, hostvars, ANSIBLE)
    if problems:
        sys.exit("bench/control: " + "\n".join(problems))
    spec = cluster_spec(members, hostvars)
    environment = jinja2.Environment(autoescape=False)
    environment.filters.update(FILTERS)
    template = environment.from_string(TEMPLATE.read_text())
    for host in members["all"]:
        (directory / host).mkdir(parents=True, exist_ok=True)
        for task in host_tasks(spec, host):
            text = template.render(item=task, trainer_settings={"shared_dir": "/srv/trainer"}, ansible_managed="")
            (directory / host / f"{task['name']}.env").write_text(text)


def play(inventory: Path, *playbooks: str) -> None:
    environment = {**os.environ, "ANSIBLE_STDOUT_CALLBACK": "ansible.builtin.minimal", "ANSIBLE_DISPLAY_OK_HOSTS": "0"}
    run_command(["ansible-playbook", "--connection", "local", "-i", str(inventory), *playbooks], environment)


# The table


def print_table(numbers: list[int], columns: Mapping[str, list[float]]) -> None:
    hosts = (f"{number:,} hosts, s" for number in numbers)
    print_row("processor time", *hosts, "a host, largest / smallest", head=True)
    for name, seconds in columns.items():
        print_row(name, *(f"{each:.2f}" for each in seconds), f"{growth(numbers, seconds):.2f}")


def growth(numbers: list[int], seconds: list[float]) -> float:
    """How much more a host costs in the largest cluster than in the smallest: 1 when the time is linear."""
    return (seconds[-1] / numbers[-1]) / (seconds[0] / numbers[0])


if __name__ == "__main__":
    main()
