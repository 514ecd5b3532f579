"""Compare psfleet's environment step with plain pip on every host, and a second site.yml with bare stat tasks.

On fresh lab hosts, the same lock both ways, each with nothing cached: ansible/release.yml (fetch once, distribute,
install, compile), and `pip install` in a new virtual environment on all hosts at once. Bytes are what the lab
machine's uplink received, which carries the hosts' traffic as well as its own. The lab's hosts share this machine's
processors: the ratio of the processor time says more than that of the time where something else runs as well.
"""

from __future__ import annotations

import json
import os
import re
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from bench.commands import processor_seconds, run_command
from bench.options import parser_of, scratch_directory
from bench.tables import print_row
from lab.machine import hosts

ROOT = Path(__file__).resolve().parent.parent
# pip's settings that say how to reach an index. Local sources are left out: the hosts don't have them.
INDEX_SETTINGS = ("index-url", "extra-index-url", "proxy", "trusted-host", "default-timeout", "timeout", "retries")
PROXIES = ("http_proxy", "https_proxy", "no_proxy")
PLAIN = "/opt/plain-pip"
RELEASES = "/opt/trainer/releases"


def main() -> None:
    parser = parser_of("provision", __doc__)
    parser.epilog = (
        "Needs a fresh lab (make clean lab), and the package index within reach of this machine and the hosts."
    )
    parser.add_argument("--first", choices=("psfleet", "plain"), default="psfleet", help="whose turn comes first")
    parser.add_argument("--rounds", type=int, default=5, help="runs of site.yml and of the stat tasks, in turn")
    parser.add_argument("--only", choices=("environment", "second"), help="one of the two comparisons")
    args = parser.parse_args()
    os.chdir(ROOT)
    with scratch_directory() as scratch:
        if args.only != "second":
            compare_environments(scratch, args.first)
        if args.only != "environment":
            compare_second_run(scratch, args.rounds)


def compare_environments(scratch: Path, first: str) -> None:
    """Make the environment on every host both ways and print what each cost."""
    settings = index_settings(pip_config(), os.environ)
    on_hosts = {"bench_environment": PLAIN, "bench_pip_settings": settings | {"PIP_CERT": f"{PLAIN}.crt"}}
    needs = {"bench_certificates": certificates(), "bench_python": "3.11"}
    play("bench/plain_pip_needs.yml", variables=on_hosts | needs)
    play("ansible/preflight.yml", "ansible/base.yml", "ansible/storage.yml")
    turns: dict[str, Callable[[], object]] = {
        # Its own cache: that of the checkout may hold the wheels.
        "psfleet": lambda: play("ansible/release.yml", variables={"release_cache": str(scratch)}, environment=settings),
        "plain": lambda: play("bench/plain_pip.yml", variables=on_hosts),
    }
    cost: dict[str, dict[str, float]] = {}
    for name in sorted(turns, key=lambda name: name != first):
        os.sync()  # neither pays for what the other wrote
        before = received_bytes(), processor_time()
        seconds = clock(turns[name])
        cost[name] = {
            "seconds": seconds,
            "bytes": received_bytes() - before[0],
            "processor": processor_time() - before[1],
        }
        print(f"{name}: {seconds:.0f} s, {cost[name]['bytes'] / 1e6:,.0f} MB", file=sys.stderr, flush=True)
    # Fresh hosts have one release, which nothing has switched to.
    psfleet = on_chief(f"ls -d {RELEASES}/*/env")["stdout"]
    for name, path in {"psfleet": psfleet, "plain": PLAIN}.items():
        cost[name] |= look_at_environment(path)
    release = on_chief(f"du --summarize --bytes {RELEASES}")["stdout"].split()[0]
    print_environments(cost["psfleet"], cost["plain"], int(release))


def look_at_environment(path: str) -> dict[str, float]:
    """Measure an environment on the chief's host: its size, and the import of TensorFlow as a task would do it."""
    python = f"{path}/bin/python -c 'import tensorflow'"
    drop_caches()
    first = seconds_of(on_chief(python))
    second = seconds_of(on_chief(python))
    # Bytecode looked for where there is none: what the import would cost if nothing had been compiled.
    uncompiled = seconds_of(on_chief("PYTHONDONTWRITEBYTECODE=1 PYTHONPYCACHEPREFIX=/nowhere " + python))
    size = int(on_chief(f"du --summarize --bytes {path}/")["stdout"].split()[0])
    return {"size": size, "first": first, "second": second, "uncompiled": uncompiled}


def compare_second_run(scratch: Path, rounds: int) -> None:
    """Run site.yml and as many stat tasks on the same hosts in turn, and print their times."""
    play("site.yml")
    report = play("site.yml", environment={"ANSIBLE_STDOUT_CALLBACK": "ansible.posix.json"})
    run = json.loads(report[report.index("{\n") :])
    changed = {host: stats["changed"] for host, stats in run["stats"].items() if stats["changed"]}
    if changed:
        sys.exit(f"bench/provision: the second site.yml changed something: {changed}")
    shape = shape_of(run)
    # Beside the checkout's ansible.cfg nothing counts, wherever the playbook lies.
    stats = scratch / "stat_tasks.yml"
    stats.write_text(json.dumps(stat_plays(shape)))
    seconds: dict[str, list[float]] = {"site": [], "stat": []}
    for _ in range(rounds):
        seconds["site"].append(clock(lambda: play("site.yml")))
        seconds["stat"].append(clock(lambda: play(str(stats))))
        print(
            f"site.yml {seconds['site'][-1]:.1f} s, stat tasks {seconds['stat'][-1]:.1f} s", file=sys.stderr, flush=True
        )
    print_second_runs(seconds["site"], seconds["stat"], shape)


# Counting


def shape_of(run: Mapping[str, Any]) -> list[list[tuple[str, ...]]]:
    """Read from the JSON report of a run, for each play, the hosts on which each task ran (skipped ones left out)."""
    shape = []
    for each in run["plays"]:
        tasks = [
            tuple(sorted(host for host, result in task["hosts"].items() if not result.get("skipped")))
            for task in each["tasks"]
        ]
        shape.append([hosts for hosts in tasks if hosts])
    return [tasks for tasks in shape if tasks]


def stat_plays(shape: list[list[tuple[str, ...]]]) -> list[dict[str, Any]]:
    """Write a playbook of as many plays with as many `stat` tasks on as many hosts as a run had."""
    plays = []
    for number, tasks in enumerate(shape, 1):
        hosts = sorted({host for task in tasks for host in task})
        play: dict[str, Any] = {
            "name": f"Look, as often as play {number} of site.yml did something",
            "hosts": hosts,
            "become": hosts != ["localhost"],
            "gather_facts": False,
            "tasks": [],
        }
        for task in tasks:
            look: dict[str, Any] = {"name": "Look", "ansible.builtin.stat": {"path": "/etc/hostname"}}
            if len(task) == 1 < len(hosts):
                look["run_once"] = True
            elif len(task) < len(hosts):
                look["when"] = f"inventory_hostname in {list(task)}"
            play["tasks"].append(look)
        plays.append(play)
    return plays


# How this machine reaches the index, the same for both sides


def index_settings(config: str, environment: Mapping[str, str]) -> dict[str, str]:
    """Read the output of `pip config list` as variables that make any pip use the same index in the same way."""
    settings = {name: value for name, value in environment.items() if name.lower() in PROXIES}
    for key, value in re.findall(r"(?m)^\S+\.([\w-]+)='(.*)'$", config):
        remote = " ".join(word for word in value.split() if not word.startswith(("file:", "/")))
        if key in INDEX_SETTINGS and remote:
            settings["PIP_" + key.replace("-", "_").upper()] = remote
    return settings | {"PIP_CONFIG_FILE": os.devnull, "PIP_FIND_LINKS": "", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}


def certificates() -> str:
    """Name the file of the authorities that this machine's pip trusts."""
    named = re.findall(r"(?m)^\S+\.cert='(.*)'$", pip_config())
    named += [os.environ[name] for name in ("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE") if os.environ.get(name)]
    return next(iter(named), "/etc/ssl/certs/ca-certificates.crt")


def pip_config() -> str:
    return run_command([sys.executable, "-m", "pip", "config", "list"])


# Running and measuring


def play(
    *playbooks: str, variables: Mapping[str, Any] | None = None, environment: Mapping[str, str] | None = None
) -> str:
    """Run playbooks and return what they printed."""
    extra = ["--extra-vars", json.dumps(variables)] if variables else []
    return run_command(["ansible-playbook", *extra, *playbooks], {**os.environ, **(environment or {})})


def on_chief(command: str) -> dict[str, Any]:
    """Run a shell command as root on the chief's host and return the module's result."""
    arguments = ["ansible", "chief", "--become", "-m", "ansible.builtin.shell", "-a", command]
    environment = {"ANSIBLE_STDOUT_CALLBACK": "ansible.posix.json", "ANSIBLE_LOAD_CALLBACK_PLUGINS": "1"}
    report = json.loads(run_command(arguments, {**os.environ, **environment}))
    return next(iter(report["plays"][0]["tasks"][0]["hosts"].values()))


def seconds_of(result: Mapping[str, Any]) -> float:
    hours, minutes, seconds = result["delta"].split(":")
    return int(hours) * 3600 + int(minutes) * 60 + float(seconds)


def clock(work: Callable[[], object]) -> float:
    began = time.monotonic()
    work()
    return time.monotonic() - began


def received_bytes() -> int:
    """Bytes that this machine's uplink received: its own traffic, and that of the hosts behind it."""
    route = json.loads(run_command(["ip", "-json", "route", "show", "default"]))[0]
    return int(Path(f"/sys/class/net/{route['dev']}/statistics/rx_bytes").read_text())


def processor_time() -> float:
    """Processor seconds of the lab's hosts and of the commands that this one ran; another's load is no part of it."""
    used = re.findall(
        r"CPU use: +([\d.]+) seconds", "".join(run_command(["lxc-info", "-S", "-n", name]) for name in hosts())
    )
    return processor_seconds() + sum(map(float, used))


def drop_caches() -> None:
    os.sync()
    Path("/proc/sys/vm/drop_caches").write_text("3\n")


# Tables


def print_environments(psfleet: Mapping[str, float], plain: Mapping[str, float], release: int) -> None:
    print_row("environment", "psfleet", "plain pip", "ratio", head=True)
    for title, key, unit, form in (
        ("time for all hosts, s", "seconds", 1, "0.0f"),
        ("processor time of hosts and control machine, s", "processor", 1, ",.0f"),
        ("bytes from outside, MB", "bytes", 1e6, ",.0f"),
        ("first `import tensorflow`, nothing in memory, s", "first", 1, ".1f"),
        ("second, s", "second", 1, ".1f"),
        ("the same without bytecode, s", "uncompiled", 1, ".1f"),
        ("disk of an environment, MB", "size", 1e6, ",.0f"),
    ):
        ours, theirs = psfleet[key], plain[key]
        print_row(title, f"{ours / unit:{form}}", f"{theirs / unit:{form}}", f"{ours / theirs:.2f}")
    print_row("disk of a release, MB", f"{release / 1e6:.2f}", "", "")


def print_second_runs(site: list[float], stat: list[float], shape: list[list[tuple[str, ...]]]) -> None:
    tasks = sum(len(each) for each in shape)
    head = f"{tasks} tasks in {len(shape)} plays, {len(site)} rounds in turn"
    print_row(head, "median, s", "from - to, s", head=True)
    for name, found in (("second `site.yml`", site), ("as many `stat` tasks", stat)):
        print_row(name, f"{statistics.median(found):.1f}", f"{min(found):.1f} - {max(found):.1f}")
    print_row("ratio", f"{statistics.median(site) / statistics.median(stat):.2f}", "")


if __name__ == "__main__":
    main()
