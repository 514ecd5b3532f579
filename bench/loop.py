"""Measure what is typed all day: a start after an edit, `site.yml` again, `status`, `stop`; and the floors beside them.

On a lab that stands still and that `site.yml` has made right. Each round edits one line of a program, starts a new run
of it to its first trained step, asks for the status while it trains, edits again, starts another run, and
stops. After the last one `site.yml` runs, once. The unit is `import tensorflow` on the chief's host, measured in the
same run: machines differ, and so do their hours. Processor time is the control machine's own, of the command and all
that it started. The lab's hosts share this machine's processors.
With --hosts, and without a lab: the control machine's own part of a start for simulated hosts, whose answers are made
up. Nothing is sent.
"""

from __future__ import annotations

import io
import json
import os
import re
import shlex
import shutil
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from bench.commands import processor_seconds, run_command
from bench.control import groups_of, inventory_of
from bench.options import parser_of, scratch_directory
from bench.tables import print_row
from fleet.hosts.agent_request import feed
from fleet.hosts.cluster import Cluster
from fleet.output.tables import ProgressLine
from fleet.rollout.release import STAGE, SWITCH, Shipment
from fleet.rollout.short_way import CURRENT, SUMS, ShortWay
from fleet.site.inventory import load_inventory

ROOT = Path(__file__).resolve().parent.parent
IMPORT = f"{CURRENT}/env/bin/python -c 'import tensorflow'"
# Long enough that each run trains still when it is stopped.
STEPS = 10_000_000
# What a host says of itself that firewall_facts asks for.
FACTS = {
    "nft": "/usr/sbin/nft",
    "unread": False,
    "first": False,
    "ssh_ports": [22],
    "login_uid": 1000,
    "scraper_uid": None,
    "name_servers": [],
    "resolved": {},
    "peers": [],
    "vpn": {},
    "listening": [],
    "others": [],
}


def main() -> None:
    parser = parser_of("loop", __doc__)
    parser.add_argument("--rounds", type=int, default=3, help="repetitions; medians are printed")
    parser.add_argument("--hosts", type=int, nargs="+", help="so many simulated hosts instead of the lab's")
    args = parser.parse_args()
    os.chdir(ROOT)
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # an operator's `fab` finds its modules compiled
    if args.hosts:
        simulate(args.hosts)
    else:
        with scratch_directory() as scratch:
            measure(scratch, args.rounds)


def show(rows: dict[str, list[tuple[float, float]]], counted: dict[str, dict[str, int]]) -> None:
    """Print the medians of each command's seconds, and what it has counted."""
    unit = statistics.median(seconds for seconds, _ in rows["import tensorflow"])
    kinds = ("processes", "connections", "scripts")
    print_row("what", "s", "imports", "processor, s", *kinds, head=True)
    for name, found in rows.items():
        seconds, used = (statistics.median(column) for column in zip(*found, strict=True))
        print_row(
            name,
            f"{seconds:.2f}",
            f"{seconds / unit:.2f}",
            f"{used:.2f}",
            *(str(counted.get(name, {}).get(kind, "")) for kind in kinds),
        )


def measure(scratch: Path, rounds: int) -> None:
    """Print a row for each command: seconds, in imports, and the control machine's processor seconds."""
    inventory, program = prepare(scratch)
    chief = load_inventory(str(inventory)).chief.host
    at = ["--inventory", str(inventory)]
    play = ["ansible-playbook", "--inventory", str(inventory), "site.yml"]
    bare = ssh_command(str(inventory), chief)
    counts = scratch / "counts"
    fab = [sys.executable, "-m", "bench.counted", str(counts)]
    rows: dict[str, list[tuple[float, float]]] = {}
    counted: dict[str, dict[str, int]] = {}
    for number in range(rounds):
        run = f"loop-{time.time():.0f}"

        def edited(run: str) -> None:
            with program.open("a") as file:
                file.write(f"# {run}\n")
            started([*fab, "start-cluster", "--run", run, "--detach", *at])

        work: dict[str, Callable[[], object]] = {
            "import tensorflow": lambda: run_command([*bare, IMPORT]),
            "bare SSH": lambda: run_command([*bare, "true"]),
            "`ansible -m ping`": lambda: run_command(["ansible", *at, "all", "-m", "ping"]),
            "`fab start-cluster` after an edit, to its first step": partial(edited, run),
            "`fab status` while it trains": lambda: run_command([*fab, "status", *at]),
            "`fab start-cluster` after an edit, while a run trains": partial(edited, f"{run}-2"),
            "`fab stop-cluster`": lambda: run_command([*fab, "stop-cluster", *at]),
        }
        if number == rounds - 1:
            work["second `site.yml`"] = lambda: run_command(play)
        for name, each in work.items():
            rows.setdefault(name, []).append(cost(each))
            if counts.exists():
                counted[name] = json.loads(counts.read_text())
                counts.unlink()
            seconds, used = rows[name][-1]
            print(f"{name}: {seconds:.2f} s, {used:.2f} s of the processor", file=sys.stderr, flush=True)
    show(rows, counted)


def prepare(scratch: Path) -> tuple[Path, Path]:
    """Copy the lab's inventory with a program of its own; returns the inventory and the program's file."""
    inventory, program = scratch / "lab", scratch / "program" / "edited.py"
    shutil.copytree(ROOT / "inventory" / "lab", inventory)
    program.parent.mkdir()
    digits = ROOT / "trainer" / "examples" / "digits.py"
    program.write_text(digits.read_text())
    shutil.copy(digits.with_suffix(".npz"), program.with_suffix(".npz"))
    site = inventory / "group_vars" / "all.yml"
    values = yaml.safe_load(site.read_text())
    values["release_program"] = str(program.parent)
    values["trainer_run"] |= {"program": "edited:Digits", "steps": STEPS}
    site.write_text(yaml.safe_dump(values))
    return inventory, program


def ssh_command(inventory: str, name: str) -> list[str]:
    """Return OpenSSH's command that reaches a host."""
    host = load_inventory(inventory).hosts[name]
    options = [word for option, value in host.ssh_options.items() for word in ("-o", f"{option}={value}")]
    key = ["-i", str(host.key_file)] if host.key_file else []
    return ["ssh", *options, *key, f"{host.user}@{host.address}"]


def started(command: list[str]) -> None:
    """Start, and refuse a start that went Ansible's way: it is what is measured here."""
    output = run_command(command)
    if ways := re.findall(r"^  way     by Ansible: (.*)", output, re.MULTILINE):
        sys.exit(f"bench/loop: {shlex.join(command)} went Ansible's way: {ways[0]}")


def cost(work: Callable[[], object]) -> tuple[float, float]:
    """Return the seconds and the processor seconds that it takes, those of its children too."""
    begun, used = time.monotonic(), processor_seconds()
    work()
    return time.monotonic() - begun, processor_seconds() - used


class Simulated(Cluster):
    """Hosts that hold what they should, and do at once what they are asked."""

    def act(self, asked: Any, seconds: float) -> dict[str, Any]:
        for each in asked.values():
            feed(each)
        answer = {"steps": {"stale": {}, "proof": {"rc": 0, "stdout": "", "stderr": ""}}}
        return dict.fromkeys(asked, answer)


def simulate(numbers: list[int]) -> None:
    """Print the control machine's processor seconds of a start after an edit, by the number of hosts."""
    print_row("hosts", "processor, s", "each host, ms", head=True)
    for number in numbers:
        with scratch_directory() as scratch:
            place = scratch / "hosts.yml"
            place.write_text(yaml.safe_dump(inventory_of(groups_of(number))))
            used = simulate_start(str(place))
        print_row(str(number), f"{used:.1f}", f"{1000 * used / number:.0f}")


def simulate_start(place: str) -> float:
    """Return the control machine's processor seconds; what makes the answers up is no part of it."""
    begun = processor_seconds()
    inventory = load_inventory(place, check=True)
    hosts: Any = None
    short = ShortWay(Simulated(inventory, hosts))
    asked = short.questions()
    for each in asked.values():
        feed(each)
    asking = processor_seconds() - begun
    answers = {host: answer_of(short, host, each) for host, each in asked.items()}
    begun = processor_seconds()
    reasons = short.judge(answers, list(asked))
    if reasons:
        sys.exit(f"bench/loop: {next(iter(reasons.items()))}")
    progress = ProgressLine(io.StringIO())
    for playbooks in (STAGE, SWITCH):
        short.ship(Shipment(inventory, playbooks, str(short._release["id"]), {"run": "loop"}), progress)
    return asking + processor_seconds() - begun


def answer_of(short: ShortWay, host: str, asked: dict[str, Any]) -> dict[str, Any]:
    """Say what a host says that is as it should be and has the release before; the firewall's files are made for it."""
    firewall = short._firewalls[host]
    wanted = dict(short._wanted[host].files)
    if firewall is not None:
        wanted |= firewall.desired_state("close", {"__firewall_facts": FACTS}).files
    python = next(iter(short._release["environments"]))
    environment = short._release["environments"][python]
    wanted[f"{CURRENT}/{environment['lock']}"] = ["0644", environment["name"].rpartition("-")[2]]
    return {
        "python": python,
        "files": {path: wanted.get(path) for path in asked["look"]},
        "texts": {CURRENT: "releases/before", f"{CURRENT}/env": f"../../envs/{environment['name']}", SUMS: ""},
        "names": {"/etc/trainer": []},
        "steps": {step["name"]: {"rc": 0, **FACTS} for step in asked["steps"]},
    }


if __name__ == "__main__":
    main()
