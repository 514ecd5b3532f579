#!/usr/bin/python
"""Fetch each wheel of a lock file once, on the control machine, and prove those that are there.

Runs `pip download --require-hashes`, for one Python minor version and x86-64 Linux, for what is missing; where there
are several processors, several at once. A wheel that a directory beside this one has is linked from there and not
fetched again. Every file that is there already is proven against the lock's hashes; a damaged or left-over one is
removed. Waits while another works on any such directory there, or wheel_bytecode.

Returns:
    fetched: Requirements whose wheel was missing, here and in the directories beside this one.
    removed: Files that the lock does not know.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from ansible.module_utils.basic import AnsibleModule

MAX_PIPS = 4
MAX_WAIT_SECONDS = 3900  # jobs that were begun ahead live for 3600 (tasks/ahead.yml)
ERRORS = "errors"  # of a pip, beside what it fetches
BYTECODE = "modules.bytecode"  # of the module wheel_bytecode
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
def hold(sets: Path) -> Iterator[None]:
    """Keep others away from the directory of all sets of wheels; one that was begun ahead may be at work there.

    Raises TimeoutError.
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
        yield
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
            # Hash-locked requirements, as `uv pip compile --generate-hashes` writes them.
            "lock": {"type": "path", "required": True},
            # The hosts' Python minor version, such as `3.11`.
            "python": {"type": "str", "required": True},
            "dest": {"type": "path", "required": True},
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
        with contextlib.nullcontext() if module.check_mode else hold(directory.parent):
            _make_right(module, text, lock, directory)
    except TimeoutError as error:
        module.fail_json(msg=str(error))


def _make_right(module: AnsibleModule, text: str, lock: dict[str, set[str]], directory: Path) -> None:
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
    module.exit_json(changed=changed, fetched=missing, removed=unknown)


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
