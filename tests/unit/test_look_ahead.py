"""One look at a host before a role's tasks: it finds what they would fix, and spares them where all is so."""

from __future__ import annotations

import base64
import grp
import json
import os
import pwd
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml
from ansible.parsing.dataloader import DataLoader
from ansible.template import Templar

from fleet.hosts.agent import describe_file as look_at
from fleet.hosts.agent_request import RECEIVE, feed, sources
from fleet.places import CODE as ROOT
from fleet.rollout.desired_state import UnknownTask, files_differ
from fleet.rollout.readers import AHEAD
from fleet.rollout.roles import Ahead

ME = pwd.getpwuid(os.getuid())
MINE = grp.getgrgid(ME.pw_gid).gr_name
SYSTEMCTL = """#!/bin/sh
cat "$(dirname "$0")/$(eval echo "\\$$#")"
"""
# What a role of every kind of task would have; `place` is a directory of the test's.
TASKS = """
- name: Do what comes before
  ansible.builtin.ping:
- name: Look whether all is so
  look_ahead:
  register: seen
- name: Leave what is right as it is
  ansible.builtin.meta: end_role
  when: seen.right
- name: Find the program
  ansible.builtin.stat:
    path: "{{ place }}/program"
  register: program
- name: Install the program
  ansible.builtin.package:
    name: program
  when: not program.stat.exists
- name: Make the directory
  ansible.builtin.file:
    path: "{{ place }}/{{ item }}"
    state: directory
    owner: "{{ me }}"
    mode: "0750"
  loop: [one, two]
  register: directories
- name: Read what is installed
  ansible.builtin.command: cat "{{ place }}/installed"
  changed_when: false
  check_mode: false
  register: installed
- name: Write what was found
  ansible.builtin.template:
    src: text.j2
    dest: "{{ place }}/one/text"
    mode: "0644"
  when: not (ansible_check_mode and directories is changed)
  register: text
- name: Write another
  ansible.builtin.copy:
    content: "n={{ number }}\\n"
    dest: "{{ place }}/two/number"
    mode: "0600"
- name: Have the unit run
  ansible.builtin.systemd_service:
    name: a.service
    daemon_reload: "{{ text is changed }}"
    enabled: true
    state: started
- name: Take the old one away
  ansible.builtin.file:
    path: "{{ place }}/old"
    state: absent
- name: Have the account
  ansible.builtin.user:
    name: "{{ me }}"
    uid: "{{ uid }}"
    home: "{{ home }}"
- name: Have the group
  ansible.builtin.group:
    name: "{{ mine }}"
    gid: "{{ gid }}"
- name: Set what the kernel does
  ansible.posix.sysctl:
    name: net.ipv4.tcp_retries2
    value: "{{ retries }}"
    sysctl_file: "{{ place }}/sysctl.conf"
- name: Find what is too much
  ansible.builtin.find:
    paths: "{{ place }}/two"
    patterns: "*.env"
  register: found
  changed_when: found.files | length > 0
- name: Read what others wrote
  ansible.builtin.slurp:
    src: "{{ place }}/others"
  register: others
  failed_when: false
- name: Take ours out of it
  ansible.builtin.copy:
    content: ""
    dest: "{{ place }}/others"
    mode: "0644"
  when: "'ours' in others.content | default('') | b64decode"
- name: Copy the wheels
  ansible.posix.synchronize:
    src: "{{ place }}/wheels/"
    dest: "{{ place }}/there/"
  run_once: true
- name: Refuse a number
  ansible.builtin.assert:
    that: number == 7
    fail_msg: number is {{ number }}; expected 7
- name: Say what surprises
  ansible.builtin.debug:
    msg: surprise
  when: installed.stdout is search('surprise')
"""
RETRIES = Path("/proc/sys/net/ipv4/tcp_retries2").read_text().strip()


@pytest.fixture
def host(tmp_path: Path) -> Path:
    """A directory that is as the role would make it."""
    role = tmp_path / "roles/every"
    for name, text in (("tasks/main.yml", TASKS), ("templates/text.j2", "it has {{ installed.stdout }}\n")):
        (role / name).parent.mkdir(parents=True)
        (role / name).write_text(text)
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name).chmod(0o750)
    texts = {
        "program": "", "installed": "a b\n", "one/text": "it has a b\n", "two/number": "n=7\n", "others": "theirs\n",
        "sysctl.conf": f"net.ipv4.tcp_retries2={RETRIES}\n", "bin/systemctl": SYSTEMCTL, "wheels/a.whl": "a",
        "bin/a.service": "ActiveState=active\nUnitFileState=enabled\n",
    }  # fmt: skip
    for name, text in texts.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o600 if name == "two/number" else 0o755 if name.startswith("bin/") else 0o644)
    shutil.copytree(tmp_path / "wheels", tmp_path / "there")
    return tmp_path


def role_of(host: Path, leads: bool = True, **more: Any) -> Ahead:
    variables = {
        "place": str(host), "number": 7, "me": ME.pw_name, "uid": ME.pw_uid, "home": ME.pw_dir, "mine": MINE,
        "gid": ME.pw_gid, "retries": RETRIES, "ansible_check_mode": False, **more,
    }  # fmt: skip

    def render(value: Any, known: Mapping[str, Any], **options: Any) -> Any:
        return Templar(loader=DataLoader(), variables={**variables, **known}).template(value, **options)

    return Ahead(host / "roles/every", render, leads)


def ask(host: Path, question: dict[str, Any]) -> dict[str, Any]:
    """Have the agent answer, in a process of its own as on a host."""
    environment = {**os.environ, "PATH": f"{host}/bin:{os.environ['PATH']}"}
    question["sources"] = sources(question["steps"])
    done = subprocess.run([sys.executable, "-c", RECEIVE], input=feed(question), env=environment, capture_output=True)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def look(host: Path, **more: Any) -> str | None:
    role = role_of(host, **more)
    wanted = role.question("main")
    question = wanted.question()
    question["blobs"] = {name: base64.b64encode(data).decode() for name, data in wanted.blobs.items()}
    return role.difference("main", ask(host, question))


def test_what_is_right_is_seen_to_be_so(host: Path) -> None:
    assert look(host) is None


def test_check_mode_sees_the_same(host: Path) -> None:
    assert look(host, ansible_check_mode=True) is None


def write(name: str, text: str) -> Callable[[Path], object]:
    return lambda host: (host / name).write_text(text)


SPOILED: list[tuple[Callable[[Path], object], str]] = [
    (lambda host: (host / "program").unlink(), "only Ansible can do 'Install the program'"),
    (lambda host: (host / "one").chmod(0o755), "/one differs"),
    (lambda host: shutil.rmtree(host / "one"), "/one is missing"),
    (write("one/text", "it has a b\n# and more\n"), "/one/text differs"),
    (lambda host: (host / "one/text").chmod(0o600), "/one/text differs"),
    (lambda host: ((host / "one/text").unlink(), (host / "one/text").symlink_to(host / "two/number")), "text differs"),
    (write("installed", "a\n"), "/one/text differs"),  # what a file should hold may depend on what the host says
    (write("two/number", "n=8\n"), "/two/number differs"),
    (write("bin/a.service", "ActiveState=inactive\nUnitFileState=enabled\n"), "a.service does not run as it should"),
    (write("bin/a.service", "ActiveState=active\nUnitFileState=disabled\n"), "a.service does not run as it should"),
    (write("old", ""), "/old exists"),
    (write("sysctl.conf", "net.ipv4.tcp_retries2=99\n"), "net.ipv4.tcp_retries2 differs"),
    (write("sysctl.conf", f"net.ipv4.tcp_retries2={RETRIES}\nnet.ipv4.tcp_retries2=99\n"), "tcp_retries2 differs"),
    (write("two/a.env", ""), "'Find what is too much' would change something"),
    (write("others", "ours\n"), "/others"),
    (write("there/a.whl", "ab"), "/there/ differs"),
    (lambda host: os.utime(host / "there/a.whl", (1, 1)), "/there/ differs"),
    (write("there/b.whl", ""), "/there/ differs"),
    (lambda host: (host / "installed").unlink(), "'Read what is installed' fails"),
    (write("installed", "surprise\n"), "Say what surprises"),
]


@pytest.mark.parametrize(("spoil", "reason"), SPOILED, ids=[reason for _, reason in SPOILED])
def test_what_was_changed_by_hand_is_found(host: Path, spoil: Callable[[Path], object], reason: str) -> None:
    spoil(host)
    try:
        found = look(host)
    except UnknownTask as unknown:
        found = str(unknown)
    assert found is not None
    assert reason in found


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({"number": 8}, "number is 8; expected 7"),
        ({"uid": 4711}, f"the user {ME.pw_name} differs"),
        ({"home": "/nowhere"}, f"the user {ME.pw_name} differs"),
        ({"me": "nobody-here", "home": "/"}, "the user nobody-here differs"),
        ({"gid": 4711}, f"the group {MINE} differs"),
        ({"retries": "99"}, "net.ipv4.tcp_retries2 differs"),
    ],
)
def test_what_the_inventory_changed_is_found(host: Path, more: dict[str, Any], reason: str) -> None:
    assert reason in str(look(host, **more))


def test_an_owner_counts_where_a_task_names_one(tmp_path: Path) -> None:
    mode, content, owner, group = look_at(str(tmp_path)) or []
    assert files_differ({"/a": [mode, content, owner, group]}, {"/a": [mode, content, None, MINE]}) is None
    assert files_differ({"/a": [mode, content, owner, group]}, {"/a": [mode, content, str(ME.pw_uid), None]}) is None
    assert files_differ({"/a": [mode, content, owner, group]}, {"/a": [mode, content, "4711"]}) == "/a differs"


def test_what_is_done_once_is_looked_at_by_one_host(host: Path) -> None:
    (host / "there/a.whl").unlink()
    assert look(host, leads=False) is None


def test_a_task_that_nobody_here_knows_is_the_roles_own(host: Path) -> None:
    main = host / "roles/every/tasks/main.yml"
    main.write_text(f"{TASKS}\n- name: Do more\n  ansible.builtin.unarchive:\n    src: more\n")
    with pytest.raises(UnknownTask, match="only Ansible can do 'Do more'"):
        role_of(host).question("main")


def test_a_command_that_may_change_something_is_never_run_by_a_look(host: Path) -> None:
    main = host / "roles/every/tasks/main.yml"
    for words in ("changed_when: false", "check_mode: false"):
        main.write_text(f"- name: Do it\n  ansible.builtin.command: touch {host}/done\n  {words}\n")
        with pytest.raises(UnknownTask, match="only Ansible can do 'Do it'"):
            role_of(host).question("main")


def run(host: Path, *arguments: str) -> tuple[list[str], list[str]]:
    """Run the role by Ansible; returns the tasks that were done, and those that changed something."""
    play = {
        "hosts": "here", "gather_facts": False, "roles": ["every"],
        "vars": {"place": str(host), "number": 7, "me": ME.pw_name, "uid": ME.pw_uid, "home": ME.pw_dir,
                 "mine": MINE, "gid": ME.pw_gid, "retries": RETRIES},
    }  # fmt: skip
    (host / "play.yml").write_text(yaml.safe_dump([play]))
    here = {"ansible_connection": "local", "ansible_python_interpreter": sys.executable}
    (host / "hosts.yml").write_text(yaml.safe_dump({"all": {"hosts": {"here": here}}}))
    environment = {
        **os.environ, "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg"), "ANSIBLE_ROLES_PATH": str(host / "roles"),
        "ANSIBLE_NOCOLOR": "1", "PATH": f"{host}/bin:{os.environ['PATH']}",
        "_ANSIBLE_TEMPLAR_UNTRUSTED_TEMPLATE_BEHAVIOR": "error",
    }  # fmt: skip
    command = ["ansible-playbook", "--inventory", host / "hosts.yml", host / "play.yml", *arguments]
    done = subprocess.run(command, cwd=host, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    results = re.findall(r"^TASK \[every : (.*)\] \**\n((?:\w+: \[here\].*\n)+)", done.stdout, re.MULTILINE)
    return (
        [task for task, lines in results if "ok: " in lines or "changed: " in lines],
        [task for task, lines in results if "changed: " in lines],
    )


FEW = TASKS[TASKS.index("- name: Look") : TASKS.index("- name: Have the unit run")]


def test_a_role_that_has_nothing_to_do_is_one_task(host: Path) -> None:
    (host / "roles/every/tasks/main.yml").write_text(FEW)
    assert run(host) == (["Look whether all is so"], [])
    (host / "two/number").write_text("n=8\n")
    assert run(host, "--check")[1] == ["Write another"]
    done, changed = run(host)
    assert (done[:2], changed) == (["Look whether all is so", "Find the program"], ["Write another"])
    assert (host / "two/number").read_text() == "n=7\n"
    assert run(host, "--start-at-task", "Write another") == (["Write another"], [])


def test_each_role_that_looks_ahead_leaves_when_all_is_right() -> None:
    looking = 0
    for path in sorted((ROOT / "roles").glob("*/tasks/*.yml")):
        tasks = yaml.safe_load(path.read_text())
        for look, leave in pairwise(tasks):
            if "look_ahead" in look and leave.get("ansible.builtin.meta") == "end_role":
                looking += 1
                named = (look["look_ahead"] or {}).get("tasks", "main")
                assert (named, leave["when"]) == (path.stem, f"{look['register']}.right"), path
    assert looking >= 11
    assert "ansible.builtin.package" not in AHEAD
