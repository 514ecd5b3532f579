"""Packages of hosts that others use too: a lock that is held, and an index that can't be fetched."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import socket
import subprocess
import time
from pathlib import Path
from typing import Any

import debian_packages
import pytest
import yaml
from jinja2 import Environment

from fleet.site.filters import FILTERS
from tests.unit.test_modes import tasks

ROOT = Path(__file__).resolve().parents[2]


def apt_arguments() -> dict[str, dict[str, Any]]:
    """By file and task, what apt is asked for where it may fetch an index."""
    found = {}
    for file in ROOT.glob("roles/*/tasks/*.yml"):
        for task in tasks(yaml.safe_load(file.read_text())):
            given = task.get("ansible.builtin.apt") or task.get("module_defaults", {}).get("ansible.builtin.apt")
            given = given or task.get("debian_packages")
            if given and ("name" in given or "name" in task.get("ansible.builtin.package", {})):
                found[f"{file.parent.parent.name}: {task['name']}"] = given
    return found


def test_each_role_waits_for_apts_lock() -> None:
    found = apt_arguments()
    assert [name for name, given in found.items() if "lock_timeout" not in given] == []
    assert len(found) > 7


@pytest.mark.parametrize(
    ("index", "more"),
    [
        ({"rc": 0, "stdout": "", "stderr": ""}, ""),
        (
            {"rc": 100, "stderr": "E: Failed to fetch http://m/ Temporary failure resolving 'm'"},
            "; `apt-get update` there: E: Failed to fetch http://m/ Temporary failure resolving 'm'",
        ),
        ({"rc": 124, "stdout": "", "stderr": ""}, "; `apt-get update` there: it ended with exit code 124"),
    ],
)
def test_an_index_that_cant_be_fetched_is_named(index: dict[str, Any], more: str) -> None:
    main = yaml.safe_load((ROOT / "roles/common/tasks/main.yml").read_text())
    (task,) = [each for each in tasks(main) if each["name"] == "Say why packages can't be installed"]
    environment = Environment()
    environment.filters |= FILTERS
    failed = {"rc": 100, "stderr": "E: Unable to locate package python3-apt"}
    known = {"inventory_hostname": "w", "ansible_failed_result": failed, "__common_index": index}
    text = environment.from_string(task["ansible.builtin.fail"]["msg"]).render(known)
    assert text.startswith(f"host 'w': E: Unable to locate package python3-apt{more}")


class Ended(Exception):
    """The module's end, with what it answers."""


class Machine:
    """A machine whose apt-get has been asked so, and answers with what is left of `answers`."""

    def __init__(self, root: Path, *answers: tuple[int, str, str], check_mode: bool = False) -> None:
        self.params = {"name": ["acl", "rsync"], "cache_valid_time": 3600, "lock_timeout": 60, "root": str(root)}
        self.check_mode, self.answers, self.asked = check_mode, list(answers), list[list[str]]()
        self.warnings: list[str] = []
        self.warn = self.warnings.append

    def run_command(self, command: list[str], environ_update: dict[str, str]) -> tuple[int, str, str]:
        assert environ_update["DEBIAN_FRONTEND"] == "noninteractive"
        self.asked.append([word for word in command[1:] if "::" not in word and word != "--option"])
        return self.answers.pop(0) if self.answers else (0, "0 upgraded, 2 newly installed, 0 to remove", "")

    def exit_json(self, **answer: Any) -> None:
        raise Ended(answer)

    fail_json = exit_json

    def end(self, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
        monkeypatch.setattr(debian_packages, "AnsibleModule", lambda **_: self)
        monkeypatch.setattr(debian_packages, "PAUSE_SECONDS", 0)
        with pytest.raises(Ended) as ended:
            debian_packages.main()
        return dict(ended.value.args[0])


UPDATE = ["update", "--quiet"]
INSTALL = ["install", "--quiet", "--no-install-recommends", "--no-upgrade", "--yes", "acl", "rsync"]


def index(root: Path, age: float) -> None:
    lists = root / "var/lib/apt/lists"
    lists.mkdir(parents=True)
    (lists / "mirror_Packages").touch()
    os.utime(lists, (time.time() - age,) * 2)


def test_packages_come_in_one_transaction_after_one_look_at_the_index(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = Machine(tmp_path)
    assert machine.end(monkeypatch)["changed"] is True
    assert machine.asked == [UPDATE, INSTALL]


@pytest.mark.parametrize(("age", "asked"), [(60, [INSTALL]), (7200, [UPDATE, INSTALL])])
def test_an_index_is_fetched_once_an_hour(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, age: float, asked: list[list[str]]
) -> None:
    index(tmp_path, age)
    machine = Machine(tmp_path)
    machine.end(monkeypatch)
    assert machine.asked == asked


def test_an_empty_index_is_fetched_however_new_its_directory_is(tmp_path: Path) -> None:
    lists = tmp_path / "var/lib/apt/lists"
    (lists / "partial").mkdir(parents=True)
    (lists / "lock").touch()
    assert debian_packages.index_age(tmp_path, time.time()) == float("inf")


def test_a_lock_is_waited_for_and_another_failure_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    locked = (100, "", "E: Could not get lock /var/lib/apt/lists/lock. It is held by process 9 (apt-get)")
    unknown = (100, "", "E: Unable to locate package rsync")
    machine = Machine(tmp_path, locked, locked, (0, "", ""), locked, unknown)
    answer = machine.end(monkeypatch)
    assert machine.asked == [UPDATE, UPDATE, UPDATE, INSTALL, INSTALL]
    assert FILTERS["outcome"]({"failed": True, **answer}) == "E: Unable to locate package rsync"
    late = Machine(tmp_path, locked, locked)
    late.params["lock_timeout"] = -1
    assert "lists/lock" in late.end(monkeypatch)["stderr"]


def test_an_installation_that_a_power_cut_ended_is_finished_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    index(tmp_path, 60)
    broken = (
        100,
        "",
        "E: dpkg was interrupted, you must manually run 'sudo dpkg --configure -a' to correct the problem.",
    )
    repair = ["--configure", "-a", "--force-confdef", "--force-confold"]
    machine = Machine(tmp_path, broken, (0, "", ""))
    assert machine.end(monkeypatch)["changed"] is True
    assert machine.asked == [INSTALL, repair, INSTALL]
    still = Machine(tmp_path, broken, (1, "", "no space"), broken)
    assert "dpkg --configure -a" in still.end(monkeypatch)["stderr"]
    assert still.asked == [INSTALL, repair, INSTALL]


def test_what_another_package_provides_is_no_change_and_a_check_only_simulates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    index(tmp_path, 7200)
    machine = Machine(
        tmp_path, (0, "0 upgraded, 0 newly installed, 0 to remove and 3 not upgraded.", ""), check_mode=True
    )
    assert machine.end(monkeypatch)["changed"] is False
    assert machine.asked == [[word if word != "--yes" else "--simulate" for word in INSTALL]]


def test_a_check_without_an_index_asks_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(tmp_path, check_mode=True)
    assert machine.end(monkeypatch) == {"changed": True}
    assert machine.asked == []


CONFIG = """Dir "{root}";
Dir::State::status "{root}/status";
Dir::Etc::sourcelist "{root}/sources";
APT::Architecture "amd64";
APT::Sandbox::User "";
"""


class RealMachine(Machine):
    """A machine that lists a few packages in an index of its own, whose apt-get is this machine's."""

    def __init__(self, root: Path, *names: str) -> None:
        super().__init__(root, check_mode=True)
        self.params["name"] = list(names)
        for folder in ("repository", "var/lib/apt/lists/partial", "var/cache/apt/archives/partial", "etc/apt"):
            (root / folder).mkdir(parents=True)
        listed = [("tool-1.10", "1"), ("tool-1.11", "1"), ("editor", "2")]
        (root / "repository/Packages").write_text("".join(map(entry, *zip(*listed, strict=True))))
        (root / "status").write_text(entry("editor", "1", "Status: install ok installed\n"))
        (root / "sources").write_text(f"deb [trusted=yes] file:{root}/repository ./\n")
        (root / "apt.conf").write_text(CONFIG.format(root=root))
        assert not self.run_command(["apt-get", "update", "--quiet"], {})[0]

    def run_command(self, command: list[str], environ_update: dict[str, str]) -> tuple[int, str, str]:
        given = {**os.environ, **environ_update, "APT_CONFIG": f"{self.params['root']}/apt.conf"}
        done = subprocess.run(command, env=given, capture_output=True, text=True)
        return done.returncode, done.stdout, done.stderr


def entry(name: str, version: str, more: str = "") -> str:
    about = f"Package: {name}\nVersion: {version}\nArchitecture: amd64\nMaintainer: x\nDescription: x\n"
    return f"{about}Provides: a-{name}\nFilename: ./{name}.deb\nSize: 1\nSHA256: {'0' * 64}\n{more}\n"


@pytest.mark.skipif(not shutil.which("apt-get"), reason="not Debian")
def test_a_name_stands_for_one_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = RealMachine(tmp_path / "whole", "tool-1.10", "tool-1.11").end(monkeypatch)
    assert (whole["changed"], "2 newly installed" in whole["stdout"]) == (True, True)
    part = RealMachine(tmp_path / "part", "tool-1.1").end(monkeypatch)
    assert "E: Unable to locate package tool-1.1" in part["stderr"]


@pytest.mark.skipif(not shutil.which("apt-get"), reason="not Debian")
def test_what_is_installed_is_not_upgraded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert RealMachine(tmp_path, "a-editor").end(monkeypatch)["changed"] is False


@pytest.mark.skipif(not shutil.which("apt-get"), reason="not Debian")
def test_a_mirror_that_never_answers_is_asked_twice_for_each_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By itself apt asks four times, and waits for half a minute each time."""
    short = [each.replace(f"={debian_packages.SILENT_SECONDS}", "=1") for each in debian_packages.PATIENCE]
    monkeypatch.setattr(debian_packages, "PATIENCE", short)
    machine = RealMachine(tmp_path, "editor")
    machine.check_mode = False
    machine.params["cache_valid_time"] = -1
    with socket.create_server(("127.0.0.1", 0)) as mute:
        (tmp_path / "sources").write_text(f"deb [trusted=yes] http://127.0.0.1:{mute.getsockname()[1]} ./\n")
        assert machine.end(monkeypatch)["changed"] is False
        mute.setblocking(False)
        calls = 0
        with contextlib.suppress(BlockingIOError):
            while True:
                mute.accept()[0].close()
                calls += 1
    assert calls == 4  # InRelease and Release


@pytest.mark.skipif(not shutil.which("apt-get"), reason="not Debian")
def test_an_index_comes_without_translations_of_descriptions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = RealMachine(tmp_path, "editor")
    machine.check_mode = False
    machine.params["cache_valid_time"] = -1
    files = {
        "main/binary-amd64/Packages": entry("editor", "2"),
        "main/i18n/Translation-en": "Package: editor\nDescription-en: x\n x\n",
    }
    listed = ""
    for name, text in files.items():
        path = tmp_path / "repository/dists/stable" / name
        path.parent.mkdir(parents=True)
        path.write_text(text)
        listed += f" {hashlib.sha256(text.encode()).hexdigest()} {len(text)} {name}\n"
    release = (
        f"Suite: stable\nComponents: main\nArchitectures: amd64\nDate: Wed, 01 Jan 2020 00:00:00 UTC\nSHA256:\n{listed}"
    )
    (tmp_path / "repository/dists/stable/Release").write_text(release)
    (tmp_path / "sources").write_text(f"deb [trusted=yes] file:{tmp_path}/repository stable main\n")
    lists = tmp_path / "var/lib/apt/lists"

    def kinds() -> set[str]:
        return {path.name.rpartition("_")[2] for path in lists.iterdir() if path.is_file()}

    machine.run_command(["apt-get", "update", "--quiet"], {})
    assert "Translation-en" in kinds()
    machine.end(monkeypatch)
    assert "Packages" in kinds()
    assert "Translation-en" not in kinds()


@pytest.mark.skipif(not shutil.which("apt-get"), reason="not Debian")
def test_a_broken_source_of_the_sites_keeps_no_package_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = RealMachine(tmp_path, "a-editor")
    machine.check_mode = False
    machine.params["cache_valid_time"] = -1
    with (tmp_path / "sources").open("a") as sources:
        sources.write(f"deb file:{tmp_path}/missing stable main\n")
    assert machine.end(monkeypatch)["changed"] is False
    assert "missing stable Release' does not have a Release file" in machine.warnings[0]


@pytest.mark.skipif(not shutil.which("apt-get"), reason="not Debian")
def test_a_package_on_hold_is_named_with_the_fix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = RealMachine(tmp_path, "tool-1.10")
    (tmp_path / "status").write_text(entry("tool-1.10", "1", "Status: hold ok not-installed\n"))
    machine.check_mode = False
    said = FILTERS["outcome"]({"failed": True, **machine.end(monkeypatch)})
    assert said.splitlines()[-2:] == [
        "E: Held packages were changed and -y was used without --allow-change-held-packages.",
        "`apt-mark showhold` lists them, and `apt-mark unhold NAME` frees one",
    ]
