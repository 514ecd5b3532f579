"""A host that is lost costs itself: what Ansible goes on with, what stands at the end, and who is owed a run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lost_hosts
import pytest
import yaml

ROOT = Path(__file__).parents[2]
HERE = {"ansible_connection": "local", "ansible_python_interpreter": sys.executable}
GONE = {"ansible_host": "127.0.0.1", "ansible_port": 1}  # nothing listens there

PLAYS = """
- name: First phase
  hosts: a:b:c:d
  gather_facts: false
  tasks:
    - name: Fail on one
      ansible.builtin.shell: "[ {{ inventory_hostname }} != c ] || { echo bad luck >&2; exit 3; }"
    - name: Go on where it is fixed
      block:
        - name: Fail, and be fixed
          ansible.builtin.assert: {that: inventory_hostname != 'b'}
      rescue:
        - name: Fix
          ansible.builtin.debug: {msg: fixed}
- name: Second phase
  hosts: a:b:c:d
  gather_facts: false
  tasks:
    - name: Refuse for all
      ansible.builtin.assert: {that: gate is not defined, fail_msg: the chief is lost}
      run_once: true
    - name: Say who is left
      ansible.builtin.debug: {msg: "left: {{ ansible_play_hosts | join(' ') }}"}
- name: Phase of one host
  hosts: a
  gather_facts: false
  tasks:
    - name: Fail where that is all
      ansible.builtin.assert: {that: last is not defined, fail_msg: no luck}
- name: Last phase
  hosts: a:b
  gather_facts: false
  tasks:
    - name: Reach the end
      ansible.builtin.debug: {msg: the end}
"""


def play(directory: Path, *arguments: str, plays: str = PLAYS) -> tuple[int, str, list[str]]:
    (directory / "plays.yml").write_text(plays)
    (directory / "hosts.yml").write_text(
        yaml.safe_dump({"all": {"hosts": {"a": HERE, "b": HERE, "c": HERE, "d": GONE}}})
    )
    command = ["ansible-playbook", "--inventory", directory / "hosts.yml", directory / "plays.yml", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    output, _, table = done.stdout.partition(" hosts are right; these are not:\n")
    return done.returncode, output, table.splitlines()


def test_a_host_that_is_lost_costs_itself(tmp_path: Path) -> None:
    code, output, table = play(tmp_path)
    assert code == 4
    assert "left: a b" in output
    assert "the end" in output
    assert output.endswith("\n2 of 4")
    assert table[0].split() == ["HOST", "PHASE", "WHY"]
    assert {line.split()[0]: line for line in table[1:]}.keys() == {"c", "d"}
    assert "First phase  failed (Fail on one): bad luck" in "\n".join(table)
    assert "First phase  unreachable (Fail on one): " in "\n".join(table)


def test_a_module_that_did_not_run_says_why_in_its_own_words(tmp_path: Path) -> None:
    (tmp_path / "library").mkdir()
    (tmp_path / "library/full.py").write_text("#!/usr/bin/python\nraise OSError('no room is left')\n")
    plays = "- {name: First phase, hosts: a, gather_facts: false, tasks: [{name: Write, full: }]}"
    _, _, table = play(tmp_path, plays=plays)
    assert "First phase  failed (Write): OSError: no room is left" in "\n".join(table)


@pytest.mark.parametrize(("what", "phase"), [("gate", "Second phase"), ("last", "Phase of one host")])
def test_hosts_that_were_held_up_are_not_called_right(tmp_path: Path, what: str, phase: str) -> None:
    code, output, table = play(tmp_path, "--extra-vars", json.dumps({what: True}))
    assert code == 4
    assert "the end" not in output
    assert output.endswith("\n0 of 4")
    assert f"a     {phase}" in "\n".join(table)
    [held] = [line for line in table if line.startswith("b ")]
    assert "held up: the run ended here for all" in held
    assert ("no other host than a: fix that first" in held) is (what == "last")


TURNS = """
- name: Reboot in turn
  hosts: a:b:c
  gather_facts: false
  serial: 1
  vars: {broken: []}
  tasks:
    - name: Come back
      block:
        - name: Prove
          ansible.builtin.assert:
            that: inventory_hostname not in broken
            fail_msg: "{{ inventory_hostname }} is broken: fix it"
      rescue:
        - name: Note that the host is lost
          ansible.builtin.set_fact: {psfleet_lost: true}
- name: Leave out
  hosts: a:b:c
  gather_facts: false
  tasks:
    - name: Leave the host out
      mark_unreachable:
      when: psfleet_lost is defined
- name: Last phase
  hosts: a:b:c
  gather_facts: false
  tasks:
    - name: Say who is left
      ansible.builtin.debug: {msg: "left: {{ ansible_play_hosts | join(' ') }}"}
"""


def test_a_batch_that_is_lost_as_a_whole_is_named_where_it_was_lost_and_the_others_go_on(tmp_path: Path) -> None:
    code, output, table = play(tmp_path, "--extra-vars", json.dumps({"broken": ["a"]}), plays=TURNS)
    assert code == 4
    assert "left: b c" in output
    assert output.endswith("\n2 of 3")
    assert [line.split("  ")[0] for line in table[1:]] == ["a"]
    assert "Reboot in turn  failed (Prove): a is broken: fix it" in " ".join(table)


BEFORE_REBOOT = yaml.safe_load((ROOT / "ansible/tasks/reboot.yml").read_text())[:3]


@pytest.mark.parametrize(
    ("batch", "broken", "vanish", "goes"),
    [
        (2, ["a"], [], "abc"),  # the last batch is smaller, and two may be away
        ("67%", ["a"], [], "abc"),
        (1, ["a"], [], "a"),
        (2, ["b"], ["a"], "ab"),  # one that can't be reached any more is away too
    ],
)
def test_no_further_host_is_rebooted_once_as_many_are_lost_as_may_be_away(
    tmp_path: Path, batch: int | str, broken: list[str], vanish: list[str], goes: str
) -> None:
    turns = {
        "hosts": "a:b:c",
        "gather_facts": False,
        "serial": batch,
        "vars": {"reboot_batch": batch, "reboot_for": "a test", "broken": broken, "vanish": vanish},
        "tasks": [
            {
                "block": [
                    *BEFORE_REBOOT,
                    {"ansible.builtin.debug": {"msg": "{{ inventory_hostname }} reboots"}},
                    {"mark_unreachable": {}, "when": "inventory_hostname in vanish"},
                    {"ansible.builtin.assert": {"that": "inventory_hostname not in broken"}},
                    {"ansible.builtin.set_fact": {"psfleet_away": False}},
                ],
                "rescue": [{"ansible.builtin.set_fact": {"psfleet_lost": True}}],
            }
        ],
    }
    _, output, _ = play(tmp_path, plays=yaml.safe_dump([turns]))
    assert [host for host in "abc" if f"{host} reboots" in output] == list(goes), output


@pytest.fixture
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The callback, for a project in a directory of the test's own."""
    monkeypatch.setattr("fleet.places._folder", lambda *_: tmp_path.resolve())
    monkeypatch.setattr(lost_hosts.context, "CLIARGS", {})
    return lost_hosts


def end(
    plugin: Any, playbook: Path, hosts: str, failed: str = "", display: SimpleNamespace | None = None
) -> list[str] | None:
    """Have a run of all phases end, and read who is owed another."""
    callback = plugin.CallbackModule()
    callback._display = display or callback._display
    phase = SimpleNamespace(get_name=lambda: "a phase", hosts=["all"], _uuid="1")
    callback.v2_playbook_on_start(SimpleNamespace(_file_name=str(playbook), get_plays=lambda: [phase]))
    callback.v2_playbook_on_play_start(phase)
    numbers = {host: {"failures": int(host in failed.split()), "unreachable": 0} for host in hosts.split()}
    callback.v2_playbook_on_stats(SimpleNamespace(processed=numbers, summarize=numbers.get))
    file = playbook.with_suffix(".retry")
    return file.read_text().split() if file.exists() else None


def test_who_is_owed_a_run_is_kept_until_it_was_made(plugin: Any, tmp_path: Path) -> None:
    site = tmp_path / "site.yml"
    assert end(plugin, site, "a b c") is None
    assert end(plugin, site, "a b c", failed="b c") == ["b", "c"]
    assert end(plugin, site, "a") == ["b", "c"]  # --limit a
    assert end(plugin, site, "a b", failed="a") == ["a", "c"]
    assert end(plugin, site, "a c") is None


def test_check_mode_and_the_parts_leave_no_such_file(plugin: Any, tmp_path: Path) -> None:
    (tmp_path / "ansible").mkdir()
    assert end(plugin, tmp_path / "ansible" / "release.yml", "a b", failed="b") is None
    plugin.context.CLIARGS["check"] = True
    assert end(plugin, tmp_path / "site.yml", "a b", failed="b") is None


def test_a_whole_run_without_a_loss_names_the_next_command(plugin: Any, tmp_path: Path) -> None:
    said: list[str] = []
    display = SimpleNamespace(display=said.append)
    site = tmp_path / "site.yml"
    end(plugin, site, "a b", failed="b", display=display)
    assert said[-1] == f"when they are fixed: psfleet playbook site.yml --limit @{tmp_path}/site.retry"
    end(plugin, tmp_path / "reset.yml", "a b", display=display)
    plugin.context.CLIARGS["tags"] = ["firewall"]
    end(plugin, site, "a b", display=display)
    plugin.context.CLIARGS.update(tags=["all"], check=True)
    end(plugin, site, "a b", display=display)
    assert "Next" not in "".join(said)
    plugin.context.CLIARGS["check"] = False
    end(plugin, site, "a b", display=display)
    assert said[-1] == "\n2 of 2 hosts are right. Next: psfleet start-cluster, or psfleet doctor to look closer"


MARKED = """import os, sys
with open(os.environ["MARKS"], "a") as file:
    print(os.getpid(), "fleet.site.filters" in sys.modules, "fleet.rollout.roles" in sys.modules, file=file)
class FilterModule:
    def filters(self):
        return {"marked": str}
"""


def test_processes_of_tasks_load_no_filter_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "filter_plugins").mkdir()
    (tmp_path / "filter_plugins" / "marks.py").write_text(MARKED)
    monkeypatch.setenv("MARKS", str(tmp_path / "marks"))
    tasks = [{"ansible.builtin.debug": {"msg": "{{ 1 | marked }}"}} for _ in range(3)]
    code, output, _ = play(tmp_path, plays=yaml.safe_dump([{"hosts": "a:b:c", "gather_facts": False, "tasks": tasks}]))
    assert code == 0, output
    assert [line.split()[1:] for line in (tmp_path / "marks").read_text().splitlines()] == [["True", "True"]]
