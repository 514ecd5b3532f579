#!/usr/bin/python
"""Note what a machine had before psfleet came, so that reset.yml can leave it so.

Writes once, and never where psfleet was before.
"""

from __future__ import annotations

import json
import os
import pwd
from pathlib import Path
from typing import Any

from ansible.module_utils.basic import AnsibleModule

# Where psfleet was before, one of these is left, or the tasks' user with its home. The home alone is what reset.yml
# leaves with the runs.
SIGNS = ("/opt/trainer", "/etc/trainer")
USER, HOME = "trainer", "/var/lib/trainer"
SYSCTLS = ("net.ipv4.tcp_retries2",)
# Which psfleet may make for a file of its own.
DIRECTORIES = (
    *(
        "/etc/systemd/journald.conf.d",
        "/etc/needrestart/conf.d",
        "/etc/exports.d",
        "/etc/nfs.conf.d",
        "/etc/prometheus",
    ),
    *("/etc/chrony/conf.d", "/var/lib/prometheus", "/var/lib/nfs", "/root/.ansible"),
)


def state_of(packages: list[str], directories: list[str]) -> dict[str, Any]:
    """Return what is to be noted."""
    return {
        "packages": sorted(packages),
        "users": sorted(each.pw_name for each in pwd.getpwall()),
        "sysctls": {name: Path("/proc/sys", *name.split(".")).read_text().strip() for name in SYSCTLS},
        "directories": [str(Path(path)) for path in (*DIRECTORIES, *directories) if path and Path(path).is_dir()],
    }


def was_here() -> bool:
    """Whether psfleet has made this machine what it is now."""
    has_user = USER in [each.pw_name for each in pwd.getpwall()]
    return any(Path(sign).exists() for sign in SIGNS) or (has_user and Path(HOME).exists())


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            # The packages that are installed.
            "packages": {"type": "list", "elements": "str", "required": True},
            # Which of these are there is noted too.
            "directories": {"type": "list", "elements": "path", "default": []},
            # Where it is noted.
            "file": {"type": "path", "default": "/var/lib/psfleet/before.json"},
        },
        supports_check_mode=True,
    )
    file = Path(module.params["file"])
    new = not file.exists() and not was_here()
    if new and not module.check_mode:
        file.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        state = state_of(module.params["packages"], module.params["directories"])
        partial = file.with_name(f".{file.name}.new")
        partial.write_text(json.dumps(state, indent=1) + "\n")
        partial.chmod(0o644)
        os.replace(partial, file)  # noqa: PTH105
    module.exit_json(changed=new)


if __name__ == "__main__":
    main()
