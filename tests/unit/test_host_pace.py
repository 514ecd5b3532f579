"""How fast a host's disk, memory and shared path are, and which hosts `site.yml` names for it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import host_pace
import pytest
import yaml
from host_look import noted

from fleet.site.filters import FILTERS
from tests.unit.stand_ins import result_of
from tests.unit.test_cluster_note import render

ROOT = Path(__file__).parents[2]
RIGHT: dict[str, Any] = {"disk_pace": 200.0, "disk_why": "", "memory_pace": 8.0, "shared": {"pace": 100.0, "why": ""}}
SLOW = "no end within 20 s"
TASKS = yaml.safe_load((ROOT / "roles/host_check/tasks/paces.yml").read_text())


def test_the_paces_are_measured_and_nothing_is_left(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(host_pace, "AS_TRAINER", ())
    assert host_pace.memory_pace(1) > 0
    assert host_pace.paced((), str(tmp_path), 1)["pace"] > 0
    assert host_pace.shared_pace(str(tmp_path), 1)["pace"] > 0
    assert "No such file" in host_pace.shared_pace("/nowhere", 1)["why"]
    assert list(tmp_path.iterdir()) == []


def test_a_user_that_is_not_there_and_a_write_that_hangs_are_said(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert (
        host_pace.paced(("/nowhere/setpriv",), str(tmp_path), 1)["why"] == "/nowhere/setpriv: No such file or directory"
    )
    monkeypatch.setattr(host_pace, "WRITE_SECONDS", 0.1)
    monkeypatch.setattr(host_pace, "PACE", "import time; time.sleep(60)")
    assert host_pace.paced((), str(tmp_path), 1) == {"pace": None, "why": "no end within 0.1 s"}


@pytest.mark.parametrize("check", [False, True])
def test_what_is_measured_is_noted_but_not_in_check_mode(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, check: bool
) -> None:
    file = tmp_path / "pace.json"
    monkeypatch.setattr(host_pace, "NOTE", file)
    found = result_of(host_pace, check, mebibytes=1)
    assert found["changed"] is False
    assert found["disk_pace"] > 0
    assert found["shared"] is None
    measured = {key: found[key] for key in ("disk_pace", "disk_why", "memory_pace", "shared")}
    assert noted(file) == ({} if check else measured)
    assert list(tmp_path.iterdir()) == ([] if check else [file])


def test_a_host_that_has_noted_its_paces_is_not_measured_again() -> None:
    condition = "{{ " + TASKS[0]["when"] + " }}"
    for seen, check, measured in (({}, False, True), (RIGHT, False, False), ({}, True, False)):
        known = {"__host_check_seen": {"pace": seen}, "ansible_check_mode": check}
        assert render(condition, known) is measured


def test_without_a_look_nothing_is_measured() -> None:
    """As with the playbook ansible/storage.yml alone."""
    assert render("{{ " + TASKS[0]["when"] + " }}", {"ansible_check_mode": False}) is False


@pytest.mark.parametrize(
    ("slow", "says"),
    [
        ({"disk_pace": 20.0}, "it writes 20 MiB/s to /var/tmp, and its peers 200 (median): look at its disk"),
        ({"memory_pace": 0.5}, "it copies 0.5 GiB/s of memory, and its peers 8 (median): look for other work"),
        ({"shared": {"pace": 20.0, "why": ""}}, "it writes 20 MiB/s to the shared path, and its peers 100 (median)"),
        (
            {"disk_pace": None, "disk_why": SLOW},
            f"it writes ? MiB/s to /var/tmp ({SLOW}), and its peers 200 (median): look at its disk",
        ),
        (
            {"shared": {"pace": None, "why": SLOW}},
            f"it writes ? MiB/s to the shared path ({SLOW}), and its peers 100 (median): look at its link",
        ),
    ],
)
def test_site_yml_names_a_host_far_below_its_peers(slow: dict[str, Any], says: str) -> None:
    """Some were measured now, and the others have noted theirs."""
    hostvars = {
        "a": {"__host_check_pace": RIGHT, "__host_check_seen": {"pace": {}}},
        "b": {"__host_check_pace": {"skipped": True}, "__host_check_seen": {"pace": RIGHT}},
        "c": {"__host_check_pace": {"skipped": True}, "__host_check_seen": {"pace": {**RIGHT, **slow}}},
        "d": {},
    }
    (said,) = FILTERS["slow_hosts"]([*hostvars], hostvars)
    assert said.startswith(f"host 'c': {says}")
    assert said.endswith("Measure again: fab doctor")
    # Of two none is an outlier, but one that was not measured is to be looked at.
    assert len(FILTERS["slow_hosts"](["a", "c"], hostvars)) == says.count("?")
    hostvars["c"]["__host_check_pace"] = RIGHT
    assert FILTERS["slow_hosts"]([*hostvars], hostvars) == []


def test_it_is_said_once_and_fails_nothing() -> None:
    say = TASKS[-1]
    assert say["run_once"] is True
    hostvars = {
        name: {"__host_check_pace": {**RIGHT, "disk_pace": pace}} for name, pace in zip("abc", (9, 90, 90), strict=True)
    }
    text = render(say["vars"]["__host_check_slow"], {"ansible_play_hosts": [*hostvars], "hostvars": hostvars})
    assert len(text) == 1
    assert [key for task in TASKS for key in task if key in ("ansible.builtin.assert", "ansible.builtin.fail")] == []


def test_what_cant_be_written_is_no_pace() -> None:
    hostvars = {name: {"__host_check_pace": {**RIGHT, "disk_pace": None, "shared": None}} for name in "abc"}
    assert FILTERS["slow_hosts"]([*hostvars], hostvars) == []


@pytest.mark.parametrize("lost", [{"disk_pace": None, "disk_why": SLOW}, {"shared": {"pace": None, "why": SLOW}}])
def test_what_was_not_measured_is_not_noted_and_so_measured_again(tmp_path: Path, lost: dict[str, Any]) -> None:
    host_pace.note_down(RIGHT, tmp_path / "pace.json")
    host_pace.note_down({**RIGHT, **lost}, tmp_path / "pace.json")
    assert list(tmp_path.iterdir()) == []
    host_pace.note_down({**RIGHT, "shared": None}, tmp_path / "pace.json")
    assert noted(tmp_path / "pace.json") == {**RIGHT, "shared": None}


def test_a_note_is_replaced_whole(tmp_path: Path) -> None:
    host_pace.note_down(RIGHT, tmp_path / "pace.json")
    assert json.loads((tmp_path / "pace.json").read_text()) == RIGHT
    assert (tmp_path / "pace.json").stat().st_mode & 0o777 == 0o644


def test_the_shared_path_is_measured_once_it_is_proven_and_before_anything_is_installed() -> None:
    site = [play["import_playbook"] for play in yaml.safe_load((ROOT / "site.yml").read_text())]
    assert site.index("ansible/storage.yml") < site.index("ansible/release.yml")
    last = yaml.safe_load((ROOT / "ansible/storage.yml").read_text())[-1]
    (task,) = last["post_tasks"]
    assert [role["role"] for role in last["roles"]] == ["storage"]
    assert task["ansible.builtin.import_role"] == {"name": "host_check", "tasks_from": "paces"}
    for shared, path in ((True, "/srv/trainer"), (False, "")):
        spec = {"storage": {"path": "/srv/trainer", "shared": shared}}
        assert (render(task["vars"]["host_check_path"], {"psfleet_spec": spec}) or "") == path
