"""`fab render`: the same cluster for another manager, as text."""

from __future__ import annotations

import re
from collections.abc import Mapping

from fleet.actions.console import Console
from fleet.errors import OperatorMistake
from fleet.planning.decision import check_names
from fleet.render import SHARED_DIR, kubernetes, slurm, spark, wanted
from fleet.site.inventory import Inventory
from fleet.site.schema.problems import show

MANAGERS = ("kubernetes", "slurm", "spark")
# A label of DNS, short enough for the pods' names made of it.
NAME = re.compile(r"[a-z]([a-z0-9-]{0,38}[a-z0-9])?")
# By flag: what it may be, and what is expected, of a value that the text has as it is.
WORDS = {
    "shared-dir": (re.compile(r"/[ -~]*"), "an absolute path, such as /srv/trainer"),
    "python": (re.compile(r"[ -~]+"), "a program of the nodes, such as /opt/venv/bin/python"),
    "image": (re.compile(r"[A-Za-z0-9][\w./:@-]*", re.ASCII), "an image, such as registry.example.org/mine:1"),
    "size": (
        re.compile(r"(?![0.]+[A-Za-z]*$)[0-9]+([.][0-9]+)?([KMGTPE]i|[kMGTPE])?"),
        "a size as Kubernetes has it, such as 100Gi",
    ),
    "storage-class": (
        re.compile(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?"),
        "a storage class's name: small letters, digits, dots and hyphens, such as nfs-client",
    ),
}


def render(
    inventory: Inventory,
    console: Console,
    manager: str,
    name: str,
    run: str | None = None,
    program: str | None = None,
    shared_dir: str | None = None,
    image: str | None = None,
    size: str = "100Gi",
    storage_class: str | None = None,
    python: str = "python",
) -> None:
    """Print what `kubectl apply -f -`, `sbatch` or `spark-submit` takes.

    Raises OperatorMistake for another manager, a wrong word, and for Kubernetes without an image.
    """
    if manager not in MANAGERS:
        raise OperatorMistake(f"{manager!r} is none of {', '.join(MANAGERS)}: fab render kubernetes --image IMAGE")
    if not NAME.fullmatch(name):
        raise OperatorMistake(
            f"--name {name!r} can't name pods: expected up to 40 small letters, digits and hyphens, such as psfleet"
        )
    check_names(run, program)
    words = {"shared-dir": shared_dir, "python": python, "size": size, "storage-class": storage_class}
    _check_words({**words, "image": image or None})
    if manager == "kubernetes":
        if not image:
            raise OperatorMistake(
                "--image is missing: expected an image with Python, psfleet[trainer] and your program, such as "
                "registry.example.org/mine:1 (docs/other-managers.md)"
            )
        cluster = wanted(inventory, name, run, program, SHARED_DIR)
        text = kubernetes.render(cluster, image, size, storage_class)
    else:
        cluster = wanted(inventory, name, run, program, shared_dir or inventory.shared_dir)
        text = (slurm if manager == "slurm" else spark).render(cluster, python)
    console.answer("render", {"manager": manager, "text": text}, text.rstrip("\n"))


def _check_words(given: Mapping[str, str | None]) -> None:
    for flag, value in given.items():
        allowed, expected = WORDS[flag]
        if value is not None and not allowed.fullmatch(value):
            raise OperatorMistake(f"--{flag} is {show(value)}: expected {expected}")
