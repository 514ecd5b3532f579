"""The keys of a host and of its jump hosts, as OpenSSH would have them: Fabric by itself verifies none."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Mapping
from pathlib import Path

import paramiko
from fabric import Connection
from paramiko.agent import AgentSSH
from paramiko.ssh_exception import SSHException


class UnknownHostKey(SSHException):
    """The host's key is in no known_hosts file, and nobody is there to be asked."""


class _Refuse(paramiko.MissingHostKeyPolicy):
    def missing_host_key(self, client: paramiko.SSHClient, hostname: str, key: paramiko.PKey) -> None:
        raise UnknownHostKey(hostname)


class _Accept(paramiko.MissingHostKeyPolicy):
    def missing_host_key(self, client: paramiko.SSHClient, hostname: str, key: paramiko.PKey) -> None:
        pass


def check_host_key(connection: Connection, options: Mapping[str, str]) -> None:
    """Verify the host's key as OpenSSH would with these options and nobody to ask; Fabric by itself verifies none."""
    strict = options.get("stricthostkeychecking", "ask")
    if strict in ("no", "off", "false"):  # the last as `ssh -G` has it
        connection.client.set_missing_host_key_policy(_Accept())
        return
    connection.client.set_missing_host_key_policy(_Accept() if strict == "accept-new" else _Refuse())
    files = options.get("userknownhostsfile", "~/.ssh/known_hosts ~/.ssh/known_hosts2").split()
    files += options.get("globalknownhostsfile", "/etc/ssh/ssh_known_hosts").split()
    for path in [Path(name).expanduser() for name in files]:
        if path.is_file():
            connection.client.load_system_host_keys(str(path))


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
