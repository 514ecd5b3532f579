#!/usr/bin/python
"""Compile the modules of a directory of wheels once, on the control machine, for all hosts with the same Python.

Writes `modules.bytecode` beside the wheels, a zip with the code of each module but packages' tests. Waits for
wheelhouse, where that works on wheels there. Does nothing where this machine's Python is not the hosts', whose minor
version decides. The hosts compile then.

Returns:
    sha256: The file's hash; empty where there is none.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import marshal
import multiprocessing
import os
import re
import sys
import time
import warnings
import zipfile
import zlib
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from importlib.util import MAGIC_NUMBER
from pathlib import Path

from ansible.module_utils.basic import AnsibleModule

FILE = "modules.bytecode"
MAX_WAIT_SECONDS = 3900  # jobs that were begun ahead live for 3600 (tasks/ahead.yml)
TESTS = re.compile("/tests/")  # as compileall leaves them out on a host
# Where a wheel has files that don't lie beside its packages.
DATA = re.compile(r"[^/]+\.data/(?:(?:purelib|platlib)/(.*)|.*)")


def made_of(wheels: Path, site: str) -> str:
    """Name what the file is made of. The wheels' content is proven before."""
    names = sorted(wheel.name for wheel in wheels.glob("*.whl"))
    return json.dumps({"magic": MAGIC_NUMBER.hex(), "site": site, "wheels": names})


def compile_wheel(wheel: Path, site: str) -> list[tuple[str, bytes]]:
    """Return the code of each module of a wheel, by its path below `site`; what can't be compiled is left out."""
    return list(_compiled(wheel, site))


def _compiled(wheel: Path, site: str) -> Iterator[tuple[str, bytes]]:
    warnings.simplefilter("ignore")  # of the packages' own code
    with zipfile.ZipFile(wheel) as opened:
        for member in opened.namelist():
            data = DATA.fullmatch(member)
            path = data[1] if data else member
            if path and path.endswith(".py") and not TESTS.search(f"/{path}"):
                try:
                    code = compile(opened.read(member), f"{site}/{path}", "exec", dont_inherit=True)
                except (SyntaxError, ValueError):
                    continue
                yield path, marshal.dumps(code)


def write(wheels: Path, site: str, comment: str, held: int | None = None) -> None:
    """Write the file, whole or not at all; where this process is killed, its workers don't keep what it `held`."""
    partial = wheels.with_name(f"{wheels.name}.{FILE}.{os.getpid()}")
    found = sorted(wheels.glob("*.whl"), key=lambda wheel: -wheel.stat().st_size)
    # A fork, since what ansible runs a module from can't be imported again.
    fork = multiprocessing.get_context("fork")
    pool = ProcessPoolExecutor(mp_context=fork, initializer=_let_go, initargs=(held,))
    try:
        with pool, zipfile.ZipFile(partial, "w") as packed:
            for modules in pool.map(compile_wheel, found, [site] * len(found)):
                for path, code in modules:
                    packed.writestr(zipfile.ZipInfo(path), code, zipfile.ZIP_DEFLATED, 1)
            packed.comment = comment.encode()
        partial.replace(wheels / FILE)
    finally:
        partial.unlink(missing_ok=True)


def _let_go(held: int | None) -> None:
    if held is not None:
        os.close(held)


def is_made(file: Path, comment: str) -> bool:
    """Return whether the file is there, of these wheels and for this place, and each part of it as it was written."""
    try:
        with zipfile.ZipFile(file) as opened:
            return opened.comment == comment.encode() and opened.testzip() is None
    except (OSError, zipfile.BadZipFile, zlib.error):
        return False


@contextlib.contextmanager
def hold(sets: Path, wheels: Path | None = None, patience: float = 0) -> Iterator[int]:
    """Keep others away from the directory of all sets of wheels, once `wheels` are there; one may be at work there.

    Gives the descriptor that does so, which no process that could outlive this one may have. Raises TimeoutError.
    """
    sets.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(sets, os.O_RDONLY)
    begun = time.monotonic()
    try:
        while not (taken := _takes(descriptor)) or not (wheels is None or wheels.is_dir()):
            waited = time.monotonic() - begun
            if taken:
                fcntl.flock(descriptor, fcntl.LOCK_UN)
            if taken and waited >= patience:
                raise TimeoutError(f"no wheels were fetched to {wheels}")
            if waited > MAX_WAIT_SECONDS:
                raise TimeoutError(
                    f"another process has worked on the wheels in {sets} for {MAX_WAIT_SECONDS} s. If it hangs, end it "
                    f"and start again. See which it is: fuser -v {sets}"
                )
            time.sleep(0.2)
        yield descriptor
    finally:
        os.close(descriptor)


def _takes(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            # Directory with the wheels, and with no others.
            "wheels": {"type": "path", "required": True},
            # The hosts' Python minor version, such as `3.11`.
            "python": {"type": "str", "required": True},
            # The directory that they are installed in on the hosts, which the code names as its place.
            "site": {"type": "path", "required": True},
            # For how many seconds to wait for the directory, where wheelhouse makes it meanwhile.
            "patience": {"type": "int", "default": 0},
        },
        supports_check_mode=True,
    )
    wheels, site, patience = Path(module.params["wheels"]), module.params["site"], module.params["patience"]
    own = sys.implementation.cache_tag  # cpython-311
    if own != "cpython-" + module.params["python"].replace(".", ""):
        module.exit_json(changed=False, sha256="")
    try:
        with contextlib.nullcontext() if module.check_mode else hold(wheels.parent, wheels, patience) as held:
            _make_right(module, wheels, site, held)
    except (OSError, BrokenProcessPool) as error:  # it saves time: without it the hosts compile
        module.warn(f"the modules of {wheels} can't be compiled here, so each host does: {error}")
        module.exit_json(changed=False, sha256="")


def _make_right(module: AnsibleModule, wheels: Path, site: str, held: int | None) -> None:
    comment, file = made_of(wheels, site), wheels / FILE
    changed = not is_made(file, comment)
    if changed and not module.check_mode:
        write(wheels, site, comment, held)
    digest = hashlib.sha256(file.read_bytes()).hexdigest() if file.exists() else ""
    module.exit_json(changed=changed, sha256=digest)


if __name__ == "__main__":
    main()
