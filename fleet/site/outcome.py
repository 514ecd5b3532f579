"""What a task that failed has to say, in words that a message can end with: they are never empty."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# systemd.exec(5), "Process Exit Codes": what kept a command that systemd-run was to start from being started.
SYSTEMD = {
    200: "its working directory can't be entered",
    203: "its program can't be run: it is missing, or the user may not read it or a directory above it",
    205: "its limits can't be set",
    216: "its group can't be taken",
    217: "its user is unknown",
    218: "its capabilities can't be dropped",
    226: "its view of the file system can't be made: a path that it is to see is missing, or the kernel allows none",
    228: "its filter of system calls can't be made",
    243: "its secrets can't be read",
}
# Ansible's own words for a command that failed.
NOTHING = "non-zero return code"


def outcome(result: Mapping[str, Any], most: int = 15) -> str:
    """Return the last lines that a task's command printed, else the task's own message, else how it ended.

    Args:
        result: what the task registered, or `ansible_failed_result`.
        most: how many lines at most.
    """
    for name in ("stderr", "stdout", "module_stderr", "module_stdout", "msg"):
        lines = [line for line in str(result.get(name) or "").splitlines() if line.strip()]
        if lines and lines != [NOTHING]:
            return "\n".join(lines[-most:])
    code = result.get("rc")
    if code is None:
        return "it ended and printed nothing"
    meaning = SYSTEMD.get(code) if isinstance(code, int) else None
    return f"it ended with exit code {code} and printed nothing" + (f"; {meaning}" if meaning else "")
