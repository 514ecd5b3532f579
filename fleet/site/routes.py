"""How SSH reaches each host: Ansible's variables of a connection, for `fab`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fleet.errors import OperatorMistake
from fleet.places import site_file
from fleet.site.schema.formats import ROUTE_OPTIONS, ssh_options
from fleet.site.schema.problems import show


@dataclass(frozen=True)
class Host:
    """How SSH reaches one host. What is None is left to ~/.ssh/config and to SSH's own defaults."""

    name: str
    address: str
    user: str | None = None
    port: int | None = None
    key_file: Path | None = None
    ssh_options: Mapping[str, str] = field(default_factory=dict)  # names in lower case, as in ~/.ssh/config


@dataclass(frozen=True)
class Defaults:
    """What Ansible's settings say of each host that says nothing else."""

    check_host_keys: bool
    key_file: str | None
    user: str | None
    port: int | None


def read_defaults() -> Defaults:
    """Return what Ansible's settings say."""
    import ansible.constants as settings

    key, user, port = settings.DEFAULT_PRIVATE_KEY_FILE, settings.DEFAULT_REMOTE_USER, settings.DEFAULT_REMOTE_PORT
    return Defaults(bool(settings.HOST_KEY_CHECKING), key, user, port)


def ssh_host(name: str, variables: Mapping[str, Any], defaults: Defaults | None = None) -> Host:
    """Say how Ansible reaches a host with these variables; raises OperatorMistake where `fab` can't."""
    defaults = defaults or read_defaults()
    verify_host_keys = defaults.check_host_keys
    connection = variables.get("ansible_connection", "ssh")
    if connection != "ssh":
        raise OperatorMistake(
            f"host '{name}' has ansible_connection: {connection}; expected ssh, which is how fab reaches every host. "
            "Leave the line out and let the control machine reach it by SSH"
        )
    options = _ssh_options(name, variables)
    for switch in ("ansible_ssh_host_key_checking", "ansible_host_key_checking"):
        verify_host_keys = variables.get(switch, verify_host_keys) not in (False, "false", "False", "no", "0", 0)
    if not verify_host_keys:
        options.setdefault("stricthostkeychecking", "no")
    port = variables.get("ansible_port") or defaults.port
    if port and not re.fullmatch("[0-9]{1,5}", str(port)):
        raise OperatorMistake(
            f"host '{name}' has ansible_port: {port!r}; expected a number from 1 to 65535, such as 22"
        )
    key = (
        variables.get("ansible_ssh_private_key_file") or variables.get("ansible_private_key_file") or defaults.key_file
    )
    return Host(
        name=name,
        address=variables.get("ansible_host") or name,
        user=variables.get("ansible_user") or defaults.user,
        port=int(port) if port else None,
        key_file=_key_file(name, key) if key else None,
        ssh_options=options,
    )


def _key_file(host: str, value: str) -> Path:
    path = site_file(value)
    if not path.is_file():
        raise OperatorMistake(
            f"host '{host}' has ansible_ssh_private_key_file: {value}, or ansible.cfg has private_key_file, and "
            f"there is no file {path}. Name the key that opens the host, or another inventory (PSFLEET_INVENTORY, "
            "--inventory); the lab's key comes with it: make lab"
        )
    return path


def _ssh_options(host: str, variables: Mapping[str, Any]) -> dict[str, str]:
    """Read OpenSSH's `-o Name=value` from Ansible's variables."""
    options: dict[str, str] = {}
    for key in ("ansible_ssh_common_args", "ansible_ssh_extra_args"):
        given = variables.get(key) or ""
        try:
            chosen = ssh_options(given)
        except (AttributeError, ValueError) as error:
            raise OperatorMistake(
                f"host '{host}' has {key}: {show(given)}; expected options of ssh in one text ({error})"
            ) from error
        for name in chosen:
            if name in ROUTE_OPTIONS:
                _reject_route(host, key, f"{name} {chosen[name]}".strip())
        options = chosen | options
    return options


def _reject_route(host: str, key: str, option: str) -> None:
    raise OperatorMistake(
        f"host '{host}' has {option!r} in {key}; expected no option there that changes the way to the host. "
        "Put it into ~/.ssh/config (ProxyJump, HostName, IdentityFile, ...), which Ansible and fab both follow"
    )
