"""What site.yml, reset.yml and rotate_keys.yml leave in the cluster's history, rendered as the playbooks have it."""

from __future__ import annotations

import getpass
import json
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from ansible.parsing.dataloader import DataLoader
from ansible.plugins.loader import init_plugin_loader
from ansible.template import Templar

from fleet.hosts import history
from fleet.rollout.desired_state import expression, load
from fleet.verbs.history import describe
from fleet.verbs.rollback import SHIPPING

ROOT = Path(__file__).resolve().parents[2]
CHANGED, SAME = {"changed": True}, {"changed": False}
KNOWN = {"psfleet_release": "0c80210420ba", "ansible_check_mode": False, "inventory_hostname": "head"}


@pytest.fixture(scope="module", autouse=True)
def lookups() -> None:
    init_plugin_loader()


def note_of(playbook: str) -> dict[str, Any]:
    """Return the task of a playbook that notes what was done, with what the file says that it imports for that."""
    plays = load(ROOT / "ansible" / playbook)
    tasks = [task for play in plays for part in ("tasks", "post_tasks") for task in play.get(part, ())]
    noting = [each for each in tasks if each.get("ansible.builtin.import_tasks") == "tasks/note.yml"]
    given = dict(noting[0]["vars"]) if noting else {}
    tasks += load(ROOT / "ansible/tasks/note.yml") if noting else []
    (found,) = [each for each in tasks if each.get("ansible.builtin.import_role", {}).get("tasks_from") == "history"]
    return {**found, "vars": {**given, **found["vars"]}}


def line_of(directory: Path, note: Mapping[str, Any], known: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the act that the note leaves, None where its conditions don't hold."""
    (task,) = load(ROOT / "roles/release/tasks/history.yml")
    spec = {"storage": {"path": str(directory)}}
    variables = {**note["vars"], **task["vars"], "psfleet_spec": spec, **known}
    templar = Templar(loader=DataLoader(), variables=variables)
    conditions = note["when"] if isinstance(note["when"], list) else [note["when"]]
    if not all(templar.template(expression(each)) for each in conditions if "host_tasks" not in each):
        return None
    environment = {name: str(templar.template(text)) for name, text in task["environment"].items()}
    if environment["SETTINGS"]:
        (directory / "run.json").write_text('{"run": "digits"}')
        environment["SETTINGS"] = str(directory / "run.json")
    script = (ROOT / "roles/release/files/append_history.sh").read_text()
    subprocess.run(["sh", "-c", script], env={**environment, "PATH": "/usr/bin:/bin"}, check=True)
    acts, damaged = history.merge((directory / "history.jsonl").read_text().splitlines())
    assert damaged == 0
    return acts[-1]


@pytest.mark.parametrize(
    ("registered", "changed"),
    [
        ({"__release_switched": CHANGED, "__trainer_environments": CHANGED}, ["release", "members"]),
        ({"__release_switched": SAME, "__trainer_settings_written": CHANGED}, ["settings"]),
        ({"__release_switched": SAME, "__trainer_environments": CHANGED}, ["members"]),
        ({"__release_switched": SAME, "__firewall_table": CHANGED}, ["packet filter"]),
    ],
)
def test_what_site_yml_changes_is_noted_with_who_and_why(
    tmp_path: Path, registered: dict[str, Any], changed: list[str]
) -> None:
    act = line_of(tmp_path, note_of("training.yml"), KNOWN | registered | {"reason": 'two "more" workers'})
    assert act is not None
    assert (act["verb"], act["outcome"], act["changed"]) == ("site.yml", "done", changed)
    assert (act["who"], act["reason"]) == (getpass.getuser(), 'two "more" workers')
    assert act["from"]
    assert f"changed {', '.join(changed)}" in describe(act)
    # A rollback goes to what a line brought: one without a release and its settings brought none.
    came = act["verb"] in SHIPPING and bool(act.get("release"))
    assert came is bool({"release", "settings"} & set(changed)) is ("settings" in act)


def test_a_site_yml_that_changes_nothing_leaves_no_line(tmp_path: Path) -> None:
    """A role that is right as it is registers nothing."""
    assert line_of(tmp_path, note_of("training.yml"), KNOWN | {"__release_switched": SAME}) is None


def test_a_reset_is_noted_where_the_history_can_be_written(tmp_path: Path) -> None:
    note = note_of("reset.yml")
    assert line_of(tmp_path, note, KNOWN | {"__note_history": {"rc": 1}}) is None
    act = line_of(tmp_path, note, KNOWN | {"__note_history": {"rc": 0}, "reason": 7})
    assert act is not None
    assert (act["verb"], act["outcome"], act["reason"]) == ("reset.yml", "begun", "7")
    assert "release" not in act
    names = [json.dumps(play) for play in load(ROOT / "ansible/reset.yml")]
    order = [next(n for n, play in enumerate(names) if word in play) for word in ("tasks/note.yml", '"shared"')]
    assert order == sorted(order)


def test_a_shared_path_that_hangs_holds_no_note_up() -> None:
    """As of a server that is down, which new keys may leave out."""
    look, _ = load(ROOT / "ansible/tasks/note.yml")
    argv = look["ansible.builtin.command"]["argv"]
    assert argv[argv.index("timeout") + 2 :] == ["test", "-w", "{{ psfleet_spec.storage.path }}"]


def test_new_keys_are_noted(tmp_path: Path) -> None:
    act = line_of(
        tmp_path, note_of("rotate_keys.yml"), KNOWN | {"__note_history": {"rc": 0}, "reason": "a stolen host"}
    )
    assert act is not None
    assert (act["verb"], act["outcome"], act["reason"]) == ("rotate_keys.yml", "done", "a stolen host")
    assert "changed keys" in describe(act)
    [*_, rotate] = load(ROOT / "ansible/rotate_keys.yml")
    assert rotate["post_tasks"][-1]["when"] == "inventory_hostname in groups['chief']"  # one line, by one host
