#!/usr/bin/python
"""Make a Python environment on a host hold exactly what a lock file says, from a directory of wheels.

Compares the environment with its lock and with the records of the installed wheels, file by file, on every run. A
file's size is always compared, the hash of its content for files up to 1 MiB (nearly all code). Installs what is
missing, wrong or damaged with uv, offline, with hashes, and compiles all but packages' tests. TensorFlow's headers are
left out. That they are missing is no damage. What wheelhouse has compiled beside the wheels is taken from
there, if its hash is right. An interrupted installation is completed by the next run. Everybody may read and run what
it holds, whatever root's umask is; wrong modes are found and fixed on every run. A comparison that found all right
notes when each file changed last (its ctime), outside of check mode. With `quick` an environment whose files have these
times still is not read. Any other is compared as ever. With `thorough` it compares the hash of every file, and finds
modules that no wheel has brought.

Returns:
    problems: What was found wrong, a line for each.
"""

from __future__ import annotations

import base64
import contextlib
import csv
import ctypes
import hashlib
import io
import json
import os
import re
import shutil
import stat
import struct
import sys
import time
import zipfile
import zlib
from pathlib import Path

from ansible.module_utils.basic import AnsibleModule

HASHED_BYTES = 2**20
PART_BYTES = 2**24
BYTECODE = "modules.bytecode"
# Two of five files, and a sixth of all bytes: for compilers, which the hosts don't have.
HEADERS = "tensorflow/include"
# What a comparison noted: only root may write there, and root alone could set a clock to forge a ctime.
SEEN = ".psfleet-compared"
# A file may change twice within one tick of the clock that its ctime has.
TICK_SECONDS = 1.0


def read_lock(text: str) -> dict[str, str]:
    """Read hash-locked requirements as {normalised name: version}."""
    return {_normal(name): version for name, version in re.findall(r"(?m)^([A-Za-z0-9._-]+)==([^\s;]+)", text)}


def find_problems(environment: Path, lock: dict[str, str], thorough: bool = False) -> dict[str, list[str]]:
    """Compare an environment with its lock and its wheels' records; `thorough`, with each file's hash.

    Returns:
        {normalised distribution name: what is wrong with it}; the name is empty for the environment itself.
    """
    problems: dict[str, list[str]] = {}
    if not os.access(environment / "bin" / "python", os.X_OK):
        return {"": [f"{environment} is no Python environment"]}
    installed: set[str] = set()
    for site in environment.glob("lib/python3.*/site-packages"):
        if thorough and (strangers := find_strangers(site)):
            problems[""] = strangers
        for directory in site.glob("*.dist-info"):
            name, _, version = directory.name.removesuffix(".dist-info").partition("-")
            installed.add(_normal(name))
            if lock.get(_normal(name)) != version:
                problems.setdefault(_normal(name), []).append(
                    f"{name} {version} is installed, the lock says {lock.get(_normal(name), 'none of it')}"
                )
            else:
                damage = _damaged_files(site, directory, None if thorough else HASHED_BYTES)
                if damage:
                    problems[_normal(name)] = damage
    for name in lock.keys() - installed:
        problems[name] = [f"{name} {lock[name]} is not installed"]
    return problems


def find_strangers(site: Path) -> list[str]:
    """List files among the packages that no record has; the compiler's are passed over."""
    recorded = {row[0] for directory in site.glob("*.dist-info") for row in _read_record(directory) or [] if row}
    found = []
    for place, _below, names in os.walk(site):
        below = os.path.relpath(place, site)
        compiled = os.path.basename(place) == "__pycache__"  # noqa: PTH119
        for name in names:
            path = name if below == "." else f"{below}/{name}"
            if path not in recorded and not (compiled and name.endswith(".pyc")):
                found.append(f"{site}/{path} is in no wheel's record")
    return sorted(found)


def find_shut(environment: Path) -> dict[str, int]:
    """Find what another user than root can't use: {path: the mode that it needs}. Links have no mode of their own."""
    shut = {}
    for place, _below, names in os.walk(environment):
        for path in (place, *(f"{place}/{name}" for name in names)):
            mode = os.lstat(path).st_mode
            # As chmod's go=rX: who may run a file, and who may enter a directory, is as for root.
            needed = mode | 0o044 | (0o011 if mode & 0o100 else 0)
            if mode != needed and not stat.S_ISLNK(mode):
                shut[path] = stat.S_IMODE(needed)
    return shut


def look_at_times(environment: Path, lock_text: str) -> tuple[str, float]:
    """Return one hash of all names and ctimes and of the lock, and the newest of those times, in seconds.

    A ctime can't be chosen, as an mtime can: each change of content, mode, owner or name sets it to the clock's time.
    """
    digest, newest = hashlib.sha256(lock_text.encode()), 0
    for place, below, names in os.walk(environment):
        below.sort()
        for name in sorted({*below, *names} - {SEEN}):
            path = f"{place}/{name}"
            changed = os.lstat(path).st_ctime_ns
            digest.update(os.fsencode(f"{path}\0{changed}\n"))
            newest = max(newest, changed)
    digest.update(b"%o" % environment.stat().st_mode)  # its ctime is that of what is noted in it
    return digest.hexdigest(), newest / 1e9


def note_times(environment: Path, lock_text: str, before: str, began: float) -> None:
    """Note the times of files that were compared since `began` and found right; `before` is their hash of then."""
    seen, newest = look_at_times(environment, lock_text)
    if seen == before and newest < began - TICK_SECONDS and seen != read_times(environment):
        partial = environment / f"{SEEN}.new"
        partial.write_text(seen)
        partial.replace(environment / SEEN)


def sync_files(place: Path) -> None:
    """Have the disk hold all that was written to a directory's file system."""
    descriptor = os.open(place, os.O_RDONLY | os.O_DIRECTORY)
    try:
        if ctypes.CDLL(None, use_errno=True).syncfs(descriptor):
            raise OSError(number := ctypes.get_errno(), os.strerror(number), str(place))
    finally:
        os.close(descriptor)


def read_times(environment: Path) -> str | None:
    try:
        return (environment / SEEN).read_text()
    except (OSError, ValueError):
        return None


def _say_shut(shut: dict[str, int]) -> list[str]:
    """Say of how many files and directories the modes are wrong."""
    if not shut:
        return []
    first = next(iter(shut))
    mode, more = stat.S_IMODE(os.lstat(first).st_mode), f" and {len(shut) - 1} more" if len(shut) > 1 else ""
    return [f"{first} has mode {mode:04o}; expected {shut[first]:04o}, or its users can't read it{more}"]


def _read_record(directory: Path) -> list[list[str]] | None:
    try:
        return list(csv.reader((directory / "RECORD").read_text(encoding="utf-8").splitlines()))
    except FileNotFoundError:
        return None


def _damaged_files(site: Path, directory: Path, hashed: int | None) -> list[str]:
    rows = _read_record(directory)
    if rows is None:
        return [f"{directory}/RECORD is missing"]
    damaged = []
    # Strings rather than paths: there are 16,000 files, and this runs on every host each time.
    for path, digest, size in (row for row in rows if len(row) == 3 and row[1]):
        file = f"{site}/{path}"
        try:
            actual = os.stat(file).st_size  # noqa: PTH116
            # Large files are compared by size alone: reading 1.4 GB of libraries on each run would take seconds a host.
            wrong = actual != int(size) or ((hashed is None or actual <= hashed) and _record_digest(file) != digest)
        except OSError:
            if not path.startswith(f"{HEADERS}/"):
                damaged.append(f"{file} is missing")
        else:
            if wrong:
                damaged.append(f"{file} is not as its wheel has it")
    return damaged


def _record_digest(file: str) -> str:
    return "sha256=" + base64.urlsafe_b64encode(_digest(file)).rstrip(b"=").decode()


def _digest(file: str) -> bytes:
    with open(file, "rb", buffering=0) as stream:  # noqa: PTH123
        digest = hashlib.sha256()
        while part := stream.read(PART_BYTES):
            digest.update(part)
    return digest.digest()


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


ARGUMENTS = {
    "dest": {"type": "path", "required": True},
    # Hash-locked requirements, `uv` among them.
    "lock": {"type": "path", "required": True},
    # Directory with the wheels. Needed only when something is to be installed.
    "wheels": {"type": "path", "required": True},
    # Whether every byte is compared. It takes a minute for an environment with TensorFlow.
    "thorough": {"type": "bool", "default": False},
    # Whether times that are those of the last comparison are enough.
    "quick": {"type": "bool", "default": False},
    # The hash of what wheelhouse has compiled beside the wheels; empty where it has not.
    "bytecode": {"type": "str", "default": ""},
    # The interpreter that the environment is made for; by default the one that runs this, whose version is the lock's.
    "python": {"type": "path", "default": sys.executable},
}


def main() -> None:
    module = AnsibleModule(argument_spec=ARGUMENTS, supports_check_mode=True)
    os.umask(0o022)  # root's own may be 077, and the tasks' user is another
    environment, lock_file = Path(module.params["dest"]), Path(module.params["lock"])
    if module.check_mode and not lock_file.exists():
        module.exit_json(changed=True, problems=[f"{environment} is to be made"])
    lock_text = lock_file.read_text()
    lock = read_lock(lock_text)
    began, (seen, _) = time.time(), look_at_times(environment, lock_text) if environment.is_dir() else ("", 0.0)
    if module.params["quick"] and seen and seen == read_times(environment):
        module.exit_json(changed=False, problems=[])
    problems = find_problems(environment, lock, module.params["thorough"])
    shut = find_shut(environment)
    found = [*_say_shut(shut), *sorted(line for lines in problems.values() for line in lines)]
    if found and not module.check_mode:
        for path, mode in shut.items():
            os.chmod(path, mode)  # noqa: PTH101
        if problems:
            _fix(module, environment, lock_text, problems)
        time.sleep(TICK_SECONDS)  # what was just written has times that can be noted then
        began, (seen, _) = time.time(), look_at_times(environment, lock_text)
        left = find_problems(environment, lock)
        if left:
            module.fail_json(msg=f"{environment} is still not as {lock_file} says: {json.dumps(left)[:2000]}")
    if not module.check_mode:
        if seen != read_times(environment):  # what a power failure leaves empty would count as compared, and as ready
            sync_files(environment)
        note_times(environment, lock_text, seen, began)
    module.exit_json(
        changed=bool(found),
        problems=found[:50],
        diff={"before": "".join(f"{line}\n" for line in found[:50]), "after": ""},
    )


def _fix(module: AnsibleModule, environment: Path, lock_text: str, problems: dict[str, list[str]]) -> None:
    wheels = Path(module.params["wheels"])
    # The cache lies beside the environment, so that files are linked rather than copied; it goes when all is installed.
    cache = environment.with_name(f".{environment.name}.cache")
    shutil.rmtree(cache, ignore_errors=True)
    run = {"environ_update": {"UV_CACHE_DIR": str(cache), "UV_OFFLINE": "1", "UV_NO_CONFIG": "1"}}
    command: list[str] = []
    try:
        cache.mkdir(parents=True)
        uv = _unpack_uv(module, wheels, lock_text, cache / "uv")
        if "" in problems:
            command = [uv, "venv", "--quiet", "--allow-existing", "--python", module.params["python"], str(environment)]
            module.run_command(command, check_rc=True, **run)
        (cache / "lock.txt").write_text(link_wheels(wheels, cache / "wheels", lock_text))
        command = [uv, "pip", "sync", "--quiet", "--python", str(environment / "bin" / "python"), "--require-hashes"]
        command += ["--no-index", "--find-links", str(cache / "wheels"), str(cache / "lock.txt")]
        command += [f"--reinstall-package={name}" for name in problems if name]
        code, _out, error = module.run_command(command, **run)
    except OSError as full:
        code, error = 1, str(full)
    shutil.rmtree(cache, ignore_errors=True)
    if code != 0:
        what = f"uv could not install {module.params['lock']} from {wheels}:\n{error.strip()}"
        module.fail_json(msg=say_full(environment, error) + what, cmd=command)
    python = str(environment / "bin" / "python")
    _code, magic, _ = module.run_command([python, "-c", "import importlib.util as u; print(u.MAGIC_NUMBER.hex())"])
    for site in environment.glob("lib/python3.*/site-packages"):
        if put_bytecode(site, wheels / BYTECODE, module.params["bytecode"], magic.strip()):
            continue
        # Not the packages' own tests, which are a fifth of all and which are not imported. Some hold examples of what
        # can't be compiled: those stay as they are, and the exit code says no more than that.
        module.run_command([python, "-m", "compileall", "-q", "-q", "-j", "0", "-x", "/tests/", str(site)])


def link_wheels(wheels: Path, links: Path, lock_text: str) -> str:
    """Link to wheels from a directory, but put a copy of TensorFlow's there, without headers.

    Returns the lock with the copy's hash. A wheel that the lock does not know stays as it is, for uv to refuse. The
    hash is the copy's: others may write to the shared path meanwhile.
    """
    links.mkdir()
    for wheel in wheels.glob("*.whl"):
        link = links / wheel.name
        if not wheel.name.startswith("tensorflow"):
            link.symlink_to(wheel)
            continue
        shutil.copyfile(wheel, link)
        if (digest := _digest(str(link)).hex()) in lock_text:
            take_headers_out(link)
            lock_text = lock_text.replace(digest, _digest(str(link)).hex())
    return lock_text


def take_headers_out(path: Path) -> None:
    """Take TensorFlow's headers out of a wheel, in parts: tasks may need the memory. Other members stay as they are."""
    with path.open("r+b") as file, zipfile.ZipFile(file, "a") as wheel:
        members = sorted(wheel.infolist(), key=lambda each: each.header_offset)
        ends = [*(each.header_offset for each in members[1:]), wheel.start_dir]
        wheel.filelist, wheel.start_dir = [], 0
        for each, end in zip(members, ends, strict=True):
            if not each.filename.startswith(f"{HEADERS}/"):
                begin, each.header_offset = each.header_offset, wheel.start_dir
                for at in range(begin, end, PART_BYTES):
                    file.seek(at)
                    part = file.read(min(PART_BYTES, end - at))
                    file.seek(wheel.start_dir)
                    wheel.start_dir += file.write(part)
                wheel.filelist.append(each)
        wheel.comment = b"without headers"  # and so the list of members is written


def say_full(environment: Path, error: str) -> str:
    """Say in the first words that a disk was full, where uv says so in its last; empty where it was not."""
    if "No space left on device" not in error and "Disk quota exceeded" not in error:
        return ""
    free = shutil.disk_usage(environment.parent).free / 1e6
    return (
        f"an environment does not fit into {environment.parent}: {free:,.0f} MB are free there now; expected 2,000 MB, "
        "or 8,000 with GPUs. "
    )


def put_bytecode(site: Path, archive: Path, digest: str, magic: str) -> bool:
    """Write the code that an archive has of modules beside them; returns False where the host has to compile.

    Each file is what the compiler would write: it counts as long as its module keeps its size and time.
    """
    try:
        data = archive.read_bytes() if digest else b""
        return hashlib.sha256(data).hexdigest() == digest and _put_code(site, data, magic)
    except (OSError, ValueError, zipfile.BadZipFile, zlib.error):
        return False


def _put_code(site: Path, data: bytes, magic: str) -> bool:
    tag = "cpython-" + site.parent.name.removeprefix("python").replace(".", "")
    with zipfile.ZipFile(io.BytesIO(data)) as opened:
        if json.loads(opened.comment)["magic"] != magic:
            return False
        for name in opened.namelist():
            place, _, module = f"{site}/{name}".rpartition("/")
            try:
                found = os.stat(f"{place}/{module}")  # noqa: PTH116
            except FileNotFoundError:
                continue
            times = struct.pack("<LLL", 0, int(found.st_mtime) & 0xFFFFFFFF, found.st_size & 0xFFFFFFFF)
            path = f"{place}/__pycache__/{module.removesuffix('.py')}.{tag}.pyc"
            _put_file(path, bytes.fromhex(magic) + times, opened.read(name))
    return True


def _put_file(path: str, header: bytes, code: bytes) -> None:
    """Write a module's compiled file whole or not at all; one that is right stays, since a task may read it."""
    with contextlib.suppress(FileNotFoundError), open(path, "rb") as file:  # noqa: PTH123
        if file.read() == header + code:
            return
    os.makedirs(os.path.dirname(path), exist_ok=True)  # noqa: PTH103, PTH120
    with open(f"{path}.new", "wb") as file:  # noqa: PTH123
        file.write(header + code)
    os.replace(f"{path}.new", path)  # noqa: PTH105


def _unpack_uv(module: AnsibleModule, wheels: Path, lock_text: str, target: Path) -> str:
    """Unpack the locked uv for this run; its wheel's hash is proven first, since root is going to run it."""
    found = sorted(wheels.glob("uv-*.whl"))
    if not found:
        module.fail_json(
            msg=f"no wheel of uv in {wheels} on this host: is the shared path mounted, and does the lock contain uv?"
        )
    data = found[0].read_bytes()
    if hashlib.sha256(data).hexdigest() not in lock_text:
        module.fail_json(msg=f"{found[0]} is not the wheel that the lock names. Remove it and run the playbook again")
    with zipfile.ZipFile(io.BytesIO(data)) as wheel:
        member = next(name for name in wheel.namelist() if name.endswith(".data/scripts/uv"))
        target.write_bytes(wheel.read(member))
    target.chmod(0o700)
    return str(target)


if __name__ == "__main__":
    main()
