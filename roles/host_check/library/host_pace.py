#!/usr/bin/python
"""Measure how fast a host's disk and memory are, and the shared path from there.

Writes 16 MiB to the disk, and as the tasks' user to the shared path, and removes them. Notes what it has measured in
`/run/psfleet-pace.json`, until the host boots, but not in check mode. Where disk or shared path have no pace, nothing
is noted, so that the next look measures again.

Returns:
    disk_pace: MiB/s to `/var/tmp`, until they are on disk; none where that was not done, or not in time.
    disk_why: Why `disk_pace` is none.
    memory_pace: GiB/s of copying memory.
    shared: With `pace`, the tasks' MiB/s to the shared path, or none with `why`. None without a path.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import time
from pathlib import Path
from typing import Any

from ansible.module_utils.basic import AnsibleModule

MIB = 2**20
AS_TRAINER = ("setpriv", "--reuid=trainer", "--regid=trainer", "--init-groups", "--")
DISK = "/var/tmp"
NOTE = Path("/run/psfleet-pace.json")
WRITE_SECONDS = 20
# Prints the MiB/s of writing to a directory. A file system that compresses gets nothing to compress.
PACE = """
import os, sys, tempfile, time
block, count = os.urandom(2**20), int(sys.argv[2])
with tempfile.NamedTemporaryFile(dir=sys.argv[1], prefix=".psfleet-pace-") as file:
    begun = time.monotonic()
    for _ in range(count):
        file.write(block)
    file.flush()
    os.fsync(file.fileno())
    print(count / (time.monotonic() - begun))
"""


def shared_pace(path: str, mebibytes: int) -> dict[str, Any]:
    """Return the MiB/s of the tasks' user on the shared path, or why it can't write there."""
    return paced(AS_TRAINER, path, mebibytes)


def paced(user: tuple[str, ...], path: str, mebibytes: int) -> dict[str, Any]:
    """Run PACE, as another user where `user` begins the command."""
    words = (*user, "/usr/bin/python3", "-c", PACE, path, str(mebibytes))
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=WRITE_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return {"pace": None, "why": f"no end within {WRITE_SECONDS} s"}
    except OSError as error:
        return {"pace": None, "why": f"{words[0]}: {error.strerror}"}
    with contextlib.suppress(ValueError):
        return {"pace": float(done.stdout), "why": ""}
    lines = done.stderr.strip().splitlines()
    return {"pace": None, "why": lines[-1] if lines else f"exit code {done.returncode}"}


def memory_pace(mebibytes: int = 64) -> float:
    """Return the GiB/s of copying memory, the best of three."""
    block = bytearray(mebibytes * MIB)
    best = 0.0
    for _ in range(3):
        begun = time.monotonic()
        bytes(block)
        best = max(best, mebibytes / 1024 / (time.monotonic() - begun))
    return best


def measure(path: str, mebibytes: int) -> dict[str, Any]:
    """Measure one after the other: what is measured at once disturbs itself."""
    memory, disk = memory_pace(), paced((), DISK, mebibytes)
    return {
        "memory_pace": memory,
        "disk_pace": disk["pace"],
        "disk_why": disk["why"],
        "shared": shared_pace(path, mebibytes) if path else None,
    }


def note_down(measured: dict[str, Any], file: Path) -> None:
    """Write what was measured where host_look finds it; where a part was not, leave no note, not even an older one."""
    if measured["disk_pace"] is None or (measured["shared"] and measured["shared"]["pace"] is None):
        file.unlink(missing_ok=True)
        return
    new = file.with_name(f"{file.name}.new")
    new.write_text(json.dumps(measured), encoding="utf-8")
    new.chmod(0o644)
    new.replace(file)


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            # The shared path; empty without one.
            "path": {"type": "str", "default": ""},
            # How much is written.
            "mebibytes": {"type": "int", "default": 16},
        },
        supports_check_mode=True,
    )
    measured = measure(module.params["path"], module.params["mebibytes"])
    if not module.check_mode:
        note_down(measured, NOTE)
    module.exit_json(changed=False, **measured)


if __name__ == "__main__":
    main()
