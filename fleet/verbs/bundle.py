"""`fab bundle`: one archive for a bug report, with secrets removed."""

from __future__ import annotations

import io
import tarfile
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fleet.actions.console import Console
from fleet.actions.run_work import render_bytes
from fleet.bundle.contents import as_text, host_files, versions
from fleet.bundle.redaction import Redactor
from fleet.bundle.secrets import describe_inventory, inventory_secrets
from fleet.errors import ClusterTrouble, FleetError, OperatorMistake
from fleet.hosts.cluster import Cluster
from fleet.planning import decision
from fleet.site.schema.problems import show
from fleet.status.status_text import status_record
from fleet.verbs.doctor import diagnose

README = """This is what `fab bundle` of psfleet gathered for a bug report.

Secrets that the inventory knows, and what looks like one, are written as <removed>. Look through it before you send it:
a program may have logged what nobody could know. Addresses and names of hosts are in it, and the program's own words.

doctor.json   what fab doctor found          status.json     what fab status saw
inventory.json  hosts, groups and variables  versions.json   of the control machine
run/          the run's records and events   hosts/HOST/     journals, units, network, disks, release
"""


def bundle(
    cluster: Cluster, console: Console, out: str | None = None, lines: int = 2000, run: str | None = None
) -> None:
    """Write the archive here, or to `out`; says what is in it. What can't be asked is left out, and named.

    Raises OperatorMistake where no file can be written, ClusterTrouble where a secret would be in it.
    """
    decision.check_names(run, None)
    place = Path(out or f"psfleet-bundle-{time.strftime('%Y%m%d-%H%M%S')}.tar.gz")
    if place.is_dir() or not place.parent.is_dir():
        raise OperatorMistake(f"--out is {show(str(place))}: expected a file to write, such as --out report.tar.gz")
    redactor = Redactor(inventory_secrets(cluster.inventory))
    files, missing = gather(cluster, console, redactor, lines, run)
    if leaking := [name for name, text in files.items() if redactor.leaks(text) or redactor.leaks(name)]:
        raise ClusterTrouble(
            f"nothing was written: a secret of the inventory is still in {leaking[0]}. Report that, please"
        )
    size = write(place, files)
    console.print_json(
        "bundle", {"bundle": str(place.resolve()), "files": sorted(files), "size": size, "missing": missing}
    )
    for what, why in missing.items():
        console.print(f"without {what}: {why}")
    console.print(
        f"{place}: {len(files)} files, {render_bytes(size)}, secrets removed\nlook through it: tar -tzf {place}"
    )


def gather(
    cluster: Cluster, console: Console, redactor: Redactor, lines: int, run: str | None
) -> tuple[dict[str, str], dict[str, str]]:
    """Return the archive's texts by name, without secrets, and what is missing and why."""
    records: dict[str, Mapping[str, Any]] = {"versions.json": versions()}
    records["inventory.json"] = describe_inventory(cluster.inventory, redactor)
    missing: dict[str, str] = {}
    observation = cluster.observe(running=True, new_is_enough=True)
    records["status.json"] = status_record(cluster.inventory, observation)
    try:
        records["doctor.json"] = {"findings": [asdict(each) for each in diagnose(cluster, console)]}
    except FleetError as error:
        missing["doctor"] = redactor.text(str(error))
    chosen = run or (observation.run.run if observation.run else None)
    texts, unreachable = host_files(cluster, chosen, lines)
    missing |= {host: redactor.text(why) for host, why in unreachable.items()}
    found = {name: as_text(redactor.record(record)) for name, record in records.items()}
    found |= {name: redactor.file(name, text) for name, text in texts.items()}
    return {"README.txt": README, **found}, missing


def write(place: Path, files: Mapping[str, str]) -> int:
    """Write the archive, which nobody but this user may read; returns its bytes."""
    partial = place.with_name(f".{place.name}.new")
    folder = place.name.removesuffix(".tar.gz")
    try:
        partial.touch(mode=0o600)
        with tarfile.open(partial, "w:gz") as archive:
            for name, text in sorted(files.items()):
                data = text.encode(errors="replace")
                member = tarfile.TarInfo(f"{folder}/{name}")
                member.size, member.mtime = len(data), int(time.time())
                archive.addfile(member, io.BytesIO(data))
        partial.replace(place)
    except OSError as error:
        raise OperatorMistake(f"{place} can't be written ({error.strerror}): name another file with --out") from error
    finally:
        partial.unlink(missing_ok=True)
    return place.stat().st_size
