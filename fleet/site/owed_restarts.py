"""What a service owes to files that were written: a restart, or a reload.

The running unit is asked, and nothing remembered: a site.yml that was broken off after it wrote a file owes a restart.
"""

from __future__ import annotations

import shlex


def owed(unit: str, restart: str, *reload: str) -> list[str]:
    """Return the command that prints the state that systemd_service is to bring about: restarted, reloaded, or none.

    Args:
        unit: the service or mount.
        restart: a file that counts from the unit's next start.
        reload: files that count from its next reload, which changes the state for a moment.
    """
    looks = [_look(unit, "restarted", "ActiveEnterTimestamp", restart)]
    looks += [_look(unit, "reloaded", "StateChangeTimestamp", *reload)] if reload else []
    return ["/bin/sh", "-c", "\n".join(looks)]


def _look(unit: str, state: str, event: str, *files: str) -> str:
    return (
        f"time=$(systemctl show --value --timestamp=us+utc --property={event} {shlex.quote(unit)})\n"
        f"find {shlex.join(files)} -newermt \"${{time:-@0}}\" -printf '{state}\\n'"
    )
