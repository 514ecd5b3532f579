#!/usr/bin/python
"""Fetch each wheel of a lock file once, on the control machine, and prove those that are there."""

from __future__ import annotations

import hashlib
import re
import shutil
import sys
from pathlib import Path

from ansible.module_utils.basic import AnsibleModule

DOCUMENTATION = r"""
module: wheelhouse
short_description: Make a directory hold exactly the wheels of a lock file
description:
  - Runs C(pip download --require-hashes) for one Python minor version and x86-64 Linux, when a wheel is missing.
  - Every file that is there already is proven against the lock's hashes; a damaged or left-over one is removed.
options:
  lock:
    description: Hash-locked requirements, as C(uv pip compile --generate-hashes) writes them.
    type: path
    required: true
  python:
    description: The hosts' Python minor version, such as V(3.11).
    type: str
    required: true
  dest:
    description: The directory.
    type: path
    required: true
author:
  - psfleet
"""
EXAMPLES = r"""
- name: Fetch the wheels
  wheelhouse:
    lock: locks/cpu-3.11.txt
    python: "3.11"
    dest: .cache/wheels/3.11
  delegate_to: localhost
"""
RETURN = r"""
fetched:
  description: Requirements whose wheel was missing.
  type: list
  elements: str
  returned: success
removed:
  description: Files that the lock does not know.
  type: list
  elements: str
  returned: success
"""

# The platforms that a host with glibc 2.28 or newer takes wheels for.
PLATFORMS = [f"manylinux_2_{minor}_x86_64" for minor in range(28, 4, -1)] + [
    "manylinux2014_x86_64",
    "manylinux2010_x86_64",
    "manylinux1_x86_64",
    "linux_x86_64",
]


def read_lock(text: str) -> dict[str, set[str]]:
    """Read hash-locked requirements as {"name==version": hexadecimal SHA-256 digests}."""
    lock: dict[str, set[str]] = {}
    for requirement in re.split(r"\n(?=\S)", text):
        name = re.match(r"[A-Za-z0-9._-]+==[^\s;]+", requirement)
        if name:
            lock[name[0]] = set(re.findall(r"--hash=sha256:([0-9a-f]{64})", requirement))
    return lock


def compare(lock: dict[str, set[str]], directory: Path) -> tuple[list[str], list[str]]:
    """Find the requirements without a wheel and the files that belong to none."""
    files = {file.name: _digest(file) for file in directory.iterdir()} if directory.is_dir() else {}
    missing = [name for name, hashes in lock.items() if not hashes & set(files.values())]
    known = set().union(*lock.values())
    return missing, sorted(name for name, digest in files.items() if digest not in known)


def _digest(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "lock": {"type": "path", "required": True},
            "python": {"type": "str", "required": True},
            "dest": {"type": "path", "required": True},
        },
        supports_check_mode=True,
    )
    lock_file, directory = Path(module.params["lock"]), Path(module.params["dest"])
    if not lock_file.is_file():
        module.fail_json(
            msg=f"no lock {str(lock_file)!r} for Python {module.params['python']}, which a host has. `make lock` "
            "writes one for each Python that TensorFlow 2.21 knows (3.10 to 3.13)"
        )
    missing, unknown = compare(read_lock(lock_file.read_text()), directory)
    if missing and not module.check_mode:
        _download(module, lock_file, directory)
    if not module.check_mode:
        for name in unknown:
            (directory / name).unlink()
    module.exit_json(changed=bool(missing or unknown), fetched=missing, removed=unknown)


def _download(module: AnsibleModule, lock_file: Path, directory: Path) -> None:
    partial = directory.with_name(directory.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    directory.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "--progress-bar=off"]
    command += ["--require-hashes", "--no-deps", "--only-binary=:all:", "--find-links", str(directory)]
    command += ["--implementation=cp", "--python-version", module.params["python"]]
    command += [f"--abi=cp{module.params['python'].replace('.', '')}", "--abi=abi3", "--abi=none"]
    command += [f"--platform={platform}" for platform in PLATFORMS]
    code, _out, error = module.run_command([*command, "--requirement", str(lock_file), "--dest", str(partial)])
    if code != 0:
        module.fail_json(
            msg=f"pip could not fetch the wheels of {lock_file} (it needs the package index, and hashes that match):\n"
            + "\n".join(error.strip().splitlines()[-15:]),
            cmd=command,
        )
    for file in partial.iterdir():
        file.replace(directory / file.name)
    partial.rmdir()


if __name__ == "__main__":
    main()
