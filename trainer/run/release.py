"""Which release the cluster runs: <shared>/release.json, written where the hosts are switched to it.

A host that was away meanwhile has an older one. Its tasks must not join with that.
"""

from __future__ import annotations

from pathlib import Path

from trainer.config import Config
from trainer.failures import Infrastructure
from trainer.run.records import read_record


class MissedRelease(Infrastructure):
    """This host has another release than the cluster runs; the message says which, and what mends it."""


def refuse_missed_release(config: Config, link: Path | None, own: Path) -> None:
    """Raise MissedRelease when the cluster was switched to a release that this host has not got.

    `link` leads to the host's current release, `own` is the directory that this process works in. Where they differ,
    the host has been switched, and who did that starts this task anew.
    """
    if link is None or config.local_run_dir or link.resolve() != own.resolve():
        return
    try:
        wanted = (read_record(Path(config.shared_dir) / "release.json") or {}).get("release")
    except (OSError, ValueError):
        return
    if wanted is not None and wanted != own.resolve().name:
        raise MissedRelease(
            f"this host has release {own.resolve().name}, and the cluster runs {wanted}: ship it with "
            "`fab start-cluster`, or with `ansible-playbook site.yml`"
        )
