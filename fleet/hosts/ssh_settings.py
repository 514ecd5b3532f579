"""What OpenSSH makes of its own settings for a host: Fabric reads them too, but knows no Include and half of Match."""

from __future__ import annotations

import io
import re
import shlex
import subprocess
import threading
from functools import cache

from fabric.connection import derive_shorthand
from paramiko import SSHConfig
from paramiko.ssh_exception import SSHException

from fleet.site.routes import Host

SECONDS = 10  # a Match may run a command
_asking = threading.Lock()  # else each of the hosts that are opened at once would ask
_KNOWN = (
    *("connecttimeout", "forwardagent", "globalknownhostsfile", "hostkeyalias", "hostname", "identityagent"),
    *("identityfile", "port", "proxycommand", "proxyjump", "stricthostkeychecking", "user", "userknownhostsfile"),
)


def ssh_settings(host: Host, file: str | None) -> SSHConfig:
    """Return the settings of a host and of its jump hosts, as Fabric reads them; `file` is in place of ssh's own ones.

    Raises SSHException where ssh refuses its settings.
    """
    config = SSHConfig()
    waiting: list[tuple[str, str | None, int | None]] = [(host.address, host.user, host.port)]
    seen = set()
    with _asking:
        defaults = _defaults()
    while waiting:
        address, user, port = waiting.pop()
        if address in seen:
            continue
        seen.add(address)
        own = [*(["-F", file] if file else ()), *(["-l", user] if user else ()), *(["-p", str(port)] if port else ())]
        lines = _differing(_ask(address, *own), defaults)
        config.parse(io.StringIO("\n".join([f"Host {address}", *(f"  {name} {value}" for name, value in lines)])))
        for hop in ",".join(value for name, value in lines if name == "proxyjump").split(","):
            named = derive_shorthand(hop)
            waiting += [(named["host"], named["user"], named["port"])] if named["host"] else []
    return config


def _differing(found: list[tuple[str, str]], defaults: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """Return what is no default of ssh; of the keys all or none, since the order in which they are tried counts."""
    keys = [each for each in found if each[0] == "identityfile"]
    default = [each for each in defaults if each[0] == "identityfile"]
    own = [each for each in found if each[0] != "identityfile" and each not in defaults]
    return own + (keys if keys != default else [])


@cache
def _defaults() -> list[tuple[str, str]]:
    return _ask("psfleet.invalid", "-F", "none")


def _ask(address: str, *options: str) -> list[tuple[str, str]]:
    command = ["ssh", "-G", *options, "--", address]
    nothing, pipe = subprocess.DEVNULL, subprocess.PIPE
    try:
        done = subprocess.run(
            command, stdin=nothing, stdout=pipe, stderr=pipe, text=True, errors="replace", timeout=SECONDS, check=False
        )
    except FileNotFoundError as error:
        raise SSHException("this machine has no `ssh`. Install it: apt-get install openssh-client") from error
    except subprocess.TimeoutExpired as error:
        raise SSHException(f"ssh did not read its settings within {SECONDS} s: see {shlex.join(command)}") from error
    if done.returncode:
        raise SSHException(f"ssh refuses its settings: {' '.join(done.stderr.split())[:300] or 'it gives no reason'}")
    # It writes a jump host's address in brackets, which Fabric takes for a part of its name.
    shown = re.sub(r"\[([^]:]+)\]", r"\1", done.stdout)
    pairs = [line.partition(" ")[::2] for line in shown.splitlines()]
    return [(name, value) for name, value in pairs if name in _KNOWN and _is_taken(name, value)]


def _is_taken(name: str, value: str) -> bool:
    """Whether Fabric can do with a value: it knows no `none`, and forwards no agent by its name."""
    return value != "none" and (name != "forwardagent" or value in ("yes", "no"))
