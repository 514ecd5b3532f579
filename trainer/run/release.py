"""Which release the cluster runs, and what becomes of a host that missed it: its tasks must not join.

On a shared path <shared>/release.json says so, written where the hosts are switched. Where none is shared the
coordinator asks each server (trainer/cluster/server_releases.py).
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from trainer.core.failures import Infrastructure
from trainer.core.settings.config import Config
from trainer.run.records import read_record

SUMS = "SHA256SUMS"  # a line for each file: its hash, two spaces, its name
RECORD = "release.json"  # on the shared path, and in the directory of each release
FIX = "`ansible-playbook site.yml --limit HOST` brings one host to the checkout's release, `fab start-cluster` all"


class StaysOut(Infrastructure):
    """A task that must not join as its host is."""


class MissedRelease(StaysOut):
    """This host has another release than the cluster runs; the message says which, and what fixes it."""


def own_release(directory: Path) -> str | None:
    """Return the release that lies in a directory, or None where none does."""
    try:
        return (read_record(directory / RECORD) or {}).get("id")
    except (OSError, ValueError):
        return None


def same_kit(one: Path, other: Path) -> bool:
    """Return whether two releases have the same package `trainer`, by their lists of files, and one environment."""
    try:
        kits, environments = zip(*((kit_in(place), os.readlink(place / "env")) for place in (one, other)), strict=True)  # noqa: PTH115
    except (OSError, ValueError):
        return False
    return bool(kits[0]) and kits[0] == kits[1] and environments[0] == environments[1]


def kit_in(release: Path) -> frozenset[str]:
    return kit_of((release / SUMS).read_text(encoding="utf-8").splitlines())


def kit_of(lines: Iterable[str]) -> frozenset[str]:
    """Return those lines of a release's list of files that are of the kit."""
    return frozenset(line for line in lines if line[66:].startswith("trainer/"))


def reject_missed_release(config: Config, link: Path | None, own: Path) -> None:
    """Raise MissedRelease when the cluster was switched to a release that this host has not got.

    `link` leads to the host's current release, `own` is the directory that this process works in. Where they differ,
    the host has been switched, and the start that did so starts this task again.
    """
    if link is None or config.local_run_dir or link.resolve() != own.resolve():
        return
    try:
        wanted = (read_record(Path(config.shared_dir) / RECORD) or {}).get("release")
    except (OSError, ValueError):
        return
    if wanted is not None and wanted != own.resolve().name:
        raise MissedRelease(f"this host has release {own.resolve().name}, and the cluster runs {wanted}: {FIX}")
