"""A look at the run starts a Python on the chief's host only where what it would read has changed; a real shell."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from fleet.cluster import Cluster
from fleet.ssh import Answer
from tests.unit.test_fleet_verbs import Pretence, make_inventory, status

TRAINER = """#!/bin/sh
echo status >>{place}/started
cat {place}/srv/runs/digits/status.json
"""


class Shell(Pretence):
    """The chief's host is this machine, with the trainer's files below a directory."""

    place: Path

    def run(
        self, scripts: Mapping[str, str], timeout: float = 30, data: Mapping[str, bytes] | None = None
    ) -> dict[str, Answer]:
        answers = super().run(scripts)
        script = scripts["head"].partition("echo '@run-files'")[1:]
        begin = "".join(script) or "echo '@selection'" + scripts["head"].partition("echo '@selection'")[2]
        for there in ("/opt/trainer", "/etc/trainer"):
            begin = begin.replace(there, f"{self.place}{there}")
        begin = begin.replace("/srv/trainer", f"{self.place}/srv")
        begin = begin.replace("env/bin/python", f"{self.place}/python")
        done = subprocess.run(
            ["sh", "-c", f'root() {{ shift 5; "$@"; }}\n{begin}'],
            capture_output=True,
            text=True,
            check=False,
            env=os.environ,
        )
        known = answers["head"].stdout.partition("@selection")[0]
        return {**answers, "head": Answer(f"{known}{done.stdout}", done.stderr)}


@pytest.fixture
def look(tmp_path: Path) -> Callable[[], int | None]:
    """Look at the run, and return its step."""
    hosts = Shell(make_inventory())
    hosts.place = tmp_path
    for name in ("opt/trainer/current", "etc/trainer", "srv/runs/digits"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "python").write_text(TRAINER.format(place=tmp_path))
    (tmp_path / "python").chmod(0o755)
    write(tmp_path, 1)
    shell: Any = hosts
    cluster = Cluster(hosts.inventory, shell)

    def look() -> int | None:
        seen = cluster.observe(["head"])
        assert seen.run_error is None
        assert seen.run is not None
        return seen.run.step

    return look


def write(place: Path, step: int) -> None:
    partial = place / "srv/runs/digits/partial"
    partial.write_text(json.dumps(status("training", step) | {"run_dir": f"{place}/srv/runs/digits"}))
    partial.replace(place / "srv/runs/digits/status.json")


def started(place: Path) -> int:
    return len((place / "started").read_text().splitlines())


def test_a_run_that_told_nothing_new_starts_no_python(look: Callable[[], int | None], tmp_path: Path) -> None:
    assert [look() for _ in range(5)] == [1] * 5
    assert started(tmp_path) == 2  # the first look does not know which files there are


@pytest.mark.parametrize("name", ["status.json", "events.jsonl", "evaluation.json", "run.json"])
def test_what_the_run_tells_is_read(look: Callable[[], int | None], tmp_path: Path, name: str) -> None:
    assert [look() for _ in range(3)] == [1] * 3
    if name == "status.json":
        write(tmp_path, 2)
    else:
        (tmp_path / "srv/runs/digits" / name).write_text("{}\n")
    assert look() == (2 if name == "status.json" else 1)
    assert started(tmp_path) == 3


@pytest.mark.parametrize("name", ["srv/selection.json", "etc/trainer/run.json"])
def test_another_choice_is_read(look: Callable[[], int | None], tmp_path: Path, name: str) -> None:
    assert [look() for _ in range(3)] == [1] * 3
    (tmp_path / name).write_text('{"run": "digits"}\n')
    assert look() == 1
    assert started(tmp_path) == 3


def test_a_sweeps_run_is_read_each_time(look: Callable[[], int | None], tmp_path: Path) -> None:
    (tmp_path / "srv/selection.json").write_text('{"sweep": {}}\n')
    assert [look() for _ in range(3)] == [1] * 3
    assert started(tmp_path) == 3


def test_a_run_whose_files_are_gone_is_asked_for_each_time(look: Callable[[], int | None], tmp_path: Path) -> None:
    assert [look() for _ in range(3)] == [1] * 3
    (tmp_path / "srv/runs/digits").rename(tmp_path / "elsewhere")
    (tmp_path / "python").write_text(TRAINER.format(place=tmp_path).replace("srv/runs/digits", "elsewhere"))
    assert [look() for _ in range(3)] == [1] * 3
    assert started(tmp_path) == 5
