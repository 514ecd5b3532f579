"""What the control machine lacks."""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Iterator

ANSIBLE = ((2, 19), (2, 20))
COLLECTIONS = ("ansible.posix",)
_BRINGS_IT = "`pipx install .` or `make venv` in a checkout of psfleet brings it"
STRATEGIES = ("linear", "debug", "ansible.builtin.linear", "ansible.builtin.debug")
COMMANDS = {"rsync": "apt-get install rsync", "ssh": "apt-get install openssh-client"}


def control_problems(ansible_version: str) -> Iterator[str]:
    """List what the control machine lacks."""
    version = tuple(int(part) for part in ansible_version.split(".")[:2])
    oldest, newest = ANSIBLE
    if not oldest <= version < newest:
        yield (f"this is ansible-core {ansible_version}; psfleet is made for {oldest[0]}.{oldest[1]}. " + _BRINGS_IT)
    strategy = _strategy()
    if strategy not in STRATEGIES:
        yield (
            f"Ansible's strategy is {strategy!r} here; expected linear, in which the hosts take each step together: "
            "`unset ANSIBLE_STRATEGY`"
        )
    for collection in COLLECTIONS:
        if importlib.util.find_spec(f"ansible_collections.{collection}") is None:
            yield f"the collection {collection} is missing. The PyPI package ansible has it; {_BRINGS_IT}"
    for command, fix in COMMANDS.items():
        if shutil.which(command) is None:
            yield f"this machine has no `{command}`, which carries files to the hosts. Install it: {fix}"


def _strategy() -> str:
    import ansible.constants as settings  # which reads Ansible's settings, and takes half a second

    return str(settings.DEFAULT_STRATEGY)
