"""Where psfleet's own files lie, and the folder that an operator's relative paths start from."""

from __future__ import annotations

import importlib.util
import os
import sys
from functools import cache
from pathlib import Path
from typing import Any

from fleet.errors import OperatorMistake
from fleet.files import control_file

CODE = Path(__file__).resolve().parents[1]  # has the packages `fleet` and `trainer`
# A checkout has everything in one folder. An installed package keeps what is no Python package in one of its own.
KIT = CODE if (CODE / "site.yml").is_file() else CODE / "psfleet"
# Ansible looks for roles beside a playbook: an installed package has them there, and a checkout a link. So a playbook
# that is begun in another folder comes as far as the preflight, which says where to go.
ROLES = KIT / "roles" if (KIT / "roles").is_dir() else KIT / "ansible" / "roles"
NO_GPU = "-no-gpu"  # ends the name of a lock with tensorflow-cpu
_SITE = ("ansible.cfg", "fabfile.py", "site.yml")


def site() -> Path:
    """Return the site's folder: the one with an ansible.cfg, a fabfile.py and a site.yml, here or above.

    Elsewhere it is the folder of ANSIBLE_CONFIG, or the checkout that this code is in. Raises OperatorMistake without.
    """
    found = _folder(Path.cwd(), os.environ.get("ANSIBLE_CONFIG", ""))
    if found is None:
        raise OperatorMistake(
            f"{Path.cwd()} is in no site's folder; expected one with {', '.join(_SITE)}, here or above. Go into "
            "yours, or make one: psfleet init DIR HOST..."
        )
    return found


@cache
def _folder(start: Path, configuration: str) -> Path | None:
    folders = [start, *start.parents, *([Path(configuration).absolute().parent] if configuration else [])]
    if KIT == CODE:
        folders.append(CODE)
    return next(filter(is_site, folders), None)


def is_site(folder: Path) -> bool:
    """Whether a folder is a site's."""
    return all((folder / name).is_file() for name in _SITE)


def site_file(text: str) -> Path:
    """Return where a path of the inventory leads: from the site's folder, or from `~`."""
    return control_file(site(), text)


def lock_file(root: Path, text: str, gpu: bool) -> Path:
    """Return a lock's path without its `-<python>.txt`: the site's own, and psfleet's where the site has none.

    `gpu` is whether the cluster has hosts with GPUs. Where it has none, the lock without GPUs beside it counts, if any.
    """
    own = control_file(root, text)
    path = own if has_lock(own) or not has_lock(KIT / text) else KIT / text
    smaller = Path(f"{path}{NO_GPU}")
    return path if gpu or not has_lock(smaller) else smaller


def role_module(role: str, name: str) -> Any:
    """Import a module of a role's library: Ansible sends it to a host, and what is in it may be needed here as well."""
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, ROLES / role / "library" / f"{name}.py")
        assert spec
        assert spec.loader
        sys.modules[name] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return sys.modules[name]


def has_lock(path: Path) -> bool:
    """Whether there are lock files that begin so."""
    return path.parent.is_dir() and any(each.name.startswith(f"{path.name}-3.") for each in path.parent.iterdir())


def gpu_lock(lock: str) -> str:
    """Return the path of the lock for hosts with GPUs that belongs to another, where the inventory names none."""
    return "locks/cuda" if lock == "locks/cpu" else f"{lock}-cuda"
