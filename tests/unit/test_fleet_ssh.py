"""The SSH layer against a small SSH server in this process: no network, no lab."""

from __future__ import annotations

import base64
import configparser
import contextlib
import getpass
import hashlib
import os
import re
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

import paramiko
import pytest
import yaml
from fabric import Config
from paramiko.common import MSG_CHANNEL_SUCCESS, OPEN_FAILED_ADMINISTRATIVELY_PROHIBITED, OPEN_FAILED_CONNECT_FAILED
from paramiko.ssh_exception import AuthenticationException, SSHException

import fleet.hosts.ssh
from fleet.errors import ClusterTrouble, HostsUnreachable, OperatorMistake
from fleet.hosts.keys import _vouches
from fleet.hosts.ssh import Answer, SshHosts
from fleet.places import KIT
from fleet.site.routes import Host
from tests.waiting import until

ACCEPT = {"stricthostkeychecking": "no"}


class Transport(paramiko.Transport):
    """Tells when it has answered a request: a client takes a channel that is closed before for a lost one."""

    answered: threading.Event

    def _send_user_message(self, data: paramiko.Message) -> None:
        super()._send_user_message(data)
        if data.asbytes()[0] == MSG_CHANNEL_SUCCESS:
            self.answered.set()


class Session(paramiko.ServerInterface):
    """Let one key in and run what it asks for in a local shell."""

    def __init__(self, key: paramiko.PKey) -> None:
        self._key = key
        self.asked: list[str] = []  # what was asked for beside the channels

    def get_allowed_auths(self, username: str) -> str:
        return "publickey"

    def check_auth_publickey(self, username: str, key: paramiko.PKey) -> int:
        return paramiko.AUTH_SUCCESSFUL if key == self._key and username != "nobody" else paramiko.AUTH_FAILED

    def check_global_request(self, kind: str, msg: paramiko.Message) -> bool:
        self.asked.append(kind)
        return False

    def check_channel_request(self, kind: str, chanid: int) -> int:
        return paramiko.OPEN_SUCCEEDED

    def check_channel_pty_request(self, *_: object) -> bool:
        return True

    def check_channel_exec_request(self, channel: paramiko.Channel, command: bytes) -> bool:
        answered = channel.get_transport().answered = threading.Event()
        threading.Thread(target=self._execute, args=(channel, command.decode(), answered), daemon=True).start()
        return True

    def _execute(self, channel: paramiko.Channel, command: str, answered: threading.Event) -> None:
        pipe = subprocess.PIPE
        with subprocess.Popen(command, shell=True, stdin=pipe, stdout=pipe, stderr=pipe) as process:
            assert process.stdout
            assert process.stderr
            threading.Thread(target=_pump, args=(channel, process.stdin), daemon=True).start()
            answered.wait(60)
            with contextlib.suppress(OSError, EOFError, paramiko.SSHException):  # who asked may have left
                for line in process.stdout:
                    channel.sendall(line)
                channel.sendall_stderr(process.stderr.read())
                channel.send_exit_status(process.wait())
                channel.close()


def _pump(channel: paramiko.Channel, stdin: IO[bytes]) -> None:
    """Hand over what a client sends; a client that is silent has a script that reads nothing."""
    with contextlib.suppress(OSError, EOFError, ValueError):  # the script has ended
        while data := channel.recv(2**16):
            stdin.write(data)
        stdin.close()


class Certified(paramiko.ECDSAKey):
    """A host's key that is shown with a certificate."""

    blob: bytes

    def get_name(self) -> str:
        return f"{super().get_name()}-cert-v01@openssh.com"

    def asbytes(self) -> bytes:
        return self.blob


@dataclass
class Server:
    port: int
    host_key: paramiko.PKey
    key_file: Path
    logins: list[paramiko.Transport]
    certified: Certified | None = None  # the same key with a certificate, which is offered too
    turn_away: int = 0  # so many callers are hung up on before the next is let in

    def host(self, name: str = "here", **options: str) -> Host:
        return Host(name, "127.0.0.1", "admin", self.port, self.key_file, options)

    @property
    def known_hosts_line(self) -> str:
        return f"[127.0.0.1]:{self.port} {self.host_key.get_name()} {self.host_key.get_base64()}\n"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    key = paramiko.ECDSAKey.generate()
    host_key = paramiko.ECDSAKey.generate()
    key_file = tmp_path_factory.mktemp("ssh") / "id"
    key.write_private_key_file(str(key_file))
    listener = socket.create_server(("127.0.0.1", 0))
    found = Server(listener.getsockname()[1], host_key, key_file, [])

    def serve() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            if found.turn_away:
                found.turn_away -= 1
                connection.close()
                continue
            transport = Transport(connection)
            transport.answered = threading.Event()  # of the newest request
            transport.add_server_key(host_key)
            if found.certified:
                transport.add_server_key(found.certified)
                transport._preferred_keys = (found.certified.get_name(), *transport._preferred_keys)
            transport.start_server(event=threading.Event(), server=Session(key))
            found.logins.append(transport)

    threading.Thread(target=serve, daemon=True).start()
    yield found
    listener.close()
    for transport in found.logins:
        transport.close()


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home directory with SSH settings that are empty, and no keys."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
    (tmp_path / ".ssh").mkdir()
    (tmp_path / ".ssh/config").touch()
    return tmp_path


def ssh(*hosts: Host) -> SshHosts:
    settings = Config(runtime_ssh_path=str(Path.home() / ".ssh/config"))  # ssh itself asks for no HOME
    return SshHosts({host.name: host for host in hosts}, settings)


def closed_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port: int = free.getsockname()[1]
        return port


def test_answer_has_output_and_exit_code(server: Server) -> None:
    hosts = ssh(server.host(**ACCEPT))
    answer = hosts.run({"here": 'echo out; echo "it\'s bad" >&2; exit 3'})["here"]
    assert (answer.stdout, answer.stderr, answer.code, answer.unreachable) == ("out\n", "it's bad\n", 3, None)
    hosts.close()


@pytest.fixture
def printing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The login's shell prints before it runs what it is asked, as from ~/.bashrc."""
    execute = Session._execute

    def print_first(self: Session, channel: paramiko.Channel, command: str, answered: threading.Event) -> None:
        execute(self, channel, f"printf 'caf\\351\\n'; printf 'no end of line '; echo; {command}", answered)

    monkeypatch.setattr(Session, "_execute", print_first)


def test_a_script_is_fed_and_what_it_reads_is_in_no_command(server: Server) -> None:
    hosts = SshHosts({"here": server.host(**ACCEPT), "there": server.host("there", **ACCEPT)})
    data = {"here": b"s3cr3t\n" * 200_000}
    script = "cat /proc/$$/cmdline | tr '\\0' ' ' | grep -c s3c[r]3t; sha256sum; echo late >&2; exit 3"
    answers = hosts.run({"here": script, "there": "echo nothing"}, data=data)
    hosts.close()
    digest = hashlib.sha256(data["here"]).hexdigest()
    assert answers["here"] == Answer(f"0\n{digest}  -\n", "late\n", 3)
    assert answers["there"].stdout == "nothing\n"


@pytest.mark.usefixtures("printing")
def test_what_the_logins_shell_prints_is_none_of_the_answer(server: Server) -> None:
    hosts = ssh(server.host(**ACCEPT))
    assert hosts.run({"here": "echo out; echo more"})["here"].stdout == "out\nmore\n"
    assert hosts.run({"here": "exit 3"})["here"] == Answer("", "", 3)
    lines: list[str] = []
    hosts.follow({"here": "printf 'caf\\351\\n'; echo two"}, lambda _, text: lines.append(text))
    assert lines == ["caf\ufffd", "two"]
    assert hosts.hold("here", "echo held; sleep 1").stdout == "held"
    hosts.let_go()
    hosts.close()


def test_what_a_login_is_asked_for_is_the_same_to_every_shell(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sh, tcsh and fish read a text between single quotes alike where it has none of what follows."""
    execute, asked = Session._execute, list[str]()

    def note(self: Session, channel: paramiko.Channel, command: str, answered: threading.Event) -> None:
        asked.append(command)
        execute(self, channel, command, answered)

    monkeypatch.setattr(Session, "_execute", note)
    hosts = ssh(server.host(**ACCEPT))
    script = r"""it="it's 100%"; printf '%s ' "$it" 'a\\b' $((1 + 1))! \
  x; printf '%s\n' /ab | sed 's/\(.\)$/<\1>/'"""
    assert hosts.run({"here": script})["here"].stdout == r"it's 100% a\\b 2! x /a<b>" + "\n"
    hosts.close()
    quoted = asked[0].split("'")[1::2]
    assert len(quoted) == 2
    assert not [each for each in ("\n", "!", "\\\\", "\\'") if each in asked[0]]


@pytest.mark.parametrize("said", ["This account is not available", ""])
def test_a_shell_that_runs_no_command_is_named(server: Server, monkeypatch: pytest.MonkeyPatch, said: str) -> None:
    execute = Session._execute

    def nologin(self: Session, channel: paramiko.Channel, _: str, answered: threading.Event) -> None:
        execute(self, channel, f"echo '{said}'; exit 1", answered)

    monkeypatch.setattr(Session, "_execute", nologin)
    hosts = ssh(server.host(**ACCEPT))
    for data in ({}, {"here": b"x"}):
        why = hosts.run({"here": "echo out"}, data=data)["here"].unreachable or ""
        assert f"its shell ran no command: it printed {repr(said) if said else 'nothing'} and ended with 1" in why
    hosts.close()


@pytest.fixture
def hanging(monkeypatch: pytest.MonkeyPatch) -> None:
    """The login's shell begins another one, as `exec fish` in ~/.bashrc does, which waits for input."""
    execute = Session._execute
    monkeypatch.setattr(
        Session, "_execute", lambda self, channel, _, answered: execute(self, channel, "exec cat", answered)
    )


@pytest.mark.usefixtures("hanging")
def test_a_shell_that_waits_for_input_is_no_host_that_is_slow(server: Server) -> None:
    hosts = SshHosts({name: server.host(name, **ACCEPT) for name in ("here", "there")})
    for answer in hosts.run({"here": "echo out", "there": "echo out"}, timeout=2).values():
        assert "no answer within 2 s: the login's shell began no command; expected a shell" in str(answer.unreachable)
        assert "`getent passwd admin`" in str(answer.unreachable)
    hosts.close()


@pytest.mark.usefixtures("hanging")
def test_site_yml_gives_a_shell_up_that_runs_no_command(server: Server, tmp_path: Path) -> None:
    found = look_by_ansible(server, tmp_path, limit=3)
    assert "host 'here': its login's shell ran no command within 3 s; expected a shell such as bash" in found


@pytest.mark.parametrize(
    ("does", "words"),
    [
        ("echo Your password has expired. >&2; exit 1", "it printed 'Your password has expired.'; expected a password"),
        ("{}; echo Bye", "its login prints 'Bye' also where nobody reads"),
    ],
)
def test_site_yml_names_a_login_that_does_not_what_it_is_asked(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, does: str, words: str
) -> None:
    execute = Session._execute

    def change(self: Session, channel: paramiko.Channel, command: str, answered: threading.Event) -> None:
        execute(self, channel, does.format(command), answered)

    monkeypatch.setattr(Session, "_execute", change)
    assert words in look_by_ansible(server, tmp_path)


def test_site_yml_looks_as_the_login_also_where_the_inventory_has_all_done_as_root(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    execute = Session._execute

    def refuse(self: Session, channel: paramiko.Channel, command: str, answered: threading.Event) -> None:
        does = "echo sudo: a password is required >&2; exit 1" if "sudo" in command else f"{command}; echo Bye"
        execute(self, channel, does, answered)

    monkeypatch.setattr(Session, "_execute", refuse)
    assert "its login prints 'Bye'" in look_by_ansible(server, tmp_path, ansible_become=True)


def look_by_ansible(server: Server, directory: Path, limit: int = 60, **variables: bool) -> str:
    """Return what the role host_check says first of the server, by real Ansible and OpenSSH."""
    tasks = yaml.safe_load((KIT / "roles/host_check/tasks/main.yml").read_text())[:2]
    # OpenSSH gives up first where a host connects slowly, or vanishes: it asks once more than ServerAliveCountMax.
    slow = (KIT / "inventory/vms/group_vars/all.yml").read_text()
    names = ("ConnectTimeout", "ServerAliveInterval", "ServerAliveCountMax")
    connect, interval, count = (int(re.findall(rf"{each}=(\d+)", slow)[0]) for each in names)
    assert tasks[0].pop("timeout") > connect + interval * (count + 1)
    asked = [{**tasks[0], "timeout": limit}, tasks[1]]
    (directory / "play.yml").write_text(yaml.safe_dump([{"hosts": "all", "gather_facts": False, "tasks": asked}]))
    (directory / "known").write_text(server.known_hosts_line)
    options = {
        "ansible_host": "127.0.0.1", "ansible_port": server.port, "ansible_user": "admin",
        "ansible_ssh_private_key_file": str(server.key_file),
        "ansible_ssh_common_args": f"-F none -o UserKnownHostsFile={directory}/known -o ControlMaster=no",
        **variables,
    }  # fmt: skip
    (directory / "hosts.yml").write_text(yaml.safe_dump({"all": {"hosts": {"here": options}}}))
    command = ["ansible-playbook", "--inventory", f"{directory}/hosts.yml", f"{directory}/play.yml"]
    done = subprocess.run(command, cwd=KIT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2, done.stdout
    return " ".join(done.stdout.partition(" hosts are right")[2].split())


@pytest.mark.parametrize(("said", "more_keys"), [("", True), ("System is booting up.", False)])
def test_an_sshd_that_hangs_up_on_a_login_is_named(
    server: Server, home: Path, monkeypatch: pytest.MonkeyPatch, said: str, more_keys: bool
) -> None:
    if more_keys:
        shutil.copy(server.key_file, home / ".ssh/id_ecdsa")

    def hang_up(*_: object) -> int:
        current = threading.current_thread()
        assert isinstance(current, paramiko.Transport)
        current.close()
        return paramiko.AUTH_FAILED

    monkeypatch.setattr(Session, "get_banner", lambda _: (said, "en"), raising=False)
    monkeypatch.setattr(Session, "check_auth_publickey", hang_up)
    hosts = SshHosts({name: server.host(name, **ACCEPT) for name in ("here", "there")})
    for answer in hosts.run({"here": "echo out", "there": "echo out"}).values():
        where = f"127.0.0.1:{server.port} hung up while user admin logged in"
        words = f"{where}, and had said '{said}'. sshd does so" if said else f"{where}. sshd does so"
        assert words in str(answer.unreachable)
        assert "IdentitiesOnly=yes" in str(answer.unreachable)
    hosts.close()


@pytest.mark.parametrize(
    ("asks", "answers", "words"),
    [
        ("check_channel_pty_request", False, "its sshd gives no terminal; expected PermitTTY yes"),
        ("check_channel_request", OPEN_FAILED_CONNECT_FAILED, "takes no further session on a connection; expected Max"),
    ],
)
def test_what_sshd_forbids_is_named_as_its_settings_are(
    server: Server, monkeypatch: pytest.MonkeyPatch, asks: str, answers: object, words: str
) -> None:
    monkeypatch.setattr(Session, asks, lambda *_: answers)
    hosts = ssh(server.host(**ACCEPT))
    assert words in (hosts.hold("here", "echo held").unreachable or "")
    assert words in (hosts.follow({"here": "echo a line"}, lambda *_: None)["here"].unreachable or "")
    hosts.close()


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (OPEN_FAILED_ADMINISTRATIVELY_PROHIBITED, "the sshd of here forwards nothing; expected AllowTcpForwarding yes"),
        (OPEN_FAILED_CONNECT_FAILED, "nothing takes a connection at 192.0.2.10:6006, seen from here"),
    ],
)
def test_a_tunnel_that_leads_nowhere_is_no_tunnel(
    server: Server, monkeypatch: pytest.MonkeyPatch, code: int, words: str
) -> None:
    monkeypatch.setattr(Session, "check_channel_direct_tcpip_request", lambda *_: code)
    hosts = ssh(server.host(**ACCEPT))
    with pytest.raises(ClusterTrouble, match=words), hosts.tunnel("here", closed_port(), "192.0.2.10", 6006):
        pass
    hosts.close()


@pytest.mark.parametrize(
    ("error", "is_lost", "expected", "words"),
    [
        (SSHException("Timeout opening channel."), False, ClusterTrouble, "nothing takes a connection at 192.0.2.10"),
        (SSHException("Unable to open channel."), True, HostsUnreachable, "here is unreachable: .*Unable to open"),
        (EOFError(), True, HostsUnreachable, "here is unreachable"),
    ],
)
def test_a_tunnel_that_is_lost_while_it_is_tried_is_named(
    server: Server,
    monkeypatch: pytest.MonkeyPatch,
    error: Exception,
    is_lost: bool,
    expected: type[Exception],
    words: str,
) -> None:
    open_channel = paramiko.Transport.open_channel

    def fail(self: paramiko.Transport, kind: str, *asked: Any, **more: Any) -> paramiko.Channel:
        if kind != "direct-tcpip":
            return open_channel(self, kind, *asked, **more)
        if is_lost:
            self.close()
        raise error

    monkeypatch.setattr(paramiko.Transport, "open_channel", fail)
    hosts = ssh(server.host(**ACCEPT))
    with pytest.raises(expected, match=words), hosts.tunnel("here", closed_port(), "192.0.2.10", 6006):
        pass
    hosts.close()


def test_connection_is_kept_for_the_next_script(server: Server) -> None:
    hosts = ssh(server.host(**ACCEPT))
    before = len(server.logins)
    for _ in range(3):
        assert hosts.run({"here": "true"})["here"].code == 0
    assert len(server.logins) == before + 1
    hosts.close()


def test_lost_connection_is_opened_again_at_the_next_script(server: Server) -> None:
    hosts = ssh(server.host(**ACCEPT))
    hosts.run({"here": "true"})
    server.logins[-1].close()
    until(lambda: not hosts._connections["here"].is_connected)
    assert hosts.run({"here": "echo back"})["here"].stdout == "back\n"
    hosts.close()


def test_unreachable_host_costs_no_other_answer(server: Server) -> None:
    gone = Host("gone", "127.0.0.1", "admin", closed_port(), server.key_file, ACCEPT)
    hosts = ssh(gone, server.host(**ACCEPT))
    answers = hosts.run({"gone": "true", "here": "echo here"})
    assert list(answers) == ["gone", "here"]
    assert answers["here"].stdout == "here\n"
    assert re.search("refused|Unable to connect", answers["gone"].unreachable or "")
    hosts.close()


def test_caller_that_sshd_turns_away_knocks_again(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fleet.hosts.ssh.time.sleep", lambda _: None)
    hosts = ssh(server.host(**ACCEPT))
    server.turn_away = 2
    assert hosts.run({"here": "true"})["here"].unreachable is None
    hosts.close()
    server.turn_away = 3
    assert "banner" in (ssh(server.host(**ACCEPT)).run({"here": "true"})["here"].unreachable or "")


def test_a_frozen_sshd_is_not_taken_for_one_that_hangs_up(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fleet.hosts.ssh.CONNECT_SECONDS", 1)
    with socket.create_server(("127.0.0.1", 0)) as frozen:
        host = replace(server.host(**ACCEPT), port=frozen.getsockname()[1])
        said = ssh(host).run({"here": "true"})["here"].unreachable or ""
    assert "takes a connection, and its sshd says nothing in 1 s: the machine may be frozen" in said


def test_silent_host_is_unreachable_after_the_timeout(server: Server) -> None:
    hosts = ssh(server.host(**ACCEPT))
    answer = hosts.run({"here": "sleep 5"}, timeout=0.5)["here"]
    assert answer.unreachable == "no answer within 0.5 s"
    hosts.close()


def test_channel_that_the_timer_closed_is_no_lost_connection(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("invoke.runners.Runner.timed_out", False)  # what it says while the timer's thread still ends
    hosts = ssh(server.host(**ACCEPT))
    assert hosts.run({"here": "sleep 5"}, timeout=0.5)["here"].unreachable == "no answer within 0.5 s"
    hosts.close()


def test_timer_that_finds_the_connection_lost_ends_in_silence(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    died: list[threading.ExceptHookArgs] = []
    monkeypatch.setattr(threading, "excepthook", died.append)
    close = paramiko.Channel.close

    def lost(channel: paramiko.Channel) -> None:
        close(channel)
        if isinstance(threading.current_thread(), threading.Timer):
            raise EOFError

    monkeypatch.setattr(paramiko.Channel, "close", lost)
    hosts = ssh(server.host(**ACCEPT))
    assert hosts.run({"here": "sleep 5"}, timeout=0.5)["here"].unreachable == "no answer within 0.5 s"
    hosts.close()
    assert died == []


def test_host_that_is_late_costs_neither_the_round_nor_those_behind_it(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fleet.hosts.ssh.MAX_AT_ONCE", 1)
    monkeypatch.setattr("fleet.hosts.ssh.OPEN_SECONDS", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as mute:  # takes the call and says nothing
        late = Host("late", "127.0.0.1", "admin", mute.getsockname()[1], server.key_file, ACCEPT)
        hosts = ssh(late, server.host(**ACCEPT))
        answers = hosts.run({"late": "true", "here": "true"}, timeout=0.1)
        hosts.close()
    assert {name: answer.unreachable for name, answer in answers.items()} == dict.fromkeys(
        ("late", "here"), "no answer within 0.6 s"
    )


def test_hosts_that_wait_for_a_thread_have_time_of_their_own(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fleet.hosts.ssh.MAX_AT_ONCE", 1)
    monkeypatch.setattr("fleet.hosts.ssh.OPEN_SECONDS", 0.3)
    hosts = ssh(*(server.host(name, **ACCEPT) for name in ("a", "b", "c")))
    answers = hosts.run(dict.fromkeys("abc", "sleep 2"), timeout=4.0)
    assert [answer.unreachable for answer in answers.values()] == [None, None, None]
    hosts.close()


def test_unknown_host_key_is_refused_and_known_one_taken(server: Server, home: Path) -> None:
    hosts = ssh(server.host())
    assert "is not in known_hosts" in (hosts.run({"here": "true"})["here"].unreachable or "")
    (home / ".ssh" / "known_hosts").write_text(server.known_hosts_line)
    hosts = ssh(server.host())
    assert hosts.run({"here": "true"})["here"].unreachable is None
    hosts.close()


def test_changed_host_key_is_refused_unless_checking_is_off(server: Server, home: Path) -> None:
    other = paramiko.ECDSAKey.generate()
    (home / ".ssh" / "known_hosts").write_text(f"[127.0.0.1]:{server.port} {other.get_name()} {other.get_base64()}\n")
    hosts = ssh(server.host("strict"), server.host("new", stricthostkeychecking="accept-new"), server.host(**ACCEPT))
    answers = hosts.run(dict.fromkeys(("strict", "new", "here"), "true"))
    assert "ssh-keygen -R" in (answers["strict"].unreachable or "")
    assert "ssh-keygen -R" in (answers["new"].unreachable or "")
    assert answers["here"].unreachable is None
    hosts.close()


def test_known_hosts_file_of_the_inventory_is_used(server: Server, tmp_path: Path) -> None:
    (tmp_path / "known").write_text(server.known_hosts_line)
    hosts = ssh(server.host(userknownhostsfile=str(tmp_path / "known")))
    assert hosts.run({"here": "true"})["here"].unreachable is None
    hosts.close()


def test_refused_key_names_user_and_key(server: Server, tmp_path: Path) -> None:
    paramiko.ECDSAKey.generate().write_private_key_file(str(tmp_path / "wrong"))
    wrong = Host("here", "127.0.0.1", "admin", server.port, tmp_path / "wrong", ACCEPT)
    hosts = ssh(wrong)
    reason = hosts.run({"here": "true"})["here"].unreachable or ""
    assert "admin" in reason
    assert str(tmp_path / "wrong") in reason
    hosts.close()


@pytest.mark.parametrize(
    ("jump", "words"),
    [
        ("admin@127.0.0.1:{closed}", "its jump host 127.0.0.1:{closed}: Connection refused"),
        ("nobody@127.0.0.1:{open}", "its jump host 127.0.0.1:{open} lets user nobody in with none of your keys"),
        ("admin@127.0.0.1:{open}", "192.0.2.11:22: the jump host 127.0.0.1 opens no way to it (Connect failed)"),
    ],
)
def test_a_jump_host_by_which_nothing_is_reached_is_named(
    server: Server, home: Path, monkeypatch: pytest.MonkeyPatch, jump: str, words: str
) -> None:
    forbidden = lambda *_: OPEN_FAILED_CONNECT_FAILED  # noqa: E731
    monkeypatch.setattr(Session, "check_channel_direct_tcpip_request", forbidden)
    ports = {"closed": closed_port(), "open": server.port}
    (home / ".ssh/config").write_text(
        f"Host 192.0.2.*\n  ProxyJump {jump.format(**ports)}\n"
        f"Host *\n  IdentityFile {server.key_file}\n  StrictHostKeyChecking no\n"
    )
    hosts = ssh(Host("far", "192.0.2.11", "admin", None, server.key_file))
    assert words.format(**ports) in (hosts.run({"far": "true"})["far"].unreachable or "")
    hosts.close()


@pytest.mark.parametrize(
    "text",
    [
        "Include {more}",
        "Match originalhost here.example exec true\n  {lines}",
        "Host here.example\n  ProxyJump none\n  {lines}\nHost *\n  ProxyJump nowhere.example\n  ConnectTimeout none",
    ],
)
def test_settings_of_ssh_count_as_ssh_reads_them(server: Server, home: Path, text: str) -> None:
    lines = (
        "HostName 127.0.0.1", f"Port {server.port}", "User admin", "IdentityFile ~/.ssh/missing",
        f"IdentityFile {server.key_file}", "ForwardAgent /tmp/agent", "ConnectTimeout 1m", "StrictHostKeyChecking no",
    )  # fmt: skip
    (home / "more").write_text("\n".join(["Host here.example", *lines]))
    (home / ".ssh/config").write_text(text.format(more=home / "more", lines="\n  ".join(lines)))
    hosts = ssh(Host("here", "here.example"))
    assert hosts.run({"here": "echo yes"})["here"] == Answer("yes\n")
    hosts.close()


def test_a_refused_login_names_the_user_and_the_port_of_sshs_settings(server: Server, home: Path) -> None:
    (home / ".ssh/config").write_text(
        f"Host here.example\n  HostName 127.0.0.1\n  Port {server.port}\n  User nobody\n"
        f"  IdentityFile {server.key_file}\n  StrictHostKeyChecking no\n"
    )
    hosts = ssh(Host("here", "here.example"))
    why = hosts.run({"here": "true"})["here"].unreachable or ""
    assert f"here.example:{server.port} lets user nobody in with none of your keys" in why
    hosts.close()


def test_a_known_hosts_file_of_sshs_settings_is_used(server: Server, home: Path) -> None:
    (home / "known").write_text(server.known_hosts_line)
    (home / ".ssh/config").write_text(f"GlobalKnownHostsFile {home}/known\n")
    hosts = ssh(server.host())
    assert hosts.run({"here": "true"})["here"].unreachable is None
    hosts.close()


def test_a_host_is_known_by_its_alias_alone(server: Server, home: Path) -> None:
    known, other = home / "known", paramiko.ECDSAKey.generate()
    (home / ".ssh/config").write_text(f"HostKeyAlias one\nUserKnownHostsFile {known}\n")
    wrong = f"[127.0.0.1]:{server.port} {other.get_name()} {other.get_base64()}\n"
    answers = []
    for name in ("two", "one"):
        known.write_text(wrong + server.known_hosts_line.replace(server.known_hosts_line.split()[0], name))
        hosts = ssh(server.host())
        answers.append(hosts.run({"here": "echo yes"})["here"])
        hosts.close()
    assert "is not in known_hosts" in (answers[0].unreachable or "")
    assert answers[1] == Answer("yes\n")


@pytest.mark.parametrize("signer", ["ca", "other"])
def test_a_host_whose_key_is_certified_is_known(server: Server, home: Path, signer: str) -> None:
    for name in ("ca", "other"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(home / name)], check=True)
    (home / "host.pub").write_text(f"{server.host_key.get_name()} {server.host_key.get_base64()}")
    certify = ["ssh-keygen", "-q", "-s", str(home / signer), "-I", "h", "-h", "-n", "127.0.0.1", str(home / "host.pub")]
    subprocess.run(certify, check=True)
    server.host_key.write_private_key_file(str(home / "host"))
    server.certified = Certified.from_private_key_file(str(home / "host"))
    server.certified.blob = base64.b64decode((home / "host-cert.pub").read_text().split()[1])
    (home / "known").write_text(f"@cert-authority [127.0.0.1]:{server.port} {(home / 'ca.pub').read_text()}")
    hosts = ssh(server.host(userknownhostsfile=str(home / "known")))
    answer = hosts.run({"here": "echo yes"})["here"]
    hosts.close()
    server.certified = None
    if signer == "ca":
        assert answer == Answer("yes\n")
    else:
        assert "is not in known_hosts" in (answer.unreachable or "")


def test_a_key_that_a_jump_host_is_known_by_vouches_for_no_other() -> None:
    jump = "debug1: Server host key: ssh-ed25519 SHA256:jump\ndebug1: Host 'jump' is known and matches the key.\n"
    far = "debug1: Server host key: ssh-ed25519 SHA256:far\nHost key verification failed.\n"
    assert [_vouches(jump + far, f"SHA256:{name}") for name in ("jump", "far")] == [True, False]


@pytest.fixture
def agent(server: Server, home: Path) -> Iterator[Path]:
    """Where an agent is asked that has the key."""
    path = home / "agent"
    process = subprocess.Popen(["ssh-agent", "-D", "-a", str(path)], stdout=subprocess.DEVNULL)
    until(path.is_socket)
    subprocess.run(["ssh-add", "-q", str(server.key_file)], env=os.environ | {"SSH_AUTH_SOCK": str(path)}, check=True)
    yield path
    process.terminate()
    process.wait()


def test_the_agent_of_sshs_settings_is_asked_for_the_hosts_that_they_name_it_for(
    server: Server, home: Path, agent: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SSH_AUTH_SOCK", "/nonexistent")
    (home / ".ssh/config").write_text(
        f"Host 127.0.0.1\n  IdentityAgent {agent}\nHost 127.0.0.2\n  HostName 127.0.0.1\n"
        "Host 127.0.0.3\n  HostName 127.0.0.1\n  IdentityAgent /nonexistent\n"
    )
    hosts = ssh(*(Host(f"h{each}", f"127.0.0.{each}", "admin", server.port, None, ACCEPT) for each in (1, 2, 3)))
    answers = [hosts.run({name: "true"})[name].unreachable or "" for name in ("h1", "h2", "h3", "h1")]
    assert (answers[0], answers[3]) == ("", "")
    assert all("no key was found in ~/.ssh, and no agent has one" in answer for answer in answers[1:3]), answers
    hosts.close()


def test_the_agent_of_sshs_settings_is_asked_for_each_jump_host(server: Server, home: Path, agent: Path) -> None:
    (home / ".ssh/config").write_text(
        f"Host jump.example\n  HostName 127.0.0.1\n  Port {server.port}\n  User admin\n  IdentityAgent {agent}\n"
        "Host here.example\n  ProxyJump jump.example\nHost *\n  StrictHostKeyChecking no\n"
    )
    hosts = ssh(Host("here", "here.example", "admin", None, server.key_file))
    why = hosts.run({"here": "true"})["here"].unreachable or ""
    assert "the jump host 127.0.0.1 opens no way to it" in why
    hosts.close()


def test_a_machine_without_ssh_is_named(server: Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    hosts = ssh(server.host(**ACCEPT))
    why = hosts.run({"here": "true"})["here"].unreachable or ""
    assert "this machine has no `ssh`. Install it: apt-get install openssh-client" in why
    hosts.close()


def test_settings_that_ssh_refuses_are_named(server: Server, home: Path) -> None:
    (home / ".ssh/config").write_text("Host *\n  Usr admin\n")
    hosts = ssh(server.host(**ACCEPT))
    why = hosts.run({"here": "true"})["here"].unreachable or ""
    assert f"ssh refuses its settings: {home}/.ssh/config: line 2: Bad configuration option: usr" in why
    hosts.close()


def test_few_log_in_at_a_jump_host_at_a_time(server: Server, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its sshd turns callers away by chance where ten do."""
    monkeypatch.setattr("fleet.hosts.ssh.MAX_JUMPS_AT_ONCE", 2)
    (home / ".ssh/config").write_text(
        f"Host 192.0.2.*\n  ProxyJump admin@127.0.0.1:{server.port}\n"
        f"Host *\n  IdentityFile {server.key_file}\n  StrictHostKeyChecking no\n"
    )
    check, counting, at_once = Session.check_auth_publickey, threading.Lock(), [0, 0]

    def count(self: Session, username: str, key: paramiko.PKey) -> int:
        with counting:
            at_once[0] += 1
            at_once[1] = max(at_once)
        time.sleep(0.2)
        with counting:
            at_once[0] -= 1
        return check(self, username, key)

    monkeypatch.setattr(Session, "check_auth_publickey", count)
    hosts = ssh(*(Host(f"far-{each}", f"192.0.2.{each}", "admin", None, server.key_file) for each in range(8)))
    answers = hosts.run(dict.fromkeys(hosts._hosts, "true"))
    assert all("opens no way to it" in (each.unreachable or "") for each in answers.values()), answers
    assert at_once[1] <= 2
    hosts.close()


def test_a_jump_host_that_is_silent_is_waited_for_once(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fleet.hosts.ssh.MAX_JUMPS_AT_ONCE", 1)
    monkeypatch.setattr("fleet.hosts.ssh.CONNECT_SECONDS", 0)  # so any failure is one of a silent host
    calls = []
    with socket.create_server(("127.0.0.1", 0)) as listener:
        (home / ".ssh/config").write_text(f"Host 192.0.2.*\n  ProxyJump admin@127.0.0.1:{listener.getsockname()[1]}\n")
        hosts = ssh(*(Host(f"far-{each}", f"192.0.2.{each}") for each in range(6)))

        def hang_up() -> None:
            with contextlib.suppress(OSError):
                while True:
                    calls.append(listener.accept()[0])
                    until(lambda: all(lock.locked() for lock in hosts._opening.values()) or len(calls) > 1)
                    calls[-1].close()

        threading.Thread(target=hang_up, daemon=True).start()
        answers = hosts.run(dict.fromkeys(hosts._hosts, "true"))
        assert all("its jump host 127.0.0.1" in (each.unreachable or "") for each in answers.values()), answers
        assert len(calls) == 3  # as often as one is called that hangs up
        hosts.close()


def test_a_login_without_any_key_says_how_to_get_one(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
    hosts = ssh(Host("here", "127.0.0.1", None, server.port, None, ACCEPT))
    error = SSHException("No authentication methods available")
    assert "`ssh-keygen`, then `ssh-copy-id`" in hosts._reason(hosts._hosts["here"], error)
    refused = hosts._reason(hosts._hosts["here"], AuthenticationException("Authentication failed."))
    assert f"lets user {getpass.getuser()} in with none of your keys" in refused
    hosts.close()


def test_followed_lines_come_one_by_one(server: Server) -> None:
    hosts = ssh(server.host(**ACCEPT))
    lines: list[tuple[str, str]] = []
    answers = hosts.follow({"here": "echo one; echo two"}, lambda host, line: lines.append((host, line)))
    assert lines == [("here", "one"), ("here", "two")]
    assert answers["here"].code == 0
    hosts.close()


def test_what_is_held_is_let_go_also_where_the_connection_is_lost(server: Server) -> None:
    hosts = ssh(server.host(**ACCEPT))
    assert hosts.hold("here", "echo held; read -r line") == Answer("held")
    (channel,) = hosts._held
    hosts.let_go()
    assert channel.closed
    hosts.hold("here", "echo held; read -r line")
    hosts._connections["here"].transport.packetizer.close()  # found out by the next sender
    hosts.let_go()
    assert hosts._held == []
    hosts.close()


def test_what_is_held_again_takes_the_place_of_what_ended(server: Server) -> None:
    hosts = ssh(server.host(**ACCEPT))
    hosts.hold("here", "echo held")
    hosts._held[0].recv_exit_status()
    hosts.hold("here", "echo held; read -r line")
    assert hosts.is_holding()
    hosts.let_go()
    hosts.close()


@pytest.mark.parametrize("loss", ["the script ends", "the connection is lost"])
def test_what_is_held_no_longer_is_noticed(server: Server, loss: str) -> None:
    hosts = ssh(server.host(**ACCEPT))
    assert not hosts.is_holding()
    script = hosts.hold("here", "echo $$; exec sleep 600").stdout
    assert hosts.is_holding()
    if loss == "the script ends":
        os.kill(int(script), signal.SIGTERM)
    else:
        hosts._connections["here"].client.close()
    until(lambda: not hosts.is_holding())
    with contextlib.suppress(ProcessLookupError):  # this server ends no script whose connection is lost
        os.kill(int(script), signal.SIGTERM)
    hosts.close()


def test_a_silent_host_is_given_up(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fleet.hosts.ssh.KEEPALIVE_SECONDS", 0.2)
    hosts = SshHosts({"here": server.host(**ACCEPT)})
    try:
        assert hosts.run({"here": "echo yes"})["here"].stdout == "yes\n"
        transport = hosts._connections["here"].transport
        assert transport.sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 600
        session = server.logins[-1].server_object
        until(lambda: "keepalive@lag.net" in session.asked)
    finally:
        hosts.close()


def test_ansible_gives_a_silent_host_up_as_well() -> None:
    settings = configparser.ConfigParser()
    settings.read(KIT / "ansible.cfg")
    arguments = settings["ssh_connection"]["ssh_args"]
    assert f"-o ServerAliveInterval={fleet.hosts.ssh.KEEPALIVE_SECONDS} " in f"{arguments} "
    assert f"-o ServerAliveCountMax={fleet.hosts.ssh.KEEPALIVES_LOST} " in f"{arguments} "


def test_a_tunnels_port_that_is_taken_is_the_operators_mistake() -> None:
    with socket.create_server(("localhost", 0)) as taken:
        port = taken.getsockname()[1]
        with (
            pytest.raises(OperatorMistake, match=f"--port {port}: this machine can't listen there"),
            SshHosts({}).tunnel("head", port, "192.0.2.10", 6006),
        ):
            pass
