"""An inventory that was read before, known again by the content of all that Ansible read for it.

To import Ansible takes longer than all else that `fab status` does on the control machine.
"""

from __future__ import annotations

import configparser
import hashlib
import importlib.util
import json
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fleet.files import replace_file
from fleet.places import CODE, site
from fleet.site.inventory import Inventory, describe
from fleet.site.reader import Source, find_source, plain_value
from fleet.site.reader import read_source as read_by_ansible
from fleet.site.routes import Defaults, read_defaults

KEPT = 8
_PLUGINS = (("defaults", "vars_plugins"), ("defaults", "vars_plugins_enabled"), ("inventory", "enable_plugins"))
MAX_BYTES = 2**24
# What comes of these is not in the files alone, or is secret.
_MORE = (b"{{", b"{%", b"{#", b"!vault", b"!unsafe", b"$ANSIBLE_VAULT", b"plugin")
_ENVIRONMENT = ("ANSIBLE_", "XDG_", "HOME", "USER", "LOGNAME")


def recall_inventory(given: str | None, environment: Mapping[str, str] = os.environ) -> Inventory:
    """Read an inventory as `load_inventory` without `check`; without Ansible, where it would read the same again."""
    source = _source(given, environment)
    name = source and name_of(source, environment)
    if not name:
        return describe(read_by_ansible(given, environment))
    if kept := _read(_place(environment) / name):
        return describe(kept)
    read = read_by_ansible(source, environment)
    inventory = describe(read)
    if name_of(str(source), environment) == name:  # no file was edited meanwhile
        _keep(_place(environment) / name, read)
    return inventory


def name_of(source: str, environment: Mapping[str, str]) -> str | None:
    """Return a hash of all that Ansible reads for an inventory; None where that does not say what comes of it."""
    ansible = importlib.util.find_spec("ansible")
    if ansible is None or ansible.origin is None:
        return None
    more = [f"{key}={environment[key]}" for key in sorted(environment) if key.startswith(_ENVIRONMENT)]
    digest = hashlib.sha256("\0".join([source, sys.version, ansible.origin, *more]).encode(errors="surrogateescape"))
    own = [
        Path(__file__),
        CODE / "fleet/site/inventory.py",
        CODE / "fleet/site/reader.py",
        Path(ansible.origin).with_name("release.py"),
        site() / "ansible.cfg",
    ]
    try:
        for path in [*own, *_files(source)]:
            if not path.is_file() or path.stat().st_size > MAX_BYTES:
                return None
            data = path.read_bytes()
            if path not in own and (path.suffix not in (".yml", ".yaml") or any(mark in data for mark in _MORE)):
                return None
            if path not in own and os.access(path, os.X_OK):
                return None
            digest.update(f"\0{path}\0{len(data)}\0".encode(errors="surrogateescape") + data)
    except OSError:
        return None
    return digest.hexdigest()


def _source(given: str | None, environment: Mapping[str, str]) -> str | None:
    """Return where the inventory is; None where only Ansible's settings say so."""
    default: list[str] = []
    configuration = environment.get("ANSIBLE_CONFIG", str(site() / "ansible.cfg"))
    if configuration != str(site() / "ansible.cfg"):
        return None
    if not given and not environment.get("PSFLEET_INVENTORY"):
        if "ANSIBLE_INVENTORY" in environment:
            return None
        parser = configparser.ConfigParser(inline_comment_prefixes=(";",))
        parser.read(configuration)
        if any(parser.has_option(*each) for each in _PLUGINS):
            return None
        default = [parser.get("defaults", "inventory", fallback="", raw=True)]
        if not default[0] or set(default[0]) & set(",{$~"):
            return None
        default = [str(site() / default[0])]  # Ansible looks beside ansible.cfg
    return find_source(given, environment, default)


def _files(source: str) -> Iterator[Path]:
    place = Path(source)
    base = place if place.is_dir() else place.parent
    roots = [place] if place.is_dir() else [base / "group_vars", base / "host_vars"]
    if not place.is_dir():
        yield place
    for root in (*roots, site() / "group_vars", site() / "host_vars"):
        for directory, below, names in os.walk(root, followlinks=True):
            below.sort()
            yield from (Path(directory, name) for name in sorted(names))


def _place(environment: Mapping[str, str]) -> Path:
    cache = environment.get("XDG_CACHE_HOME") or Path(environment.get("HOME", "/nonexistent")) / ".cache"
    return Path(cache) / "psfleet" / "inventories"


def _read(path: Path) -> Source | None:
    try:
        kept = json.loads(path.read_text(encoding="utf-8"))
        return Source(kept["source"], kept["groups"], kept["variables"], defaults=Defaults(**kept["defaults"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _keep(path: Path, read: Source) -> None:
    """Write what was read, for this user alone; where that can't be done, the next call reads it by Ansible."""
    groups = {str(group): list(hosts) for group, hosts in read.groups.items()}
    variables = {host: plain_value(getattr(each, "raw", each)) for host, each in read.variables.items()}
    record: dict[str, Any] = {"source": read.name, "groups": groups, "variables": variables}
    try:
        text = json.dumps(record | {"defaults": asdict(read_defaults())})
        if json.loads(text)["variables"] != variables:
            return
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        replace_file(path, text.encode(), 0o600)
        for old in sorted(path.parent.iterdir(), key=lambda each: each.stat().st_mtime)[:-KEPT]:
            old.unlink()
    except (OSError, TypeError, ValueError):
        return
