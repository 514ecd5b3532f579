"""`psfleet lock`: the hosts' lock files for each Python, resolved by uv from a list of packages.

There are three: of clusters without GPUs, and of hosts without and with GPUs in other clusters.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

from fleet.errors import OperatorMistake
from fleet.places import KIT, NO_GPU, gpu_lock, site, site_file

PYTHONS = ("3.10", "3.11", "3.12", "3.13")
# The hosts are x86-64, and TensorFlow's wheels need no newer glibc. The names of an environment and its lock are by
# content, so nothing stands in the files that differs by who made them.
_COMPILE = (
    *("pip", "compile", "--quiet", "--generate-hashes", "--no-annotate", "--custom-compile-command", "make lock"),
    *("--python-platform", "x86_64-manylinux_2_28", "--no-emit-index-url"),
)
# A build of one's own, such as 2.21.0+mine, has no tensorflow-cpu of its version.
_TENSORFLOW = re.compile(r"^tensorflow==([^+\s]+)\s", re.MULTILINE)


def write_locks(name: str, say: Callable[[str], None], run: Callable[..., object] = subprocess.run) -> None:
    """Resolve NAME.in of the site's folder to NAME-<python>.txt, and to the locks with CUDA and without GPUs beside it.

    What is locked already keeps its versions. Raises OperatorMistake without the list, and where uv finds no solution.
    """
    lock = site_file(name.removesuffix(".in"))
    wanted = lock.with_name(f"{lock.name}.in")
    if not wanted.is_file():
        raise OperatorMistake(
            f"{wanted} is missing; expected the packages that the hosts need, a line each. Begin with psfleet's own, "
            f"and add yours: install -D -m 644 {KIT / 'locks/cpu.in'} {wanted}"
        )
    cuda = lock.with_name(Path(gpu_lock(os.path.relpath(lock, site()))).name)
    for python in PYTHONS:
        plain = Path(f"{lock}-{python}.txt")
        _compile(python, plain, [str(wanted)], run)
        larger, smaller = (Path(f"{each}-{python}.txt") for each in (cuda, f"{lock}{NO_GPU}"))
        _compile(python, larger, [str(wanted), str(KIT / "locks/cuda.in"), "-c", str(plain)], run)
        if found := _TENSORFLOW.search(plain.read_text(encoding="utf-8")):
            sources = [str(wanted), "-", "--override", str(KIT / "locks/without-tensorflow.in"), "-c", str(plain)]
            _compile(python, smaller, sources, run, f"tensorflow-cpu=={found[1]}\n")
        else:
            smaller.unlink(missing_ok=True)  # clusters without GPUs have `plain`
        say(f"wrote {plain}, {larger.name}" + (f" and {smaller.name}" if found else ""))


def _compile(python: str, lock: Path, sources: list[str], run: Callable[..., object], more: str = "") -> None:
    """Resolve the sources to a lock; `more` is what a source `-` has."""
    from uv import find_uv_bin

    command = [find_uv_bin(), *_COMPILE, "--python-version", python, *sources, "-o", str(lock)]
    try:
        run(command, check=True, input=more, text=True)
    except subprocess.CalledProcessError as error:
        raise OperatorMistake(f"{lock} can't be resolved: what uv said stands above") from error
