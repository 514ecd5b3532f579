"""The requirements of lock files."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

_REQUIREMENT = re.compile(r"^[A-Za-z0-9][^\\\n]*", re.MULTILINE)

Pin = tuple[str, str]  # normalised name, version


def read_pins(lock: Path) -> Iterator[Pin]:
    """Yield what a lock pins for this platform; what it has for others alone is in no environment of a host."""
    for line in _REQUIREMENT.findall(lock.read_text(encoding="utf-8")):
        requirement = Requirement(line.strip())
        if requirement.marker is None or requirement.marker.evaluate():
            (specifier,) = requirement.specifier
            yield canonicalize_name(requirement.name), specifier.version


def pins_of(locks: Iterable[Path]) -> dict[Pin, list[str]]:
    """Return every pin with the names of the locks that have it."""
    found: dict[Pin, list[str]] = {}
    for lock in locks:
        for pin in read_pins(lock):
            found.setdefault(pin, []).append(lock.name)
    return found
