#!/usr/bin/python
"""Keep on a machine the name of the cluster that it belongs to.

Writes name, time and operator where nothing is noted yet. A note of the same name stays as it is. Fails on a machine of
another cluster, unless its cluster is taken over.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

from ansible.module_utils.basic import AnsibleModule


def read(file: Path) -> dict[str, Any]:
    """Return the note; empty where it is missing or damaged."""
    try:
        note = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return note if isinstance(note, dict) else {}


def write(file: Path, note: dict[str, Any]) -> None:
    """Write a note that all may read, whole or not at all."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.parent.chmod(0o755)  # whatever umask root has: fab reads it as the login
    partial = file.with_name(f".{file.name}.new")
    partial.write_text(json.dumps(note) + "\n", encoding="utf-8")
    partial.chmod(0o644)
    os.replace(partial, file)  # noqa: PTH105


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "name": {"type": "str", "required": True},
            # The clusters whose machines are taken over.
            "takes_over": {"type": "list", "elements": "str", "default": []},
            # By whom and from where, as user@machine.
            "who": {"type": "str", "required": True},
            "file": {"type": "path", "default": "/var/lib/psfleet/cluster.json"},
        },
        supports_check_mode=True,
    )
    name, file = module.params["name"], Path(module.params["file"])
    noted = read(file).get("name")
    if noted and noted not in (name, *module.params["takes_over"]):
        module.fail_json(
            msg=f"it belongs to the cluster {noted}; expected {name}. Run site.yml without --tags: it says whose "
            "cluster that is, and how to take the host over"
        )
    if noted != name and not module.check_mode:
        write(file, {"name": name, "since": round(time.time()), "who": module.params["who"]})
    module.exit_json(changed=noted != name)


if __name__ == "__main__":
    main()
