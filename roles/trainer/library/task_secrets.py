#!/usr/bin/python
"""Keep a host's secrets as files that root alone reads, and have its tasks' units load them as credentials.

Writes each secret to a file of mode 0600 in a directory of mode 0700. systemd hands them to a task's process
(`LoadCredential=`), which finds them in `$CREDENTIALS_DIRECTORY`. Takes away what is no secret any more. With `units`
it also writes a drop-in for each task that gets them.

Returns:
    written: Names of what was written.
    removed: Files that were taken away.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from ansible.module_utils.basic import AnsibleModule

DROP_IN = "psfleet-secrets.conf"


def write(path: Path, text: str, mode: int, check: bool) -> bool:
    """Have a file of root's with this text, which no other could read for a moment; return whether it had to be."""
    if path.is_file() and not path.is_symlink() and path.stat().st_mode & 0o777 == mode and _read(path) == text:
        return False
    if not check:
        partial = path.with_name(f".{path.name}.new")
        partial.unlink(missing_ok=True)
        with os.fdopen(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "w", encoding="utf-8") as stream:
            os.fchmod(stream.fileno(), mode)
            stream.write(text)
        partial.replace(path)
    return True


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace")


def drop_in(names: Sequence[str], directory: Path) -> str:
    """Write what has a task's unit load the secrets."""
    lines = [f"LoadCredential={name}:{directory}/{name}\n" for name in sorted(names)]
    return "".join(["# Ansible managed\n[Service]\n", *lines])


def keep(
    secrets: Mapping[str, str], directory: Path, units: Path | None, tasks: Sequence[str], check: bool
) -> tuple[list[str], list[str]]:
    """Make files and drop-ins right; return the names of what was written, and the paths of what was taken away."""
    written = []
    if secrets and (not directory.is_dir() or directory.stat().st_mode & 0o777 != 0o700):
        written.append(str(directory))
    if secrets and not check:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        directory.chmod(0o700)
    for name, text in sorted(secrets.items()):
        if write(directory / name, text, 0o600, check):
            written.append(name)
    removed = [path for path in sorted(directory.glob("*")) if path.name not in secrets]
    if units is not None:
        kept = {units / f"trainer@{task}.service.d" / DROP_IN for task in tasks if secrets}
        for path in sorted(kept):
            if not check:
                path.parent.mkdir(mode=0o755, exist_ok=True)
            if write(path, drop_in(list(secrets), directory), 0o644, check):
                written.append(path.parent.name)
        removed += [path for path in sorted(units.glob(f"trainer@*.service.d/{DROP_IN}")) if path not in kept]
    for path in [] if check else removed:
        path.unlink()
    return written, [str(path) for path in removed]


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "secrets": {"type": "dict", "required": True, "no_log": True},
            # The directory of their files.
            "directory": {"type": "path", "required": True},
            # systemd's directory of units. Left out, no unit is touched.
            "units": {"type": "path"},
            # Names of the host's tasks that run the program.
            "tasks": {"type": "list", "elements": "str", "default": []},
        },
        supports_check_mode=True,
    )
    secrets, units = module.params["secrets"], module.params["units"]
    written, removed = keep(
        secrets,
        Path(module.params["directory"]),
        Path(units) if units else None,
        module.params["tasks"] if secrets else [],
        module.check_mode,
    )
    module.exit_json(changed=bool(written or removed), written=written, removed=removed)


if __name__ == "__main__":
    main()
