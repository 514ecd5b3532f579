"""Modules are compiled once, on the control machine, and lie on a host as its own compiler would have written them."""

from __future__ import annotations

import compileall
import hashlib
import importlib.util
import marshal
import multiprocessing
import os
import re
import signal
import sys
import zipfile
from pathlib import Path
from types import CodeType
from typing import Any

import pytest
import python_environment
import wheelhouse

from tests.unit.stand_ins import result_of
from tests.waiting import until

MAGIC = importlib.util.MAGIC_NUMBER.hex()
MODULES = {
    "pack/__init__.py": b"",
    "pack/part.py": b"# coding: latin-1\nword = '\xe9'\ndef act():\n    return [each for each in word]\n",
    "pack/tests/test_part.py": b"",
    "pack/broken.py": b"print 'of Python 2'\n",
    "pack/data.txt": b"text",
}
MINOR = ".".join(map(str, sys.version_info[:2]))
COMPILED = {"pack/__init__.py", "pack/part.py", "beside.py"}


@pytest.fixture
def wheels(tmp_path: Path) -> Path:
    directory = tmp_path / "wheels"
    directory.mkdir()
    with zipfile.ZipFile(directory / "pack-1.0-py3-none-any.whl", "w") as wheel:
        for name, content in MODULES.items():
            wheel.writestr(name, content)
        wheel.writestr("pack-1.0.data/purelib/beside.py", b"x = 1\n")
        wheel.writestr("pack-1.0.data/scripts/run.py", b"x = 1\n")
    return directory


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """As the wheel is installed."""
    directory = tmp_path / f"env/lib/python{MINOR}/site-packages"
    for name, content in {**MODULES, "beside.py": b"x = 1\n"}.items():
        file = directory / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content)
    return directory


def write(wheels: Path, site: Path) -> Path:
    wheelhouse.write_bytecode(wheels, str(site), wheelhouse.made_of(wheels, str(site)))
    return wheels / wheelhouse.BYTECODE


def put(site: Path, archive: Path, digest: str | None = None, magic: str = MAGIC) -> bool:
    actual = hashlib.sha256(archive.read_bytes()).hexdigest()
    return python_environment.put_bytecode(site, archive, actual if digest is None else digest, magic)


def compiled(site: Path) -> dict[str, tuple[bytes, CodeType, str]]:
    """Return each file's head, its code, and where that says that it is from."""
    found = {}
    for file in site.rglob("*.pyc"):
        data = file.read_bytes()
        code = marshal.loads(data[16:])
        found[str(file.relative_to(site))] = data[:16], code, code.co_filename
    return found


def test_each_file_is_the_one_that_the_hosts_compiler_would_write(wheels: Path, site: Path) -> None:
    assert put(site, write(wheels, site))
    ours = compiled(site)
    assert len(ours) == len(COMPILED)
    compileall.compile_dir(site, quiet=2, force=True, rx=re.compile("/tests/"))
    assert compiled(site) == ours


def test_a_module_that_changed_since_is_compiled_from_its_text(
    wheels: Path, site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(site, write(wheels, site))
    (site / "beside.py").write_bytes(b"x = 22\n")
    monkeypatch.syspath_prepend(str(site))
    assert importlib.import_module("beside").x == 22
    sys.modules.pop("beside")


@pytest.mark.parametrize("given", [{"digest": "0" * 64}, {"digest": ""}, {"magic": "00000000"}])
def test_what_is_another_one_or_for_another_python_is_not_taken(
    wheels: Path, site: Path, given: dict[str, str]
) -> None:
    assert not put(site, write(wheels, site), **given)
    assert compiled(site) == {}


def test_none_is_not_taken(wheels: Path, site: Path) -> None:
    assert not python_environment.put_bytecode(site, wheels / wheelhouse.BYTECODE, "0" * 64, MAGIC)


def test_a_module_that_a_host_lacks_is_passed_over(wheels: Path, site: Path) -> None:
    (site / "beside.py").unlink()
    assert put(site, write(wheels, site))
    assert len(compiled(site)) == len(COMPILED) - 1


def test_it_is_made_once_and_again_for_other_wheels_or_another_place(wheels: Path, site: Path) -> None:
    file = write(wheels, site)
    assert wheelhouse.is_made(file, wheelhouse.made_of(wheels, str(site)))
    assert not wheelhouse.is_made(file, wheelhouse.made_of(wheels, "/elsewhere"))
    (wheels / "pack-1.0-py3-none-any.whl").rename(wheels / "pack-1.1-py3-none-any.whl")
    assert not wheelhouse.is_made(file, wheelhouse.made_of(wheels, str(site)))
    whole = file.read_bytes()
    for broken in (whole[:-10], whole[:60] + b"\0\0\0\0" + whole[64:]):
        file.write_bytes(broken)
        assert not wheelhouse.is_made(file, wheelhouse.made_of(wheels, str(site)))


def test_a_file_that_is_right_stays_and_one_that_was_cut_is_written_again(wheels: Path, site: Path) -> None:
    archive = write(wheels, site)
    put(site, archive)
    first, *others = sorted(site.rglob("*.pyc"))
    kept = {file: file.stat().st_ino for file in others}
    whole = first.read_bytes()
    first.write_bytes(whole[:20])
    assert put(site, archive)
    assert first.read_bytes() == whole
    assert {file: file.stat().st_ino for file in others} == kept


def test_where_it_cannot_be_read_or_written_the_host_compiles(wheels: Path, site: Path) -> None:
    archive = write(wheels, site)
    archive.write_bytes(b"no zip")
    assert not put(site, archive)
    archive = write(wheels, site)
    (site / "__pycache__").write_text("no directory")
    assert not put(site, archive)


def test_what_cannot_be_compiled_here_is_no_failure(wheels: Path, site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(wheelhouse, "write_bytecode", fail)
    found = fetched(wheels, site)
    assert found["sha256"] == ""
    assert "No space left" in found["warnings"][0]


def fetched(wheels: Path, site: Path, python: str = MINOR, check: bool = False) -> dict[str, Any]:
    """Return what the module says of these wheels, which a lock names."""
    digest = hashlib.sha256((wheels / "pack-1.0-py3-none-any.whl").read_bytes()).hexdigest()
    lock = wheels.with_name("lock.txt")
    lock.write_text(f"pack==1.0 --hash=sha256:{digest}\n")
    return result_of(wheelhouse, check, lock=str(lock), python=python, dest=str(wheels), site=str(site))


def test_wheels_are_compiled_where_they_are_and_hosts_are_told_the_hash(wheels: Path, site: Path) -> None:
    planned = fetched(wheels, site, check=True)
    assert (planned["changed"], planned["fetched"]) == (True, [])  # so that check mode says what hosts get
    assert not (wheels / wheelhouse.BYTECODE).exists()
    first, second = fetched(wheels, site), fetched(wheels, site)
    assert (first["changed"], second["changed"], first["removed"]) == (True, False, [])
    digest = hashlib.sha256((wheels / wheelhouse.BYTECODE).read_bytes()).hexdigest()
    assert first["sha256"] == second["sha256"] == digest
    assert fetched(wheels, site, python="3.99")["sha256"] == ""


def compile_for_ever(wheel: Path, _: str) -> None:
    (wheel.parent.parent / "begun").touch()
    signal.pause()


def hold_and_write(wheels: Path) -> None:
    os.setpgrp()
    wheelhouse.compile_wheel = compile_for_ever
    with wheelhouse.hold(wheels.parent) as held:
        wheelhouse.write_bytecode(wheels, "/site", "", held)


def test_one_that_is_killed_keeps_no_other_away(wheels: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The processes that it compiles with stay."""
    module = multiprocessing.get_context("fork").Process(target=hold_and_write, args=(wheels,))
    module.start()
    assert module.pid is not None
    try:
        until((wheels.parent / "begun").exists)
        os.kill(module.pid, signal.SIGKILL)
        module.join()
        monkeypatch.setattr(wheelhouse, "MAX_WAIT_SECONDS", 20)
        with wheelhouse.hold(wheels.parent):
            pass
    finally:
        os.killpg(module.pid, signal.SIGKILL)
