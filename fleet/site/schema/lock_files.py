"""The lock files that hosts' environments are made of: where they are, and what is wrong with them."""

from __future__ import annotations

import functools
import glob
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from fleet.places import KIT, gpu_lock, lock_file
from fleet.site.schema.definition import definition
from fleet.site.schema.problems import show

_LOCKED = re.compile(r"^([A-Za-z0-9][A-Za-z0-9._-]*)(\[[^]]*\])?\s*==", re.MULTILINE)
_BRINGS_IN = re.compile(r"(-e|-r|-c|--editable|--requirement|--constraint)\b")
_HASH = re.compile(r"sha256:[0-9a-f]{64}|sha384:[0-9a-f]{96}|sha512:[0-9a-f]{128}")
_NEEDED = {"tensorflow", "tf_keras", "uv"}  # by each task, and by what installs the environment
LOCKS = ("release_lock", "release_lock_gpu")  # the latter counts where a host has a GPU


def lock_of(site: Mapping[str, Any], variable: str) -> str:
    """Return the path of a set of locks, as the role's defaults have it too; `variable` is one of LOCKS."""
    lock = site.get("release_lock") or definition().variables["release_lock"].schema["default"]
    return str(lock if variable == "release_lock" else site.get(variable) or gpu_lock(lock))


def lock_problems(lock: str, root: Path, gpu: bool, names: set[str]) -> Iterator[str]:
    """What is wrong with a set of locks; adds the distributions that they have to `names`."""
    path = lock_file(root, lock, gpu)
    files = sorted(path.parent.glob(f"{glob.escape(path.name)}-3.*.txt")) if path.parent.is_dir() else []
    if not files:
        short = re.sub(r"(-3\.[0-9]+)?\.txt$", "", lock)
        fix = (
            f"`psfleet lock {lock}` writes them, in a checkout `make lock LOCK={lock}`"
            if short == lock
            else f"Leave out -<python>.txt: {short}"
        )
        yield f"release_lock is {show(lock)}, and there is no file {path}-<python>.txt, such as -3.11.txt. {fix}"
    for file in files:
        try:
            if not file.is_file():
                raise ValueError("it is no regular file")
            text = file.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            yield f"the lock {file} can't be read: {error}"
            continue
        locked = {re.sub("[-_.]+", "_", name[0]).lower() for name in _LOCKED.findall(text)}
        names |= locked
        yield from _content_problems(file, text, locked)


def _content_problems(file: Path, text: str, locked: set[str]) -> Iterator[str]:
    """What is wrong with a lock that has these distributions."""
    if {"tensorflow", "tensorflow_cpu"} <= locked:
        yield (
            f"the lock {file} has both tensorflow and tensorflow-cpu, which bring the same files; expected one of "
            "them. Leave tensorflow-cpu out of your list: `psfleet lock` puts it in tensorflow's place where no "
            "host has a GPU"
        )
    lacks = _NEEDED - locked - ({"tensorflow"} if "tensorflow_cpu" in locked else set())
    if not any(True for _ in _requirements(text)):
        yield f"the lock {file} is empty; expected lines of name==version with hashes. `psfleet lock` writes them"
    elif wrong := _wrong_requirement(text):
        number, requirement, what = wrong
        yield (
            f"{file}:{number}: {show(requirement[:60].strip())} has {what}; expected name==version with its "
            "hashes, so that nothing else is ever installed. `psfleet lock` writes them"
        )
    elif lacks:
        yield (
            f"the lock {file} lacks {', '.join(sorted(lacks)).replace('_', '-')}, which every host needs; "
            f"expected psfleet's own packages beside yours. Add the lines of {KIT / 'locks/cpu.in'} to your list, "
            "and lock it again"
        )


@functools.cache
def _wrong_requirement(text: str) -> tuple[int, str, str] | None:
    """The first requirement of a lock that lacks something: the number of its line, itself, and what it has instead."""
    judged = ((number, each, _requirement_problem(each)) for number, each in _requirements(text))
    return next(((number, each, what) for number, each, what in judged if what), None)


def _requirements(text: str) -> Iterator[tuple[int, str]]:
    """The requirements of a lock, with the number of their first line."""
    lines = text.splitlines()
    number = 0
    while number < len(lines):
        first, whole = number, lines[number].partition(" #")[0]
        while whole.rstrip().endswith("\\") and number + 1 < len(lines):
            number += 1
            whole = whole.rstrip()[:-1] + lines[number]
        number += 1
        # Options such as --index-url name no requirement; those that bring in others do.
        if whole.strip() and (not whole.lstrip().startswith(("#", "-")) or _BRINGS_IN.match(whole.lstrip())):
            yield first + 1, whole


def _requirement_problem(requirement: str) -> str | None:
    """What a line of a lock lacks, so that pip would refuse it or install something else."""
    if _BRINGS_IN.match(requirement.lstrip()):
        return "its requirements in another place"
    pin = requirement.partition(";")[0].partition("--hash")[0]
    if "==" not in pin or "*" in pin:
        return "no version"
    hashes = re.findall(r"--hash=(\S*)", requirement)
    if not hashes:
        return "no hash"
    return None if all(_HASH.fullmatch(each) for each in hashes) else "a hash that is none of sha256"
