"""By whom, and from which machine, something is done."""

from __future__ import annotations

import os
import socket
from getpass import getuser


def operator() -> str:
    """Return this user's name; its number where it has none, as in a container."""
    try:
        return getuser()
    except (KeyError, OSError):
        return str(os.getuid())


def origin() -> str:
    """Return user and machine, such as `ana@desk`."""
    return f"{operator()}@{socket.gethostname()}"
