"""What is sent to a host for fleet/hosts/agent.py: the agent itself, the modules that it is to run, and a release."""

from __future__ import annotations

import hashlib
import io
import json
import tarfile
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from fleet.places import ROLES
from trainer.run.release import SUMS

AGENT = Path(__file__).with_name("agent.py")
# The whole of it comes by standard input: what is asked may hold secrets, which a command line would show to all.
RECEIVE = """import json, sys
asked = json.load(sys.stdin.buffer)
exec(asked.pop("agent"), {"__name__": "psfleet_agent", "asked": asked})"""


def feed(asked: Mapping[str, Any]) -> bytes:
    """Return what RECEIVE reads: what is asked, and who does it."""
    return json.dumps({**asked, "agent": AGENT.read_text(encoding="utf-8")}).encode()


def sources(steps: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Return the text of each of the roles' modules that steps name."""
    return {step["module"]: _source(step["module"]) for step in steps if "module" in step}


@cache
def _source(module: str) -> str:
    found = sorted(ROLES.glob(f"*/library/{module}.py"))
    return found[0].read_text(encoding="utf-8")


def list_of(archive: bytes) -> list[str]:
    """Return the lines of an archive's list of files."""
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        file = tar.extractfile(SUMS)
        assert file is not None
        return file.read().decode().splitlines()


def pack(archive: bytes, there: frozenset[str]) -> bytes:
    """Leave out of an archive what a host has: the lines of its list of files."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=io.BytesIO(archive)) as full, tarfile.open(fileobj=packed, mode="w:gz") as rest:
        for member in full:
            file = full.extractfile(member)
            assert file is not None
            data = file.read()
            if f"{hashlib.sha256(data).hexdigest()}  {member.name}" not in there:
                rest.addfile(member, io.BytesIO(data))
    return packed.getvalue()
