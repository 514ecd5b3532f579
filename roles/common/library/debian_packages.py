#!/usr/bin/python
"""Install packages of Debian by one call of apt-get, on a machine that has no python3-apt yet too.

Ansible's own module would first install python3-apt by itself and then the rest: two transactions, and apt's cache read
again in between. The index is fetched where the last time is longer ago than `cache_valid_time`. A source that can't be
fetched, as one that has expired, matters only where a package is not to be had without it. Waits while another process
holds a lock of apt's. Recommended packages are left out. In check mode apt-get simulates, by the index that the
machine has; without one all would be installed.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from ansible.module_utils.basic import AnsibleModule

# Whichever is there and newer; the first is of a hook that minimal machines lack.
STAMPS = ("var/lib/apt/periodic/update-success-stamp", "var/lib/apt/lists")
LOCKED = "Could not get lock"
INTERRUPTED = "dpkg was interrupted"
HELD = "Held packages were changed"
FREE = "`apt-mark showhold` lists them, and `apt-mark unhold NAME` frees one"
NOTHING = "0 upgraded, 0 newly installed, 0 to remove"
KEEP = ("--force-confdef", "--force-confold")  # a file of the site's own stays as it is
REPAIR = ("dpkg", "--configure", "-a", *KEEP)
OPTIONS = (
    *(f"Dpkg::Options::={each}" for each in KEEP),
    # A name that no package has is an error: apt-get would take one with a dot for a regular expression.
    "APT::Cmd::Pattern-Only=true",
)
# A proxy or mirror that takes calls and never answers holds the other hosts up too: by default for over 9 minutes, with
# three sources. One that looks through what it hands on may be silent for a while, and has it the next time.
SILENT_SECONDS = 20
PATIENCE = (
    f"Acquire::http::Timeout={SILENT_SECONDS}",
    f"Acquire::https::Timeout={SILENT_SECONDS}",
    "Acquire::Retries=1",
)
ENVIRONMENT = {"DEBIAN_FRONTEND": "noninteractive", "DEBIAN_PRIORITY": "critical", "LC_ALL": "C"}
# Translations of descriptions are a third of an index, and nobody reads them here; the next `apt update` fetches them.
NO_TRANSLATIONS = "Acquire::Languages=none"
PAUSE_SECONDS = 1.0


def index_age(root: Path, now: float) -> float:
    """Return for how many seconds the index is known; a machine that never fetched one has an empty directory."""
    lists = root / STAMPS[1]
    if not lists.is_dir() or not any(path.is_file() and path.name != "lock" for path in lists.iterdir()):
        return float("inf")
    return now - max((root / stamp).stat().st_mtime for stamp in STAMPS if (root / stamp).exists())


def as_flags(options: Sequence[str]) -> list[str]:
    """Return apt's options as words of its command line."""
    return [word for option in options for word in ("--option", option)]


def call(module: AnsibleModule, words: Sequence[str], end: float) -> tuple[int, str, str]:
    """Run apt-get until it has the locks that it needs; returns exit code, output and errors.

    An installation that was broken off, as by a power cut, is finished first.
    """
    repaired = False
    while True:
        code, output, error = module.run_command(["apt-get", *words], environ_update=ENVIRONMENT)
        if INTERRUPTED in error and not repaired:
            repaired = True
            module.run_command([*REPAIR], environ_update=ENVIRONMENT)
            continue
        if not code or LOCKED not in error or time.monotonic() > end:
            return code, output, error
        time.sleep(PAUSE_SECONDS)


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "name": {"type": "list", "elements": "str", "required": True},
            # For how many seconds an index counts as new.
            "cache_valid_time": {"type": "int", "required": True},
            # For how many seconds to wait for a lock.
            "lock_timeout": {"type": "int", "required": True},
            "root": {"type": "path", "default": "/"},
        },
        supports_check_mode=True,
    )
    given = module.params
    end = time.monotonic() + given["lock_timeout"]
    age = index_age(Path(given["root"]), time.time())
    if module.check_mode and age == float("inf"):
        module.exit_json(changed=True)
    if not module.check_mode and age > given["cache_valid_time"]:
        code, _, error = call(module, ["update", "--quiet", *as_flags([*PATIENCE, NO_TRANSLATIONS])], end)
        if code:
            module.warn(f"`apt-get update` failed: {error.strip()}")
    # A name that an installed package provides is no reason to upgrade that one.
    how = ["--no-install-recommends", "--no-upgrade", "--simulate" if module.check_mode else "--yes"]
    code, output, error = call(module, ["install", "--quiet", *how, *as_flags(OPTIONS), *given["name"]], end)
    if code:
        fix = f"{FREE}\n" if HELD in error else ""
        module.fail_json(msg="`apt-get install` failed", rc=code, stdout=output, stderr=f"{error.rstrip()}\n{fix}")
    module.exit_json(changed=NOTHING not in output, stdout=output)


if __name__ == "__main__":
    main()
