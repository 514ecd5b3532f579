"""Every phase of site.yml survives hosts that are lost at its beginning, in its middle and at its end."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from fleet.output.tables import render_table
from tests.hosts import ROOT, listed_inventory
from tests.lost_hosts import RETRY, Run, assert_right, damage, environments, lose, pull_plug, restored, site

VICTIMS = ["ps-1", "worker-0", "worker-1"]
PHASES = [
    "Look at every machine before it is changed",
    "Make every machine ready for training",
    "Prove that every host sees the same shared path, or has a directory of its own",
    "Install the release and its Python environment",
    "Prove the release",
    "Switch to the release",
    "Close the hosts to strangers",
    "Configure the training tasks",
]


@pytest.fixture(scope="session")
def lab() -> dict[str, object]:
    truth = listed_inventory()
    return {host: None for job in ("chief", "ps", "worker") for host in truth[job]["hosts"]}


@pytest.fixture(scope="session")
def rows(lab: dict[str, object]) -> Iterator[list[tuple[object, ...]]]:
    rows: list[tuple[object, ...]] = []
    yield rows
    header = ("PHASE", "LOST", "RIGHT", "CODE", "SECONDS")
    print(f"\n{render_table(header, rows)}")


@pytest.fixture(scope="session")
def untouched(lab: dict[str, object]) -> Run:
    """A run that nobody disturbs: it says which tasks a phase has that finds something to do."""
    for host in lab:
        damage(host)
    run = site()
    assert run.code == 0, run.output
    return run


@pytest.mark.parametrize("phase", PHASES)
def test_a_phase_goes_on_without_hosts_that_are_lost_in_it(
    lab: dict[str, object], untouched: Run, rows: list[tuple[object, ...]], phase: str
) -> None:
    run = lose(lab, untouched.phases[phase], phase, VICTIMS)
    rows.append((phase, len(VICTIMS), len(lab) - len(VICTIMS), run.code, round(run.seconds)))
    assert_right(lab)


def test_a_host_that_loses_its_power_in_mid_phase_is_finished_when_it_is_back(
    lab: dict[str, object], untouched: Run, rows: list[tuple[object, ...]]
) -> None:
    phase = "Install the release and its Python environment"
    tasks = untouched.phases[phase]
    run = lose(lab, [tasks[len(tasks) // 2]], phase, ["worker-1"], pull_plug)
    rows.append((f"{phase}, without power", 1, len(lab) - 1, run.code, round(run.seconds)))
    assert_right(lab)


def test_the_last_phase_loses_the_host_that_shows_the_training(
    lab: dict[str, object], untouched: Run, rows: list[tuple[object, ...]]
) -> None:
    phase = "Serve alerts, metrics and TensorBoard"
    run = lose(lab, untouched.phases[phase], phase, ["head"])
    rows.append((phase, 1, len(lab) - 1, run.code, round(run.seconds)))
    assert_right(lab)


@pytest.fixture
def with_server(tmp_path: Path) -> Iterator[Path]:
    """The lab's inventory with ps-0 as the server of the shared path, which containers can't be."""
    hosts = yaml.safe_load((ROOT / "inventory/lab/hosts.yml").read_text()) | {"nfs_server": {"hosts": {"ps-0": None}}}
    variables = yaml.safe_load((ROOT / "inventory/lab/group_vars/all.yml").read_text())
    variables |= {"cluster_nfs_dir": "/srv/nfs/trainer", "ansible_ssh_private_key_file": str(ROOT / ".lab/key")}
    (tmp_path / "group_vars").mkdir()
    (tmp_path / "hosts.yml").write_text(yaml.safe_dump(hosts, sort_keys=False))
    (tmp_path / "group_vars" / "all.yml").write_text(yaml.safe_dump(variables))
    with restored("ps-0"):
        yield tmp_path
    RETRY.unlink(missing_ok=True)


def test_without_the_server_of_the_shared_path_nothing_goes_on(lab: dict[str, object], with_server: Path) -> None:
    right = environments(lab)
    phase = "Serve the shared path"
    run = site(
        "--inventory", str(with_server), cut={(phase, "Look whether the shared path is served as it should be"): "ps-0"}
    )
    assert (run.code, run.lost) == (4, ["ps-0"]), run.output
    assert list(run.phases)[-1] == phase
    table = " ".join(run.output.partition("0 of 5 hosts are right")[2].split())
    assert f"ps-0 {phase} unreachable" in table
    assert "since this phase has no other host than ps-0: fix that first" in table
    assert RETRY.read_text().split() == sorted(lab)
    assert environments({host: None for host in lab if host != "ps-0"}) == {
        host: text for host, text in right.items() if host != "ps-0"
    }
