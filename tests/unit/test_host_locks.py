"""`psfleet lock` has uv resolve the hosts' packages for each Python, and the same with CUDA and without GPUs."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from fleet.errors import OperatorMistake
from fleet.host_locks import PYTHONS, write_locks
from fleet.places import KIT


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "locks").mkdir()
    for name in ("ansible.cfg", "fabfile.py", "site.yml", "locks/mine.in", "locks/cpu.in"):
        (tmp_path / name).touch()
    monkeypatch.chdir(tmp_path)
    return tmp_path


class Uv:
    """Writes a lock with these pins."""

    def __init__(self, pins: str = "tensorflow==2.21.7") -> None:
        self.pins, self.ran = pins, list[tuple[list[str], str]]()

    def __call__(self, command: list[str], check: bool, input: str, text: bool) -> None:
        self.ran.append((command, input))
        Path(command[-1]).write_text(f"numpy==2.4.6 \\\n{self.pins} \\\n    --hash=sha256:00\n")


@pytest.mark.parametrize(
    ("name", "lock", "cuda"),
    [
        ("locks/mine", "mine", "mine-cuda"),
        ("locks/mine.in", "mine", "mine-cuda"),
        ("locks/cpu", "cpu", "cuda"),
    ],
)
def test_each_python_gets_a_lock_one_with_cuda_and_one_without_gpus(
    site: Path, name: str, lock: str, cuda: str
) -> None:
    uv = Uv()
    write_locks(name, lambda _: None, uv)
    written = [Path(command[-1]).relative_to(site / "locks").name for command, _ in uv.ran]
    assert written == [f"{each}-{python}.txt" for python in PYTHONS for each in (lock, cuda, f"{lock}-no-gpu")]
    for (plain, _), (more, _), (less, given) in zip(uv.ran[::3], uv.ran[1::3], uv.ran[2::3], strict=True):
        assert plain[-3] == more[-6] == less[-8] == f"{site}/locks/{lock}.in"
        assert more[-5:-1] == [str(KIT / "locks/cuda.in"), "-c", plain[-1], "-o"]
        assert less[-7:-1] == ["-", "--override", str(KIT / "locks/without-tensorflow.in"), "-c", plain[-1], "-o"]
        assert given == "tensorflow-cpu==2.21.7\n"  # the version that was locked for the others
        assert "--generate-hashes" in plain


@pytest.mark.parametrize("pins", ["tensorflow==2.21.7+mine", "my-tensorflow==1.0"])
def test_a_tensorflow_of_ones_own_has_no_lock_without_gpus(site: Path, pins: str) -> None:
    (site / "locks/mine-no-gpu-3.11.txt").write_text("tensorflow-cpu==2.20.0\n")
    said: list[str] = []
    write_locks("locks/mine", said.append, Uv(pins))
    assert not list((site / "locks").glob("mine-no-gpu-*"))
    assert said[0] == f"wrote {site}/locks/mine-3.10.txt, mine-cuda-3.10.txt"


def test_every_lock_that_we_ship_has_a_python(site: Path) -> None:
    shipped = {path.stem.removeprefix("cpu-") for path in (KIT / "locks").glob("cpu-3.*.txt")}
    assert shipped == set(PYTHONS)


def test_a_missing_list_is_named_with_the_one_to_begin_with(site: Path) -> None:
    with pytest.raises(OperatorMistake, match=rf"{site}/locks/none.in is missing.*644 {KIT}/locks/cpu.in"):
        write_locks("locks/none", print)


def test_what_uv_can_not_resolve_is_a_mistake(site: Path) -> None:
    def fail(command: list[str], **_: object) -> None:
        raise subprocess.CalledProcessError(1, command)

    with pytest.raises(OperatorMistake, match=r"mine-3.10.txt can't be resolved"):
        write_locks("locks/mine", print, fail)
