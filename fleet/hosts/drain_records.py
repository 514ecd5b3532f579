"""What a look finds of drains: the places, the scripts that print them, and how they are read."""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Mapping
from typing import Any

MARK = "/opt/trainer/drain.json"
LEAVERS = "/opt/trainer/drains"
LEAVING = "/run/psfleet-leaving"
SCRIPT = f"echo '@drain'; cat {MARK} 2>/dev/null; echo"


def script_of_shared(shared_dir: str) -> str:
    """Return a script that prints the drains on the shared path, a line each; for the trainer's user."""
    return f"echo '@drains'; sed 's/^@/ @/' {shlex.quote(shared_dir)}/drains/*.json 2>/dev/null"


def parse(text: str) -> dict[str, dict[str, Any]]:
    """Read drains, one JSON object a line, by host; a damaged line is left out."""
    found: dict[str, dict[str, Any]] = {}
    for line in text.splitlines():
        try:
            record = json.loads(line)
            found[str(record["host"])] = record
        except (ValueError, TypeError, KeyError):
            continue
    return found


def describe(record: Mapping[str, Any]) -> str:
    """Say since when a host is drained, by whom and why."""
    text = "drained"
    if isinstance(since := record.get("since"), (int, float)):
        text += time.strftime(" since %Y-%m-%d %H:%M", time.localtime(since))
    if record.get("who"):
        text += f" by {record['who']}"
    return f"{text}: {record['reason']}" if record.get("reason") else text
