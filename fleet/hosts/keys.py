"""The keys of a host and of its jump hosts, as OpenSSH would have them: Fabric by itself verifies none."""

from __future__ import annotations

import contextlib
import re
import socket
import subprocess
from collections.abc import Mapping
from pathlib import Path

import paramiko
from fabric import Connection
from paramiko.agent import AgentSSH
from paramiko.hostkeys import HostKeyEntry, InvalidHostKey
from paramiko.ssh_exception import SSHException

SECONDS = 30
# What asks nobody, writes nothing and logs in nowhere.
_LOOK = (
    *("BatchMode=yes", "StrictHostKeyChecking=yes", "PreferredAuthentications=none", "UpdateHostKeys=no"),
    *("ControlPath=none", "ForwardAgent=no", "ConnectTimeout=10"),
)


class UnknownHostKey(SSHException):
    """Nothing that ssh knows vouches for the host's key, and nobody is there to be asked."""


class _AskSsh(paramiko.MissingHostKeyPolicy):
    """Take what ssh takes by more than Paramiko knows, as by @cert-authority, HostKeyAlias or KnownHostsCommand."""

    def __init__(self, connection: Connection, options: Mapping[str, str], file: str | None) -> None:
        chosen = [f"-o{each}" for each in (*_LOOK, *(f"{name}={value}" for name, value in options.items()))]
        way = [*(["-F", file] if file else ()), "-l", connection.user, "-p", str(connection.port)]
        self._words = ["-v", *chosen, *way, "--", connection.original_host, "true"]

    def missing_host_key(self, client: paramiko.SSHClient, hostname: str, key: paramiko.PKey) -> None:
        kind = key.get_name().replace("ssh-rsa", "rsa-sha2-512")  # that of this key, where a host has several
        command = ["ssh", f"-oHostKeyAlgorithms={kind}-cert-v01@openssh.com,{kind}", *self._words]
        try:
            done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=SECONDS)
        except (OSError, subprocess.TimeoutExpired):
            raise UnknownHostKey(hostname) from None
        if not _vouches(done.stderr.decode(errors="replace"), key.fingerprint):
            raise UnknownHostKey(hostname)


def _vouches(said: str, fingerprint: str) -> bool:
    """Whether ssh has met this key and knows it: what it says of one key comes before what it says of the next."""
    keys = re.split(r"^debug1: Server host (?:key|certificate): \S+ ", said, flags=re.MULTILINE)[1:]
    return any(
        each.split()[0].rstrip(",") == fingerprint
        and re.search(r"^debug1: Host '.*' is known and matches", each, re.MULTILINE)
        for each in keys
    )


class _Accept(paramiko.MissingHostKeyPolicy):
    def missing_host_key(self, client: paramiko.SSHClient, hostname: str, key: paramiko.PKey) -> None:
        pass


def check_host_key(connection: Connection, given: Mapping[str, str], file: str | None) -> None:
    """Verify the host's key as OpenSSH would with these options and nobody to ask; Fabric by itself verifies none.

    `given` are the options of its command line; `file` is in place of ssh's own settings.
    """
    options = {**connection.ssh_config, **given}
    strict = options.get("stricthostkeychecking", "ask")
    if strict in ("no", "off", "false"):  # the last as `ssh -G` has it
        connection.client.set_missing_host_key_policy(_Accept())
        return
    files = options.get("userknownhostsfile", "~/.ssh/known_hosts ~/.ssh/known_hosts2").split()
    files += options.get("globalknownhostsfile", "/etc/ssh/ssh_known_hosts").split()
    found = [path for path in (Path(name).expanduser() for name in files) if path.is_file()]
    lines = [line for path in found for line in path.read_text(errors="replace").splitlines()]
    # What is known of its address may be of another host, or a key that was stolen: only ssh knows what counts.
    only_ssh = "hostkeyalias" in options or any(line.startswith("@revoked") for line in lines)
    takes_new = strict == "accept-new" and not only_ssh
    connection.client.set_missing_host_key_policy(_Accept() if takes_new else _AskSsh(connection, given, file))
    for line in [] if only_ssh else lines:
        with contextlib.suppress(InvalidHostKey, SSHException):  # ssh passes over it; @cert-authority is no key
            if entry := HostKeyEntry.from_line(line):
                connection.client.get_host_keys()._entries.append(entry)


def leave_out_missing_keys(connection: Connection) -> None:
    """Pass over keys that ~/.ssh/config names and this machine has not, as ssh does; Paramiko would end there."""
    if keys := connection.connect_kwargs.get("key_filename"):
        connection.connect_kwargs["key_filename"] = [key for key in keys if Path(key).is_file()]


class _Agent(paramiko.Agent):
    """The agent at a path; without keys where it does not answer, as for ssh."""

    def __init__(self, path: str) -> None:
        AgentSSH.__init__(self)
        with contextlib.suppress(OSError, SSHException):
            connection = socket.socket(socket.AF_UNIX)
            connection.connect(path)
            self._connect(connection)


def ask_named_agent(connection: Connection) -> None:
    """Have a connection ask the agent that ssh's settings name for it: Paramiko knows only that of SSH_AUTH_SOCK."""
    if (path := connection.ssh_config.get("identityagent", "")).startswith("/"):
        connection.client._agent = _Agent(path)
