#!/usr/bin/python
"""Remove releases that are neither recent nor in use, and the environments that no release is left for.

Keeps the current release and the one before it, the newest ones, and every one in which a process still works.

Returns:
    removed: Directories that were removed.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

from ansible.module_utils.basic import AnsibleModule


def superfluous(root: Path, keep: int, in_use: set[Path]) -> list[Path]:
    """List the releases and environments that can go; `in_use` are directories of processes, and those to come."""
    releases = sorted((root / "releases").iterdir(), key=lambda path: path.stat().st_mtime, reverse=True)
    current, previous = root / "current", root / "previous"
    # Canaries may be newer than what a rollback goes back to. An earlier psfleet made no link to that.
    recent = releases[: keep if previous.is_symlink() else max(keep, 2)]
    needed = {*recent, current.resolve(), previous.resolve(), *in_use}
    kept = [path for path in releases if path in needed]
    environments = {(path / "env").resolve() for path in kept}
    # A hidden one is what an interrupted installation left.
    spare = [path for path in sorted((root / "envs").iterdir()) if path.resolve() not in environments]
    return [path for path in releases if path not in needed] + spare


def working_directories() -> Iterator[Path]:
    for link in Path("/proc").glob("[0-9]*/cwd"):
        try:
            yield link.readlink()
        except OSError:  # the process has ended
            continue


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            # Directory with `releases`, `envs` and the links `current` and `previous`.
            "root": {"type": "path", "required": True},
            # How many of the newest releases to keep.
            "keep": {"type": "int", "required": True},
            # A release that is to be switched to, which stays as well.
            "coming": {"type": "str", "default": ""},
        },
        supports_check_mode=True,
    )
    root = Path(module.params["root"]).resolve()
    in_use = {*working_directories(), root / "releases" / module.params["coming"]}
    removed = superfluous(root, module.params["keep"], in_use)
    if not module.check_mode:
        for path in removed:
            shutil.rmtree(path)
    module.exit_json(changed=bool(removed), removed=[str(path) for path in removed])


if __name__ == "__main__":
    main()
