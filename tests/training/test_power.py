"""A disk loses power after each of its flushes in turn: what a record on it says is there, is there, whole.

A loop device lies on a disk whose cache is volatile (volatile_disk.py), with a real ext4 on it. What a power failure
leaves is what was flushed, and of what came after that nothing, or by chance half.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import random
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from processes import run_check

from trainer.run.directory import RunDirectory
from trainer.run.records import read_record

pytestmark = [pytest.mark.matrix, pytest.mark.timeout(900)]
CHECK = "durable_check.py"
DEBIAN_PYTHON = "/usr/bin/python3"
MIB = 64
STEP = 4
HALF = 0.5
Write = tuple[int, bytes]


@dataclasses.dataclass
class Trained:
    """What was trained on the disk, all of it, and all that the disk was told."""

    whole: Path
    """A copy of the file system as it was when the process had ended."""
    flushes: list[list[Write]]
    """What was written before each flush, since the one before; last what was never flushed."""
    made: int
    """How many flushes it took to make the file system."""


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    if os.geteuid() != 0:
        pytest.skip("only root may mount a file system")
    if subprocess.run([DEBIAN_PYTHON, "-c", "import fusepy"], capture_output=True, check=False).returncode:
        pytest.skip("FUSE for Python is not installed: python3 -m lab packages python3-fusepy")
    directory = tmp_path_factory.mktemp("power")
    with volatile_disk(directory) as disk, mounted(disk, directory / "live", "noauto_da_alloc,commit=300") as live:
        made = len(read_log(directory / "log"))
        run_check(CHECK, str(live), "averages")
        shutil.copytree(live / "runs", directory / "whole" / "runs")
    return Trained(directory / "whole", read_log(directory / "log"), made)


@contextlib.contextmanager
def volatile_disk(directory: Path) -> Iterator[Path]:
    """Yield a disk with an empty ext4, which writes down what it is told."""
    mount = directory / "disk"
    mount.mkdir()
    script = str(Path(__file__).with_name("volatile_disk.py"))
    process = subprocess.Popen([DEBIAN_PYTHON, script, str(mount), str(MIB), str(directory / "log")])
    try:
        disk = mount / "disk"
        end = time.monotonic() + 60
        while not disk.exists():
            if process.poll() is not None or time.monotonic() > end:
                pytest.fail("the disk is missing")
            time.sleep(0.05)
        command("mkfs.ext4", "-q", "-E", "nodiscard", str(disk))
        yield disk
    finally:
        subprocess.run(["umount", str(mount)], check=False, capture_output=True)
        if process.poll() is None:
            process.terminate()
        process.wait(60)


@contextlib.contextmanager
def mounted(image: Path, directory: Path, options: str = "") -> Iterator[Path]:
    directory.mkdir(exist_ok=True)
    command("mount", "-o", ",".join(filter(None, ["loop", options])), str(image), str(directory))
    try:
        yield directory
    finally:
        command("umount", str(directory))


def command(*words: str) -> None:
    subprocess.run(words, check=True, timeout=60)


def read_log(log: Path) -> list[list[Write]]:
    flushes: list[list[Write]] = [[]]
    with log.open("rb") as file:
        while line := file.readline():
            kind, *numbers = line.split()
            if kind == b"flush":
                flushes.append([])
            else:
                offset, length = map(int, numbers)
                flushes[-1].append((offset, file.read(length)))
    return flushes


def apply(image: Path, writes: list[Write]) -> None:
    with image.open("r+b") as file:
        for offset, data in writes:
            file.seek(offset)
            file.write(data)


def after_each_failure(trained: Trained, directory: Path) -> Iterator[tuple[str, Path]]:
    """Yield what a power failure leaves, mounted, for each flush: without what came after it, and with half of that."""
    image = directory / "image"
    with image.open("wb") as file:
        file.truncate(MIB << 20)
    chance = random.Random(14)
    for number, writes in enumerate(trained.flushes[:-1]):
        apply(image, writes)
        later = trained.flushes[number + 1]
        # A write reaches the disk by blocks: half of them, wherever they lie.
        half = [write for write in later if chance.random() < HALF]
        for name, more in (("nothing", []), ("half", half)):
            if number < trained.made or not (more or (writes and name == "nothing")):
                continue  # no file system yet, or nothing that is new
            # A file of its own: what the system still knows of another one's bytes is not on this disk.
            copy = directory / f"{number}-{name}"
            command("cp", "--sparse=always", str(image), str(copy))
            apply(copy, more)
            with mounted(copy, directory / "found") as found:
                yield f"flush {number} of {len(trained.flushes) - 1}, and {name} of what came later", found
            copy.unlink()


@dataclasses.dataclass
class Seen:
    """How many failures came when the disk said so much."""

    manifests: int = 0
    replaced: int = 0
    remembered: int = 0
    finished: int = 0
    exports_due: int = 0
    exports: int = 0


def test_whatever_a_record_names_is_whole_after_each_power_failure(trained: Trained, tmp_path: Path) -> None:
    whole = RunDirectory(trained.whole, "test")
    seen, saved = Seen(), 0
    for when, found in after_each_failure(trained, tmp_path):
        after = RunDirectory(found, "test")
        for record in after.path.glob("*.json"):
            read_record(record)  # raises where it is half of one
        if not after.checkpoints.is_dir():
            continue
        replacing = any("_new" in path.name for path in after.checkpoints.glob("*.manifest.json"))
        after.catalogue.remove_orphans()  # as the next coordinator does
        steps = after.catalogue.steps()
        assert len(steps) >= saved, f"{when}: a checkpoint is gone"
        saved = len(steps)
        for step in steps:
            assert after.catalogue.check(step) == "", f"{when}: step {step}"
        seen.manifests += bool(steps)
        seen.replaced += replacing
        for record in after.callbacks.glob("[0-9]*.json"):
            seen.remembered += 1
            for array in whole.callbacks.glob("*.npy"):
                if array.name in record.read_text():
                    assert (after.callbacks / array.name).read_bytes() == array.read_bytes(), when
        if after.finished(STEP) == STEP:
            seen.finished += 1
            assert after.catalogue.newest() == STEP, when
            exported = (read_record(after.export_record) or {})["ended"]
            assert exported is not None, f"{when}: it is not known that an export is due"
            seen.exports_due += not exported
        if (read_record(after.export_record) or {}).get("ended"):
            seen.exports += 1
            for path in whole.export.rglob("*"):
                twin = after.export / path.relative_to(whole.export)
                assert path.is_dir() or twin.read_bytes() == path.read_bytes(), f"{when}: {twin}"
    assert saved == 2
    assert all(dataclasses.astuple(seen)), f"the power never failed at some of the moments: {seen}"


def test_a_run_goes_on_after_a_power_failure_right_after_its_first_manifest(trained: Trained, tmp_path: Path) -> None:
    for _, found in after_each_failure(trained, tmp_path):
        if RunDirectory(found, "test").catalogue.steps():
            run_check(CHECK, str(found), "averages")
            after = RunDirectory(found, "test")
            assert (after.finished(STEP), after.catalogue.check(STEP)) == (STEP, "")
            assert (after.export / "saved_model.pb").is_file()
            return
    pytest.fail("the power never failed right after the first manifest")
