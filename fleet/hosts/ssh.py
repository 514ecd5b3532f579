"""Run a shell script on many hosts at once; every host gives an answer, reached or not."""

from __future__ import annotations

import contextlib
import getpass
import logging
import math
import random
import shlex
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import paramiko
from fabric import Config, Connection
from fabric.runners import Remote
from invoke.exceptions import CommandTimedOut, ThreadException
from paramiko.common import OPEN_FAILED_ADMINISTRATIVELY_PROHIBITED, OPEN_FAILED_CONNECT_FAILED
from paramiko.ssh_exception import (
    AuthenticationException,
    BadHostKeyException,
    ChannelException,
    NoValidConnectionsError,
    SSHException,
)

from fleet.errors import ClusterTrouble, HostsUnreachable, OperatorMistake
from fleet.hosts.keys import UnknownHostKey, ask_named_agent, check_host_key, leave_out_missing_keys
from fleet.hosts.ssh_settings import ssh_settings
from fleet.site.host_check import BEGIN, in_a_line, shell_fix
from fleet.site.routes import Host

CONNECT_SECONDS = 10
LOGIN_SECONDS = 20  # for sshd's first line, and again for the key
# The longest that opening a host takes: knocking twice in vain (see `_open`), then TCP, first line, key, channel.
OPEN_SECONDS = 2 * 3 + CONNECT_SECONDS + 2 * LOGIN_SECONDS + CONNECT_SECONDS
ANSWER_SECONDS = 30
# As ansible.cfg has it for OpenSSH: a host that vanishes in the middle of an answer is given up within a minute.
KEEPALIVE_SECONDS = 15
KEEPALIVES_LOST = 3
MAX_AT_ONCE = 64
MAX_JUMPS_AT_ONCE = 8  # sshd begins to turn callers away where ten log in at a time (MaxStartups)

# Prepended to every script: `root CMD` runs a command as root, for any login.
PREAMBLE = """
export LC_ALL=C TZ=UTC
root() { if [ "$(id -u)" = 0 ]; then "$@"; else sudo -n "$@"; fi; }
"""

# Paramiko logs a traceback for each host that doesn't answer; the answer says it in one line.
logging.getLogger("paramiko").addHandler(logging.NullHandler())


@dataclass(frozen=True)
class Answer:
    """What one host said to a script. `unreachable` tells why it said nothing."""

    stdout: str = ""
    stderr: str = ""
    code: int = 0
    unreachable: str | None = None


class Hosts(Protocol):
    """The way to the hosts: SSH, or a test's pretence of it."""

    def run(
        self, scripts: Mapping[str, str], timeout: float = ANSWER_SECONDS, data: Mapping[str, bytes] | None = None
    ) -> dict[str, Answer]:
        """Run each host's script, all at once. Raises for no host; answers come in the order asked.

        `data` is what a host's script reads from standard input, where no other user of the host can see it.
        """

    def follow(self, scripts: Mapping[str, str], line: Callable[[str, str], None]) -> dict[str, Answer]:
        """Run each host's script and hand over each line (host, line) as it comes, until all have ended."""

    def hold(self, host: str, script: str) -> Answer:
        """Begin a script that stays until `let_go`, or until the connection is gone; return its first line."""

    def is_holding(self) -> bool:
        """Whether all scripts that were begun so are still there; False where none is held."""

    def let_go(self) -> None:
        """End the scripts that are held."""

    def tunnel(
        self, host: str, port: int, address: str, remote_port: int
    ) -> AbstractContextManager[Callable[[], bool]]:
        """Lead a port of this machine to one that the host reaches; gives whether the tunnel is still there."""

    def close(self) -> None:
        """Hang up."""


class _Remote(Remote):
    """A script on a host, which Invoke's timer may end at the moment when the connection is lost."""

    def kill(self) -> None:
        with contextlib.suppress(OSError, EOFError, SSHException):
            super().kill()


class SshHosts:
    """Fabric connections, opened at the first use of a host and kept until `close`."""

    def __init__(self, hosts: Mapping[str, Host], config: Config | None = None) -> None:
        self._config = config or Config()
        self._config.runners.remote = _Remote
        self._hosts = hosts
        self._connections: dict[str, Connection] = {}
        self._held: list[paramiko.Channel] = []
        self._opening = {name: threading.Lock() for name in hosts}
        self._making = threading.Lock()  # Invoke empties its settings for a moment where one of them is set
        self._jumps = threading.Semaphore(MAX_JUMPS_AT_ONCE)
        self._silent_jumps: dict[str, tuple[float, Exception]] = {}  # when one was given up, and why
        self._threads = min(MAX_AT_ONCE, max(1, len(hosts)))
        self._pool = ThreadPoolExecutor(max_workers=self._threads, thread_name_prefix="ssh")

    def run(
        self, scripts: Mapping[str, str], timeout: float = ANSWER_SECONDS, data: Mapping[str, bytes] | None = None
    ) -> dict[str, Answer]:
        fed = data or {}
        asked = {
            (
                self._pool.submit(self._feed, self._hosts[host], script, timeout, fed[host])
                if host in fed
                else self._pool.submit(self._ask, self._hosts[host], script, timeout)
            ): host
            for host, script in scripts.items()
        }
        rounds = math.ceil(len(asked) / self._threads)
        # Each host has limits of its own; this one is for what hangs outside them. A jump host is opened first.
        deadline = rounds * (2 * OPEN_SECONDS + timeout)
        done, late = wait(asked, timeout=deadline)
        answers = {asked[future]: future.result() for future in done}
        for future in late:
            host = asked[future]
            answers[host] = Answer(unreachable=f"no answer within {deadline:g} s")
            future.cancel()
            # Closing wakes the thread that waits for this host, so that it doesn't keep the process alive.
            connection = self._connections.get(host)
            if connection:
                connection.client.close()
        return {host: answers[host] for host in scripts}

    def follow(self, scripts: Mapping[str, str], line: Callable[[str, str], None]) -> dict[str, Answer]:
        answers: dict[str, Answer] = {}
        lock = threading.Lock()

        def follow_one(host: str) -> None:
            def hand_over(text: str) -> None:
                with lock:
                    line(host, text)

            answers[host] = self._stream(self._hosts[host], scripts[host], hand_over)

        # One thread each, not the pool: these last as long as the operator looks on.
        threads = [threading.Thread(target=follow_one, args=(host,), daemon=True) for host in scripts]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return {host: answers[host] for host in scripts}

    def hold(self, host: str, script: str) -> Answer:
        try:
            channel = _open_terminal(self._connect(self._hosts[host]))  # hanging up ends the script, as in `_stream`
            channel.settimeout(ANSWER_SECONDS)
            channel.exec_command(_command(script))
            line = next(_answer_lines(channel.makefile("rb")), "")
        except TimeoutError:
            return Answer(unreachable=f"no answer within {ANSWER_SECONDS} s")
        except (OSError, EOFError, SSHException) as error:
            return Answer(unreachable=self._reason(self._hosts[host], error))
        self._held = [each for each in self._held if not _is_over(each)] + [channel]
        return Answer(line)

    def is_holding(self) -> bool:
        return bool(self._held) and not any(map(_is_over, self._held))

    def let_go(self) -> None:
        while self._held:
            with contextlib.suppress(OSError, EOFError, SSHException):  # lost, and so let go already
                self._held.pop().close()

    @contextlib.contextmanager
    def tunnel(self, host: str, port: int, address: str, remote_port: int) -> Iterator[Callable[[], bool]]:
        try:
            with socket.create_server(("localhost", port)):
                pass
        except OSError as error:
            raise OperatorMistake(
                f"--port {port}: this machine can't listen there: {error.strerror}; expected a free port, as in "
                f"--port {port + 1 if port < 65535 else port - 1}"
            ) from error
        try:
            connection = self._connect(self._hosts[host])
            _try_forwarding(connection, host, address, remote_port)
        except (OSError, EOFError, SSHException) as error:
            raise HostsUnreachable({host: self._reason(self._hosts[host], error)}) from error
        with connection.forward_local(port, remote_port, address):
            yield lambda: bool(connection.is_connected)

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)
        for connection in list(self._connections.values()):
            connection.close()

    def _ask(self, host: Host, script: str, timeout: float) -> Answer:
        try:
            connection = self._connect(host)
            begun = time.monotonic()
            result = connection.run(
                _command(script),
                hide=True,
                warn=True,
                in_stream=False,
                encoding="utf-8",
                timeout=timeout,
            )
        except CommandTimedOut as error:
            return Answer(unreachable=f"no answer within {timeout:g} s{_unbegun(host, error.result.stdout)}")
        except (OSError, EOFError, SSHException, ThreadException) as error:
            return Answer(unreachable=self._reason(host, error))
        # Invoke's timer closes the channel, and may not have ended yet when Invoke asks it whether the time is over.
        if result.exited == -1 and time.monotonic() - begun >= timeout:
            return Answer(unreachable=f"no answer within {timeout:g} s")
        if result.exited == -1:
            return Answer(unreachable="the connection was lost")
        return _answer(host, result.stdout, result.stderr, result.exited)

    def _feed(self, host: Host, script: str, timeout: float, data: bytes) -> Answer:
        """Run a script that reads from standard input: Invoke would hand it over byte by byte."""
        try:
            channel = self._connect(host).create_session()
            channel.settimeout(timeout)
            channel.exec_command(_command(script))
            channel.sendall(data)
            channel.shutdown_write()
            stdout = channel.makefile("rb").read().decode(errors="replace")
            stderr = channel.makefile_stderr("rb").read().decode(errors="replace")
            code = channel.recv_exit_status()
        except TimeoutError:
            return Answer(unreachable=f"no answer within {timeout:g} s")
        except (OSError, EOFError, SSHException) as error:
            return Answer(unreachable=self._reason(host, error))
        return _answer(host, stdout, stderr, code) if code >= 0 else Answer(unreachable="the connection was lost")

    def _stream(self, host: Host, script: str, line: Callable[[str], None]) -> Answer:
        try:
            # With a terminal, hanging up ends what runs there; without one, a silent command would stay for ever.
            channel = _open_terminal(self._connect(host))
            channel.exec_command(_command(script))
            for text in _answer_lines(channel.makefile("rb")):
                line(text)
            code = channel.recv_exit_status()
            return Answer(code=code) if code >= 0 else Answer(unreachable="the connection was lost")
        except (OSError, EOFError, SSHException) as error:
            return Answer(unreachable=self._reason(host, error))

    def _connect(self, host: Host) -> Connection:
        begun = time.monotonic()
        with self._opening[host.name]:  # two scripts may need one host at a time
            connection = self._connections.get(host.name)
            if connection is None:
                settings = ssh_settings(host, self._config._runtime_ssh_path)
                with self._making:
                    self._config._set(base_ssh_config=settings)  # Fabric reads it once, where it makes a connection
                    connection = self._connections[host.name] = self._connection(host)
            if not connection.is_connected:
                if isinstance(connection.gateway, Connection):  # all hosts may have the same one
                    self._open_jump(connection.gateway, begun)
                _open(connection)
                keep_alive(connection)
            return connection

    def _open_jump(self, gateway: Connection, begun: float) -> None:
        """Open a jump host in turn with others; one that was silent since this one `begun` is not waited for twice."""
        with self._jumps:
            place = f"{gateway.host}:{gateway.port}"
            given_up, why = self._silent_jumps.get(place, (0.0, None))
            if why and given_up > begun:
                raise why
            tried = time.monotonic()
            try:
                _open(gateway)
            except (OSError, SSHException) as error:
                if time.monotonic() - tried >= CONNECT_SECONDS:
                    self._silent_jumps[place] = time.monotonic(), error
                raise

    def _connection(self, host: Host) -> Connection:
        connect_kwargs = {
            "banner_timeout": LOGIN_SECONDS,
            "auth_timeout": LOGIN_SECONDS,
            "channel_timeout": CONNECT_SECONDS,
            **self._config.connect_kwargs,
        }
        timeout = connect_kwargs.pop("timeout", CONNECT_SECONDS)
        if host.key_file:
            try:
                # Given a path, paramiko tries it as each kind of key and tells of the last kind, not of the refusal.
                connect_kwargs["pkey"] = paramiko.PKey.from_path(host.key_file)
            except (SSHException, TypeError, ValueError):
                connect_kwargs["key_filename"] = [str(host.key_file)]  # one with a passphrase: an agent may have it
        connection = Connection(
            host.address,
            user=host.user,
            port=host.port,
            config=self._config,
            connect_timeout=timeout,
            connect_kwargs=connect_kwargs,
        )
        # As OpenSSH does: what Ansible's variables say is said on the command line and wins over ~/.ssh/config; a jump
        # host gets none of it.
        check_host_key(connection, host.ssh_options, self._config._runtime_ssh_path)
        leave_out_missing_keys(connection)
        gateway = connection.gateway
        while isinstance(gateway, Connection):
            gateway.connect_timeout = gateway.connect_timeout or CONNECT_SECONDS
            check_host_key(gateway, {}, self._config._runtime_ssh_path)
            leave_out_missing_keys(gateway)
            gateway = gateway.gateway
        return connection

    def _reason(self, host: Host, error: Exception) -> str:
        link = self._connections.get(host.name)
        where = f"{host.address}:{host.port or (link.port if link else 22)}"
        user = link.user if link else host.user or getpass.getuser()
        key = f"the key {host.key_file}" if host.key_file else "your keys"
        if link and link is not (link := _first_unconnected(link)):
            where, user, key = f"its jump host {link.host}:{link.port}", link.user, "your keys"
        if isinstance(error, BadHostKeyException):
            return (
                f"{error.hostname} shows another host key than the one in known_hosts. If the machine was made again, "
                f"remove the old key: ssh-keygen -R {shlex.quote(error.hostname)}"
            )
        if isinstance(error, UnknownHostKey):
            return (
                f"the host key of {error} is not in known_hosts. Connect once and compare it: "  # a jump host's, maybe
                f"ssh {f'{host.user}@' if host.user else ''}{host.address}{f' -p {host.port}' if host.port else ''}"
            )
        if str(error) == "No existing session" or "saw EOF" in str(error):  # the first: there was another key to try
            return f"{where} {_end_of_login(link, user)}"
        if isinstance(error, AuthenticationException):
            return f"{where} lets user {user} in with none of {key} ({error})"
        if str(error).endswith(" key"):  # paramiko tries a file as each kind of key, and tells of the last kind
            return f"{where} lets user {user} in with none of {key}"
        if "No authentication methods available" in str(error):
            return (
                f"{where}: no key was found in ~/.ssh, and no agent has one: `ssh-keygen`, then `ssh-copy-id`; or name "
                "one with ansible_ssh_private_key_file"
            )
        if isinstance(error, TimeoutError):
            return f"no answer from {where} in {CONNECT_SECONDS} s"
        if isinstance(error, NoValidConnectionsError):
            return f"{where}: " + "; ".join(sorted({each.strerror or str(each) for each in error.errors.values()}))
        if isinstance(error, ThreadException):
            return f"{where}: the connection was lost"
        if isinstance(error, ChannelException) and link and link.gateway and not link.is_connected:
            return f"{where}: the jump host {link.gateway.host} opens no way to it ({error.text})"
        if isinstance(error, ChannelException) and error.code == OPEN_FAILED_CONNECT_FAILED:
            return f"{where}: its sshd takes no further session on a connection; expected MaxSessions 10, its default"
        return f"{where}: {error or type(error).__name__}"


def _end_of_login(link: Connection | None, user: str) -> str:
    """Say how a login ended in its middle, with what sshd said before, and what else may be the reason."""
    transport = link.client.get_transport() if link else None
    if transport and not transport.initial_kex_done:  # of this, paramiko says the same
        return f"takes a connection, and its sshd says nothing in {CONNECT_SECONDS} s: the machine may be frozen"
    banner = transport.auth_handler.banner if transport and transport.auth_handler else None
    said = in_a_line((banner or b"").decode(errors="replace"))
    return (
        f"hung up while user {user} logged in"
        + (f", and had said {said!r}" if said else "")
        + (
            ". sshd does so while logins are off, and after six keys (MaxAuthTries). An agent may have more: name the "
            "right key with ansible_ssh_private_key_file, and set ansible_ssh_common_args to -o IdentitiesOnly=yes"
        )
    )


def _first_unconnected(link: Connection) -> Connection:
    """Return what on the way to a host was not reached: jump hosts are connected before those behind them."""
    while isinstance(link.gateway, Connection) and not link.gateway.is_connected:
        link = link.gateway
    return link


def _try_forwarding(connection: Connection, host: str, address: str, port: int) -> None:
    try:
        connection.transport.open_channel("direct-tcpip", (address, port), ("127.0.0.1", 0)).close()
    except SSHException as error:
        if not connection.is_connected:
            raise
        what = f"nothing takes a connection at {address}:{port}, seen from {host}. What runs there: fab hosts"
        if isinstance(error, ChannelException) and error.code == OPEN_FAILED_ADMINISTRATIVELY_PROHIBITED:
            what = f"the sshd of {host} forwards nothing; expected AllowTcpForwarding yes, in sshd_config there"
        raise ClusterTrouble(what) from error


def _open_terminal(connection: Connection) -> paramiko.Channel:
    channel = connection.create_session()
    try:
        channel.get_pty(width=10_000)
    except SSHException as error:
        if not connection.is_connected:
            raise
        raise SSHException("its sshd gives no terminal; expected PermitTTY yes, in sshd_config there") from error
    return channel


def _command(script: str) -> str:
    """Return what a login's shell is asked for.

    Its quotes may mean something else than sh's: tcsh takes neither a new line nor a `!` between them, and fish takes
    two backslashes there for one.
    """
    text = f"echo {BEGIN}{PREAMBLE}{script}"
    plain = "".join(f"\\0{ord(each):03o}" if each in "\\\n!'" else each for each in text)
    return f"""sh -c 'eval "$(printf %b "$1")"' sh '{plain}'"""


def _answer(host: Host, printed: str, errors: str, code: int) -> Answer:
    """Return a script's answer, without what its login's shell printed before; or that this shell did not run it."""
    before, begin, answer = printed.partition(f"{BEGIN}\n")
    if begin:
        return Answer(answer, errors, code)
    text = in_a_line(f"{before} {errors}")
    said = repr(text) if text else "nothing"
    return Answer(
        unreachable=f"{host.address}:{host.port or 22} let the login in, and its shell ran no command: it printed "
        f"{said} and ended with {code}; {shell_fix(text, host.user or '')}"
    )


def _unbegun(host: Host, printed: str) -> str:
    """Say that a login's shell did not come as far as its script; nothing where it did."""
    return "" if BEGIN in printed else f": the login's shell began no command; {shell_fix(printed, host.user or '')}"


def _is_over(channel: paramiko.Channel) -> bool:
    """Whether a script has ended, or its connection is lost."""
    return channel.closed or channel.exit_status_ready()


def _answer_lines(lines: Iterable[bytes]) -> Iterator[str]:
    """Yield the lines that a script prints, as they come, without those of its login's shell."""
    begun = False
    for text in lines:
        line = text.decode(errors="replace").rstrip("\r\n")
        if begun:
            yield line
        begun = begun or line == BEGIN


def _open(connection: Connection) -> None:
    """Connect; where sshd hangs up at once, because too many knock (MaxStartups), knock again a little later."""
    if connection.is_connected:
        return
    if isinstance(connection.gateway, Connection):
        _open(connection.gateway)
    ask_named_agent(connection)
    for attempts_left in (2, 1, 0):
        begun = time.monotonic()
        try:
            connection.open()
            return
        except SSHException as error:
            turned_away = "banner" in str(error) and time.monotonic() - begun < 2
            if not turned_away or not attempts_left:
                raise
        time.sleep(random.uniform(0.2, 1.0))


def keep_alive(connection: Connection) -> None:
    """Have a connection, and those of its jump hosts, end when the other side has not answered for 45 s.

    Paramiko sends keepalives and counts no answers; the kernel knows which bytes were never acknowledged. A host behind
    a jump host has no socket here: each script has its own limit there.
    """
    link: object = connection
    while isinstance(link, Connection):
        link.transport.set_keepalive(KEEPALIVE_SECONDS)
        if isinstance(link.transport.sock, socket.socket):
            link.transport.sock.setsockopt(
                socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * KEEPALIVE_SECONDS * KEEPALIVES_LOST)
            )
        link = link.gateway
