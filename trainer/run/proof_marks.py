"""The marks of proofs: what was proven of a release here, so that an equal proof may be left out.

A mark is a digest of all that a proof depends on, and not of its words: the same run is proven by a start, and by
`site.yml` after it. Where secrets are read there is none, since a digest would let others try what they are.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from trainer.core.settings.config import Config
from trainer.run.release import SUMS

# What the caller adds: a digest of sandbox and environment, and the file of the marks that count for it.
CONDITIONS, KNOWN = "TRAINER_PROOF", "TRAINER_PROVEN"
MARK = "mark: "
BUILT = " built"


def marks_of(configs: Sequence[Config], environment: Mapping[str, str], release: Path) -> list[str]:
    """Return a mark for each of the settings that are proven; the name of the run is no part of it."""
    conditions = environment.get(CONDITIONS)
    if not conditions or "CREDENTIALS_DIRECTORY" in environment:
        return []
    files, packages = (release / SUMS).read_text(encoding="utf-8"), os.readlink(release / "env")  # noqa: PTH115
    settings = [config.replace(run=Config.run).as_dict() for config in configs]
    known = [[files, packages, sys.version, conditions, each] for each in settings]
    return [hashlib.sha256(json.dumps(each, sort_keys=True).encode()).hexdigest() for each in known]


def are_proven(marks: Sequence[str], built: bool, environment: Mapping[str, str], release: Path) -> bool:
    """Return whether an earlier proof counts for all of these, and the release's files are still what it has seen."""
    if not marks or KNOWN not in environment:
        return False
    try:
        lines = Path(environment[KNOWN]).read_text(encoding="utf-8").splitlines()
        return {f"{mark}{BUILT}" if built else mark for mark in marks} <= {*lines} and _is_whole(release)
    except OSError:
        return False


def _is_whole(release: Path) -> bool:
    lines = (release / SUMS).read_text(encoding="utf-8").splitlines()[1:]
    return all(hashlib.sha256((release / line[66:]).read_bytes()).hexdigest() == line[:64] for line in lines)
