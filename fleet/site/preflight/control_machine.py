"""What the control machine lacks."""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Iterator
from pathlib import Path

from fleet.places import is_site

ANSIBLE = ((2, 19), (2, 20))
COLLECTIONS = ("ansible.posix",)
_BRINGS_IT = "`pipx install .` or `make venv` in a checkout of psfleet brings it"
# Ansible's settings that a shell or another ansible.cfg may have: the variable, what is right, and why.
SETTINGS = {
    "DEFAULT_STRATEGY": ("ANSIBLE_STRATEGY", ("linear", "debug"), "in which the hosts take each step together"),
    "DEFAULT_TRANSPORT": ("ANSIBLE_TRANSPORT", ("ssh", "smart"), "by which fab reaches the hosts too"),
    "DEFAULT_BECOME_METHOD": ("ANSIBLE_BECOME_METHOD", ("sudo",), "which fab uses too"),
    "DEFAULT_BECOME_USER": ("ANSIBLE_BECOME_USER", ("root", None), "whom the tasks are written for"),
    "ENABLE_TASK_DEBUGGER": ("ANSIBLE_ENABLE_TASK_DEBUGGER", (False,), "since a host that fails would hold up all"),
    "ANY_ERRORS_FATAL": ("ANSIBLE_ANY_ERRORS_FATAL", (False,), "so that one host that fails holds up no other"),
    "TASK_TIMEOUT": ("ANSIBLE_TASK_TIMEOUT", (0,), "since packages and wheels may take long"),
}
COMMANDS = {"rsync": "apt-get install rsync", "ssh": "apt-get install openssh-client"}


def control_problems(ansible_version: str) -> Iterator[str]:
    """List what the control machine lacks."""
    version = tuple(int(part) for part in ansible_version.split(".")[:2])
    oldest, newest = ANSIBLE
    if not oldest <= version < newest:
        yield (f"this is ansible-core {ansible_version}; psfleet is made for {oldest[0]}.{oldest[1]}. " + _BRINGS_IT)
    yield from _settings_problems()
    for collection in COLLECTIONS:
        if importlib.util.find_spec(f"ansible_collections.{collection}") is None:
            yield f"the collection {collection} is missing. The PyPI package ansible has it; {_BRINGS_IT}"
    for command, fix in COMMANDS.items():
        if shutil.which(command) is None:
            yield f"this machine has no `{command}`, which carries files to the hosts. Install it: {fix}"


def _settings_problems() -> Iterator[str]:
    import ansible.constants as settings  # which reads Ansible's settings, and takes half a second

    file = settings.CONFIG_FILE
    if file is None or not is_site(Path(file).parent):
        yield (
            f"Ansible reads its settings from {file or 'no file'} here; expected the ansible.cfg of your folder: go "
            "there, `unset ANSIBLE_CONFIG`, and let nobody else write there: `chmod o-w .`"
        )
    for name, (variable, right, why) in SETTINGS.items():
        value = getattr(settings, name)
        if (value.removeprefix("ansible.builtin.") if isinstance(value, str) else value) not in right:
            yield (
                f"Ansible's setting {name} is {value!r} here; expected {right[0]!r}, {why}: `unset {variable}`, or "
                "take it out of ansible.cfg"
            )
