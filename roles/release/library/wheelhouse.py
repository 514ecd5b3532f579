#!/usr/bin/python
"""Fetch each wheel of a lock file once, on the control machine, prove those that are there, and compile their modules.

Runs `pip download --require-hashes`, for one Python minor version and x86-64 Linux, for what is missing; where there
are several processors, several at once. A wheel that a directory beside this one has is linked from there and not
fetched again. Every file that is there already is proven against the lock's hashes; a damaged or left-over one is
removed. Waits while another works on any such directory there.

Beside the wheels `modules.bytecode` is written, a zip with the code of each module but packages' tests, for all hosts
with the same Python. There is none where this machine's Python is not the hosts', whose minor version decides, or where
the modules can't be compiled: the hosts do so then.

Returns:
    fetched: Requirements whose wheel was missing, here and in the directories beside this one.
    removed: Files that the lock does not know.
    sha256: The hash of `modules.bytecode`; empty where there is none.
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
import shutil
import subprocess
import sys
import time
import warnings
import zipfile
import zlib
from collections.abc import Collection, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from importlib.util import MAGIC_NUMBER
from pathlib import Path

from ansible.module_utils.basic import AnsibleModule

MAX_PIPS = 4
MAX_WAIT_SECONDS = 3900  # jobs that were begun ahead live for 3600 (tasks/ahead.yml)
ERRORS = "errors"  # of a pip, beside what it fetches
BYTECODE = "modules.bytecode"
TESTS = re.compile("/tests/")  # as compileall leaves them out on a host
# Where a wheel has files that don't lie beside its packages.
DATA = re.compile(r"[^/]+\.data/(?:(?:purelib|platlib)/(.*)|.*)")
# The platforms that a host with glibc 2.28 or newer takes wheels for.
PLATFORMS = [f"manylinux_2_{minor}_x86_64" for minor in range(28, 4, -1)] + [
    "manylinux2014_x86_64",
    "manylinux2010_x86_64",
    "manylinux1_x86_64",
    "linux_x86_64",
]


def read_lock(text: str) -> dict[str, set[str]]:
    """Read hash-locked requirements as {"name==version": hexadecimal SHA-256 digests}."""
    return {
        name: set(re.findall(r"--hash=sha256:([0-9a-f]{64})", requirement))
        for name, requirement in _requirements(text).items()
    }


def excerpt(text: str, names: Collection[str]) -> str:
    """Return a lock file with the named requirements alone."""
    return "".join(f"{requirement}\n" for name, requirement in _requirements(text).items() if name in names)


def _requirements(text: str) -> dict[str, str]:
    found = {}
    for requirement in re.split(r"\n(?=\S)", text.rstrip("\n")):
        name = re.match(r"[A-Za-z0-9._-]+==[^\s;]+", requirement)
        if name:
            found[name[0]] = requirement
    return found


def compare(lock: dict[str, set[str]], directory: Path) -> tuple[list[str], list[str]]:
    """Find the requirements without a wheel and the files that belong to none."""
    files = _digests(directory.iterdir()) if directory.is_dir() else {}
    missing = [name for name, hashes in lock.items() if not hashes & set(files.values())]
    known = set().union(*lock.values())
    return missing, sorted(name for name, digest in files.items() if digest not in known and name != BYTECODE)


def adopt(lock: dict[str, set[str]], missing: Collection[str], directory: Path) -> None:
    """Link missing wheels from the sets beside this one, such as the CPU set's TensorFlow for the CUDA set."""
    wanted = set().union(*(lock[name] for name in missing))
    for beside in sorted(directory.parent.iterdir()):
        if beside.is_dir() and beside != directory:
            for name, digest in _digests(beside.glob("*.whl")).items():
                if digest in wanted and not (directory / name).exists():
                    (directory / name).hardlink_to(beside / name)


def _digests(files: Iterable[Path]) -> dict[str, str]:
    listed = list(files)
    # The CUDA set is 3.5 GB: all cores hash at once.
    with ThreadPoolExecutor() as pool:
        return dict(zip((file.name for file in listed), pool.map(_digest, listed), strict=True))


def _digest(file: Path) -> str:
    # The control machine's Python has file_digest; mypy takes it for one of the hosts', which may be older.
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()  # type: ignore[attr-defined]


@contextlib.contextmanager
def hold(sets: Path) -> Iterator[int]:
    """Keep others away from the directory of all sets of wheels; one that was begun ahead may be at work there.

    Gives the descriptor that does so, which no process that could outlive this one may have. Raises TimeoutError.
    """
    sets.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(sets, os.O_RDONLY)
    end = time.monotonic() + MAX_WAIT_SECONDS
    try:
        while not _takes(descriptor):
            if time.monotonic() > end:
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


def write_bytecode(wheels: Path, site: str, comment: str, held: int | None = None) -> None:
    """Write the file, whole or not at all; where this process is killed, its workers don't keep what it `held`."""
    partial = wheels.with_name(f"{wheels.name}.{BYTECODE}.{os.getpid()}")
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
        partial.replace(wheels / BYTECODE)
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


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            # Hash-locked requirements, as `uv pip compile --generate-hashes` writes them.
            "lock": {"type": "path", "required": True},
            # The hosts' Python minor version, such as `3.11`.
            "python": {"type": "str", "required": True},
            "dest": {"type": "path", "required": True},
            # The directory that they are installed in on the hosts, which the code names as its place.
            "site": {"type": "path", "required": True},
        },
        supports_check_mode=True,
    )
    lock_file, directory = Path(module.params["lock"]), Path(module.params["dest"])
    if not lock_file.is_file():
        module.fail_json(
            msg=f"no lock {str(lock_file)!r} for Python {module.params['python']}, which a host has. `psfleet lock` "
            "writes one for each Python that TensorFlow 2.21 knows (3.10 to 3.13)"
        )
    text = lock_file.read_text()
    lock = read_lock(text)
    try:
        with contextlib.nullcontext() if module.check_mode else hold(directory.parent) as held:
            _make_right(module, text, lock, directory, held)
    except TimeoutError as error:
        module.fail_json(msg=str(error))


def _make_right(module: AnsibleModule, text: str, lock: dict[str, set[str]], directory: Path, held: int | None) -> None:
    missing, unknown = compare(lock, directory)
    changed = bool(missing or unknown)
    if not module.check_mode:
        directory.mkdir(parents=True, exist_ok=True)
        for name in unknown:
            (directory / name).unlink()
        if missing:
            adopt(lock, missing, directory)
            missing, _ = compare(lock, directory)
        if missing:
            _download(module, [excerpt(text, [name]) for name in missing], directory)
    compiled, digest = _compile(module, directory, held)
    module.exit_json(changed=changed or compiled, fetched=missing, removed=unknown, sha256=digest)


def _compile(module: AnsibleModule, wheels: Path, held: int | None) -> tuple[bool, str]:
    """Write the modules' code where it is missing; returns whether it was, and the file's hash."""
    if sys.implementation.cache_tag != "cpython-" + module.params["python"].replace(".", ""):
        return False, ""
    comment, file = made_of(wheels, module.params["site"]), wheels / BYTECODE
    try:
        if changed := not is_made(file, comment):
            if module.check_mode:
                return True, ""
            write_bytecode(wheels, module.params["site"], comment, held)
        return changed, _digest(file)
    except (OSError, BrokenProcessPool, zipfile.BadZipFile) as error:  # it saves time: without it the hosts compile
        module.warn(f"the modules of {wheels} can't be compiled here, so each host does: {error}")
        return False, ""


def _download(module: AnsibleModule, requirements: Sequence[str], directory: Path) -> None:
    """Fetch by several pips at once: each uses one processor, and for most wheels more of it than of the network."""
    partial = directory.with_name(directory.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    count = min(os.cpu_count() or 1, MAX_PIPS, len(requirements))
    places = [partial / str(number) for number in range(count)]
    for number, place in enumerate(places):
        place.mkdir(parents=True)
        (place / "requirements.txt").write_text("".join(requirements[number::count]))
    pips = {place: _begin_pip(module, place) for place in places}
    with ThreadPoolExecutor() as pool:
        ends = {pool.submit(pip.wait): place for place, pip in pips.items()}
        failed = next((ends[end] for end in as_completed(ends) if end.result() != 0), None)
        if failed:
            for pip in pips.values():
                pip.kill()  # else the error would come when the last of them has ended
    if failed:
        module.fail_json(
            msg=f"pip could not fetch the wheels of {module.params['lock']} "
            "(it needs the package index, and hashes that match):\n"
            + "\n".join((failed / ERRORS).read_text(errors="replace").strip().splitlines()[-15:]),
            cmd=pips[failed].args,
        )
    for file in partial.glob("*/*.whl"):
        file.replace(directory / file.name)
    shutil.rmtree(partial)


def _begin_pip(module: AnsibleModule, place: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "--progress-bar=off"]
    command += ["--require-hashes", "--no-deps", "--only-binary=:all:"]
    command += ["--implementation=cp", "--python-version", module.params["python"]]
    command += [f"--abi=cp{module.params['python'].replace('.', '')}", "--abi=abi3", "--abi=none"]
    command += [f"--platform={platform}" for platform in PLATFORMS]
    command += ["--requirement", str(place / "requirements.txt"), "--dest", str(place)]
    # pip holds all that it downloads in the directory for temporary files, which Debian 13 has in memory.
    environment = {**os.environ, "TMPDIR": str(place)}
    with (place / ERRORS).open("wb") as errors:
        return subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=errors, env=environment
        )


if __name__ == "__main__":
    main()
