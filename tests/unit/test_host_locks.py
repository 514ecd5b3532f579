"""`psfleet lock` has uv resolve the hosts' packages for each Python, and the same with CUDA."""

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


@pytest.mark.parametrize(
    ("name", "lock", "cuda"),
    [
        ("locks/mine", "mine", "mine-cuda"),
        ("locks/mine.in", "mine", "mine-cuda"),
        ("locks/cpu", "cpu", "cuda"),
    ],
)
def test_each_python_gets_a_lock_and_one_with_cuda(site: Path, name: str, lock: str, cuda: str) -> None:
    ran: list[list[str]] = []
    write_locks(name, lambda _: None, lambda command, check: ran.append(command))
    written = [Path(command[-1]).relative_to(site / "locks").name for command in ran]
    assert written == [f"{each}-{python}.txt" for python in PYTHONS for each in (lock, cuda)]
    for plain, more in zip(ran[::2], ran[1::2], strict=True):
        assert plain[-3] == more[-6] == f"{site}/locks/{lock}.in"
        assert more[-5:-1] == [str(KIT / "locks/cuda.in"), "-c", plain[-1], "-o"]
        assert "--generate-hashes" in plain


def test_every_lock_that_we_ship_has_a_python(site: Path) -> None:
    shipped = {path.stem.removeprefix("cpu-") for path in (KIT / "locks").glob("cpu-*.txt")}
    assert shipped == set(PYTHONS)


def test_a_missing_list_is_named_with_the_one_to_begin_with(site: Path) -> None:
    with pytest.raises(OperatorMistake, match=rf"{site}/locks/none.in is missing.*644 {KIT}/locks/cpu.in"):
        write_locks("locks/none", print)


def test_what_uv_can_not_resolve_is_a_mistake(site: Path) -> None:
    def fail(command: list[str], check: bool) -> None:
        raise subprocess.CalledProcessError(1, command)

    with pytest.raises(OperatorMistake, match=r"mine-3.10.txt can't be resolved"):
        write_locks("locks/mine", print, fail)
