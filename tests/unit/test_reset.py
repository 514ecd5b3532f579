"""reset.yml takes away what the roles put on a machine, and nothing else; here below a folder that stands for `/`."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import first_state
import host_pace
import host_reset
import pytest
import yaml
from ansible.parsing.dataloader import DataLoader
from ansible.template import Templar

from fleet.rollout.desired_state import load
from fleet.rollout.roles import Ahead
from tests.unit.stand_ins import put_program

ROOT = Path(__file__).resolve().parents[2]
# What roles write and the reset leaves, each with its reason.
KEPT = {
    "/var/lib/trainer",  # the home, which goes by itself
    "/var/lib/prometheus/node-exporter",  # the package's own directory
}
DRIVER = "nvidia_driver"


class Module:
    """What a module of Ansible's is given, and what it does to the machine."""

    def __init__(self, root: Path, check: bool = False, **params: Any) -> None:
        self.params = {"root": str(root), "mount": "", "packages": [], "keep": [], "empty": [], **params}
        self.check_mode = check
        self.called: list[list[str]] = []

    def fail_json(self, msg: str) -> None:
        raise SystemExit(msg)

    def run_command(self, command: list[str], **_: Any) -> tuple[int, str, str]:
        self.called.append(command)
        return 0, "", ""


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """Make a machine with what psfleet has put there, and with files of others beside."""
    ours = [
        "etc/systemd/system/trainer@.service",
        "etc/systemd/system/trainer@.service.d/firewall.conf",
        "etc/systemd/system/trainer@worker-0.service.d/psfleet-task.conf",
        "etc/systemd/system/psfleet-firewall.service",
        "etc/systemd/system/nftables.service.d/psfleet.conf",
        "etc/systemd/system/srv-trainer.mount",
        "etc/systemd/journald.conf.d/60-psfleet.conf",
        "etc/sysctl.d/60-psfleet.conf",
        "etc/trainer/run.json",
        "etc/trainer/secrets/KEY",
        "etc/psfleet/firewall.nft",
        "var/lib/prometheus/node-exporter/psfleet-gpus.prom",
        "opt/trainer/releases/abc/trainer/__main__.py",
        "usr/local/sbin/psfleet-check-release",
        "var/lib/trainer/local/runs/digits/run.json",
        "var/lib/psfleet/firewall.nft",
        "var/lib/psfleet/removed/worker-1",
    ]
    others = [
        "etc/systemd/system/other.service",
        "etc/systemd/system/other.service.d/local.conf",
        "etc/sysctl.d/10-site.conf",
        "etc/passwd",
        "usr/local/sbin/backup",
        "opt/other/file",
    ]
    for name in [*ours, *others]:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("x")
    wants = tmp_path / "etc/systemd/system/multi-user.target.wants"
    wants.mkdir()
    for name in ("trainer@worker-0.service", "other.service", "srv-trainer.mount"):
        (wants / name).symlink_to("/etc/systemd/system/x")
    proc = tmp_path / "proc/sys/net/ipv4"
    proc.mkdir(parents=True)
    (proc / "tcp_retries2").write_text("6\n")
    (proc / "ip_local_reserved_ports").write_text("2300-2302,8080\n")
    (tmp_path / "etc/sysctl.d/99-psfleet-ports.conf").write_text(
        "# Of psfleet's tasks: 2300-2302\nnet.ipv4.ip_local_reserved_ports = 2300-2302,8080\n"
    )
    noted = {"packages": ["bash"], "users": ["root"], "sysctls": {"net.ipv4.tcp_retries2": "15"}, "directories": []}
    (tmp_path / "var/lib/psfleet/before.json").write_text(json.dumps(noted))
    return tmp_path


def files(root: Path) -> set[str]:
    return {str(path.relative_to(root)) for path in root.rglob("*") if path.is_symlink() or path.is_file()}


def reset(root: Path, check: bool = False, **params: Any) -> host_reset.Reset:
    done = host_reset.Reset(Module(root, check, **params))  # type: ignore[arg-type]
    done.run()
    return done


def test_what_is_psfleets_goes_and_what_is_others_stays(machine: Path) -> None:
    reset(machine, mount="srv-trainer.mount")
    assert files(machine) == {
        "etc/systemd/system/other.service",
        "etc/systemd/system/other.service.d/local.conf",
        "etc/systemd/system/multi-user.target.wants/other.service",
        "etc/sysctl.d/10-site.conf",
        "etc/passwd",
        "usr/local/sbin/backup",
        "opt/other/file",
        "proc/sys/net/ipv4/tcp_retries2",
        "proc/sys/net/ipv4/ip_local_reserved_ports",
    }
    assert not (machine / "etc/systemd/journald.conf.d").exists()  # which was missing before
    assert not (machine / "etc/systemd/system/nftables.service.d").exists()


def test_the_kernels_settings_are_put_back_and_others_ports_kept(machine: Path) -> None:
    reset(machine)
    assert (machine / "proc/sys/net/ipv4/tcp_retries2").read_text() == "15\n"
    assert (machine / "proc/sys/net/ipv4/ip_local_reserved_ports").read_text() == "8080\n"


def test_check_mode_says_what_would_go_and_does_nothing(machine: Path) -> None:
    before = files(machine)
    done = reset(machine, check=True, mount="srv-trainer.mount")
    assert files(machine) == before
    assert {"/opt/trainer", "/etc/trainer", "/etc/systemd/system/srv-trainer.mount"} <= set(done.removed)


def test_it_may_be_done_again(machine: Path) -> None:
    assert reset(machine).removed
    again = reset(machine)
    assert again.removed == []
    assert again.notes == ["psfleet is not there: what has one of its names is others', and stays"]


@pytest.mark.parametrize(("user", "keep"), [("trainer", []), ("other", ["/srv/trainer"]), ("other", [])])
def test_where_psfleet_never_was_nothing_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, user: str, keep: list[str]
) -> None:
    others = {"opt/trainer/releases/1/app", "etc/trainer/app.conf", "var/lib/trainer/data"}
    monkeypatch.setattr(host_reset, "is_user", lambda name: name == user)
    for each in others:
        (tmp_path / each).parent.mkdir(parents=True)
        (tmp_path / each).touch()
    assert reset(tmp_path, keep=keep).removed == []
    assert files(tmp_path) == others


class Killed(BaseException):
    """The module's process has ended."""


def count_deeds(monkeypatch: pytest.MonkeyPatch, deeds: list[str], kill_at: int = 0) -> None:
    """Note each command and removal of a reset, and end it before the one with this number."""
    remove = host_reset.Reset._remove

    def note(deed: str) -> None:
        if kill_at and len(deeds) + 1 >= kill_at:
            raise Killed
        deeds.append(deed)

    def removed(self: host_reset.Reset, path: Path) -> None:
        if os.path.lexists(path):
            note(str(path.relative_to(self._root)))
        remove(self, path)

    def call(self: host_reset.Reset, *command: str) -> tuple[int, str]:
        note(" ".join(command))
        return 0, ""

    monkeypatch.setattr(host_reset.Reset, "_remove", removed)
    monkeypatch.setattr(host_reset.Reset, "_call", call)


def test_broken_off_anywhere_it_is_whole_when_done_again(machine: Path, tmp_path_factory: Any) -> None:
    """Also what only reads the files: systemd, and servers that stay."""

    def do(number: int, kill_at: int) -> tuple[list[str], set[str]]:
        root, deeds = tmp_path_factory.mktemp("machines") / str(number), list[str]()
        shutil.copytree(machine, root, symlinks=True)
        if kill_at:
            with pytest.MonkeyPatch.context() as patch:
                count_deeds(patch, deeds, kill_at)
                with pytest.raises(Killed):
                    reset(root, mount="srv-trainer.mount")
        with pytest.MonkeyPatch.context() as patch:
            count_deeds(patch, deeds)
            reset(root, mount="srv-trainer.mount")
        return deeds, files(root)

    whole, left = do(0, 0)
    assert len(whole) > 20
    for at in range(1, len(whole) + 1):
        deeds, found = do(at, at)
        assert (set(deeds), found) == (set(whole), left), whole[at - 1]


def test_what_an_operator_had_before_stays_when_it_is_done_again(
    machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = machine / "srv/trainer"
    own.mkdir(parents=True)
    noted = {"packages": [], "users": ["trainer"], "sysctls": {}, "directories": ["/srv/trainer"]}
    (machine / "var/lib/psfleet/before.json").write_text(json.dumps(noted))
    monkeypatch.setattr(host_reset, "is_user", lambda name: name == "trainer")
    monkeypatch.setattr(host_reset.Reset, "_call", lambda *_: (0, ""))
    for _ in range(2):
        done = host_reset.Reset(Module(machine, empty=["/srv/trainer"]))  # type: ignore[arg-type]
        monkeypatch.setattr(done, "_real", True)
        done.run()
        assert own.is_dir()
        assert "user trainer" not in done.removed


def test_runs_on_the_hosts_own_disk_stay_unless_they_must_go(machine: Path) -> None:
    (machine / "var/lib/trainer/.profile").write_text("x")
    done = reset(machine, keep=["/var/lib/trainer/local"])
    assert not (machine / "var/lib/trainer/.profile").exists()
    assert (machine / "var/lib/trainer/local/runs/digits/run.json").exists()
    assert "reset_runs=true" in done.notes[0]
    assert reset(machine, keep=["/var/lib/trainer/local"]).removed == []
    reset(machine)
    assert not (machine / "var/lib/trainer").exists()


def test_runs_that_the_host_serves_stay_too(machine: Path) -> None:
    (machine / "var/lib/trainer/nfs/runs").mkdir(parents=True)
    done = reset(machine, keep=["/srv/trainer", "/var/lib/trainer/nfs", ""])
    assert sorted(path.name for path in (machine / "var/lib/trainer").iterdir()) == [".psfleet-left", "nfs"]
    assert [note for note in done.notes if "stays, with the runs" in note] == [
        "/var/lib/trainer/nfs stays, with the runs: -e reset_runs=true removes it"
    ]


def test_a_directory_that_was_mounted_or_served_goes_where_nothing_is_left_in_it(
    machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("srv/trainer", "srv/served/runs", "srv/disk"):
        (machine / name).mkdir(parents=True)
    monkeypatch.setattr(Path, "is_mount", lambda path: path.name == "disk")
    paths = ["/srv/trainer", "/srv/served", "/srv/disk", "/srv/nowhere"]
    done = reset(machine, empty=paths)
    assert [name for name in done.removed if name.startswith("/srv")] == ["/srv/trainer"]
    assert sorted(path.name for path in (machine / "srv").iterdir()) == ["disk", "served"]
    (machine / "srv/served/runs").rmdir()
    (machine / "var/lib/psfleet").mkdir()
    (machine / "var/lib/psfleet/before.json").write_text('{"directories": []}')
    reset(machine, empty=paths)
    assert [path.name for path in (machine / "srv").iterdir()] == ["disk"]


def test_an_operators_own_directory_stays_though_psfleet_mounted_on_it(machine: Path) -> None:
    own = machine / "srv/trainer"
    own.mkdir(parents=True)
    noted = first_state.state_of([], [f"{own}/", "/srv/nowhere", ""])
    assert str(own) in noted["directories"]
    assert not {"/srv/nowhere", ""} & {*noted["directories"]}
    (machine / "var/lib/psfleet/before.json").write_text(json.dumps({"directories": ["/srv/trainer"]}))
    reset(machine, empty=["/srv/trainer"])
    assert own.is_dir()


@pytest.mark.parametrize("failing", ["purge", "srv-trainer.mount"])
def test_what_could_not_be_done_is_said_and_may_be_done_again(
    machine: Path, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    noted = machine / "var/lib/psfleet/before.json"
    noted.write_text('{"packages": []}')
    done = host_reset.Reset(Module(machine, mount="srv-trainer.mount", packages=["acl"]))  # type: ignore[arg-type]

    def call(*command: str) -> tuple[int, str]:
        return (1, "E: it is busy\n") if failing in command and "--simulate" not in command else (0, "")

    monkeypatch.setattr(done, "_call", call)
    monkeypatch.setattr(done, "_new_packages", lambda: {"acl"})
    done._real = True
    monkeypatch.setattr(host_reset, "is_user", lambda _: False)
    with pytest.raises(SystemExit, match=f"{failing}.*: E: it is busy. Fix it, and reset the host again"):
        done.run()
    assert noted.exists()


def test_a_directory_that_was_there_before_stays_empty(machine: Path) -> None:
    noted = machine / "var/lib/psfleet/before.json"
    noted.write_text(json.dumps({"directories": ["/etc/systemd/journald.conf.d"]}))
    reset(machine)
    assert (machine / "etc/systemd/journald.conf.d").is_dir()


def test_the_drivers_settings_stay_with_the_driver(machine: Path) -> None:
    kept = machine / "etc/systemd/system/nvidia-persistenced.service.d/psfleet.conf"
    kept.parent.mkdir()
    kept.write_text("x")
    reset(machine)
    assert kept.exists()


def test_a_package_stays_where_others_would_go_with_it(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done = host_reset.Reset(Module(machine))  # type: ignore[arg-type]
    needs = {"acl": "Purg acl [1]\n", "rsync": "Remv backup-tool [1]\nPurg rsync [1]\n", "odd": ""}
    called: list[tuple[str, ...]] = []

    def call(*command: str) -> tuple[int, str]:
        called.append(command)
        return int("odd" in command), "".join(needs.get(name, "") for name in command[3:])

    monkeypatch.setattr(done, "_call", call)
    done._purge(["acl", "rsync", "odd"])
    assert done.removed == ["package acl"]
    assert done.notes == [
        "package rsync stays: backup-tool would go with it",
        "package odd stays: what apt-get refuses to say would go with it",
    ]
    assert [command[-2:] for command in called if "--yes" in command] == [("purge", "acl")]


def test_packages_go_at_once_where_nothing_goes_with_them(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done = host_reset.Reset(Module(machine))  # type: ignore[arg-type]
    called: list[tuple[str, ...]] = []
    monkeypatch.setattr(done, "_call", lambda *command: (called.append(command), (0, "Purg acl\nPurg rsync\n"))[1])
    done._purge(["acl", "rsync"])
    assert called[-1][-3:] == ("purge", "acl", "rsync")
    assert done.removed == ["package acl", "package rsync"]


def test_a_user_goes_after_the_services_that_run_as_it(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`userdel` refuses one with processes, and the node exporter's package is what ends them."""
    done = host_reset.Reset(Module(machine, packages=["prometheus-node-exporter"]))  # type: ignore[arg-type]
    runs = {"prometheus-node-exporter"}

    def call(*command: str) -> tuple[int, str]:
        if command[0] == "dpkg-query":
            return 0, "".join(f"installed {name}\n" for name in runs)
        if "purge" in command and "--yes" in command:
            runs.clear()
        busy = command == ("userdel", "prometheus") and runs
        return (8, "userdel: user prometheus is currently used by process 7\n") if busy else (0, "")

    monkeypatch.setattr(done, "_real", True)
    monkeypatch.setattr(done, "_call", call)
    monkeypatch.setattr(host_reset, "is_user", lambda name: name == "prometheus")
    done.run()
    assert {"user prometheus", "package prometheus-node-exporter"} <= set(done.removed)


NFS = {"user _rpc", "user statd", "/var/lib/nfs"}


@pytest.mark.parametrize(
    ("before", "now", "check", "goes"),
    [
        ({}, [], False, NFS),
        ({}, ["nfs-common", "rpcbind"], True, NFS),  # they would go, and are there yet
        ({"packages": ["nfs-common", "rpcbind"]}, ["nfs-common", "rpcbind"], False, set()),
        ({"packages": ["rpcbind"]}, ["rpcbind"], False, {"user statd", "/var/lib/nfs"}),
        ({"users": ["_rpc", "statd"], "directories": ["/var/lib/nfs"]}, [], False, set()),
        ({}, ["rpcbind", "ypbind-mt"], False, {"user statd", "/var/lib/nfs"}),  # which others have come to need
        ({"packages": None}, ["nfs-common", "rpcbind"], False, set()),
    ],
)
def test_what_packages_leave_goes_unless_it_was_there_before(
    machine: Path, monkeypatch: pytest.MonkeyPatch, before: dict[str, Any], now: list[str], check: bool, goes: set[str]
) -> None:
    """Debian's packages of NFS leave users, locks and units when they are purged."""
    noted = {"packages": [], "users": [], "directories": [], **before}
    (machine / "var/lib/psfleet/before.json").write_text(
        json.dumps({name: value for name, value in noted.items() if value is not None})
    )
    (machine / "var/lib/nfs").mkdir()
    (machine / "var/lib/nfs/.etab.lock").write_text("")
    done = host_reset.Reset(Module(machine, check, packages=["nfs-common"]))  # type: ignore[arg-type]
    installed, called = set(now), []

    def call(*command: str) -> tuple[int, str]:
        called.append(command)
        if command[0] == "dpkg-query":
            return 0, "".join(f"installed {name}\n" for name in sorted(installed))
        if "autoremove" in command and "ypbind-mt" not in installed:
            return 0, "Remv rpcbind [1]\n"
        if command[0] == "apt-get" and "--yes" in command:
            installed.difference_update(command)
        return 0, ""

    monkeypatch.setattr(done, "_real", True)
    monkeypatch.setattr(done, "_call", call)
    monkeypatch.setattr(host_reset, "is_user", lambda name: name in ("_rpc", "statd"))
    done.run()
    assert {each for each in done.removed if each in NFS} == goes
    assert (machine / "var/lib/nfs").exists() == ("/var/lib/nfs" not in goes or check)
    forgotten = {
        command[-1] for command in called if command[:2] == ("systemctl", "reset-failed") and len(command) == 3
    }
    expected = {"rpcbind.target"} if "user _rpc" in goes else set()
    expected |= {"run-rpc_pipefs.mount"} if "user statd" in goes else set()
    assert forgotten == (set() if check else expected) or "users" in before


def test_services_that_stay_forget_what_is_gone(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel exports what an NFS server has read, whatever file is there, and then nothing closes the host."""
    exports = machine / "etc/exports.d/psfleet.exports"
    exports.parent.mkdir()
    exports.write_text("/srv/nfs/trainer 10.0.0.11(rw)\n")
    seen: list[tuple[str, bool]] = []
    done = host_reset.Reset(Module(machine))  # type: ignore[arg-type]
    monkeypatch.setattr(
        done, "_call", lambda *command: (seen.append((" ".join(command), exports.exists())), (0, ""))[1]
    )
    done.run()
    [(restart, there)] = [(line, there) for line, there in seen if "try-restart" in line]
    assert ("nfs-server" in restart, "chrony" in restart, "systemd-journald" in restart, there) == (True,) * 3 + (
        False,
    )
    assert seen.index((restart, False)) > seen.index(("systemctl daemon-reload", False))
    seen.clear()
    again = host_reset.Reset(Module(machine))  # type: ignore[arg-type]
    monkeypatch.setattr(again, "_call", lambda *command: (seen.append((" ".join(command), False)), (0, ""))[1])
    again.run()
    assert not any("try-restart" in line for line, _ in seen)


def test_the_first_state_is_noted_once_and_never_of_a_machine_of_psfleets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    noted = first_state.state_of(["b", "a"], [])
    assert (noted["packages"], "root" in noted["users"]) == (["a", "b"], True)
    assert noted["sysctls"]["net.ipv4.tcp_retries2"].isdecimal()
    changes: list[bool] = []

    class Done(Module):
        def exit_json(self, changed: bool) -> None:
            changes.append(changed)

    file = tmp_path / "x/before.json"
    made = Done(tmp_path, file=str(file))
    made.params |= {"packages": ["a"], "directories": []}
    monkeypatch.setattr(first_state, "AnsibleModule", lambda **_: made)
    monkeypatch.setattr(first_state, "SIGNS", (str(tmp_path / "opt"),))
    first_state.main()
    first_state.main()
    assert changes == [True, False]
    file.unlink()
    (tmp_path / "opt").mkdir()
    first_state.main()
    assert (changes, file.exists()) == ([True, False, False], False)
    (tmp_path / "opt").rmdir()
    (tmp_path / "home").mkdir()
    monkeypatch.setattr(first_state, "HOME", str(tmp_path / "home"))
    monkeypatch.setattr(first_state, "USER", "root")  # as where fab remove-host has left it
    first_state.main()
    assert file.exists() is False
    monkeypatch.setattr(first_state, "USER", "none-of-this-name")  # as after a reset that has left the runs
    first_state.main()
    assert (changes[3:], file.exists()) == ([False, True], True)


@pytest.mark.parametrize("has", [True, False])
def test_the_first_state_is_noted_also_where_the_image_has_the_first_packages(has: bool) -> None:
    """Those of later roles are missing all the same, and the reset would keep them for want of a note."""
    facts = {"os_family": "Debian", "virtualization_role": "host", "virtualization_type": "kvm"}
    place = ROOT / "roles/common"
    known = {**load(place / "defaults/main.yml"), **load(place / "vars/main.yml")}
    known |= {"common_cluster": "10.0.3.10", "common_takes_over": []}
    known |= {"common_uid": 6006, "ansible_facts": facts, "ansible_check_mode": False, "ansible_managed": "x"}

    def render(value: Any, more: Mapping[str, Any], **options: Any) -> Any:
        return Templar(loader=DataLoader(), variables={**known, **more}).template(value, **options)

    role = Ahead(place, render, leads=True)
    question = role.question("main")
    packages = ["acl", "ca-certificates", "nftables", "rsync", "procps", "python3-apt", "chrony"]
    lists = {"rc": 0, "stdout": "".join(f"installed {name}\n" for name in packages)}
    steps = {name: lists if "command" in step else {"ActiveState": "", "UnitFileState": ""} if "unit" in step else {}
             for name, step in question.steps.items()}  # fmt: skip
    files = dict.fromkeys([*question.files, *question.looks])
    files |= {"/var/lib/trainer": ["0755", "directory", "root 0", "root 0"]} if has else {}
    difference = role.difference("main", {"files": files, "texts": {}, "steps": steps})
    assert difference
    assert (difference == "what the machine had is not noted") != has


def written() -> set[str]:
    """Return the paths that the roles' tasks write, with `*` for what is only known on a host."""
    found = set()
    for path in (ROOT / "roles").glob("*/tasks/*.yml"):
        if path.parts[-3] in ("reset", DRIVER):
            continue
        for task in flat(yaml.safe_load(path.read_text())):
            makers = [task.get(f"ansible.builtin.{module}") or {} for module in ("template", "copy", "file")]
            many = task.get("write_files", {})
            texts = [str(each.get("dest") or each.get("path")) for each in makers if each.get("state") != "absent"]
            directories = (each["path"] if isinstance(each, dict) else each for each in many.get("directories", ()))
            texts += [*directories, *(each["dest"] for each in many.get("files", ()))]
            found |= {re.sub(r"\{\{.*?\}\}", "*", text) for text in texts if text.startswith("/")}
    return found


@pytest.mark.skipif(os.geteuid() != 0, reason="what psfleet has written is root's to remove")
def test_runs_go_though_an_earlier_reset_has_taken_the_user_away(tmp_path: Path) -> None:
    """The tasks' user is named otherwise here, so that no machine has it."""
    role = tmp_path / "roles/reset"
    shutil.copytree(ROOT / "roles/reset", role)
    tasks = role / "tasks/shared.yml"
    tasks.write_text(tasks.read_text().replace("trainer", "not-trainer"))
    (tmp_path / "path/runs/first").mkdir(parents=True)
    (tmp_path / "path/data").mkdir()
    play = {
        "hosts": "localhost", "connection": "local", "gather_facts": False, "become": True,
        "tasks": [{"include_role": {"name": "reset", "tasks_from": "shared"}}],
        "vars": {
            "reset_path": str(tmp_path / "path"), "reset_everything": True,
            "ansible_python_interpreter": sys.executable,
        },
    }  # fmt: skip
    (tmp_path / "play.yml").write_text(yaml.safe_dump([play]))
    environment = {**os.environ, "ANSIBLE_ROLES_PATH": str(tmp_path / "roles")}
    command = ["ansible-playbook", "-i", "localhost,", "play.yml"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [each.name for each in (tmp_path / "path").iterdir()] == ["data"]


def test_a_tensorboard_of_others_goes_on_where_psfleet_never_was(tmp_path: Path) -> None:
    plays = yaml.safe_load((ROOT / "ansible/reset.yml").read_text())
    (task,) = [task for play in plays for task in play.get("tasks", []) if task["name"] == "Stop the tasks"]
    assert task["args"]["removes"] == "/var/lib/psfleet"
    own = []
    for name in ("never", "was"):
        place = tmp_path / name
        put_program(place / "systemctl", f'#!/bin/sh\necho "$@" >{place}/stopped\n')
        put = {"args": {"removes": str(tmp_path if name == "was" else place / "psfleet")}}
        own.append({**task, **put, "environment": {"PATH": f"{place}:{os.defpath}"}})
    play = {
        "hosts": "localhost", "connection": "local", "gather_facts": False, "tasks": own,
        "vars": {"ansible_python_interpreter": sys.executable},
    }  # fmt: skip
    (tmp_path / "play.yml").write_text(yaml.safe_dump([play]))
    command = ["ansible-playbook", "-i", "localhost,", "play.yml"]
    done = subprocess.run(command, cwd=tmp_path, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [(tmp_path / name / "stopped").exists() for name in ("never", "was")] == [False, True]


def test_what_is_measured_of_a_host_goes_with_it() -> None:
    """Another cluster measures it again."""
    assert any(fnmatch(str(host_pace.NOTE), f"/{pattern}") for pattern in host_reset.OWN)


def flat(tasks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [each for task in tasks for each in [task, *flat([*task.get("block", []), *task.get("rescue", [])])]]


def test_each_path_that_a_role_writes_is_known_to_the_reset() -> None:
    paths = written() - KEPT
    assert len(paths) > 20
    patterns = [f"/{pattern}" for pattern in host_reset.OWN]
    mine = [path for path in paths if not path.startswith(("*", "/*"))]
    lost = [
        path
        for path in mine
        if not any(fnmatch(path, pattern) or fnmatch(path, f"{pattern}/*") for pattern in patterns)
        and not path.startswith("/etc/systemd/system/*")  # the mount's unit, and drop-ins that are named elsewhere
        and not re.fullmatch(r"/etc/(systemd/(journald\.conf\.d|system/.*\.d)|exports\.d)", path)  # removed when empty
    ]
    assert lost == []


def test_each_file_of_the_shared_path_goes_or_holds_work() -> None:
    """As the design's table lists them: a drain that a reset left would keep the next cluster's host out."""
    rows = [row.split("|")[1] for row in (ROOT / "docs/design.md").read_text().splitlines() if row.startswith("| `<sh")]
    names = {name for row in rows for name in re.findall(r"`(?:<shared>/)?([a-z.-]+)[`/]", row)}
    lists = yaml.safe_load((ROOT / "roles/reset/vars/main.yml").read_text()).values()
    taken = [pattern for each in lists for pattern in each]
    assert {"drains", "runs", "queue.json"} < names
    assert [name for name in sorted(names) if not any(fnmatch(name, pattern) for pattern in taken)] == []
