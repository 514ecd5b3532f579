"""`make sbom`: a bill of materials for each environment of the release that the checkout makes, in CycloneDX."""

from __future__ import annotations

import argparse
import hashlib
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fleet.errors import FleetError
from fleet.files import replace_file
from fleet.output.terminal import printable
from fleet.places import lock_file, site
from fleet.rollout.release import build_release
from fleet.site.inventory import load_inventory
from fleet.site.schema.lock_files import LOCKS, lock_of

CACHE = Path(".cache/releases")
TOOL = Path(".cache/supply/bin/cyclonedx-py")


def describe(lock: Path, release: str, tool: Path) -> bytes:
    """Return the bill of a lock's packages, as parts of a release: the same bytes each time.

    Raises subprocess.CalledProcessError, and FileNotFoundError where the tool is not installed.
    """
    command: list[str | Path] = [
        tool,
        "requirements",
        "--output-reproducible",
        "--short-PURLs",
        "--output-file",
        "-",
        lock,
    ]
    made = subprocess.run(command, check=True, capture_output=True)
    bill: dict[str, Any] = json.loads(made.stdout)
    name = f"psfleet-{release}"
    bill["metadata"]["component"] = {
        "type": "application",
        "bom-ref": name,
        "name": "psfleet",
        "version": release,
        "properties": [
            {"name": "psfleet:lock", "value": lock.name},
            {"name": "psfleet:lock:sha256", "value": hashlib.sha256(lock.read_bytes()).hexdigest()},
        ],
    }
    for component in bill["components"]:
        component.pop("description", None)  # the lock's own lines
    references = sorted(component["bom-ref"] for component in bill["components"])
    bill["dependencies"] = [{"ref": name, "dependsOn": references}, *({"ref": each} for each in references)]
    return (json.dumps(bill, indent=1, sort_keys=True) + "\n").encode()


def write(release: str, locks: Sequence[Path], cache: Path, tool: Path) -> list[Path]:
    """Write a release's bills into the cache, unless they are there; returns their paths."""
    paths = []
    for lock in locks:
        path = cache / f"{release}.{lock.stem}.cdx.json"
        if not path.is_file():
            made = describe(lock, release, tool)
            path.parent.mkdir(parents=True, exist_ok=True)
            replace_file(path, made)
        paths.append(path)
    return paths


def locks_for(variables: Mapping[str, Any], gpu: bool) -> list[Path]:
    """Return the lock files that a release has."""
    stems = [lock_file(site(), lock_of(variables, name), gpu) for name in (LOCKS if gpu else LOCKS[:1])]
    return [path for stem in stems for path in sorted(stem.parent.glob(f"{stem.name}-3.*.txt"))]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m supply.bom", description=__doc__)
    parser.add_argument("--inventory", help="whose release (default: as for fab)")
    options = parser.parse_args(arguments)
    try:
        known = load_inventory(options.inventory)
        release = build_release(known)
        locks = locks_for(known.variables[known.chief.host], bool(known.groups.get("gpu")))
        for path in write(release, locks, CACHE, TOOL):
            print(path)
    except FleetError as error:
        print(printable(str(error)), file=sys.stderr)
        return error.code
    except FileNotFoundError:
        print(f"there is no {TOOL}: `make sbom` installs it", file=sys.stderr)
        return 2
    except subprocess.CalledProcessError as error:
        print(f"{TOOL} ended with code {error.returncode}: {error.stderr.decode(errors='replace')}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
