"""Commands that a bench runs, and the processor time that they take."""

from __future__ import annotations

import os
import resource
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence


def run_command(command: Sequence[str], environment: Mapping[str, str] = os.environ) -> str:
    """Run a command, and return what it printed; where it fails, the bench ends with that."""
    done = subprocess.run(command, env=environment, text=True, capture_output=True)
    if done.returncode:
        sys.exit(f"bench: {shlex.join(command)} failed:\n{done.stdout[-4000:]}{done.stderr[-2000:]}")
    return done.stdout


def processor_seconds() -> float:
    """Processor time of this process, and of its children that have ended."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime
