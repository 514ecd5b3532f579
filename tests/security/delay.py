"""The drills' delay of packets, on hosts that are network namespaces."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from fleet.drills import packet_delay as program
from fleet.drills.ways import CONNECT, DELAY_MS, LATE


@contextmanager
def late(under: Sequence[str], address: str, delay_ms: float = DELAY_MS) -> Iterator[subprocess.Popen[str]]:
    """Have what a host sends to an address come later, until the block ends."""
    command = [*under, sys.executable, program.__file__, address, str(delay_ms), LATE]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout
            assert process.stdout.readline() == "late\n"
            yield process
        finally:
            process.terminate()


def milliseconds(under: Sequence[str], address: str, port: int) -> float:
    """How long a host takes to connect."""
    return float(subprocess.check_output([*under, sys.executable, "-c", CONNECT, address, str(port)], text=True))
