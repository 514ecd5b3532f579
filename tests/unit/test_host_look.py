"""What a host is asked before anything on it is changed."""

from __future__ import annotations

import grp
import os
import pwd
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from host_look import (
    check_host,
    clock_problem,
    is_own,
    listeners,
    own_name_problem,
    python_problem,
    resolve,
    source_to,
    stranger_problem,
    sudo_problem,
    system_problems,
    tunnel_problem,
    user_problems,
    way_problems,
)

from fleet.site.host_check import host_listeners, login_problem, member_addresses, port_problems, sudo_fix
from fleet.site.inventory import load_inventory
from fleet.site.topology import cluster_spec
from tests.unit.stand_ins import put_program

ROOT = Path(__file__).resolve().parents[2]
MEMBERS = {"w": "127.0.0.1", "ps-0": "10.9.0.1", "ps-1": "10.9.0.2"}


def ways(
    members: dict[str, str], sources: dict[str, str], names: dict[str, list[str]] | None = None
) -> tuple[list[str], list[str]]:
    """The ways of host `w`, whose kernel answers with these sources."""

    def source(address: str) -> str:
        if address not in sources:
            raise OSError(101, "Network is unreachable")
        return sources[address]

    return way_problems("w", members, lambda name: (names or {}).get(name, [name]), source)


@pytest.fixture
def own(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Give this host addresses."""

    def give(*addresses: str) -> None:
        monkeypatch.setattr("host_look.is_own", lambda address: address in addresses)

    return give


def test_packets_that_leave_with_the_hosts_own_address_are_right(own: Callable[..., None]) -> None:
    own("10.9.0.7")
    members = MEMBERS | {"w": "10.9.0.7"}
    assert ways(members, {"10.9.0.1": "10.9.0.7", "10.9.0.2": "10.9.0.7"}) == ([], [])


def test_packets_that_leave_with_another_address_are_named_with_both_fixes(own: Callable[..., None]) -> None:
    own("10.9.0.7", "10.9.0.8")
    (problem,), notes = ways(MEMBERS | {"w": "10.9.0.8"}, {"10.9.0.1": "10.9.0.7", "10.9.0.2": "10.9.0.7"})
    assert "host 'w': its packets to ps-0, ps-1 leave from 10.9.0.7" in problem
    assert "the others know it as 10.9.0.8" in problem
    assert "Name 10.9.0.7 as its cluster_address" in problem
    assert "src 10.9.0.8" in problem
    assert notes == []


def test_an_address_that_a_router_translates_is_only_told(own: Callable[..., None]) -> None:
    own("10.9.0.7")
    problems, (note,) = ways(MEMBERS | {"w": "198.51.100.7"}, {"10.9.0.1": "10.9.0.7", "10.9.0.2": "10.9.0.7"})
    assert problems == []
    assert "no interface has its address 198.51.100.7, and packets leave from 10.9.0.7" in note


def test_a_member_without_a_route_is_named(own: Callable[..., None]) -> None:
    own("10.9.0.7")
    (problem,), _ = ways(MEMBERS | {"w": "10.9.0.7"}, {"10.9.0.1": "10.9.0.7"})
    assert "no way to ps-1 at 10.9.0.2: Network is unreachable" in problem


def test_another_hosts_name_that_means_loopback_is_refused_and_its_own_is_told(own: Callable[..., None]) -> None:
    own("10.9.0.7")
    members = {"w": "w.example", "ps-0": "ps-0.example"}
    names = {"w.example": ["127.0.1.1"], "ps-0.example": ["127.0.1.1"]}
    (problem,), (note,) = ways(members, {}, names)
    assert "ps-0.example, the name of ps-0, means a loopback address here" in problem
    assert "its own name w.example means a loopback address here" in note


def test_the_kernel_is_asked() -> None:
    assert source_to("127.0.0.1") == "127.0.0.1"
    assert resolve("no-such-name.invalid") == []
    assert resolve("127.0.0.1") == ["127.0.0.1"]
    assert socket.gethostname()


@pytest.mark.parametrize(
    ("here", "expected"),
    [
        (1_000_000, None),
        (1_000_590, None),
        (1_000_000 - 7200, "its clock is 2.0 h behind the control machine's"),
        (1_000_000 + 40 * 86400, "its clock is 40.0 days ahead of the control machine's"),
        (1_000_000 - 660, "its clock is 11.0 min behind"),
    ],
)
def test_a_clock_that_is_far_off_is_refused(here: float, expected: str | None) -> None:
    problem = clock_problem("w", here, 1_000_000)
    assert problem is None if expected is None else expected in str(problem)


def test_the_control_machines_clock_is_handed_on_whatever_its_time_zone() -> None:
    tasks = yaml.safe_load((ROOT / "roles/host_check/tasks/main.yml").read_text())
    (now,) = [task["host_look"]["now"] for task in tasks if "host_look" in task]
    command = ["ansible", "localhost", "-i", "localhost,", "-c", "local", "-m", "debug", "-a", f'msg="clock {now}"']
    before = time.time()
    environment = os.environ | {"TZ": "Asia/Tokyo"}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment, cwd=ROOT)
    assert int(before) <= int(done.stdout.partition("clock ")[2].split('"')[0]) <= time.time()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("sudo: sorry, you must have a tty to run sudo", "`Defaults:admin !requiretty` into /etc/sudoers.d/psfleet"),
        ("sudo: a password is required", "`admin ALL=(ALL) NOPASSWD: ALL`"),
        ("Missing sudo password", "`admin ALL=(ALL) NOPASSWD: ALL`"),
        ("admin is not in the sudoers file.", "admin may not use sudo there"),
        ("/bin/sh: 1: sudo: not found", "it has no sudo"),
        ("/bin/sh: 1: /usr/bin/python3: Permission denied", "`Defaults:admin !noexec` into /etc/sudoers.d/psfleet"),
        ("FileNotFoundError: [Errno 2] No usable temporary directory found in ['/tmp']", "it has no room for a small"),
        ("something else", "does not become root: something else"),
    ],
)
def test_a_sudo_that_refuses_is_named_with_its_fix(text: str, expected: str) -> None:
    assert expected in sudo_fix({"msg": text}, "admin")
    assert sudo_fix({"rc": 1}).endswith("exit code 1 and printed nothing")


@pytest.mark.parametrize(
    ("result", "expected"),
    [
        ({"stdout": "psfleet-answers\r\n", "stderr": "Shared connection closed."}, ""),
        (
            {"rc": 1, "stdout": ""},
            "ran no command: it printed ''; expected a shell such as bash: `getent passwd admin`",
        ),
        ({"stdout": "Welcome\npsfleet-answers\n"}, "its login prints 'Welcome' also where nobody reads"),
    ],
)
def test_a_login_that_prints_or_runs_nothing_is_named(result: dict[str, object], expected: str) -> None:
    found = login_problem(result, "admin")
    assert expected in found
    assert bool(found) == bool(expected)


@pytest.mark.parametrize("said", ["sh: 1: /opt/python3: not found\n", "sh: /opt/python3: No such file or directory\n"])
def test_a_python_that_is_missing_is_not_taken_for_sudo(said: str) -> None:
    """As Ansible registers it of a minimal image, and of a path that is misspelt."""
    found = {"msg": "The module interpreter '/opt/python3' was not found.", "module_stderr": said, "rc": 127}
    text = sudo_fix(found, "admin")
    assert "it has no Python" in text
    assert "/opt/python3" in text
    assert "sudo" not in text


@pytest.mark.parametrize(
    ("module", "said"),
    [
        ("import jsonn", "its Python is not whole (ModuleNotFoundError: No module named"),
        ("import time; time.sleep(60)", "it did not look at itself as root within 3 s; expected seconds"),
    ],
)
def test_a_python_that_breaks_or_hangs_is_not_taken_for_sudo(tmp_path: Path, module: str, said: str) -> None:
    (tmp_path / "library").mkdir()
    (tmp_path / "library/host_look.py").write_text(f"#!/usr/bin/python\n{module}\n")
    look = {"host_look": None, "ignore_errors": True, "timeout": 3, "register": "seen"}
    tell = {"ansible.builtin.debug": {"msg": "{{ seen | sudo_fix('admin') }}"}}
    (tmp_path / "play.yml").write_text(yaml.safe_dump([{"hosts": "all", "gather_facts": False, "tasks": [look, tell]}]))
    here = {"ansible_connection": "local", "ansible_python_interpreter": sys.executable}
    (tmp_path / "hosts.yml").write_text(yaml.safe_dump({"all": {"hosts": {"a": here, "b": here}}}))
    command = ["ansible-playbook", "--inventory", f"{tmp_path}/hosts.yml", f"{tmp_path}/play.yml"]
    paths = {"ANSIBLE_LIBRARY": f"{tmp_path}/library"}
    done = subprocess.run(command, cwd=ROOT, env=os.environ | paths, capture_output=True, text=True, check=True)
    assert " ".join(done.stdout.split()).count(said) == 2


def test_the_members_are_those_who_speak_with_one_another() -> None:
    groups = {"chief": ["a"], "worker": ["b"], "nfs_server": ["c"], "gpu": ["d"], "all": ["a", "b", "c", "d", "e"]}
    hostvars = {name: {"ansible_host": f"10.0.0.{number}"} for number, name in enumerate("abcde")}
    hostvars["b"]["cluster_address"] = "10.1.0.1"
    assert member_addresses(groups, hostvars) == {"a": "10.0.0.0", "b": "10.1.0.1", "c": "10.0.0.2"}


def test_a_kernel_without_ipv6_has_no_address_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name may have addresses of both families."""
    kinds = socket.socket

    def without(family: int, kind: int) -> socket.socket:
        if family == socket.AF_INET6:
            raise OSError(97, "Address family not supported by protocol")
        return kinds(family, kind)

    monkeypatch.setattr(socket, "socket", without)
    assert (is_own("2001:db8::7"), is_own("127.0.0.1")) == (False, True)


def test_of_a_names_addresses_the_one_with_a_route_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """The resolver has sorted them so (RFC 6724): a host without IPv6 reaches the others all the same."""
    answers = [(0, 0, 0, "", ("203.0.113.5", 0)), (0, 0, 0, "", ("2001:db8::5", 0, 0, 0))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: answers)
    assert resolve("node-1.example.org") == ["203.0.113.5", "2001:db8::5"]


def test_a_host_that_calls_nobody_has_no_ways_to_look_at(own: Callable[..., None]) -> None:
    """One in the group gpu alone is no member, and is looked at all the same."""
    own("10.9.0.7")
    members = {name: address for name, address in MEMBERS.items() if name != "w"}
    assert ways(members, {"10.9.0.1": "10.9.0.7", "10.9.0.2": "10.9.0.7"}) == ([], [])


DEBIAN = 'PRETTY_NAME="Debian GNU/Linux 12 (bookworm)"\nID=debian\n'
READ_ONLY = """
mount -t tmpfs tmpfs "$1" && mkdir -p "$1/etc" "$1/usr" "$1/run/systemd/system" &&
echo ID=debian >"$1/etc/os-release" && mount --bind "$1/usr" "$1/usr" &&
mount -o remount,bind,ro "$1/usr" && exec "$2" -c "
import pathlib, sys
from host_look import system_problems
print(*system_problems('w', True, pathlib.Path(sys.argv[1]), 'x86_64'), sep='\\n')
" "$1"
"""


def make_system(root: Path, release: str, booted: bool = True) -> Path:
    (root / "etc").mkdir()
    (root / "etc/os-release").write_text(release)
    if booted:
        (root / "run/systemd/system").mkdir(parents=True)
    return root


@pytest.mark.parametrize(
    "release",
    [
        DEBIAN,
        "ID=ubuntu\nID_LIKE=debian\n",
        "ID=linuxmint\nID_LIKE=ubuntu\n",
        "ID='own'\nID_LIKE='debian'\n",
    ],
)
def test_a_system_that_psfleet_knows_is_right(tmp_path: Path, release: str) -> None:
    assert system_problems("w", True, make_system(tmp_path, release), "x86_64") == []


def test_a_host_that_only_serves_or_watches_may_have_another_processor(tmp_path: Path) -> None:
    assert system_problems("w", False, make_system(tmp_path, DEBIAN), "aarch64") == []


@pytest.mark.parametrize(
    ("release", "booted", "machine", "said"),
    [
        (DEBIAN, True, "aarch64", "its processor is of aarch64; expected x86_64"),
        (DEBIAN, False, "x86_64", "systemd did not begin it"),
        ('PRETTY_NAME="Alpine Linux v3.20"\nID=alpine\n', True, "x86_64", "its system is Alpine Linux v3.20; expected"),
        (
            'PRETTY_NAME="Rocky Linux 9.4"\nID="rocky"\nID_LIKE="rhel centos"\n',
            True,
            "x86_64",
            "its system is Rocky Linux 9.4; expected",
        ),
        ("not as os-release(5) has it\n", True, "x86_64", "its system is unknown; expected Debian or Ubuntu"),
    ],
)
def test_a_system_that_no_role_can_change_is_named(
    tmp_path: Path, release: str, booted: bool, machine: str, said: str
) -> None:
    (found,) = system_problems("w", True, make_system(tmp_path, release, booted), machine)
    assert f"host 'w': {said}" in found


def test_a_python_in_a_home_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "python").symlink_to("/home/admin/.pyenv/versions/3.11.7")
    assert python_problem("w", "/usr") is None
    assert python_problem("w", "/opt/conda") is None
    monkeypatch.setattr(sys, "base_prefix", str(tmp_path / "python"))
    said = "Ansible's Python there is of /home/admin/.pyenv/versions/3.11.7, and tasks see nothing below /home"
    for trains in (True, False):
        found, _ = check_host("w", {"w": "127.0.0.1"}, time.time(), number=os.getuid() or 6006, trains=trains)
        assert any(said in each for each in found) is trains


def test_a_system_that_cant_be_written_is_named(tmp_path: Path) -> None:
    unshare = ["unshare", "--user", "--map-root-user", "--mount"]
    command = [*unshare, "sh", "-c", READ_ONLY, "sh", str(tmp_path), sys.executable]
    found = {**os.environ, "PYTHONPATH": str(ROOT / "roles/host_check/library")}
    done = subprocess.run(command, env=found, capture_output=True, text=True, check=True)
    assert done.stdout == "host 'w': its /usr can't be written; expected a system that packages can be added to\n"


ROOM = """
mount -t tmpfs -o size=4g tmpfs "$1" && cd "$1" && mkdir -p $2 && eval "$3" && exec "$4" -c "
import pathlib, sys
from host_look import room_problems
print(*room_problems('w', True, pathlib.Path(sys.argv[1])), sep='\\n')
" "$1"
"""


@pytest.mark.parametrize(
    ("mounts", "said"),
    [
        ("true", []),
        ("mount -t tmpfs -o size=1m tmpfs var", ["/var has 1 MB free; expected 50. Free some there: `du -xh "]),
        (
            "mount -t tmpfs -o nr_inodes=20 tmpfs run",
            ["/run has room for 19 more files; expected 100. Free some there"],
        ),
        ("mount -t tmpfs -o size=1g tmpfs opt", ["/opt has 1,074 MB free; expected 2,000."]),
        ("mount -t tmpfs -o size=1g tmpfs opt && mkdir -p opt/trainer/envs/cpu-3.11", []),
        ("mount -o remount,size=1m .", ["/opt has 1 MB free; expected 2,000."]),
    ],
)
def test_a_file_system_that_is_full_is_named_once(tmp_path: Path, mounts: str, said: list[str]) -> None:
    unshare = ["unshare", "--user", "--map-root-user", "--mount"]
    command = [*unshare, "sh", "-c", ROOM, "sh", str(tmp_path), "etc opt run usr var", mounts, sys.executable]
    found = {**os.environ, "PYTHONPATH": str(ROOT / "roles/host_check/library")}
    done = subprocess.run(command, env=found, capture_output=True, text=True, check=True)
    lines = [line for line in done.stdout.splitlines() if line]
    assert len(lines) == len(said)
    assert all(f"host 'w': {tmp_path}{part}" in line for line, part in zip(lines, said, strict=True))


def test_a_directory_of_others_where_releases_come_is_named(tmp_path: Path) -> None:
    (tmp_path / "opt/trainer/lost+found").mkdir(parents=True)  # a disk of its own, for the environments
    assert stranger_problem("w", tmp_path) is None
    (tmp_path / "opt/trainer/releases").mkdir()
    assert "opt/trainer is not of psfleet, and has releases; expected none" in str(stranger_problem("w", tmp_path))
    (tmp_path / "var/lib/psfleet").mkdir(parents=True)
    assert stranger_problem("w", tmp_path) is None


def test_a_process_at_a_port_of_psfleets_is_named_before_anything_is_begun() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        found = {"listeners": listeners([port])}
    assert listeners([port]) == {}
    service, task = (port, "tensorboard", "tensorboard.service", "tensorboard_port"), (port, "ps-0", "u", "ps_port")
    (problem,) = port_problems([service, task], found, "w")
    assert f"host 'w': port {port} of ps-0 is taken by" in problem  # a service listens on the host's address alone
    assert f"(process {os.getpid()}" in problem
    assert "or another ps_port in the inventory" in problem
    found["listeners"][str(port)] |= {"unit": "trainer@ps-7.service"}
    assert port_problems([service, task], found, "w") == []


def test_what_listens_on_a_host_is_known_to_the_play_as_to_fab() -> None:
    inventory = load_inventory(str(ROOT / "inventory/three-machines"))
    spec = cluster_spec(inventory.groups, inventory.variables)
    assert {host: host_listeners(spec, host) for host in inventory.hosts} == {
        host: [[*each] for each in inventory.listeners_on(host)] for host in inventory.hosts
    }
    assert [6006, "tensorboard", "tensorboard.service", "tensorboard_port"] in host_listeners(
        spec, inventory.chief.host
    )


@pytest.mark.parametrize("state", ["1\n", None])
def test_a_tunnel_of_ipv6_is_refused_where_the_kernel_has_none(tmp_path: Path, state: str | None) -> None:
    setting = tmp_path / "disable_ipv6"
    if state is not None:
        setting.write_text(state)
    problem = tunnel_problem("w", "fd6c:1d0e:77b2::1", setting) or ""
    assert "host 'w': its tunnel is to have the address fd6c:1d0e:77b2::1, and IPv6 is off here" in problem
    assert "net.ipv6.conf.default.disable_ipv6 = 0" in problem
    assert [tunnel_problem("w", address, setting) for address in ("10.213.0.1", "")] == [None, None]


def test_a_tunnel_of_ipv6_is_right_where_it_is_on(tmp_path: Path) -> None:
    (tmp_path / "disable_ipv6").write_text("0\n")
    assert tunnel_problem("w", "fd6c:1d0e:77b2::1", tmp_path / "disable_ipv6") is None


def users(monkeypatch: pytest.MonkeyPatch, passwd: list[tuple[str, int, str]], groups: list[tuple[str, int]]) -> None:
    """Have the host know these users and groups alone."""
    known = [pwd.struct_passwd((name, "x", uid, uid, "", home, "/bin/sh")) for name, uid, home in passwd]
    grouped = [grp.struct_group((name, "x", gid, [])) for name, gid in groups]
    monkeypatch.setattr(pwd, "getpwnam", lambda wanted: {each.pw_name: each for each in known}[wanted])
    monkeypatch.setattr(pwd, "getpwuid", lambda wanted: {each.pw_uid: each for each in known}[wanted])
    monkeypatch.setattr(grp, "getgrnam", lambda wanted: {each.gr_name: each for each in grouped}[wanted])
    monkeypatch.setattr(grp, "getgrgid", lambda wanted: {each.gr_gid: each for each in grouped}[wanted])


@pytest.mark.parametrize(
    ("passwd", "groups", "words"),
    [
        ([], [], ""),
        ([("trainer", 6006, "/var/lib/trainer")], [("trainer", 6006)], ""),  # a second run
        ([("trainer", 7007, "/var/lib/trainer")], [("trainer", 7007)], ""),  # after a change of cluster_uid
        ([], [("trainer", 6006)], ""),
        (
            [("trainer", 1001, "/home/trainer")],
            [("trainer", 1001)],
            "a user trainer already, with the number 1001 and the home /home/trainer, who would lose home and shell",
        ),
        ([], [("trainer", 1001)], "a group trainer already, with the number 1001; expected none, or one with"),
        (
            [("ana", 6006, "/home/ana")],
            [("ana", 6006)],
            "cluster_uid is 6006, the number of its user ana and of its group ana; expected",
        ),
        ([], [("builders", 6006)], "cluster_uid is 6006, the number of its group builders; expected one that is free"),
    ],
)
def test_users_of_others_are_named(
    monkeypatch: pytest.MonkeyPatch, passwd: list[tuple[str, int, str]], groups: list[tuple[str, int]], words: str
) -> None:
    users(monkeypatch, passwd, groups)
    found = user_problems("w", 6006)
    assert len(found) == bool(words)
    assert words in "".join(found)


@pytest.mark.parametrize(("code", "login", "named"), [(1, "admin", True), (0, "admin", False), (1, "", False)])
@pytest.mark.parametrize(("passwd", "other"), [([], "nobody"), ([("trainer", 6006, "/var/lib/trainer")], "trainer")])
def test_a_sudo_for_root_alone_is_named(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    passwd: list[tuple[str, int, str]],
    other: str,
    code: int,
    login: str,
    named: bool,
) -> None:
    """The rule may be for the tasks' user alone, once it is known."""
    users(monkeypatch, passwd, [])
    put_program(
        tmp_path / "sudo", f'#!/bin/sh\n[ "$*" = "-n -l -U {login} -u {other} /bin/sh" ] && exit {code}\nexit 7\n'
    )
    monkeypatch.setenv("PATH", str(tmp_path))
    problem = sudo_problem("w", login) or ""
    assert ("`admin ALL=(ALL) NOPASSWD: ALL` into /etc/sudoers.d/psfleet" in problem) is named


def test_a_host_without_sudo_has_none_that_refuses(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert sudo_problem("w", "root") is None


@pytest.mark.parametrize(("seconds", "named"), [(24.0, True), (0.1, False)])
def test_a_name_server_that_each_sudo_waits_for_is_named(seconds: float, named: bool) -> None:
    times = iter([0.0, seconds])
    problem = own_name_problem("w", "Box.example", lambda _: [], lambda: next(times)) or ""
    assert ("own name Box.example takes 24 s" in problem) is named
    assert ("`127.0.1.1 Box.example` into /etc/hosts" in problem) is named
