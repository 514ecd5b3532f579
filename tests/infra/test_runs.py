"""Runs are copied and deleted, and `fab doctor` finds real faults, while a training goes on (`make infra-slow`)."""

from __future__ import annotations

import json
import subprocess
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from testinfra.host import Host

from .conftest import LONG_RUN, fab, status, units, wait_for_progress

pytestmark = pytest.mark.slow
BACKUP = "/srv/psfleet-test-backup"


@pytest.fixture
def backup(lab: dict[str, Host]) -> Iterator[str]:
    """A folder of the chief's host for copies; what the tests make of them goes with it."""
    with lab["head"].sudo():
        lab["head"].run_expect([0], f"install -d -o trainer -g trainer {BACKUP}")
    yield BACKUP
    with lab["head"].sudo():
        lab["head"].run_expect([0], f"rm -rf {BACKUP} /srv/trainer/runs/infra-back /srv/trainer/runs/infra-twin")


def right(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    assert done.returncode == 0, done.stdout + done.stderr
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def test_a_run_that_trains_is_copied_taken_back_and_cloned(lab: dict[str, Host], long_run: Path, backup: str) -> None:
    before = units(lab)
    wait_for_progress(lab)
    copied = right(fab("backup", LONG_RUN, "--to", backup, "--json", inventory=long_run))
    with lab["head"].sudo():
        lab["head"].run_expect([0], f"cd {copied['copy']} && sha256sum --check --quiet SHA256SUMS")
    back = right(fab("restore-run", copied["copy"], "--run", "infra-back", "--json", inventory=long_run))
    assert (back["outcome"], back["step"]) == ("done", copied["step"])
    assert right(fab("clone-run", LONG_RUN, "infra-twin", "--json", inventory=long_run))["step"] >= copied["step"]
    refused = fab("delete-run", LONG_RUN, "--yes", inventory=long_run)
    assert (refused.returncode, "it is trained by" in refused.stderr) == (2, True), refused.stderr
    assert right(fab("delete-run", "infra-back", "--yes", "--json", inventory=long_run))["outcome"] == "done"
    wait_for_progress(lab)
    assert (units(lab), status(lab)["state"]) == (before, "training")


@pytest.fixture
def faults(lab: dict[str, Host]) -> Iterator[None]:
    """A full disk's stand-in and a file edited by hand, a port that is taken, a wrong clock, a failed unit."""
    do = {
        "worker-0": "mount -t tmpfs -o size=100m tmpfs /var/tmp && cp -p /etc/trainer/worker-0.env /root/kept.env "
        "&& echo EDITED=by-hand >>/etc/trainer/worker-0.env",
        "worker-1": "systemctl stop trainer@worker-1 && systemd-run --quiet --unit=thief python3 -m http.server 2400",
        "ps-0": 'printf \'#!/bin/sh\\nexec /bin/date --date "+60 sec" "$@"\\n\' >/usr/local/bin/date '
        "&& chmod +x /usr/local/bin/date",
        "ps-1": "systemd-run --quiet --unit=psfleet-broken false",
    }
    undo = {
        "worker-0": "umount /var/tmp; cp -p /root/kept.env /etc/trainer/worker-0.env; rm -f /root/kept.env",
        "worker-1": "systemctl stop thief; systemctl start trainer@worker-1",
        "ps-0": "rm -f /usr/local/bin/date",
        "ps-1": "systemctl reset-failed psfleet-broken",
    }
    try:
        for name, command in do.items():
            with lab[name].sudo():
                lab[name].run_expect([0], command)
        yield
    finally:
        for name, command in undo.items():
            with lab[name].sudo():
                lab[name].run(command)


@pytest.mark.usefixtures("faults")
def test_doctor_names_each_fault_and_a_bundle_has_them(lab: dict[str, Host], long_run: Path, tmp_path: Path) -> None:
    done = fab("doctor", "--json", inventory=long_run)
    assert done.returncode == 1, done.stderr
    found = {(each["where"], each["part"]): each["what"] for each in json.loads(done.stdout)["findings"]}
    for key, what in {
        ("worker-0", "room"): "/var/tmp has",
        ("worker-0", "files"): "/etc/trainer/worker-0.env differs",
        ("worker-1", "ports"): "port 2400 of worker-1 is taken by python3",
        ("worker-1", "units"): "worker-1 is inactive",
        ("ps-0", "clock"): "ahead of the others'",
        ("ps-1", "units"): "psfleet-broken.service has failed",
    }.items():
        assert what in found.get(key, ""), (key, found)
    place = tmp_path / "report.tar.gz"
    made = right(fab("bundle", "--out", str(place), "--json", inventory=long_run))
    assert made["missing"] == {}
    with tarfile.open(place) as archive:
        names = archive.getnames()
    assert "report/hosts/ps-1/journal.txt" in names
    assert "report/run/events.jsonl" in names
