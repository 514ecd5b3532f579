"""The folder that an operator's paths start from, and whose locks count."""

from __future__ import annotations

from pathlib import Path

import pytest

from fleet import places
from fleet.errors import OperatorMistake


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("ansible.cfg", "fabfile.py", "site.yml"):
        (tmp_path / name).touch()
    (tmp_path / "a/b").mkdir(parents=True)
    return tmp_path


@pytest.mark.parametrize("below", ["", "a/b"])
def test_site_is_the_folder_here_or_above(folder: Path, monkeypatch: pytest.MonkeyPatch, below: str) -> None:
    monkeypatch.chdir(folder / below)
    assert places.site() == folder
    assert places.site_file("keys/id") == folder / "keys/id"
    assert places.site_file("/etc/id") == Path("/etc/id")


def test_site_of_an_ansible_cfg_that_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path_factory) -> None:
    monkeypatch.chdir(tmp_path_factory.mktemp("elsewhere"))
    monkeypatch.setenv("ANSIBLE_CONFIG", str(folder / "ansible.cfg"))
    assert places.site() == folder


def test_elsewhere_a_checkout_is_the_site_and_a_package_has_none(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "site.yml").unlink()
    monkeypatch.chdir(folder)
    monkeypatch.delenv("ANSIBLE_CONFIG", raising=False)
    assert places.site() == places.CODE
    monkeypatch.setattr(places, "KIT", places.CODE / "psfleet")
    places._folder.cache_clear()
    with pytest.raises(OperatorMistake, match=f"{folder} is in no site's folder"):
        places.site()
    places._folder.cache_clear()


def test_locks_of_the_site_count_before_psfleets(folder: Path) -> None:
    assert places.lock_file(folder, "locks/cpu", gpu=True) == places.KIT / "locks/cpu"
    assert places.lock_file(folder, "locks/mine", gpu=True) == folder / "locks/mine"  # which is then called missing
    (folder / "locks").mkdir()
    (folder / "locks/cpu-3.11.txt").touch()
    assert places.lock_file(folder, "locks/cpu", gpu=True) == folder / "locks/cpu"


def test_a_cluster_without_gpus_has_the_lock_without_gpus_that_lies_beside_its_own(folder: Path) -> None:
    assert places.lock_file(folder, "locks/cpu", gpu=False) == places.KIT / "locks/cpu-no-gpu"
    (folder / "locks").mkdir()
    (folder / "locks/cpu-3.11.txt").touch()
    assert places.lock_file(folder, "locks/cpu", gpu=False) == folder / "locks/cpu"  # psfleet's is of other packages
    (folder / "locks/cpu-no-gpu-3.11.txt").touch()
    assert places.lock_file(folder, "locks/cpu", gpu=False) == folder / "locks/cpu-no-gpu"
    assert places.lock_file(folder, "locks/cpu-no-gpu", gpu=False) == folder / "locks/cpu-no-gpu"
    assert places.lock_file(folder, "/", gpu=False) == Path("/")
