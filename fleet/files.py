"""Files of the control machine: where a path leads, and files that are written whole or not at all."""

from __future__ import annotations

from pathlib import Path


def replace_file(path: Path, data: bytes, mode: int | None = None) -> None:
    """Write a file in one step, also where a link names it; it keeps its mode, or gets this one."""
    path = path.resolve()
    if mode is None and path.exists():
        mode = path.stat().st_mode & 0o7777
    partial = path.with_name(f".{path.name}.new")  # Ansible reads no hidden file
    partial.touch(mode or 0o666)
    if mode is not None:
        partial.chmod(mode)  # whatever the umask is
    partial.write_bytes(data)
    partial.replace(path)


def control_file(root: Path, text: str) -> Path:
    """Return where a path of the inventory leads; `~name` of a user that this machine lacks is a plain name."""
    try:
        return root / Path(text).expanduser()
    except RuntimeError:
        return root / text
