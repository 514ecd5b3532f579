"""Several files and directories in one run: as the tasks that it stands for would leave them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import many_files
import pytest
import yaml
from ansible.module_utils.testing import patch_module_args

from fleet.places import CODE as ROOT

TASKS = """
- name: Look whether all is so
  look_ahead:
  register: seen
- name: Leave what is right as it is
  ansible.builtin.meta: end_role
  when: seen.right
- name: Write them
  write_files:
    directories: ["{{ place }}/etc/deep", {path: "{{ place }}/units", mode: "0750"}]
    files:
      - dest: "{{ place }}/etc/deep/{{ host }}.conf"
        src: text.j2
        mode: "0640"
        vars: {word: "{{ words[0] }}"}
      - {dest: "{{ place }}/units/program", src: program, mode: "0755"}
      - dest: "{{ place }}/units/other"
        src: other.j2
        mode: "0644"
        variable_start_string: "<<"
        variable_end_string: ">>"
      - {dest: "{{ place }}/units/number", content: "n={{ number }}\\n", mode: "0644"}
"""


def play(place: Path, *arguments: str) -> dict[str, dict[str, Any]]:
    """Run the role on two hosts of this machine; returns each host's results by task."""
    variables = {"words": ["hello"], "number": 7, "place": "{{ base }}/{{ inventory_hostname }}", "base": str(place)}
    variables["host"] = "{{ inventory_hostname }}"
    everyone = {"hosts": "all", "gather_facts": False, "roles": ["many"], "vars": variables}
    (place / "play.yml").write_text(yaml.safe_dump([everyone]))
    here = {"ansible_connection": "local", "ansible_python_interpreter": sys.executable}
    (place / "hosts.yml").write_text(yaml.safe_dump({"all": {"hosts": {"one": here, "two": here}}}))
    environment = {
        **os.environ, "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg"), "ANSIBLE_ROLES_PATH": str(place / "roles"),
        "ANSIBLE_STDOUT_CALLBACK": "ansible.posix.json", "_ANSIBLE_TEMPLAR_UNTRUSTED_TEMPLATE_BEHAVIOR": "error",
    }  # fmt: skip
    command = ["ansible-playbook", "--inventory", place / "hosts.yml", place / "play.yml", *arguments]
    done = subprocess.run(command, cwd=place, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    report, _ = json.JSONDecoder().raw_decode(done.stdout[done.stdout.index("{\n") :])
    tasks = report["plays"][0]["tasks"]
    named = [(task["task"]["name"].rpartition(" : ")[2], task["hosts"]) for task in tasks]
    return {host: {name: hosts[host] for name, hosts in named if host in hosts} for host in ("one", "two")}


def test_a_role_writes_its_files_in_one_run(tmp_path: Path) -> None:
    role = tmp_path / "roles/many"
    for name, text in (
        ("tasks/main.yml", TASKS),
        ("templates/text.j2", "{{ word }}\n"),
        ("files/program", "{{ }}\n"),
        ("templates/other.j2", "{{ << number >> }}\n"),
    ):
        (role / name).parent.mkdir(parents=True, exist_ok=True)
        (role / name).write_text(text)
    for host in ("one", "two"):
        (tmp_path / host).mkdir()
    checked = play(tmp_path, "--check", "--diff")["two"]["Write them"]
    there = tmp_path / "two/etc/deep/two.conf"
    assert checked["changed"]
    shown = {each["after_header"]: (each["before"], each["after"]) for each in checked["diff"]}
    assert shown[str(there)] == ("", "hello\n")
    assert list((tmp_path / "two").iterdir()) == []

    first = play(tmp_path)
    for host in ("one", "two"):
        base = tmp_path / host
        names = ("etc", "etc/deep", "units", f"etc/deep/{host}.conf", "units/program", "units/other", "units/number")
        assert first[host]["Write them"]["paths"] == [str(base / name) for name in names]
        modes = [f"{(base / name).stat().st_mode & 0o7777:04o}" for name in names]
        assert modes == ["0755", "0755", "0750", "0640", "0755", "0644", "0644"]
        texts = [(base / name).read_text() for name in names[3:]]
        assert texts == ["hello\n", "{{ }}\n", "{{ 7 }}\n", "n=7\n"]
    (tmp_path / "two/units/number").write_text("n=8\n")
    second = play(tmp_path)
    assert [name for name in second["one"] if name != "Leave what is right as it is"] == [
        "Look whether all is so"
    ]  # the look knows what the task would write
    assert second["two"]["Write them"]["paths"] == [str(tmp_path / "two/units/number")]


def write(capsys: pytest.CaptureFixture[str], *files: dict[str, Any], **more: Any) -> dict[str, Any]:
    """Run the module as Ansible does; returns what it says."""
    with patch_module_args({"files": list(files), **more}), pytest.raises(SystemExit):
        many_files.main()
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def file(path: Path, content: str = "new\n", mode: str = "0644", **more: Any) -> dict[str, Any]:
    return {"path": str(path), "content": content, "mode": mode, **more}


def test_a_file_that_is_refused_leaves_all_as_they_were(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    one.write_text("old\n")
    done = write(capsys, file(one), file(two, validate="grep -q old %s"))
    assert done["failed"]
    assert str(two) in done["msg"]
    assert (one.read_text(), two.exists()) == ("old\n", False)
    assert sorted(tmp_path.iterdir()) == [one]
    assert write(capsys, file(one), file(two, validate="grep -q new %s"))["paths"] == [str(one), str(two)]


def test_a_mode_alone_is_put_right_and_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "one"
    assert write(capsys, file(path, mode="0640"))["changed"]
    path.chmod(0o600)
    inode = path.stat().st_ino
    asked = [file(path, mode="0640"), {"path": str(tmp_path), "mode": f"{tmp_path.stat().st_mode & 0o7777:04o}"}]
    checked = write(capsys, *asked, _ansible_check_mode=True, _ansible_diff=True)
    assert (checked["paths"], path.stat().st_mode & 0o777) == ([str(path)], 0o600)
    assert (checked["diff"][0]["before"]["mode"], checked["diff"][0]["after"]["mode"]) == ("0600", "0640")
    assert write(capsys, *asked)["paths"] == [str(path)]
    assert (path.stat().st_ino, path.stat().st_mode & 0o777) == (inode, 0o640)
    assert not write(capsys, *asked)["changed"]


def test_a_link_in_a_files_place_is_replaced(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    victim, path = tmp_path / "victim", tmp_path / "one"
    victim.write_text("new\n")
    path.symlink_to(victim)
    assert write(capsys, file(path, mode="0600"))["changed"]
    assert (path.is_symlink(), path.read_text(), victim.stat().st_mode & 0o777) == (False, "new\n", 0o644)


def test_a_directory_in_a_files_place_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "one").mkdir()
    done = write(capsys, file(tmp_path / "one"))
    assert done["failed"]
    assert "is a directory; expected a file" in done["msg"]
    (tmp_path / "two").write_text("")
    assert "is no directory" in write(capsys, {"path": str(tmp_path / "two"), "mode": "0755"})["msg"]
