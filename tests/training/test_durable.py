"""What a manifest, or `export.json`, says is there: it is on the disk by then, and not in memory alone."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from processes import PROGRAMS, ROOT, environment, run_check

from trainer.run.catalogue import Manifest
from trainer.run.directory import RunDirectory
from trainer.run.records import read_record

pytestmark = pytest.mark.timeout(300)
CHECK = "durable_check.py"
STEP = 4
# As strace -y writes them: a file's path stands beside its descriptor.
CALL = re.compile(
    r"\d+ +(?:"
    r"p?write\w*\(\d+<(?P<written>/[^>]*)>"
    r"|f(?:data)?sync\(\d+<(?P<synced>/[^>]*)>\) += 0"
    r'|mkdir\w*\((?:AT_FDCWD\S*, )?"(?P<made>[^"]*)".*= 0'
    r'|unlink\w*\((?:AT_FDCWD\S*, )?"(?P<gone>[^"]*)".*= 0'
    r'|rename\w*\((?:AT_FDCWD\S*, )?"(?P<old>[^"]*)", (?:AT_FDCWD\S*, )?"(?P<new>[^"]*)".*= 0)'
)


class Disk:
    """What a process's calls leave in memory, which a power failure loses: bytes of files, and names in directories."""

    def __init__(self) -> None:
        self._bytes: set[str] = set()
        self._names: set[str] = set()
        self._known: set[str] = set()

    def take(self, call: str) -> str | None:
        """Take one line of strace's; returns the new name where it is that of a rename."""
        found = CALL.match(call)
        if found is None:
            return None
        if path := found["written"]:
            self._bytes.add(path)
            if path not in self._known:
                self._names.add(path)
            self._known.add(path)
        elif path := found["synced"]:
            self._bytes.discard(path)
            self._names = {name for name in self._names if os.path.dirname(name) != path}  # noqa: PTH120
        elif path := found["made"]:
            self._names.add(path)
            self._known.add(path)
        elif path := found["gone"]:
            for kind in (self._bytes, self._names, self._known):
                kind.discard(path)
        else:
            old, new = found["old"], found["new"]
            for kind in (self._bytes, self._names, self._known):
                moved = {path for path in kind if path == old or path.startswith(f"{old}/")}
                kind -= moved
                kind |= {new + path[len(old) :] for path in moved}
            self._names.add(new)
        return found["new"]

    def lost_below(self, directory: Path) -> set[str]:
        """Return the files below a directory that would be damaged or gone."""
        lost = self._bytes | self._names
        return {str(Path(path).relative_to(directory)) for path in lost if Path(path).is_relative_to(directory)}


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory) -> tuple[RunDirectory, list[str]]:
    """Return a finished run, and the system calls of the process that trained it."""
    if shutil.which("strace") is None:
        pytest.skip("strace is not installed: python3 -m lab packages strace")
    shared = tmp_path_factory.mktemp("traced").resolve()
    names = "trace=fsync,fdatasync,write,writev,pwrite64,pwritev,/^(rename|unlink|mkdir)"
    strace = ["strace", "-f", "-y", "--seccomp-bpf", "-s", "0", "-e", names, "-o", str(shared / "calls")]
    done = subprocess.run(
        [*strace, sys.executable, str(Path(__file__).with_name(CHECK)), str(shared)],
        env=environment(PYTHONPATH=f"{ROOT}:{PROGRAMS}"),
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return RunDirectory(shared, "test"), whole_calls((shared / "calls").read_text().splitlines())


def whole_calls(lines: list[str]) -> list[str]:
    """Return each call in one line, at its end: strace divides those that last longer than another thread's."""
    begun: dict[str, str] = {}
    whole = []
    for line in lines:
        thread, _, call = line.partition(" ")
        if call.endswith(" <unfinished ...>"):
            begun[thread] = call.removesuffix(" <unfinished ...>")
        elif resumed := re.match(r" *<\.\.\. \w+ resumed>(.*)", call):
            whole.append(f"{thread} {begun.pop(thread, '')}{resumed[1]}")
        else:
            whole.append(line)
    return whole


def lost_at_the_last_rename(traced: tuple[RunDirectory, list[str]], record: Path, directory: Path) -> set[str]:
    disk, lost = Disk(), None
    for call in traced[1]:
        before = disk.lost_below(directory)
        if disk.take(call) == str(record):
            lost = before
    assert lost is not None, f"{record} was never renamed into its place"
    return lost


def test_the_files_of_a_checkpoint_are_synced_before_its_manifest_has_its_name(
    traced: tuple[RunDirectory, list[str]],
) -> None:
    catalogue = traced[0].catalogue
    manifest = Manifest.read(catalogue.manifest(STEP))
    assert manifest is not None
    assert len(manifest.files) >= 3  # an index, and a part of each ps
    lost = lost_at_the_last_rename(traced, catalogue.manifest(STEP), catalogue.path)
    assert lost & manifest.files.keys() == set()


def test_what_callbacks_remember_is_synced_before_its_record_has_its_name(
    traced: tuple[RunDirectory, list[str]],
) -> None:
    directory = traced[0]
    [array] = directory.callbacks.glob("*.npy")
    lost = lost_at_the_last_rename(traced, directory.callbacks / f"{STEP}.json", directory.path)
    assert {"callbacks", f"callbacks/{array.name}"} & lost == set()


def test_the_export_is_synced_before_its_record_says_that_it_has_ended(
    traced: tuple[RunDirectory, list[str]],
) -> None:
    directory = traced[0]
    assert (directory.export / "saved_model.pb").is_file()
    assert (read_record(directory.export_record) or {})["ended"]
    assert lost_at_the_last_rename(traced, directory.export_record, directory.export) == set()


def test_a_finished_run_knows_after_a_power_failure_that_its_export_is_due(
    traced: tuple[RunDirectory, list[str]],
) -> None:
    directory = traced[0]
    renames = [call for call in traced[1] if Disk().take(call) in (str(directory.state), str(directory.export_record))]
    finished = max(number for number, call in enumerate(renames) if str(directory.state) in call)
    assert any(str(directory.export_record) in call for call in renames[:finished])


def test_the_manifest_and_the_state_are_synced_themselves(traced: tuple[RunDirectory, list[str]]) -> None:
    directory, calls = traced
    disk = Disk()
    for call in calls:
        disk.take(call)
    lost = disk.lost_below(directory.path)
    assert {str(directory.state.relative_to(directory.path)), f"checkpoints/ckpt-{STEP}.manifest.json"} & lost == set()


@pytest.fixture
def power_fails(tmp_path: Path) -> Iterator[tuple[Path, Path]]:
    """Yield a directory, and another where its disk comes to be mounted as it is when the first test asks for it."""
    if os.geteuid() != 0:
        pytest.skip("only root may mount a file system")
    image, live, found = tmp_path / "image", tmp_path / "live", tmp_path / "found"
    live.mkdir()
    found.mkdir()
    command("truncate", "--size=128M", str(image))
    command("mkfs.ext4", "-q", str(image))
    # The system must write nothing by itself for as long as the test may take.
    command("mount", "-o", "loop,noauto_da_alloc,commit=300", str(image), str(live))
    try:
        yield live, found
    finally:
        command("umount", "--lazy", str(live))
        subprocess.run(["umount", "--lazy", str(found)], check=False, capture_output=True)


def command(*words: str) -> None:
    subprocess.run(words, check=True, timeout=60)


def test_a_power_failure_right_after_the_end_loses_nothing_of_it(power_fails: tuple[Path, Path]) -> None:
    live, found = power_fails
    run_check(CHECK, str(live))
    # What is on the disk, without what is in memory.
    command("cp", "--sparse=always", str(live.with_name("image")), str(live.with_name("copy")))
    command("mount", "-o", "loop", str(live.with_name("copy")), str(found))
    before, after = RunDirectory(live, "test"), RunDirectory(found, "test")
    assert after.finished(STEP) == STEP
    assert after.catalogue.newest() == STEP
    assert after.catalogue.check(STEP) == ""
    for directory, copy in ((before.checkpoints, after.checkpoints), (before.export, after.export)):
        for path in directory.rglob("*"):
            twin = copy / path.relative_to(directory)
            assert path.is_dir() or path.name == "checkpoint" or twin.read_bytes() == path.read_bytes(), twin
