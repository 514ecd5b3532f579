#!/usr/bin/python
"""Write files and directories in one run, for the action write_files: on a host each run is a Python of its own.

All files are written beside their places and checked before the first one is moved there. So a full disk or a refused
file changes no file, and no handler misses a change.

Returns:
    paths: The files and directories that were changed.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

from ansible.module_utils.basic import AnsibleModule


class Writer:
    """Brings each path to what it should be; in check mode it only notes what would change."""

    def __init__(self, module: AnsibleModule) -> None:
        self._module = module
        self.paths: list[str] = []
        self.diff: list[dict[str, Any]] = []

    def make_directory(self, wanted: dict[str, Any]) -> None:
        """Have a directory, and those above it that are missing; a link to one counts as one."""
        path = Path(os.path.realpath(wanted["path"]))
        missing = [each for each in (*reversed(path.parents), path) if not each.exists()]
        for each in missing:
            self._note(str(each), {"path": str(each), "state": "absent"}, {"path": str(each), "state": "directory"})
            if not self._module.check_mode:
                each.mkdir()
                self._set_attributes({**wanted, "path": str(each)})
        if not missing:
            if not path.is_dir():
                raise FileExistsError(f"{path} is no directory")
            self._set_attributes({**wanted, "path": str(path)})

    def stage(self, wanted: dict[str, Any]) -> str | None:
        """Write a file beside its place, and check it; returns its name there, None for one that is right."""
        path, content = Path(wanted["path"]), wanted["content"].encode()
        if path.is_dir() and not path.is_symlink():
            raise IsADirectoryError(f"{path} is a directory; expected a file, or nothing")
        before = path.read_bytes() if path.is_file() and not path.is_symlink() else None
        if before == content:
            return None
        self._note(str(path), (before or b"").decode(errors="replace"), wanted["content"])
        if self._module.check_mode:
            return None
        descriptor, partial = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        self._module.add_cleanup_file(partial)
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
        if wanted["validate"]:
            code, out, error = self._module.run_command(wanted["validate"] % partial)
            if code:
                self._module.fail_json(msg=f"{path} is refused: {(error or out).strip()}", rc=code)
        return partial

    def move(self, partial: str | None, wanted: dict[str, Any]) -> None:
        """Have the file in its place, with its mode."""
        if partial:
            self._module.atomic_move(partial, wanted["path"])
        self._set_attributes(wanted)

    def _set_attributes(self, wanted: dict[str, Any]) -> None:
        path = wanted["path"]
        if not os.path.lexists(path):  # check mode
            return
        found = self._module.load_file_common_arguments(wanted, path=path)
        parts: dict[str, Any] = {}
        if self._module.set_fs_attributes_if_different(found, False, parts) and path not in self.paths:
            self._note(path, parts.get("before", {}), parts.get("after", {}))

    def _note(self, path: str, before: Any, after: Any) -> None:
        self.paths.append(path)
        self.diff.append({"before_header": path, "after_header": path, "before": before, "after": after})


def main() -> None:
    """Make the directories, then write the files."""
    file = {
        "path": {"type": "path", "required": True},
        "mode": {"type": "str", "required": True},
        # The whole text; a directory has none.
        "content": {"type": "str"},
        "owner": {"type": "str"},
        "group": {"type": "str"},
        # A command with %s for the file, which must end with 0.
        "validate": {"type": "str"},
    }
    module = AnsibleModule(
        argument_spec={"files": {"type": "list", "elements": "dict", "options": file, "required": True}},
        supports_check_mode=True,
    )
    writer = Writer(module)
    files = [each for each in module.params["files"] if each["content"] is not None]
    try:
        for each in module.params["files"]:
            if each["content"] is None:
                writer.make_directory(each)
        staged = [writer.stage(each) for each in files]
        for partial, each in zip(staged, files, strict=True):
            writer.move(partial, each)
    except OSError as error:
        module.fail_json(msg=str(error))
    diff = {"diff": writer.diff} if module._diff else {}
    module.exit_json(changed=bool(writer.paths), paths=writer.paths, **diff)


if __name__ == "__main__":
    main()
