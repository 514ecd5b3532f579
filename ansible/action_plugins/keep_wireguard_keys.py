"""Keep the hosts' public keys with the inventory, and list all ends of the tunnel."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

from ansible.plugins.action import ActionBase

runpy.run_path(str(Path(__file__).parents[1] / "kit.py"))
from fleet.files import replace_file  # noqa: E402
from fleet.site import wireguard  # noqa: E402

SAID = "__wireguard_key"


class ActionModule(ActionBase):
    """Ansible's entry point. With `next`, what the hosts said are their next keys, and nothing is written yet."""

    _VALID_ARGS = frozenset({"next"})

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        """Merge what this run's hosts said into the file, with one write at the end."""
        super().run(tmp, task_vars)
        variables = task_vars or {}
        groups, hostvars = variables["groups"], variables["hostvars"]
        hosts = wireguard.wireguard_hosts(groups)
        answered = {}
        for host in hosts:
            key = (hostvars[host].get(SAID) or {}).get("stdout", "")
            if wireguard.is_key(key.strip()):
                answered[host] = key.strip()
        try:
            path = wireguard.keys_file(map(str, variables.get("ansible_inventory_sources") or ()))
            before = path.read_text(encoding="utf-8") if path.exists() else ""
            keys = wireguard.merge_keys(wireguard.read_keys(before), answered, hosts)
            after = wireguard.keys_text(keys)
            kept = after == before or bool(self._task.args.get("next"))
            if not kept and not self._task.check_mode:
                replace_file(path, after.encode())
        except wireguard.WireguardError as error:
            return {"failed": True, "msg": str(error)}
        except OSError as error:
            return {"failed": True, "msg": f"the hosts' public keys can't be kept with the inventory: {error}"}
        result: dict[str, Any] = {"changed": not kept, "path": str(path)}
        return result | {"peers": wireguard.wireguard_peers(groups, hostvars, keys)}
