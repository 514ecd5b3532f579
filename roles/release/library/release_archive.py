#!/usr/bin/python
"""Build the archive of one release on the control machine: the kit's package, the user's program and the locks.

Packs the kit's `trainer` package, the user's program and the lock files into one archive. The same content gives the
same archive, byte by byte, and so the same name. The archive has a list of its files with their hashes, `SHA256SUMS`,
as sha256sum(1) reads it.

Returns:
    id: The release's name, 12 hexadecimal digits.
    archive: Path of the archive.
    environments: For each Python minor version that has a lock, the environment's name and the lock's path in
        the release.
    gpu_environments: The same for the hosts with GPUs.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import sys
import tarfile
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ansible.module_utils.basic import AnsibleModule

# Code is kilobytes. What is larger is data in the wrong place, or an environment that was left in the directory.
MAX_PROGRAM_BYTES = 64 * 2**20
_MAX_SIZE = f"{MAX_PROGRAM_BYTES // 2**20} MiB"
MAX_PROGRAM_FILES = 50_000
SUMS = "SHA256SUMS"
OWN_NAMES = ("trainer", "trainer.py", "locks", "env", "release.json", SUMS, f"{SUMS}.sig")
# The program stands before these on sys.path. `test` is Python's too, and is not imported.
LIBRARIES = ("tensorflow", "keras", "tf_keras", "numpy")
IGNORED_SUFFIXES = (".pyc", ".pyo", ".egg-info", ".dist-info")
EPOCH = 1577836800  # a fixed time for all files, since a file's age is no part of a release


class ReleaseError(ValueError):
    """The program can't be shipped. The message names the value, what was expected and the fix."""


def read_program(source: str) -> dict[str, bytes]:
    """Read the user's program as {path in the release: content}.

    Raises:
        ReleaseError: no such directory or wheel, a name that is taken, too much of it, or nothing of Python's.
        OSError: it can't be read.
    """
    if not source:
        return {}
    path = Path(source)
    if path.is_dir():
        files = dict(_read_directory(path))
    elif path.suffix == ".whl" and path.is_file():
        files = dict(_read_wheel(path))
    else:
        raise ReleaseError(
            f"release_program: {source!r} is neither a directory nor a wheel. "
            "Name the directory that holds your package (or a .whl file), relative to the site's folder"
        )
    _check_names(source, files)
    return files


def _check_names(source: str, files: Mapping[str, bytes]) -> None:
    """Raise ReleaseError for a program without Python, or with a name that is taken."""
    modules = {name for name in files if "/" not in name and name.endswith(".py")}
    modules |= {name.partition("/")[0] for name in files if name.count("/") == 1 and name.endswith("/__init__.py")}
    for name in sorted({name.partition("/")[0] for name in files}):
        module = name.removesuffix(".py")
        if name in OWN_NAMES:
            why = "a name that psfleet uses itself"
        elif name in modules and (module in LIBRARIES or module in sys.stdlib_module_names - {"test"}):
            why = f"which every `import {module}` on the hosts would get instead of the library of this name"
        else:
            continue
        raise ReleaseError(
            f"release_program: {source!r} brings {name!r}, {why}. "
            "Rename your package, and the program in trainer_run with it"
        )
    for name in files:
        if set(name) & set("\n\r\\"):  # sha256sum writes such a name in another way
            raise ReleaseError(
                f"release_program: {source!r} holds the file {name!r}. Rename it: a release has no file with a line "
                "break or a backslash in its name"
            )
    if not any(name.endswith(".py") for name in files):
        raise ReleaseError(
            f"release_program: {source!r} holds no Python file. Name the directory that holds your package"
        )


def _read_directory(path: Path) -> Iterator[tuple[str, bytes]]:
    root = path.parent if (path / "__init__.py").exists() else path
    if path.resolve() == Path("/"):
        raise ReleaseError(f"release_program: {str(path)!r} is the whole machine. Name the directory of your package")
    total = number = 0
    for place, below, names in os.walk(path):
        below[:] = sorted(each for each in below if not _is_ignored(each))
        for link in (Path(place, each) for each in below):
            if link.is_symlink() and any(link.glob("*.py")):
                raise ReleaseError(
                    f"release_program: {str(link)!r} is a link to a directory with Python files, which a release does "
                    "not follow. Put the directory itself there, or name the one that holds it in release_program"
                )
        for file in (Path(place, name) for name in sorted(names) if not _is_ignored(name)):
            if not file.is_file():
                continue
            number += 1
            total += file.stat().st_size
            if total > MAX_PROGRAM_BYTES or number > MAX_PROGRAM_FILES:
                most = f"{MAX_PROGRAM_FILES:,} files" if number > MAX_PROGRAM_FILES else _MAX_SIZE
                raise _too_large(path, f"{most} (at {file})")
            yield file.relative_to(root).as_posix(), file.read_bytes()


def _too_large(path: Path, most: str) -> ReleaseError:
    return ReleaseError(
        f"release_program: {str(path)!r} is larger than {most}. "
        "A release carries code; put data on the shared path, and keep environments out of the directory"
    )


def _is_ignored(name: str) -> bool:
    # psfleet-runs: what `python -m trainer local` leaves in the directory where it is typed.
    return name.startswith(".") or name in ("__pycache__", "psfleet-runs") or name.endswith(IGNORED_SUFFIXES)


def _read_wheel(path: Path) -> Iterator[tuple[str, bytes]]:
    try:
        with zipfile.ZipFile(path) as wheel:
            if sum(info.file_size for info in wheel.infolist()) > MAX_PROGRAM_BYTES:
                raise _too_large(path, _MAX_SIZE)
            for info in wheel.infolist():
                if info.filename.endswith((".so", ".pyd")):
                    raise ReleaseError(
                        f"release_program: {str(path)!r} is no pure-Python wheel (it holds {info.filename}). "
                        "Add it to the locked requirements instead (release_lock)"
                    )
                if not info.is_dir() and ".dist-info/" not in info.filename:
                    yield info.filename, wheel.read(info)
    except zipfile.BadZipFile as error:
        raise ReleaseError(f"release_program: {str(path)!r} is no wheel: {error}. Build it again") from error


def read_locks(lock: str, setting: str = "release_lock") -> dict[str, bytes]:
    """Read the lock files as {Python minor version: content}; `setting` is where the path comes from.

    Raises:
        ReleaseError: there is none.
    """
    path = Path(lock)
    locks = {
        file.stem.removeprefix(f"{path.name}-"): file.read_bytes() for file in path.parent.glob(f"{path.name}-3.*.txt")
    }
    if not locks:
        raise ReleaseError(
            f"{setting}: no file {lock}-<python>.txt, such as {lock}-3.11.txt. `psfleet lock locks/mine` "
            "writes those of locks/mine.in: locks/mine, locks/mine-cuda and locks/mine-no-gpu "
            "(in a checkout: make lock LOCK=locks/mine)"
        )
    return dict(sorted(locks.items()))


def build(kit: str, program: str, lock: str, lock_gpu: str | None = None) -> tuple[dict[str, Any], bytes]:
    """Put a release together.

    Returns:
        The release's description, as `gather` has it, and its archive, a gzipped tar.
    """
    release, files = gather(kit, program, lock, lock_gpu)
    return release, pack(files)


def gather(kit: str, program: str, lock: str, lock_gpu: str | None = None) -> tuple[dict[str, Any], dict[str, bytes]]:
    """Read what makes a release.

    Returns:
        The release's description (`id`, `environments`, with `lock_gpu` also `gpu_environments`) and its files, {path
        in the release: content}.
    """
    package = Path(kit)
    files = read_program(program)
    files |= {f"trainer/{name}": data for name, data in _read_directory_flat(package)}
    release: dict[str, Any] = {"environments": _add_locks(files, lock, "release_lock")}
    if lock_gpu is not None:
        release["gpu_environments"] = _add_locks(files, lock_gpu, "release_lock_gpu")
    digest = hashlib.sha256()
    for name, data in sorted(files.items()):
        digest.update(f"{name}\0{len(data)}\0".encode() + data)
    release = {"id": digest.hexdigest()[:12], **release}
    files["release.json"] = (json.dumps(release, indent=2) + "\n").encode()
    files[SUMS] = list_files(release["id"], files)
    return release, files


def list_files(release: str, files: Mapping[str, bytes]) -> bytes:
    """Write the list that is signed: the release's name, which a signature of another one would lack, and its files."""
    lines = [f"{hashlib.sha256(data).hexdigest()}  {name}\n" for name, data in sorted(files.items())]
    return "".join([f"# psfleet release {release}\n", *lines]).encode()


def _add_locks(files: dict[str, bytes], lock: str, setting: str) -> dict[str, dict[str, str]]:
    environments = {}
    for python, data in read_locks(lock, setting).items():
        name = f"{Path(lock).name}-{python}"
        if files.get(f"locks/{name}.txt", data) != data:
            raise ReleaseError(f"{setting}: {lock!r} has the name of another lock. Give one of them another file name")
        files[f"locks/{name}.txt"] = data
        environments[python] = {"name": f"{name}-{hashlib.sha256(data).hexdigest()[:12]}", "lock": f"locks/{name}.txt"}
    return environments


def _read_directory_flat(package: Path) -> Iterator[tuple[str, bytes]]:
    for name, data in _read_directory(package):
        yield name.removeprefix(f"{package.name}/"), data


def pack(files: Mapping[str, bytes]) -> bytes:
    """Return the archive of a release's files, a gzipped tar."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for name, data in sorted(files.items()):
            info = tarfile.TarInfo(name)
            info.size, info.mode, info.mtime = len(data), 0o644, EPOCH
            info.uname = info.gname = "root"
            tar.addfile(info, io.BytesIO(data))
    # The most that zlib can do takes twice as long and saves half a percent.
    return gzip.compress(buffer.getvalue(), compresslevel=6, mtime=0)


def keep(archive: bytes, release: str, directory: Path) -> Path:
    """Keep an archive in a directory of the control machine; return its path."""
    path = directory / f"{release}.tar.gz"
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists() or path.read_bytes() != archive:
        partial = path.with_suffix(".partial")
        partial.write_bytes(archive)
        partial.replace(path)
    return path


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            # Directory of the `trainer` package.
            "kit": {"type": "path", "required": True},
            # The user's program: a directory of packages and modules, one package, or a pure-Python
            # wheel. Empty means that the program comes with the kit (an example).
            "program": {"type": "str", "default": ""},
            # Path of the lock files without `-<python>.txt`, such as `locks/cpu`.
            "lock": {"type": "path", "required": True},
            # The same for the hosts with GPUs. Left out where there are none.
            "lock_gpu": {"type": "path"},
            # Directory for the archives.
            "dest": {"type": "path", "required": True},
        },
        supports_check_mode=True,
    )
    try:
        release, data = build(*(module.params[name] for name in ("kit", "program", "lock", "lock_gpu")))
    except ReleaseError as error:
        module.fail_json(msg=str(error))
    # A cache of this machine, and nothing that a host sees: writing it is no change, and check mode needs it too.
    archive = keep(data, release["id"], Path(module.params["dest"]))
    module.exit_json(changed=False, archive=str(archive.resolve()), **release)


if __name__ == "__main__":
    main()
