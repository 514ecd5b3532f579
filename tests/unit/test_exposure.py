"""The sandbox of each unit that a role installs: systemd's score of it, and what it may write."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jinja2
import pytest
import yaml

from fleet.site.filters import FILTERS
from tests.rendered_firewall import ROLE as FIREWALL

ROOT = Path(__file__).parents[2]
SHARED = "/srv/trainer"
# What `systemd-analyze security` may say at most.
TASK, ONE_SHOT = 1.3, 4.0
MOST = {
    "trainer@.service": TASK,
    "tensorboard.service": TASK,
    "psfleet-firewall.service": ONE_SHOT,
    "psfleet-nvidia-devices.service": ONE_SHOT,
    "psfleet-remount.service": ONE_SHOT,
    "psfleet-snapshot.service": ONE_SHOT,
    "psfleet-wireguard.service": ONE_SHOT,
    "psfleet-gpu-metrics.service": TASK,
}
JOBS = ("chief", "ps", "worker", "evaluator", "dispatcher", "data")
# Newer than the oldest systemd of a host, Ubuntu 22.04's 249: such a line would only be warned of, and defend nothing.
TOO_NEW = {"RestrictNetworkInterfaces", "MemoryKSM", "PrivatePIDs", "ProtectControlGroupsEx", "PrivateHostname"}
LISTS = "\n[Service]\nIPAddressDeny=any\nIPAddressAllow=127.0.0.0/8\nIPAddressAllow=10.0.0.0/24\n"


def render(path: Path, **values: Any) -> str:
    environment = jinja2.Environment(trim_blocks=True, keep_trailing_newline=True, undefined=jinja2.StrictUndefined)
    environment.filters |= FILTERS | {
        "dirname": os.path.dirname,
        "combine": lambda *maps: {k: v for each in maps for k, v in each.items()},
    }
    given = {
        "ansible_managed": "Ansible managed",
        "trainer_start_seconds": 45,
        "trainer_stop_seconds": 600,
        "trainer_watchdog_seconds": 30,
        "tensorboard_logdir": f"{SHARED}/runs",
        "tensorboard_address": "10.0.0.1",
        "tensorboard_listen_port": 6006,
        "__nfs_client_unit": "srv-trainer.mount",
        "trainer_settings": {"shared_dir": SHARED},
        "node_exporter_gpu_number": 2,
        "snapshots_path": "/srv/nfs/trainer",
        **yaml.safe_load((ROOT / "roles/wireguard/vars/main.yml").read_text()),
    }
    return environment.from_string(path.read_text()).render(given | values)


def drop_in(job: str, limits: Mapping[str, Any] | None = None, writable: list[str] | None = None) -> str:
    """What a task of a job has beside its unit."""
    defaults = yaml.safe_load((ROOT / "roles/trainer/defaults/main.yml").read_text())
    known = yaml.safe_load((ROOT / "roles/trainer/vars/main.yml").read_text())
    given = {"trainer_limits": limits or {}, "trainer_writable_paths": writable or []}
    template = ROOT / "roles/trainer/templates/psfleet-task.conf.j2"
    return render(template, **defaults | known | given, item={"job": job})


def settings(text: str) -> list[tuple[str, str]]:
    return [line.partition("=")[::2] for line in text.splitlines() if re.match(r"[A-Za-z]+=", line)]


def installed() -> dict[str, Path]:
    """Every service that a role brings."""
    found = list((ROOT / "roles").glob("*/[ft]*/*.service*"))
    return {path.name.removesuffix(".j2"): path for path in found}


UNITS = installed()


@pytest.fixture
def score(tmp_path: Path) -> Any:
    if not shutil.which("systemd-analyze"):
        pytest.skip("no systemd-analyze here; tests/infra asks the hosts")

    def analyze(text: str) -> float:
        unit = tmp_path / "unit.service"
        unit.write_text(text)
        command = ["systemd-analyze", "security", "--offline=true", "--no-pager", str(unit)]
        done = subprocess.run(command, capture_output=True, text=True)
        if "unrecognized option" in done.stderr:
            pytest.skip("systemd-analyze is older than 250; tests/infra asks the hosts")
        (found,) = re.findall(r"Overall exposure level for \S+: ([0-9.]+)", done.stdout)
        return float(found)

    return analyze


def test_each_unit_of_a_role_has_a_bound() -> None:
    assert set(UNITS) == set(MOST)


@pytest.mark.parametrize("name", MOST)
def test_a_unit_exposes_no_more_than_it_must(name: str, score: Any) -> None:
    lists = LISTS if MOST[name] == TASK else ""
    assert score(render(UNITS[name]) + lists) <= MOST[name]


def test_a_task_with_gpus_exposes_little_more(score: Any) -> None:
    more = render(ROOT / "roles/gpu/templates/psfleet-gpu.conf.j2")
    assert score(render(UNITS["trainer@.service"]) + more + LISTS + drop_in("chief")) <= TASK


def test_no_unit_relies_on_what_the_oldest_systemd_does_not_know() -> None:
    """Ubuntu 22.04 has 249. The newest of these came with 248: PrivateIPC=."""
    for path in UNITS.values():
        assert not TOO_NEW & {key for key, _ in settings(path.read_text())}, path


@pytest.mark.parametrize(
    ("job", "wanted"),
    [
        ("chief", ["runs", "sweeps"]),
        ("ps", ["runs"]),
        ("worker", []),
        ("evaluator", ["runs"]),
        ("dispatcher", ["data-service"]),
        ("data", []),
    ],
)
def test_what_a_task_may_write_depends_on_its_job(job: str, wanted: list[str]) -> None:
    found = [value for key, value in settings(drop_in(job)) if key == "ReadWritePaths"]
    assert found == [f"-{SHARED}/{name}" for name in wanted]
    assert "ReadWritePaths" not in dict(settings(render(UNITS["trainer@.service"])))


def test_a_path_of_the_users_own_is_every_tasks() -> None:
    for job in JOBS:
        assert ("ReadWritePaths", "-/srv/cache") in settings(drop_in(job, writable=["/srv/cache"]))


def test_the_check_makes_what_tasks_may_write() -> None:
    writes = yaml.safe_load((ROOT / "roles/trainer/vars/main.yml").read_text())["__trainer_writes"]
    assert set(writes) == set(JOBS)
    for check in ("shared-path", "own-directory"):
        text = (ROOT / f"roles/storage/templates/psfleet-check-{check}.j2").read_text()
        (made,) = re.findall(r"for name in ([a-z -]+); do", text)
        assert {name for names in writes.values() for name in names} == set(made.split())


def test_limits_are_those_of_the_job_before_those_of_all() -> None:
    limits = {"all": {"memory_max": "50%", "cpu_weight": 50}, "worker": {"memory_max": "8G", "cpu_quota": "400%"}}
    taken = dict(settings(drop_in("worker", limits)))
    assert taken == {"MemoryMax": "8G", "CPUQuota": "400%", "CPUWeight": "50", "TasksMax": "16384"}
    assert dict(settings(drop_in("data", limits)))["MemoryMax"] == "50%"
    assert dict(settings(drop_in("data"))) == {"MemoryMax": "90%", "TasksMax": "16384"}


def test_what_unmounts_for_all_has_no_mounts_of_its_own() -> None:
    """With any of these systemd gives the process a view of its own, in which it would unmount."""
    own = r"Protect(System|Home|ControlGroups|Kernel\w+|Proc)|ProcSubset|Private(Tmp|Devices|Mounts|IPC|Network|Users)"
    own += r"|(ReadWrite|ReadOnly|Inaccessible|Exec|NoExec|Bind|BindReadOnly)Paths|TemporaryFileSystem|Root\w+"
    found = [key for key, _ in settings(UNITS["psfleet-remount.service"].read_text()) if re.fullmatch(own, key)]
    assert found == []


def test_a_table_is_loaded_into_the_places_that_its_unit_may_write() -> None:
    unit = dict(settings((FIREWALL / "files/psfleet-firewall.service").read_text()))
    known = yaml.safe_load((FIREWALL / "vars/main.yml").read_text())
    writable = [path.removeprefix("-") for path in unit["ReadWritePaths"].split()]
    for name in ("__firewall_kept", "__firewall_running"):
        assert any(Path(known[name]).is_relative_to(place) for place in writable), known[name]
