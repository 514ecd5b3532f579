"""What nvidia-smi says of a task's GPUs. Its output here is a stand-in, in its own format: there is no GPU."""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path

import pytest

from trainer.report.text import describe_tasks
from trainer.telemetry import logs
from trainer.telemetry.gpu_use import GpuUse, parse, read_gpu_use

SAID = [
    "0, GPU-1f2a0000-0000-0000-0000-000000000000, 90, 1024",
    "1, GPU-77770000-0000-0000-0000-000000000000, 10, 3",
    "2, GPU-88880000-0000-0000-0000-000000000000, [N/A], 5",
]


@pytest.mark.parametrize(
    ("visible", "use"),
    [
        (None, GpuUse(0.5, 1027 * 2**20)),
        ("0", GpuUse(0.9, 2**30)),
        ("1,0", GpuUse(0.5, 1027 * 2**20)),
        ("GPU-7777", GpuUse(0.1, 3 * 2**20)),
        ("2", None),
        ("MIG-fb42055e", None),
        ("10", None),
    ],
)
def test_only_the_tasks_own_gpus_count(visible: str | None, use: GpuUse | None) -> None:
    assert parse(SAID, visible) == use


def test_a_program_of_that_name_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho '0, GPU-1, 40, 7'\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert read_gpu_use({"CUDA_VISIBLE_DEVICES": "0"}) == GpuUse(0.4, 7 * 2**20)
    assert read_gpu_use({}) == GpuUse(0.4, 7 * 2**20)
    assert read_gpu_use({"CUDA_VISIBLE_DEVICES": "-1"}) is None
    assert read_gpu_use({"CUDA_VISIBLE_DEVICES": ""}) is None
    program.write_text("#!/bin/sh\nexit 9\n")
    assert read_gpu_use({}) is None
    program.unlink()
    assert read_gpu_use({}) is None


def test_the_page_says_who_keeps_gpus_busy() -> None:
    tasks = {"worker-0": {"gpu": [0.5, 0.9]}, "worker-1": {"gpu": [0.2, None]}, "ps-0": {}}
    text = describe_tasks(tasks, "gpu")
    assert text == "worker-0 kept its GPUs busiest, 90% at most; worker-1 least, 20%."


@pytest.mark.parametrize(("visible", "shown"), [("-1", False), ("", False), ("0", True), (None, True)])
def test_that_no_gpu_was_found_is_news_only_where_one_was_to_be(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    visible: str | None,
    shown: bool,
) -> None:
    (tmp_path / "nvidiactl").touch()
    monkeypatch.setattr(logs, "DRIVER", tmp_path / "nvidiactl")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    with logs.without_chatter():
        os.write(2, b"E0000 cuda_platform.cc:52] failed call to cuInit: CUDA_ERROR_NO_DEVICE\n")
    assert ("cuInit" in capfd.readouterr().err) is shown


def test_what_is_held_back_needs_no_room_on_a_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    with monkeypatch.context() as full:
        full.setattr(tempfile, "tempdir", str(tmp_path / "missing"))
        with logs.without_chatter():
            os.write(2, b"absl::InitializeLog()\nbad \xff byte\n")
    assert capfd.readouterr().err == "bad \ufffd byte\n"
