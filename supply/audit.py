"""`make audit`: ask pip-audit for known vulnerabilities of every lock, from advisories that were fetched before.

It is never green without having compared: pip-audit ends with 0 also where it has skipped every package.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from supply.advisories import FEWEST, FILE, Advisories, NoAdvisories
from supply.locks import Pin, pins_of

LOCKS = Path("locks")
TOOL = Path(".cache/supply/bin/pip-audit")
DAYS = 7
DAY = 86400.0
GREEN, VULNERABLE, UNKNOWN = 0, 1, 2


def audit(locks: Sequence[Path], archive: Path, days: float, tool: Path, fewest: int = FEWEST) -> int:
    """Compare locks with the advisories of an archive; returns the exit code.

    Raises:
        NoAdvisories: there are none, or they are older than so many days.
    """
    advisories = Advisories(archive, fewest)
    # The newest advisory's too: a copy of an old archive is a new file.
    fetched, newest = ((time.time() - at) / DAY for at in (advisories.fetched, advisories.newest_at))
    age = f"advisories up to {advisories.newest[:10]}, fetched {fetched:.1f} days ago"
    if max(fetched, newest) > days:
        raise NoAdvisories(f"{archive}: {age}; expected {days:g} at most. `make advisories` fetches them again")
    print(age, flush=True)
    pins = pins_of(locks)
    if not pins:
        raise NoAdvisories(f"no requirement in {', '.join(map(str, locks)) or 'no lock'}: there is nothing to compare")
    code = GREEN
    with advisories.served() as address, tempfile.TemporaryDirectory() as cache:
        # One by one: two locks may pin two versions of one package, and pip-audit takes that for a mistake.
        for lock in locks:
            code = max(code, _ask(tool, lock, address, cache))
    missed = sorted(pins.keys() - advisories.asked)
    if missed:
        print(f"not compared: {_names(missed)}", file=sys.stderr)
        return UNKNOWN
    affected = {pin: locks for pin, locks in sorted(pins.items()) if advisories.query(*pin)}
    for pin, names in affected.items():
        print(f"{pin[0]} {pin[1]} is in {', '.join(names)}")
    if affected and code == GREEN:
        print("pip-audit ends with 0, and the advisories name these packages", file=sys.stderr)
        return UNKNOWN
    print(f"{len(pins)} packages of {len(locks)} locks were compared, and {len(affected)} are affected")
    return code


def _ask(tool: Path, lock: Path, address: str, cache: str) -> int:
    command: list[str | Path] = [
        tool,
        "--strict",
        "--disable-pip",
        "--require-hashes",
        "--progress-spinner=off",
        "--cache-dir",
        cache,
    ]
    command += ["--vulnerability-service=osv", "--osv-url", address, "--requirement", lock]
    try:
        done = subprocess.run(command, check=False)
    except FileNotFoundError:
        print(f"there is no {tool}: `make audit` installs it", file=sys.stderr)
        return UNKNOWN
    return {0: GREEN, 1: VULNERABLE}.get(done.returncode, UNKNOWN)


def _names(pins: Sequence[Pin]) -> str:
    shown = ", ".join(f"{name} {version}" for name, version in pins[:5])
    return f"{shown} and {len(pins) - 5} more" if len(pins) > 5 else shown


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m supply.audit", description=__doc__)
    parser.add_argument("locks", nargs="*", type=Path, help="lock files (default: all of locks/)")
    parser.add_argument("--advisories", type=Path, default=FILE, help="the archive (default: %(default)s)")
    parser.add_argument("--days", type=float, default=DAYS, help="how old it may be (default: %(default)s)")
    parser.add_argument("--tool", type=Path, default=TOOL, help=argparse.SUPPRESS)
    parser.add_argument("--fewest", type=int, default=FEWEST, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    locks = options.locks or sorted(LOCKS.glob("*.txt"))
    try:
        return audit(locks, options.advisories, options.days, options.tool, options.fewest)
    except NoAdvisories as error:
        print(f"nothing was compared: {error}", file=sys.stderr)
        return UNKNOWN


if __name__ == "__main__":
    sys.exit(main())
