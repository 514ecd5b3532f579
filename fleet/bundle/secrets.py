"""The secrets that an inventory knows, to be looked for in all that leaves the site."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from fleet.bundle.redaction import NAMES_ONE, REMOVED, SENSITIVE, Redactor
from fleet.errors import FleetError
from fleet.places import site
from fleet.site.inventory import Inventory
from fleet.site.schema.definition import definition
from fleet.site.schema.inventory_files import directories

_VAULT = b"$ANSIBLE_VAULT"
_NAMED = re.compile(rf"(?i){SENSITIVE}")


def inventory_secrets(inventory: Inventory) -> set[str]:
    """Return the texts of vaults, of variables that the schema calls secret, and of those whose names say so."""
    found = {text for path in _vaulted_files(inventory) for text in _leaves(_open(path))}
    for host in inventory.variables:
        variables = inventory.variables[host]
        for name in variables:
            raw = getattr(variables, "raw", variables)[name]
            known = definition().variables.get(name)
            if (known is not None and known.secret) or (_NAMED.fullmatch(name) and not NAMES_ONE.fullmatch(name)):
                found |= set(_leaves(_rendered(variables, name)))
            found |= set(_encrypted(raw))
    found |= {str(address) for address in [inventory.run_settings.get("notify_webhook")] if address}
    return found | ({inventory.vault_password} if inventory.vault_password else set())


def describe_inventory(inventory: Inventory, redactor: Redactor) -> dict[str, Any]:
    """Return hosts, groups and variables. What psfleet does not know is shown by name only."""
    known = definition().variables
    hosts = {}
    for host in inventory.variables:
        variables = inventory.variables[host]
        shown = {}
        for name in sorted(variables):
            open_to_all = name in known and not known[name].secret
            shown[name] = redactor.record({name: _rendered(variables, name)})[name] if open_to_all else REMOVED
        hosts[host] = shown
    tasks = [
        {"task": task.name, "host": task.host, "address": task.address, "port": task.port} for task in inventory.tasks
    ]
    return {"source": inventory.source, "groups": dict(inventory.groups), "tasks": tasks, "variables": hosts}


def _rendered(variables: Mapping[str, Any], name: str) -> Any:
    try:
        return variables[name]
    except FleetError:  # only a playbook can render it
        return REMOVED


def _leaves(value: Any) -> Iterator[str]:
    """Yield the texts, and the numbers as texts, of a value."""
    return (str(each) for each in _scalars(value) if each is not None and not isinstance(each, bool))


def _encrypted(value: Any) -> Iterator[str]:
    """Yield the texts of values that are encrypted by themselves (`!vault`)."""
    return (str(each) for each in _scalars(value) if type(each).__name__ == "EncryptedString")


def _scalars(value: Any) -> Iterator[Any]:
    """Yield what lies in mappings and lists, however deep."""
    if isinstance(value, Mapping | list | tuple):
        for each in value.values() if isinstance(value, Mapping) else value:
            yield from _scalars(each)
    else:
        yield value


def _vaulted_files(inventory: Inventory) -> list[Path]:
    """Return the files of the inventory, and of variables, that are encrypted as a whole."""
    places = [*directories([inventory.source]), site()]
    trees = [place / kind for place in places for kind in ("group_vars", "host_vars")]
    found = [path for tree in trees for path in tree.rglob("*")]
    found += [path for place in places for path in place.glob("*")]
    return [path for path in found if path.is_file() and _is_vault(path)]


def _is_vault(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return file.read(len(_VAULT)) == _VAULT
    except OSError:  # Ansible can't read it either
        return False


def _open(path: Path) -> Any:
    """Return what a vault has, with the passwords that have opened the inventory; None where these don't open it.

    Ansible does not read it then, and no host has anything of it.
    """
    from ansible.errors import AnsibleError
    from ansible.parsing.dataloader import DataLoader
    from ansible.parsing.vault import VaultSecretsContext

    loader = DataLoader()
    context = VaultSecretsContext.current(optional=True)
    loader.set_vault_secrets(context.secrets if context else [])
    try:
        text = loader.get_text_file_contents(str(path))
    except AnsibleError:
        return None
    try:
        return loader.load(text)
    except AnsibleError:  # no YAML, as a key
        return text.splitlines()
